"""What goes into a generation and what comes out: requests, prompts, results. Nothing here runs a model."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe28t_jax.chat import (
    ChatRequest,
    ParsedOutput,
    PreparedImage,
    Tokenizer,
    encode,
    image_parts,
    image_prompt,
    normalize_messages,
    normalize_request,
    open_image,
    prepare_image,
    render,
)
from moe28t_jax.chat.effort import THINKING_FIELDS
from moe28t_jax.config import ModelConfig

_REQUEST_FIELDS = ("tools", "tool_choice", "response_format")
# Fields of a request that say nothing about the answer; and values of others that ask for what is done anyway.
_IDLE_FIELDS = ("model", "stream", "stream_options", "user", "metadata", "store")
_IDLE_VALUES = {"n": 1, "stop": [], "presence_penalty": 0, "frequency_penalty": 0, "logprobs": False}
STUB_TOKENS = 3
"""Opening of the think or response channel at the end of a prompt, which usage does not count."""


@dataclass(frozen=True)
class Usage:
    """Tokens read and written by one request.

    `prompt_tokens` leaves out the three tokens that open a conversation's answer, as the public service does;
    `reasoning_tokens` are those of the completion that were written in the think channel, its closing included.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Generation:
    """What a model wrote.

    `finish_reason`: `stop` (it ended its turn), `tool_calls` (it ended its turn and asks for tools), or
    `length` (the token limit). `tool_calls` are complete calls, {"name", "arguments"}. `unparsed` is output of
    a conversation that is none of text, reasoning and calls, above all a call that was cut off. `message` is
    the assistant message to append to a conversation.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    unparsed: str = ""
    message: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationChunk:
    """A piece of a streamed generation.

    `text` is new text of `channel` (`reasoning` or `content`; `content` for a plain prompt) or `tool_call` is a
    complete call of channel `tool_call`; `channel` None stands between channels. `token_id` is the token behind
    it (None on further chunks of the same token, and where text was settled by the end). The last chunk has
    the finish reason and the whole `result`.
    """

    text: str
    token_id: int | None = None
    finish_reason: str | None = None
    channel: str | None = "content"
    tool_call: dict[str, Any] | None = None
    result: Generation | None = None


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, with the images behind their media pads. `request` is None for a plain text."""

    token_ids: list[int]
    images: list[PreparedImage] = field(default_factory=list)
    request: ChatRequest | None = None


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a request or a list of messages, and not text or token ids."""
    if isinstance(prompt, Mapping):
        return True
    return isinstance(prompt, list | tuple) and any(isinstance(item, Mapping) for item in prompt)


def encode_text(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text to continue. Raises ValueError where it holds what is no Unicode."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The prompt is not Unicode text (character {error.start} has no UTF-8 form); correct it first."
        ) from None
    return tokenizer.encode(prompt)


def read_conversation(
    messages: Any,
    effort: str | None = None,
    tools: Any = None,
    images: Any = None,
    thinking: bool = True,
    tool_choice: Any = None,
    response_format: Any = None,
) -> ChatRequest:
    """One request from messages, or from a whole request body, and options beside it.

    effort: `low`, `high`, `max` (the default) or `none`, which is the same as thinking=False. images: put before
    the text of the last user message. Raises ValueError, in one sentence, for what cannot be rendered and for an option
    that the request body has already decided.
    """
    request: dict[str, Any] = dict(messages) if isinstance(messages, Mapping) else {"messages": messages}
    given = {"tools": tools, "tool_choice": tool_choice, "response_format": response_format}
    for name in _REQUEST_FIELDS:
        if given[name] is not None:
            if request.get(name) is not None:
                raise ValueError(f"{name} is given in the request and beside it; give it once.")
            request[name] = given[name]
    if effort is not None:
        if not isinstance(effort, str) or effort not in ("low", "high", "max", "none"):
            raise ValueError(
                f"effort is {effort!r}; expected 'low', 'high', 'max' or 'none': use one of these."
            )
        if not thinking and effort != "none":
            raise ValueError(f"effort is {effort!r} with thinking=False; leave out one of the two.")
    if effort is not None or not thinking:
        for name in THINKING_FIELDS:
            if request.get(name) is not None:
                raise ValueError(
                    f"effort or thinking is given beside a request that holds {name}; decide it in one place."
                )
        request["reasoning_effort"] = "none" if not thinking else effort
    if images is not None:
        request["messages"] = with_images(request.get("messages"), images)
    return normalize_request(request)


def left_out(request: Any, read: Collection[str] = ()) -> list[str]:
    """Fields of a request body that ask for something and that nothing here reads, sorted; `read` are those that the
    caller does read. Empty for a list of messages."""
    if not isinstance(request, Mapping):
        return []
    known = {"messages", *_REQUEST_FIELDS, *THINKING_FIELDS, *_IDLE_FIELDS, *read}
    asking = (
        name
        for name, value in request.items()
        if name not in known
        and value is not None
        and not (name in _IDLE_VALUES and value == _IDLE_VALUES[name])
    )
    return sorted(map(str, asking))


def warn_of_left_out(request: Any) -> None:
    """A UserWarning, where the package was called, that names what :func:`left_out` finds."""
    if unread := left_out(request):
        warnings.warn(
            f"Left out of the request, since it has no effect there: {', '.join(unread)}. (max_new_tokens, "
            "temperature, top_p and seed are given beside it.)",
            skip_file_prefixes=(str(Path(__file__).parent),),
        )


def with_images(messages: Any, images: Any) -> Any:
    """Messages with images (a list) before the text of the last user message.

    Raises ValueError, in one sentence, where there is no user message and for messages that cannot be rendered.
    """
    if not isinstance(images, list | tuple):
        raise ValueError(
            f"images is a {type(images).__name__}; expected a list of images: put the image into one."
        )
    if not images:
        return messages
    users = [index for index, message in enumerate(normalize_messages(messages)) if message["role"] == "user"]
    if not users:
        raise ValueError("images belong to the last user message and there is none; add a user message.")
    changed = list(messages)
    message = changed[users[-1]]
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    parts = [*({"type": "image", "image": image} for image in images), *parts]
    changed[users[-1]] = {**message, "content": parts}
    return changed


def image_source(part: Mapping[str, Any]) -> Any:
    """The image of a message part: {"type": "image", "image": X}, or {"type": "image_url", "image_url": X or
    {"url": X}}."""
    value = part[part["type"]]
    if isinstance(value, Mapping):
        if not value.get("url"):
            raise ValueError("An image part has no url; expected {'url': a data URL or a path}: add it.")
        return value["url"]
    return value


def prepare_images(
    sources: Sequence[Any], config: ModelConfig, *, allow_paths: bool = True
) -> list[PreparedImage]:
    """Open and resize images as the model's tower reads them; ValueError for a model without one.

    allow_paths False refuses paths, for sources that come from somebody else.
    """
    vision = config.vision
    if not sources:
        return []
    if vision is None:
        raise ValueError(
            "This model has no image tower, so it cannot read images; leave them out or load a model that has one."
        )
    merge = (vision.merge_height, vision.merge_width)
    return [
        prepare_image(open_image(source, allow_paths), patch_size=vision.patch_size, merge=merge)
        for source in sources
    ]


def prepare_conversation(
    request: ChatRequest, tokenizer: Tokenizer, config: ModelConfig, *, allow_paths: bool = True
) -> Prompt:
    """Render and encode a request with its images, ready to be continued; allow_paths as in `prepare_images`."""
    sources = [image_source(part) for part in image_parts(request.messages)]
    images = prepare_images(sources, config, allow_paths=allow_paths)
    prompts = [image_prompt(image.size, image.num_tokens) for image in images]
    pieces = render(**request.render_arguments(), image_prompts=prompts)
    return Prompt(encode(tokenizer, pieces), images, request)


def finished(
    parsed: ParsedOutput, token_ids: list[int], reason: str, usage: Usage, prompt: Prompt
) -> Generation:
    """The result of a conversation's turn."""
    if reason == "stop" and parsed.tool_calls:
        reason = "tool_calls"
    return Generation(
        text=parsed.content or "",
        token_ids=token_ids,
        finish_reason=reason,
        usage=usage,
        reasoning=parsed.reasoning or "",
        tool_calls=parsed.tool_calls,
        unparsed=parsed.unparsed,
        message=assistant_message(parsed, prompt.request.messages if prompt.request else []),
    )


def assistant_message(parsed: ParsedOutput, earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A turn as a message that follows `earlier` ones; its calls get ids that are new in the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        before = [call for turn in earlier for call in turn.get("tool_calls") or ()]
        used = {call.get("id") for call in before}
        number = len(before)
        calls = []
        for call in parsed.tool_calls:
            while f"call_{number}" in used:
                number += 1
            calls.append({"id": f"call_{number}", "type": "function", "function": dict(call)})
            number += 1
        message["tool_calls"] = calls
    return message
