"""Stored tensors against the parameter declaration: names, shapes, types, and which experts are packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Declared, declare, declare_vision
from moe28t_jax.weights.checkpoint import TensorTable
from moe28t_jax.weights.errors import CheckpointError, and_more

TEXT_PREFIXES = ("language_model.", "")
BLOCK = 32
NAN_SCALE = 255
_FLOATS = ("F64", "F32", "F16", "BF16")
_OTHER_CONFIG = "either the checkpoint is damaged or its config.json belongs to another one"


@dataclass(frozen=True)
class StoredParameter:
    """One parameter of one layer in a checkpoint: the tensor it comes from, or one per expert.

    When `packed`, each name stands for `<name>_packed` and `<name>_scale`.
    """

    declared: Declared
    names: tuple[str, ...]
    packed: bool

    def tensors(self) -> Iterator[str]:
        """Names of all tensors as they are stored."""
        for name in self.names:
            yield from (f"{name}_packed", f"{name}_scale") if self.packed else (name,)


@dataclass(frozen=True)
class Match:
    """A checkpoint that agrees with a configuration.

    `config` carries the prefix and the expert quantisation found in the tensors. `text` maps (layer or None,
    parameter name) to its tensors; `vision` lists those of image tower and projector, if stored.
    """

    config: ModelConfig
    text: dict[tuple[int | None, str], StoredParameter]
    vision: tuple[StoredParameter, ...]

    def stored(self, vision: bool) -> dict[tuple[int | None, str], StoredParameter]:
        """`text`, and with `vision` also the parameters of the image tower, which belong to no layer."""
        tower = self.vision if vision else ()
        return self.text | {(None, one.declared.parameter.name): one for one in tower}


def detect_prefix(checkpoint: TensorTable, default: str) -> str:
    """The prefix of text names that most tensors carry; `default` when none or several carry one."""
    counts = {
        prefix: sum(name.startswith((f"{prefix}model.", f"{prefix}lm_head.")) for name in checkpoint)
        for prefix in {default, *TEXT_PREFIXES}
    }
    best = max(counts.values())
    return default if counts[default] == best else max(counts, key=lambda prefix: counts[prefix])


def stored_names(declared: Declared) -> Iterator[tuple[str, ...]]:
    """For every stored tensor of a parameter its possible names, the canonical one first."""
    for expert in range(declared.parameter.num_stored):
        names = (declared.stored_name, *declared.stored_aliases)
        yield tuple(name.replace("{expert}", str(expert)) for name in names)


def match(checkpoint: TensorTable, config: ModelConfig) -> Match:
    """Pair every declared parameter with its tensors, reading headers only.

    Raises CheckpointError for the first kind of fault found, in this order: a tensor stored under two names,
    missing tensors, tensors the configuration does not know, experts of one layer packed only in part,
    another shape, another dtype.
    """
    config = config.override({"checkpoint_prefix": detect_prefix(checkpoint, config.checkpoint_prefix)})
    text: dict[tuple[int | None, str], StoredParameter] = {}
    missing: list[str] = []
    for declared in declare(config, vision=False):
        stored = find_stored(checkpoint, declared, config.expert_quantization == "mxfp4", missing)
        text[declared.layer, declared.parameter.name] = stored
    vision = _vision(checkpoint, config, missing)
    if missing:
        raise CheckpointError(
            f"The checkpoint {str(checkpoint.source)!r} lacks the tensor {and_more(missing)} that its "
            "configuration "
            f"asks for: {_OTHER_CONFIG}."
        )
    matched = (*text.values(), *vision)
    # All of them are there, each under one name: by their number, which takes no table of half a million names.
    if sum(1 for stored in matched for _ in stored.tensors()) != len(checkpoint):
        known = {name for stored in matched for name in stored.tensors()}
        extra = [name for name in checkpoint if name not in known]
        raise CheckpointError(
            f"The checkpoint {str(checkpoint.source)!r} holds the tensor {and_more(extra)} that its "
            "configuration "
            f"does not know: {_OTHER_CONFIG}."
        )
    for stored in text.values():
        check_stored(checkpoint, stored)
    experts = [stored.packed for stored in text.values() if stored.declared.parameter.quantizable]
    if experts:
        config = config.override({"expert_quantization": "mxfp4" if any(experts) else None})
    return Match(config, text, vision)


def find_stored(
    checkpoint: TensorTable, declared: Declared, expect_packed: bool, missing: list[str]
) -> StoredParameter:
    """The tensors that hold a parameter, under whichever of its names; those that are absent go to `missing`."""
    quantizable = declared.parameter.quantizable
    names: list[str] = []
    packed: list[bool] = []
    for candidates in stored_names(declared):
        found = [(name, False) for name in candidates if name in checkpoint]
        if quantizable:
            found += [
                (name, True)
                for name in candidates
                if f"{name}_packed" in checkpoint or f"{name}_scale" in checkpoint
            ]
        if len(found) > 1:
            spelled = " and as ".join(
                repr(f"{name}_packed" if is_packed else name) for name, is_packed in found
            )
            raise CheckpointError(
                f"The checkpoint {str(checkpoint.source)!r} stores one tensor twice, as {spelled}; "
                "remove one."
            )
        if not found:
            missing.append(f"{candidates[0]}_packed" if quantizable and expect_packed else candidates[0])
            continue
        name, is_packed = found[0]
        names.append(name)
        packed.append(is_packed)
        if is_packed:
            missing += [part for part in (f"{name}_packed", f"{name}_scale") if part not in checkpoint]
    if len(set(packed)) > 1:
        yes, no = names[packed.index(True)], names[packed.index(False)]
        raise CheckpointError(
            f"The experts of one layer are stored in two ways, {yes + '_packed'!r} as MXFP4 and {no!r} "
            "unquantised, in "
            f"{str(checkpoint.source)!r}; convert the checkpoint to one of them."
        )
    return StoredParameter(declared, tuple(names), bool(packed) and packed[0])


def _vision(checkpoint: TensorTable, config: ModelConfig, missing: list[str]) -> tuple[StoredParameter, ...]:
    """Tensors of the image tower, all or none: a text-only checkpoint may lack them."""
    if config.vision is None:
        return ()
    parameters = declare_vision(config.vision, config.hidden_size)
    present = [parameter for parameter in parameters if parameter.stored_name in checkpoint]
    if not present:
        return ()
    missing += [parameter.stored_name for parameter in parameters if parameter.stored_name not in checkpoint]
    for parameter in present:
        _check_shape(checkpoint, parameter.stored_name, parameter.stored_shapes)
        _check_dtype(checkpoint, parameter.stored_name, _FLOATS)
    return tuple(
        StoredParameter(Declared(one, None, one.stored_name, ()), (one.stored_name,), False)
        for one in present
    )


def check_stored(checkpoint: TensorTable, stored: StoredParameter) -> None:
    """Raise CheckpointError where a tensor's shape or dtype is not the declared one."""
    shapes = stored.declared.parameter.stored_shapes
    for name in stored.names:
        if not stored.packed:
            _check_shape(checkpoint, name, shapes)
            _check_dtype(checkpoint, name, _FLOATS)
            continue
        size_out, size_in = shapes[0]
        packed, scale = f"{name}_packed", f"{name}_scale"
        _check_dtype(checkpoint, packed, ("U8", "F4"))
        codes_per_value = 2 if checkpoint.entry(packed).dtype == "U8" else 1
        _check_shape(checkpoint, packed, ((size_out, size_in // codes_per_value),))
        _check_dtype(checkpoint, scale, ("U8", "F8_E8M0"))
        _check_shape(checkpoint, scale, ((size_out, size_in // BLOCK),))


def _check_shape(checkpoint: TensorTable, name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    shape = checkpoint.entry(name).shape
    if shape not in shapes:
        expected = " or ".join(str(list(expected)) for expected in shapes)
        raise CheckpointError(
            f"The {checkpoint.where(name)} has shape {list(shape)}, but the configuration makes it "
            f"{expected}: "
            f"{_OTHER_CONFIG}."
        )


def _check_dtype(checkpoint: TensorTable, name: str, dtypes: tuple[str, ...]) -> None:
    dtype = checkpoint.entry(name).dtype
    if dtype not in dtypes:
        raise CheckpointError(
            f"The {checkpoint.where(name)} has dtype {dtype}, but {' or '.join(dtypes)} is expected; "
            "convert it before loading."
        )


def check_scale(checkpoint: TensorTable, name: str, scale: np.ndarray, first_row: int = 0) -> None:
    """Raises CheckpointError, with the position, when a scale byte is NaN; `scale` may begin at a later row."""
    if scale.size and scale.max() == NAN_SCALE:
        row, block = (int(i) for i in np.argwhere(scale == NAN_SCALE)[0])
        raise CheckpointError(
            f"The {checkpoint.where(name)} has the scale byte {NAN_SCALE} (NaN) at output {first_row + row}, block "
            f"{block}; "
            "the weights are damaged, fetch or convert them again."
        )
