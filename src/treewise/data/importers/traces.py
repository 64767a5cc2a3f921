"""Traces of agents: verifiers' message graphs and results, and OpenPipe ART's logs of trajectories.

Read from the public sources of PrimeIntellect-ai/verifiers (`verifiers/v1/trace.py`, `graph.py`, `episode.py`;
`verifiers/legacy/types.py`) and OpenPipe/ART (`src/art/utils/trajectory_logging.py`, `trajectory_migration.py`).
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from treewise.data.importers.common import (
    Context,
    integers,
    kept,
    messages,
    numbers,
    objects,
    openai_tools,
    sampled_row,
    stream,
    text_row,
    token_row,
)
from treewise.data.importers.replies import ImportedCall, pooled, text_pair, trainable, trainable_talk, with_arguments
from treewise.data.io.endings import with_reason
from treewise.data.io.field_checks import shown
from treewise.data.io.files import Placed, parse_text
from treewise.data.io.forms import Record
from treewise.data.io.replies import KEYS
from treewise.errors import DataError

COMPACT = {"sampler_logprobs": "logprobs", "advantages": "advantages", "ref_logprobs": "reference_logprobs"}


# -- verifiers v1: traces.jsonl ---------------------------------------------------------------------------------------


def read_verifiers(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """`traces.jsonl` (v1: message graphs) and `results.jsonl` (its earlier versions).

    A v1 line is an episode with its traces, or one trace. A trace is a graph of messages, each with the tokens that it
    adds; every root-to-leaf path is a row, and a sampled message that lies on several paths (compaction, sub-agents) is
    trained on the first of them, as prime-rl does. All rows of a trace are one rollout.
    """
    for record in records:
        if "traces" in record.value:
            episode, location = record.value, record.location
            traces = objects(episode["traces"], "traces", location)
            if not traces:
                context.leave_out(location, f"an episode without a trace{_first_error(episode)}")
            group = _dict(episode.get("group")).get("id")
            agents = {_dict(trace.get("agent")).get("name") for trace in traces}
            for index, trace in enumerate(traces):
                name = group or _task_name(trace.get("task")) or _task_name(episode.get("task"))
                if name is not None and len(agents) > 1:  # agents of different roles are not compared with one another
                    name = f"{name}:{_dict(trace.get('agent')).get('name')}"
                yield from kept(context, _trace(trace, name, f"{location}: traces[{index}]", context))
        elif "nodes" in record.value:
            name = _task_name(record.value.get("task"))
            yield from kept(context, _trace(record.value, name, record.location, context))
        else:
            yield from kept(context, _result(record.value, record.location, context))


def _trace(trace: Record, group: object, location: str, context: Context) -> Iterator[Record]:
    agent = _dict(trace.get("agent"))
    if trace.get("ok") is False:
        context.leave_out(location, f"the trace did not complete{_first_error(trace)}")
        return
    if agent.get("trainable") is False:
        context.leave_out(location, f"agent {shown(agent.get('name'))} is not trained")
        return
    nodes = objects(trace["nodes"], "nodes", location)
    if trace.get("id") is not None and context.is_known(repr((trace["id"], nodes))):
        context.leave_out(location, "a trace that is logged twice: one before it has its id and its nodes")
        return
    shared = {"group": group, "rollout": trace.get("id"), "reward": _total(trace, location, context)}
    sampled = [index for index, node in enumerate(nodes) if node.get("sampled")]
    if not sampled:
        context.leave_out(location, "no sampled message")
        return
    for index, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and (not isinstance(parent, int) or not 0 <= parent < index):
            raise DataError(f"{location}: nodes[{index}] has parent {shown(parent)}; parents come first.")
    if all(nodes[index].get("token_ids") for index in sampled):
        yield from _branches(nodes, shared, location, context)
    else:  # the model calls went through a server that gave no tokens
        pool = messages([node.get("message") for node in nodes], "message", location)
        pool = [with_arguments(message, context) for message in pool]
        tools = openai_tools(trace.get("tools"), location, context)
        last = {"is_truncated": trace.get("is_truncated")}  # of the whole rollout
        logged = {call.get("node"): call for call in objects(trace.get("calls") or [], "calls", location)}
        calls = [
            ImportedCall(
                f"{location}: nodes[{index}]",
                [pool[above] for above in _path(nodes, index)[:-1]],
                pool[index],
                tools,
                ending=with_reason(
                    {}, nodes[index], pool[index], logged.get(index, {}), last if index == sampled[-1] else {}
                ),
            )
            for index in sampled
        ]
        calls = trainable(calls, context)
        if calls:
            yield {**pooled(calls, shared), "source": location}


def _path(nodes: list[Record], index: int | None) -> list[int]:
    """The nodes from the root to a node."""
    path = []
    while index is not None:
        path.append(index)
        index = nodes[index].get("parent")
    return path[::-1]


def _branches(nodes: list[Record], shared: Record, location: str, context: Context) -> Iterator[Record]:
    trained: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - {node.get("parent") for node in nodes}):
        indices = _path(nodes, leaf)
        new = {index for index in indices if nodes[index].get("sampled") and index not in trained}
        where = f"{location}: nodes[{leaf}]"
        if not new:
            context.leave_out(where, "all sampled messages of this branch are trained on an earlier one")
            continue
        trained |= new
        path = [nodes[index] for index in indices]
        ids: list[int] = []
        weights: list[float] = []
        names = {ours: theirs for ours, theirs in COMPACT.items() if any(node.get(theirs) for node in path)}
        streams: dict[str, list[float]] = {ours: [] for ours in names}
        for index, node in zip(indices, path, strict=True):
            place = f"{location}: nodes[{index}]"
            own = integers(node.get("token_ids"), "token_ids", place)
            mask = numbers(node.get("mask") or [0] * len(own), "mask", len(own), place)
            named = node.get("loss_weights") or {}
            weight = numbers(named["rl"], "loss_weights.rl", len(own), place) if "rl" in named else mask
            ids += own
            weights += weight if index in new else [0.0] * len(own)
            for ours, theirs in names.items():
                streams[ours] += _spread(node.get(theirs), mask, theirs, place)
        talk = [node["message"] for node in path if "message" in node]
        yield from token_row(context, where, ids, weights, **streams, **shared, messages=talk or None)


def _spread(values: object, mask: list[float], name: str, location: str) -> list[float]:
    """Values of the sampled tokens, put at their positions; NaN where there is none."""
    if not values:
        return [math.nan] * len(mask)
    compact = iter(stream(values, name, sum(map(bool, mask)), location))
    return [next(compact) if each else math.nan for each in mask]


def _total(trace: Record, location: str, context: Context) -> float | None:
    """The weighted sum of a trace's rewards (`Trace.reward`), or the one that the user named."""
    scores: dict[str, float | None] = {}
    for name, value in (trace.get("rewards") or {}).items():
        parts = value if isinstance(value, dict) else {"score": value}
        score = context.reward(parts.get("score"), f"{location}: rewards.{name}")
        weight = context.reward(parts.get("weight", 1.0), f"{location}: rewards.{name}.weight")
        scores[name] = None if score is None else score * (1.0 if weight is None else weight)
    if not scores:
        return None
    if context.reward_field:
        return context.reward(scores, location)
    known = [score for score in scores.values() if score is not None]
    if len(known) < len(scores):
        context.warn("traces of which a reward is null: the sum is not known, so they have none")
        return None
    return sum(known)


