"""One call of a chat model, in whatever record it was logged, as `{request, response, rollout, ...}` of `openai_log`.

Shapes are those of public interfaces: observations and traces of langfuse (`GET /api/public/observations`, `/traces`),
runs of LangSmith (`run_type: llm`; messages of OpenAI or of LangChain), the two files of OpenAI's batch interface
(https://platform.openai.com/docs/guides/batch), and flat records that hold messages beside the response.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from treewise.data.importers.common import Context, first_of
from treewise.data.io.endings import with_reason
from treewise.data.io.field_checks import shown
from treewise.data.io.files import Placed
from treewise.data.io.forms import Record
from treewise.errors import DataError

LANGCHAIN_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "chat": "user"}
REPLY_KEYS = {"role", "type", "kwargs", "message", "messages", "choices", "body", "generations", "output"}
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
        labels = {"rollout": trace.get("id"), "reward": _score(trace.get("scores"), record.location, context)}
        for index, observation in enumerate(
            sorted(observations, key=lambda item: str(first_of(item, "startTime", "start_time")))
        ):
            yield from _langfuse_call(f"{record.location}: observations[{index}]", observation, labels, context)


def _langfuse_call(location: str, value: Record, labels: Record, context: Context) -> Iterator[Placed]:
    kind = str(value.get("type", "GENERATION")).upper()
    if kind != "GENERATION":
        context.leave_out(location, f"no call of a model (type {kind})")
        return
    asked = _json(value.get("input"))
    tools = asked.get("tools") if isinstance(asked, dict) else None
    own = {"rollout": first_of(value, "traceId", "trace_id"), "reward": _score(value.get("scores"), location, context)}
    fields = {**own, **{name: item for name, item in labels.items() if item is not None}}
    messages = asked.get("messages", asked) if isinstance(asked, dict) else asked
    if str(value.get("level")).upper() == "ERROR":
        context.leave_out(location, f"a call that failed ({shown(value.get('statusMessage'))})")
        return
    yield _call(location, messages, value.get("output"), tools, value.get("metadata"), fields, context)


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
        tools = next((holder["tools"] for holder in holders if holder.get("tools")), None)
        messages = inputs.get("messages", inputs.get("input")) if isinstance(inputs, dict) else inputs
        stats = _json(value.get("feedback_stats"))
        scores = [
            {"name": name, "value": stat.get("avg")}
            for name, stat in (stats.items() if isinstance(stats, dict) else ())
            if isinstance(stat, dict)
        ]
        labels = {
            "rollout": first_of(value, "trace_id", "session_id"),
            "reward": _score(scores, record.location, context),
        }
        metadata = extra.get("metadata") if isinstance(extra, dict) else None
        yield _call(record.location, messages, value.get("outputs"), tools, metadata, labels, context)


def openai_calls(records: Iterable[Placed], context: Context) -> Iterator[Placed]:
    """Records of requests and responses; those of a batch are joined, flat ones are taken apart."""
    for record in records:
        value = record.value
        if "custom_id" in value:
            yield from _batch_call(record, context)
        elif "request" not in value and ("response" in value or "choices" in value):
            request = {name: value[name] for name in ("messages", "tools", "model") if value.get(name) is not None}
            rest = {name: item for name, item in value.items() if name not in (*request, "response", "choices")}
            answer = {"choices": value["choices"]} if "choices" in value else value.get("response")
            yield Placed(record.location, {**rest, "request": request, "response": _reply(answer, record.location)})
        else:
            yield record


def _batch_call(record: Placed, context: Context) -> Iterator[Placed]:
    """A line of a batch's input or output file, as soon as its other half is known, in any order of the files."""
    value, name = record.value, str(record.value["custom_id"])
    half = "request" if "body" in value else "response"
    body = value.get("body") if half == "request" else value.get("response")
    if half == "response" and body is None:
        error = value.get("error")
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


def _call(
    location: str, messages: object, output: object, tools: object, metadata: object, labels: Record, context: Context
) -> Placed:
    """The record of a call, whose messages may be text, OpenAI's or LangChain's."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], list):
        messages = messages[0]  # LangChain calls models with batches
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{location}: the input of a call must be messages or text, found {shown(messages)}.")
    request: Record = {"messages": [_openai_message(message, location) for message in messages]}
    if tools:
        request["tools"] = tools
    rest = {context.reward_field or "reward" if name == "reward" else name: item for name, item in labels.items()}
    value = {"request": request, "response": _reply(output, location), "metadata": _json(metadata), **rest}
    return Placed(location, {name: item for name, item in value.items() if item is not None})


def _reply(output: Any, location: str) -> Record:
    """A response of OpenAI's shape from a reply in any of these shapes; without choices where there is no reply."""
    output = _read_reply(output)
    if isinstance(output, str):
        return {"choices": [{"message": {"role": "assistant", "content": output}}]} if output else {"choices": []}
    if isinstance(output, list) and output:
        output = output[-1] if isinstance(output[-1], dict) else {}
    if not isinstance(output, dict) or not output:
        return {"choices": []}
    if "choices" in output or "body" in output:
        return output
    generations = output.get("generations")
    if isinstance(generations, list) and generations:
        choices = generations[0] if isinstance(generations[0], list) else generations
        return {"choices": [_choice(each, output, location) for each in choices]}
    holder = output  # of why it ended
    if isinstance(output.get("message"), dict):
        output = output["message"]
    elif isinstance(output.get("messages"), list) and output["messages"]:
        output = output["messages"][-1]
    elif "output" in output and len(output) == 1:
        return _reply(output["output"], location)
    message = _openai_message(output, location)
    return {"choices": [with_reason({"message": message}, message, output, holder)]}


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


def _openai_message(message: Record, location: str) -> Record:
    """A message of OpenAI's shape, from that or from LangChain's (constructors; `type` with `data` or content)."""
    kind = message.get("type")
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
    if isinstance(invalid, list) and invalid:
        result["tool_calls"] = [*(result.get("tool_calls") or []), *invalid]
    extra = message.get("additional_kwargs")
    if isinstance(extra, dict):
        for name in ("tool_calls", "function_call", "reasoning_content"):
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
    values = {
        str(score.get("name")): score.get("value")
        for score in (scores if isinstance(scores, list) else ())
        if isinstance(score, dict) and isinstance(score.get("value"), int | float)
    }
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
