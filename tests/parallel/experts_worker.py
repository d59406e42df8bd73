"""Runs on several virtual devices: routed experts on a mesh against the same on one device."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.moe import routed_experts
from moe28t_jax.model.parameters import Group, attach
from moe28t_jax.parallel import AXES, experts_dispatch, experts_rows, pad_experts
from moe28t_jax.parallel.experts import expert_parallel
from moe28t_jax.parallel.mesh import make_mesh
from pallas_kernels import mxfp4_matmul

DATA = Path(__file__).parents[1] / "golden" / "data"
EXPERTS, TOP_K, WIDTH, INNER, LAYERS, LAYER = 16, 4, 64, 32, 3, 1

Arrays = dict[str, Any]


def configuration(latent: bool = True) -> ModelConfig:
    fields = {"moe.num_experts": EXPERTS, "moe.num_experts_per_token": TOP_K, "moe.intermediate_size": INNER}
    hidden = {"moe.latent_size": WIDTH} if latent else {"moe.latent_size": None, "moe.latent_norm": False}
    return ModelConfig.from_hf(DATA / "k31_tiny_mxfp4", fields | hidden)


def some_experts(dtype: Any, packed: bool, seed: int = 0) -> Arrays:
    """Stacks of `LAYERS` layers."""
    random = np.random.default_rng(seed)

    def one(inputs: int, outputs: int) -> Any:
        values = random.normal(size=(LAYERS, EXPERTS, inputs, outputs)) * inputs**-0.5
        if packed:
            return mxfp4_matmul.quantize(jnp.asarray(values.swapaxes(-1, -2), jnp.float32)).to_layout(
                "packed_kn"
            )
        return jnp.asarray(values, dtype)

    return {"gate": one(WIDTH, INNER), "up": one(WIDTH, INNER), "down": one(INNER, WIDTH)}


def some_tokens(batch: int, tokens: int, dtype: Any, skew: float = 0.0, seed: int = 1) -> Arrays:
    """Rows, routing and validity; `skew` makes low expert numbers more likely."""
    random = np.random.default_rng(seed)
    scores = random.gumbel(size=(batch, tokens, EXPERTS)) - skew * np.arange(EXPERTS)
    chosen = np.argsort(-scores, axis=-1)[..., :TOP_K]
    weights = random.uniform(0.1, 1, size=chosen.shape)
    valid = random.uniform(size=(batch, tokens)) < 0.8
    return {
        "x": jnp.asarray(random.normal(size=(batch, tokens, WIDTH)), dtype),
        "chosen": jnp.asarray(chosen, jnp.int32),
        "weights": jnp.asarray(weights, dtype),
        "valid": jnp.asarray(valid | (np.arange(tokens) == 0)),
    }


def on_one_device(tokens: Arrays, experts: Arrays, config: ModelConfig) -> Any:
    group = Group()
    for name, value in experts.items():
        attach(group, name, value)
    flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in tokens.items()}
    y = routed_experts(
        group, flat["x"], flat["chosen"], flat["weights"], flat["valid"], config, jnp.int32(LAYER)
    )
    return y.reshape(tokens["x"].shape)


def on_mesh(tokens: Arrays, experts: Arrays, config: ModelConfig, **options: Any) -> Any:
    y, _ = expert_parallel(
        tokens["x"], tokens["chosen"], tokens["weights"], tokens["valid"], experts, config, jnp.int32(LAYER), **options
    )  # fmt: skip
    return y


@contextmanager
def ragged_on_cpu() -> Iterator[None]:
    """`ragged_all_to_all`, which XLA has not for CPUs, by its documentation. What breaks its rules gives NaN."""

    def emulated(
        operand: Any, output: Any, starts: Any, sent: Any, targets: Any, received: Any, *, axis_name: Any
    ) -> Any:
        me = lax.axis_index(axis_name)
        ranks = lax.axis_size(axis_name)
        per_rank = starts.shape[0] // ranks
        everything = [lax.all_gather(a, axis_name) for a in (operand, starts, sent, targets)]
        row = jnp.arange(output.shape[0], dtype=jnp.int32)

        def take(turn: Any, carry: Any) -> Any:
            result, good = carry
            source, update = turn // per_rank, turn % per_rank
            mine = me * per_rank + update
            operands, start, size, target = (a[source] for a in everything)
            start, size, target = start[mine], size[mine], target[mine]
            good &= size == received[turn]
            good &= (size == 0) | ((start + size <= operand.shape[0]) & (target + size <= output.shape[0]))
            inside = (row >= target) & (row < target + size)
            values = operands.at[row - target + start].get(mode="fill", fill_value=0)
            return jnp.where(inside.reshape(-1, *[1] * (output.ndim - 1)), values, result), good

        result, good = lax.fori_loop(0, starts.shape[0], take, (output, jnp.bool_(True)))
        if not jnp.issubdtype(result.dtype, jnp.inexact):
            return result
        return jnp.where(good, result, jnp.nan)

    real = lax.ragged_all_to_all
    lax.ragged_all_to_all = emulated
    try:
        yield
    finally:
        lax.ragged_all_to_all = real


def difference(left: Any, right: Any) -> float:
    """Largest absolute difference; infinite where one is not finite."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.max(np.abs(a - b), initial=0)) if np.isfinite(a - b).all() else np.inf)
    return worst


