"""How many bytes one device holds: weights, state, activations.

The division is that of the mesh axes: experts over `expert` x `tensor` folded; other matrices over `tensor`; recurrent
states by head over `tensor`; rows over `data` and, like long rows' tokens, over `expert`; tokens over `context`; layers
that repeat over `stage`. Whatever an axis does not divide, it repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moe28t_jax.config import ModelConfig
from moe28t_jax.planning.activations import ACTIVATION_BYTES, FLOAT32, activation_bytes, ceil_div
from moe28t_jax.planning.inventory import (
    DIVISIONS,
    Division,
    LayerKind,
    Stage,
    held,
    inventory,
    master_pieces,
)

Phase = Literal["prefill", "decode", "train"]
Rows = Literal["batch", "context"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "train")

CACHE_BYTES = 2  # latents, index keys and convolution windows follow the activations' dtype

# Per parameter, of `training.step.adamw`: the first moment is kept in bfloat16, the second in float32.
MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = FLOAT32, 2 + FLOAT32, FLOAT32


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one sequence needs: `recurrent` and `window` whatever its length, the rest by token."""

    recurrent: int
    window: int
    latents: int
    index_keys: int

    @property
    def total(self) -> int:
        return self.recurrent + self.window + self.latents + self.index_keys


def state_bytes(config: ModelConfig, context: int, lanes: int = 1) -> StateBytes:
    """The hybrid cache of one sequence of `context` tokens (bfloat16; recurrent states float32); rows of latents take a
    multiple of `lanes` channels."""
    counts = {kind: config.attention_kinds.count(kind) for kind in ("kda", "mla", "dsa")}
    recurrent = window = latents = keys = 0
    if config.kda is not None:
        recurrent = counts["kda"] * config.kda.size * config.kda.head_dim * FLOAT32
        window = counts["kda"] * (config.kda.conv_size - 1) * 3 * config.kda.size * CACHE_BYTES
    if config.mla is not None:
        channels = ceil_div(config.mla.latent_dim, lanes) * lanes
        latents = (counts["mla"] + counts["dsa"]) * context * channels * CACHE_BYTES
    if config.dsa is not None:
        keys = counts["dsa"] * context * config.dsa.head_dim * CACHE_BYTES
    return StateBytes(recurrent, window, latents, keys)


@dataclass(frozen=True)
class Work:
    """What one device is given, in rows and tokens.

    context: tokens of a whole row. rows: whose state it holds. cached: how many tokens of each row it holds. tokens:
    how many new tokens its dense layers see in one step. group_tokens: how many go through the experts that it shares
    with its expert x tensor group. routed: rows that its own experts receive on average; routed_bound: the most they
    can receive. head_rows: rows of logits. microbatches: how often a pipeline stage has work per step, each time for so
    many tokens; step_tokens: tokens of the whole mesh per step. lanes: see `state_bytes`.
    """

    phase: Phase
    spread: Rows
    context: int
    rows: int
    cached: int
    tokens: int
    group_tokens: int
    routed: int
    routed_bound: int
    head_rows: int
    microbatches: int
    step_tokens: int
    lanes: int

    @property
    def whole(self) -> Work:
        """The same, all microbatches at once."""
        count = self.microbatches
        return replace(
            self, tokens=self.tokens * count, group_tokens=self.group_tokens * count, routed=self.routed * count,
            routed_bound=self.routed_bound * count, head_rows=self.head_rows * count, microbatches=1,
        )  # fmt: skip


def decode_spread(batch: int, axes: Mapping[str, int]) -> Rows:
    """What `expert` carries in decode and training: rows where `data` x `expert` divides them, else the tokens of long
    rows."""
    return "batch" if batch % (axes["data"] * axes["expert"]) == 0 else "context"


def divide_work(
    config: ModelConfig,
    axes: Mapping[str, int],
    phase: Phase,
    batch: int,
    context: int,
    chunk: int,
    spread: Rows,
    lanes: int = 1,
) -> Work:
    """Rows and tokens of the busiest device. `spread`: whether `expert` carries rows or the tokens of long rows; see
    `decode_spread` for decode and training; a prefill chunk is always divided by tokens. Rows that `data` does not
    divide are repeated over it, and in training tokens of a row that their axes do not divide."""
    data, expert, context_axis = (axes[axis] for axis in ("data", "expert", "context"))
    as_rows, as_tokens = (expert, 1) if spread == "batch" else (1, expert)
    if batch % data:
        data = 1
    rows = ceil_div(batch, data * as_rows)
    whole = phase == "train" and context % (context_axis * as_tokens) != 0
    cached = context if whole else ceil_div(context, context_axis * as_tokens)
    microbatches = 1
    if phase == "decode":
        # One microbatch, whatever the stages: see `model.pipeline.num_microbatches`.
        tokens = head_rows = rows
        group = min(tokens * as_rows, ceil_div(batch, data))
        step_tokens = batch
    elif phase == "prefill":
        new = min(chunk, context)
        tokens = ceil_div(new, expert * context_axis)
        group = tokens * expert
        head_rows = 1
        step_tokens = new * data
    else:
        # A step takes all rows at once; through pipeline stages, of which it has none yet, they would go one by one.
        microbatches = rows if axes["stage"] > 1 else 1
        tokens = head_rows = rows // microbatches * cached
        group = tokens * (as_rows if whole else expert)
        step_tokens = batch * context
    routed = bound = 0
    if config.moe is not None:
        ranks = expert * axes["tensor"]
        held = config.moe.slots // ranks
        routed = ceil_div(group * config.moe.num_experts_per_token * held, config.moe.num_experts)
        bound = routed
        if phase == "decode":
            # Without balanced placement all tokens may choose experts of one device.
            bound = group * min(config.moe.num_experts_per_token, held)
    return Work(
        phase,
        spread,
        context,
        rows,
        cached,
        tokens,
        group,
        routed,
        bound,
        head_rows,
        microbatches,
        step_tokens,
        lanes,
    )


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one device. `limit` is what the compiler lets a program use."""

    weights: int
    state: int
    activations: int
    limit: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def weight_bytes(stage: Stage, axes: Mapping[str, int], phase: Phase = "decode") -> dict[Division, int]:
    """Bytes of a stage's weights on one of its devices, by division, as they compute."""
    return {
        division: ceil_div(amount.used_bytes(phase), split(division, axes))
        for division, amount in stage.part.items()
    }


