"""Small tools for demonstrations: a calculator, a key-value store and files, all in memory.

`specifications` gives their declarations in the OpenAI shape, short because a model reads them with every
question; `Toolbox.execute` runs a call and returns text. What goes wrong is returned as a sentence, for the
model to read: a tool never raises for its arguments.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moe28t_jax.chat.strict_json import show

MAX_EXPRESSION = 200
MAX_TEXT = 10_000
MAX_ENTRIES = 1_000
MAX_NUMBER = 10**15

_PARAMETERS: dict[str, dict[str, dict[str, Any]]] = {
    "calc": {"expr": {"type": "string"}},
    "get": {"key": {"type": "string"}},
    "set": {"key": {"type": "string"}, "value": {}},
    "delete": {"key": {"type": "string"}},
    "read": {"path": {"type": "string"}},
    "write": {"path": {"type": "string"}, "text": {"type": "string"}},
    "list": {},
}
TOOLS: tuple[str, ...] = tuple(_PARAMETERS)
"""Every tool's name."""

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_PATH = re.compile(r"[A-Za-z0-9_-]{1,40}(\.[A-Za-z0-9]{1,8})?")


def specifications(names: Iterable[str] = TOOLS) -> list[dict[str, Any]]:
    """Declarations of the named tools, in the given order. Raises ValueError for an unknown name."""
    result = []
    for name in names:
        if name not in _PARAMETERS:
            raise ValueError(f"There is no tool {name!r}; the tools are {', '.join(TOOLS)}.")
        parameters = {"type": "object", "properties": _PARAMETERS[name]}
        result.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    return result


DEMO_FILES = {"left8.txt": "line"}
"""What the command line's tools find at first."""


class Toolbox:
    """The tools with their memory: `store` (key to JSON value) and `files` (name to text)."""

    def __init__(
        self, store: Mapping[str, Any] | None = None, files: Mapping[str, str] | None = None
    ) -> None:
        self.store: dict[str, Any] = dict(store or {})
        self.files: dict[str, str] = dict(files or {})

    def execute(self, name: Any, arguments: Any) -> str:
        """Run one call; the result as text, or a sentence that says what is wrong with the call."""
        if not isinstance(name, str) or name not in _PARAMETERS:
            return f"There is no tool {show(name)}; the tools are {', '.join(TOOLS)}."
        expected = _PARAMETERS[name]
        if not isinstance(arguments, Mapping) or set(arguments) != set(expected):
            given = list(arguments) if isinstance(arguments, Mapping) else arguments
            return f"{name} takes the arguments {list(expected)}, not {show(given)}."
        for key, schema in expected.items():
            if schema.get("type") == "string" and not isinstance(arguments[key], str):
                return f"The argument {key} of {name} must be a string, not {show(arguments[key])}."
        try:
            # Every value is JSON and small, whatever the tool does with it.
            if len(json.dumps(dict(arguments), allow_nan=False)) > MAX_TEXT:
                return f"The arguments of {name} are longer than {MAX_TEXT} characters."
        except (TypeError, ValueError, RecursionError):
            return f"The arguments of {name} are not JSON."
        return getattr(self, f"_{name}")(**arguments)

    def _calc(self, expr: str) -> str:
        try:
            return write_number(evaluate(expr))
        except ValueError as error:
            return str(error)

    def _get(self, key: str) -> str:
        if key not in self.store:
            return f"There is no key {key!r}."
        value = self.store[key]
        return value if isinstance(value, str) else json.dumps(value)

    def _set(self, key: str, value: Any) -> str:
        if key not in self.store and len(self.store) >= MAX_ENTRIES:
            return f"The store is full: it holds {MAX_ENTRIES} keys."
        self.store[key] = value
        return "ok"

    def _delete(self, key: str) -> str:
        if key not in self.store:
            return f"There is no key {key!r}."
        del self.store[key]
        return "ok"

    def _read(self, path: str) -> str:
        return self.files.get(path, f"There is no file {path!r}.")

    def _write(self, path: str, text: str) -> str:
        if not _PATH.fullmatch(path):
            return f"{path!r:.60} is not a file name; use letters, digits, - and _, without folders."
        if path not in self.files and len(self.files) >= MAX_ENTRIES:
            return f"The folder is full: it holds {MAX_ENTRIES} files."
        self.files[path] = text
        return "ok"

    def _list(self) -> str:
        return " ".join(sorted(self.files)) or "There are no files."


def evaluate(expression: str) -> int | float:
    """Value of an arithmetic expression of numbers, + - * / // % and parentheses.

    Raises ValueError, in one sentence, for anything else, for division by zero, and for expressions or
    numbers beyond the limits.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(
            f"The expression has {len(expression)} characters; at most {MAX_EXPRESSION} are read."
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r:.80} is not an arithmetic expression.") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _within(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        try:
            return _within(_OPERATORS[type(node.op)](left, right))
        except ZeroDivisionError:
            raise ValueError("The expression divides by zero.") from None
    raise ValueError("Only numbers, + - * / // % and parentheses are calculated.")


def _within(value: Any) -> int | float:
    if not math.isfinite(value) or abs(value) > MAX_NUMBER:
        raise ValueError(f"A number is larger than {MAX_NUMBER}.")
    return value


def write_number(value: int | float) -> str:
    """A number as text; a whole float without its fraction."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
