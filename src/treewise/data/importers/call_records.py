"""One call of a chat model, in whatever record it was logged, as `{request, response, rollout, ...}` of `openai_log`.

Shapes are those of public interfaces: observations and traces of langfuse (`GET /api/public/observations`, `/traces`),
runs of LangSmith (`run_type: llm`; messages of OpenAI or of LangChain), the two files of batches of OpenAI's
(https://platform.openai.com/docs/guides/batch) or Anthropic's, and flat records that hold messages beside the response.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from treewise.data.importers.common import Context, first_of, talk_of, tools_of
from treewise.data.importers.interfaces import RESPONSE_ITEMS
from treewise.data.importers.times import times_of
from treewise.data.io.endings import with_reason
from treewise.data.io.field_checks import shown
from treewise.data.io.files import Placed
from treewise.data.io.forms import Record
from treewise.errors import DataError

LANGCHAIN_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "chat": "user"}
REPLY_KEYS = {"role", "type", "kwargs", "message", "messages", "choices", "body", "generations", "output"}
REQUEST_KEYS = ("messages", "system", "tools", "functions", "model", "input", "instructions", "previous_response_id")
SESSIONS = ("session_id", "sessionId", "langfuse_session_id", "thread_id", "threadId", "conversation_id")
MANY_SCORES = "several scores of a trace, none of which is used as its reward; name one: treewise import --reward NAME"


def langfuse_calls(records: Iterable[Placed], context: Context) -> Iterator[Placed]:
    """The generations of langfuse's observations, or of traces that hold `observations` and `scores`."""
    for record in records:
        trace = record.value
        observations = trace.get("observations")
        if observations is None:
            yield from _langfuse_call(record.location, trace, {}, context)
            continue
        if not isinstance(observations, list) or not all(isinstance(observation, dict) for observation in observations):
            raise DataError(
                f"{record.location}: observations must be a list of objects; export them in full, not their ids."
            )
        labels = {
            "rollout": trace.get("id"),
            "reward": _score(trace.get("scores"), record.location, context),
            "session": _session(trace),
            "times": times_of(context, trace),
            "metadata": _json(trace.get("metadata")),
        }
        for index, observation in enumerate(observations):
            yield from _langfuse_call(f"{record.location}: observations[{index}]", observation, labels, context)


def _langfuse_call(location: str, value: Record, labels: Record, context: Context) -> Iterator[Placed]:
    """labels: of its trace, which win but for times and metadata."""
    kind = str(value.get("type", "GENERATION")).upper()
    if kind != "GENERATION":
        context.leave_out(location, f"no call of a model (type {kind})")
        return
    if str(value.get("level")).upper() == "ERROR":
        context.leave_out(location, f"a call that failed ({shown(value.get('statusMessage'))})")
        return
    own = {
        "rollout": first_of(value, "traceId", "trace_id"),
        "reward": _score(value.get("scores"), location, context),
        "session": _session(value),
    }
    fields = {**own, **{name: item for name, item in labels.items() if item is not None}}
    fields["times"] = times_of(context, value) or labels.get("times")
    outer, inner = labels.get("metadata"), _json(value.get("metadata"))
    fields["metadata"] = {**(outer if isinstance(outer, dict) else {}), **(inner if isinstance(inner, dict) else {})}
    asked = _json(value.get("input"))
    tools = tools_of(asked) if isinstance(asked, dict) else None
    yield _call(location, _messages_in(asked), value.get("output"), tools, fields, context)


def _session(value: Record) -> object:
    """The session that a record or its metadata names."""
    metadata = _json(value.get("metadata"))
    return first_of({**(metadata if isinstance(metadata, dict) else {}), **value}, *SESSIONS)


def _messages_in(asked: object) -> object:
    """The messages that an input holds, or the input itself: a request of OpenAI's Responses, messages or text."""
    if not isinstance(asked, dict):
        return asked
    if "messages" in asked:
        return talk_of(asked)
    return asked if "instructions" in asked or "previous_response_id" in asked else asked.get("input", asked)


