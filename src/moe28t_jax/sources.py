"""What `load` can be given, a folder, a file, an address or the shipped model: its files, licence and weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.progress import Progress

from moe28t_jax.chat import Tokenizer
from moe28t_jax.config import PRESETS, ModelConfig, Parameter, shipped_folder
from moe28t_jax.model.parameters import Parameters, abstract
from moe28t_jax.parallel.sharding import parameter_shardings
from moe28t_jax.planning.licence import (
    LicenceResult,
    admit,
    decode_licence,
    is_licence_name,
    read_licences,
)
from moe28t_jax.weights import CheckpointError, is_orbax, load_orbax, load_parameters, stream_parameters
from moe28t_jax.weights.save import leaf_table
from moe28t_jax.weights.store import RemoteStore, is_remote
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

TOKENIZER_FILE = "tiktoken.model"


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies: a `path` (folder or file), or a `store` of files behind an address."""

    text: str
    path: Path | None
    store: RemoteStore | None

    @property
    def name(self) -> str:
        return self.path.name if self.path is not None else self.text.rstrip("/").rpartition("/")[2]

    @property
    def folder(self) -> Path:
        """The folder of a local source."""
        assert self.path is not None
        return self.path if self.path.is_dir() else self.path.parent

    def config(self, overrides: dict[str, Any]) -> ModelConfig:
        """The configuration beside the weights."""
        if self.store is None:
            return ModelConfig.from_hf(self.folder, overrides)
        content = self.store.read_file("config.json")
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.store.location('config.json')!r} is not valid JSON: {error}."
            ) from error
        return ModelConfig.from_hf(document, overrides)

    def licence(self, accepted: str | None) -> LicenceResult | None:
        """The judgement of the licence beside the weights; None where there is no licence file.

        Raises LicenceError as :func:`moe28t_jax.planning.licence.admit`.
        """
        return admit(self.text, self.licence_texts(), accepted)

    def licence_texts(self) -> dict[str, str]:
        """The licence files beside the weights, by path or address."""
        if self.store is None:
            return read_licences(self.folder)
        names = [name for name in self.store.names() if is_licence_name(name)]
        return {self.store.location(name): self._text(name) for name in names}

    def _text(self, name: str) -> str:
        assert self.store is not None
        return decode_licence(self.store.read_file(name, 1 << 20), self.store.location(name))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer beside the weights, if there is one."""
        if self.store is None:
            file = self.folder / TOKENIZER_FILE
            return Tokenizer.from_file(file) if file.is_file() else None
        if TOKENIZER_FILE not in self.store.names():
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / TOKENIZER_FILE
            file.write_bytes(self.store.read_file(TOKENIZER_FILE))
            return Tokenizer.from_file(file)

    def parameters(
        self,
        config: ModelConfig,
        dtype: np.dtype,
        mesh: jax.sharding.Mesh | None = None,
        stacked: bool = False,
        vision: bool = True,
        cache: str | Path | None = None,
        progress: Progress | None = None,
        layout: str | None = None,
    ) -> tuple[Parameters, ModelConfig]:
        """The weights: on one device, or as the rules lay them over a mesh; then, and from a store, each process reads
        what its devices hold. An accelerator's arrays are filled slice by slice, so that the host never holds a stack
        of them. `layout` is that of packed experts (None: as an Orbax checkpoint has them, elsewhere packed_kn).

        Raises ValueError for a `cache` of files that lie here already, and for one file to be laid over a mesh.
        """
        if cache is not None and self.store is None:
            raise ValueError(
                f"cache is {str(cache)!r}, which keeps what an object store sent, and {self.text!r} lies on this "
                "machine; leave it out."
            )
        rule = None if mesh is None else mesh_rule(config, mesh, stacked)
        if self.path is not None and is_orbax(self.path):
            return load_orbax(
                self.path,
                config,
                stacked=stacked,
                sharding=rule,
                layout=layout,
                dtype=dtype,
                vision=vision,
                progress=progress,
            )
        on_cpu = jax.devices()[0].platform == "cpu"
        if self.path is not None and rule is None and (on_cpu or not self.path.is_dir()):
            return load_parameters(
                self.path, config, dtype, stacked, layout or "packed_kn", progress=progress, vision=vision
            )
        if self.path is not None and not self.path.is_dir():
            raise ValueError(f"{self.text!r} is a single file; give its folder to load it onto a mesh.")
        parameters, config, _ = stream_parameters(
            self.store or self.folder, config, dtype, stacked=stacked, layout=layout or "packed_kn", sharding=rule,
            cache=cache, progress=progress, vision=vision,
        )  # fmt: skip
        return parameters, config


def mesh_rule(
    config: ModelConfig, mesh: jax.sharding.Mesh, stacked: bool
) -> Callable[[Parameter, tuple[int, ...] | None], jax.sharding.Sharding]:
    """Where a declared parameter lies on a mesh, as `stream_parameters` asks for it."""
    shardings = parameter_shardings(abstract(config, stacked=stacked), config, mesh)
    table = leaf_table(shardings, config)

    def rule(parameter: Parameter, layers: tuple[int, ...] | None) -> jax.sharding.Sharding:
        leaf, index = table[None if layers is None else layers[0], parameter.name]
        sharding = leaf.packed if isinstance(leaf, MXFP4Tensor) else leaf
        if index is not None and layers is not None and len(layers) == 1:
            # One layer of a stack, whose first axis it has not.
            return NamedSharding(mesh, PartitionSpec(*sharding.spec[1:]))
        return sharding

    return rule


def resolve(source: str | Path) -> Source:
    """Find a source. Raises FileNotFoundError when there is none, ValueError for a preset without weights."""
    if not isinstance(source, str | os.PathLike) or not str(source):
        raise ValueError(f"The source is {source!r}; give the path of a checkpoint, or 'nano'.")
    text = str(source)
    if is_remote(text):
        return Source(text, None, RemoteStore(text))
    folder = shipped_folder("nano") if text == "nano" else Path(source).expanduser()
    if text in PRESETS and text != "nano" and not folder.exists():
        raise ValueError(
            f"{text!r} is a preset without weights (only nano ships with the package); give the folder of a "
            f"checkpoint, or look at it with ModelConfig.preset({text!r}) or `moe28t inspect {text}`."
        )
    if not folder.exists():
        raise FileNotFoundError(
            f"No such file or directory: {text!r}; give the path of a checkpoint, or 'nano' for the model that comes "
            "with the package."
        )
    if folder.is_file() and folder.suffix != ".safetensors":
        raise ValueError(
            f"{text!r} is a file, and no .safetensors file; give the folder of a checkpoint or such a file."
        )
    return Source(text, folder, None)
