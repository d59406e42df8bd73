"""What a checkpoint or preset is made of, without reading its weights: behind `moe28t inspect`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from moe28t_jax.config import PRESETS, ModelConfig, ParameterCount


@dataclass(frozen=True)
class ModelReport:
    """Configuration and counts; `tensors` is the inventory of a checkpoint folder, empty for a preset and for an Orbax
    folder, whose files take `orbax_bytes`."""

    name: str
    config: ModelConfig
    count: ParameterCount
    tensors: tuple[Any, ...] = ()
    orbax_bytes: int | None = None

    @property
    def file_bytes(self) -> int:
        """Bytes of tensor data in the folder; 0 for a preset."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        config = asdict(self.config)
        config["extra"] = json.loads(self.config.extra)
        if config["vision"] is not None:
            config["vision"].pop("extra")
        return {
            "name": self.name,
            "config": config,
            "parameters": {
                "total": self.count.total,
                "active": self.count.active,
                "by_group": self.count.by_group,
            },
            "stored_tensors": self.count.stored_tensors,
            "stored_bytes": self.count.stored_bytes,
            "orbax_bytes": self.orbax_bytes,
            "layers": [asdict(layer) for layer in self.count.layers],
            "tensors": [
                {
                    "name": t.name,
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "bytes": t.nbytes,
                    "shard": t.shard,
                }
                for t in self.tensors
            ],
        }

    def print(self, tensors: bool = False) -> None:
        """Tables on standard output."""
        console = Console()
        config, count = self.config, self.count
        facts = _table("", self.name, show_header=True, header_style="bold")
        rows: list[tuple[str, Any]] = [
            ("layers", f"{config.num_layers} ({_kinds(config)})"),
            ("hidden size", config.hidden_size),
            ("vocabulary", config.vocab_size),
            ("context", config.max_context),
            ("residuals", _residuals(config)),
            ("activation", config.activation),
        ]
        if config.moe is not None:
            moe = config.moe
            rows.append(("experts", f"{moe.num_experts}, {moe.num_experts_per_token} per token"))
        if config.dsa is not None:
            rows.append(("sparse attention", f"top {config.dsa.top_k}, {config.dsa.num_heads} index heads"))
        public = "" if self.orbax_bytes is None else ", in the public layout"
        rows += [
            ("parameters", count.total),
            ("active per token", count.active),
            (f"stored tensors{public}", count.stored_tensors),
            (f"stored bytes{public}", count.stored_bytes),
        ]
        if self.orbax_bytes is not None:
            rows.append(("bytes of this Orbax folder", self.orbax_bytes))
        for name, value in rows:
            facts.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        console.print(facts)
        groups = _table("group", "parameters", "share")
        for group, size in sorted(count.by_group.items(), key=lambda item: -item[1]):
            groups.add_row(group, f"{size:,}", f"{size / count.total:.2%}")
        console.print(groups)
        layers = _table("layer", "attention", "mlp", "parameters", "active", "bytes")
        for layer in count.layers:
            values = (layer.total, layer.active, layer.stored_bytes)
            layers.add_row(str(layer.layer), layer.attention, layer.mlp, *(f"{value:,}" for value in values))
        console.print(layers)
        if tensors and self.orbax_bytes is not None:
            print(f"{self.name} holds Orbax items, one per layer, and no tensors of the public layout.")
        elif tensors and not self.tensors:
            print(f"{self.name} stores no tensors: it is a configuration without weights.")
        elif tensors:
            # Plain lines: a terminal may wrap them, but no name is cut and each can be searched for.
            lines = [
                (t.dtype, " x ".join(map(str, t.shape)), f"{t.nbytes:,}", t.shard, t.name)
                for t in self.tensors
            ]
            heads = ("dtype", "shape", "bytes", "shard", "tensor")
            widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
            for line in (heads, *lines):
                cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
                print("  ".join(cells).rstrip())


def _table(*heads: str, **options: Any) -> Table:
    # In a narrow terminal digits go on in the next line: a number that is cut is another one.
    return Table(*(Column(head, overflow="fold") for head in heads), **options)


def _kinds(config: ModelConfig) -> str:
    kinds = {kind: config.attention_kinds.count(kind) for kind in dict.fromkeys(config.attention_kinds)}
    return ", ".join(f"{number} {kind}" for kind, number in kinds.items())


def _residuals(config: ModelConfig) -> str:
    if config.residual_block_size is None:
        return "plain"
    return f"attention over blocks of {config.residual_block_size} layers"


def describe_model(source: str, overrides: dict[str, Any] | None = None) -> ModelReport:
    """Report on a preset name, a checkpoint folder or address, or a `config.json`."""
    if source in PRESETS:
        config = ModelConfig.preset(source).override(overrides or {})
        return ModelReport(source, config, config.parameter_count())
    if "://" in source:
        return _describe_address(source, overrides or {})
    path = Path(source).expanduser()
    if not path.exists():
        raise ValueError(
            f"{source!r} is neither a folder nor a file, and no preset; the presets are {', '.join(PRESETS)}."
        )
    config = ModelConfig.from_hf(path, overrides or {})
    tensors: tuple[Any, ...] = ()
    if path.is_dir() and any(path.glob("*.safetensors*")):
        from moe28t_jax.weights import describe

        tensors = tuple(describe(path))
    orbax_bytes = None
    if path.is_dir() and (path / "orbax.json").is_file():
        orbax_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return ModelReport(str(source), config, config.parameter_count(), tensors, orbax_bytes)


def _describe_address(source: str, overrides: dict[str, Any]) -> ModelReport:
    from moe28t_jax.sources import resolve
    from moe28t_jax.weights.stream_source import StreamedCheckpoint

    found = resolve(source)
    assert found.store is not None
    config = found.config(overrides)
    tensors: tuple[Any, ...] = ()
    if any(".safetensors" in name for name in found.store.names()):
        tensors = tuple(StreamedCheckpoint(found.store).describe())
    return ModelReport(source, config, config.parameter_count(), tensors)
