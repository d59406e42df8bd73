"""What `run` collects for looking inside: residual weights and the gates of delta layers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.config import ModelConfig, segments
from moe28t_jax.model import Inputs, Parameters, initialize, kda
from moe28t_jax.model.network import Result, run
from moe28t_jax.model.parameters import Weight
from pallas_kernels import delta_rule

TINY = Path(__file__).parents[1] / "golden" / "data" / "k31_tiny"
NAMES = frozenset({"residual_weights", "delta_gates", "partial_sums"})
# 8 layers in blocks of 3: three snapshots, the last block cut short.
CONFIG = ModelConfig.from_hf(
    TINY,
    {
        "attention_kinds": ("kda", "kda", "dsa", "kda") * 2,
        "mlp_kinds": ("dense", *("moe",) * 7),
        "residual_block_size": 3,
        "initializer_range": 0.2,
    },
)
IDS_BT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12))


def random_model(stacked: bool) -> Parameters:
    """Random weights; the pseudo queries too, which `initialize` leaves at 0."""
    parameters = initialize(CONFIG, jax.random.key(0), stacked=stacked)
    for segment in parameters.segments:
        for place in segment:
            for group in (place.attention_mix, place.mlp_mix):
                # A fixed vector, equal in every layer and for both ways of storing them.
                query = np.random.default_rng(1).normal(size=CONFIG.hidden_size).astype(np.float32)
                group.query = Weight(jnp.broadcast_to(jnp.asarray(query) * 0.1, group["query"].shape))
    return parameters


def collected(parameters: Parameters, names: frozenset[str]) -> Result:
    return jax.jit(lambda parameters: run(parameters, Inputs(jnp.asarray(IDS_BT)), None, CONFIG, names))(
        parameters
    )


@pytest.fixture(scope="module")
def inline() -> tuple[Parameters, Result]:
    parameters = random_model(False)
    return parameters, collected(parameters, NAMES)


def expected_weights(candidates: list[np.ndarray], group: Any) -> np.ndarray:
    direction = np.asarray(group["norm"], np.float64) * np.asarray(group["query"], np.float64)
    scores = []
    for candidate in candidates:
        wide = np.asarray(candidate, np.float64)
        rms = np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + CONFIG.rms_norm_eps)
        scores.append((wide / rms) @ direction)
    stacked = np.exp(np.stack(scores, axis=-1))
    return stacked / stacked.sum(axis=-1, keepdims=True)


def test_residual_weights_are_the_softmax_over_snapshots_and_running_sum(
    inline: tuple[Parameters, Result],
) -> None:
    parameters, result = inline
    partial = np.asarray(parameters["embedding"])[IDS_BT]
    snapshots: list[np.ndarray] = []
    spread = 0.0
    for (layer, group), auxiliary in zip(parameters.layers(CONFIG), result.auxiliary, strict=True):
        weights_BTXJ = np.asarray(auxiliary["residual_weights"])
        assert weights_BTXJ.shape == (2, 12, 2, CONFIG.num_snapshots + 1)
        np.testing.assert_allclose(weights_BTXJ.sum(axis=-1), 1, atol=1e-6)
        expected = expected_weights([*snapshots, partial], group.attention_mix)
        count = len(snapshots)
        np.testing.assert_allclose(weights_BTXJ[:, :, 0, :count], expected[..., :-1], atol=2e-5)
        np.testing.assert_allclose(weights_BTXJ[:, :, 0, -1], expected[..., -1], atol=2e-5)
        assert not weights_BTXJ[:, :, 0, count:-1].any()
        if CONFIG.starts_block(layer):
            snapshots.append(partial)
        assert not weights_BTXJ[:, :, 1, len(snapshots) : -1].any()
        assert (weights_BTXJ[:, :, 1, : len(snapshots)] > 0).all()
        partial = np.asarray(auxiliary["partial_sums"])
        spread = max(spread, float(np.ptp(expected)))
    assert spread > 0.05  # the weights are not those of a plain average


def test_scanned_layers_collect_the_same(inline: tuple[Parameters, Result]) -> None:
    parameters, result = inline
    stacked = random_model(True)
    assert stacked.stacked(CONFIG)
    # Random leaves differ between the two ways of storing: take the values of the inline tree.
    layers = dict(parameters.layers(CONFIG))
    for segment, places in zip(segments(CONFIG, True), stacked.segments, strict=True):
        for position, place in enumerate(places):
            own = [layers[segment.layer(repeat, position)] for repeat in range(segment.repeats)]
            joined = jax.tree.map(lambda *x: jnp.stack(x) if len(x) > 1 else x[0], *own)
            places[position] = jax.tree.unflatten(jax.tree.structure(place), jax.tree.leaves(joined))
    for name in ("embedding", "head", "final_norm"):
        setattr(stacked, name, Weight(parameters[name]))
    scanned = collected(stacked, NAMES)
    for layer, (found, expected) in enumerate(zip(scanned.auxiliary, result.auxiliary, strict=True)):
        assert found.keys() == expected.keys(), layer
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=2e-4, err_msg=f"{name} of layer {layer}")


def test_gates_are_what_the_delta_rule_gets(
    inline: tuple[Parameters, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, result = inline
    passed: list[tuple[jax.Array, jax.Array]] = []

    def recording(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, *more: Any) -> Any:
        passed.append((log_decay, beta))
        return delta_rule.delta_rule(q, k, v, log_decay, beta, *more)

    monkeypatch.setattr(kda, "delta_rule", SimpleNamespace(delta_rule=recording))

    @jax.jit
    def compute(parameters: Parameters) -> list[tuple[jax.Array, jax.Array]]:
        run(parameters, Inputs(jnp.asarray(IDS_BT)), None, CONFIG)
        return passed

    expected = iter(compute(parameters))
    sizes = CONFIG.kda
    assert sizes is not None and sizes.gate_lower_bound is not None
    for kind, auxiliary in zip(CONFIG.attention_kinds, result.auxiliary, strict=True):
        if kind != "kda":
            assert "log_decay" not in auxiliary and "beta" not in auxiliary
            continue
        log_decay, beta = next(expected)
        assert auxiliary["log_decay"].shape == (2, 12, sizes.num_heads, sizes.head_dim)
        assert auxiliary["beta"].shape == (2, 12, sizes.num_heads)
        assert auxiliary["log_decay"].dtype == auxiliary["beta"].dtype == jnp.float32
        np.testing.assert_allclose(auxiliary["log_decay"], log_decay, atol=1e-5)
        np.testing.assert_allclose(auxiliary["beta"], beta, atol=1e-5)
        assert (auxiliary["log_decay"] <= 0).all()
        assert (auxiliary["log_decay"] >= sizes.gate_lower_bound).all()
    assert next(expected, None) is None


def test_collecting_changes_nothing_and_is_off_by_default(inline: tuple[Parameters, Result]) -> None:
    parameters, result = inline
    plain = collected(parameters, frozenset())
    assert plain.auxiliary == [{}] * CONFIG.num_layers
    np.testing.assert_allclose(plain.hidden_BTD, result.hidden_BTD, atol=1e-5)
