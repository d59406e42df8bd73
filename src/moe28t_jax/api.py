"""Loading a model and using it: the objects behind `moe28t_jax.load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.progress import Progress

from moe28t_jax.chat import PreparedImage, StreamParser, Tokenizer
from moe28t_jax.config import ModelConfig
from moe28t_jax.conversation import (
    STUB_TOKENS,
    Generation,
    GenerationChunk,
    Prompt,
    Usage,
    encode_text,
    finished,
    is_conversation,
    prepare_conversation,
    prepare_images,
    read_conversation,
    warn_of_left_out,
)
from moe28t_jax.engine import Steps, check_generation, generate_ids
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.model.vision import encode_prepared
from moe28t_jax.parallel.formats import device_layout, mesh_layout
from moe28t_jax.parallel.mesh import check_mesh
from moe28t_jax.planning.licence import LicenceResult
from moe28t_jax.sources import TOKENIZER_FILE, resolve

TEXT_TOKENS = 256
CONVERSATION_TOKENS = 4096
"""Default limits of new tokens; the context may end sooner."""

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | np.ndarray | jax.Array


class Model:
    """A loaded checkpoint: `config`, `parameters`, `tokenizer` (None where the folder has none), `mesh`, `licence` (the
    judgement of the licence file; None where the folder has none)."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        tokenizer: Tokenizer | None = None,
        max_context: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
        name: str = "model",
        licence: LicenceResult | None = None,
    ):
        _check_context(max_context, config)
        self.config, self.parameters, self.tokenizer, self.mesh = config, parameters, tokenizer, mesh
        self.max_context = max_context or config.max_context
        self.name, self.licence = name, licence
        self.steps = Steps(parameters, config, mesh=mesh)

    def __repr__(self) -> str:
        dtype = self.parameters["embedding"].dtype
        count = self.config.parameter_count().total
        return f"Model({self.name!r}, {count:,} parameters, context {self.max_context:,}, {dtype})"

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
        images: paths, bytes, Pillow images, arrays or data URLs, in reading order of the batch; token_ids hold
        one media pad for each of their tokens. Without images a media pad is a token like any other.
        """
        try:
            ids = np.asarray(token_ids)
        except ValueError:
            raise ValueError(
                "token_ids has rows of different lengths; pad them on the right and pass their lengths as lengths."
            ) from None
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
        if images is not None and not isinstance(images, list | tuple):
            raise ValueError(
                f"images is a {type(images).__name__}; expected a list of images: put the image into one."
            )
        features = None if images is None else self._image_features(prepare_images(images, self.config))
        media = (ids == self.config.media_pad_id) & (np.arange(count) < sizes[:, None])
        if features is not None and int(media.sum()) != len(features):
            raise ValueError(
                f"token_ids holds {int(media.sum())} media pads and the images have {len(features)} tokens; write "
                "one pad per image token."
            )
        first = count if prefill is None else prefill
        cache = self.steps.new_cache(batch, count)
        pieces = []
        for start in (0, *range(first, count)):
            stop = first if start == 0 else start + 1
            here = np.clip(sizes - start, 0, stop - start)
            rows = None if features is None else _features_of(features, media, start, stop)
            tokens, lengths_B = jnp.asarray(ids[:, start:stop], jnp.int32), jnp.asarray(here.astype(np.int32))
            logits, cache = self.steps.forward(tokens, lengths_B, cache, "all", rows)
            pieces.append(logits)
        return jnp.concatenate(pieces, axis=1).astype(jnp.float32)

    def stream(
        self,
        prompt_or_messages: PromptLike,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        effort: str | None = None,
        tools: Any = None,
        images: Any = None,
        thinking: bool = True,
        tool_choice: str | None = None,
        response_format: Any = None,
    ) -> Iterator[GenerationChunk]:
        """As `generate`, in pieces as they become complete; the last chunk has the finish reason and the result.

        With a folder that has no tokenizer, chunks carry ids and no text.
        """
        prompt = self._prompt(
            prompt_or_messages, effort, tools, images, thinking, tool_choice, response_format
        )
        warn_of_left_out(prompt_or_messages)
        is_text = prompt.request is None
        if max_new_tokens is None:
            max_new_tokens = TEXT_TOKENS if is_text else CONVERSATION_TOKENS
        stops = {i for i in (self.config.eos_id, getattr(self.tokenizer, "stop_id", None)) if i is not None}
        if self.tokenizer is not None:
            stops |= {self.tokenizer.eos_id, self.tokenizer.bos_id}
        # Before the image tower runs, which takes longest.
        check_generation(
            self.config, prompt.token_ids, max_new_tokens, temperature, top_p, seed, self.max_context
        )
        tokens = generate_ids(
            self.steps, prompt.token_ids, max_new_tokens, stops, temperature, top_p, seed, self.max_context,
            **({"image_features": self._image_features(prompt.images)} if prompt.images else {}),
        )  # fmt: skip
        return self._text_chunks(prompt, tokens) if is_text else self._conversation_chunks(prompt, tokens)

    def _text_chunks(self, prompt: Prompt, tokens: Iterator[Any]) -> Iterator[GenerationChunk]:
        decoder = None if self.tokenizer is None else self.tokenizer.stream_decoder()
        ids: list[int] = []
        texts: list[str] = []
        for token, reason in tokens:
            if token is not None:
                ids.append(token)
                texts.append("" if decoder is None else decoder.push(token))
                yield GenerationChunk(texts[-1], token)
            else:
                texts.append("" if decoder is None else decoder.flush())
                text = "".join(texts)
                message = {"role": "assistant", "content": text}
                usage = Usage(len(prompt.token_ids), len(ids))
                result = Generation(text, ids, str(reason), usage, message=message)
                yield GenerationChunk(texts[-1], None, str(reason), result=result)

    def _conversation_chunks(self, prompt: Prompt, tokens: Iterator[Any]) -> Iterator[GenerationChunk]:
        assert self.tokenizer is not None and prompt.request is not None
        parser = StreamParser(self.tokenizer, prompt.request.thinking)
        ids: list[int] = []
        reasoning_tokens = 0
        for token, reason in tokens:
            if token is None:
                for event in parser.flush():
                    yield GenerationChunk(event.text, None, None, event.channel, event.tool_call)
                usage = Usage(len(prompt.token_ids) - STUB_TOKENS, len(ids), reasoning_tokens)
                result = finished(parser.output, ids, str(reason), usage, prompt)
                yield GenerationChunk("", None, result.finish_reason, None, result=result)
                return
            ids.append(token)
            reasoning_tokens += parser.channel == "reasoning"
            events = parser.push(token)
            if not events:
                yield GenerationChunk("", token, None, parser.channel)
            for index, event in enumerate(events):
                yield GenerationChunk(
                    event.text, None if index else token, None, event.channel, event.tool_call
                )

    def generate(
        self,
        prompt_or_messages: PromptLike,
        effort: str | None = None,
        tools: Any = None,
        images: Any = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        thinking: bool = True,
        tool_choice: str | None = None,
        response_format: Any = None,
    ) -> Generation:
        """Continue a text (or token ids), or answer a conversation; everything at once, see `stream`.

        prompt_or_messages: text, token ids, a list of messages, or a request body {"messages": ..., "tools": ...}
        of which the conversation is read; a UserWarning names fields that ask for more and are left out, sampling ones
        among them. Messages and tools have the OpenAI shape or
        the short one of :mod:`moe28t_jax.chat`. Images stand in message parts ({"type": "image", "image": X} or
        {"type": "image_url", "image_url": {"url": X}}) or in `images`, which go before the text of the last
        user message: paths, bytes, Pillow images, arrays, data URLs.

        effort: `low`, `high` or `max` (the default for conversations); `none`, or thinking=False, asks for an
        answer without reasoning. tool_choice and response_format are told to the model and not enforced.
        max_new_tokens: default 256 for a text and 4096 for a conversation, reasoning included; the context may
        end sooner. temperature 0 is greedy; with a positive one, equal seeds give equal text.

        Raises ValueError, in one sentence, for a request that cannot be rendered or does not fit the model.
        """
        result = None
        for chunk in self.stream(
            prompt_or_messages, max_new_tokens, temperature, top_p, seed,
            effort, tools, images, thinking, tool_choice, response_format,
        ):  # fmt: skip
            result = chunk.result
        assert result is not None
        return result

    def _image_features(self, images: Sequence[PreparedImage]) -> Float[Array, "N D"]:
        pairs = ((image.pixel_values(), image.grid) for image in images)
        return encode_prepared(self.parameters, pairs, self.config)

    def count_tokens(
        self,
        prompt_or_messages: PromptLike,
        effort: str | None = None,
        tools: Any = None,
        images: Any = None,
        thinking: bool = True,
        tool_choice: str | None = None,
        response_format: Any = None,
    ) -> int:
        """`usage.prompt_tokens` of what `generate` would read, images included; the model is not run. In the context a
        conversation takes three tokens more, which open the answer."""
        prompt = self._prompt(
            prompt_or_messages, effort, tools, images, thinking, tool_choice, response_format
        )
        return len(prompt.token_ids) - (0 if prompt.request is None else STUB_TOKENS)

    def _prompt(
        self,
        prompt: Any,
        effort: str | None,
        tools: Any,
        images: Any,
        thinking: bool,
        tool_choice: str | None,
        response_format: Any,
    ) -> Prompt:
        if is_conversation(prompt):
            request = read_conversation(prompt, effort, tools, images, thinking, tool_choice, response_format)
            if self.tokenizer is None:
                raise ValueError(
                    f"This checkpoint folder has no {TOKENIZER_FILE}, so conversations cannot be read; add the file."
                )
            return prepare_conversation(request, self.tokenizer, self.config)
        if not thinking or any(
            value is not None for value in (effort, tools, images, tool_choice, response_format)
        ):
            raise ValueError(
                "effort, thinking, tools, tool_choice, response_format and images belong to conversations and the "
                "prompt is a text; pass messages such as [{'role': 'user', 'content': 'Hello'}]."
            )
        return Prompt(self._prompt_ids(prompt))

    def _prompt_ids(self, prompt: str | Sequence[int] | np.ndarray | jax.Array) -> list[int]:
        if isinstance(prompt, list | tuple) and not prompt:
            raise ValueError(
                "The prompt has no tokens and no messages; give at least one token id, or a message such as "
                "{'role': 'user', 'content': 'Hello'}."
            )
        if not isinstance(prompt, str):
            ids = np.asarray(prompt)
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise ValueError(
                    f"The prompt is {ids.dtype} of shape {ids.shape}; give a text or one row of whole-number token ids."
                )
            return [int(token) for token in ids]
        if self.tokenizer is None:
            raise ValueError(
                f"This checkpoint folder has no {TOKENIZER_FILE}, so text cannot be read; pass token ids or "
                "add the file."
            )
        return encode_text(prompt, self.tokenizer)


def _features_of(
    features: Float[Array, "N D"], media: np.ndarray, start: int, stop: int
) -> Float[Array, "M D"] | None:
    """Rows for the media pads of columns start to stop, in reading order; None where there is no pad.

    At least one row per batch row, so that single tokens share one compiled program.
    """
    order = np.cumsum(media.reshape(-1)).reshape(media.shape) - 1
    rows = order[:, start:stop][media[:, start:stop]]
    if not rows.size:
        return None
    return features[np.pad(rows, (0, max(len(media) - rows.size, 0)))]


def _check_context(max_context: int | None, config: ModelConfig) -> None:
    whole = isinstance(max_context, int | np.integer) and not isinstance(max_context, bool)
    if max_context is not None and not (whole and 1 <= max_context <= config.max_context):
        raise ValueError(
            f"max_context is {max_context}; this model allows 1 to {config.max_context} tokens per sequence."
        )


def load(
    source: str | Path,
    mesh: jax.sharding.Mesh | None = None,
    dtype: Any = "bfloat16",
    max_context: int | None = None,
    overrides: dict[str, Any] | None = None,
    progress: Progress | None = None,
    vision: bool = True,
    accept_licence: str | None = None,
    cache: str | Path | None = None,
) -> Model:
    """Load a checkpoint: a folder in the public layout or of `moe28t convert --to orbax`, an address in an object store
    (s3://, gs://), or `nano`, the small trained model of this package.

    On a mesh, and from an object store, each process reads only what its devices hold (`weights.stream_parameters`).

    mesh: devices to lay the parameters over, from `moe28t_jax.parallel.make_mesh`; None for one device. On accelerators
    repeated layers are stacked, and packed experts come in the layout that the device's kernels read.
    dtype: of activations and dense weights (`bfloat16`, `float32`, `float64` with x64 enabled); packed experts
    stay packed, parameters that the layout keeps in float32 stay so.
    max_context: longest sequence that caches are made for; default the model's own limit.
    overrides: configuration fields by dotted name (see `ModelConfig.override`).
    progress: a `rich.progress.Progress` to report loading on.
    vision: load the image tower, if there is one; without it the model reads text only.
    accept_licence: hash of a licence file beside the weights that you accept though it is none of the known ones
    (`moe28t licence` prints it, and accepts it for good).
    cache: folder that keeps what an object store sent, so that an interrupted load goes on; delete it afterwards.

    Raises `moe28t_jax.CheckpointError` (a ValueError) when the checkpoint is damaged or does not fit its configuration,
    `planning.LicenceError` (a ValueError) when its licence is not known to allow loading and was not accepted,
    FileNotFoundError when there is no checkpoint, ValueError for an unsupported configuration or a mesh that does not
    divide it.
    """
    if mesh is not None:
        check_mesh(mesh)
        if not isinstance(mesh, jax.sharding.Mesh):
            raise ValueError(
                "The mesh is an AbstractMesh, which has no devices to load onto; make one with "
                "moe28t_jax.parallel.make_mesh."
            )
    found = resolve(source)
    try:
        found_dtype = np.dtype(jnp.dtype(dtype))
    except TypeError:
        found_dtype = None
    if found_dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(f"dtype is {dtype!r}; it must be bfloat16, float32 or float64.")
    dtype = found_dtype
    licence = found.licence(accept_licence)
    config = found.config(overrides or {})
    if mesh is not None:
        layout, stacked = mesh_layout(mesh)
    elif (device := jax.devices()[0]).platform == "cpu":
        layout, stacked = None, False
    else:
        layout, stacked = device_layout(device)
    # What is known to be wrong is said before weights are read.
    _check_context(max_context, config)
    tokenizer = found.tokenizer()
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{TOKENIZER_FILE} has {tokenizer.vocab_size} ids and the model {config.vocab_size}; they belong to "
            "different checkpoints."
        )
    parameters, config = found.parameters(config, dtype, mesh, stacked, vision, cache, progress, layout)
    return Model(config, parameters, tokenizer, max_context, mesh, found.name, licence)
