"""Parameters with empty places for experts on a mesh: loaded, saved and restored."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

import moe28t_jax as m
from moe28t_jax.parallel import make_mesh
from moe28t_jax.weights import declared_values, save_orbax, save_parameters

PLACES = 24
"""Of the 16 experts of nano: two of eight devices hold none."""


def same(found: Any, wanted: Any) -> bool:
    pairs = zip(jax.tree.leaves(found.parameters), jax.tree.leaves(wanted.parameters), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def padded(found: Any, wanted: Any) -> bool:
    """The same parameters, and zeros in the places behind the experts."""
    values = zip(
        declared_values(found.parameters, found.config), declared_values(wanted.parameters, wanted.config), strict=True
    )  # fmt: skip
    for (declared, value), (_, expected) in values:
        for leaf, right in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
            leaf, right = np.asarray(leaf), np.asarray(right)
            if declared.parameter.num_experts is not None:
                count = declared.parameter.num_experts
                if leaf.shape[0] != PLACES or leaf[count:].any():
                    return False
                leaf = leaf[:count]
            if not np.array_equal(leaf, right):
                return False
    return True


def through_every_store(folder: str) -> dict[str, bool]:
    root = Path(folder)
    mesh, overrides = make_mesh({"expert": 8}), {"moe.expert_slots": PLACES}
    one = m.load("nano", dtype="float32")
    save_orbax(root / "plain", one.parameters, one.config)
    streamed = m.load("nano", mesh=mesh, dtype="float32", overrides=overrides)
    restored = m.load(root / "plain", mesh=mesh, dtype="float32", overrides=overrides)
    save_orbax(root / "padded", streamed.parameters, streamed.config)
    for name, model in (("one", one), ("many", streamed)):
        save_parameters(root / name, model.parameters, model.config)
    files = [(root / name / "model.safetensors").read_bytes() for name in ("one", "many")]
    return {
        "streamed": padded(streamed, one),
        "restored": padded(restored, one),
        "restored on one device": same(m.load(root / "padded", dtype="float32"), one),
        "restored on another mesh": same(
            m.load(root / "padded", mesh=make_mesh({"expert": 4, "tensor": 2}), dtype="float32"), one
        ),
        "public files": files[0] == files[1],
    }
