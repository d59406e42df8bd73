"""`moe28t generate`: continue a text, or answer a conversation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe28t_jax.chat.effort import THINKING_FIELDS
from moe28t_jax.cli.answering import Printer, converse
from moe28t_jax.cli.common import (
    Clock,
    fail,
    harmless,
    json_text,
    load_model,
    read_json,
    read_standard_input,
    read_text,
    read_tools,
    remark,
)

# Fields of a request that give each of the options.
_SAMPLING = {
    "max_new_tokens": ("max_completion_tokens", "max_tokens"),
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "seed": ("seed",),
}


def run_generate(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.chat is not None or options.messages is not None:
        if options.prompt is not None or options.prompt_file is not None:
            fail("--prompt continues a text and --chat or --messages holds a conversation; give one of them.")
        return _answer(options)
    for name in ("system", "image", "effort", "tools", "demo_tools"):
        if getattr(options, name):
            fail(f"--{name.replace('_', '-')} belongs to a conversation; give the question as --chat TEXT.")
    return _continue(options)


# -- a text --------------------------------------------------------------------------------------------------------
def _continue(options: argparse.Namespace) -> int:
    prompt = _prompt(options)
    check_sampling(sampling(options))

    def token_ids(tokenizer: Any, _: Any) -> list[int]:
        from moe28t_jax.conversation import encode_text

        return encode_text(prompt, tokenizer)

    model = load_model(options, _fits(options, token_ids))
    clock, text, result = Clock(), [], None
    show = not options.json
    if sys.stderr.isatty():
        remark("The first token takes a while: the model is compiled.")
    if show and not options.no_echo:
        print(harmless(prompt, sys.stdout), end="", flush=True)
    for chunk in model.stream(prompt, **sampling(options)):
        if chunk.token_id is not None:
            clock.tick()
        text.append(chunk.text)
        result = chunk.result
        if show:
            print(harmless(chunk.text, sys.stdout), end="", flush=True)
    assert result is not None
    if options.json:
        usage = {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
        }
        found = {"text": "".join(text), "finish_reason": result.finish_reason, "usage": usage}
        print(json_text({**found, "tokens_per_second": _rounded(clock)}))
    else:
        print(flush=True)
        remark(summary(result, clock))
    return 0


def _fits(
    options: argparse.Namespace, encode: Callable[[Any, Any], Sequence[int]]
) -> Callable[[Any, Any], None]:
    """What is known of a prompt from a model's configuration and tokenizer, before its weights are read."""

    def check(config: Any, tokenizer: Any) -> None:
        from moe28t_jax.engine import check_generation

        if tokenizer is None:
            fail("This checkpoint folder has no tiktoken.model, so text cannot be read; put that file there.")
        check_generation(config, encode(tokenizer, config), 1, max_context=options.max_context)

    return check


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None and options.prompt_file is not None:
        fail("--prompt and --prompt-file exclude each other; give one.")
    if options.prompt_file is not None:
        return read_text(options.prompt_file)
    if options.prompt is not None:
        return options.prompt
    return read_standard_input(
        "There is no prompt; give --prompt TEXT, --prompt-file FILE, or text on standard input "
        "(--chat TEXT for a conversation)."
    )


# -- a conversation ------------------------------------------------------------------------------------------------
def _answer(options: argparse.Namespace) -> int:
    request = _request(options)
    execute = None
    if options.demo_tools:
        from moe28t_jax.demo_tools import DEMO_FILES, Toolbox, specifications

        if request.get("tools"):
            fail("--demo-tools brings its own tools; leave out --tools, or the tools of the request.")
        request["tools"], execute = specifications(), Toolbox(files=DEMO_FILES).execute
    values = _sampling_of(request, sampling(options))
    check_sampling(values)
    request = _without_left_out(request)
    _check(request, options.image or [])
    messages = request.pop("messages")

    def token_ids(tokenizer: Any, config: Any) -> list[int]:
        from moe28t_jax.conversation import prepare_conversation, read_conversation

        return prepare_conversation(
            read_conversation({**request, "messages": messages}), tokenizer, config
        ).token_ids

    # Everything about the request is known to be right before the much longer loading begins.
    model = load_model(options, _fits(options, token_ids))
    printer = None if options.json else Printer()
    turns: list[Any] = []

    def ask(conversation: list[dict[str, Any]]) -> Any:
        return model.stream({**request, "messages": conversation}, **values)

    before = len(messages)
    last = converse(ask, messages, printer, execute, turns.append)
    if last.result is None:
        raise KeyboardInterrupt
    if options.json:
        result = last.result
        found = {
            "text": result.text,
            "reasoning": result.reasoning,
            "tool_calls": result.tool_calls,
            "finish_reason": result.finish_reason,
            "usage": {
                "prompt_tokens": result.usage.prompt_tokens,
                "completion_tokens": result.usage.completion_tokens,
                "reasoning_tokens": result.usage.reasoning_tokens,
            },
            "tokens_per_second": _rounded(last.clock),
            "messages": messages[before:],
        }
        if result.unparsed.strip():
            found["unparsed"] = result.unparsed
        print(json_text(found))
    else:
        for turn in turns:
            remark(summary(turn.result, turn.clock))
    return 0


