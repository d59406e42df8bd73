"""Routed experts on eight devices equal those on one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.moe import expert_load
from moe28t_jax.parallel import AXES
from moe28t_jax.parallel.experts import expert_parallel

TOLERANCE = {"float32": 2e-4, "float64": 1e-9}
WORKER = "experts_worker.py"
MESHES = {
    "expert": {"expert": 8},
    "expert x tensor": {"expert": 4, "tensor": 2},
    "expert x tensor x context": {"expert": 2, "tensor": 2, "context": 2},
    "data x expert x tensor": {"data": 2, "expert": 2, "tensor": 2},
    "tensor": {"tensor": 8},
    "data x context": {"data": 2, "context": 4},
}
EVERY_KIND = [["home", "dense"], ["home", "ragged"], ["balanced", "dense"], ["balanced", "ragged"]]


@pytest.fixture(scope="module")
def quick(run_on_devices_once: Callable[..., Any]) -> dict[str, Any]:
    return run_on_devices_once(8, f"{WORKER}:quick")


def test_gradients_of_tokens_weights_and_float_experts(quick: dict[str, Any]) -> None:
    assert max(quick["gradients"].values()) < TOLERANCE["float32"]


def test_any_routing(quick: dict[str, Any]) -> None:
    assert quick["any routing"] < TOLERANCE["float32"]


def test_some_ranks_may_hold_no_expert(run_on_devices: Callable[..., Any]) -> None:
    """Nine experts in sixteen places: five ranks hold one or two, three hold none."""
    found = run_on_devices(
        8, f"{WORKER}:empty_places", axes=MESHES["expert x tensor"], batch=4, tokens=3, filled=9,
        kinds=[["home", "ragged"], ["balanced", "dense"]],
    )  # fmt: skip
    assert len(found) == 2
    for kind, one in found.items():
        assert one["difference"] < TOLERANCE["float64"] and one["empty"] == 0, (kind, one)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "data x context"])
def test_empty_places_on_every_mesh(run_on_devices: Callable[..., Any], mesh: str) -> None:
    filled = 1 + MESHES[mesh].get("expert", 1) * MESHES[mesh].get("tensor", 1)
    for batch, tokens in ((8, 1), (4, 6), (1, 16), (1, 1)):
        found = run_on_devices(
            8, f"{WORKER}:empty_places", axes=MESHES[mesh], batch=batch, tokens=tokens, filled=filled, kinds=EVERY_KIND
        )  # fmt: skip
        for kind, one in found.items():
            assert one["difference"] < TOLERANCE["float64"] and one["empty"] == 0, (batch, tokens, kind, one)


def test_load_counts_valid_tokens() -> None:
    chosen = jnp.asarray([[[0, 3], [3, 1], [2, 3]]], jnp.int32)
    valid = jnp.asarray([[True, True, False]])
    np.testing.assert_array_equal(expert_load(chosen, valid, 5), [1, 1, 0, 2, 0])


def test_experts_that_do_not_divide_are_refused() -> None:
    config = ModelConfig.from_hf(Path(__file__).parents[1] / "golden" / "data" / "k31_tiny_mxfp4")
    assert config.moe is not None
    mesh = AbstractMesh((1, 1, 3, 1, 1), AXES, axis_types=(AxisType.Auto,) * 5)
    count = config.moe.num_experts
    assert count % 3, "the number of experts must not divide for this test"
    zeros = jnp.zeros((3, 1, 2))
    with pytest.raises(
        ValueError, match=rf"The {count} experts do not divide over the 3 devices of .*expert 3"
    ):
        expert_parallel(
            zeros,
            zeros.astype(jnp.int32),
            zeros,
            jnp.ones((3, 1), bool),
            {},
            config,
            mesh=mesh,
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh(run_on_devices: Callable[..., Any], mesh: str) -> None:
    """Decode, prefill, one row, one token."""
    shapes = [(8, 1), (4, 6), (1, 16), (1, 1)]
    cases = [
        {"axes": MESHES[mesh], "batch": batch, "tokens": tokens, "skew": 0.3, "kinds": EVERY_KIND[::3]}
        for batch, tokens in shapes
    ]
    for shape, found in zip(
        shapes, run_on_devices(8, f"{WORKER}:several", function="compare", cases=cases), strict=True
    ):
        assert max(found.values()) < TOLERANCE["float32"], (shape, found)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", list(MESHES)[:4])
def test_values_and_gradients(run_on_devices: Callable[..., Any], mesh: str) -> None:
    types = [("float64", False), ("float32", True)]
    cases = [
        {"axes": MESHES[mesh], "batch": 4, "tokens": 6, "dtype": dtype, "skew": 0.3, "packed": packed,
         "gradients": True, "kinds": EVERY_KIND[1:3]}
        for dtype, packed in types
    ]  # fmt: skip
    for (dtype, _), found in zip(
        types, run_on_devices(8, f"{WORKER}:several", function="compare", cases=cases), strict=True
    ):
        assert max(found.values()) < TOLERANCE[dtype], (dtype, found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: " ".join(kind))
@pytest.mark.parametrize("mesh", ["expert", "expert x tensor x context"])
def test_any_routing_everywhere(run_on_devices: Callable[..., Any], mesh: str, kind: list[str]) -> None:
    """Without slack, which only the balanced placement knows, and with."""
    slacks = [0.0, 0.125] if kind[0] == "balanced" else [0.0]
    cases = [
        {"axes": MESHES[mesh], "batch": 8, "tokens": 2, "placement": kind[0], "exchange": kind[1], "examples": 200,
         "slack": slack}
        for slack in slacks
    ]  # fmt: skip
    found = run_on_devices(8, f"{WORKER}:several", function="any_routing", cases=cases)
    assert len(found) == len(slacks) and max(found) < TOLERANCE["float32"], found


@pytest.mark.slow
def test_every_bound_that_is_too_small_is_seen(run_on_devices: Callable[..., Any]) -> None:
    kinds = [["home", "rows"], ["home", "received"], ["balanced", "rows"]]
    found = run_on_devices(
        8, f"{WORKER}:too_small_bounds", axes=MESHES["expert x tensor"], batch=4, tokens=4, kinds=kinds
    )
    assert len(found) == 3 and all(found.values()), found


@pytest.mark.slow
def test_experts_of_the_full_width(run_on_devices: Callable[..., Any]) -> None:
    """Without a latent, what travels is as wide as the network and not divided."""
    found = run_on_devices(
        8, f"{WORKER}:compare", axes=MESHES["expert x tensor"], batch=4, tokens=3, latent=False, kinds=EVERY_KIND
    )  # fmt: skip
    assert max(found.values()) < TOLERANCE["float32"], found
