"""OpenAI's `POST /v1/responses`. A call is read with all of its items: what it names of earlier ones is there already
(`kept.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treewise.data.io.field_checks import shown
from treewise.data.render.messages import Message
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError, Reply
from treewise.rl.agents.wire.chat import IGNORED, OPENAI, effort, logprobs_of, tool_choice
from treewise.rl.agents.wire.common import (
    Answer,
    Delta,
    Fields,
    TextOf,
    Usage,
    name_within,
    named_tools,
    output_schema,
    sse,
    template_variables,
    text_of,
)
from treewise.rl.agents.wire.protocol import Exchange, Protocol

if TYPE_CHECKING:
    from treewise.rl.agents.wire.kept import Kept

INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
SHOWN = (
    "instructions",
    "temperature",
    "top_p",
    "max_output_tokens",
    "metadata",
    "tools",
    "tool_choice",
    "user",
    "previous_response_id",
    "conversation",
)


def read(body: object, template: str = "") -> AgentRequest:
    """A call. template: the text of the chat template, which may read `reasoning_effort`. Raises `RefusedError`."""
    fields = Fields(body)
    items = fields.need("input", str, list)
    instructions = fields.take("instructions", str)
    tools = named_tools(fields.take("tools", list, default=[]))
    reads_calls, must_call = tool_choice(fields.take("tool_choice", str, dict, default="auto"), bool(tools.functions))
    variables = template_variables(fields)
    reasoning = Fields(fields.take("reasoning", dict, default={}), "reasoning")
    variables |= effort(reasoning, "effort", template)
    included = fields.take("include", list, default=[])
    unknown = tuple(f"include: {shown(name)}" for name in included if name not in INCLUDED)
    wants = "message.output_text.logprobs" in included
    num_top = fields.take("top_logprobs", int)
    text = Fields(fields.take("text", dict, default={}), "text")
    schema = output_schema(text.take("format", dict), "text.format")
    text.ignore("verbosity")
    text.done()
    fields.only("prompt", hint="prompts of a platform are not kept here; send instructions and input")
    fields.only("truncation", ("disabled", "auto"), hint="what does not fit is refused")
    fields.only("background", (False,))
    fields.only("context_management", ([],))
    fields.ignore(*(name for name in IGNORED if name != "store"), "max_tool_calls")
    for name in ("store", "previous_response_id", "conversation", "stream_options"):
        fields.take(name)  # what they name is among the items
    head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*head, *_messages(items)]
    if not messages:
        raise RefusedError("input is empty.", param="input")
    asked = AgentRequest(
        model=fields.take("model", str, default=""),
        messages=tuple(messages),
        tools=tools.functions,
        reads_calls=reads_calls,
        must_call=must_call,
        is_parallel=fields.take("parallel_tool_calls", bool, default=True),
        max_tokens=fields.count("max_output_tokens"),
        temperature=fields.take("temperature", float),
        top_p=fields.take("top_p", float),
        num_top=(num_top or 0) if wants else None,
        variables=variables,
        is_streamed=fields.take("stream", bool, default=False),
        schema=schema,
        namespaces=tools.namespaces,
        ignored=(*fields.ignored, *reasoning.ignored, *text.ignored, *tools.ignored, *unknown),
    )
    fields.done()
    return asked


def _messages(items: Sequence[Any]) -> list[Message]:
    """Messages of items: reasoning, text and calls of the model that follow one another are one turn."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    found: list[Message] = []
    turn: Message | None = None  # of the model, while its items come
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise RefusedError(f"{where} must be an object, found {shown(item)}.", param="input")
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "function_call_output":
            text = text_of(item.get("output"), f"{where}.output")
            found.append({"role": "tool", "tool_call_id": Fields(item, where).need("call_id", str), "content": text})
            turn = None
        elif kind == "message" and item.get("role") != "assistant":
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise RefusedError(
                    f"{where} has role {shown(role)}; served are user, system, developer, assistant.", param="input"
                )
            found.append({"role": role, "content": text_of(item.get("content"), f"{where}.content")})
            turn = None
        elif kind in ("message", "function_call", "reasoning"):
            if turn is None or (kind == "reasoning" and (turn["content"] or turn.get("tool_calls"))):
                turn = {"role": "assistant", "content": ""}
                found.append(turn)
            _add(turn, kind, item, where)
        else:
            raise RefusedError(f"{where}: items of type {shown(kind)} are not served.", param="input")
    return found


