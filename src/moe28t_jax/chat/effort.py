"""How much to think: every field of a request that says so, brought to one switch and one effort."""

from collections.abc import Mapping
from typing import Any

from moe28t_jax.chat.strict_json import fail, show

EFFORTS = ("low", "high", "max")
THINKING_FIELDS = (
    "reasoning_effort", "reasoning", "effort", "thinking", "thinking_budget", "thinking_effort", "enable_thinking",
    "chat_template_kwargs",
)  # fmt: skip
"""Fields of a request that say whether and how much to think."""
_EXAMPLES = {
    "thinking": '{"type": "disabled"}',
    "reasoning": '{"effort": "high"}',
    "chat_template_kwargs": '{"thinking": false}',
}
_MAY_BE_NONE = ("effort", "reasoning.effort", "reasoning_effort")


def check_effort(effort: Any, where: str = "thinking_effort") -> str:
    """The effort itself; ValueError unless it is ``low``, ``high`` or ``max``."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        expected = "'low', 'high', 'max' or 'none'" if where in _MAY_BE_NONE else "'low', 'high' or 'max'"
        fail(where, effort, expected, "use one of these, or leave it out")
    return effort


def read_thinking(request: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether to think and how much, from all the fields that say so."""
    template = _or_empty(request.get("chat_template_kwargs"), "chat_template_kwargs")
    reasoning = _or_empty(request.get("reasoning"), "reasoning")
    control = _or_empty(request.get("thinking"), "thinking")
    for where, value in (
        ("thinking_token_budget", request.get("thinking_token_budget")),
        ("thinking.budget_tokens", control.get("budget_tokens")),
        ("reasoning.max_tokens", reasoning.get("max_tokens")),
    ):
        if value is not None:
            fail(where, value, "an effort instead: there is no budget of tokens", "send reasoning_effort")
    switches: dict[str, Any] = {
        where: value
        for where, value in (
            ("enable_thinking", request.get("enable_thinking")),
            ("chat_template_kwargs.thinking", template.get("thinking")),
            ("chat_template_kwargs.enable_thinking", template.get("enable_thinking")),
        )
        if value is not None
    }
    efforts: dict[str, str] = {}
    for where, effort in (
        ("effort", request.get("effort")),
        ("thinking_effort", request.get("thinking_effort")),
        ("thinking_budget", request.get("thinking_budget")),
        ("chat_template_kwargs.thinking_effort", template.get("thinking_effort")),
        ("reasoning.effort", reasoning.get("effort")),
    ):
        if effort == "none" and where in _MAY_BE_NONE:
            switches[where] = False
        elif effort is not None:
            efforts[where] = check_effort(effort, where)
    reasoning_effort = request.get("reasoning_effort")
    if reasoning_effort is not None and reasoning_effort != "none":
        check_effort(reasoning_effort, "reasoning_effort")
    kind = control.get("type")
    if kind is not None and (not isinstance(kind, str) or kind not in ("enabled", "disabled")):
        fail("thinking.type", kind, "'enabled' or 'disabled'", "use one of these")
    if control.get("effort") is not None:
        efforts["thinking.effort"] = check_effort(control["effort"], "thinking.effort")
    elif reasoning_effort is not None and reasoning_effort != "none":
        efforts["reasoning_effort"] = reasoning_effort
    if kind is not None:
        switches["thinking.type"] = kind == "enabled"
    elif reasoning_effort == "none" and "thinking.effort" not in efforts:
        switches["reasoning_effort"] = False
    for where, value in switches.items():
        if not isinstance(value, bool):
            fail(where, value, "true or false", "use one of these")
    thinking, effort = _agreed(switches, True), _agreed(efforts, "max")
    given = next((where for where in efforts if kind is None or where != "reasoning_effort"), None)
    if not thinking and given is not None:
        off = next(iter(switches))
        raise ValueError(
            f"{off} switches thinking off and {given} asks for the effort {effort!r}; expected one of the two: "
            "leave the other out."
        )
    return thinking, effort


def _agreed[T](values: Mapping[str, T], default: T) -> T:
    first = next(iter(values), None)
    if first is None:
        return default
    for where, value in values.items():
        if value != values[first]:
            raise ValueError(
                f"{where} asks for {show(value)} and {first} for {show(values[first])}; "
                "expected them to agree: send one of the two."
            )
    return values[first]


def _or_empty(value: Any, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        fail(where, value, "an object", f"pass one such as {_EXAMPLES[where]}")
    return value or {}
