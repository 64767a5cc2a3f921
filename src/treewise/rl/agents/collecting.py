"""`AgentCollector`: groups of an online run are the episodes of a task, run by an agent on the endpoint.

It keeps the seam of the online loop (`rl/online/collector.py`). An episode that has ended is in the journal with all
that it sampled, so a run that was killed goes on with those that had ended and runs the others again. The rows of an
episode share its reward and its number of a rollout, and all rows of a task are one tree.
"""

import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from treewise.base import features
from treewise.data.render.template import dated
from treewise.distributed import ranks
from treewise.errors import ConfigError, DataError, TaskError
from treewise.rl.agents.calls import calls_of, write_calls
from treewise.rl.agents.endpoint import Endpoint, listening
from treewise.rl.agents.endpoint_settings import EndpointSettings
from treewise.rl.agents.episodes import Episode, Episodes
from treewise.rl.agents.forks import AGAIN, BRANCHED, NEW
from treewise.rl.agents.rows import AgentRow, EpisodeRecord, Talk, trajectories_of
from treewise.rl.agents.running import AgentOutcome, AgentRunner
from treewise.rl.agents.settings import AgentSettings, check_online
from treewise.rl.online.collector import Collected, Group, GroupRequest, HeldOut, Moment
from treewise.rl.online.journal import LoopState
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.recorder.lengths import longest_row
from treewise.rl.samplers.batching import Batcher
from treewise.rl.samplers.by_name import row_limit
from treewise.rl.tasks import Calls, RewardRunner, TaskItem
from treewise.rl.tasks.agent_task import AgentTask, request_of
from treewise.rl.tasks.calls import FailedCall
from treewise.rl.tasks.reward_functions import number
from treewise.rl.tasks.rewards import RewardTally
from treewise.tree.trajectory import Trajectory

logger = logging.getLogger("treewise")
POLL_SECONDS = 0.2  # between two looks for a signal while episodes run
MAX_SHOWN = 5  # different failures of an iteration that are named


@dataclass(frozen=True, slots=True)
class Wanted:
    """An episode to run. name: of it in the journal, and of errors."""

    name: str
    item: TaskItem
    seed: tuple[int, ...]


