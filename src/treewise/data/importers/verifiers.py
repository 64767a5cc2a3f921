"""verifiers: `traces.jsonl` (v1: message graphs) and `results.jsonl` (its earlier versions).

Read from the public sources of PrimeIntellect-ai/verifiers (`verifiers/v1/trace.py`, `graph.py`, `episode.py`;
`verifiers/legacy/types.py`). A v1 line is an episode with its traces, or one trace. A trace is a graph of messages,
each with the tokens that it adds; every root-to-leaf path is a row, and a sampled message that lies on several paths
(compaction, sub-agents) is trained on the first of them, as prime-rl does. All rows of a trace are one rollout.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from treewise.data.importers.common import (
    Context,
    Placed,
    Record,
    integers,
    messages,
    numbers,
    only_dicts,
    openai_tools,
    text_row,
    token_row,
)
from treewise.data.io.printable import shown
from treewise.errors import DataError

COMPACT = {"sampler_logprobs": "logprobs", "advantages": "advantages", "ref_logprobs": "reference_logprobs"}


def read(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """Rows of episodes, traces or results, in order."""
    for record in records:
        if "traces" in record.value:
            yield from _episode(record, context)
        elif "nodes" in record.value:
            yield from _trace(record.value, _task_name(record.value.get("task")), record.location, context)
        else:
            yield from _result(record, context)


# -- v1 ---------------------------------------------------------------------------------------------------------------


def _episode(record: Placed, context: Context) -> Iterator[Record]:
    episode, location = record.value, record.location
    traces = only_dicts(episode["traces"], "traces", location)
    if not traces:
        context.leave_out(location, f"an episode without a trace{_first_error(episode)}")
    group_record = episode.get("group")
    group = group_record.get("id") if isinstance(group_record, dict) else None
    agents = {_agent(trace).get("name") for trace in traces}
    for index, trace in enumerate(traces):
        name = group or _task_name(trace.get("task")) or _task_name(episode.get("task"))
        if name is not None and len(agents) > 1:  # agents of different roles are not compared with one another
            name = f"{name}:{_agent(trace).get('name')}"
        yield from _trace(trace, name, f"{location}: traces[{index}]", context)


def _trace(trace: Record, group: Any, location: str, context: Context) -> Iterator[Record]:
    if trace.get("ok") is False:
        context.leave_out(location, f"the trace did not complete{_first_error(trace)}")
        return
    if _agent(trace).get("trainable") is False:
        context.leave_out(location, f"agent {shown(_agent(trace).get('name'))} is not trained")
        return
    nodes = only_dicts(trace["nodes"], "nodes", location)
    shared = {"group": group, "rollout": trace.get("id"), "reward": _total(trace, location, context)}
    sampled = [node for node in nodes if node.get("sampled")]
    if not sampled:
        context.leave_out(location, "no sampled message")
    elif any(not node.get("token_ids") for node in sampled):
        yield _messages_alone(trace, nodes, shared, location)
    else:
        yield from _branches(nodes, shared, location, context)


def _branches(nodes: list[Record], shared: Record, location: str, context: Context) -> Iterator[Record]:
    parents = [node.get("parent") for node in nodes]
    for index, parent in enumerate(parents):
        if parent is not None and (not isinstance(parent, int) or not 0 <= parent < index):
            raise DataError(f"{location}: nodes[{index}] has parent {shown(parent)}; parents come first.")
    trained: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path = [leaf]
        while (parent := parents[path[-1]]) is not None:
            path.append(parent)
        path.reverse()
        new = [index for index in path if nodes[index].get("sampled") and index not in trained]
        where = f"{location}: nodes[{leaf}]"
        if not new:
            context.leave_out(where, "all sampled messages of this branch are trained on an earlier one")
            continue
        trained.update(new)
        yield from _branch([(nodes[n], n in new, f"{location}: nodes[{n}]") for n in path], shared, where, context)


def _branch(path: list[tuple[Record, bool, str]], shared: Record, location: str, context: Context) -> Iterator[Record]:
    ids: list[int] = []
    weights: list[float] = []
    streams: dict[str, list[float]] = {}
    for ours, theirs in COMPACT.items():
        if any(node.get(theirs) for node, _, _ in path):
            streams[ours] = []
    for node, is_new, where in path:
        own = integers(node.get("token_ids"), "token_ids", where)
        mask = numbers(node.get("mask") or [0] * len(own), "mask", len(own), where)
        named = node.get("loss_weights") or {}
        weight = numbers(named["rl"], "loss_weights.rl", len(own), where) if "rl" in named else mask
        ids += own
        weights += weight if is_new else [0.0] * len(own)
        for ours, stream in streams.items():
            stream += _spread(node.get(COMPACT[ours]), mask, COMPACT[ours], where)
    talk = [node["message"] for node, _, _ in path if "message" in node]
    yield from token_row(context, location, ids, weights, **streams, **shared, messages=talk or None)


def _spread(values: Any, mask: list[float], name: str, location: str) -> list[float]:
    """Values of the sampled tokens, put at their positions; zero elsewhere."""
    count = sum(1 for each in mask if each)
    if not values:
        return [0.0] * len(mask)
    compact = iter(numbers(values, name, count, location))
    return [next(compact) if each else 0.0 for each in mask]


def _messages_alone(trace: Record, nodes: list[Record], shared: Record, location: str) -> Record:
    """A trace whose model calls went through a server that gave no tokens: its calls as messages."""
    calls = []
    for index, node in enumerate(nodes):
        if not node.get("sampled"):
            continue
        context: list[int] = []
        above = node.get("parent")
        while above is not None:
            if not isinstance(above, int) or not 0 <= above < (context[-1] if context else index):
                raise DataError(f"{location}: nodes[{index}] has parent {shown(above)}; parents come first.")
            context.append(above)
            above = nodes[above].get("parent")
        calls.append({"ctx": context[::-1], "out": index})
    pool = messages([node.get("message") for node in nodes], "message", location)
    return text_row(location, messages=pool, calls=calls, tools=openai_tools(trace.get("tools"), location), **shared)


def _total(trace: Record, location: str, context: Context) -> float | None:
    """The weighted sum of a trace's rewards (`Trace.reward`), or the one that the user named."""
    rewards = {name: value for name, value in (trace.get("rewards") or {}).items() if value is not None}
    if not rewards:
        return None
    scores = {}
    for name, value in rewards.items():
        parts = value if isinstance(value, dict) else {"score": value}
        score = context.reward(parts.get("score"), f"{location}: rewards.{name}")
        weight = context.reward(parts.get("weight", 1.0), f"{location}: rewards.{name}.weight")
        scores[name] = (score or 0.0) * (1.0 if weight is None else weight)
    return context.reward(scores, location) if context.reward_field else sum(scores.values())


