"""The calls of a log as the runs that made them: which calls are of one run, in which order, and each of them once."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from treewise.data.importers.common import MISSHAPEN, Context, kept, misshapen, sampled_row
from treewise.data.importers.interfaces import Responses
from treewise.data.importers.openai_log import LoggedCall, logged_call, with_bodies
from treewise.data.importers.replies import ImportedCall, pooled, trainable
from treewise.data.importers.times import common_clock, log_order
from treewise.data.io.files import Placed
from treewise.data.io.forms import Record
from treewise.errors import DataError

AMBIGUOUS = "calls that continue several equal conversations; name runs with a rollout id per line"
TWICE = "a call that is logged twice: its run has one of equal messages, tools and reply"
ONE_CALL = "sessions of which each trace holds one call are read as runs, their traces are not"
NO_CLOCK = "runs of which only some calls have a time: their calls are in the order of the log"
REWARDS = "runs whose calls have different rewards: the last one counts for the whole run"
NOT_SHOWN = "a request whose reply no later request shows"
T = TypeVar("T")


@dataclass(slots=True)
class _Run:
    """Calls of one run, in the order in which they were made. prompt: the name of the messages of the first."""

    name: str
    first: LoggedCall
    group: str | int | float | None = None
    reward: float | None = None
    calls: list[LoggedCall] = field(default_factory=list)
    known: dict[tuple[object, ...], list[int]] = field(default_factory=dict)  # by facts: which of the calls

    def label(self, call: LoggedCall, context: Context) -> None:
        """Takes what a call says of its run."""
        self.group = call.group if self.group is None else self.group
        if call.reward is None:
            return
        if self.reward is not None and call.reward != self.reward:
            context.warn(REWARDS)
        self.reward = call.reward

    def add(self, call: LoggedCall, context: Context) -> None:
        """Takes a call, unless the run has it already."""
        same = self.known.setdefault(call.facts, [])
        found = next((index for index in same if _may_be_one(self.calls[index], call)), None)
        if found is None:
            same.append(len(self.calls))
            self.calls.append(call)
            return
        context.leave_out(call.location, TWICE)
        if _says(call) > _says(self.calls[found]):
            self.calls[found] = call


def _may_be_one(one: LoggedCall, other: LoggedCall) -> bool:
    """Whether two calls of equal facts may be the same: where a server gave them ids, these are equal."""
    if one.id is not None and other.id is not None and one.id != other.id:
        return False
    pairs = zip(one.replies, other.replies, strict=True)
    return not any(a.ids is not None and b.ids is not None and a.ids[:2] != b.ids[:2] for a, b in pairs)


def _says(call: LoggedCall) -> tuple[int, int]:
    """How much a log holds of a call beside its text."""
    return sum(reply.ids is not None for reply in call.replies), sum(bool(reply.ending) for reply in call.replies)


class CallLog:
    """A log of calls, in one file or in several: `take` reads records, `rows` makes rows of the runs in them.

    calls_of: makes of what was logged records that hold a request and a response each, or a request alone.
    """

    def __init__(self, calls_of: Callable[[Iterable[Placed], Context], Iterator[Placed]], context: Context) -> None:
        self._calls_of, self._context = calls_of, context
        self._logged: list[tuple[Placed, Placed]] = []  # records, and calls in them
        self._responses = Responses()
        self._runs: dict[str, _Run] = {}
        self._run_of: dict[str | None, str] = {}  # by the id of a response
        self._ends, self._asked = _Standing(), _Standing()  # of calls with their replies, and of requests alone

    def take(self, records: Iterable[Placed]) -> None:
        """Reads records; which calls are of one run is found out when all are there."""
        for record in records:
            calls = map(with_bodies, self._calls_of([record], self._context))
            for call in self._kept(calls, record):
                self._logged.append((record, call))
                self._responses.add(call.value)

    def rows(self) -> Iterator[Placed]:
        """Rows of the runs, in the order in which the log has them."""
        calls = [
            call
            for record, logged in self._logged
            for call in self._kept(logged_call(logged, self._responses, self._context), record)
        ]
        self._logged.clear()
        calls = _in_sessions(_once(calls, self._context), self._context)
        by_name: dict[str | None, list[LoggedCall]] = {}
        for call in calls:
            by_name.setdefault(call.name, []).append(call)
        unnamed = by_name.pop(None, [])
        for several in (*by_name.values(), unnamed):
            for call in _ordered(several, self._context):
                self._add(call)
        for open_runs in self._asked.open.values():
            for location in open_runs.values():
                self._context.leave_out(location, NOT_SHOWN)
        place = {call.location: number for number, call in enumerate(calls)}
        runs = [run for run in self._runs.values() if run.calls]
        for run in sorted(runs, key=lambda run: min(place[call.location] for call in run.calls)):
            for row in _rows(run, self._context):
                yield Placed(row["source"], row, run.first.file)

    def _kept(self, found: Iterable[T], record: Placed) -> Iterator[T]:
        try:
            yield from kept(self._context, found, record)
        except MISSHAPEN as error:
            raise DataError(f"{record.location}: {misshapen(error)}") from error

    def _add(self, call: LoggedCall) -> None:
        if call.is_alone:
            name, call = self._with_shown_replies(call)
        elif call.name is None:
            name = self._joined(call)
        else:
            name = call.name
        run = self._runs.setdefault(name, _Run(name, call))
        run.label(call, self._context)
        if call.replies:
            run.add(call, self._context)
        for end in call.ends:
            self._ends.add(end, name, call.location)
        if call.id is not None:
            self._run_of[call.id] = name

    def _joined(self, call: LoggedCall) -> str:
        """The run that a call without the name of one goes on with; its own location where it begins one."""
        if call.previous in self._run_of:
            return self._run_of[call.previous]
        name, length = self._ends.run_at(call.keys[1:], None, self._context)
        self._ends.close(call.keys[length], name)
        return name or call.location

    def _with_shown_replies(self, call: LoggedCall) -> tuple[str, LoggedCall]:
        """The run of a request alone, and the request with the replies that it shows: its assistant messages after the
        longest messages that the run has asked with. What the first request of a run holds was given to it.
        """
        asked, history, keys = self._asked, call.history, call.keys[1:]
        found, start = asked.run_at(keys[:-1], call.name, self._context)
        run = found or call.name or call.location
        replies = []
        for index in range(start if found else len(history), len(history)):
            asked.close(keys[index - 1], run)
            if history[index].get("role") == "assistant" and (run, keys[index]) not in asked.known:
                asked.known.add((run, keys[index]))
                reply = {"content": "", **history[index]}
                replies.append(ImportedCall(call.location, history[:index], reply, call.tools))
        if keys:
            asked.add(keys[-1], run, call.location)
        return run, replace(call, replies=replies)


class _Standing:
    """Where conversations stand: the runs that have got to some messages, by the name of these.

    open: of these runs those that nothing has gone on from yet, with the location. known: replies that were shown.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, None]] = {}
        self.open: dict[str, dict[str, str]] = {}
        self.known: set[tuple[str, str]] = set()

    def add(self, key: str, run: str, location: str) -> None:
        self.runs.setdefault(key, {})[run] = None
        self.open.setdefault(key, {})[run] = location

    def close(self, key: str, run: str | None) -> None:
        self.open.get(key, {}).pop(run or "", None)

    def run_at(self, keys: list[str], name: str | None, context: Context) -> tuple[str | None, int]:
        """The run that has got furthest into a conversation, one that is open first, and how many messages far; name:
        the only one that may. None where the messages begin a run.
        """
        for length in range(len(keys), 0, -1):
            runs = self.runs.get(keys[length - 1], {})
            if name is not None:
                if name in runs:
                    return name, length
            elif runs:
                if len(runs) > 1:
                    context.warn(AMBIGUOUS)
                return next(iter(self.open[keys[length - 1]] or runs)), length
        return None, 0