def _add(turn: Message, kind: str, item: dict[str, Any], where: str) -> None:
    """Adds an item to a turn of the model."""
    if kind == "message":
        turn["content"] += text_of(item.get("content"), f"{where}.content")
    elif kind == "function_call":
        fields = Fields(item, where)
        name = name_within(fields.take("namespace", str), fields.need("name", str))
        function = {"name": name, "arguments": fields.take("arguments", str, default="") or "{}"}
        turn.setdefault("tool_calls", []).append(
            {"type": "function", "id": fields.need("call_id", str), "function": function}
        )
    else:
        fields = Fields(item, where)
        parts = fields.take("content", list) or fields.take("summary", list, default=[])
        texts = [Fields(part, f"{where}.{kind}").take("text", str, default="") for part in parts]
        if text := "\n".join(texts):
            turn["reasoning_content"] = text


# -- answers ----------------------------------------------------------------------------------------------------------


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def _response(
    found: Answer, body: dict[str, Any], output: list[Any], status: str, usage: Usage | None
) -> dict[str, Any]:
    shown_fields: dict[str, Any] = {name: body.get(name) for name in SHOWN}
    return {
        **shown_fields,
        "id": found.id,
        "object": "response",
        "created_at": found.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": found.asked.model,
        "output": output,
        "parallel_tool_calls": found.asked.is_parallel,
        "reasoning": {"effort": None, "summary": None},
        "store": is_kept(body),
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "metadata": body.get("metadata") or {},
    }


def is_kept(body: Mapping[str, Any]) -> bool:
    """Whether later calls may name the response: `store`, which is true where it is not given."""
    return body.get("store") is not False


