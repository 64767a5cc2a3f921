"""A recorded agent log: OpenAI chat requests with their responses, one call per line.

The shapes are those of the public OpenAI chat completions API (`messages`, `tools`; `choices[].message`), with what
vLLM adds under `return_token_ids` (`prompt_token_ids`, `choices[].token_ids`). A line is a `request` and a `response`,
each of them bare, under `body`, or as JSON text, with optional `rollout` (or `session_id`, `run_id`, `trace_id`),
`group` (or `task_id`) and `reward` beside them.

Calls of one run belong together: those with the same id, or where lines have none, a call whose messages continue an
earlier call and its reply. They form a tree by their message prefixes; each reply is trained once.

A log of requests alone works, too: the reply to a request is what later requests of its run show after its messages.
What nothing shows any more (the last reply of a run) cannot be trained.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from treewise.data.importers.call_records import langfuse_calls, langsmith_calls, openai_calls
from treewise.data.importers.common import (
    Context,
    integers,
    kept,
    messages,
    openai_tools,
    sampled_row,
    stream,
    talk_of,
    tools_of,
)
from treewise.data.importers.replies import Ids, ImportedCall, pooled, trainable, with_arguments
from treewise.data.io.endings import with_reason
from treewise.data.io.field_checks import shown, whole
from treewise.data.io.files import Placed, parse_text
from treewise.data.io.forms import Record
from treewise.data.io.replies import KEYS, REASONING_NAMES, UnusableError
from treewise.data.other_names import MEDIA
from treewise.errors import DataError

RUN_NAMES = ("rollout", "rollout_id", "session_id", "run_id", "trace_id")
GROUP_NAMES = ("group", "task_id")
# What belongs to a message when it is sent back; the rest of a reply (refusal, annotations, audio) is not.
CONTENT_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
MESSAGE_KEYS = (*CONTENT_KEYS, *REASONING_NAMES)
# Of a reply, and no part of what is sent back; of LangChain's messages, what describes them.
BESIDE = frozenset({"type", "id", "refusal", "annotations", "function_call", "parsed", "stop_sequence", "usage", *KEYS})
BESIDE |= {"response_metadata", "usage_metadata", "example", "status", "artifact", "model", "container"}
OF_PROMPTS = {"chat_template", "chat_template_kwargs", "continue_final_message", "documents"}  # vLLM's, and others'
AMBIGUOUS = "calls that continue several equal conversations; name runs with a rollout id per line"
ANTHROPIC = "a call of Anthropic's Messages interface"
RESPONSES = "a call of OpenAI's Responses interface"
CHAT = "log it as a chat completion (messages, choices), or write it as a chat record (docs/data.md)"
TOKEN_MARK = "token_id:"  # vLLM's return_tokens_as_token_ids


@dataclass(slots=True)
class _LoggedRun:
    name: str
    prompt: str  # key of the messages of its first call
    group: Any = None
    reward: float | None = None
    calls: list[ImportedCall] = field(default_factory=list)


@dataclass(slots=True)
class _Line:
    """A request and its replies. name, group: those that it gives."""

    location: str
    name: str | int | float | None
    group: str | int | float | None
    reward: float | None
    calls: list[ImportedCall]


def _read(
    records: Iterable[Placed], context: Context, *, calls_of: Callable[[Iterable[Placed], Context], Iterator[Placed]]
) -> Iterator[Record]:
    """Records of the runs, in the order in which they began.

    calls_of: makes of what was logged records that hold a request and a response each, or a request alone.
    """
    runs: dict[str, _LoggedRun] = {}
    ends, asked = _Standing(), _Standing()  # of calls with their replies, and of requests alone
    for line in _lines(records, calls_of, asked, context):
        name, calls = line.name, line.calls
        if name is None and calls:
            keys = list(_prefix_keys(calls[0].history))
            name, length = ends.run_at(keys, None, context)
            ends.open.pop((name, keys[length - 1] if length else ""), None)
        key = str(name or line.location)
        run = runs.setdefault(key, _LoggedRun(key, _key(calls[0].history) if calls else ""))
        for call in calls:
            run.prompt = run.prompt or _key(call.history)
            ends.add(_key([*call.history, call.reply]), run.name, call.location)
        run.calls += trainable(calls, context)
        _label(run, line, context)
    for location in asked.open.values():
        context.leave_out(location, "a request whose reply no later request shows")
    for run in runs.values():
        if run.calls:
            yield from _rows(run, context)


read_openai = partial(_read, calls_of=openai_calls)
read_langfuse = partial(_read, calls_of=langfuse_calls)
read_langsmith = partial(_read, calls_of=langsmith_calls)


def _lines(
    records: Iterable[Placed],
    calls_of: Callable[[Iterable[Placed], Context], Iterator[Placed]],
    asked: "_Standing",
    context: Context,
) -> "Iterator[_Line]":
    """What was logged, request by request; a reply that is not there, or of another interface, is counted."""

    def read(record: Placed) -> Iterator[_Line]:
        for call in calls_of([record], context):
            name, group, reward = _named(call.value, RUN_NAMES), _named(call.value, GROUP_NAMES), _reward(call, context)
            if call.value.get("response") is None:
                name, calls = _replies_shown(call, name, asked, context)
                yield _Line(call.location, name, group, reward, calls)
            elif calls := list(_calls(call, context)):
                yield _Line(call.location, name, group, reward, calls)

    for record in records:
        yield from kept(context, read(record), record)


def _rows(run: _LoggedRun, context: Context) -> Iterator[Record]:
    group = run.group
    if group is None:  # samples of one prompt are compared with one another
        group = "prompt " + run.prompt[-16:]
    shared = {"group": group, "rollout": run.name, "reward": run.reward}
    by_tools: dict[str, list[ImportedCall]] = {}
    for call in run.calls:
        if call.ids is None:
            by_tools.setdefault(json.dumps(call.tools, sort_keys=True), []).append(call)
            continue
        prompt, completion, logprobs = call.ids
        streams = {"sampler_logprobs": ("logprobs", logprobs)}
        talk = [*call.history, call.reply]
        yield from sampled_row(
            context, call.location, prompt, completion, None, streams, messages=talk, tools=call.tools, **shared
        )
    for calls in by_tools.values():
        yield pooled(calls, shared)


class _Standing:
    """Where conversations stand: the runs that have got to some messages, by the key of these.

    open: run and key, with the location, of what nothing has gone on from yet. known: replies that were shown already.
    """

    def __init__(self) -> None:
        self.runs: dict[str, list[str]] = {}
        self.open: dict[tuple[str | None, str], str] = {}
        self.known: set[tuple[str, str]] = set()

    def add(self, key: str, run: str, location: str) -> None:
        runs = self.runs.setdefault(key, [])
        if run not in runs:
            runs.append(run)
        self.open[run, key] = location

    def run_at(self, keys: list[str], name: str | None, context: Context) -> tuple[str | None, int]:
        """The run that has got furthest into a conversation, one that is open first, and how many messages far; name:
        the only one that may. None where the messages begin a run.
        """
        for length in range(len(keys), 0, -1):
            runs = [run for run in self.runs.get(keys[length - 1], ()) if name in (None, run)]
            if len(runs) > 1:
                context.warn(AMBIGUOUS)
            if runs:
                return next((run for run in runs if (run, keys[length - 1]) in self.open), runs[0]), length
        return None, 0


def _replies_shown(
    record: Placed, name: str | int | float | None, asked: _Standing, context: Context
) -> tuple[str, list[ImportedCall]]:
    """The run of a request alone, and the calls whose replies it shows: its assistant messages after the longest
    messages that the run has asked with. What the first request of a run holds was given to it.
    """
    location = record.location
    request = _body(record.value.get("request", record.value), f"{location}: request")
    if not isinstance(request, dict) or "messages" not in request:
        context.leave_out(location, _why_no_call(request, {}))
        return str(name or location), []
    history = _history(request, location, context)
    keys = list(_prefix_keys(history))
    found, start = asked.run_at(keys[:-1], None if name is None else str(name), context)
    run, tools = found or str(name or location), openai_tools(tools_of(request), location)
    calls = []
    for index in range(start if found else len(history), len(history)):
        asked.open.pop((run, keys[index - 1]), None)
        if history[index].get("role") == "assistant" and (run, keys[index]) not in asked.known:
            asked.known.add((run, keys[index]))
            calls.append(ImportedCall(location, history[:index], {"content": "", **history[index]}, tools))
    if keys:
        asked.add(keys[-1], run, location)
    return run, calls


def _history(request: Record, location: str, context: Context) -> list[Record]:
    """The messages that a request asks with."""
    for name in OF_PROMPTS & request.keys():
        if request[name]:
            context.warn(f"requests hold {shown(name)}, which decides their prompts and is not read from a log")
    return [_plain(message, location, context) for message in messages(talk_of(request), "messages", location)]


def _prefix_keys(history: list[Record]) -> Iterator[str]:
    """A key for every prefix of a conversation."""
    digest = hashlib.sha256()
    for message in history:
        same = {name: message[name] for name in CONTENT_KEYS if message.get(name)}
        parts = same.get("content")
        if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            same["content"] = "".join(str(part.get("text", "")) for part in parts)  # of one text, however it is written
        digest.update(json.dumps(same, sort_keys=True).encode() + b"\n")
        yield digest.hexdigest()


def _key(history: list[Record]) -> str:
    return ["", *_prefix_keys(history)][-1]


def _calls(record: Placed, context: Context) -> Iterator[ImportedCall]:
    """The calls of one line: one, or one per choice."""
    location = record.location
    request, response = (_body(record.value.get(name), f"{location}: {name}") for name in ("request", "response"))
    if not isinstance(request, dict) or not isinstance(response, dict):
        kind = type(response if isinstance(request, dict) else request).__name__
        raise DataError(
            f"{location}: request and response must be objects, found {kind}; log assembled replies, "
            "not streamed chunks."
        )
    if "messages" not in request:
        context.leave_out(location, _why_no_call(request, response))
        return
    choices = response.get("choices")
    if not choices:
        error = response.get("error")
        why = f" ({shown(error.get('message') if isinstance(error, dict) else error)})" if error else ""
        kinds = {RESPONSES: response.get("object") == "response", ANTHROPIC: response.get("type") == "message"}
        other = next((kind for kind, is_it in kinds.items() if is_it and not why), None)
        context.leave_out(location, f"{other}; {CHAT}" if other else f"a call without a reply{why}")
        return
    history = _history(request, location, context)
    tools = openai_tools(tools_of(request), location)
    rest = {name: item for name, item in response.items() if name != "choices"}
    for choice_index, choice in enumerate(messages(choices, "choices", location)):
        where = location if len(choices) == 1 else f"{location}: choices[{choice_index}]"
        if not isinstance(choice.get("message"), dict):
            raise DataError(f"{where}: a choice without a message; log assembled replies, not streamed chunks.")
        reply = {**_plain(choice["message"], where, context), "role": "assistant"}
        reply.setdefault("content", "")
        said = {key: record.value[key] for key in KEYS if key in record.value}
        ending = with_reason({}, choice, rest, said, _metadata(record.value))
        if choice["message"].get("refusal") and not choice["message"].get("content"):
            ending = {"finish_reason": "refusal"}
        yield ImportedCall(where, history, reply, tools, _tokens(response, choice, where), ending)


def _why_no_call(request: object, response: Record) -> str:
    if (isinstance(request, dict) and "input" in request) or response.get("object") == "response":
        return f"{RESPONSES}; {CHAT}"
    return "no chat call (its request has no messages)"


def _tokens(response: Record, choice: Record, location: str) -> Ids | None:
    """Token ids of the prompt and of the reply, where the server gave both, and the reply's log-probs."""
    prompt = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    entries = (choice.get("logprobs") or {}).get("content") or []
    own = choice.get("token_ids")
    if own is None and entries and all(str(entry.get("token", "")).startswith(TOKEN_MARK) for entry in entries):
        own = [int(entry["token"][len(TOKEN_MARK) :]) for entry in entries]
    if prompt is None or own is None:
        return None
    completion = integers(own, "token_ids", location)
    logprobs = None
    if entries:
        logprobs = stream([entry.get("logprob") for entry in entries], "logprobs", len(completion), location)
    return integers(prompt, "prompt_token_ids", location), completion, logprobs