def _once(calls: list[LoggedCall], context: Context) -> list[LoggedCall]:
    """The calls without those of unnamed runs that an earlier one of equal id and facts is."""
    known: set[tuple[object, ...]] = set()
    found = []
    for call in calls:
        key = (call.id, *call.facts)
        if call.name is None and call.id is not None and key in known:
            context.leave_out(call.location, TWICE)
            continue
        known.add(key)
        found.append(call)
    return found


def _in_sessions(calls: list[LoggedCall], context: Context) -> list[LoggedCall]:
    """The calls with the name of their session as that of their run, where each trace of it holds one call."""
    facts: dict[str, dict[str | None, set[object]]] = {}  # of each session the calls of its traces
    for call in calls:
        if call.session is not None:
            facts.setdefault(call.session, {}).setdefault(call.name, set()).add(call.facts)
    merged = {session for session, traces in facts.items() if len(traces) > 1 and max(map(len, traces.values())) == 1}
    for _ in merged:
        context.warn(ONE_CALL)
    return [replace(call, name=call.session) if call.name is None or call.session in merged else call for call in calls]


def _ordered(calls: list[LoggedCall], context: Context) -> list[LoggedCall]:
    """The calls in the order in which they were made: by their times, else as the log has them; what goes on from
    another call comes after it.
    """
    times = [call.times for call in calls]
    clock = common_clock(times)
    if clock is None and any(times):
        context.warn(NO_CLOCK)
    ends: dict[str | None, list[int]] = {}  # by the id of a response, too
    for index, call in enumerate(calls):
        ends.setdefault(call.id, []).append(index)
        for end in [call.keys[-1]] if call.is_alone else call.ends:
            ends.setdefault(end, []).append(index)
    before = [_before(call, index, ends) for index, call in enumerate(calls)]
    return [calls[index] for index in log_order(clock, [len(call.history) for call in calls], before)]


def _before(call: LoggedCall, index: int, ends: dict[str | None, list[int]]) -> list[int]:
    """The calls that a call goes on from: that of the response which it names, else those whose messages and reply are
    the longest beginning of its own.
    """
    keys = call.keys[1:-1] if call.is_alone else call.keys[1:]
    named = [] if call.previous is None else [call.previous]
    return next((ends[key] for key in (*named, *reversed(keys)) if key in ends and ends[key] != [index]), [])


def _rows(run: _Run, context: Context) -> Iterator[Record]:
    calls = [reply for call in run.calls for reply in trainable(call.replies, context)]
    group = run.group
    if group is None:  # samples of one prompt are compared with one another
        group = "prompt " + run.first.keys[-1][-16:]
    shared = {"group": group, "rollout": run.name, "reward": run.reward}
    by_tools: dict[str, list[ImportedCall]] = {}
    for call in calls:
        if call.ids is None:
            by_tools.setdefault(json.dumps(call.tools, sort_keys=True), []).append(call)
            continue
        prompt, completion, logprobs = call.ids
        streams = {"sampler_logprobs": ("logprobs", logprobs)}
        talk = [*call.history, call.reply]
        yield from sampled_row(
            context, call.location, prompt, completion, None, streams, messages=talk, tools=call.tools, **shared
        )
    for several in by_tools.values():
        yield pooled(several, shared)