def compare(
    axes: dict[str, int],
    batch: int,
    tokens: int,
    dtype: str = "float32",
    packed: bool = True,
    skew: float = 0.0,
    gradients: bool = False,
    latent: bool = True,
    stacked_layer: bool = True,
    kinds: tuple[tuple[str, str], ...] = (("home", "dense"), ("balanced", "ragged")),
) -> dict[str, float]:
    """Differences between a mesh and one device, per placement and exchange."""
    with jax.enable_x64(dtype == "float64"), ragged_on_cpu():
        config = configuration(latent)
        experts = some_experts(dtype, packed)
        routed = some_tokens(batch, tokens, dtype, skew)
        x, weights = routed.pop("x"), routed.pop("weights")
        direction = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), dtype)

        def loss(run: Callable[..., Any], differentiable: Arrays) -> tuple[Any, Any]:
            merged = experts if packed else differentiable["experts"]
            parts = {"x": differentiable["x"], "weights": differentiable["weights"], **routed}
            y = run(parts, merged, config)
            return jnp.sum(y * direction), y

        differentiable = {"x": x, "weights": weights} | ({} if packed else {"experts": experts})

        def evaluate(run: Callable[..., Any]) -> Any:
            function = functools.partial(loss, run)
            if gradients:
                function = jax.value_and_grad(function, has_aux=True)
            return jax.jit(function)(differentiable)

        wanted = evaluate(on_one_device)
        found = {}
        with jax.set_mesh(make_mesh(axes)):
            for placement, exchange in kinds:
                # Exact shares repeat experts whatever the sizes.
                options = {"placement": placement, "exchange": exchange, "slack": 0.0}
                result = evaluate(functools.partial(on_mesh, **options))
                found[f"{placement}, {exchange}"] = difference(result, wanted)
        return found


def with_empty_places(
    axes: dict[str, int], batch: int, tokens: int, filled: int, kinds: tuple[tuple[str, str], ...]
) -> dict[str, dict[str, float]]:
    """`filled` experts in more places, so that some ranks hold none, against the same experts alone on one device:
    values, gradients of what exists, and the largest gradient of an empty place."""
    few = configuration().override({"moe.num_experts": filled})
    padded = pad_experts(few, axes | dict.fromkeys(set(AXES) - set(axes), 1))
    assert padded.moe is not None and padded.moe.slots > filled
    experts = {name: stack[:, :filled] for name, stack in some_experts("float64", packed=False).items()}
    empty = padded.moe.slots - filled
    places = {name: jnp.pad(stack, [(0, 0), (0, empty), (0, 0), (0, 0)]) for name, stack in experts.items()}
    parts = some_tokens(batch, tokens, "float64", skew=0.3)
    parts["chosen"] = jnp.argsort(jax.random.uniform(jax.random.key(0), (batch, tokens, filled)), axis=-1)[
        ..., :TOP_K
    ].astype(jnp.int32)
    direction = jnp.asarray(np.random.default_rng(2).normal(size=parts["x"].shape))

    def evaluate(run: Callable[..., Any], experts: Arrays, config: ModelConfig) -> Any:
        def loss(x: Any, weights: Any, experts: Arrays) -> tuple[Any, Any]:
            y = run(parts | {"x": x, "weights": weights}, experts, config)
            return jnp.sum(y * direction), y

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(
            parts["x"], parts["weights"], experts
        )

    wanted = evaluate(on_one_device, experts, few)
    found = {}
    with jax.set_mesh(make_mesh(axes)), ragged_on_cpu():
        for placement, exchange in kinds:
            run = functools.partial(on_mesh, placement=placement, exchange=exchange, slack=0.0)
            (value, y), (x, weights, slopes) = evaluate(run, places, padded)
            real = {name: slope[:, :filled] for name, slope in slopes.items()}
            found[f"{placement}, {exchange}"] = {
                "difference": difference(((value, y), (x, weights, real)), wanted),
                "empty": max(float(jnp.max(jnp.abs(slope[:, filled:]))) for slope in slopes.values()),
            }
    return found


def empty_places(**arguments: Any) -> dict[str, dict[str, float]]:
    with jax.enable_x64(True):
        return with_empty_places(**arguments)


COMBINATIONS = list(itertools.combinations(range(EXPERTS), TOP_K))


def every_expert(x: Any, experts: Arrays, config: ModelConfig) -> np.ndarray:
    """[E, B, T, L]: what each expert makes of each token, by plain products in float64."""

    def matrix(name: str) -> np.ndarray:
        w = experts[name]
        if isinstance(w, mxfp4_matmul.MXFP4Tensor):
            w = w.dequantize(jnp.float32).swapaxes(-1, -2)
        return np.asarray(w, np.float64)[LAYER]

    x = np.asarray(x, np.float64)
    gate, up = (np.einsum("btl,elf->ebtf", x, matrix(name)) for name in ("gate", "up"))
    beta, linear_beta = config.situ_beta, config.situ_linear_beta
    assert config.activation == "situ" and beta is not None and linear_beta is not None
    hidden = beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * linear_beta * np.tanh(up / linear_beta)
    return np.einsum("ebtf,efl->ebtl", hidden, matrix("down"))


