"""Messages as far as they count: what a protocol, an SDK or a framework may write otherwise is the same.

Content as a text or in parts, fields that are missing or null, the spacing and the order of JSON arguments, the ids of
tool calls (a result belongs to the n-th call before it), reasoning in a field of its own or in `<think>` within the
content, `developer` for `system`. What is left decides whether a conversation goes on where a recorded one ended, for
agents that call the endpoint and for logs of calls alike.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treewise.data.render.messages import TEXTS, Message, Tools

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_ROLES = {"developer": "system", "function": "tool"}
Item = tuple[Any, ...]


def canonical(
    message: Message, calls_before: Sequence[str] = (), *, with_reasoning: bool = True, with_margins: bool = True
) -> Item:
    """(role, content, reasoning, calls, which call a result belongs to).

    calls_before: ids of the tool calls of the assistant's message before a tool's. with_margins: whether white space
    around what the model wrote counts, which many clients strip.
    """
    role = _ROLES.get(message["role"], message["role"])
    content, reasoning = content_text(message.get("content")), str(message.get("reasoning_content") or "")
    if role == "assistant" and not reasoning and (thought := _THOUGHT.match(content)):
        reasoning, content = thought.group(1), content[thought.end() :]
    if role == "assistant" and not with_margins:
        content = content.strip()
    calls = tuple(
        (function.get("name"), _json(function.get("arguments"))) for function in map(_function, _calls(message))
    )
    result: Any = None
    if role == "tool":
        name = str(message.get("tool_call_id"))
        result = list(calls_before).index(name) if name in calls_before else name
    return role, content, reasoning.strip() if with_reasoning else "", calls, result


def canonical_all(messages: Sequence[Message], *, with_reasoning: bool = True, with_margins: bool = True) -> list[Item]:
    """`canonical` of each message of a conversation; a result of a tool goes by the calls before it, one that names
    none by its place.
    """
    found: list[Item] = []
    ids: tuple[str, ...] = ()
    num_results = 0
    for message in messages:
        if message["role"] == "assistant":
            ids, num_results = tuple(str(call.get("id")) for call in _calls(message)), 0
        item = canonical(message, ids, with_reasoning=with_reasoning, with_margins=with_margins)
        if item[0] == "tool":
            item = (*item[:-1], num_results) if message.get("tool_call_id") is None else item
            num_results += 1
        found.append(item)
    return found


def chain(first: str, items: Sequence[Item]) -> list[str]:
    """For each number of messages, 0 to all, a name of these messages and of `first`."""
    names = [first]
    for item in items:
        names.append(following(names[-1], item))
    return names


def following(name: str, item: Item) -> str:
    """The name of a conversation that one more message follows."""
    return hashlib.sha256((name + json.dumps(item, default=str)).encode()).hexdigest()


def root_of(tools: Tools, variables: Mapping[str, Any]) -> str:
    """Names what stands before the messages: tools, and the variables of the template."""
    return hashlib.sha256(json.dumps([tools, dict(variables)], sort_keys=True, default=str).encode()).hexdigest()


def content_text(content: object) -> str:
    """The text of a content, whether it is one or parts; other parts (images) stand in it as JSON."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in TEXTS and isinstance(part.get("text"), str)
        parts.append(part["text"] if is_text else json.dumps(part, sort_keys=True, default=str))
    return "".join(parts)


def _calls(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list | tuple) else []


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, dict) else {}


def _json(arguments: object) -> str:
    """The same text for the same arguments."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments if arguments.strip() else "{}")
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps({} if arguments is None else arguments, sort_keys=True, default=str)
