"""What is alive in a device's memory beside weights and state while a step runs.

The largest set of arrays that the network's layers need at once, as the compilers' buffer assignments show it for the
programs of `moe28t` (docs/planning.md has the comparison). Arrays that a compiler keeps in a scratchpad are counted
too; what a heap loses between arrays is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from moe28t_jax.config import ModelConfig, MoEConfig, segments
from moe28t_jax.planning.inventory import DIVISIONS, LayerKind, Stage, inventory, stages

if TYPE_CHECKING:
    from moe28t_jax.planning.memory import Work

ACTIVATION_BYTES = 2  # bfloat16
FLOAT32 = 4
PROGRAM_BYTES = 10_000_000
"""Constants, tables and what the runtime reserves."""

HOME_ROWS = 4096
"""Rows in the worst case up to which experts stay at home; beyond, some are repeated on other devices."""

SLACK = 1 / 8
"""By which part a device may exceed its share of the rows then."""

DENSE_KEYS_PER_SELECTED = 16
"""Up to this many keys per selected one, the indexer's loss scores all of them."""

# What XLA gives each product of NVIDIA's library since Hopper.
_GPU_WORKSPACE = 32 * 2**20
_SUBLANES = 16  # bfloat16 rows of a tile


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def _up(value: int, unit: int) -> int:
    return ceil_div(value, unit) * unit


def activation_bytes(config: ModelConfig, axes: Mapping[str, int], work: Work) -> int:
    """The residual stream with its snapshots, the largest layer's arrays, logits; in training what is kept for the
    backward pass (the inputs of layers, the rest is computed again) and the gradients of one layer's arrays."""
    if work.phase == "train":
        return _kept_bytes(config, axes, work) + _training_bytes(config, axes, work) + PROGRAM_BYTES
    own, alike = stages(config, axes["stage"])
    live = max(
        _live_bytes(config, stage, axes, given)
        for stage, given in ((own, work), (alike, work.whole))
        if stage is not None
    )
    moved = _moved_weights(config, axes, work)
    # Around the loop over a pipeline's turns as well as in it; the one program that was read (v6e-16x16) writes the
    # indexer's weights and the convolution windows there, 25 MB, and holds 38 MB more than this without them.
    return live + moved * (1 if axes["stage"] == 1 else 2) + PROGRAM_BYTES


def _kept_bytes(config: ModelConfig, axes: Mapping[str, int], work: Work) -> int:
    """What training keeps for the backward pass: the running sum before each layer, its tokens divided over `tensor`,
    and of repeated layers the buffer of snapshots, before and behind each that may begin a block."""
    part = ceil_div(work.tokens * config.hidden_size * ACTIVATION_BYTES, axes["tensor"])
    kept = config.num_layers + config.num_snapshots
    for segment in segments(config, True):
        if segment.repeats > 1:
            begins = [
                any(config.starts_block(segment.layer(repeat, position)) for repeat in range(segment.repeats))
                for position in range(segment.period)
            ]
            kept += segment.repeats * (1 + sum(begins)) * config.num_snapshots
    return kept * part


def _training_bytes(config: ModelConfig, axes: Mapping[str, int], work: Work) -> int:
    """What lives in the backward pass of the largest layer, or of the head: the copies of weights that it computes
    with, its arrays, and the gradients of both."""
    stream = work.tokens * config.hidden_size * ACTIVATION_BYTES
    live = [work.head_rows * ceil_div(config.vocab_size, axes["tensor"]) * FLOAT32]
    for kind, part in inventory(config).layers.items():
        copies = sum(
            ceil_div(amount.used_bytes("train"), prod(axes[axis] for axis in DIVISIONS[division]))
            for division, amount in part.items()
        )
        attention, mlp = layer_bytes(config, kind, axes, work)
        loss = _indexer_loss(config, axes, work) if kind[0] == "dsa" else 0
        live.append(copies + max(attention, mlp, loss))
    return 2 * (stream + max(live)) + _expert_gradients(config, axes, work)