def _reasoning(found: Answer, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": f"rs_{found.id}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def _message(found: Answer, text: str | None, status: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    content = [] if text is None else [part]
    return {"id": f"msg_{found.id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _call(found: Answer, call: Any, arguments: str, status: str) -> dict[str, Any]:
    space, name = found.asked.namespaces.get(call.name, (None, call.name))
    named = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": name}
    return {**named, **({"namespace": space} if space else {}), "arguments": arguments, "status": status}


def _output(found: Answer, reply: Reply, text_of_ids: TextOf) -> list[dict[str, Any]]:
    status = "incomplete" if reply.finish == "length" else "completed"
    items = [_reasoning(found, reply.reasoning)] if reply.reasoning else []
    if reply.content or not reply.calls:
        items.append(_message(found, reply.content, status, _logprobs(found, reply, text_of_ids)))
    return [*items, *(_call(found, call, call.arguments, "completed") for call in reply.calls)]


def _logprobs(found: Answer, reply: Reply, text_of_ids: TextOf) -> list[Any]:
    return [] if found.asked.num_top is None else list(logprobs_of(reply, text_of_ids)["content"])


def answer(found: Answer, body: dict[str, Any], text_of_ids: TextOf) -> dict[str, Any]:
    """A whole answer."""
    (reply,) = found.replies
    status = "incomplete" if reply.finish == "length" else "completed"
    return _response(found, body, _output(found, reply, text_of_ids), status, found.usage)


class ReplyStream:
    """The events of one answer. on_end: is given the whole response."""

    def __init__(
        self,
        found: Answer,
        body: dict[str, Any],
        text_of_ids: TextOf,
        on_end: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> None:
        self._on_end = on_end
        self._found, self._body, self._text_of_ids = found, body, text_of_ids
        self._number, self._index, self._open = -1, -1, ""
        self._text, self._reply = "", Reply("")
        self._done: list[dict[str, Any]] = []

    def begin(self) -> list[bytes]:
        """Before the first token."""
        empty = _response(self._found, self._body, [], "in_progress", None)
        return [self._event(f"response.{kind}", response=empty) for kind in ("created", "in_progress")]

    def delta(self, delta: Delta) -> list[bytes]:
        """A part of a reply."""
        events: list[bytes] = []
        if delta.reasoning:
            if self._open != "reasoning":
                events += [*self._close(), *self._begun("reasoning", _reasoning(self._found, ""))]
            events.append(self._part("response.reasoning_text.delta", delta.reasoning))
        if delta.content:
            events += self._open_text()
            events.append(self._part("response.output_text.delta", delta.content, logprobs=[]))
        for call in delta.calls:
            events += [*self._close(), *self._begun("call", _call(self._found, call, "", "in_progress"))]
            item = _call(self._found, call, call.arguments, "completed")
            named = {"item_id": item["id"], "output_index": self._index}
            events.append(self._event("response.function_call_arguments.delta", **named, delta=call.arguments))
            events.append(
                self._event(
                    "response.function_call_arguments.done", **named, name=item["name"], arguments=call.arguments
                )
            )
            events.append(self._event("response.output_item.done", output_index=self._index, item=item))
            self._open = ""
            self._done.append(item)
        if delta.reply is not None:
            self._reply = delta.reply
        return events

    def end(self, usage: Usage) -> list[bytes]:
        """After the last reply."""
        events = [] if self._done or self._open else self._open_text()
        events += self._close()
        status = "incomplete" if self._reply.finish == "length" else "completed"
        whole = _response(self._found, self._body, self._done, status, usage)
        self._on_end(whole)
        return [*events, self._event(f"response.{status}", response=whole)]

    def error(self, value: dict[str, Any]) -> list[bytes]:
        """In place of the rest."""
        error = value["error"]
        return [self._event("error", code=error["code"], message=error["message"], param=error["param"])]

    def _open_text(self) -> list[bytes]:
        if self._open == "message":
            return []
        begun = [*self._close(), *self._begun("message", _message(self._found, None, "in_progress"))]
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"item_id": f"msg_{self._found.id}", "output_index": self._index, "content_index": 0}
        return [*begun, self._event("response.content_part.added", **item, part=part)]

    def _begun(self, kind: str, item: dict[str, Any]) -> list[bytes]:
        self._index, self._open, self._text = self._index + 1, kind, ""
        return [self._event("response.output_item.added", output_index=self._index, item=item)]

    def _part(self, kind: str, text: str, **more: Any) -> bytes:
        self._text += text
        name = f"{'rs' if self._open == 'reasoning' else 'msg'}_{self._found.id}"
        return self._event(kind, item_id=name, output_index=self._index, content_index=0, delta=text, **more)

    def _close(self) -> list[bytes]:
        """Ends the item that is open."""
        kind, self._open = self._open, ""
        if kind == "reasoning":
            item = _reasoning(self._found, self._text)
            named = {"item_id": item["id"], "output_index": self._index, "content_index": 0}
            events = [self._event("response.reasoning_text.done", **named, text=self._text)]
        elif kind == "message":
            status = "incomplete" if self._reply.finish == "length" else "completed"
            item = _message(self._found, self._text, status, _logprobs(self._found, self._reply, self._text_of_ids))
            named = {"item_id": item["id"], "output_index": self._index, "content_index": 0}
            part = item["content"][0]
            events = [
                self._event("response.output_text.done", **named, text=self._text, logprobs=[]),
                self._event("response.content_part.done", **named, part=part),
            ]
        else:
            return []
        self._done.append(item)
        return [*events, self._event("response.output_item.done", output_index=self._index, item=item)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)


def _exchange(body: dict[str, Any], template: str, kept: "Kept") -> Exchange:
    """What a call names of earlier ones takes the place of the names, and the response is kept for later ones."""
    resolved = kept.resolved(body)

    def whole(found: Sequence[Answer], text_of_ids: TextOf) -> dict[str, Any]:
        value = answer(found[0], resolved.body, text_of_ids)
        kept.keep(resolved, value)
        return value

    return Exchange(
        asked=[read(resolved.body, template)],
        answer=whole,
        events=lambda found, _, text_of_ids: ReplyStream(
            found, resolved.body, text_of_ids, lambda value: kept.keep(resolved, value)
        ),
    )


PROTOCOL = Protocol(provider=OPENAI, paths=["/v1/responses"], exchange=_exchange)
