"""The seam between the loop and whoever samples: items in, groups of rewarded trajectories out.

`OnlineTrainer` (`loop.py`) draws items, credits, trains, writes and saves. Who samples is one `Collector`:
`TreeCollector` (`trees.py`) grows rollout trees; anything else that keeps what stands at the protocol's methods takes
its place (`OnlineTrainer(..., collector=...)`), and is resumed, credited, counted and reported alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from treewise.rl.online.journal import Journal, LoopState
from treewise.rl.samplers import Sampler
from treewise.rl.tasks import TaskItem
from treewise.rl.tasks.rewards import RewardTally
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A group that is wanted.

    number: of the group in its iteration; the process that collects it is `number % ranks.count()`. key: how the book
    of successes calls the item. budget: generated tokens that the group may take. seed: names its random streams, and
    what the journal holds of it. num_rollouts: exactly so many, whatever they take; None: as settings and budget say.
    """

    number: int
    item: TaskItem
    key: str
    budget: int
    seed: tuple[int, ...]
    num_rollouts: int | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """Context of one collection: policy version, sampler, journal.

    where: in words, of errors and of the rows' sources: `iteration 3`. state: of the loop between two iterations, to be
    read alone. sampler: with the weights of policy `version`, which goes with every token. trainer_state: transformers'
    own, as reward functions get it. progress: is called with what each completion adds to
    `Collector.expected_size`, be it 0, and may raise to end the collecting.
    """

    where: str
    state: LoopState
    journal: Journal
    sampler: Sampler
    version: int
    trainer_state: Any = None
    progress: Callable[[int], None] | None = None


@dataclass(slots=True)
class Group:
    """What came of a request.

    prompt_ids: of the item; where each rollout has another prompt, of the first. rows: of the rollouts that have a
    reward, in their order: weights, `sampler_logprobs`, `policy_versions`, `reward`, `rollout`, and `group`, which is
    the item's key; `draws` where several rows hold a sampled token with a weight. rewards, lengths: of every rollout
    that ended, None where it has no reward, and its generated tokens. success, trials: the mean success of the
    independent ways to go on from the prompt, 0..1, and how many these are; None and 0 without a reward.

    num_sampled: generated tokens that came from the sampler, which the budget is charged. num_chosen: those that a
    policy drew from recorded candidates. num_failed, num_unfinished: of both, tokens of rollouts without a reward, and
    of those that never came to an end. What is left are the tokens with a weight in rows, each once: the loop checks
    it. counts, means: further figures of the log: added up, and averaged, over all groups.
    """

    request: GroupRequest
    prompt_ids: Sequence[int]
    rows: list[Trajectory]
    rewards: list[float | None]
    lengths: list[int]
    success: float | None
    trials: int
    num_sampled: int
    num_chosen: int = 0
    num_failed: int = 0
    num_unfinished: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    means: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def known_rewards(self) -> tuple[float, ...]:
        """Of the rollouts that have one."""
        return tuple(float(reward) for reward in self.rewards if reward is not None)


@dataclass(slots=True)
class Collected:
    """Groups in the order of their requests. tally: of the rewards, with what reward functions logged. seconds: by
    name, `sampling` among them. warnings: sentences that the first process logs.
    """

    groups: list[Group]
    tally: RewardTally = field(default_factory=RewardTally)
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One rollout of a held-out item, as text. reward: None where it failed, with the reason in `failure`."""

    key: str
    prompt: str
    completion: str
    reward: float | None
    num_tokens: int
    failure: str | None = None


class Collector(Protocol):
    """Who samples. Every process of a run makes every call, with the same arguments, and gets the same back: it
    collects its own share, and exchanges results by `ranks.on_every_rank`.

    What comes back is a function of weights, moment and arguments: random streams are named by seeds. Whatever is
    expensive (completions, rewards, episodes) is in `moment.journal` as soon as it is known: a call begins with
    `journal.begin_phase()`, asks `journal.recall(kind, name, question)` before it computes, and
    `journal.record(kind, [(name, question, answer), ...])` after. Names are a request's own, as its seed; a question
    holds all that decides the answer but weights and code; an answer is plain JSON, and a mapping with `version` where
    the policy made it. A killed run makes the same calls again, so it computes nothing twice and goes on to the same
    weights. Where a rollout has no reward, `journal.mark()` stands at its record: if too many fail the loop ends the
    run and forgets from there (`check_failures`), so that a resumed one tries them again.

    Calls may come from two threads at once: with `max_staleness` one collects ahead while the trainer's own evaluates,
    each with a moment of its own. So no call leaves anything behind in the collector that another reads.
    """

    def prompt_ids(self, item: TaskItem) -> list[int]:
        """The token ids that rollouts of an item begin with: budgets and angles are measured with them.

        Raises:
            DataError: no token can follow the prompt.
        """
        ...

    def expected_size(self, num_groups: int, budget: int, state: LoopState, /) -> tuple[int, str]:
        """How much an iteration of first groups is, as far as that is known, and the unit of it: what its progress is
        measured by. budget: its generated tokens.
        """
        ...

    def collect(self, requests: Sequence[GroupRequest], moment: Moment) -> Collected:
        """A group for each request.

        Raises:
            TaskError: a reward failed, and settings say to end the run then.
        """
        ...

    def evaluate(self, items: Sequence[TaskItem], moment: Moment, seed: int) -> tuple[list[HeldOut], RewardTally]:
        """One rollout of each item, as `eval_temperature` says. seed: the same at every evaluation of a run.

        Raises as `collect`.
        """
        ...

    def facts(self) -> dict[str, str]:
        """What decides its rollouts beside the loop's settings; a resumed run must agree."""
        ...

    def close(self) -> None:
        """Ends threads, processes and servers of its own. The sampler is the loop's."""
        ...
