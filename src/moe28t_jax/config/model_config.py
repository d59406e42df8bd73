"""The one configuration type of the model family. A preset is data; nothing branches on a model's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from moe28t_jax.config.counts import ParameterCount

AttentionKind = Literal["kda", "mla", "dsa"]
MlpKind = Literal["dense", "moe"]


@dataclass(frozen=True)
class VisionConfig:
    """The image tower (MoonViT) and its projector. Sizes in elements, `patch_size` in pixels."""

    patch_size: int = 14
    num_layers: int = 27
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_heads: int = 12
    qkv_size: int = 1536
    position_height: int = 64
    position_width: int = 64
    position_time: int = 4
    merge_height: int = 2
    merge_width: int = 2
    projector_eps: float = 1e-5
    norm_eps: float = 1.1920928955078125e-07
    # JSON text of the vision fields that `from_hf` does not read; no part of what is compared.
    extra: str = field(default="{}", repr=False, compare=False)

    @property
    def merged_size(self) -> int:
        """Width of one merged patch, the projector's input."""
        return self.merge_height * self.merge_width * self.hidden_size


@dataclass(frozen=True)
class KDAConfig:
    """Gated delta-attention layers. `gate_lower_bound` None selects the softplus form of the forget gate."""

    num_heads: int
    head_dim: int
    conv_size: int = 4
    gate_lower_bound: float | None = -5.0
    full_rank_gate: bool = True

    @property
    def size(self) -> int:
        """Channels over all heads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLAConfig:
    """Latent attention without positional rotation; `latent_eps` is the eps of both latent norms."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    output_gate: bool = True
    latent_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token: the normalised latent and the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        return self.qk_head_dim**-0.5


@dataclass(frozen=True)
class DSAConfig:
    """The indexer of the sparse layers and how many past tokens each query reads."""

    num_heads: int
    head_dim: int
    top_k: int
    use_relu: bool = True
    key_norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    key_norm_eps: float = 1e-5


