"""Calls of Anthropic's Messages and of OpenAI's Responses, as those of OpenAI's chat completions.

Shapes are those of the public interfaces (https://docs.anthropic.com/en/api/messages,
https://platform.openai.com/docs/api-reference/responses); blocks of content also as LangChain has them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from treewise.data.importers.common import Context, talk_of
from treewise.data.io.endings import with_reason
from treewise.data.io.field_checks import shown
from treewise.data.io.forms import Record
from treewise.data.io.replies import UnusableError
from treewise.data.render.messages import KINDS, TEXTS

CALLS = ("tool_use", "tool_call", "function_call")
REASONING = ("thinking", "reasoning")
RESPONSE_ITEMS = frozenset({"function_call", "function_call_output", "reasoning", "item_reference"})
HIDDEN = "reasoning that the provider keeps or sums up is not what was sampled, and not read"


# -- blocks of content ------------------------------------------------------------------------------------------------


def chat_messages(message: Record, location: str, context: Context) -> list[Record]:
    """The messages of one whose content may be blocks of Anthropic's or LangChain's: results of tools become messages
    of their own, calls `tool_calls`, thinking `reasoning_content`.

    Raises:
        UnusableError: a block that the model saw or wrote, and that nothing here reads.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    found: list[Record] = []
    kept: list[object] = []
    calls: list[Record] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in (*TEXTS, *KINDS):
            kept.append(block)
        elif kind == "refusal":
            kept.append({"type": "text", "text": str(block.get("refusal"))})
        elif kind == "tool_result":
            found.append(_result(block, location, context))
        elif kind in CALLS:
            calls.append(_call(block))
        elif kind in REASONING and isinstance(text := block.get(kind), str):
            thoughts.append(text)
        elif kind in (*REASONING, "redacted_thinking"):
            context.warn(HIDDEN)
        else:
            raise UnusableError(location, f"a message with content of type {shown(kind)}, which is not read")
    if kept != content:
        message = {**message, "content": kept}
        if calls and not message.get("tool_calls"):  # LangChain has them in both places
            message["tool_calls"] = calls
        if thoughts and not message.get("reasoning_content"):
            message["reasoning_content"] = "\n".join(thoughts)
    return [*found, *([message] if kept or not found else [])]


def one_message(message: Record, location: str, context: Context) -> Record:
    """As `chat_messages`, of one that holds no results of tools. Raises `UnusableError` where it does."""
    found = chat_messages(message, location, context)
    if len(found) != 1 or found[0].get("role") != message.get("role"):
        raise UnusableError(location, "results of tools where no user says something")
    return found[0]


def _result(block: Record, location: str, context: Context) -> Record:
    content = block.get("content")
    if isinstance(content, list):
        content = one_message({"role": "user", "content": content}, location, context)["content"]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": "" if content is None else content}