def _agent(trace: Record) -> Record:
    agent = trace.get("agent")
    return agent if isinstance(agent, dict) else {}


def _task_name(task: Any) -> str | None:
    if not isinstance(task, dict):
        return None
    data = task.get("data") if isinstance(task.get("data"), dict) else {}
    name = task.get("key") or task.get("hash") or (data or {}).get("idx")
    return None if name is None else str(name)


def _first_error(value: Record) -> str:
    errors = value.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    return f" ({first.get('type')}: {shown(first.get('message'))})" if first else ""


# -- earlier versions -------------------------------------------------------------------------------------------------


def _result(record: Placed, context: Context) -> Iterator[Record]:
    value, location = record.value, record.location
    if value.get("error"):
        context.leave_out(location, f"the rollout failed ({shown(value['error'])})")
        return
    shared = {
        "group": value.get("example_id"),
        "rollout": location,
        "reward": context.reward(_named(value, context), location),
    }
    steps = value.get("trajectory")
    if steps and all(isinstance(step, dict) and step.get("tokens") for step in steps):
        for index, step in enumerate(steps):
            yield from _step(step, shared, f"{location}: trajectory[{index}]", context)
        return
    prompt, completion = value.get("prompt"), value.get("completion")
    if isinstance(prompt, str) or isinstance(completion, str):
        yield text_row(location, prompt=prompt, completion=completion, **shared)
        return
    before = [
        {**each, "weight": 0} if each.get("role") == "assistant" else each
        for each in messages(prompt, "prompt", location)
    ]
    after = messages(completion, "completion", location)
    tools = openai_tools(value.get("tool_defs"), location)
    yield text_row(location, messages=[*before, *after], tools=tools, **shared)


def _named(value: Record, context: Context) -> Any:
    name = context.reward_field
    if name is None or name == "reward":
        return value.get("reward")
    return {**(value.get("metrics") or {}), **value}


def _step(step: Record, shared: Record, location: str, context: Context) -> Iterator[Record]:
    tokens = step["tokens"]
    prompt = integers(tokens.get("prompt_ids"), "prompt_ids", location)
    completion = integers(tokens.get("completion_ids"), "completion_ids", location)
    mask = numbers(tokens.get("completion_mask") or [1] * len(completion), "completion_mask", len(completion), location)
    logprobs = tokens.get("completion_logprobs")
    sampler = advantages = None
    if logprobs:
        values = numbers(logprobs, "completion_logprobs", len(completion), location)
        sampler = [0.0] * len(prompt) + values
    if step.get("advantage") is not None:
        advantages = context.reward(step["advantage"], f"{location}: advantage")
    talk = [*(step.get("prompt") or []), *(step.get("completion") or [])]
    yield from token_row(
        context,
        location,
        [*prompt, *completion],
        [*([0.0] * len(prompt)), *mask],
        sampler_logprobs=sampler,
        advantages=advantages,
        messages=talk if talk and all(isinstance(each, dict) for each in talk) else None,
        **shared,
    )
