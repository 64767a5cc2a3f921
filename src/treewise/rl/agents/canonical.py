"""Messages as far as they count: what a protocol, an SDK or a framework may write otherwise is the same.

Content as a text or in parts, fields that are missing or null, the spacing and the order of JSON arguments, the ids of
tool calls (a result belongs to the n-th call before it), reasoning in a field of its own or in `<think>` within the
content, `developer` for `system`. What is left decides whether a conversation goes on where a recorded one ended.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treewise.data.render.messages import Message, Tools

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_ROLES = {"developer": "system", "function": "tool"}


def canonical(message: Message, calls_before: Sequence[str] = (), *, with_reasoning: bool = True) -> tuple[Any, ...]:
    """(role, content, reasoning, calls, which call a result belongs to).

    calls_before: ids of the tool calls of the assistant's message before a tool's.
    """
    role = _ROLES.get(message["role"], message["role"])
    content, reasoning = str(message.get("content") or ""), str(message.get("reasoning_content") or "")
    if role == "assistant" and not reasoning and (thought := _THOUGHT.match(content)):
        reasoning, content = thought.group(1), content[thought.end() :]
    calls = tuple(
        (call["function"]["name"], _json(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    )
    result: Any = None
    if role == "tool":
        name = str(message.get("tool_call_id"))
        result = list(calls_before).index(name) if name in calls_before else name
    return role, content, reasoning.strip() if with_reasoning else "", calls, result


def canonical_all(messages: Sequence[Message], *, with_reasoning: bool = True) -> list[tuple[Any, ...]]:
    """`canonical` of each message of a conversation; a result of a tool goes by the calls before it."""
    found: list[tuple[Any, ...]] = []
    ids: tuple[str, ...] = ()
    for message in messages:
        if message["role"] == "assistant":
            ids = tuple(str(call.get("id")) for call in message.get("tool_calls") or ())
        found.append(canonical(message, ids, with_reasoning=with_reasoning))
    return found


def chain(first: str, items: Sequence[tuple[Any, ...]]) -> list[str]:
    """For each number of messages, 0 to all, a name of these messages and of `first`."""
    names, digest = [first], hashlib.sha256(first.encode())
    for item in items:
        digest.update(json.dumps(item, default=str).encode())
        names.append(digest.hexdigest())
    return names


def root_of(tools: Tools, variables: Mapping[str, Any]) -> str:
    """Names what stands before the messages: tools, and the variables of the template."""
    return hashlib.sha256(json.dumps([tools, dict(variables)], sort_keys=True, default=str).encode()).hexdigest()


def _json(arguments: object) -> str:
    """The same text for the same arguments."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps(arguments, sort_keys=True)