def langsmith_calls(records: Iterable[Placed], context: Context) -> Iterator[Placed]:
    """The runs of LangSmith that called a model; chains and tools are counted."""
    for record in records:
        value = record.value
        kind = str(value.get("run_type"))
        if kind != "llm":
            context.leave_out(record.location, f"no call of a model (run_type {kind})")
            continue
        if value.get("error"):
            context.leave_out(record.location, f"a call that failed ({shown(value['error'])})")
            continue
        inputs = _json(value.get("inputs"))
        extra = _json(value.get("extra"))
        invocation = extra.get("invocation_params") if isinstance(extra, dict) else None
        holders = [holder for holder in (inputs, invocation) if isinstance(holder, dict)]
        tools = next((found for holder in holders if (found := tools_of(holder))), None)
        stats = _json(value.get("feedback_stats"))
        scores = [
            {"name": name, "value": stat.get("avg")}
            for name, stat in (stats.items() if isinstance(stats, dict) else ())
            if isinstance(stat, dict)
        ]
        metadata = extra.get("metadata") if isinstance(extra, dict) else None
        labels = {
            "rollout": value.get("trace_id"),
            "reward": _score(scores, record.location, context),
            "session": _session({"metadata": metadata}),  # the record's own `session_id` is its project
            "times": times_of(context, value),
            "metadata": metadata,
        }
        yield _call(record.location, _messages_in(inputs), value.get("outputs"), tools, labels, context)


def openai_calls(records: Iterable[Placed], context: Context) -> Iterator[Placed]:
    """Records of requests and responses; those of a batch are joined, flat ones are taken apart."""
    for record in records:
        value = record.value
        if "custom_id" in value:
            yield from _batch_call(record, context)
        elif "request" not in value and ("response" in value or "choices" in value):
            request = {name: value[name] for name in REQUEST_KEYS if value.get(name) is not None}
            rest = {name: item for name, item in value.items() if name not in (*request, "response", "choices")}
            settings = _json(value.get("model_parameters"))  # where LiteLLM logs tools
            if not tools_of(request) and isinstance(settings, dict) and tools_of(settings):
                request["tools"] = tools_of(settings)
            answer = {"choices": value["choices"]} if "choices" in value else value.get("response")
            reply = _reply(answer, record.location, value.get("messages"))
            yield Placed(record.location, {**rest, "request": request, "response": reply})
        else:
            yield record


def _batch_call(record: Placed, context: Context) -> Iterator[Placed]:
    """A line of a batch's input or output file, as soon as its other half is known, in any order of the files."""
    value, name = record.value, str(record.value["custom_id"])
    half = "request" if "body" in value or "params" in value else "response"
    inner = value.get("result")  # Anthropic's
    result = inner if isinstance(inner, dict) else {}
    names = ("body", "params") if half == "request" else ("response", "message")
    body = first_of({**result, **value}, *names)
    if half == "response" and body is None:
        error = value.get("error") or result.get("error") or result.get("type")
        context.leave_out(record.location, f"a call without a reply ({shown(error)})" if error else "no response")
        body = {"choices": []}
    other = "response" if half == "request" else "request"
    key = f"{other} {name}"
    if key not in context.halves:
        if (twice := context.halves.get(f"{half} {name}")) is not None:
            raise DataError(
                f"{record.location}: a second batch {half} with custom_id {shown(name)}, after {twice[0]}; which reply "
                "belongs to it is not known. Import each batch with its own output."
            )
        context.halves[f"{half} {name}"] = (record.location, body)
        return
    location, known = context.halves.pop(key)
    both: Record = {half: body, other: known}
    labels: Record = {field: value[field] for field in ("group", "task_id", "reward") if field in value}
    if both["response"] != {"choices": []}:
        yield Placed(location if other == "request" else record.location, {**both, **labels, "rollout": name})


def _call(location: str, asked: object, output: object, tools: object, labels: Record, context: Context) -> Placed:
    """The record of a call, whose messages may be text, OpenAI's, LangChain's, or items of OpenAI's Responses."""
    messages: Any = asked
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], list):
        messages = messages[0]  # LangChain calls models with batches
    if isinstance(messages, dict) and "input" in messages:
        request = dict(messages)
    elif not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{location}: the input of a call must be messages or text, found {shown(asked)}.")
    elif _are_items(messages):
        request = {"input": messages}
    else:
        schemas = [message["content"] for message in messages if _is_schema(message)]
        talk = [message for message in messages if not _is_schema(message)]
        request = {"messages": _openai_messages(talk, location)}
        tools = tools or schemas
    if tools:
        request["tools"] = tools
    rest = {context.reward_field or "reward" if name == "reward" else name: item for name, item in labels.items()}
    value = {**rest, "request": request, "response": _reply(output, location, request.get("messages"))}
    return Placed(location, {name: item for name, item in value.items() if item is not None})