def _reward(record: Placed, context: Context) -> float | None:
    name = context.reward_field or "reward"
    fields = {**(_metadata(record.value)), **record.value}
    return context.reward(fields.get(name), f"{record.location}: {name}")


def _label(run: _LoggedRun, line: _Line, context: Context) -> None:
    if line.group is not None:
        run.group = line.group
    if line.reward is None:
        return
    if run.reward is not None and line.reward != run.reward:
        context.warn("runs whose calls have different rewards: the last one counts for the whole run")
    run.reward = line.reward


def _named(value: Record, names: Iterable[str]) -> str | int | float | None:
    metadata = _metadata(value)
    for name in names:
        for holder in (value, metadata):
            found = holder.get(name)
            if isinstance(found, str | int | float) and not isinstance(found, bool) and found == found and found != "":
                return whole(found)
    return None


def _metadata(value: Record) -> Record:
    request = value.get("request")
    outer = request.get("metadata") if isinstance(request, dict) else None
    own = value.get("metadata")
    return {**(outer if isinstance(outer, dict) else {}), **(own if isinstance(own, dict) else {})}


def _body(value: object, location: str) -> object:
    for _ in range(3):
        if isinstance(value, str):
            value = parse_text(value, location)
        if isinstance(value, dict) and "body" in value and "messages" not in value and "choices" not in value:
            value = value["body"]
    return value


def _plain(message: Record, location: str, context: Context) -> Record:
    """What a message holds when it is sent; a refusal is what the model sees of a turn without content.

    Raises:
        UnusableError: images or sounds stand beside its content, which the model saw and nothing here reads.
    """
    plain = {name: message[name] for name in MESSAGE_KEYS if message.get(name) is not None}
    for name in message.keys() - plain.keys() - BESIDE:
        if message[name] and name in MEDIA:
            raise UnusableError(location, f"a message with {name} beside its content, which is not read")
        if message[name]:
            context.warn(f"messages hold {shown(name)}, which is not read")
    if message.get("refusal") and not plain.get("content"):
        plain["content"] = message["refusal"]
    if (old := message.get("function_call")) and not plain.get("tool_calls"):  # OpenAI's older name of one call
        plain["tool_calls"] = [{"type": "function", "function": old}]
    return with_arguments(plain, context)
