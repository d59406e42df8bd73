"""Complete model output to reasoning, content and tool calls; the reverse of rendering an assistant turn.

Where markers are known from token ids (:func:`parse_ids`) or from rendered pieces (:func:`parse_pieces`), text
that merely looks like a marker is text. :func:`parse` has only text and must take every look-alike for a
marker: use it for output that is known to have none, or whose ids are lost.

Rules, beyond the well-formed case:

* Models leave out closing elements. A channel (think, response, tools) ends where a later one opens or where
  the message ends. An argument ends at its own close if one comes before any other part of a call, whatever
  stands in between; else where the next argument opens or the call closes.
* A call counts only inside the tools channel, and only when it is complete: it has a name, each of its
  arguments has a key, no key comes twice, nothing but whitespace stands between the arguments, and it has its
  own close. Anything else is no call, and its text is kept in ``unparsed``.
* A string argument is its text. Any other type is decoded as JSON, strictly, so that 1 is an int and 1.0 a
  float; where that fails, or gives another type than the declared one, the argument is its text, for the
  caller's schema check to refuse: nothing is guessed or repaired. A raw ``json`` block is decoded likewise and
  makes the call incomplete when it is no object.
* Whitespace may surround the words inside a marker. Markers that are not well formed, cut off, or without
  meaning where they stand are text of the channel they stand in.
* Text in the tools channel that is no part of a call, a malformed call's for instance, belongs to ``unparsed``.
* Text outside every channel belongs to the content; whitespace there, and markers that have no place there,
  belong to ``unparsed``. After the end of the message nothing is structure any more.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from moe28t_jax.chat.render import CLOSE, END_OF_MESSAGE, MARKERS, OPEN, SEPARATOR, type_name
from moe28t_jax.chat.strict_json import decode
from moe28t_jax.chat.tokenizer import Tokenizer

_CHANNELS = ("think", "response", "tools")
_TAGS = (*_CHANNELS, "message", "call", "argument", "json")
_TYPES = ("boolean", "null", "number", "string", "array", "object")
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_HEADER = re.compile(r'\s*+(\w++)((?:\s++\w++="[^"]*+")*+)\s*+')
_ATTRIBUTE = re.compile(r'(\w++)="([^"]*+)"')

_Item = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A model's turn.

    ``reasoning`` and ``content`` are None where they would be empty. ``tool_calls`` holds complete calls only,
    ``{"name": str, "arguments": dict}`` in order. ``unparsed`` is what belongs to none of these, as it stood:
    above all a call that was cut off or is malformed. A turn without such slips has at most whitespace in it.
    """

    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]]
    unparsed: str


def parse(text: str, thinking: bool = True) -> ParsedOutput:
    """Parse complete output, from after the generation prompt (which opened the think channel with
    ``thinking``, else the response channel) to its end or to where it was cut.

    A whole rendered turn, from its ``message`` element on, is read as well. Never raises on any text; every
    marker look-alike counts as a marker, see the module for the rules.
    """
    return parse_pieces([(text, True)], thinking)


def parse_pieces(pieces: Iterable[tuple[str, bool]], thinking: bool = True) -> ParsedOutput:
    """Parse ``(text, is_special)`` pieces, as :func:`moe28t_jax.chat.render` makes them: only special pieces
    hold markers. Otherwise as :func:`parse`."""
    return _Parser(list(_events(_items(pieces))), thinking).run()


def parse_ids(tokenizer: Tokenizer, ids: Iterable[SupportsIndex], thinking: bool = True) -> ParsedOutput:
    """Parse generated token ids: only the ids of the four markers are markers, and what is spelt like one in
    ordinary tokens is text.

    Other special tokens ([PAD], [EOS], media and reserved ones) are not text and are skipped; bytes that are
    not UTF-8 become U+FFFD. ValueError for an id outside the vocabulary; otherwise as :func:`parse`.
    """
    markers = {tokenizer.special_ids[marker]: marker for marker in MARKERS}
    pieces: list[_Item] = []
    run: list[int] = []
    for token_id in map(int, ids):
        if token_id in markers:
            pieces.append((tokenizer.decode(run), False))
            pieces.append((markers[token_id], True))
            run = []
        elif not tokenizer.is_special(token_id):
            run.append(token_id)
    pieces.append((tokenizer.decode(run), False))
    return parse_pieces(pieces, thinking)


