"""OpenPipe ART: trajectory logs, `.jsonl` (one group per line) or `.parquet` (one trajectory per row).

Read from the public sources of OpenPipe/ART (`src/art/utils/trajectory_logging.py`, `trajectory_migration.py`). What
the model sampled are the entries that are choices (`finish_reason`, `message`), or have `trainable` in Parquet; other
assistant messages are context. The logs hold no token ids: ART itself tokenises the messages.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from treewise.data.importers.common import Context, Placed, Record, messages, only_dicts, openai_tools, text_row
from treewise.data.io.record_forms import parse_text


def read(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """Chat records of trajectories, in order."""
    for record in records:
        if "trajectories" in record.value:
            for item_index, item in enumerate(
                only_dicts(record.value["trajectories"], "trajectories", record.location)
            ):
                yield from _trajectory(item, record.location, f"{record.location}: trajectories[{item_index}]", context)
        else:
            index = record.value.get("group_index")
            file = record.location.rpartition(":")[0]
            yield from _trajectory(
                record.value, None if index is None else f"{file}: group {index}", record.location, context
            )


def _trajectory(value: Record, group: str | None, location: str, context: Context) -> Iterator[Record]:
    metrics = value.get("metrics")
    if isinstance(metrics, str):
        metrics = parse_text(metrics, f"{location}: metrics")
    named = {**(metrics or {}), "reward": value.get("reward")} if context.reward_field else value.get("reward")
    shared = {"group": group, "rollout": location, "reward": context.reward(named, location)}
    more = _decoded(value.get("additional_histories"), f"{location}: additional_histories")
    for item_index, history in enumerate([value, *only_dicts(more or [], "additional_histories", location)]):
        where = location if not item_index else f"{location}: additional_histories[{item_index - 1}]"
        entries = history.get("messages_and_choices", history.get("messages"))
        talk = [_message(entry, where) for entry in messages(entries, "messages_and_choices", where)]
        if not any(each["role"] == "assistant" and each.get("weight", 1) for each in talk if "role" in each):
            context.leave_out(where, "no message that the model sampled")
            continue
        tools = openai_tools(_decoded(history.get("tools"), f"{where}: tools"), where)
        yield text_row(where, messages=talk, tools=tools, **shared)


def _message(entry: Record, location: str) -> Record:
    """A message as treewise reads it; assistant messages that were not sampled get weight 0."""
    if "message" in entry:
        return {"role": "assistant", **_plain(entry["message"], location)}
    is_sampled = bool(entry.get("trainable"))
    message = _plain({name: value for name, value in entry.items() if name != "trainable"}, location)
    if message.get("role") == "assistant" and not is_sampled:
        message["weight"] = 0
    return message


def _plain(message: Record, location: str) -> Record:
    cleaned = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _decoded(cleaned["tool_calls"], f"{location}: tool_calls")
    cleaned.setdefault("content", "")
    return cleaned


def _decoded(value: Any, location: str) -> Any:
    """Nested values are JSON text in Parquet."""
    return parse_text(value, location) if isinstance(value, str) else value