def split(division: Division, axes: Mapping[str, int]) -> int:
    """Into how many pieces the mesh cuts a parameter of this division."""
    pieces = 1
    for axis in DIVISIONS[division]:
        pieces *= axes[axis]
    return pieces


def trained_parameters(config: ModelConfig, stage: Stage, axes: Mapping[str, int]) -> int:
    """Parameters, without the image tower, of which one device of a stage holds masters, moments and gradients."""
    declared = inventory(config).declared

    def held_of(kind: LayerKind | None) -> int:
        return sum(ceil_div(one.size, master_pieces(one, axes)) for one in declared[kind])

    layers = sum(count * held_of(kind) for kind, count in stage.layers.items())
    return layers + (held_of(None) if stage.ends else 0)


def cache_bytes(config: ModelConfig, stage: Stage, axes: Mapping[str, int], work: Work) -> int:
    """Bytes of the hybrid cache of a stage's layers on one of its devices."""
    result = 0
    for (attention, _), count in stage.layers.items():
        if attention == "kda":
            kda = config.kda
            assert kda is not None
            channels = ceil_div(kda.num_heads, axes["tensor"]) * kda.head_dim
            per_row = channels * (kda.head_dim * FLOAT32 + (kda.conv_size - 1) * 3 * CACHE_BYTES)
        else:
            assert config.mla is not None
            width = ceil_div(config.mla.latent_dim, work.lanes) * work.lanes
            if attention == "dsa":
                assert config.dsa is not None
                width += config.dsa.head_dim
            per_row = work.cached * width * CACHE_BYTES
        result += count * work.rows * per_row
    return result


def layer_temporaries(
    config: ModelConfig, kind: LayerKind, axes: Mapping[str, int], work: Work
) -> tuple[int, int]:
    """Arrays that one layer writes and reads again: (attention, MLP), bytes on one device."""
    attention, mlp = kind
    tensor, n, a = axes["tensor"], work.tokens, ACTIVATION_BYTES
    if attention == "kda":
        kda = config.kda
        assert kda is not None
        # q, k, v, gate and output in the activations' dtype; decay and the recurrence's output in float32.
        per_token = ceil_div(kda.size, tensor) * (5 * a + 2 * FLOAT32)
        first = n * per_token + ceil_div(kda.num_heads, tensor) * kda.head_dim**2 * FLOAT32
    else:
        mla = config.mla
        assert mla is not None
        heads = ceil_div(mla.num_heads, tensor)
        # Queries, queries in the latent, the float32 output in the latent, output and gate.
        per_head = (mla.qk_head_dim + mla.latent_dim + 2 * mla.v_head_dim) * a + mla.kv_lora_rank * FLOAT32
        first = n * heads * per_head
        if attention == "dsa":
            dsa = config.dsa
            assert dsa is not None
            kept = min(dsa.top_k, work.context)
            # Index queries, and indices and scores of the selection before and after a merge.
            first += n * (dsa.num_heads * dsa.head_dim * a + 4 * kept * FLOAT32)
    if mlp == "dense":
        return first, n * ceil_div(config.intermediate_size, tensor) * 3 * a
    moe = config.moe
    assert moe is not None
    width = moe.latent_size or config.hidden_size
    routed = work.routed_bound * (2 * width + 3 * moe.intermediate_size) * a
    shared = n * ceil_div(moe.shared_size, tensor) * 3 * a
    return first, n * (2 * width * a + moe.num_experts * FLOAT32) + routed + shared


def device_bytes(config: ModelConfig, axes: Mapping[str, int], work: Work, limit: int) -> DeviceBytes:
    """Bytes of one device, the same on every pipeline stage. In training weights are the masters, state the moments;
    activations have the gradients and the copies that a layer computes with."""
    stage = held(config, axes["stage"])
    activations = activation_bytes(config, axes, work)
    if work.phase == "train":
        own = trained_parameters(config, stage, axes)
        return DeviceBytes(own * MASTER_BYTES, own * MOMENTS_BYTES, activations + own * GRADIENT_BYTES, limit)
    weights = sum(weight_bytes(stage, axes).values())
    return DeviceBytes(weights, cache_bytes(config, stage, axes, work), activations, limit)