def _call(block: Record) -> Record:
    given: Any = next((block[name] for name in ("input", "args", "arguments") if block.get(name) is not None), {})
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    name = block.get("call_id") or block.get("id")
    return {"id": name, "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


# -- items of Responses -----------------------------------------------------------------------------------------------


class Responses:
    """What OpenAI keeps of Responses, as far as a log holds it: outputs by id, which later calls name."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Record, Record]] = {}  # by the id of a response: the request, and the response
        self.items: dict[str, Record] = {}

    def add(self, call: Record) -> None:
        """Takes what a logged call holds of them. call: its request and its response, None without one."""
        response = call["response"] or {}
        if not is_of_responses(call["request"], response):
            return
        if isinstance(response.get("id"), str):
            self.calls.setdefault(response["id"], (call["request"], response))
        output = response.get("output")
        for item in output if isinstance(output, list) else ():
            if isinstance(item, dict) and isinstance(item.get("id"), str):
                self.items.setdefault(item["id"], item)

    def messages(self, request: Record, location: str, context: Context) -> list[Record]:
        """What a request asks with: its instructions, all up to the response that it names, and its own input.

        Raises:
            UnusableError: it names what the log does not hold, or holds an item that nothing here reads.
        """
        parts: list[Any] = []
        named: set[object] = set()
        at: Record | None = request
        while at is not None:
            for name in ("conversation", "prompt"):
                if at.get(name):
                    raise UnusableError(location, f"a call of which {name} is kept by the provider")
            own = at.get("input")
            parts.insert(0, [{"role": "user", "content": own}] if isinstance(own, str) else own or [])
            before = at.get("previous_response_id")
            if before is None:
                break
            if before in named or before not in self.calls:
                raise UnusableError(location, "a call that goes on from a response which the log does not hold")
            named.add(before)
            at, response = self.calls[before]
            parts.insert(0, response.get("output") or [])
        if isinstance(instructions := request.get("instructions"), list):
            parts.insert(0, instructions)
        elif instructions:
            parts.insert(0, [{"role": "system", "content": instructions}])
        return self._of_items([item for part in parts for item in part], location, context)

    def turns(self, response: Record, location: str, context: Context) -> list[Record]:
        """The turns of the model that a response holds, in order: one, unless it thought again behind its text."""
        return self._of_items(response.get("output") or [], location, context)

    def _of_items(self, items: list[Any], location: str, context: Context) -> list[Record]:
        found: list[Record] = []
        turn: Record | None = None  # of the model, while its items come
        for item in items:
            if isinstance(item, dict) and item.get("type") == "item_reference":
                if item.get("id") not in self.items:
                    raise UnusableError(location, "a call that names an item which the log does not hold")
                item = self.items[item["id"]]
            if not isinstance(item, dict):
                raise UnusableError(location, f"an item that is no object, {shown(item)}")
            kind = item.get("type", "message")
            if kind == "message" and item.get("role") != "assistant":
                found += chat_messages({"role": item.get("role"), "content": item.get("content")}, location, context)
                turn = None
            elif kind == "function_call_output":
                result = {"tool_use_id": item.get("call_id"), "content": item.get("output")}
                found.append(_result(result, location, context))
                turn = None
            elif kind in ("message", "function_call", "reasoning"):
                if turn is None or (kind == "reasoning" and (turn["content"] or turn.get("tool_calls"))):
                    turn = {"role": "assistant", "content": ""}
                    found.append(turn)
                _add(turn, item, kind, location, context)
            else:
                raise UnusableError(location, f"an item of type {shown(kind)}, which is not read")
        return found


def _add(turn: Record, item: Record, kind: str, location: str, context: Context) -> None:
    """Adds an item to a turn of the model."""
    if kind == "function_call":
        turn.setdefault("tool_calls", []).append(_call(item))
    elif kind == "message":
        said = one_message({"role": "assistant", "content": item.get("content")}, location, context)
        parts = said["content"] if isinstance(said["content"], list) else [{"text": said["content"] or ""}]
        text = "".join(str(part.get("text", "")) for part in parts)
        kinds = {part.get("type") for part in item["content"]} if isinstance(item.get("content"), list) else set()
        name = "refusal" if kinds == {"refusal"} else "content"
        turn[name] = turn.get(name, "") + text
    else:
        content = item.get("content")
        texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        if texts:
            turn["reasoning_content"] = "\n".join(map(str, texts))
        elif item.get("summary") or item.get("encrypted_content"):
            context.warn(HIDDEN)


# -- calls ------------------------------------------------------------------------------------------------------------


def is_of_responses(request: Mapping[str, Any], response: Mapping[str, Any]) -> bool:
    """Whether a call is one of OpenAI's Responses interface."""
    if response.get("object") == "response":
        return True
    is_asked = "input" in request and "messages" not in request
    return is_asked and (not response or not response.keys().isdisjoint(("output", "choices", "error")))


def asked_messages(request: Record, responses: Responses, location: str, context: Context) -> list[Record]:
    """The messages that a request of any of the three asks with, in OpenAI's shape for chats."""
    if "messages" not in request and ("input" in request or "previous_response_id" in request):
        return responses.messages(request, location, context)
    talk = talk_of(request)
    if not isinstance(talk, list) or not all(isinstance(message, dict) for message in talk):
        return talk  # whose reader says what is wrong
    return [each for message in talk for each in chat_messages(message, location, context)]


def choices_of(response: Record, responses: Responses, location: str, context: Context) -> Iterator[list[Record]]:
    """The continuations that a response holds, each as the turns that follow one another in it; why one ended stands
    beside the message of its last.
    """
    if response.get("object") == "response" and not response.get("choices"):
        turns = responses.turns(response, location, context)
        if turns:
            yield [{"message": turn} for turn in turns]
        return
    if "choices" not in response and isinstance(response.get("content"), list | str):  # Anthropic's, a message
        message = {"role": "assistant", "content": response["content"]}
        yield [with_reason({"message": message}, response)]
        return
    for choice in response.get("choices") or ():
        yield [choice]
