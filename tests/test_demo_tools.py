"""The demonstration tools: right results, and sentences for everything else."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe28t_jax.chat.messages import normalize_tools
from moe28t_jax.demo_tools import MAX_ENTRIES, TOOLS, Toolbox, evaluate, specifications, write_number


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("437 + 268", 705),
        ("2 * (3 + 4) - -1", 15),
        ("7 // 2", 3),
        ("7 % 4", 3),
        ("1 / 4", 0.25),
        ("+3", 3),
        (" 2 ", 2),
    ],
)
def test_expressions(expression: str, value: float):
    assert evaluate(expression) == value
    assert Toolbox().execute("calc", {"expr": expression}) == write_number(value)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')", "a + 1", "'a' * 9", "2 ** 99999", "[1][0]", "(lambda: 1)()", "1 if 1 else 2", "",
        "1 +", "1 / 0", "7 % 0", "9" * 17, "(" * 150, "True + 1", "1j", "1e999", "9999999999 * 9999999999",
        "0.1 " + "+ 1" * 99, "x := 1", "\0",
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_a_sentence(expression: str):
    with pytest.raises(ValueError, match=r"\.$"):
        evaluate(expression)
    assert Toolbox().execute("calc", {"expr": expression}).endswith(".")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_no_text_breaks_the_calculator(expression: str):
    assert isinstance(Toolbox().execute("calc", {"expr": expression}), str)


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_calculator_agrees_with_python(a: int, b: int, sign: str):
    expected = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert Toolbox().execute("calc", {"expr": f"{a} {sign} {b}"}) == str(expected)


@pytest.mark.parametrize("value", ["text", 42, 1.5, True, None, [1, "a"], {"a": {"b": 2}}])
def test_store_keeps_json_values(value: object):
    box = Toolbox()
    assert box.execute("set", {"key": "k", "value": value}) == "ok"
    found = box.execute("get", {"key": "k"})
    assert found == value if isinstance(value, str) else json.loads(found) == value
    assert box.execute("delete", {"key": "k"}) == "ok"
    assert box.execute("get", {"key": "k"}) == box.execute("delete", {"key": "k"}) == "There is no key 'k'."


def test_files():
    box = Toolbox()
    assert box.execute("list", {}) == "There are no files."
    assert box.execute("write", {"path": "b.txt", "text": "hello"}) == "ok"
    assert box.execute("write", {"path": "a", "text": ""}) == "ok"
    assert box.execute("read", {"path": "b.txt"}) == "hello"
    assert box.execute("list", {}) == "a b.txt"
    assert box.execute("read", {"path": "c"}) == "There is no file 'c'."
    for path in ("../a", "/etc/passwd", "a/b", "", "a\n", "x" * 99):
        assert "not a file name" in box.execute("write", {"path": path, "text": ""})
    assert sorted(box.files) == ["a", "b.txt"]


def test_wrong_calls_and_limits():
    box = Toolbox()
    assert box.execute("fly", {}).startswith("There is no tool 'fly'; the tools are calc, ")
    assert box.execute("calc", {"a": 1}) == "calc takes the arguments ['expr'], not ['a']."
    assert box.execute("calc", {"expr": 1}) == "The argument expr of calc must be a string, not 1."
    assert box.execute("write", {"path": "a", "text": "x" * 20_000}).startswith(
        "The arguments of write are longer"
    )
    assert box.execute("set", {"key": "a", "value": float("nan")}) == "The arguments of set are not JSON."
    for index in range(MAX_ENTRIES):
        box.execute("set", {"key": str(index), "value": 0})
        box.execute("write", {"path": str(index), "text": ""})
    assert "full" in box.execute("set", {"key": "more", "value": 0})
    assert "full" in box.execute("write", {"path": "more", "text": ""})
    assert box.execute("set", {"key": "0", "value": 1}) == "ok"


def test_declarations_are_of_the_openai_shape():
    assert normalize_tools(specifications()) == specifications()
    assert [tool["function"]["name"] for tool in specifications(["get", "calc"])] == ["get", "calc"]
    assert len(specifications()) == len(TOOLS)
    with pytest.raises(ValueError, match="There is no tool 'fly'; the tools are"):
        specifications(["fly"])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("get", {"key": 10**5000}), ("get", None), ([], {}), ("x" * 10**6, {}), ("get", {"x" * 10**6: 1})],
    ids=["huge integer", "no arguments", "no name", "long name", "long key"],
)
def test_what_is_no_call_gets_a_short_sentence(name, arguments):
    assert len(Toolbox().execute(name, arguments)) < 300
