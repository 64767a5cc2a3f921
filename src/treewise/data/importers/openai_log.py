"""A recorded agent log: chat requests with their responses, one call per line.

The shapes are those of the public OpenAI chat completions API (`messages`, `tools`; `choices[].message`), with what
vLLM adds under `return_token_ids` (`prompt_token_ids`, `choices[].token_ids`), and of what `interfaces` reads. A line
is a `request` and a `response`, each of them bare, under `body`, or as JSON text, with optional `rollout` (or
`session_id`, `run_id`, `trace_id`), `group` (or `task_id`), `reward` and a time beside them.

Calls of one run belong together: those with the same id, or where lines have none, a call whose messages continue an
earlier call and its reply (`runs`). They form a tree by their message prefixes; each reply is trained once.

A log of requests alone works, too: the reply to a request is what later requests of its run show after its messages.
What nothing shows any more (the last reply of a run) cannot be trained.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from treewise.data.importers.common import Context, integers, messages, openai_tools, stream, tools_of
from treewise.data.importers.interfaces import Responses, asked_messages, choices_of, is_of_responses, one_message
from treewise.data.importers.replies import Ids, ImportedCall, with_arguments
from treewise.data.importers.times import times_of
from treewise.data.io.endings import with_reason
from treewise.data.io.field_checks import shown, whole
from treewise.data.io.files import Placed, parse_text
from treewise.data.io.forms import Record
from treewise.data.io.replies import KEYS, REASONING_NAMES, UnusableError
from treewise.data.other_names import MEDIA
from treewise.data.render.canonical import canonical, canonical_all, chain, content_text, following
from treewise.errors import DataError

RUN_NAMES = (
    *("rollout", "rollout_id", "rolloutId", "session_id", "sessionId", "litellm_session_id"),
    *("run_id", "runId", "trace_id", "traceId"),
)
GROUP_NAMES = ("group", "task_id")
# What belongs to a message when it is sent back; the rest of a reply (refusal, annotations, audio) is not.
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING_NAMES)
# Of a reply, and no part of what is sent back; of LangChain's messages, what describes them.
BESIDE = frozenset({"type", "id", "refusal", "annotations", "function_call", "parsed", "stop_sequence", "usage", *KEYS})
BESIDE |= {"response_metadata", "usage_metadata", "example", "status", "artifact", "model", "container"}
OF_PROMPTS = {"chat_template", "chat_template_kwargs", "continue_final_message", "documents"}  # vLLM's, and others'
TOKEN_MARK = "token_id:"  # vLLM's return_tokens_as_token_ids
BEGUN = "a reply that goes on from a turn which its request began, with reasoning or tool calls"


@dataclass(slots=True)
class LoggedCall:
    """A request and its replies: one line of a log.

    Parameters:
        history: the messages that it asks with; keys: a name of none of them, of the first, of the first two, and so
            on (`canonical.chain`).
        name, session, group, reward, id: those that it gives, id that of the response.
        times: when it was made, by the names of `times.CLOCKS`.
        replies: of a request alone there are none; ends: for each, the name of the messages that it ends.
    """

    location: str
    file: Path | None
    history: list[Record]
    tools: list[Record] | None
    keys: list[str]
    name: str | None
    session: str | None
    group: str | int | float | None
    reward: float | None
    id: str | None
    times: dict[str, int]
    previous: str | None = None  # the id of a response that it goes on from
    is_alone: bool = False
    replies: list[ImportedCall] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    @property
    def facts(self) -> tuple[object, ...]:
        """Equal for calls that are the same, logged twice: tools, messages, and what was answered."""
        thoughts = [[reply.reply.get(name) for name in REASONING_NAMES] for reply in self.replies]
        return (self.keys[-1], repr((self.tools, thoughts)), *(canonical(reply.reply) for reply in self.replies))


def with_bodies(call: Placed) -> Placed:
    """A call with its request and its response as objects; a request alone has no response."""
    location, value = call.location, call.value
    is_alone = value.get("response") is None
    request = _body(value.get("request", value if is_alone else None), f"{location}: request")
    response = {} if is_alone else _body(value.get("response"), f"{location}: response")
    if not isinstance(request, dict) or not isinstance(response, dict):
        kind = type(response if isinstance(request, dict) else request).__name__
        raise DataError(
            f"{location}: request and response must be objects, found {kind}; log assembled replies, "
            "not streamed chunks."
        )
    return Placed(location, {**value, "request": request, "response": None if is_alone else response}, call.file)


def logged_call(call: Placed, responses: Responses, context: Context) -> Iterator[LoggedCall]:
    """A call with its replies; nothing where it has none, or is none of a chat, which is counted.

    call: of `with_bodies`.
    """
    location, value = call.location, call.value
    request, is_alone = value["request"], value["response"] is None
    response = value["response"] or {}
    if "messages" not in request and not is_of_responses(request, response):
        context.leave_out(location, "no chat call (its request has no messages)")
        return
    history = _history(request, responses, location, context)
    prefill = _begun_turn(history, response)
    history = history[:-1] if prefill else history
    keys = chain("", canonical_all(history, with_reasoning=False, with_margins=False))
    own, previous = response.get("id"), request.get("previous_response_id")
    found = LoggedCall(
        location,
        call.file,
        history,
        openai_tools(tools_of(request), location, context),
        keys,
        _text_or_none(_named(value, RUN_NAMES)),
        _text_or_none(_named({"session": value.get("session")}, ("session",))),
        _named(value, GROUP_NAMES),
        _reward(call, context),
        own if isinstance(own, str) else None,
        value.get("times") or times_of(context, value, metadata_of(value), response),
        previous if isinstance(previous, str) else None,
        is_alone,
    )
    if not is_alone:
        _take_replies(found, response, responses, value, prefill, context)
    if is_alone or found.replies:
        yield found


def _take_replies(
    found: LoggedCall, response: Record, responses: Responses, value: Record, prefill: str, context: Context
) -> None:
    location = found.location
    choices = list(choices_of(response, responses, location, context))
    if not choices:
        error = response.get("error")
        why = f" ({shown(error.get('message') if isinstance(error, dict) else error)})" if error else ""
        context.leave_out(location, f"a call without a reply{why}")
        return
    rest = {name: item for name, item in response.items() if name != "choices"}
    said = {key: value[key] for key in KEYS if key in value}
    for index, turns in enumerate(choices):
        where = location if len(choices) == 1 else f"{location}: choices[{index}]"
        history, key = found.history, found.keys[-1]
        for number, choice in enumerate(messages(turns, "choices", location)):
            is_last = number == len(turns) - 1
            ending = with_reason({}, choice, rest, said, metadata_of(value)) if is_last else {}
            reply = _reply(choice, prefill, where, context)
            if choice["message"].get("refusal") and not choice["message"].get("content"):
                ending = {"finish_reason": "refusal"}
            ids = _tokens(response, choice, where) if len(turns) == 1 else None
            found.replies.append(ImportedCall(where, history, reply, found.tools, ids, ending))
            key = following(key, canonical(reply, with_reasoning=False, with_margins=False))
            found.ends.append(key)
            history = [*history, reply]


def _reply(choice: Record, prefill: str, location: str, context: Context) -> Record:
    if not isinstance(choice.get("message"), dict):
        raise DataError(f"{location}: a choice without a message; log assembled replies, not streamed chunks.")
    reply = _plain(one_message({**choice["message"], "role": "assistant"}, location, context), location, context)
    reply.setdefault("content", "")
    if not prefill:
        return reply
    if reply.get("tool_calls") or any(reply.get(name) for name in REASONING_NAMES):
        raise UnusableError(location, BEGUN)
    text = content_text(reply["content"])
    detail = [{"begin_offset": len(prefill), "end_offset": len(prefill + text) - 1, "train": True}] if text else []
    return {**reply, "content": prefill + text, "train_detail": detail}


def _begun_turn(history: list[Record], response: Record) -> str:
    """What a request of Anthropic's wrote of the turn that its reply goes on from."""
    last = history[-1] if history and response.get("type") == "message" else {}
    is_text = last.get("role") == "assistant" and not last.get("tool_calls")
    return content_text(last.get("content")) if is_text else ""