def _dict(value: object) -> Record:
    return value if isinstance(value, dict) else {}


def _task_name(task: object) -> str | None:
    task = _dict(task)
    name = task.get("key") or task.get("hash") or _dict(task.get("data")).get("idx")
    return None if name is None else str(name)


def _first_error(value: Record) -> str:
    errors = value.get("errors")
    first = _dict(errors[0]) if isinstance(errors, list) and errors else {}
    return f" ({first.get('type')}: {shown(first.get('message'))})" if first else ""


# -- verifiers' earlier versions: results.jsonl -----------------------------------------------------------------------


def _result(value: Record, location: str, context: Context) -> Iterator[Record]:
    if value.get("error"):
        context.leave_out(location, f"the rollout failed ({shown(value['error'])})")
        return
    named = value.get("reward")
    if context.reward_field not in (None, "reward"):
        named = {**(value.get("metrics") or {}), **value}
    shared = {"group": value.get("example_id"), "rollout": location, "reward": context.reward(named, location)}
    steps = value.get("trajectory")
    if steps and all(isinstance(step, dict) and step.get("tokens") for step in steps):
        for index, step in enumerate(steps):
            yield from _step(step, shared, f"{location}: trajectory[{index}]", context)
        return
    prompt, completion = value.get("prompt"), value.get("completion")
    if isinstance(prompt, str) or isinstance(completion, str):
        yield from text_pair(context, location, value, **shared)
        return
    before = [
        {**message, "weight": 0} if message.get("role") == "assistant" else message
        for message in messages(prompt, "prompt", location)
    ]
    after = [with_reason(message, message) for message in messages(completion, "completion", location)]
    if after and after[-1].get("role") == "assistant":
        after[-1] = with_reason(after[-1], after[-1], {key: value[key] for key in KEYS if key in value})
    tools = openai_tools(value.get("tool_defs"), location, context)
    talk = trainable_talk([with_arguments(message, context) for message in (*before, *after)], location, context)
    if talk is not None:
        yield text_row(location, messages=talk, tools=tools, **shared)