def _expert_gradients(config: ModelConfig, axes: Mapping[str, int], work: Work) -> int:
    """In float32: gradients of one layer's experts, also of those that a device may repeat for others; and the masters
    of `down`, whose stack the compiler keeps a second time for its loops, turned (read from the one program so far)."""
    moe, ranks = config.moe, axes["expert"] * axes["tensor"]
    if moe is None:
        return 0
    held = max(1, moe.slots // ranks)
    _, repeated = expert_rows(moe, ranks, work.group_tokens)
    matrix = (moe.latent_size or config.hidden_size) * moe.intermediate_size * FLOAT32
    layers = config.mlp_kinds.count("moe")
    return 3 * (held + repeated) * matrix + ceil_div(layers * held * matrix, axes["data"])


def _indexer_loss(config: ModelConfig, axes: Mapping[str, int], work: Work) -> int:
    """Attention scores of one row's queries, which lie over `tensor`: of one head to all keys, their exponentials and
    the sum over heads; of long rows those of all heads to the selected keys, which are gathered for each query."""
    mla, dsa = config.mla, config.dsa
    assert mla is not None and dsa is not None
    pieces = axes["context"] * axes["tensor"]
    keys = min(work.context, DENSE_KEYS_PER_SELECTED * dsa.top_k)
    dense = 3 * ceil_div(keys, pieces) * keys * FLOAT32
    if keys == work.context:
        return dense
    row = dsa.top_k * (mla.num_heads * FLOAT32 + mla.latent_dim * ACTIVATION_BYTES)
    return max(dense, ceil_div(work.context, pieces) * row)


def _live_bytes(config: ModelConfig, stage: Stage, axes: Mapping[str, int], work: Work) -> int:
    # The buffer of snapshots, the running sum and what a sub-layer reads or has made.
    stream = (config.num_snapshots + 2) * work.tokens * config.hidden_size * ACTIVATION_BYTES
    layers = [layer_bytes(config, kind, axes, work) for kind in stage.layers]
    if work.phase == "decode":
        # The state of the next recurrent layer is fetched while experts run.
        layer = max((one for one, _ in layers), default=0) + max((other for _, other in layers), default=0)
    else:
        layer = max((max(pair) for pair in layers), default=0)
    logits = work.head_rows * ceil_div(config.vocab_size, axes["tensor"]) * FLOAT32 if stage.ends else 0
    return stream + layer + logits


def layer_bytes(config: ModelConfig, kind: LayerKind, axes: Mapping[str, int], work: Work) -> tuple[int, int]:
    """Largest set of arrays that live at once inside one layer: (attention, MLP), bytes on one device."""
    attention, mlp = kind
    if attention == "kda":
        first = _recurrent(config, axes, work)
    else:
        first = _latent_attention(config, attention == "dsa", axes, work)
    if mlp == "dense":
        return first, work.tokens * ceil_div(config.intermediate_size, axes["tensor"]) * 3 * ACTIVATION_BYTES
    return first, _experts(config, axes, work)


def _recurrent(config: ModelConfig, axes: Mapping[str, int], work: Work) -> int:
    kda = config.kda
    assert kda is not None
    heads = ceil_div(kda.num_heads, axes["tensor"])
    state = heads * kda.head_dim**2 * FLOAT32
    if work.phase == "decode":
        # One layer's slice of the stack, written in place.
        return work.tokens * state
    # q, k, v, gate and output in the activations' dtype, the decay in float32; the state before and behind.
    per_token = heads * kda.head_dim * (5 * ACTIVATION_BYTES + FLOAT32)
    return work.tokens * per_token + 2 * ceil_div(work.tokens, work.context) * state


def _latent_attention(config: ModelConfig, sparse: bool, axes: Mapping[str, int], work: Work) -> int:
    mla, tensor, a = config.mla, axes["tensor"], ACTIVATION_BYTES
    assert mla is not None
    heads = ceil_div(mla.num_heads, tensor)
    # Where the keys of a row lie on several devices, its queries go to all of them.
    holders = axes["context"] * (axes["expert"] if work.spread == "context" else 1)
    queries = work.tokens * (holders if work.phase != "decode" else 1)
    width = _up(mla.latent_dim, work.lanes)
    # Queries in the latent and the output there.
    attend = queries * heads * (width + mla.kv_lora_rank) * a
    select = 0
    if sparse:
        assert config.dsa is not None
        kept = min(config.dsa.top_k, work.context)
        attend += queries * kept * FLOAT32
        # Index queries, and positions and scores of what is selected, before and after an exchange.
        candidates = kept * 2 * FLOAT32 * (2 if holders > 1 else 1)
        index = config.dsa.num_heads * config.dsa.head_dim * a
        select = ceil_div(queries, tensor) * (index + candidates)
    merge = 0
    if holders > 1:
        # The parts of all devices are summed in float32; each keeps the sum of its own queries.
        merge = (queries + ceil_div(queries, holders)) * heads * mla.kv_lora_rank * FLOAT32
    return max(attend, select, merge)


def expert_rows(moe: MoEConfig, ranks: int, tokens: int) -> tuple[int, int]:
    """Rows that the experts of one of `ranks` devices can receive from `tokens` tokens of them all, and how many
    experts of others it may have to repeat: 0 where all rows stay at their experts' homes."""
    held, top_k = max(1, moe.slots // ranks), moe.num_experts_per_token
    owned = ceil_div(tokens, ranks)
    worst = tokens * min(top_k, held)
    if ranks == 1 or worst <= HOME_ROWS:
        return worst, 0
    return min(owned * top_k + int(owned * top_k * SLACK), tokens * min(top_k, 2 * held)), held


def _experts(config: ModelConfig, axes: Mapping[str, int], work: Work) -> int:
    moe, a = config.moe, ACTIVATION_BYTES
    assert moe is not None
    width, inner = moe.latent_size or config.hidden_size, moe.intermediate_size
    rows, repeated = expert_rows(moe, axes["expert"] * axes["tensor"], work.group_tokens)
    # What an expert reads and what it makes of it; twice, and both results, where experts are repeated.
    routed = rows * ((4 * width if repeated else width) + inner) * a
    packed = config.expert_quantization == "mxfp4" and work.phase != "train"
    expert = 3 * width * inner * 17 // 32 if packed else 3 * width * inner * a
    shared = work.tokens * ceil_div(moe.shared_size, axes["tensor"]) * 3 * a
    router = work.tokens * (2 * width * a + moe.num_experts * FLOAT32)
    return routed + repeated * expert + shared + router


def _moved_weights(config: ModelConfig, axes: Mapping[str, int], work: Work) -> int:
    """Weights of stacked layers that compilers write to another place before they multiply with them, once before the
    loop over the layers.

    On TPU stacks of narrow matrices in whole tiles: the step sizes of recurrent layers (heads in sublanes) and the
    heads' weights of the indexer (in lanes). On GPU the heads' weights of latent attention for a single token, which
    is multiplied without the library; for more, the library's workspace is counted instead.
    """
    lanes = work.lanes
    if lanes == 1 and (work.tokens > 1 or work.phase != "decode"):
        return _GPU_WORKSPACE
    total = 0
    for segment in segments(config, True):
        if segment.repeats == 1:
            continue
        kinds = [config.attention_kinds[segment.layer(0, position)] for position in range(segment.period)]
        stack = segment.repeats // axes["stage"] * config.hidden_size * ACTIVATION_BYTES
        if lanes == 1:
            mla, attention = config.mla, len(kinds) - kinds.count("kda")
            if mla is not None:
                rows = ceil_div(mla.num_heads, axes["tensor"]) * (mla.qk_nope_head_dim + mla.v_head_dim)
                total += (
                    segment.repeats // axes["stage"] * attention * rows * mla.kv_lora_rank * ACTIVATION_BYTES
                )
            continue
        heads = ceil_div(config.kda.num_heads, axes["tensor"]) if config.kda is not None else 0
        total += kinds.count("kda") * stack * _up(heads, _SUBLANES) if heads % lanes else 0
        if config.dsa is not None and config.dsa.num_heads % lanes:
            total += kinds.count("dsa") * stack * _up(config.dsa.num_heads, lanes)
    return total
