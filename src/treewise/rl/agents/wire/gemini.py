"""Google's Gemini API: `POST /v1beta/models/MODEL:generateContent`, `:streamGenerateContent` and `:countTokens`.

Shapes are those of the public interface (https://ai.google.dev/api/generate-content): a turn is a content of parts,
results of tools stand in a turn of the user, a call need not have an id, and schemas may write types in capitals.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treewise.data.io.field_checks import shown
from treewise.data.render.messages import Message
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError, Reply
from treewise.rl.agents.wire.common import Answer, Delta, Fields, TextOf, Usage, sse, stops_of
from treewise.rl.agents.wire.protocol import Exchange, Protocol, Provider

FINISHES = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
STATUSES = {
    **{400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"},
    **{405: "INVALID_ARGUMENT", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL"},
    **{503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED", 507: "UNAVAILABLE"},
}
PLACES = ("/v1beta/models/{model:path}", "/v1/models/{model:path}")
STREAM = "streamGenerateContent"


def read(body: dict[str, Any], template: str = "") -> AgentRequest:
    """A call. body: with `model` and `stream`, which stand in its path. template: the text of the chat template, which
    may read `enable_thinking`. Raises `RefusedError`."""
    fields = Fields(body)
    config = Fields(fields.take("generationConfig", dict, default={}), "generationConfig")
    tools = _functions(fields.take("tools", list, default=[]))
    reads_calls, must_call = _choice(fields.take("toolConfig", dict, default={}), tools)
    messages = _system(fields.take("systemInstruction", dict, str))
    calls: list[dict[str, Any]] = []
    contents = fields.need("contents", list, dict, str)
    for index, content in enumerate(contents if isinstance(contents, list) else [contents]):
        messages += _messages(content, f"contents[{index}]", calls)
    if not any(message["role"] != "system" for message in messages):
        raise RefusedError("contents is empty.", param="contents")
    fields.only("cachedContent")
    fields.ignore("safetySettings", "labels", "store", "serviceTier")
    thinking = config.take("thinkingConfig", dict, default={})
    variables = {}
    if thinking and "enable_thinking" in template:
        variables["enable_thinking"] = thinking.get("thinkingBudget") != 0
    schema = _schema(config)
    for name in ("presencePenalty", "frequencyPenalty"):
        config.only(name, (0,))
    config.only("responseModalities", (["TEXT"], []))
    config.ignore("mediaResolution", "enableEnhancedCivicAnswers", "audioTimestamp", "routingConfig")
    wants_logprobs, num_top = config.take("responseLogprobs", bool, default=False), config.take("logprobs", int)
    asked = AgentRequest(
        model=fields.take("model", str, default=""),
        messages=tuple(messages),
        tools=tools,
        reads_calls=reads_calls,
        must_call=must_call,
        num_choices=config.take("candidateCount", int, default=1),
        max_tokens=config.take("maxOutputTokens", int),
        temperature=config.take("temperature", float),
        top_p=config.take("topP", float),
        top_k=_top_k(config.take("topK", float)),
        seed=config.take("seed", int),
        stop=stops_of(config, "stopSequences"),
        num_top=(num_top or 0) if wants_logprobs else None,
        variables=variables,
        is_streamed=fields.take("stream", bool, default=False),
        schema=schema,
        ignored=(*fields.ignored, *config.ignored),
    )
    config.done()
    fields.done()
    return asked


def _top_k(value: float | None) -> int | None:
    """SDKs write it as a float."""
    if value is not None and value != int(value):
        raise RefusedError(f"generationConfig.topK is {value}; it must be a whole number.", param="topK")
    return None if value is None else int(value)


def _functions(values: Sequence[object]) -> list[dict[str, Any]] | None:
    """Function schemas of OpenAI's chat form."""
    found = []
    for index, tool in enumerate(values):
        location = f"tools[{index}]"
        fields = Fields(tool, location)
        for number, given in enumerate(fields.take("functionDeclarations", list, default=[])):
            function = Fields(given, f"{location}.functionDeclarations[{number}]")
            own: dict[str, Any] = {"name": function.need("name", str)}
            if (text := function.take("description", str)) is not None:
                own["description"] = text
            parameters, written = function.take("parameters", dict), function.take("parametersJsonSchema", dict)
            if parameters is not None or written is not None:
                own["parameters"] = written if written is not None else json_schema(parameters)
            function.ignore("response", "responseJsonSchema", "behavior")
            function.done()
            found.append({"type": "function", "function": own})
        fields.done()  # googleSearch, codeExecution and the like are run by Google alone
    return found or None


