"""Conversations from questions, tools and pictures, and rows of token ids from conversations.

A row is one conversation of several turns in one effort, as long as the row allows; what the assistant writes,
its closing elements and the end of its message included, is what the loss sees. A row depends on seed, step and
place alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32

from moe28t_jax.chat import Tokenizer, render
from moe28t_jax.chat.render import CLOSE, END_OF_MESSAGE, OPEN, SEPARATOR
from moe28t_jax.demo_tools import Toolbox, specifications
from moe28t_jax.training.nano.pictures import QUESTIONS, Scene, draw_scene, image_prompt, paint, patches
from moe28t_jax.training.nano.tasks import EFFORTS, FAMILIES, Question, draw_question, is_held_out

KEYS = ("pear", "car", "dog", "red", "left", "size", "name", "test", "key", "user", "day", "file")
WORDS = ("error", "list", "value", "data", "line", "code", "text", "time", "type", "class", "order", "result")
TOOL_FAMILIES = ("calculator", "read key", "write key", "read file", "write file")


@dataclass(frozen=True)
class ToolTask:
    """One request that takes one call: the call, what is in memory before it, thoughts, and the last answer."""

    family: str
    text: str
    declared: tuple[str, ...]
    call: dict[str, Any]
    answer: str
    store: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def held_out(self) -> bool:
        """Whether this request belongs to the held-out split."""
        return is_held_out(f"{self.family}: {self.text}")

    @property
    def thoughts(self) -> dict[str, str]:
        """Nothing for `low`, the tool for `high`, the tool and its arguments for `max`."""
        values = " ".join(str(value) for value in self.call["arguments"].values())
        return {"low": "", "high": self.call["name"], "max": f"{self.call['name']}: {values}"}

    def toolbox(self) -> Toolbox:
        """The tools with this task's memory."""
        return Toolbox(self.store, self.files)


def _number(random: np.random.Generator, digits: int) -> int:
    return int(random.integers(10 ** (digits - 1), 10**digits))


def draw_tool_task(random: np.random.Generator, family: str, held_out: bool) -> ToolTask:
    """A random request of a family from one of the two splits; the declared tools vary, the needed one is there."""
    while True:
        task = _tool_task(random, family)
        if task.held_out == held_out:
            return task


def _tool_task(random: np.random.Generator, family: str) -> ToolTask:
    key = KEYS[random.integers(len(KEYS))]
    word = WORDS[random.integers(len(WORDS))]
    number = _number(random, 2)
    path = f"{KEYS[random.integers(len(KEYS))]}{random.integers(10)}.txt"
    store: dict[str, Any] = {}
    files: dict[str, str] = {}
    match family:
        case "calculator":
            a, b = _number(random, 3), _number(random, 3)
            sign = "+-*"[random.integers(3)]
            text, call = f"What is {a} {sign} {b}?", {"expr": f"{a} {sign} {b}"}
            name, answer = "calc", str({"+": a + b, "-": a - b, "*": a * b}[sign])
        case "read key":
            # Which of the values a key may have is no part of the question: it comes with the result.
            text, call, name, answer = f"Get {key} {number}.", {"key": f"{key} {number}"}, "get", word
            store = {f"{key} {number}": word}
        case "write key":
            text, call, name, answer = f"Set {key} to {number}.", {"key": key, "value": number}, "set", "ok"
        case "read file":
            text, call, name, answer = f"Read {path}.", {"path": path}, "read", word
            files = {path: word}
        case _:
            text, call = f"Write {word} to {path}.", {"path": path, "text": word}
            name, answer = "write", "ok"
    others = [other for other in ("calc", "get", "set", "read", "write") if other != name]
    declared = [name]
    if random.integers(2):
        declared.append(others[random.integers(len(others))])
    order = random.permutation(len(declared))
    return ToolTask(
        family,
        text,
        tuple(declared[i] for i in order),
        {"name": name, "arguments": call},
        answer,
        store,
        files,
    )


@dataclass
class Conversation:
    """Messages in the short shape, declared tools, effort (None: unsaid) and pictures in reading order."""

    effort: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    pictures: list[np.ndarray] = field(default_factory=list)

    def pieces(self, add_generation_prompt: bool = False) -> list[tuple[str, bool]]:
        """The rendered conversation."""
        prompts = [image_prompt() for _ in self.pictures]
        return render(
            self.messages,
            tools=self.tools,
            thinking_effort=self.effort,
            image_prompts=prompts or None,
            add_generation_prompt=add_generation_prompt,
        )


def question_turns(question: Question, effort: str) -> list[dict[str, Any]]:
    """A question and its answer as messages."""
    return [
        {"role": "user", "content": question.text},
        {"role": "assistant", "reasoning_content": question.thoughts[effort], "content": question.answer},
    ]


def tool_turns(task: ToolTask, effort: str) -> list[dict[str, Any]]:
    """A request, its call, the executed result, and the answer as messages."""
    result = task.toolbox().execute(task.call["name"], task.call["arguments"])
    return [
        {"role": "user", "content": task.text},
        {
            "role": "assistant",
            "reasoning_content": task.thoughts[effort],
            "content": "",
            "tool_calls": [task.call],
        },
        {"role": "tool", "content": result},
        {"role": "assistant", "reasoning_content": "", "content": task.answer},
    ]


