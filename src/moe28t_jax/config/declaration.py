"""Every parameter of the network, declared once and without JAX.

Initialisation, sharding, loading, saving, quantisation, counting and planning derive from these records.
Program shapes are input-major (`[in, out]`): a matrix-vector product streams them at full memory bandwidth,
and it is the orientation the packed expert kernels read. The exception is the projection of latents to the keys and
values of each head, which is multiplied head by head. The public files are output-major (`[out, in]`); `transform`
says how one stored tensor becomes the program's array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from moe28t_jax.config.model_config import ModelConfig, VisionConfig

Transform = Literal["reshape", "transpose"]
Initializer = Literal["normal", "ones", "zeros", "decay_bias", "convolution"]


@dataclass(frozen=True)
class Parameter:
    """One array of the program and the tensor(s) of a public checkpoint that it comes from.

    name: dotted attribute path inside its owner (a layer, or the model for global parameters).
    shape, axes: program shape and one logical axis name (or None) per dimension.
    dtype: storage dtype in the public layout; float32 parameters stay float32 whatever the compute dtype.
    stored_name: checkpoint name below the owner's prefix; `{expert}` when `shape[0]` counts experts.
    stored_shapes: accepted stored shapes of ONE tensor (one expert), the canonical one first.
    transform: `reshape` keeps the element order; `transpose` reads the stored tensor as a matrix
        `[first axis, rest]` and transposes it.
    quantizable: may be stored as MXFP4 (`<name>_packed` and `<name>_scale` instead of `<name>`).
    group: what `parameter_count().by_group` adds it to.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    stored_name: str
    stored_shapes: tuple[tuple[int, ...], ...]
    group: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    transform: Transform = "reshape"
    initializer: Initializer = "normal"
    quantizable: bool = False
    # Other spellings of `stored_name` found in public files.
    stored_aliases: tuple[str, ...] = ()
    # Of experts, where the array has more places than there are tensors; the places behind the last one hold zeros.
    num_experts: int | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def num_stored(self) -> int:
        """How many tensors of the checkpoint make up this array (before the packed/scale split)."""
        if "{expert}" not in self.stored_name:
            return 1
        return self.shape[0] if self.num_experts is None else self.num_experts


def _vector(name: str, size: int, axis: str | None, stored: str, group: str, **more: Any) -> Parameter:
    options: dict[str, Any] = {"initializer": "ones"} | more
    return Parameter(name, (size,), (axis,), stored, ((size,),), group, **options)


def _linear(
    name: str, size_in: int, size_out: int, axes: tuple[str | None, str | None], stored: str, group: str
) -> Parameter:
    return Parameter(
        name,
        (size_in, size_out),
        axes,
        f"{stored}.weight",
        ((size_out, size_in),),
        group,
        transform="transpose",
    )


def _mix(name: str, stored: str, hidden_size: int) -> tuple[Parameter, Parameter]:
    """Attention-residual mix: gain of the score norm and the pseudo query."""
    return (
        _vector(
            f"{name}.norm", hidden_size, "embed", f"{stored}_norm.weight", "residual_mix",
            stored_aliases=(f"{stored}.norm_weight",),
        ),
        Parameter(
            f"{name}.query", (hidden_size,), ("embed",), f"{stored}_proj.weight",
            ((1, hidden_size), (hidden_size,)), "residual_mix", initializer="zeros",
            stored_aliases=(f"{stored}.proj_weight",),
        ),
    )  # fmt: skip