def _are_items(items: list[Record]) -> bool:
    """Whether a list is of items of OpenAI's Responses."""
    kinds = {str(item.get("type")) for item in items if item.keys().isdisjoint(("kwargs", "data"))}
    return not kinds.isdisjoint(RESPONSE_ITEMS)


def _is_schema(message: Record) -> bool:
    """Whether a message is a tool, as langfuse's handler of LangChain puts them behind the messages of a call."""
    return message.get("role") == "tool" and isinstance(message.get("content"), dict) and "tool_call_id" not in message


def _reply(output: Any, location: str, asked: object) -> Record:
    """A response of OpenAI's shape from a reply in any of these shapes; without choices where there is no reply.

    asked: the messages of the call.
    """
    output = _read_reply(output)
    if isinstance(output, str):
        return {"choices": [{"message": {"role": "assistant", "content": output}}]} if output else {"choices": []}
    if isinstance(output, list):
        return _reply_of_several(output, location, asked)
    if not isinstance(output, dict) or not output:
        return {"choices": []}
    if "choices" in output or "body" in output or output.get("object") == "response":
        return output
    generations = output.get("generations")
    if isinstance(generations, list) and generations:
        choices = generations[0] if isinstance(generations[0], list) else generations
        return {"choices": [_choice(each, output, location) for each in choices]}
    holder = output  # of why it ended
    if isinstance(output.get("message"), dict):
        output = output["message"]
    elif isinstance(output.get("messages"), list) and output["messages"]:
        found = _reply_of_several(output["messages"], location, asked)
        return {**found, "choices": [with_reason(choice, choice, holder) for choice in found["choices"]]}
    elif "output" in output and len(output) == 1:
        return _reply(output["output"], location, asked)
    message = _openai_message(output, location)
    return {"choices": [with_reason({"message": message}, message, output, holder)]}


def _reply_of_several(items: list[Any], location: str, asked: object) -> Record:
    """The response where an output is a list: messages of the model are choices (langfuse and OpenTelemetry write
    several so), blocks of content one message. A list that holds other messages is what an agent did and no reply,
    unless it repeats those of the call in front of one.
    """
    if not items or not all(isinstance(item, dict) for item in items):
        return {"choices": []}
    if _are_items(items):
        return {"object": "response", "output": items}
    named = [item for item in items if not item.keys().isdisjoint(("role", "kwargs", "data", "parts"))]
    kinds = {str(item.get("type")) for item in items if item not in named}
    if kinds and not named and kinds.isdisjoint((*LANGCHAIN_ROLES, "system", "tool", "function")):
        return {"choices": [{"message": {"role": "assistant", "content": items}}]}
    messages = [_openai_message(item, location) for item in items]
    before = len(asked) if isinstance(asked, list) and asked and messages[: len(asked)] == asked else 0
    new = messages[before:]
    if not new or any(message["role"] != "assistant" for message in new) or (before and len(new) > 1):
        return {"choices": [], "error": f"its output is {len(items)} messages, of which one alone is no reply"}
    choices = zip(new, items[before:], strict=True)
    return {"choices": [with_reason({"message": message}, message, item) for message, item in choices]}


def _read_reply(output: object) -> object:
    """A reply that was logged as JSON text; text that is JSON of another kind is what the model said."""
    value = _json(output)
    last = value[-1] if isinstance(value, list) and value else value
    is_reply = isinstance(last, dict) and not REPLY_KEYS.isdisjoint(last)
    return output if isinstance(output, str) and not is_reply else value


def _choice(generation: Record, holder: Record, location: str) -> Record:
    """One of LangChain's generations; `holder` has what holds for all of them."""
    given = generation.get("message") or {"role": "assistant", "content": generation.get("text")}
    message = _openai_message(given, location)
    return with_reason({"message": message}, message, given, generation, holder)


