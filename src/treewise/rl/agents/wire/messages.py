"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

import json
from collections.abc import Sequence
from typing import Any

from treewise.data.io.field_checks import shown
from treewise.data.render.messages import Message
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError, Reply
from treewise.rl.agents.wire.chat import tool_choice
from treewise.rl.agents.wire.common import (
    Answer,
    Delta,
    Fields,
    Usage,
    error_kind,
    output_schema,
    sse,
    stops_of,
    template_variables,
    text_of,
)
from treewise.rl.agents.wire.protocol import Exchange, Protocol, Provider

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: object, template: str = "", *, counts: bool = False) -> AgentRequest:
    """A call. template: the text of the chat template, which may read `enable_thinking`. counts: whether only tokens
    are counted. Raises `RefusedError`."""
    fields = Fields(body)
    given = fields.need("messages", list)
    tools = [
        _tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.take("tools", list, default=[]))
    ] or None
    choice = fields.take("tool_choice", dict, default={"type": "auto"})
    kind = choice.get("type")
    reads_calls, must_call = tool_choice(choice if kind == "tool" else kind, bool(tools))
    variables = template_variables(fields)
    thinking = fields.take("thinking", dict, default={})
    if thinking and thinking.get("type") not in ("enabled", "disabled", "adaptive"):
        raise RefusedError(f"thinking={shown(thinking)} is not served.", param="thinking")
    if thinking and "enable_thinking" in template:
        variables = {"enable_thinking": thinking["type"] != "disabled", **variables}
    messages = _system(fields.take("system", str, list))
    for index, message in enumerate(given):
        messages += _messages(message, f"messages[{index}]")
    if not given or not any(message["role"] != "system" for message in messages):
        raise RefusedError("messages is empty.", param="messages")
    prefill = (
        messages.pop()["content"] if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls") else ""
    )
    fields.only("mcp_servers", ([],))
    fields.only("container")
    output = Fields(fields.take("output_config", dict, default={}), "output_config")
    schema = output_schema(output.take("format", dict) or fields.take("output_format", dict), "output_config.format")
    output.ignore("effort")
    output.done()
    if schema is not None and prefill:
        raise RefusedError("output_config.format is not served for a turn that is begun.", param="output_config")
    fields.ignore("metadata", "service_tier", "cache_control", "inference_geo", "context_management")
    most = fields.take("max_tokens", int) if counts else fields.need("max_tokens", int)
    asked = AgentRequest(
        model=fields.take("model", str, default=""),
        messages=tuple(messages),
        tools=tools,
        reads_calls=reads_calls,
        must_call=must_call,
        is_parallel=not choice.get("disable_parallel_tool_use", False),
        prefill=prefill,
        max_tokens=most,
        temperature=fields.take("temperature", float),
        top_p=fields.take("top_p", float),
        top_k=fields.take("top_k", int),
        stop=stops_of(fields, "stop_sequences"),
        variables=variables,
        is_streamed=fields.take("stream", bool, default=False),
        schema=schema,
        ignored=(*fields.ignored, *output.ignored),
    )
    fields.done()
    return asked


def _tool(value: object, location: str) -> dict[str, Any]:
    fields = Fields(value, location)
    kind = fields.take("type", str, default="custom")
    if kind != "custom":
        raise RefusedError(
            f"{location}: tools of type {kind!r} are not served, only those with an input_schema.", param="tools"
        )
    function: dict[str, object] = {"name": fields.need("name", str)}
    if (text := fields.take("description", str)) is not None:
        function["description"] = text
    function["parameters"] = fields.need("input_schema", dict)
    fields.ignore(
        "cache_control", "strict", "eager_input_streaming", "input_examples", "allowed_callers", "defer_loading"
    )
    fields.done()
    return {"type": "function", "function": function}


def _system(value: object) -> list[Message]:
    text = text_of(value, "system", ("text",))
    return [{"role": "system", "content": text}] if text else []