def _kda(config: ModelConfig) -> Iterator[Parameter]:
    kda, hidden = config.kda, config.hidden_size
    assert kda is not None
    heads, dim, size = kda.num_heads, kda.head_dim, kda.size
    for x in "qkv":
        yield _linear(
            f"attention.{x}_proj", hidden, size, ("embed", "kda_heads"), f"self_attn.{x}_proj", "kda"
        )
    for x in "qkv":
        yield Parameter(
            f"attention.{x}_conv", (kda.conv_size, size), (None, "kda_heads"), f"self_attn.{x}_conv1d.weight",
            ((size, 1, kda.conv_size), (size, kda.conv_size)), "kda", "float32", "transpose", "convolution",
        )  # fmt: skip
    yield _linear("attention.f_a_proj", hidden, dim, ("embed", None), "self_attn.f_a_proj", "kda")
    yield _linear("attention.f_b_proj", dim, size, (None, "kda_heads"), "self_attn.f_b_proj", "kda")
    yield _linear("attention.b_proj", hidden, heads, ("embed", "kda_heads"), "self_attn.b_proj", "kda")
    # The lower-bound family stores A_log padded to head_dim entries, of which the first num_heads count.
    padded = max(dim, heads) if kda.gate_lower_bound is not None else heads
    stored = (
        ((padded,), (1, 1, padded, 1)) if kda.gate_lower_bound is not None else ((1, 1, heads, 1), (heads,))
    )
    if padded != heads:
        stored = (*stored, (heads,))
    yield Parameter(
        "attention.A_log",
        (padded,),
        (None,),
        "self_attn.A_log",
        stored,
        "kda",
        "float32",
        initializer="zeros",
    )
    yield Parameter(
        "attention.dt_bias", (heads, dim), ("kda_heads", None), "self_attn.dt_bias",
        ((size,), (heads, dim)), "kda", "float32", initializer="decay_bias",
    )  # fmt: skip
    yield _vector("attention.o_norm", dim, None, "self_attn.o_norm.weight", "kda", dtype="float32")
    if kda.full_rank_gate:
        yield _linear("attention.g_proj", hidden, size, ("embed", "kda_heads"), "self_attn.g_proj", "kda")
    else:
        yield _linear("attention.g_a_proj", hidden, dim, ("embed", None), "self_attn.g_a_proj", "kda")
        yield _linear("attention.g_b_proj", dim, size, (None, "kda_heads"), "self_attn.g_b_proj", "kda")
    yield _linear("attention.o_proj", size, hidden, ("kda_heads", "embed"), "self_attn.o_proj", "kda")


def _mla(config: ModelConfig) -> Iterator[Parameter]:
    mla, hidden = config.mla, config.hidden_size
    assert mla is not None
    q_size, v_size = mla.num_heads * mla.qk_head_dim, mla.num_heads * mla.v_head_dim
    kv_head_dim = mla.qk_nope_head_dim + mla.v_head_dim
    if mla.q_lora_rank is None:
        yield _linear("attention.q_proj", hidden, q_size, ("embed", "mla_heads"), "self_attn.q_proj", "mla")
    else:
        rank = mla.q_lora_rank
        yield _linear("attention.q_a_proj", hidden, rank, ("embed", "latent"), "self_attn.q_a_proj", "mla")
        yield _vector("attention.q_a_norm", rank, "latent", "self_attn.q_a_layernorm.weight", "mla")
        # One axis only: heads and latent would both be divided over the same devices.
        yield _linear("attention.q_b_proj", rank, q_size, (None, "mla_heads"), "self_attn.q_b_proj", "mla")
    yield _linear(
        "attention.kv_a_proj", hidden, mla.latent_dim, ("embed", None), "self_attn.kv_a_proj_with_mqa", "mla"
    )
    yield _vector("attention.kv_a_norm", mla.kv_lora_rank, None, "self_attn.kv_a_layernorm.weight", "mla")
    # By head and output-major as stored: where single queries are projected into the latent and back, a batched
    # product wants heads outermost, and would transpose the whole weight in every step.
    yield Parameter(
        "attention.kv_b_proj", (mla.num_heads, kv_head_dim, mla.kv_lora_rank), ("mla_heads", None, None),
        "self_attn.kv_b_proj.weight", ((mla.num_heads * kv_head_dim, mla.kv_lora_rank),), "mla",
    )  # fmt: skip
    if mla.output_gate:
        yield _linear("attention.g_proj", hidden, v_size, ("embed", "mla_heads"), "self_attn.g_proj", "mla")
    yield _linear("attention.o_proj", v_size, hidden, ("mla_heads", "embed"), "self_attn.o_proj", "mla")


