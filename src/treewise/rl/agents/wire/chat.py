"""OpenAI's `POST /v1/chat/completions`, and the fields that vLLM adds: `top_k`, `chat_template_kwargs`,
`return_token_ids`."""

from typing import Any

from treewise.data.io.field_checks import shown
from treewise.data.render.messages import Message
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError, Reply
from treewise.rl.agents.wire.common import (
    Answer,
    Delta,
    Fields,
    TextOf,
    Usage,
    error_kind,
    named_tools,
    output_schema,
    sse,
    stops_of,
    template_variables,
    text_of,
)
from treewise.rl.agents.wire.protocol import BEARER, Exchange, Protocol, Provider

IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "client_metadata",
    "verbosity",
    "prediction",
)
PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "min_p": 0, "repetition_penalty": 1}


def read(body: object, template: str = "") -> AgentRequest:
    """A call. template: the text of the chat template, which may read `reasoning_effort`. Raises `RefusedError`."""
    fields = Fields(body)
    messages = fields.need("messages", list)
    if not messages:
        raise RefusedError("messages is empty.", param="messages")
    tools = named_tools(fields.take("tools", list, default=[]))
    reads_calls, must_call = tool_choice(fields.take("tool_choice", str, dict, default="auto"), bool(tools.functions))
    most, older = fields.count("max_completion_tokens"), fields.count("max_tokens")
    wants_logprobs, num_top = fields.take("logprobs", bool, default=False), fields.take("top_logprobs", int)
    variables = template_variables(fields)
    variables |= effort(fields, "reasoning_effort", template)
    fields.take("stream_options", dict)
    for name, neutral in PENALTIES.items():
        fields.only(name, (neutral,))
    schema = output_schema(fields.take("response_format", dict), "response_format")
    fields.only("modalities", (["text"],))
    fields.only("functions", ([],), hint="give tools")
    fields.only("function_call", ("auto", "none"), hint="give tool_choice")
    fields.take("return_token_ids", bool)
    fields.ignore(*IGNORED, "web_search_options")
    asked = AgentRequest(
        model=fields.take("model", str, default=""),
        messages=tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages)),
        tools=tools.functions,
        reads_calls=reads_calls,
        must_call=must_call,
        is_parallel=fields.take("parallel_tool_calls", bool, default=True),
        num_choices=fields.take("n", int, default=1),
        max_tokens=older if most is None else most,
        temperature=fields.take("temperature", float),
        top_p=fields.take("top_p", float),
        top_k=top_k_of(fields.take("top_k", int)),
        seed=fields.take("seed", int),
        stop=stops_of(fields, "stop"),
        num_top=(num_top or 0) if wants_logprobs else None,
        variables=variables,
        is_streamed=fields.take("stream", bool, default=False),
        schema=schema,
        namespaces=tools.namespaces,
        ignored=(*fields.ignored, *tools.ignored),
    )
    fields.done()
    return asked


def top_k_of(value: int | None) -> int | None:
    """`top_k`, 0 for no limit; vLLM writes that as -1."""
    return 0 if value is not None and value < 0 else value


def tool_choice(value: object, has_tools: bool) -> tuple[bool, str | None]:
    """Whether calls are read, and which function must be called."""
    if value in ("auto", "none"):
        return value == "auto" and has_tools, None
    if value in ("required", "any"):
        return True, ""
    is_named = isinstance(value, dict) and value.get("type") in ("function", "tool")
    chosen = value.get("function", value) if is_named else None  # type: ignore[attr-defined]
    if not isinstance(chosen, dict) or not isinstance(chosen.get("name"), str):
        raise RefusedError(f"tool_choice={shown(value)} is not served.", param="tool_choice")
    return True, chosen["name"]


def effort(fields: Fields, name: str, template: str) -> dict[str, str]:
    """A variable that some chat templates read; with the others it changes nothing, whatever its value."""
    if "reasoning_effort" not in template:
        fields.ignore(name)
        return {}
    value: str | None = fields.take(name, str)
    return {} if value is None else {"reasoning_effort": value}