def picture_turns(scene: Scene, aspect: str, effort: str, show: bool) -> list[dict[str, Any]]:
    """A question about a picture and its answer; `show` puts the picture before the question."""
    question = scene.question(aspect)
    content: Any = question.text
    if show:
        content = [{"type": "image", "image": scene.caption}, {"type": "text", "text": question.text}]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "reasoning_content": question.thoughts[effort], "content": question.answer},
    ]


# What the renderer writes for the model to go on from; every assistant message begins with it.
_PROMPT = tuple(render([{"role": "user", "content": ""}]))[-10:]


def written_by_assistant(pieces: list[tuple[str, bool]]) -> list[bool]:
    """For each rendered piece, whether the assistant writes it: from behind the opened think channel to the end of
    the message."""
    result = []
    writing = False
    for index, piece in enumerate(pieces):
        writing = writing or tuple(pieces[max(index - len(_PROMPT), 0) : index]) == _PROMPT
        result.append(writing)
        writing = writing and piece != (END_OF_MESSAGE, True)
    return result


def encode_conversation(
    tokenizer: Tokenizer, conversation: Conversation, structure_weight: float = 1.0
) -> tuple[list[int], list[float]]:
    """Token ids of a whole conversation, and each one's weight: 1 for what the assistant writes, `structure_weight`
    for the elements around it, 0 for what it reads."""
    pieces = conversation.pieces()
    ids: list[int] = []
    weights: list[float] = []
    in_element = False
    for (text, special), mine in zip(pieces, written_by_assistant(pieces), strict=True):
        encoded = tokenizer.encode(text, allowed_special=special)
        ids += encoded
        # An element's name and attributes are plain pieces between its markers.
        in_element = in_element or (text in (OPEN, CLOSE) and special)
        weight = structure_weight if in_element or special else 1.0
        weights += [weight if mine else 0.0] * len(encoded)
        in_element = in_element and not (text == SEPARATOR and special)
    return ids, weights


KINDS = ("questions", "tools", "calls", "pictures")
STRINGS = ("reversal", "counting")
"""Families of the kind `strings`, questions of two families alone: what a miniature learns."""
MAX_PICTURES = 4


def draw_turns(
    random: np.random.Generator, kind: str, effort: str, held_out: bool = False
) -> Iterator[tuple[list[dict[str, Any]], list[str], list[np.ndarray]]]:
    """Endless turns of one kind: their messages, the tools they need declared, the pictures they show.

    Conversations with tools have questions that need none among them, those of `calls` have not. A picture is asked
    about twice.
    """
    families = STRINGS if kind == "strings" else tuple(FAMILIES)
    first = bool(random.integers(4) == 0)
    while True:
        if kind in ("questions", "strings") or (kind == "tools" and first):
            family = families[random.integers(len(families))]
            yield question_turns(draw_question(random, family, held_out), effort), [], []
        elif kind in ("tools", "calls"):
            family = TOOL_FAMILIES[random.integers(len(TOOL_FAMILIES))]
            task = draw_tool_task(random, family, held_out)
            yield tool_turns(task, effort), list(task.declared), []
        else:
            scene = draw_scene(random, held_out)
            picture = paint(scene, random)
            aspects = random.permutation(list(QUESTIONS))[:2].tolist()
            yield picture_turns(scene, aspects[0], effort, show=True), [], [picture]
            yield picture_turns(scene, aspects[1], effort, show=False), [], []
        first = not first


def draw_conversation(
    random: np.random.Generator,
    tokenizer: Tokenizer,
    kind: str,
    length: int,
    effort_text: bool = True,
    held_out: bool = False,
    structure_weight: float = 1.0,
) -> tuple[Conversation, list[int], list[float]]:
    """A conversation of at most `length` tokens and `MAX_PICTURES` pictures, with as many turns as fit, its ids and
    their weights (see `encode_conversation`).

    Without `effort_text` scratchpads still follow a drawn effort, but no message names it.
    """
    effort = EFFORTS[random.integers(len(EFFORTS))]
    named = effort if effort_text else None
    best: tuple[Conversation, list[int], list[float]] | None = None
    messages: list[dict[str, Any]] = []
    declared: list[str] = []
    pictures: list[np.ndarray] = []
    for turns, tools, shown in draw_turns(random, kind, effort, held_out):
        messages = [*messages, *turns]
        declared = [*declared, *(name for name in tools if name not in declared)]
        pictures = [*pictures, *shown]
        specified = specifications(declared) if declared else None
        conversation = Conversation(named, messages, specified, pictures)
        ids, weights = encode_conversation(tokenizer, conversation, structure_weight)
        if len(ids) > length or len(pictures) > MAX_PICTURES:
            break
        best = conversation, ids, weights
    if best is None:
        raise ValueError(f"No conversation of {kind} fits {length} tokens; make the rows longer.")
    return best


def picture_patches(pictures: list[np.ndarray], places: int = MAX_PICTURES) -> Float32[np.ndarray, "I P C"]:
    """Patches of pictures, filled up with empty ones to a fixed number: [places, 64, 588]."""
    filled = [*pictures, *[np.full((112, 112, 3), 255, np.uint8)] * (places - len(pictures))]
    return np.stack([patches(picture) for picture in filled])
