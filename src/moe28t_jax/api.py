"""Loading a model and using it: the objects behind `moe28t_jax.load`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.progress import Progress

from moe28t_jax.chat import Tokenizer
from moe28t_jax.config import PRESETS, ModelConfig
from moe28t_jax.engine import Steps, generate_ids
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.weights import load_parameters

TOKENIZER_FILE = "tiktoken.model"


@dataclass(frozen=True)
class Usage:
    """Tokens read and written by one request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Generation:
    """What a model wrote. `finish_reason`: `stop` (it ended its turn) or `length` (the token limit)."""

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class GenerationChunk:
    """A piece of a streamed generation: new text, the token behind it, and at the end the finish reason."""

    text: str
    token_id: int | None = None
    finish_reason: str | None = None


class Model:
    """A loaded checkpoint: `config`, `parameters`, `tokenizer` (None where the folder has none), `mesh`."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        tokenizer: Tokenizer | None = None,
        max_context: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        if max_context is not None and not 1 <= max_context <= config.max_context:
            raise ValueError(
                f"max_context is {max_context}; this model allows 1 to {config.max_context} tokens per sequence."
            )
        self.config, self.parameters, self.tokenizer, self.mesh = config, parameters, tokenizer, mesh
        self.max_context = max_context or config.max_context
        self.steps = Steps(parameters, config)

    def logits(
        self,
        token_ids: Any,
        lengths: Any = None,
        prefill: int | None = None,
        images: Any = None,
    ) -> Float[Array, "B T V"]:
        """Next-token logits after every token, float32 [B, T, V].

        token_ids: integers [B, T] (or one row [T]), right padded; lengths: real tokens per row, default all.
        prefill: read the first `prefill` tokens at once and the others one by one, as decoding does; logits
        are the same up to rounding. Rows beyond a length hold values without meaning.
        """
        if images is not None:
            raise NotImplementedError("Images are not supported by this version; pass text tokens only.")
        ids = np.asarray(token_ids)
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"token_ids has shape {np.shape(token_ids)} and dtype {ids.dtype}; expected integers [batch, tokens]."
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(f"token_ids holds ids outside 0..{self.config.vocab_size - 1}.")
        batch, count = ids.shape
        if count > self.max_context:
            raise ValueError(f"token_ids has {count} tokens per row; the context holds {self.max_context}.")
        sizes = np.full((batch,), count, np.int32) if lengths is None else np.asarray(lengths)
        whole = np.issubdtype(sizes.dtype, np.integer)
        if not whole or sizes.shape != (batch,) or sizes.min() < 0 or sizes.max() > count:
            raise ValueError(f"lengths is {lengths}; expected {batch} integers between 0 and {count}.")
        sizes = sizes.astype(np.int32)
        if prefill is not None and not 1 <= prefill <= count:
            raise ValueError(f"prefill is {prefill}; it must be between 1 and the {count} tokens given.")
        first = count if prefill is None else prefill
        cache = self.steps.new_cache(batch, count)
        tokens = jnp.asarray(ids, jnp.int32)
        logits, cache = self.steps.forward(tokens[:, :first], jnp.asarray(np.minimum(sizes, first)), cache)
        pieces = [logits]
        for index in range(first, count):
            here = jnp.asarray((sizes > index).astype(np.int32))
            logits, cache = self.steps.forward(tokens[:, index : index + 1], here, cache)
            pieces.append(logits)
        return jnp.concatenate(pieces, axis=1).astype(jnp.float32)

    def stream(
        self,
        prompt: str | Sequence[int] | np.ndarray | jax.Array,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[GenerationChunk]:
        """Continue a prompt, yielding text as it becomes complete; the last chunk has the finish reason.

        prompt: text, or token ids (with a folder that has no tokenizer, chunks then carry ids and no text).
        """
        prompt_ids = self._prompt_ids(prompt)
        decoder = None if self.tokenizer is None else self.tokenizer.stream_decoder()
        stops = {i for i in (self.config.eos_id, getattr(self.tokenizer, "stop_id", None)) if i is not None}
        if self.tokenizer is not None:
            stops |= {self.tokenizer.eos_id, self.tokenizer.bos_id}
        tokens = generate_ids(
            self.steps, prompt_ids, max_new_tokens, stops, temperature, top_p, seed, self.max_context
        )
        for token, reason in tokens:
            if token is not None:
                yield GenerationChunk("" if decoder is None else decoder.push(token), token)
            else:
                yield GenerationChunk("" if decoder is None else decoder.flush(), None, str(reason))

    def generate(
        self,
        prompt_or_messages: str | Sequence[int] | Sequence[dict[str, Any]] | np.ndarray | jax.Array,
        effort: str | None = None,
        tools: Any = None,
        images: Any = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generation:
        """Continue a text (or token ids) and return everything at once; see `stream`.

        temperature 0 is greedy; with a positive one, equal seeds give equal text.
        """
        if effort is not None or tools is not None or images is not None:
            raise NotImplementedError(
                "effort, tools and images belong to conversations, which this version does not support; pass a text."
            )
        if not isinstance(prompt_or_messages, str) and any(isinstance(m, dict) for m in prompt_or_messages):
            raise NotImplementedError(
                "Conversations are not supported by this version; pass a text or token ids."
            )
        text, ids, reason = [], [], ""
        for chunk in self.stream(prompt_or_messages, max_new_tokens, temperature, top_p, seed):  # pyright: ignore
            text.append(chunk.text)
            if chunk.token_id is not None:
                ids.append(chunk.token_id)
            reason = chunk.finish_reason or reason
        prompt_tokens = len(self._prompt_ids(prompt_or_messages))  # pyright: ignore
        return Generation("".join(text), ids, reason, Usage(prompt_tokens, len(ids)))

    def _prompt_ids(self, prompt: str | Sequence[int] | np.ndarray | jax.Array) -> list[int]:
        if not isinstance(prompt, str):
            ids = np.asarray(prompt)
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise ValueError(
                    f"The prompt is {ids.dtype} of shape {ids.shape}; give a text or one row of whole-number token ids."
                )
            return [int(token) for token in ids]
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The prompt is not Unicode text (character {error.start} has no UTF-8 form); correct it first."
            ) from None
        if self.tokenizer is None:
            raise ValueError(
                f"This checkpoint folder has no {TOKENIZER_FILE}, so text cannot be read; pass token ids or "
                "add the file."
            )
        return self.tokenizer.encode(prompt)


def shipped_folder(name: str) -> Path:
    """Folder of a checkpoint that comes with the package."""
    return Path(str(resources.files("moe28t_jax"))) / name


def load(
    source: str | Path,
    mesh: jax.sharding.Mesh | None = None,
    dtype: Any = "bfloat16",
    max_context: int | None = None,
    overrides: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a checkpoint folder in the public layout, or `nano`, the small trained model of this package.

    dtype: of activations and dense weights (`bfloat16`, `float32`, `float64` with x64 enabled); packed experts
    stay packed, parameters that the layout keeps in float32 stay so.
    max_context: longest sequence that caches are made for; default the model's own limit.
    overrides: configuration fields by dotted name (see `ModelConfig.override`).
    progress: a `rich.progress.Progress` to report loading on.

    Raises `moe28t_jax.CheckpointError` (a ValueError) when the folder is damaged or does not fit its
    configuration, ValueError for an unsupported configuration.
    """
    if mesh is not None:
        raise NotImplementedError("Loading onto a mesh is not supported by this version; pass mesh=None.")
    text = str(source)
    if "://" in text:
        raise NotImplementedError(
            f"{text!r} is an object-store address; this version reads local folders only."
        )
    folder = shipped_folder("nano") if text == "nano" else Path(source).expanduser()
    if text in PRESETS and text != "nano" and not folder.exists():
        raise ValueError(
            f"{text!r} is a preset without weights (only nano ships with the package); give the folder of a "
            f"checkpoint, or look at it with ModelConfig.preset({text!r}) or `moe28t inspect {text}`."
        )
    try:
        dtype = np.dtype(jnp.dtype(dtype))
    except TypeError:
        raise ValueError(f"dtype is {dtype!r}; it must be bfloat16, float32 or float64.") from None
    config = ModelConfig.from_hf(folder, overrides or {})
    parameters, config = load_parameters(folder, config, dtype, progress=progress)
    vocabulary = folder / TOKENIZER_FILE if folder.is_dir() else folder.parent / TOKENIZER_FILE
    tokenizer = Tokenizer.from_file(vocabulary) if vocabulary.is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{vocabulary.name} has {tokenizer.vocab_size} ids and the model {config.vocab_size}; they belong to "
            "different checkpoints."
        )
    return Model(config, parameters, tokenizer, max_context, mesh)