def _message(value: object, location: str) -> Message:
    """A message with its content as text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RefusedError(f"{location} must be an object with role and content, found {shown(value)}.", param=location)
    if value.get("audio") is not None:
        raise RefusedError(f"{location}: audio is not served.", param=location)
    kept = (
        "role",
        "tool_calls",
        "tool_call_id",
        "name",
        "reasoning_content",
        "reasoning",
        "thinking",
        "function_call",
        "refusal",
    )
    message = {name: value[name] for name in kept if value.get(name) is not None}
    message["content"] = text_of(value.get("content"), f"{location}.content")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or any(
        not isinstance(call, dict) or call.get("type", "function") != "function" for call in calls
    ):
        param = f"{location}.tool_calls"
        raise RefusedError(f"{param}: only a list of function calls is served.", param=param)
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    return message


# -- answers ----------------------------------------------------------------------------------------------------------


def usage_of(usage: Usage) -> dict[str, Any]:
    """The `usage` of an answer, as chat and completions give it."""
    total = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
    total["total_tokens"] = usage.prompt + usage.completion
    return {**total, "prompt_tokens_details": {"cached_tokens": usage.cached}}


def answer(found: Answer, text_of_ids: TextOf, *, shows_ids: bool = False) -> dict[str, Any]:
    """A whole answer."""
    choices = []
    for index, reply in enumerate(found.replies):
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.content or (None if reply.calls else ""),
            "refusal": None,
        }
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_call(call) for call in reply.calls]
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reply.finish}
        choice["logprobs"] = logprobs_of(reply, text_of_ids) if found.asked.num_top is not None else None
        choices.append({**choice, **({"token_ids": list(reply.token_ids)} if shows_ids else {})})
    head = {"id": found.id, "object": "chat.completion", "created": found.created, "model": found.asked.model}
    ids = {"prompt_token_ids": list(found.prompt_ids)} if shows_ids else {}
    return {**head, "choices": choices, "usage": usage_of(found.usage), "system_fingerprint": None, **ids}


def _call(call: Any) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_of(reply: Reply, text_of_ids: TextOf) -> dict[str, Any]:
    """The `logprobs` of a reply: of each of its tokens, with the likeliest others."""
    found = []
    tops = reply.tops or ({},) * len(reply.token_ids)
    for token, value, top in zip(reply.token_ids, reply.logprobs, tops, strict=True):
        others = [_logprob(other, text_of_ids, logprob) for other, logprob in top.items()]
        found.append({**_logprob(token, text_of_ids, value), "top_logprobs": others})
    return {"content": found, "refusal": None}


def _logprob(token: int, text_of_ids: TextOf, value: float) -> dict[str, Any]:
    text = text_of_ids([token])
    return {"token": text, "bytes": list(text.encode()), "logprob": max(float(value), -9999.0)}


class ReplyStream:
    """The events of one answer. body: of the request."""

    def __init__(self, found: Answer, body: dict[str, Any], text_of_ids: TextOf) -> None:
        self._found, self._text_of_ids = found, text_of_ids
        options = body.get("stream_options") or {}
        self._has_usage = bool(options.get("include_usage"))
        self._num_calls = [0] * found.asked.num_choices
        self._head = {
            "id": found.id,
            "object": "chat.completion.chunk",
            "created": found.created,
            "model": found.asked.model,
        }

    def begin(self) -> list[bytes]:
        """Before the first token."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._found.asked.num_choices)
        ]

    def delta(self, delta: Delta) -> list[bytes]:
        """A part of a reply."""
        events = []
        if delta.reasoning:
            events.append(self._chunk(delta.choice, {"reasoning_content": delta.reasoning}))
        if delta.content:
            events.append(self._chunk(delta.choice, {"content": delta.content}))
        for call in delta.calls:
            index, self._num_calls[delta.choice] = self._num_calls[delta.choice], self._num_calls[delta.choice] + 1
            head = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            events.append(self._chunk(delta.choice, {"tool_calls": [head]}))
            part = {"index": index, "function": {"arguments": call.arguments}}
            events.append(self._chunk(delta.choice, {"tool_calls": [part]}))
        if (reply := delta.reply) is not None:
            logprobs = logprobs_of(reply, self._text_of_ids) if self._found.asked.num_top is not None else None
            events.append(self._chunk(delta.choice, {}, reply.finish, logprobs))
        return events

    def end(self, usage: Usage) -> list[bytes]:
        """After the last reply."""
        last = [sse({**self._head, "choices": [], "usage": usage_of(usage)})] if self._has_usage else []
        return [*last, b"data: [DONE]\n\n"]

    def error(self, value: dict[str, Any]) -> list[bytes]:
        """In place of the rest."""
        return [sse(value)]

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: object = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return sse({**self._head, "choices": [choice], **({"usage": None} if self._has_usage else {})})


# -- the protocol -----------------------------------------------------------------------------------------------------


def _error(error: RefusedError) -> dict[str, Any]:
    kind = error_kind(error.status, "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "treewise"}


def _exchange(body: dict[str, Any], template: str, _: object) -> Exchange:
    shows_ids = bool(body.get("return_token_ids"))
    return Exchange(
        asked=[read(body, template)],
        answer=lambda found, text_of_ids: answer(found[0], text_of_ids, shows_ids=shows_ids),
        events=lambda found, _, text_of_ids: ReplyStream(found, body, text_of_ids),
    )


OPENAI = Provider(
    name="openai",
    owns=None,
    key_header=BEARER,
    error=_error,
    models="/v1/models",
    listed=lambda names: {"object": "list", "data": [_model(name) for name in names]},
    model=_model,
    addresses={"OPENAI_BASE_URL": "/v1", "OPENAI_API_BASE": "/v1"},
    key_variables=("OPENAI_API_KEY",),
)
PROTOCOL = Protocol(provider=OPENAI, paths=["/v1/chat/completions"], exchange=_exchange)