def _indexer(config: ModelConfig) -> Iterator[Parameter]:
    dsa, mla, hidden = config.dsa, config.mla, config.hidden_size
    assert dsa is not None and mla is not None and mla.q_lora_rank is not None
    stored = "self_attn.indexer"
    size = dsa.num_heads * dsa.head_dim
    yield _linear("indexer.q_proj", mla.q_lora_rank, size, ("latent", None), f"{stored}.wq_b", "indexer")
    yield _linear("indexer.k_proj", hidden, dsa.head_dim, ("embed", None), f"{stored}.wk", "indexer")
    yield _linear(
        "indexer.weights_proj", hidden, dsa.num_heads, ("embed", None), f"{stored}.weights_proj", "indexer"
    )
    yield _vector("indexer.k_norm", dsa.head_dim, None, f"{stored}.k_norm.weight", "indexer", dtype="float32")
    if dsa.key_norm == "layernorm":
        yield _vector(
            "indexer.k_norm_bias", dsa.head_dim, None, f"{stored}.k_norm.bias", "indexer",
            dtype="float32", initializer="zeros",
        )  # fmt: skip


def _glu(name: str, hidden: int, size: int, axis: str, stored: str, group: str) -> Iterator[Parameter]:
    yield _linear(f"{name}.gate_proj", hidden, size, ("embed", axis), f"{stored}.gate_proj", group)
    yield _linear(f"{name}.up_proj", hidden, size, ("embed", axis), f"{stored}.up_proj", group)
    yield _linear(f"{name}.down_proj", size, hidden, (axis, "embed"), f"{stored}.down_proj", group)


def _moe(config: ModelConfig) -> Iterator[Parameter]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    stored = "block_sparse_moe"
    experts, size = moe.num_experts, moe.intermediate_size
    width = moe.latent_size or hidden
    yield _linear("mlp.router", hidden, experts, ("embed", None), f"{stored}.gate", "router")
    yield _vector(
        "mlp.router_bias", experts, None, f"{stored}.gate.e_score_correction_bias", "router",
        dtype="float32", initializer="zeros",
    )  # fmt: skip
    if moe.latent_size is not None:
        yield _linear(
            "mlp.latent_down",
            hidden,
            width,
            ("embed", "latent"),
            f"{stored}.routed_expert_down_proj",
            "latent_projection",
        )
        if moe.latent_norm:
            yield _vector(
                "mlp.latent_norm", width, "latent", f"{stored}.routed_expert_norm.weight", "latent_projection"
            )
        yield _linear(
            "mlp.latent_up",
            width,
            hidden,
            ("latent", "embed"),
            f"{stored}.routed_expert_up_proj",
            "latent_projection",
        )
    for name, tensor, shape, axes in (
        ("gate", "w1", (width, size), ("expert_in", "expert_mlp")),
        ("up", "w3", (width, size), ("expert_in", "expert_mlp")),
        ("down", "w2", (size, width), ("expert_mlp", "expert_in")),
    ):
        yield Parameter(
            f"mlp.experts.{name}", (moe.slots, *shape), ("expert", *axes),
            stored + ".experts.{expert}." + tensor + ".weight", (shape[::-1],), "routed_experts",
            transform="transpose", quantizable=True, num_experts=experts,
        )  # fmt: skip
    if moe.num_shared_experts:
        yield from _glu(
            "mlp.shared", hidden, moe.shared_size, "mlp", f"{stored}.shared_experts", "shared_experts"
        )


def declare_layer(config: ModelConfig, layer: int) -> tuple[Parameter, ...]:
    """Parameters of one layer (counted from 0); names and stored names are relative to the layer."""
    hidden = config.hidden_size
    kind = config.attention_kinds[layer]
    declared = [
        _vector("attention_norm", hidden, "embed", "input_layernorm.weight", "norms"),
        _vector("mlp_norm", hidden, "embed", "post_attention_layernorm.weight", "norms"),
    ]
    if config.residual_block_size is not None:
        declared += _mix("attention_mix", "self_attention_res", hidden)
        declared += _mix("mlp_mix", "mlp_res", hidden)
    declared += _kda(config) if kind == "kda" else _mla(config)
    if kind == "dsa":
        declared += _indexer(config)
    if config.mlp_kinds[layer] == "dense":
        declared += _glu("mlp", hidden, config.intermediate_size, "mlp", "mlp", "dense_mlp")
    else:
        declared += _moe(config)
    return tuple(declared)