# -- from pieces to events -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Event:
    """One unit of the output: ``kind`` is text, mark (a marker without meaning), open, close or end."""

    kind: str
    raw: str
    tag: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    def opens(self, *tags: str) -> bool:
        return self.kind == "open" and self.tag in tags

    def closes(self, *tags: str) -> bool:
        return self.kind == "close" and self.tag in tags

    @property
    def ends_message(self) -> bool:
        return self.kind == "end" or self.closes("message") or self.opens("message")

    @property
    def ends_value(self) -> bool:
        """Whether an argument cannot go on here unless its own close comes first."""
        return self.ends_message or self.closes("argument", "json", "call", "tools") or self.opens(*_TAGS[4:])


def _items(pieces: Iterable[_Item]) -> list[_Item]:
    """Markers (True) and the text between them (False), neighbouring texts joined, none empty."""
    items: list[_Item] = []
    texts: list[str] = []

    def flush() -> None:
        text = "".join(texts)
        texts.clear()
        if text:
            items.append((text, False))

    for text, is_special in pieces:
        start = 0
        for marker in _MARKER.finditer(text) if is_special else ():
            texts.append(text[start : marker.start()])
            flush()
            items.append((marker.group(), True))
            start = marker.end()
        texts.append(text[start:])
    flush()
    return items


def _events(items: list[_Item]) -> Iterator[_Event]:
    position = 0
    while position < len(items):
        text, is_marker = items[position]
        if is_marker and text == END_OF_MESSAGE:
            yield _Event("end", text)
        elif is_marker and text in (OPEN, CLOSE) and not _next_is_marker(items, position):
            inner = items[position + 1][0] if position + 1 < len(items) else ""
            if position + 2 >= len(items):
                yield _Event("mark", text + inner)
                return
            event = _element(text, inner) if items[position + 2] == (SEPARATOR, True) else None
            if event is None:
                yield _Event("mark", text)
            else:
                yield event
                position += 2
        else:
            yield _Event("mark" if is_marker else "text", text)
        position += 1


def _next_is_marker(items: list[_Item], position: int) -> bool:
    return position + 1 < len(items) and items[position + 1][1]


def _element(marker: str, inner: str) -> _Event | None:
    """The event of a marker's inside; None where it is none of the known elements, well formed."""
    header = _HEADER.fullmatch(inner)
    if header is None or header[1] not in _TAGS:
        return None
    raw = f"{marker}{inner}{SEPARATOR}"
    if marker == CLOSE:
        return None if header[2] else _Event("close", raw, header[1])
    attributes = _ATTRIBUTE.findall(header[2])
    values = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in attributes}
    return _Event("open", raw, header[1], values) if len(values) == len(attributes) else None


# -- from events to a turn -------------------------------------------------------------------------------------
class _Call:
    """A call while it is read; ``raw`` is everything of it, in case it does not become one."""

    def __init__(self, event: _Event) -> None:
        self.name = event.attributes.get("tool", "")
        self.arguments: dict[str, Any] = {}
        self.raw = [event.raw]
        self.spaces: list[str] = []
        self.valid = bool(self.name)
        self._has_block = False

    def text(self, event: _Event) -> None:
        """Take what stands between the arguments."""
        self.raw.append(event.raw)
        if event.kind == "text":
            self.spaces.append(event.raw)
        self.valid &= event.kind == "close" or (event.kind == "text" and not event.raw.strip())

    def add(self, event: _Event, text: str) -> None:
        """Take an argument or a json block with its text."""
        if event.tag == "json":
            try:
                value = decode(text)
            except ValueError:
                value = None
            self.valid &= isinstance(value, dict) and not self._has_block and not self.arguments
            self._has_block = True
            if isinstance(value, dict):
                self.arguments = value
            return
        key = event.attributes.get("key")
        if key is None or key in self.arguments or self._has_block:
            self.valid = False
        else:
            self.arguments[key] = _value(text, event.attributes.get("type", "string"))