def _messages(value: object, location: str) -> list[Message]:
    """The messages of one of Anthropic's: results of tools are messages of their own."""
    if not isinstance(value, dict) or value.get("role") not in ("user", "assistant", "system"):
        raise RefusedError(
            f"{location} must be an object with role user or assistant, found {shown(value)}.", param=location
        )
    role, content = value["role"], value.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RefusedError(f"{location}.content must be text or blocks, found {shown(content)}.", param=location)
    found: list[Message] = []
    texts, calls, reasoning = [], [], []
    for number, block in enumerate(blocks):
        kind, where = block.get("type"), f"{location}.content[{number}]"
        if kind == "text":
            texts.append(text_of([block], where))
        elif kind == "tool_result" and role == "user":
            text = text_of(block.get("content"), f"{where}.content", ("text",))
            named = Fields(block, where).need("tool_use_id", str)
            found.append({"role": "tool", "tool_call_id": named, "content": text})
        elif kind == "tool_use" and role == "assistant":
            fields = Fields(block, where)
            arguments = json.dumps(fields.take("input", dict, default={}), ensure_ascii=False)
            function = {"name": fields.need("name", str), "arguments": arguments}
            calls.append({"type": "function", "id": fields.need("id", str), "function": function})
        elif kind == "thinking" and role == "assistant":
            reasoning.append(Fields(block, where).take("thinking", str, default=""))
        else:
            raise RefusedError(
                f"{where}: content of type {shown(kind)} is not served in a message of {role}.", param=location
            )
    if role == "assistant":
        message: Message = {"role": role, "content": "".join(texts)}
        message |= {"reasoning_content": "\n".join(reasoning)} if reasoning else {}
        return [{**message, **({"tool_calls": calls} if calls else {})}]
    return [*found, *([{"role": role, "content": "".join(texts)}] if texts or not found else [])]


# -- answers ----------------------------------------------------------------------------------------------------------


def usage_of(usage: Usage) -> dict[str, Any]:
    """Tokens of a call: those that were there before are no new input."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def answer(found: Answer) -> dict[str, Any]:
    """A whole answer."""
    (reply,) = found.replies
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    blocks += [
        {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": json.loads(call.arguments),
            "caller": {"type": "direct"},
        }
        for call in reply.calls
    ]
    return {**_head(found), "content": blocks, **_stop(reply), "usage": usage_of(found.usage)}


def _head(found: Answer) -> dict[str, Any]:
    return {"id": found.id, "type": "message", "role": "assistant", "model": found.asked.model}


def _stop(reply: Reply) -> dict[str, Any]:
    reason = "stop_sequence" if reply.stop_text is not None else STOPS[reply.finish]
    return {"stop_reason": reason, "stop_sequence": reply.stop_text}


class ReplyStream:
    """The events of one answer."""

    def __init__(self, found: Answer) -> None:
        self._found, self._index, self._open, self._reply = found, -1, "", Reply("")

    def begin(self) -> list[bytes]:
        """Before the first token."""
        usage = usage_of(Usage(self._found.usage.prompt, 0, self._found.usage.cached))
        message = {**_head(self._found), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=message), _event("ping")]

    def delta(self, delta: Delta) -> list[bytes]:
        """A part of a reply."""
        events: list[bytes] = []
        if delta.reasoning:
            events += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._part({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            events += self._block("text", {"type": "text", "text": ""})
            events.append(self._part({"type": "text_delta", "text": delta.content}))
        for call in delta.calls:
            head = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}, "caller": {"type": "direct"}}
            events += [*self._close(), *self._block("tool_use", head)]
            events.append(self._part({"type": "input_json_delta", "partial_json": call.arguments}))
        if delta.reply is not None:
            self._reply = delta.reply
        return events

    def end(self, usage: Usage) -> list[bytes]:
        """After the last reply."""
        last = _event("message_delta", delta=_stop(self._reply), usage={"output_tokens": usage.completion})
        return [*self._close(), last, _event("message_stop")]

    def error(self, value: dict[str, Any]) -> list[bytes]:
        """In place of the rest."""
        return [sse(value, "error")]

    def _block(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Opens a block, where one of another kind is open, or none."""
        if self._open == kind:
            return []
        closed = self._close()
        self._index, self._open = self._index + 1, kind
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _part(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        kind, self._open = self._open, ""
        signature = [self._part({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signature, _event("content_block_stop", index=self._index)]


def _event(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)


# -- the protocol -----------------------------------------------------------------------------------------------------


def _error(error: RefusedError) -> dict[str, Any]:
    kind = {503: "overloaded_error", 504: "timeout_error"}.get(error.status, error_kind(error.status, "api_error"))
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _listed(names: Sequence[str]) -> dict[str, Any]:
    found = [_model(name) for name in names]
    return {"data": found, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def _exchange(body: dict[str, Any], template: str, _: object) -> Exchange:
    return Exchange(
        asked=[read(body, template)],
        answer=lambda found, _: answer(found[0]),
        events=lambda found, _, __: ReplyStream(found),
    )


ANTHROPIC = Provider(
    name="anthropic",
    owns=lambda path, headers: path.startswith("/v1/messages") or "anthropic-version" in headers,
    key_header="x-api-key",
    error=_error,
    models="/v1/models",
    listed=_listed,
    model=_model,
    addresses={"ANTHROPIC_BASE_URL": ""},
    key_variables=("ANTHROPIC_API_KEY",),
)
PROTOCOL = Protocol(
    provider=ANTHROPIC,
    paths=["/v1/messages"],
    exchange=_exchange,
    count_paths=["/v1/messages/count_tokens"],
    count=lambda body, template: read(body, template, counts=True),
)