def _request(options: argparse.Namespace) -> dict[str, Any]:
    """The request that file and options make together."""
    request: dict[str, Any] = {"messages": []}
    if options.messages is not None:
        value = read_json(options.messages)
        if isinstance(value, Mapping):
            request = dict(value)
        elif isinstance(value, list):
            request = {"messages": value}
        else:
            fail(
                f"{str(options.messages)!r} holds a {type(value).__name__}; expected a list of messages, or an object "
                'with the list as messages: write it as in [{"role": "user", "content": "Hello"}].'
            )
    messages = request.get("messages")
    if not isinstance(messages, list):
        fail(f"{str(options.messages)!r} has no list of messages; give it as messages.")
    messages = list(messages)
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    if options.chat is not None:
        messages.append({"role": "user", "content": options.chat})
    request["messages"] = messages
    if options.effort is not None:
        for name in THINKING_FIELDS:
            if request.get(name) is not None:
                fail(f"--effort is given beside a request that holds {name}; decide it in one place.")
        request["reasoning_effort"] = options.effort
    if options.tools is not None:
        if request.get("tools"):
            fail("--tools is given beside a request that holds tools; give them in one place.")
        request["tools"] = read_tools(options.tools)
    return request


def _without_left_out(request: dict[str, Any]) -> dict[str, Any]:
    """The request without sampling, which goes beside it, and without what nothing reads, which is said."""
    from moe28t_jax.conversation import left_out

    unread, given = left_out(request, sampling_fields()), left_out(request)
    if unread:
        remark(f"moe28t generate: left out of the request, since it has no effect here: {', '.join(unread)}.")
    return {name: value for name, value in request.items() if name not in given}


def _check(request: dict[str, Any], images: list[str]) -> None:
    """Put pictures into the last user message; ValueError for a request or a picture that cannot be read."""
    from moe28t_jax.chat import image_parts, normalize_request, open_image
    from moe28t_jax.conversation import image_source, with_images

    request["messages"] = with_images(request["messages"], [open_image(path) for path in images])
    checked = normalize_request(request)
    for part in image_parts(checked.messages):
        open_image(image_source(part))


def _sampling_of(request: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Sampling values: those of the options, else those of the request, else the defaults."""
    for name, fields in _SAMPLING.items():
        given = next((request[field] for field in fields if request.get(field) is not None), None)
        if name not in values and given is not None:
            whole = name in ("max_new_tokens", "seed")
            if isinstance(given, bool) or not isinstance(given, int if whole else int | float):
                fail(
                    f"{name} of the request is {given!r}; expected a {'whole ' if whole else ''}number: correct it."
                )
            values[name] = given
    return values


# -- shared with the other commands --------------------------------------------------------------------------------
def sampling_fields() -> list[str]:
    """The fields of a request that say how to draw tokens."""
    return [field for fields in _SAMPLING.values() for field in fields]


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given."""
    names = _SAMPLING
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def check_sampling(values: Mapping[str, Any]) -> None:
    """ValueError for sampling values that no model takes."""
    from moe28t_jax.engine import check_sampling

    check_sampling(**values)


def summary(result: Any, clock: Clock) -> str:
    """One line of token counts."""
    usage = result.usage
    reasoning = f" ({usage.reasoning_tokens} reasoning)" if usage.reasoning_tokens else ""
    return (
        f"[{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} new{reasoning}{clock}, "
        f"{result.finish_reason}]"
    )


def _rounded(clock: Clock) -> float | None:
    return None if clock.rate is None else round(clock.rate, 2)