def _value(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    try:
        value = decode(text)
    except ValueError:
        return text
    return value if kind not in _TYPES or type_name(value) == kind else text


class _Parser:
    def __init__(self, events: list[_Event], thinking: bool) -> None:
        self._events = events
        self._channel = "think" if thinking else "response"
        self._texts: dict[str, list[str]] = {"think": [], "response": []}
        self._calls: list[dict[str, Any]] = []
        self._unparsed: list[str] = []
        # The first event, from each position on, that an unfinished argument cannot contain.
        self._value_end = [len(events)] * (len(events) + 1)
        for index in range(len(events) - 1, -1, -1):
            self._value_end[index] = index if events[index].ends_value else self._value_end[index + 1]

    def run(self) -> ParsedOutput:
        position = self._skip_message_opening()
        while position < len(self._events):
            event = self._events[position]
            if self._channel == "tools" and event.opens("call"):
                position = self._read_call(position)
            else:
                self._take(event, is_last=position + 1 == len(self._events))
                position += 1
        return ParsedOutput(
            reasoning="".join(self._texts["think"]) or None,
            content="".join(self._texts["response"]) or None,
            tool_calls=self._calls,
            unparsed="".join(self._unparsed),
        )

    def _skip_message_opening(self) -> int:
        if self._events and self._events[0].opens("message"):
            self._channel = ""
            return 1
        return 0

    def _take(self, event: _Event, is_last: bool) -> None:
        if event.ends_message:
            self._channel = "ended"
            if event.kind == "open":
                self._unparsed.append(event.raw)
            return
        if self._channel != "ended":
            if event.opens(*_CHANNELS):
                self._channel = event.tag
                return
            if event.closes(*_CHANNELS):
                if event.tag == self._channel:
                    self._channel = ""
                return
        if self._channel in self._texts:
            self._texts[self._channel].append(event.raw)
        elif self._channel == "tools":
            self._unparsed.append(event.raw)
        elif event.kind == "text" and event.raw.strip() and not (is_last and _is_cut_marker(event.raw)):
            self._texts["response"].append(event.raw)
        else:
            self._unparsed.append(event.raw)

    def _read_call(self, position: int) -> int:
        """Read the call that opens here; the position of the first event after it."""
        call = _Call(self._events[position])
        position += 1
        while position < len(self._events):
            event = self._events[position]
            if event.opens("argument", "json"):
                position, closed = self._read_value(call, position)
                if not closed:
                    break
            elif event.closes("call"):
                call.raw.append(event.raw)
                if call.valid:
                    self._calls.append({"name": call.name, "arguments": call.arguments})
                self._unparsed.extend(call.spaces if call.valid else call.raw)
                return position + 1
            elif event.ends_message or event.opens("call", *_CHANNELS) or event.closes(*_CHANNELS):
                break
            else:
                call.text(event)
                position += 1
        self._unparsed.extend(call.raw)
        return position

    def _read_value(self, call: _Call, position: int) -> tuple[int, bool]:
        """Read one argument or json block; the position after it, and whether it was closed."""
        opening = self._events[position]
        call.raw.append(opening.raw)
        start = position + 1
        end = self._value_end[start]
        has_own_close = end < len(self._events) and self._events[end].closes(opening.tag)
        if not has_own_close:
            end = next((i for i in range(start, end) if self._events[i].opens(*_CHANNELS)), end)
        text = "".join(event.raw for event in self._events[start:end])
        call.raw.append(text)
        if has_own_close:
            call.raw.append(self._events[end].raw)
            call.add(opening, text)
            return end + 1, True
        if end < len(self._events) and (
            self._events[end].closes("call") or self._events[end].opens("argument", "json")
        ):
            call.add(opening, text)
            return end, True
        return end, False


def _is_cut_marker(text: str) -> bool:
    return any(marker.startswith(text) for marker in MARKERS)
