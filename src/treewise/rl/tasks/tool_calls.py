"""Tool calls in what a model sampled: by the tokenizer's own response template where it has one, else as JSON between
`<tool_call>` and `</tool_call>`, the form of Hermes and Qwen models."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. problem: why it cannot be carried out; the environment's answer says so to the model."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def parse_tool_calls(
    tokenizer: Any, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]
) -> tuple[str, tuple[ToolCall, ...]]:
    """The text of a sampled turn without its end token, and its calls in order.

    Parameters:
        token_ids: as sampled.
        prefix_ids: what the model saw; a response template may need what the prompt opened (`<think>`).
        tools: JSON schemas.
    """
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    text = _without_end(tokenizer, token_ids, text)
    if getattr(tokenizer, "response_template", None) is None:
        return text, hermes_calls(text)
    try:
        parsed = tokenizer.parse_response(list(token_ids), prefix=list(prefix_ids), tools=list(tools) or None)
        return text, tuple(_checked(call) for call in (parsed or {}).get("tool_calls") or [])
    except (ValueError, TypeError, KeyError) as error:
        return text, (ToolCall("unknown", problem=f"the call cannot be read: {error}"),)


def hermes_calls(text: str) -> tuple[ToolCall, ...]:
    """Calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    calls = []
    for body, closing in _BLOCK.findall(text):
        if not closing:
            calls.append(ToolCall("unknown", problem="<tool_call> is not closed by </tool_call>"))
            continue
        try:
            calls.append(_checked(json.loads(body)))
        except ValueError as error:
            calls.append(ToolCall("unknown", problem=f"the call is not JSON: {error}"))
    return tuple(calls)


def _checked(call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return ToolCall("unknown", problem="a call needs a name and arguments")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            return ToolCall(function["name"], problem=f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(function["name"], problem="its arguments are not an object")
    return ToolCall(function["name"], arguments)


def _without_end(tokenizer: Any, token_ids: Sequence[int], text: str) -> str:
    if len(token_ids) and int(token_ids[-1]) in tokenizer.all_special_ids:
        return text.removesuffix(tokenizer.decode([int(token_ids[-1])], skip_special_tokens=False))
    return text
