"""JSON as conversations need it: what is accepted can be written back as valid JSON without losing anything."""

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_DEPTH = 200
MAX_VALUES = 1_000_000
# What Python converts to text without being asked to lift its limit.
_MAX_INTEGER = 10**4300

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def show(value: object) -> str:
    """Short representation of a value for an error message."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to write whole numbers of thousands of digits
        return f"{type(value).__name__} with thousands of digits"


def fail(where: str, value: object, expected: str, remedy: str) -> NoReturn:
    """Raise ValueError: one sentence with the place, the value, what was expected and the way out."""
    raise ValueError(f"{where} is {show(value)}; expected {expected}: {remedy}.")


def check_json(value: object, where: str) -> None:
    """Raise ValueError for what JSON cannot hold: other types, keys that are not text, NaN and infinities,
    more than 200 levels (which includes a container that holds itself), more than a million values (which
    includes a few containers that share each other many times)."""
    pending: list[tuple[object, str, int]] = [(value, where, 0)]
    count = 1
    while pending:
        item, place, depth = pending.pop()
        if isinstance(item, Mapping | list | tuple):
            count += len(item)
        if count > MAX_VALUES:
            raise ValueError(
                f"{where} holds more than {MAX_VALUES:,} values; expected a JSON value that fits a request: "
                "shorten it."
            )
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{where} is nested deeper than {MAX_DEPTH} levels; expected a JSON value: flatten it."
            )
        if isinstance(item, Mapping):
            for key, member in item.items():
                if not isinstance(key, str):
                    fail(f"A key of {place}", key, "text", "convert the keys to strings")
                pending.append((member, f"{place}[{show(key)}]", depth + 1))
        elif isinstance(item, list | tuple):
            pending.extend((member, f"{place}[{index}]", depth + 1) for index, member in enumerate(item))
        elif isinstance(item, float):
            if not math.isfinite(item):
                fail(place, item, "a finite number, as JSON has no other", "replace it by a number or null")
        elif isinstance(item, int) and not -_MAX_INTEGER < item < _MAX_INTEGER:
            fail(place, item, "a whole number of at most 4,300 digits", "write it as text")
        elif item is not None and not isinstance(item, bool | int | str):
            fail(
                place, item, "a JSON value", "convert it to text, numbers, booleans, null, lists and objects"
            )


def decode(text: str) -> Any:
    """Decode a JSON text strictly.

    Raises ValueError for everything whose value would not stand for the whole text or could not be written as
    JSON in UTF-8 again: invalid JSON, NaN and infinities (also a number too large for a float), a repeated
    key, more than 200 levels, an escaped half of a surrogate pair, an integer of thousands of digits.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
    except RecursionError as error:
        raise ValueError(f"The JSON text is nested deeper than {MAX_DEPTH} levels: flatten it.") from error
    check_json(value, "The JSON text")
    if "\\u" in text:
        write(value).encode()
    return value


def write(value: object) -> str:
    """JSON with separators ", " and ": ", keys in their order, non-ASCII characters kept."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)


def write_canonical(value: object) -> str:
    """JSON with separators "," and ":", keys sorted at every level, non-ASCII characters kept."""
    return json.dumps(
        value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"), default=_plain
    )


def _plain(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{show(value)} is not a JSON value; check_json() first.")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON: use a number or null.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:60]} is too large for a float: use a smaller number or text.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("A key is repeated in a JSON object: give every key once.")
    return members


def expect_object(value: Any, where: str) -> Mapping[str, Any]:
    """The value itself; ValueError unless it is a mapping."""
    if not isinstance(value, Mapping):
        fail(where, value, "an object", "pass a dict with named fields")
    return value
