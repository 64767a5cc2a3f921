"""Logged calls: a pool of messages, and for each call of the model which of them it saw and which it answered."""

import numpy as np

from treewise.data.io.endings import with_reason
from treewise.data.io.field_checks import flat_list
from treewise.data.io.files import Placed
from treewise.data.io.replies import KEYS
from treewise.data.io.rows import RecordResult
from treewise.data.records import Label, RecordReader, rollout_of
from treewise.data.render.chat import QUARANTINE, render_calls
from treewise.data.render.messages import WeightedMessages, clean_conversation, find_tools
from treewise.data.render.turns import Call
from treewise.errors import DataError


def read(reader: RecordReader, result: RecordResult, _form: str, item: Placed, group: Label) -> None:
    """Renders every trained call of a record."""
    record, location, rollout = item.value, item.location, rollout_of(item)
    reader.check_tokenizer(location)
    tools = find_tools(item)
    pool = reader.prepared(clean_conversation(record["messages"], location), item)
    if reader.options.thinking == "keep":
        raise DataError(f"{location}: thinking='keep' needs one conversation; logged calls are rendered as_inference.")
    calls = logged_calls(pool, record["calls"], reader.options.train_on, location)
    result.rows = render_calls(reader.template, calls, tools, location, reader.left_out)
    reader.label(result.rows, record, group, rollout, location)


def logged_calls(pool: WeightedMessages, calls: object, train_on: str, location: str) -> list[Call]:
    """A call for every entry of `calls`, whose indices point into the pool.

    Raises:
        DataError: an entry of another shape, an index outside the pool, an output that is no assistant message.
    """
    if not isinstance(calls, list) or not calls:
        raise DataError(f"{location}: calls must be a non-empty list of {{ctx: [indices], out: index}}.")
    result = []
    for number, call in enumerate(calls):
        where = f"{location}: calls[{number}]"
        if not isinstance(call, dict) or "ctx" not in call or "out" not in call:
            raise DataError(f"{where} needs ctx (indices of the context) and out (index of the completion).")
        context = [
            _pool_index(i, len(pool.messages), f"{where}.ctx") for i in list(flat_list(call["ctx"], "ctx", where))
        ]
        out = _pool_index(call["out"], len(pool.messages), f"{where}.out")
        turn = with_reason(pool.messages[out], {key: call[key] for key in KEYS if key in call})
        if not context:
            raise DataError(f"{where} has an empty ctx; a completion needs something before it.")
        if pool.messages[out]["role"] != "assistant":
            raise DataError(
                f"{where}: out is message {out}, of role {pool.messages[out]['role']}; it must be assistant."
            )
        history = [pool.messages[i] for i in context]
        result.append(Call(history, turn, pool.weights[out], f"{where} (message {out})"))
    trained = [call for call in (result[-1:] if train_on == "last_assistant" else result) if call.weight > 0]
    if not trained:
        raise DataError(
            f"{location}: all {len(result)} calls have weight 0, so no token is trained; drop the record{QUARANTINE}."
        )
    return trained


def _pool_index(value: object, size: int, location: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < size:
        raise DataError(f"{location} holds {value!r}; indices must be in 0..{size - 1}.")
    return int(value)