class AgentCollector:
    """A `Collector` whose groups are an agent's episodes.

    Parameters:
        agent: `file.py:function`, `module:function`, or a command (`AgentRunner`).
        tokenizer: of the model.
        model: that is trained.
        task: whose items are the agent's tasks.
        temperature: of trained calls.
        folder: of the run, for the calls of each iteration and what reward functions log.

    Raises:
        ConfigError: the agent cannot be loaded, the endpoint not listen, or a setting has no meaning with an agent.
    """

    def __init__(
        self,
        agent: str,
        tokenizer: Any,
        model: Any,
        task: AgentTask,
        settings: OnlineSettings,
        agent_settings: AgentSettings,
        *,
        temperature: float = 1.0,
        folder: Path | None = None,
    ) -> None:
        check_online(settings)
        if agent_settings.port and ranks.count() > 1:
            raise ConfigError(
                f"agent_settings.port={agent_settings.port} is one port, and each of the {ranks.count()} processes of "
                "this run has an endpoint of its own; leave it out."
            )
        self.agent, self.task, self.settings, self.own = agent, task, settings, agent_settings
        self.folder = folder
        self.extras = (
            None
            if folder is None
            else folder / (f"reward_log-rank-{ranks.own()}.jsonl" if ranks.own() else "reward_log.jsonl")
        )
        self.calls = Calls(settings.reward_timeout, settings.reward_workers)
        self.tokenizer = tokenizer
        self.chat = ChatTokens(
            tokenizer,
            settings.chat_template,
            settings.template_date,
            getattr(model, "generation_config", None),
            on_hidden="warn",
            keeps_thinking=agent_settings.thinking == "keep",
        )
        most = longest_row(model, settings.max_length)
        self.limits = limits = agent_settings.of_endpoint(settings, temperature, most)
        self.episodes = Episodes(self.chat, None, limits)
        with ExitStack() as stack:
            endpoint = Endpoint(self.episodes, host=agent_settings.host)
            url = stack.enter_context(listening(endpoint, agent_settings.port))
            seconds, needs_reward = agent_settings.episode_seconds, task.functions is None
            given: dict[str, Any] = {"seconds": seconds, "needs_reward": needs_reward, "python": agent_settings.python}
            self.runner = AgentRunner(agent, url, self.episodes, **given)
            stack.callback(self.runner.close)
            stack.callback(self.calls.close)
            self._stack = stack.pop_all()

    # -- the seam -----------------------------------------------------------------------------------------------------

    def prompt_ids(self, item: TaskItem) -> list[int]:
        """The task as the first message of a user: what an agent sends instead is known once it runs."""
        return list(self.chat.prompt_ids([{"role": "user", "content": str(item.prompt)}], None, item.key))

    def expected_size(self, num_groups: int, budget: int, state: LoopState, /) -> tuple[int, str]:
        """See `Collector`: episodes, whose tokens nobody knows before."""
        return num_groups * self.own.num_episodes(budget // num_groups, state.expected_tokens), "episode"

    def collect(self, requests: Sequence[GroupRequest], moment: Moment) -> Collected:
        """See `Collector`."""
        expected = moment.state.expected_tokens
        wanted: list[Wanted] = []
        sizes = []
        for request in requests:
            count = request.num_rollouts or self.own.num_episodes(request.budget, expected)
            sizes.append(count)
            if request.number % ranks.count() == ranks.own():
                name = "/".join(map(str, request.seed))
                wanted += [Wanted(f"{name}/{n}", request.item, (*request.seed, n)) for n in range(count)]
        seconds, parts = self._run(wanted, moment, self.limits)
        found, shown = Collected([], seconds=seconds), list[tuple[str, EpisodeRecord]]()
        for request, count in zip(requests, sizes, strict=True):
            own = parts[request.number % ranks.count()]
            name = "/".join(map(str, request.seed))
            records = [own[f"{name}/{n}"] for n in range(count)]
            found.groups.append(self._group(request, records, moment))
            _count(found, records)
            shown += [(request.key, record) for record in records]
        if self.folder is not None and moment.trainer_state is not None and ranks.own() == 0:
            number, is_first = moment.trainer_state.global_step + 1, requests[0].number == 0
            write_calls(self.folder, number, shown, is_first=is_first)
        found.warnings = _warnings(parts)
        return found

    def evaluate(self, items: Sequence[TaskItem], moment: Moment, seed: int) -> tuple[list[HeldOut], RewardTally]:
        """See `Collector`."""
        wanted = [
            Wanted(f"{seed}/{number}", item, (seed, number))
            for number, item in enumerate(items)
            if number % ranks.count() == ranks.own()
        ]
        temperature = self.settings.eval_temperature
        limits = replace(self.limits, temperature=temperature, top_p=1.0, top_k=0, records_experts=False)
        _, parts = self._run(wanted, moment, limits)
        for line in _warnings(parts) if ranks.own() == 0 else ():
            logger.warning("%s: %s", moment.where, line)
        records = [parts[number % ranks.count()][f"{seed}/{number}"] for number in range(len(items))]
        found = Collected([])
        held_out = []
        for item, record in zip(items, records, strict=True):
            _count(found, [record])
            prompt, completion = self._texts(record)
            length = record["account"]["recorded"]
            held_out.append(HeldOut(item.key, prompt, completion, record["reward"], length, record["failure"]))
        return held_out, found.tally

    def facts(self) -> dict[str, str]:
        """The agent and its settings."""
        return {"agent": self.agent, "agent_settings": str(self.own.facts()), **dated(self.chat.template)}

    def close(self) -> None:
        """Ends the agents and the endpoint."""
        self._stack.close()

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _run(
        self, wanted: Sequence[Wanted], moment: Moment, limits: EndpointSettings
    ) -> tuple[dict[str, float], list[dict[str, EpisodeRecord]]]:
        """What the episodes of every process came to, by name, recalled or run; and the seconds of the slowest."""
        moment.journal.begin_phase()
        known = [limits.max_length, row_limit(moment.sampler)]
        limits = replace(limits, max_length=min((limit for limit in known if limit is not None), default=None))

        def work() -> tuple[float, dict[str, EpisodeRecord]]:
            began = time.perf_counter()
            found = _InProgress(self, moment, limits).run(wanted)
            return time.perf_counter() - began, found

        parts = ranks.on_every_rank(work)
        return {"sampling": max(part[0] for part in parts)}, [part[1] for part in parts]

    def question(self, wanted: Wanted, limits: EndpointSettings) -> list[Any]:
        """All that decides an episode, but weights and code."""
        names = ("max_length", "max_new_tokens", "temperature", "top_p", "top_k", "models", "keeps_thinking")
        facts = {name: getattr(limits, name) for name in (*names, "records_experts")}
        plain = json.loads(json.dumps([wanted.item.extra, facts, self.settings.chat_template], default=str))
        return [self.agent, list(wanted.seed), *plain]

    def _group(self, request: GroupRequest, records: Sequence[EpisodeRecord], moment: Moment) -> Group:
        rewards = [record["reward"] for record in records]
        known = [reward >= self.settings.success_at for reward in rewards if reward is not None]
        lengths = [record["account"]["recorded"] for record in records]
        failed = sum(length for length, reward in zip(lengths, rewards, strict=True) if reward is None)
        first = next((record["rows"][0] for record in records if record["rows"]), None)
        reasons = sum((Counter(record["reasons"]) for record in records), Counter[str]())
        forks = {name: count for name, count in reasons.items() if name not in (NEW, AGAIN, BRANCHED)}
        ignored = sum((Counter(record.get("ignored", {})) for record in records), Counter[str]())
        counts = {
            "agent_calls": sum(record["account"]["calls"] for record in records),
            "agent_rows": sum(len(record["rows"]) for record in records),
            "agent_forks": sum(forks.values()),
            "written_again_tokens": sum(record["account"]["again"] for record in records),
            "context_tokens": sum(record["account"]["context"] for record in records),
            **{f"forks/{name}": count for name, count in sorted(forks.items())},
            **{f"ignored/{name}": count for name, count in sorted(ignored.items())},
        }
        if beyond := sum(record["account"].get("beyond", 0) for record in records):
            counts["beyond_tokens"] = beyond
        return Group(
            request=request,
            prompt_ids=self.prompt_ids(request.item) if first is None else _prompt_of(first),
            rows=self._rows(request.key, records, moment.where),
            rewards=rewards,
            lengths=lengths,
            success=float(np.mean(known)) if known else None,
            trials=len(known),
            num_sampled=sum(lengths),
            num_failed=failed,
            counts=counts,
            means={"calls_per_episode": [float(record["account"]["calls"]) for record in records]},
        )

    def _rows(self, key: str, records: Sequence[EpisodeRecord], where: str) -> list[Trajectory]:
        rows = trajectories_of(key, records, where)
        return features.routes.by_tokens(rows) if self.settings.routing_replay == "by_tokens" else rows

    def _texts(self, record: EpisodeRecord) -> tuple[str, str]:
        """The first prompt of an episode, and what its longest row holds behind it."""
        rows = record["rows"]
        if not rows:
            return "", ""
        longest = max(rows, key=lambda row: len(row["token_ids"]))
        num_prompt = len(_prompt_of(longest))
        ids = longest["token_ids"]
        return self.chat.decode(ids[:num_prompt]), self.chat.decode(ids[num_prompt:])


class _InProgress:
    """Episodes of one process while they run: the agents in threads, and all else in the caller's."""

    def __init__(self, collector: AgentCollector, moment: Moment, limits: EndpointSettings) -> None:
        self.collector, self.moment, self.limits = collector, moment, limits
        self.events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.found: dict[str, EpisodeRecord] = {}
        self.running: set[Episode] = set()
        self.is_over, self._lock = False, threading.Lock()

    def run(self, wanted: Sequence[Wanted]) -> dict[str, EpisodeRecord]:
        """What each came to.

        Raises:
            SamplerError, ConfigError: nothing can be sampled, or no agent be run.
            TaskError: an episode failed, and settings say to end the run then.
        """
        left = [episode for episode in wanted if not self._recalled(episode)]
        if left:
            self._run_agents(left)
        if self.collector.task.functions is not None:
            self._judge(wanted)
        return self.found

    def _run_agents(self, left: Sequence[Wanted]) -> None:
        collector, own = self.collector, self.collector.own

        def on_sampled(_num_tokens: int) -> None:
            self.events.put(lambda: self._advance(0))  # whoever watches may end the collecting

        gather_seconds = collector.settings.gather_seconds
        batcher = Batcher(self.moment.sampler, gather_seconds=gather_seconds, on_sampled=on_sampled).serve()
        threads = ThreadPoolExecutor(min(own.at_once, len(left)), "treewise-episodes")
        try:
            futures = [threads.submit(self._one, episode, batcher) for episode in left]
            num_left = len(left)
            for future in futures:
                future.add_done_callback(lambda done: self.events.put(done.result))
            while num_left:
                try:
                    event = self.events.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    continue
                result = event()
                if isinstance(result, tuple):
                    self._ended(*result)
                    num_left -= 1
        finally:
            with self._lock:
                self.is_over = True
                stopped = list(self.running)
            for future in futures:
                future.cancel()
            for episode in stopped:
                collector.runner.stop(episode)
            batcher.close()  # what a server computes for them holds up no end
            threads.shutdown()

    def _advance(self, num_episodes: int) -> None:
        if self.moment.progress is not None:
            self.moment.progress(num_episodes * ranks.count())  # of all processes, as each does its share

    def _recalled(self, wanted: Wanted) -> bool:
        journal = self.moment.journal
        record = journal.recall("episode", wanted.name, self.collector.question(wanted, self.limits))
        if record is None or isinstance(number(record["reward"] or 0.0, ""), FailedCall):
            return False
        self._keep(wanted, record)
        self._advance(1)
        return True

    def _one(self, wanted: Wanted, batcher: Batcher) -> tuple[Wanted, EpisodeRecord]:
        """Runs one episode, in a thread of its own."""
        collector = self.collector
        name = f"{wanted.item.key}, episode {wanted.seed[-1]}"
        seed = int(np.random.SeedSequence(wanted.seed).generate_state(1, np.uint64)[0] >> 8)
        episode = collector.episodes.open(
            name, wanted.item.key, seed, batcher=batcher, settings=self.limits, version=self.moment.version
        )
        with self._lock:
            if self.is_over:
                collector.episodes.end(episode)
                raise TaskError(f"{name}: the run ends.")
            self.running.add(episode)
            batcher.expect(len(self.running))
        try:
            outcome = collector.runner.run(episode, wanted.item.extra)
        finally:
            with self._lock:
                self.running.discard(episode)
                batcher.expect(len(self.running))
        record = _record_of(episode, outcome, self.moment.version)
        if collector.task.functions is not None:
            record["talk"] = _talk_of(episode)
        return wanted, record

    def _ended(self, wanted: Wanted, record: EpisodeRecord) -> None:
        journal, question = self.moment.journal, self.collector.question(wanted, self.limits)
        journal.record("episode", [(wanted.name, question, record)])
        self._keep(wanted, record)
        self._advance(1)

    def _keep(self, wanted: Wanted, record: EpisodeRecord) -> None:
        self.found[wanted.name] = record
        if record["failure"] is not None:
            self.moment.journal.mark()
            if self.collector.settings.on_reward_error == "raise":
                raise TaskError(record["failure"])

    def _judge(self, wanted: Sequence[Wanted]) -> None:
        """The rewards of reward functions, for all episodes that ended well."""
        journal, collector = self.moment.journal, self.collector
        missing = []
        for episode in wanted:
            record = self.found[episode.name]
            if record["failure"] is not None:
                continue
            answer = journal.recall("reward", episode.name, _question_of_reward(record))
            if answer is None:
                missing.append((episode, _question_of_reward(record)))
            else:
                self._keep(episode, {**record, **answer})
        runner = RewardRunner(
            calls=collector.calls,
            on_reward_error=collector.settings.on_reward_error,
            extras=collector.extras,
            trainer_state=self.moment.trainer_state,
        )
        requests = [
            request_of(episode.item, self.found[episode.name]["talk"], question[1]) for episode, question in missing
        ]
        outcomes, logged = runner.rewards(collector.task, requests)
        answers = []
        for index, ((episode, question), outcome) in enumerate(zip(missing, outcomes, strict=True)):
            is_known = isinstance(outcome, float)
            answer = {"reward": outcome if is_known else None, "metrics": logged.metrics if index == 0 else {}}
            if not is_known:
                answer |= {"failure": str(outcome), "kind": "no reward"}
            answers.append((episode.name, question, answer))
        if answers:
            journal.record("reward", answers)
        for (episode, _), (_, _, answer) in zip(missing, answers, strict=True):
            self._keep(episode, {**self.found[episode.name], **answer})


# -- what an episode came to ------------------------------------------------------------------------------------------


def _record_of(episode: Episode, outcome: AgentOutcome, version: int) -> EpisodeRecord:
    """Plain JSON values.

    Raises:
        DataError: the recording lost a token.
    """
    rows, account = episode.rows()
    if account.fault is not None:
        raise DataError(f"{episode.name}: {account.fault}.")
    for row in rows:
        row.pop("group", None)
        row.pop("rollout", None)
        row.pop("reward", None)
    return {
        "version": version,
        "reward": outcome.reward,
        "agent_reward": outcome.reward,
        "kind": outcome.kind,
        "failure": outcome.failure,
        "rows": rows,
        "account": asdict(account),
        "reasons": dict(episode.recording.reasons),
        "refused": dict(episode.refused),
        "ignored": dict(episode.ignored),
        "calls": calls_of(episode),
    }


def _talk_of(episode: Episode) -> list[Talk]:
    """The calls as messages, for reward functions."""
    return [
        {
            "call": call.id,
            "model": call.asked.model,
            "messages": [dict(message) for message in call.asked.messages]
            or [{"role": "user", "content": str(call.asked.prompt)}],
            "replies": [dict(choice.reply.message()) for choice in call.choices],
        }
        for call in episode.recording.calls
    ]


def _question_of_reward(record: EpisodeRecord) -> tuple[list[Talk], float | None]:
    return record["talk"], record["agent_reward"]


def _prompt_of(row: AgentRow) -> list[int]:
    """What stands before the first sampled token of a row."""
    draws = np.array(row["draws"])
    return row["token_ids"][: int(np.argmax(draws >= 0))]


def _count(found: Collected, records: Sequence[EpisodeRecord]) -> None:
    failed = [str(record["failure"]) for record in records if record["reward"] is None]
    metrics: dict[str, list[float]] = {}
    for record in records:
        for name, values in record.get("metrics", {}).items():
            metrics.setdefault(name, []).extend(values)
    first = failed[0].removesuffix(".") if failed else None  # ends a sentence
    found.tally.add(RewardTally(len(records), len(failed), first, metrics))


def _warnings(parts: Sequence[Mapping[str, EpisodeRecord]]) -> list[str]:
    """Sentences on what failed and what was refused."""
    records = [record for part in parts for record in part.values()]
    failed = [record for record in records if record["failure"] is not None]
    lines = []
    if failed:
        kinds = Counter(record["kind"] for record in failed)
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        lines.append(f"{len(failed)} of {len(records)} episodes have no reward and are set aside: {shown}.")
        lines += list(dict.fromkeys(str(record["failure"]) for record in failed))[:MAX_SHOWN]
    refused = sum((Counter(record["refused"]) for record in records), Counter[str]())
    lines += [f"{count} calls were refused: {what}." for what, count in refused.most_common(MAX_SHOWN)]
    return lines