@dataclass(frozen=True)
class MoEConfig:
    """Routed and shared experts. `latent_size` None means that experts work on the full hidden size.

    expert_slots: how many experts the arrays have room for, where a mesh does not divide `num_experts`
    (`moe28t_jax.parallel.pad_experts`). Places behind the last expert hold zeros, no token goes there, and no
    checkpoint in the public layout has them. None: as many as there are experts.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    num_shared_experts: int = 0
    latent_size: int | None = None
    latent_norm: bool = False
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    expert_slots: int | None = None

    @property
    def slots(self) -> int:
        """Experts that the arrays have room for."""
        return self.num_experts if self.expert_slots is None else self.expert_slots

    @property
    def shared_size(self) -> int:
        return self.num_shared_experts * self.intermediate_size


_KINDS = {bool: "true or false,", int: "a whole number", float: "a number", str: "a word"}


def _of_same_type(name: str, current: Any, value: Any) -> Any:
    """The value, if it is of the field's kind: numbers, flags and words stay what they are, sections too."""
    if value is None or current is None:
        return value
    if isinstance(current, float) and type(value) is int:
        value = float(value)
    simple = isinstance(current, (bool, int, float, str))
    fits = isinstance(value, type(current)) and isinstance(value, bool) == isinstance(current, bool)
    if (simple or is_dataclass(current)) and not fits:
        section = (
            ", ".join(f"{name}.{each.name}" for each in fields(current)) if is_dataclass(current) else ""
        )
        kind = _KINDS[type(current)] + f" like {current!r}" if simple else f"a section; set one of {section}"
        raise ValueError(f"The override {name!r} is {value!r}, but the field is {kind}.")
    return value


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the mathematics, the parameter declaration and the checkpoint layout depend on.

    Hashable, so it is a static argument of `jax.jit`. `attention_kinds` and `mlp_kinds` have one entry per
    layer, counted from 0 (the public files count from 1).
    """

    vocab_size: int
    hidden_size: int
    attention_kinds: tuple[AttentionKind, ...]
    mlp_kinds: tuple[MlpKind, ...]
    intermediate_size: int
    kda: KDAConfig | None
    mla: MLAConfig | None
    moe: MoEConfig | None
    dsa: DSAConfig | None = None
    vision: VisionConfig | None = None
    rms_norm_eps: float = 1e-5
    residual_block_size: int | None = None
    activation: Literal["situ", "silu"] = "situ"
    situ_beta: float | None = 4.0
    situ_linear_beta: float | None = 25.0
    initializer_range: float = 0.02
    max_context: int = 1_048_576
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    media_pad_id: int | None = None
    expert_quantization: Literal["mxfp4"] | None = None
    checkpoint_prefix: str = ""
    model_type: str = "kimi_linear"
    # JSON text of the file that `from_hf` read, so that `to_hf` loses nothing. No part of what is compared:
    # configurations that compute the same are equal and share compiled programs.
    extra: str = field(default="{}", repr=False, compare=False)

    def __post_init__(self) -> None:
        from moe28t_jax.config.validation import validate

        validate(self)

    # -- shape of the network ------------------------------------------------------------------------------
    @property
    def num_layers(self) -> int:
        return len(self.attention_kinds)

    @property
    def glu(self) -> tuple[Any, ...]:
        """The gated activation as `mxfp4_matmul.grouped_glu` takes it."""
        if self.activation == "situ":
            return ("situ", self.situ_beta, self.situ_linear_beta)
        return ("silu",)

    def starts_block(self, layer: int) -> bool:
        """Whether attention residuals push a snapshot at this layer (counted from 0)."""
        return self.residual_block_size is not None and layer % self.residual_block_size == 0

    @property
    def num_snapshots(self) -> int:
        """Snapshots that attention residuals hold after the last layer; 0 with plain residuals."""
        if self.residual_block_size is None:
            return 0
        return -(-self.num_layers // self.residual_block_size)

    # -- public constructors -------------------------------------------------------------------------------
    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """The configuration of a named model: `moe28t` (alias `kimi-k3.1-pro`), `kimi-k3`,
        `kimi-linear-48b-a3b`, `nano`. Raises ValueError, listing the names, for any other."""
        from moe28t_jax.config.presets import preset

        return preset(name)

    @classmethod
    def from_hf(
        cls, source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read a public `config.json` (a path to it or to its folder, or the parsed dictionary).

        `overrides` sets fields by dotted name, e.g. `{"dsa.top_k": 1024, "mla.latent_eps": 1e-5}`.
        Raises ValueError for a field that would change the mathematics and is not supported.
        """
        from moe28t_jax.config.huggingface import from_hf

        return from_hf(source, overrides or {})

    def to_hf(self) -> dict[str, Any]:
        """The public nested `config.json` as a dictionary; inverse of `from_hf`."""
        from moe28t_jax.config.huggingface import to_hf

        return to_hf(self)

    def override(self, values: Mapping[str, Any]) -> ModelConfig:
        """A copy with fields set by dotted name. Raises ValueError for an unknown name.

        All are set at once, so that fields which have to agree can be changed together. Lists become tuples.
        """
        known = {f.name for f in fields(self)}
        changed: dict[str, Any] = {}
        for name, value in values.items():
            head, _, rest = name.partition(".")
            if head not in known:
                listed = ", ".join(sorted(known))
                raise ValueError(
                    f"The configuration has no field {head!r} (override {name!r}); it has: {listed}."
                )
            if rest:
                section = changed.get(head, getattr(self, head))
                if (
                    not is_dataclass(section)
                    or isinstance(section, type)
                    or rest not in {f.name for f in fields(section)}
                ):
                    has = (
                        f"has: {', '.join(each.name for each in fields(section))}"
                        if is_dataclass(section)
                        else f"is {section!r}"
                    )
                    raise ValueError(f"The configuration has no field {name!r}; {head!r} {has}.")
                value = replace(section, **{rest: _of_same_type(name, getattr(section, rest), value)})
            else:
                value = _of_same_type(name, getattr(self, head), value)
            changed[head] = tuple(value) if isinstance(value, list) else value
        return replace(self, **changed)

    def parameter_count(self) -> ParameterCount:
        """Exact counts: `.total` (vision included), `.active` (text parameters one token touches: its routed
        experts, everything dense and the output head, not the embedding table), `.by_group`."""
        from moe28t_jax.config.counts import count_parameters

        return count_parameters(self)
