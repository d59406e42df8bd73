"""How the Mosaic GPU kernels of the gated delta rule go through a row's tokens, forwards or backwards in time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._typing import Array
from pallas_kernels.delta_rule._gpu_step import load, store
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE

GROUP = 16
"""Tokens that are copied together. A sequence has at least as many; the last group overlaps the one before."""

BUFFERS = 2
"""Groups in shared memory: the one that is read, and the next."""

_GROUPS_PER_CHUNK = CHUNK_SIZE // GROUP

_ALIGNMENT = 128
"""Bytes: where an asynchronous copy may begin to write. A group of anything but scalars fills whole multiples."""

# Of a group's tokens by channels: four rows of 32 neighbouring channels at once, one row for each warp.
TOKENS = plgpu.Layout.TILED(plgpu.Tiling(((4, 32), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
PER_TOKEN = TOKENS.reduce(1)


def loop(start: Any, stop: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`jax.lax.fori_loop` on 32-bit indices."""
    return jax.lax.fori_loop(jnp.int32(start), jnp.int32(stop), body, carry)


def buffers(arrays: Mapping[str, Any], widths: Mapping[str, int]) -> list[Any]:
    """Shared memory for `walk`: the groups of every array, and the barriers; no width for one value per token."""

    def buffer(name: str, x: Any) -> Any:
        if name in widths:
            return plgpu.SMEM((BUFFERS, GROUP, widths[name]), x.dtype)
        return plgpu.SMEM((BUFFERS, max(GROUP, _ALIGNMENT // x.dtype.itemsize)), x.dtype)

    return [
        {name: buffer(name, x) for name, x in arrays.items()},
        plgpu.Barrier(num_arrivals=len(arrays), num_barriers=BUFFERS),
    ]


def widened_decay(near: Mapping[str, Any], slot: Any, channels: int) -> Array:
    """[GROUP, K] of exp(log decay), zero where the state is reset."""
    decay_CK = jnp.exp(load(near["g"].at[slot], TOKENS))
    if "keep" in near:
        keep_C = load(near["keep"].at[slot, pl.ds(0, GROUP)], PER_TOKEN)
        spread = jax.lax.broadcast_in_dim(keep_C, (GROUP, channels), (0,))
        decay_CK = decay_CK * plgpu.layout_cast(spread, TOKENS)
    return decay_CK


def widen(near: Mapping[str, Any], slot: Any, wide: Mapping[str, Any]) -> None:
    """A group's q, k and decays in float32, and the products of each q with its own k, whichever `wide` has."""
    found = {name: load(near[name].at[slot], TOKENS) for name in "qk" if name in wide}
    for name, x_CK in found.items():
        store(wide[name], x_CK)
    store(wide["decay"], widened_decay(near, slot, wide["decay"].shape[-1]))
    if "own" in wide:
        store(wide["own"], plgpu.layout_cast(jnp.sum(found["q"] * found["k"], axis=1), PER_TOKEN))


def walk(
    sources: Mapping[str, Callable[[Any], Any]],
    near: Mapping[str, Any],
    barriers: Any,
    wide: Mapping[str, Any],
    length: Any,
    tokens: int,
    one_token: Callable[[Any, Any, Any, Array], Array],
    carry: Array,
    at_chunk: Callable[[Any, Array], Array] | None = None,
    backward: bool = False,
) -> Array:
    """Carries a state through the first `length` tokens.

    Args:
      sources: by name, the part of an array in global memory that holds a slice of tokens.
      near: `buffers` for them, filled by asynchronous copies, two groups ahead.
      barriers: one for each buffer.
      wide: what `widen` makes of a group for all its tokens.
      length: tokens to go through.
      tokens: tokens in the arrays, at least GROUP.
      one_token: of the token, its buffer, its place there and the state: the next state.
      carry: the first state.
      at_chunk: of a chunk and the state at its end: the state to go on with. Called for every chunk of `tokens`.
      backward: from the last token to the first.
    """
    groups = (length + GROUP - 1) // GROUP
    chunks = pl.cdiv(tokens, CHUNK_SIZE)

    def group_at(place: Any) -> Any:
        return groups - 1 - place if backward else place

    def first_token(group: Any) -> Any:
        return jnp.minimum(group * GROUP, tokens - GROUP)

    def fetch(place: Any) -> None:
        here = pl.ds(first_token(group_at(place)), GROUP)
        slot = place & (BUFFERS - 1)
        for name, source in sources.items():
            destination = near[name].at[slot, pl.ds(0, GROUP)]
            plgpu.copy_gmem_to_smem(source(here), destination, barriers.at[slot])

    for early in range(BUFFERS):
        pl.when(early < groups)(lambda early=early: fetch(jnp.int32(early)))

    def one_group(place: Any, carry: Array) -> Array:
        slot, group = place & (BUFFERS - 1), group_at(place)
        plgpu.barrier_wait(barriers.at[slot])
        widen(near, slot, wide)
        # A barrier: the tokens read what other threads have widened.
        plgpu.commit_smem()
        copied, start = first_token(group), group * GROUP
        stop = jnp.minimum(start + GROUP, length)

        def at(i: Any, carry: Array) -> Array:
            t = start + stop - 1 - i if backward else i
            return one_token(t, slot, t - copied, carry)

        carry = loop(start, stop, at, carry)
        # A barrier, and a fence: what was read here is overwritten next, by a copy and by other threads.
        plgpu.commit_smem()
        pl.when(place + BUFFERS < groups)(lambda: fetch(place + BUFFERS))
        return carry

    if at_chunk is None:
        return loop(0, groups, one_group, carry)

    def one_chunk(i: Any, carry: Array) -> Array:
        n = chunks - 1 - i if backward else i
        first, last = (jnp.minimum((n + i) * _GROUPS_PER_CHUNK, groups) for i in range(2))
        if backward:
            return loop(groups - last, groups - first, one_group, at_chunk(n, carry))
        return at_chunk(n, loop(first, last, one_group, carry))

    return loop(0, chunks, one_chunk, carry)
