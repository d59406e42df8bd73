"""Model output to reasoning, content and tool calls while it is being written.

:class:`StreamParser` takes token ids as they come and gives what they settled. Joined, its events are what
:func:`moe28t_jax.chat.parse_ids` gives for all ids at once, wherever the ids are split: the rules are those of
:mod:`moe28t_jax.chat.parse`. Each token is looked at a bounded number of times, whatever came before it.

Held back is only what later tokens can still change: the bytes of an unfinished character, the inside of a
marker, a call until it closes, and outside every channel whitespace and what may be a cut marker.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

from moe28t_jax.chat.parse import _CHANNELS, _TAGS, ParsedOutput, _Call, _element, _Event, _is_cut_marker
from moe28t_jax.chat.render import CLOSE, END_OF_MESSAGE, MARKERS, OPEN, SEPARATOR
from moe28t_jax.chat.tokenizer import Tokenizer

Channel = Literal["reasoning", "content", "tool_call"]
_CHANNEL_NAMES: dict[str, Channel] = {"think": "reasoning", "response": "content", "tools": "tool_call"}


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """News of one channel: more text of ``reasoning`` or ``content``, or one complete ``tool_call``
    (``{"name": str, "arguments": dict}``)."""

    channel: Channel
    text: str = ""
    tool_call: dict[str, Any] | None = None


class _Value:
    """An argument or json block while it is read. Whether a channel that opens inside belongs to it is known
    only where it ends, so its events are kept."""

    def __init__(self, opening: _Event) -> None:
        self.opening = opening
        self.events: list[_Event] = []
        self.first_channel: int | None = None

    def add(self, event: _Event) -> None:
        if self.first_channel is None and event.opens(*_CHANNELS):
            self.first_channel = len(self.events)
        self.events.append(event)


class StreamParser:
    """Parse generated token ids as they come; ``thinking`` as in :func:`moe28t_jax.chat.parse_ids`.

    Call :meth:`push` with ids, then :meth:`flush` once where the output ends. Any ids of the vocabulary are
    read, in any order, without an error.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool = True) -> None:
        self._tokenizer = tokenizer
        self._markers = {tokenizer.special_ids[marker]: marker for marker in MARKERS}
        self._decoder = tokenizer.stream_decoder()
        # An opening or closing marker whose inside is being read.
        self._marker: str | None = None
        self._inside: list[str] = []
        self._inside_head = ""

        self._channel = "think" if thinking else "response"
        self._is_first = True
        self._call: _Call | None = None
        self._value: _Value | None = None
        # Text outside the channels: what is not settled yet, and whether this run of text is content.
        self._held: list[str] = []
        self._run_is_content = False

        self._new: list[StreamEvent] = []
        self._texts: dict[Channel, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[dict[str, Any]] = []
        self._unparsed: list[str] = []
        self._ended = False

    @property
    def channel(self) -> Channel | None:
        """The channel that is open now; None between channels and after the end of the message."""
        return _CHANNEL_NAMES.get(self._channel)

    @property
    def output(self) -> ParsedOutput:
        """What has been settled; after :meth:`flush` what ``parse_ids`` gives for all the ids."""
        return ParsedOutput(
            reasoning="".join(self._texts["reasoning"]) or None,
            content="".join(self._texts["content"]) or None,
            tool_calls=list(self._calls),
            unparsed="".join(self._unparsed),
        )

    def push(self, ids: SupportsIndex | Iterable[SupportsIndex]) -> list[StreamEvent]:
        """Take one id or several; the events they settled, neighbouring texts of a channel joined.

        ValueError for an id outside the vocabulary (the ids before it are taken) and after :meth:`flush`.
        """
        if self._ended:
            raise ValueError("This output was ended by flush(); make a new StreamParser for another one.")
        for token_id in [ids] if isinstance(ids, SupportsIndex) else ids:
            index = token_id.__index__()
            marker = self._markers.get(index)
            if marker is not None:
                self._take_text(self._decoder.flush())
                self._take_marker(marker)
            elif not self._tokenizer.is_special(index):
                self._take_text(self._decoder.push(index))
        return self._taken()

    def flush(self) -> list[StreamEvent]:
        """End the output: the events of what was held back. A second call gives none."""
        if not self._ended:
            self._ended = True
            self._take_text(self._decoder.flush())
            if self._marker is not None:
                self._event(_Event("mark", self._marker + "".join(self._inside)))
            if self._value is not None:
                self._end_value(None)
            elif self._call is not None:
                self._drop_call()
            self._settle(is_last=True)
        return self._taken()

    def _taken(self) -> list[StreamEvent]:
        joined: list[StreamEvent] = []
        start = 0
        while start < len(self._new):
            event = self._new[start]
            end = start + 1
            if event.tool_call is None:
                while end < len(self._new) and self._new[end].channel == event.channel:
                    end += 1
                event = StreamEvent(event.channel, "".join(each.text for each in self._new[start:end]))
            joined.append(event)
            start = end
        self._new = []
        return joined

    # -- from ids to events ------------------------------------------------------------------------------------
    def _take_text(self, text: str) -> None:
        if not text:
            return
        if self._marker is None:
            self._event(_Event("text", text))
            return
        self._inside.append(text)
        if len(self._inside_head) < _HEAD_LENGTH:
            self._inside_head += text[:_HEAD_LENGTH]
            if self._is_in_text and not _can_be_element(self._inside_head):
                self._release_marker()

    def _take_marker(self, marker: str) -> None:
        if self._marker is not None:
            if marker == SEPARATOR and self._inside:
                element = _element(self._marker, "".join(self._inside))
                if element is not None:
                    self._marker, self._inside, self._inside_head = None, [], ""
                    self._event(element)
                    return
            self._release_marker()
        if marker in (OPEN, CLOSE):
            self._marker = marker
        else:
            self._event(_Event("end" if marker == END_OF_MESSAGE else "mark", marker))

    def _release_marker(self) -> None:
        """Take the marker that is being read, and its inside, for what it is: text."""
        marker, inside = self._marker or "", self._inside
        self._marker, self._inside, self._inside_head = None, [], ""
        self._event(_Event("mark", marker))
        if inside:
            self._event(_Event("text", "".join(inside)))

    # -- from events to a turn ---------------------------------------------------------------------------------
    @property
    def _is_in_text(self) -> bool:
        return self._call is None and self._channel in ("think", "response")

    def _emit(self, channel: Channel, text: str) -> None:
        self._texts[channel].append(text)
        self._new.append(StreamEvent(channel, text))

    def _event(self, event: _Event) -> None:
        is_first, self._is_first = self._is_first, False
        if is_first and event.opens("message"):
            self._channel = ""
        elif self._value is not None:
            if event.ends_value:
                self._end_value(event)
            else:
                self._value.add(event)
        elif self._call is not None:
            self._take_in_call(self._call, event)
        elif event.kind == "text":
            self._take_run(event.raw)
        else:
            self._settle(is_last=False)
            self._take(event)

    def _take(self, event: _Event) -> None:
        """Take what is no text, outside calls."""
        if self._channel == "tools" and event.opens("call"):
            self._call = _Call(event)
            return
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
        if self._is_in_text:
            self._emit(_CHANNEL_NAMES[self._channel], event.raw)
        else:
            self._unparsed.append(event.raw)

    def _take_run(self, text: str) -> None:
        """Take a part of a run of text."""
        if self._is_in_text:
            self._emit(_CHANNEL_NAMES[self._channel], text)
        elif self._channel == "tools":
            self._unparsed.append(text)
        elif self._run_is_content:
            self._emit("content", text)
        else:
            self._held.append(text)
            if text.strip():
                run = "".join(self._held)
                if not _is_cut_marker(run):
                    self._held = []
                    self._run_is_content = True
                    self._emit("content", run)

    def _settle(self, is_last: bool) -> None:
        """End a run of text: whitespace, and at the very end a cut marker, are no content."""
        if self._held:
            run = "".join(self._held)
            self._held = []
            if run.strip() and not is_last:
                self._emit("content", run)
            else:
                self._unparsed.append(run)
        self._run_is_content = False

    def _take_in_call(self, call: _Call, event: _Event) -> None:
        if event.opens("argument", "json"):
            call.raw.append(event.raw)
            self._value = _Value(event)
        elif event.closes("call"):
            call.raw.append(event.raw)
            if call.valid:
                finished = {"name": call.name, "arguments": call.arguments}
                self._calls.append(finished)
                self._new.append(StreamEvent("tool_call", tool_call=finished))
            self._unparsed.extend(call.spaces if call.valid else call.raw)
            self._call = None
        elif event.ends_message or event.opens("call", *_CHANNELS) or event.closes(*_CHANNELS):
            self._drop_call()
            self._event(event)
        else:
            call.text(event)

    def _drop_call(self) -> None:
        if self._call is not None:
            self._unparsed.extend(self._call.raw)
            self._call = None

    def _end_value(self, end: _Event | None) -> None:
        """End the argument or json block that is being read; `end` is what ended it, None at the very end."""
        value, call = self._value, self._call
        assert value is not None and call is not None
        self._value = None
        if end is not None and end.closes(value.opening.tag):
            text = "".join(event.raw for event in value.events)
            call.raw += [text, end.raw]
            call.add(value.opening, text)
            return
        cut = len(value.events) if value.first_channel is None else value.first_channel
        text = "".join(event.raw for event in value.events[:cut])
        call.raw.append(text)
        goes_on = end is not None and (end.closes("call") or end.opens("argument", "json"))
        if end is not None and goes_on and value.first_channel is None:
            call.add(value.opening, text)
            self._take_in_call(call, end)
            return
        self._drop_call()
        # These events hold no part of a call, so none is ever taken back again.
        for event in value.events[cut:]:
            self._event(event)
        if end is not None:
            self._event(end)


_HEAD_LENGTH = 32


def _can_be_element(head: str) -> bool:
    """Whether a marker's inside that starts like this can become one of the known elements."""
    text = head.lstrip()
    word = next((text[:index] for index, letter in enumerate(text) if not _is_word(letter)), text)
    if word == text:
        return any(tag.startswith(word) for tag in _TAGS)
    return word in _TAGS


def _is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"