def declare_globals(config: ModelConfig) -> tuple[Parameter, ...]:
    """Embedding table, output head, final norm and, with attention residuals, the output mix."""
    hidden, vocab = config.hidden_size, config.vocab_size
    declared = [
        Parameter(
            "embedding",
            (vocab, hidden),
            ("vocab", "embed"),
            "model.embed_tokens.weight",
            ((vocab, hidden),),
            "embedding",
        ),
        _linear("head", hidden, vocab, ("embed", "vocab"), "lm_head", "head"),
        _vector("final_norm", hidden, "embed", "model.norm.weight", "norms"),
    ]
    if config.residual_block_size is not None:
        declared += _mix("output_mix", "model.output_attn_res", hidden)
    return tuple(declared)


def declare_vision(vision: VisionConfig, text_hidden_size: int) -> tuple[Parameter, ...]:
    """Image tower and projector. Their stored names carry no text prefix."""
    hidden, inner, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    position = (vision.position_height, vision.position_width, hidden)
    declared = [
        Parameter(
            "vision.patch_proj", (3 * patch * patch, hidden), (None, "vision"),
            "vision_tower.patch_embed.proj.weight", ((hidden, 3, patch, patch),), "vision",
            transform="transpose",
        ),
        Parameter(
            "vision.position", position, (None, None, "vision"), "vision_tower.patch_embed.pos_emb.weight",
            (position,), "vision",
        ),
    ]  # fmt: skip
    for block in range(vision.num_layers):
        name, stored = f"vision.blocks.{block}", f"vision_tower.encoder.blocks.{block}"
        declared += [
            _vector(f"{name}.attention_norm", hidden, "vision", f"{stored}.norm0.weight", "vision"),
            _vector(f"{name}.mlp_norm", hidden, "vision", f"{stored}.norm1.weight", "vision"),
            _linear(
                f"{name}.qkv",
                hidden,
                3 * vision.qkv_size,
                ("vision", "vision_heads"),
                f"{stored}.wqkv",
                "vision",
            ),
            _linear(
                f"{name}.out", vision.qkv_size, hidden, ("vision_heads", "vision"), f"{stored}.wo", "vision"
            ),
            _linear(f"{name}.up", hidden, inner, ("vision", "vision_mlp"), f"{stored}.mlp.fc0", "vision"),
            _linear(f"{name}.down", inner, hidden, ("vision_mlp", "vision"), f"{stored}.mlp.fc1", "vision"),
        ]
    merged = vision.merged_size
    declared += [
        _vector(
            "vision.final_norm", hidden, "vision", "vision_tower.encoder.final_layernorm.weight", "vision"
        ),
        _linear(
            "projector.inner", merged, merged, ("vision", "vision_mlp"), "mm_projector.proj.0", "projector"
        ),
        _linear(
            "projector.out",
            merged,
            text_hidden_size,
            ("vision_mlp", "embed"),
            "mm_projector.proj.2",
            "projector",
        ),
        _vector("projector.norm", text_hidden_size, "embed", "mm_projector.post_norm.weight", "projector"),
    ]
    return tuple(declared)


@dataclass(frozen=True)
class Declared:
    """A parameter in its place: the layer it belongs to (None for a global one) and its full stored name."""

    parameter: Parameter
    layer: int | None
    stored_name: str
    stored_aliases: tuple[str, ...]


def declare(config: ModelConfig, vision: bool = True) -> Iterator[Declared]:
    """All parameters in checkpoint order, with the configuration's prefix on text names."""
    prefix = config.checkpoint_prefix

    def place(parameter: Parameter, layer: int | None, prefix: str) -> Declared:
        aliases = tuple(prefix + alias for alias in parameter.stored_aliases)
        return Declared(parameter, layer, prefix + parameter.stored_name, aliases)

    for layer in range(config.num_layers):
        for parameter in declare_layer(config, layer):
            yield place(parameter, layer, f"{prefix}model.layers.{layer}.")
    for parameter in declare_globals(config):
        yield place(parameter, None, prefix)
    if vision and config.vision is not None:
        for parameter in declare_vision(config.vision, config.hidden_size):
            yield place(parameter, None, "")