def _history(request: Record, responses: Responses, location: str, context: Context) -> list[Record]:
    """The messages that a request asks with."""
    for name in OF_PROMPTS & request.keys():
        if request[name]:
            context.warn(f"requests hold {shown(name)}, which decides their prompts and is not read from a log")
    asked = asked_messages(request, responses, location, context)
    found = [_plain(message, location, context) for message in messages(asked, "messages", location)]
    for message in found:
        if not isinstance(message.get("role"), str):
            raise DataError(f"{location}: a message without a role: {shown(message)}.")
    return found


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
    fields = {**(metadata_of(record.value)), **record.value}
    return context.reward(fields.get(name), f"{record.location}: {name}")


def _text_or_none(name: object) -> str | None:
    return None if name is None else str(name)


def _named(value: Record, names: Iterable[str]) -> str | int | float | None:
    metadata = metadata_of(value)
    inner = metadata.get("requester_metadata")  # LiteLLM's, what a client sent
    for name in names:
        for holder in (value, metadata, inner if isinstance(inner, dict) else {}):
            found = holder.get(name)
            if isinstance(found, str | int | float) and not isinstance(found, bool) and found == found and found != "":
                return whole(found)
    return None


def metadata_of(value: Record) -> Record:
    """The metadata of a call, and those that its request had."""
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