def json_schema(value: Any) -> Any:
    """A JSON schema of one in OpenAPI's spelling: types in capitals, `nullable`, an order of properties."""
    if isinstance(value, list):
        return [json_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for name, item in value.items():
        if name == "properties" and isinstance(item, dict):
            found[name] = {key: json_schema(each) for key, each in item.items()}
        elif name == "type" and isinstance(item, str):
            found[name] = item.lower()
        elif name in ("enum", "default", "example", "required"):
            found[name] = item
        elif name in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"):
            found[name] = _whole(name, item)
        elif name not in ("nullable", "propertyOrdering"):
            found[name] = json_schema(item)
    if value.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found


def _whole(name: str, value: Any) -> int:
    """int64 is a text in Google's JSON."""
    try:
        return int(value)
    except (ValueError, TypeError):
        raise RefusedError(f"a schema's {name} must be a whole number, found {shown(value)}.", param=name) from None


def _choice(value: dict[str, Any], tools: list[dict[str, Any]] | None) -> tuple[bool, str | None]:
    """Whether calls are read, and which function must be called."""
    fields = Fields(value, "toolConfig")
    config = Fields(fields.take("functionCallingConfig", dict, default={}), "toolConfig.functionCallingConfig")
    fields.ignore("retrievalConfig")
    fields.done()
    mode, allowed = config.take("mode", str, default="AUTO"), config.take("allowedFunctionNames", list, default=[])
    config.ignore("streamFunctionCallArguments")
    config.done()
    names = {tool["function"]["name"] for tool in tools or ()}
    if mode in ("AUTO", "VALIDATED", "MODE_UNSPECIFIED", "NONE") and not allowed:
        return mode != "NONE" and bool(tools), None
    if mode == "ANY" and (not allowed or len(allowed) == 1 or set(allowed) == names):
        return True, allowed[0] if len(allowed) == 1 else ""
    raise RefusedError(
        f"toolConfig: mode {shown(mode)} with allowedFunctionNames {shown(allowed)} is not served; ANY is, with one "
        "name or none.",
        param="toolConfig",
    )


def _schema(config: Fields) -> Mapping[str, Any] | None:
    """The JSON schema that a reply has to keep to."""
    kind = config.take("responseMimeType", str, default="text/plain")
    given, written = config.take("responseSchema", dict), config.take("responseJsonSchema", dict)
    if kind == "text/plain" and given is None and written is None:
        return None
    if kind != "application/json":
        raise RefusedError(
            f"generationConfig.responseMimeType={shown(kind)} is not served, only text/plain, and application/json.",
            param="generationConfig.responseMimeType",
        )
    if written is not None:
        return dict(written)
    return {"type": "object"} if given is None else dict(json_schema(given))


def _system(value: object) -> list[Message]:
    if value is None:
        return []
    parts = (
        [{"text": value}] if isinstance(value, str) else Fields(value, "systemInstruction").need("parts", list, dict)
    )
    text = "".join(_text(part, "systemInstruction") for part in (parts if isinstance(parts, list) else [parts]))
    return [{"role": "system", "content": text}] if text else []


def _text(part: object, location: str) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        found = ", ".join(part) if isinstance(part, dict) else shown(part)
        raise RefusedError(f"{location}: a part with {found} is not served, only text.", param=location)
    return text


def _messages(value: object, location: str, calls: list[dict[str, Any]]) -> list[Message]:
    """The messages of a content. calls: those before that have no result; a result without an id is of the first one
    of its name."""
    fields = Fields({"parts": [{"text": value}]} if isinstance(value, str) else value, location)
    role, parts = fields.take("role", str, default="user"), fields.take("parts", list, dict, default=[])
    fields.done()
    if role not in ("user", "model", "function"):
        raise RefusedError(f"{location}.role is {shown(role)}; it must be user or model.", param=f"{location}.role")
    found: list[Message] = []
    texts, reasoning, own = [], [], list[dict[str, Any]]()
    for number, part in enumerate(parts if isinstance(parts, list) else [parts]):
        where = f"{location}.parts[{number}]"
        if isinstance(part, dict) and "functionCall" in part and role == "model":
            call = Fields(part["functionCall"], f"{where}.functionCall")
            arguments = json.dumps(call.take("args", dict, default={}), ensure_ascii=False)
            function = {"name": call.need("name", str), "arguments": arguments}
            name = call.take("id", str) or f"call_{location}_{number}"
            own.append({"type": "function", "id": name, "function": function})
        elif isinstance(part, dict) and "functionResponse" in part and role != "model":
            result = Fields(part["functionResponse"], f"{where}.functionResponse")
            given = result.need("response", dict)
            found.append(
                {
                    "role": "tool",
                    "tool_call_id": _answered(result.need("name", str), result.take("id", str), calls, where),
                    "content": _result_text(given),
                }
            )
        elif isinstance(part, dict) and part.get("thought") and role == "model":
            reasoning.append(_text(part, where))
        else:
            texts.append(_text(part, where))
    if role == "model":
        calls += own
        message: Message = {"role": "assistant", "content": "".join(texts)}
        message |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
        return [{**message, **({"tool_calls": own} if own else {})}]
    return [*found, *([{"role": "user", "content": "".join(texts)}] if texts or not found else [])]


def _answered(name: str, given: str | None, calls: list[dict[str, Any]], where: str) -> str:
    """The id of the call that a result answers, which is taken from those that wait."""
    own = next((each for each in calls if each["id"] == given), None) if given else None
    own = own or next((each for each in calls if each["function"]["name"] == name), None)
    if own is None:
        raise RefusedError(f"{where}: no call of {name!r} comes before this functionResponse.", param=where)
    calls.remove(own)
    return str(own["id"])


def _result_text(response: dict[str, Any]) -> str:
    """What a tool returned: SDKs wrap what is no object as `result` (or `output`)."""
    value = next(iter(response.values())) if len(response) == 1 and {*response} <= {"result", "output"} else response
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# -- answers ----------------------------------------------------------------------------------------------------------


def _usage(usage: Usage) -> dict[str, Any]:
    found = {"promptTokenCount": usage.prompt, "candidatesTokenCount": usage.completion}
    found |= {"totalTokenCount": usage.prompt + usage.completion}
    return found | ({"cachedContentTokenCount": usage.cached} if usage.cached else {})


def _head(found: Answer) -> dict[str, Any]:
    return {"responseId": found.id, "modelVersion": found.asked.model}


def _parts(delta: Delta) -> list[dict[str, Any]]:
    thought = [{"text": delta.reasoning, "thought": True}] if delta.reasoning else []
    text = [{"text": delta.content}] if delta.content else []
    calls = [
        {"functionCall": {"id": call.id, "name": call.name, "args": json.loads(call.arguments)}} for call in delta.calls
    ]
    return [*thought, *text, *calls]


def _candidate(index: int, parts: list[dict[str, Any]], reply: Reply | None = None) -> dict[str, Any]:
    finish = {} if reply is None else {"finishReason": FINISHES[reply.finish]}
    return {"index": index, "content": {"role": "model", "parts": parts}, **finish}


def _logprobs(found: Answer, reply: Reply, text_of_ids: TextOf) -> dict[str, Any]:
    if found.asked.num_top is None:
        return {}

    def shown_as(token: int, value: float) -> dict[str, Any]:
        return {"token": text_of_ids([token]), "tokenId": token, "logProbability": max(float(value), -9999.0)}

    chosen = [shown_as(*each) for each in zip(reply.token_ids, reply.logprobs, strict=True)]
    tops = [{"candidates": [shown_as(token, value) for token, value in top.items()]} for top in reply.tops]
    return {"logprobsResult": {"chosenCandidates": chosen, "topCandidates": tops}}


def answer(found: Answer, text_of_ids: TextOf) -> dict[str, Any]:
    """A whole answer."""
    candidates = [
        {
            **_candidate(index, _parts(Delta(index, reply.reasoning, reply.content, reply.calls)), reply),
            **_logprobs(found, reply, text_of_ids),
        }
        for index, reply in enumerate(found.replies)
    ]
    return {**_head(found), "candidates": candidates, "usageMetadata": _usage(found.usage)}


class ReplyStream:
    """The events of one answer."""

    def __init__(self, found: Answer, text_of_ids: TextOf) -> None:
        self._found, self._text_of_ids = found, text_of_ids

    def begin(self) -> list[bytes]:
        """Before the first token."""
        return []

    def delta(self, delta: Delta) -> list[bytes]:
        """A part of a reply."""
        parts, reply = _parts(delta), delta.reply
        if not parts and reply is None:
            return []
        logprobs = {} if reply is None else _logprobs(self._found, reply, self._text_of_ids)
        return [sse({**_head(self._found), "candidates": [_candidate(delta.choice, parts, reply) | logprobs]})]

    def end(self, usage: Usage) -> list[bytes]:
        """After the last reply."""
        return [sse({**_head(self._found), "usageMetadata": _usage(usage)})]

    def error(self, value: dict[str, Any]) -> list[bytes]:
        """In place of the rest."""
        return [sse(value)]


# -- the protocol -----------------------------------------------------------------------------------------------------


def _error(error: RefusedError) -> dict[str, Any]:
    status = STATUSES.get(error.status, "UNKNOWN")
    return {"error": {"code": error.status, "message": error.message, "status": status}}


def _model(name: str) -> dict[str, Any]:
    methods = ["generateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}


def _body(path: Mapping[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """A call with the model and the kind of answer that its path names. path: its parts, the query's, and `path`."""
    is_stream = path["path"].endswith(f":{STREAM}")
    if is_stream and path.get("alt") != "sse":
        raise RefusedError(f"{STREAM} is served as server-sent events: add ?alt=sse.", param="alt")
    return {**body, "model": str(path["model"]), "stream": is_stream}


def _counted(body: dict[str, Any], template: str) -> AgentRequest:
    inner = body.get("generateContentRequest")
    own = dict(inner) if isinstance(inner, dict) else body
    return read({**own, "model": body["model"], "stream": False}, template)


def _exchange(body: dict[str, Any], template: str, _: object) -> Exchange:
    return Exchange(
        asked=[read(body, template)],
        answer=lambda found, text_of_ids: answer(found[0], text_of_ids),
        events=lambda found, _, text_of_ids: ReplyStream(found, text_of_ids),
    )


GOOGLE = Provider(
    name="gemini",
    owns=lambda path, headers: path.startswith("/v1beta/") or "x-goog-api-key" in headers,
    key_header="x-goog-api-key",
    error=_error,
    models="/v1beta/models",
    listed=lambda names: {"models": [_model(name) for name in names]},
    model=lambda name: _model(name.removeprefix("models/")),
    addresses={"GOOGLE_GEMINI_BASE_URL": ""},
    key_variables=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    variables={"GOOGLE_GENAI_USE_VERTEXAI": "false"},
)
PROTOCOL = Protocol(
    provider=GOOGLE,
    paths=[f"{place}:{method}" for place in PLACES for method in ("generateContent", STREAM)],
    exchange=_exchange,
    body=_body,
    is_passed_on=False,
    count_paths=[f"{place}:countTokens" for place in PLACES],
    count=_counted,
    counted=lambda tokens: {"totalTokens": tokens},
)
