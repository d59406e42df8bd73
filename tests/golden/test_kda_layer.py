"""The delta layer against recorded outputs of independent implementations, its recurrence by each implementation of
ours: those for TPUs and GPUs run in JAX's interpreters."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from moe28t_jax.config import ModelConfig
from moe28t_jax.model import Group
from moe28t_jax.model.cache import KDACache
from moe28t_jax.model.kda import kda_attention
from pallas_kernels.delta_rule import api, gpu, tpu
from tests.golden import fixtures
from tests.golden.fixtures import altered, assert_close, read

pytestmark = pytest.mark.golden

TOLERANCE = 2e-5
DEVICES = {
    "tpu": (tpu, pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")),
    "gpu": (gpu, plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")),
}
EVERYWHERE = ["xla", "reference", *(pytest.param(name, marks=pytest.mark.slow) for name in DEVICES)]
DEVICE_SIZE = 128
"""Channels of a head that the decode kernels of devices take."""


class Layer(NamedTuple):
    config: ModelConfig
    group: Group
    run: Callable[..., tuple[jax.Array, KDACache]]

    def empty(self, batch: int) -> KDACache:
        kda = self.config.kda
        assert kda is not None
        state = batch, kda.num_heads, kda.head_dim, kda.head_dim
        window = batch, kda.conv_size - 1, 3 * kda.size
        return KDACache(jnp.zeros(state, jnp.float32), jnp.zeros(window, jnp.float32))

    def __call__(self, x: Any, cache: KDACache, lengths: Any) -> tuple[jax.Array, KDACache]:
        return self.run(self.group, x, cache, jnp.asarray(lengths, jnp.int32), self.config)


_traced: set[str] = set()
"""Implementations that a program of ours went through: which one it takes, it finds out when it is traced."""


@functools.cache
def program(implementation: str) -> Any:
    """Traced once for all tests of an implementation."""
    del implementation
    return jax.jit(lambda *arguments: kda_attention(*arguments), static_argnums=4)


@functools.cache
def recorded(name: str) -> tuple[ModelConfig, Group]:
    return fixtures.kda_layer(name)


@pytest.fixture
def layer(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Layer]]:
    """The recorded layer of a name, as it runs where the implementation that parametrises the test is the default."""
    name = request.param
    monkeypatch.setattr(api, "_DEFAULT", (name,))
    for table in ("_DELTA_RULE", "_FUSED_STEP"):
        function = getattr(api, table)[name]
        if name in DEVICES:
            module, interpret = DEVICES[name]
            function = functools.partial(getattr(module, table[1:].lower()), interpret=interpret)

        def call(*arguments: Any, function: Callable[..., Any] = function, **options: Any) -> Any:
            _traced.add(name)
            return function(*arguments, **options)

        monkeypatch.setattr(api, table, {**getattr(api, table), name: call})
    yield lambda fixture: Layer(*recorded(fixture), program(name))
    assert name in _traced


def everywhere(function: Callable[..., None]) -> Any:
    return pytest.mark.parametrize("layer", EVERYWHERE, indirect=True)(function)


def assert_cache(cache: KDACache, state: Any, window: Any, what: str) -> None:
    assert_close(cache.state_BHKV, state, TOLERANCE, f"{what}: state")
    assert_close(cache.window_BWC, window, TOLERANCE, f"{what}: convolution window")


@everywhere
def test_output_and_states_at_the_cuts(layer: Callable[[str], Layer]) -> None:
    kda = layer("kda_layer_k3")
    tensors, meta = read("kda_layer_k3")
    x = jnp.asarray(tensors["x"])
    batch, count, _ = x.shape
    # One compiled shape for all cuts: the tokens after a cut are padding.
    for cut in meta["cuts"]:
        y, cache = kda(x, kda.empty(batch), [cut] * batch)
        assert_close(y[:, :cut], tensors["y"][:, :cut], TOLERANCE, f"y up to {cut}")
        assert_cache(cache, tensors[f"kda_state_{cut}"], tensors[f"conv_state_{cut}"], f"after {cut}")
    assert meta["cuts"][-1] == count


@everywhere
def test_continues_from_a_given_state(layer: Callable[[str], Layer]) -> None:
    kda = layer("kda_layer_k3")
    tensors, _ = read("kda_layer_k3")
    y_init = tensors["y_init"]
    batch, count, _ = y_init.shape
    x = jnp.asarray(tensors["x"][:, :count])
    cache = KDACache(jnp.asarray(tensors["init_kda_state"]), jnp.asarray(tensors["init_conv_state"]))
    y, cache = kda(x, cache, [count] * batch)
    assert_close(y, y_init, TOLERANCE, "y")
    final = tensors["final_kda_state_init"], tensors["final_conv_state_init"]
    assert_cache(cache, *final, "at the end")


@everywhere
def test_rows_of_different_lengths(layer: Callable[[str], Layer]) -> None:
    kda = layer("kda_layer_k3")
    tensors, _ = read("kda_layer_k3")
    x, lengths = jnp.asarray(tensors["x"]), tensors["lengths"]
    y, cache = kda(x, kda.empty(x.shape[0]), lengths)
    for row, length in enumerate(lengths):
        assert_close(y[row, :length], tensors["y_lengths"][row, :length], TOLERANCE, f"row {row}")
        one = jax.tree.map(lambda a, row=row: a[row : row + 1], cache)
        assert_cache(one, tensors[f"len_kda_state_{row}"], tensors[f"len_conv_state_{row}"], f"row {row}")


@everywhere
def test_softplus_gate_and_low_rank_output_gate(layer: Callable[[str], Layer]) -> None:
    kda = layer("kda_layer_kimi_linear")
    assert kda.config.kda is not None
    assert kda.config.kda.gate_lower_bound is None and not kda.config.kda.full_rank_gate
    tensors, _ = read("kda_layer_kimi_linear")
    x = jnp.asarray(tensors["x"])
    y, _ = kda(x, kda.empty(x.shape[0]), [x.shape[1]] * x.shape[0])
    assert_close(y, tensors["y"], TOLERANCE, "y")


# -- token by token ----------------------------------------------------------------------------------------------
def run_token_by_token(
    kda: Layer, until: int, seen_as: Callable[[KDACache], KDACache] = lambda cache: cache
) -> None:
    tensors, meta = read("kda_layer_k3")
    x = jnp.asarray(tensors["x"])
    batch = x.shape[0]
    cache, rows = kda.empty(batch), []
    cuts = [cut for cut in meta["cuts"] if cut <= until]
    assert cuts
    for token in range(max(cuts)):
        y, cache = kda(x[:, token : token + 1], cache, [1] * batch)
        rows.append(y)
        if token + 1 in cuts:
            cut = token + 1
            state, window = tensors[f"kda_state_{cut}"], tensors[f"conv_state_{cut}"]
            assert_cache(seen_as(cache), state, window, f"after {cut}")
    y = jnp.concatenate(rows, axis=1)
    assert_close(y, tensors["y"][:, : y.shape[1]], TOLERANCE, "y")


@pytest.mark.parametrize("layer", ["xla", "reference"], indirect=True)
def test_token_by_token(layer: Callable[[str], Layer]) -> None:
    run_token_by_token(layer("kda_layer_k3"), 65)


def with_more_channels(kda: Layer) -> Layer:
    """The same layer with heads of DEVICE_SIZE channels, the added ones always zero.

    q is scaled by the root of the channels and the output's norm divides by their number: with r times the channels,
    the output o becomes o / sqrt(r) and its mean square a share 1 / r^2, which a gain of 1 / sqrt(r) and an epsilon
    of 1 / r^2 make up for.
    """
    config = kda.config
    assert config.kda is not None
    heads, size, ratio = config.kda.num_heads, config.kda.head_dim, DEVICE_SIZE / config.kda.head_dim

    def padded(axis: int) -> Callable[[jax.Array], jax.Array]:
        def change(x: jax.Array) -> jax.Array:
            at = axis % x.ndim
            by_head = x.reshape(*x.shape[:at], heads, size, *x.shape[at + 1 :])
            widths = [(0, 0)] * by_head.ndim
            widths[at + 1] = (0, DEVICE_SIZE - size)
            return jnp.pad(by_head, widths).reshape(*x.shape[:at], heads * DEVICE_SIZE, *x.shape[at + 1 :])

        return change

    outputs = [f"{name}_proj" for name in ("q", "k", "v", "f_b", "g")] + [f"{name}_conv" for name in "qkv"]
    group = altered(
        kda.group,
        **{name: padded(-1) for name in outputs},
        o_proj=padded(0),
        dt_bias=lambda x: jnp.pad(x, ((0, 0), (0, DEVICE_SIZE - size))),
        o_norm=lambda x: jnp.pad(x * ratio**-0.5, (0, DEVICE_SIZE - size)),
    )
    changes = {"kda.head_dim": DEVICE_SIZE, "rms_norm_eps": config.rms_norm_eps / ratio**2}
    return kda._replace(config=config.override(changes), group=group)


@pytest.mark.parametrize(
    ("layer", "until"),
    [("xla", 1), *((name, 1) for name in DEVICES)]
    + [pytest.param(name, 65, marks=pytest.mark.slow) for name in DEVICES],
    indirect=["layer"],
)
def test_token_by_token_with_heads_of_the_kernels_size(layer: Callable[[str], Layer], until: int) -> None:
    kda = layer("kda_layer_k3")
    assert kda.config.kda is not None
    size = kda.config.kda.head_dim

    def with_fewer_channels(cache: KDACache) -> KDACache:
        state, window = np.asarray(cache.state_BHKV), np.asarray(cache.window_BWC)
        window = window.reshape(*window.shape[:2], -1, DEVICE_SIZE)
        assert not state[:, :, size:].any() and not state[..., size:].any() and not window[..., size:].any()
        kept = window[..., :size].reshape(*window.shape[:2], -1)
        return KDACache(jnp.asarray(state[:, :, :size, :size]), jnp.asarray(kept))

    run_token_by_token(with_more_channels(kda), until, with_fewer_channels)