def any_routing(
    axes: dict[str, int],
    batch: int,
    tokens: int,
    placement: str,
    exchange: str,
    examples: int = 40,
    slack: float = 0.0,
) -> float:
    """The largest difference from plain products over many routings, one program for all of them."""
    config = configuration()
    experts = some_experts("float32", packed=True)
    given_tokens = some_tokens(batch, tokens, "float32")
    table = every_expert(given_tokens["x"], experts, config)
    count = batch * tokens
    worst = 0.0

    with jax.set_mesh(make_mesh(axes)), ragged_on_cpu():

        @jax.jit
        def run(chosen: Any, weights: Any, valid: Any) -> Any:
            parts = {"x": given_tokens["x"], "chosen": chosen, "weights": weights, "valid": valid}
            return on_mesh(parts, experts, config, placement=placement, exchange=exchange, slack=slack)

        # As many different choices as wanted, from one for all tokens to one for each.
        choices = st.integers(1, count).flatmap(
            lambda distinct: st.lists(
                st.integers(0, len(COMBINATIONS) - 1), min_size=distinct, max_size=distinct
            )
        )
        valids = st.one_of(st.just([True] * count), st.lists(st.booleans(), min_size=count, max_size=count))

        @settings(max_examples=examples, deadline=None, derandomize=True)
        @given(choices, valids, st.booleans())
        @example([0], [True] * count, False)  # all tokens to the first experts
        @example([len(COMBINATIONS) - 1], [True] * count, True)  # all tokens to the last experts
        @example([0], [True] + [False] * (count - 1), False)  # one token in the whole batch
        @example([5, 700], [False] * (count - 1) + [True], True)
        @example([0], [False] * count, False)  # none
        def check(choices: list[int], valid: list[bool], falling: bool) -> None:
            nonlocal worst
            chosen = np.array([COMBINATIONS[choices[token % len(choices)]] for token in range(count)])
            chosen = (chosen[:, ::-1] if falling else chosen).reshape(batch, tokens, TOP_K).astype(np.int32)
            weights = np.linspace(0.1, 1, chosen.size, dtype=np.float32).reshape(chosen.shape)
            valids = np.array(valid).reshape(batch, tokens)
            y = run(chosen, weights, valids)
            wanted = np.zeros(given_tokens["x"].shape)
            for row, token in zip(*np.nonzero(valids), strict=True):
                wanted[row, token] = weights[row, token] @ table[chosen[row, token], row, token]
            error = difference(y, wanted)
            worst = max(worst, error)
            assert error < 2e-4, (error, chosen.tolist(), valids.tolist())

        check()
    return worst


def too_small_bounds(
    axes: dict[str, int], batch: int, tokens: int, kinds: tuple[tuple[str, str], ...]
) -> dict[str, bool]:
    """Whether a bound that is one too small is noticed: all tokens choose experts of one rank, none is padding.

    kinds: placements, and which of their bounds.
    """
    config = configuration()
    experts = some_experts("float32", packed=True)
    parts = some_tokens(batch, tokens, "float32")
    parts["chosen"] = jnp.broadcast_to(jnp.arange(TOP_K, dtype=jnp.int32), parts["chosen"].shape)
    parts["valid"] = jnp.ones_like(parts["valid"])
    noticed = {}
    right = experts_dispatch.bounds
    with jax.set_mesh(make_mesh(axes)):
        for placement, field in kinds:

            def smaller(*sizes: Any, field: str = field) -> Any:
                limits = right(*sizes)
                return dataclasses.replace(limits, **{field: getattr(limits, field) - 1})

            experts_dispatch.bounds = smaller
            try:
                run = functools.partial(on_mesh, placement=placement, exchange="dense", slack=0.0)
                y = jax.jit(run, static_argnums=2)(parts, experts, config)
            finally:
                experts_dispatch.bounds = right
            noticed[f"{placement}, {field}"] = bool(np.isnan(np.asarray(y)).any())
    return noticed


def several(function: str, cases: list[dict[str, Any]]) -> list[Any]:
    """A function of this file for several arguments, in one process."""
    return [globals()[function](**case) for case in cases]


def quick() -> dict[str, Any]:
    """What the fast suite looks at, in one process: rows that are counted, as many are, and rows that are sorted."""
    axes = {"expert": 4, "tensor": 2}
    sorted_at_most = experts_rows._SORTED_AT_MOST
    experts_rows._SORTED_AT_MOST = 0
    try:
        gradients = compare(
            axes, 4, 3, packed=False, gradients=True, skew=0.5, kinds=(("balanced", "dense"),)
        )
    finally:
        experts_rows._SORTED_AT_MOST = sorted_at_most
    return {"gradients": gradients, "any routing": any_routing(axes, 4, 3, "balanced", "ragged")}