def _openai_messages(messages: list[Record], location: str) -> list[Record]:
    """Messages of OpenAI's shape; the results that one of OpenTelemetry holds are messages of their own."""
    found: list[Record] = []
    for message in messages:
        parts = message.get("parts")
        if not isinstance(parts, list) or "content" in message:
            found.append(_openai_message(message, location))
            continue
        results = [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_call_response"]
        found += [_result_of_part(part) for part in results]
        rest = [part for part in parts if part not in results]
        found += [_openai_message({**message, "parts": rest}, location)] if rest or not results else []
    return found


def _result_of_part(part: Record) -> Record:
    content = first_of(part, "response", "result", "content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    named = {"name": part.get("name"), "tool_call_id": part.get("id")}
    return {"role": "tool", "content": text, **{name: item for name, item in named.items() if item is not None}}


def _of_parts(message: Record, location: str) -> Record:
    """A message of OpenAI's shape from one of OpenTelemetry's conventions, whose `parts` are text, reasoning, calls."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls = []
    for part in message["parts"]:
        kind = part.get("type") if isinstance(part, dict) else None
        kind = "reasoning" if kind == "thinking" else kind
        if kind in texts and isinstance(part.get("content"), str):
            texts[kind].append(part["content"])
        elif kind == "tool_call":
            calls.append({"name": part.get("name"), "args": part.get("arguments") or {}, "id": part.get("id")})
        else:
            raise DataError(f"{location}: a part of a message is {shown(part)}; text, reasoning and calls are read.")
    found = {**message, "content": "".join(texts["text"])}
    del found["parts"]
    if texts["reasoning"]:
        found["reasoning_content"] = "".join(texts["reasoning"])
    return {**found, "tool_calls": calls} if calls else found


def _openai_message(message: Record, location: str) -> Record:
    """A message of OpenAI's shape, from that, from LangChain's (constructors; `type` with `data` or content), or from
    OpenTelemetry's.
    """
    kind = message.get("type")
    if isinstance(message.get("parts"), list) and "content" not in message:
        message = _of_parts(message, location)
    if "kwargs" in message and isinstance(message.get("id"), list):
        kind = str(message["id"][-1]).removesuffix("Chunk").removesuffix("Message").lower()
        message = {**message["kwargs"]}
    elif isinstance(message.get("data"), dict) and kind is not None:
        message = message["data"]
    if "role" not in message:
        if not isinstance(kind, str):
            raise DataError(f"{location}: a message without a role: {shown(message)}.")
        message = {**message, "role": LANGCHAIN_ROLES.get(kind, kind)}
    result = {name: item for name, item in message.items() if name not in ("type", "id", "additional_kwargs")}
    invalid = result.pop("invalid_tool_calls", None)  # LangChain's, whose arguments could not be read
    extra = message.get("additional_kwargs")
    extra = extra if isinstance(extra, dict) else {}
    if extra.get("tool_calls"):  # all of them as they were sampled, which LangChain has read as objects
        result["tool_calls"] = extra["tool_calls"]
    elif isinstance(invalid, list) and invalid:
        result["tool_calls"] = [*(result.get("tool_calls") or []), *invalid]
    for name in ("function_call", "reasoning_content"):
        if extra.get(name) and not result.get(name):
            result[name] = extra[name]
    if isinstance(result.get("tool_calls"), list):
        result["tool_calls"] = [_openai_tool_call(call) for call in result["tool_calls"]]
    return result


def _openai_tool_call(call: object) -> object:
    """LangChain's `{name, args, id}` in OpenAI's shape."""
    if not isinstance(call, dict) or "args" not in call or "function" in call:
        return call
    arguments = call["args"] if isinstance(call["args"], str) else json.dumps(call["args"], ensure_ascii=False)
    return {"id": call.get("id"), "type": "function", "function": {"name": call.get("name"), "arguments": arguments}}


def _score(scores: object, location: str, context: Context) -> float | None:
    """The reward among scores of `name` and `value`: the one that is named, or the only one."""
    values: dict[str, Any] = {}
    several: set[str] = set()
    for score in scores if isinstance(scores, list) else ():
        if not isinstance(score, dict) or not isinstance(score.get("value"), int | float):
            continue
        name = str(score.get("name"))
        if values.setdefault(name, score["value"]) != score["value"]:
            several.add(name)
    for name in several:
        context.warn(f"several values of the score {shown(name)} in one trace or call, none of which is its reward")
        del values[name]
    if not values:
        return None
    if context.reward_field is not None:
        if context.reward_field not in values:
            context.warn(f"traces or calls without the score {context.reward_field!r}")
            return None
        return context.reward(values, f"{location}: scores")
    if len(values) > 1:
        context.warn(f"{MANY_SCORES} ({', '.join(sorted(values))})")
        return None
    return context.reward(next(iter(values.values())), f"{location}: scores")


def _json(value: object) -> object:
    """JSON text as what it holds; any other text stays text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
