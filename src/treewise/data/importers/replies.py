"""Replies that were logged as text: which of them can be trained, their tool calls, and one record of all calls."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from treewise.data.importers.common import Context, text_row
from treewise.data.io.endings import ending_of, is_known, why_unusable, with_reason
from treewise.data.io.field_checks import shown
from treewise.data.io.forms import Record
from treewise.data.io.replies import KEYS
from treewise.data.render.tools import arguments_of

Ids = tuple[list[int], list[int], list[float] | None]
BAD_ARGUMENTS = "a tool call whose arguments are no JSON object, so its sampled text is not known"


@dataclass(slots=True)
class ImportedCall:
    """A call of a model.

    ids: of the prompt and of the reply, with log-probs, where the server gave them; they are trained as they are.
    ending: why the reply ended, as records of calls say it (`finish_reason`).
    """

    location: str
    history: list[Record]
    reply: Record
    tools: list[Record] | None = None
    ids: Ids | None = None
    ending: Record = field(default_factory=dict)


def trainable(calls: Iterable[ImportedCall], context: Context) -> list[ImportedCall]:
    """The calls whose replies can be trained; the others are left out and counted."""
    kept = []
    for call in calls:
        reason = call.ending.get("finish_reason")
        why = why_unusable(call.reply, reason)
        if call.ids is not None:
            why = why if ending_of(reason) == "unusable" else None
        elif why is None and (has_bad_arguments(call.reply) or any(map(has_bad_arguments, call.history))):
            why = BAD_ARGUMENTS
        if why is None:
            note_unknown(reason, context)
            kept.append(call)
        else:
            context.leave_out(call.location, why)
    return kept


def trainable_talk(talk: Sequence[Record], location: str, context: Context) -> list[Record] | None:
    """A conversation in which every assistant message of weight above 0 is trained: without those that cannot be, which
    become context, and without all from a bad tool call on. None where nothing is left to train.
    """
    found: list[Record] = []
    trains = False
    for index, message in enumerate(talk):
        where = f"{location}: message {index}"
        if has_bad_arguments(message):
            context.leave_out(where, f"{BAD_ARGUMENTS}; with all that follows it")
            break
        if message.get("role") == "assistant" and message.get("weight", 1):
            reason = message.get("finish_reason")
            why = why_unusable(message, reason)
            if why is not None:
                context.leave_out(where, why)
                message = {**message, "weight": 0}
            else:
                note_unknown(reason, context)
                trains = True
        found.append(message)
    return found if trains else None


def text_pair(context: Context, location: str, value: Record, **labels: object) -> Iterator[Record]:
    """The row of a prompt and its completion, texts or messages, unless it cannot be trained for how it ended."""
    prompt, completion = value.get("prompt"), value.get("completion")
    ending = with_reason({}, {key: value[key] for key in KEYS if key in value})
    replies = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    talk = [with_arguments(with_reason(reply, reply), context) for reply in replies]
    if talk:
        talk[-1] = {**ending, **talk[-1]}
    found = trainable_talk(talk, location, context)
    if found is None:
        return
    if isinstance(completion, str):
        yield text_row(location, prompt=prompt, completion=completion, **ending, **labels)
    else:
        yield text_row(location, prompt=prompt, completion=found, **labels)


def note_unknown(reason: str | None, context: Context) -> None:
    """Warns of a reason that no table holds."""
    if reason is not None and not is_known(reason):
        context.warn(f"replies that ended with {shown(reason)}, which is not known, are trained without an end of turn")


def pooled(calls: Sequence[ImportedCall], shared: Record) -> Record:
    """One record of logged calls: each message once, each call as indices into them."""
    pool: dict[str, int] = {}
    talk: list[Record] = []

    def index(message: Record) -> int:
        key = json.dumps(message, sort_keys=True)
        if key not in pool:
            pool[key] = len(talk)
            talk.append(message)
        return pool[key]

    entries = [
        {"ctx": [index(message) for message in call.history], "out": index(call.reply), **call.ending} for call in calls
    ]
    return text_row(calls[0].location, messages=talk, calls=entries, tools=calls[0].tools, **shared)


def with_arguments(message: Record, context: Context) -> Record:
    """A message whose tool calls have arguments as they are read: blank text is none, Python's notation is JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_mended(call, context) for call in calls]}


def has_bad_arguments(message: Record) -> bool:
    """Whether a tool call has arguments that are neither an object nor the text of one."""
    calls = message.get("tool_calls") or [message.get("function_call")]
    for call in calls if isinstance(calls, list) else ():
        arguments = _function(call).get("arguments")
        is_object = isinstance(arguments, str) and _read(arguments) is not None
        if arguments is not None and not isinstance(arguments, dict) and not is_object:
            return True
    return False


def _mended(call: object, context: Context) -> object:
    arguments = _function(call).get("arguments")
    found = _read(arguments) if isinstance(arguments, str) else None
    if found is None or found[0] == arguments:
        return call
    written, notes = found
    for note in notes:
        context.warn(note)
    function = {**_function(call), "arguments": written}
    return {**call, "function": function} if isinstance(call, dict) and "function" in call else function


def _function(call: object) -> Record:
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


@lru_cache(maxsize=4096)
def _read(arguments: str) -> tuple[str, tuple[str, ...]] | None:
    """The text of arguments, and what was mended; None where they are no object."""
    counted: Counter[str] = Counter()
    try:
        return arguments_of(arguments, counted)[0], tuple(counted)
    except ValueError:
        return None