def _step(step: Record, shared: Record, location: str, context: Context) -> Iterator[Record]:
    tokens = step["tokens"]
    prompt = integers(tokens.get("prompt_ids"), "prompt_ids", location)
    completion = integers(tokens.get("completion_ids"), "completion_ids", location)
    talk = [*(step.get("prompt") or []), *(step.get("completion") or [])]
    yield from sampled_row(
        context,
        location,
        prompt,
        completion,
        tokens.get("completion_mask") or None,
        {"sampler_logprobs": ("completion_logprobs", tokens.get("completion_logprobs") or None)},
        advantages=context.reward(step.get("advantage"), f"{location}: advantage"),
        messages=talk if talk and all(isinstance(message, dict) for message in talk) else None,
        **shared,
    )


# -- ART --------------------------------------------------------------------------------------------------------------


def read_art(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """Trajectory logs, `.jsonl` (one group per line) or `.parquet` (one trajectory per row).

    What the model sampled are the entries that are choices (`finish_reason`, `message`), or have `trainable` in
    Parquet; other assistant messages are context. The logs hold no token ids: ART itself tokenises the messages.
    """
    for record in records:
        value, location = record.value, record.location
        if "trajectories" in value:
            for index, item in enumerate(objects(value["trajectories"], "trajectories", location)):
                yield from _art_trajectory(item, location, f"{location}: trajectories[{index}]", context)
            continue
        number = value.get("group_index")
        group = None if number is None else f"{location.rpartition(':')[0]}: group {number}"
        yield from _art_trajectory(value, group, location, context)


def _art_trajectory(value: Record, group: str | None, location: str, context: Context) -> Iterator[Record]:
    metrics = _decoded(value.get("metrics"), f"{location}: metrics")
    named = {**(metrics or {}), "reward": value.get("reward")} if context.reward_field else value.get("reward")
    shared = {"group": group, "rollout": location, "reward": context.reward(named, location)}
    more = _decoded(value.get("additional_histories"), f"{location}: additional_histories")
    for index, history in enumerate([value, *objects(more or [], "additional_histories", location)]):
        where = location if not index else f"{location}: additional_histories[{index - 1}]"
        entries = history.get("messages_and_choices", history.get("messages"))
        talk = [_art_message(entry, where, context) for entry in messages(entries, "messages_and_choices", where)]
        if not any(
            message["role"] == "assistant" and message.get("weight", 1) for message in talk if "role" in message
        ):
            context.leave_out(where, "no message that the model sampled")
            continue
        tools = openai_tools(_decoded(history.get("tools"), f"{where}: tools"), where, context)
        found = trainable_talk(talk, where, context)
        if found is not None:
            yield text_row(where, messages=found, tools=tools, **shared)


def _art_message(entry: Record, location: str, context: Context) -> Record:
    """A message as treewise reads it; assistant messages that were not sampled get weight 0."""
    is_choice = "message" in entry
    message = entry["message"] if is_choice else {name: value for name, value in entry.items() if name != "trainable"}
    cleaned = {name: value for name, value in message.items() if value is not None}
    if is_choice:
        cleaned = {"role": "assistant", **cleaned}
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _decoded(cleaned["tool_calls"], f"{location}: tool_calls")
    cleaned.setdefault("content", "")
    if cleaned.get("role") == "assistant" and not is_choice and not entry.get("trainable"):
        cleaned["weight"] = 0
    return with_arguments(with_reason(cleaned, {key: entry[key] for key in KEYS if key in entry}), context)


def _decoded(value: object, location: str) -> Any:
    """Nested values are JSON text in Parquet."""
    return parse_text(value, location) if isinstance(value, str) else value
