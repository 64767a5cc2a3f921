"""What an iteration draws: items, wave by wave, whose groups a `Collector` collects; and what it has drawn: these
groups, in the order of their items, and what they leave in the loop's state.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treewise.distributed import ranks
from treewise.errors import ConfigError, DataError, TaskError, num
from treewise.rl.curriculum import PractisedItem, TaskSampler
from treewise.rl.online.collector import Collector, Group, GroupRequest, Moment
from treewise.rl.online.journal import Journal, LoopState
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks.protocol import Task
from treewise.rl.tasks.rewards import RewardTally, too_many_failed

logger = logging.getLogger("treewise")


@dataclass(slots=True)
class Drawn:
    """The groups of an iteration.

    groups: all, in the order of their draw. indices: their items. waves: in which each was drawn. kept: positions in
    `groups` of those that are trained. extra_budget: generated tokens that refills may spend beyond the iteration's.
    tally: of their rewards. seconds: by name. angles: concentration of each prompt, where the curriculum measures it.
    state: of the loop once it has trained; None where that is still to be observed.
    """

    groups: list[Group] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    waves: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    extra_budget: int = 0
    tally: RewardTally = field(default_factory=RewardTally)
    seconds: dict[str, float] = field(default_factory=lambda: {"sampling": 0.0})
    angles: list[float] = field(default_factory=list)
    state: LoopState | None = None

    def outcomes(self, book: SuccessBook) -> list[PractisedItem]:
        """What came of all groups. book: before it observes them."""
        return [
            PractisedItem(
                index=index,
                predicted=book.success(group.request.key),
                rewards=group.known_rewards,
                success=group.success,
                trials=group.trials,
                angle=self.angles[place] if self.angles else None,
            )
            for place, (group, index) in enumerate(zip(self.groups, self.indices, strict=True))
        ]

    def count_in(self, loop: LoopState, budget: int) -> None:
        """Takes the groups into a state, as the iteration after those that it knows. budget: its generated tokens."""
        for group in self.groups:
            loop.book.observe(group.request.key, group.success, group.trials)
            loop.num_rollouts += len(group.lengths)
            loop.rollout_tokens += sum(group.lengths)
        sampled = sum(group.num_sampled for group in self.groups)
        loop.num_sampled += sampled
        loop.overshoot += sampled - self.extra_budget - budget
        for kind, count in self.tally.kinds.items():
            loop.failures[kind] = loop.failures.get(kind, 0) + count
        loop.iteration += 1


def draw_groups(
    items: TaskSampler,
    collector: Collector,
    task: Task,
    settings: OnlineSettings,
    moment: Moment,
    stream: tuple[int, ...],
) -> Drawn:
    """Draws the items of an iteration, wave by wave, and has their groups collected. All first groups together may
    spend its budget of generated tokens, and a refilled one the share of one more. stream: as of `requests_of`.

    Raises:
        DataError: two of them have one key. TaskError: more rewards failed than may.
    """
    drawn, count, budget, wave = Drawn(), settings.trees_per_iteration, budget_of(settings, moment.state), 0
    indices = items.draw(count)
    share, more = divmod(budget, max(len(indices), 1))
    budgets = [share + (number < more) for number in range(len(indices))]
    while indices:
        first = len(drawn.groups)
        requests = requests_of(task, indices, budgets, stream, first)
        _refuse_equal_keys(task, [*(group.request for group in drawn.groups), *requests])
        collected = collector.collect(requests, moment)
        drawn.groups += collected.groups
        drawn.indices += indices
        drawn.waves += [wave] * len(indices)
        drawn.extra_budget += sum(budgets) if wave else 0
        drawn.tally.add(collected.tally)
        for name, seconds in collected.seconds.items():
            drawn.seconds[name] = drawn.seconds.get(name, 0.0) + seconds
        for line in collected.warnings:
            if ranks.own() == 0:
                logger.warning("%s: %s", moment.where, line)
        is_kept = [items.is_kept(group.known_rewards) for group in collected.groups]
        drawn.kept += (first + np.flatnonzero(is_kept)).tolist()
        missing, wave = count - len(drawn.kept), wave + 1
        indices = items.draw(missing, wave) if missing > 0 else []
        budgets = [max(1, budget // count)] * len(indices)
    check_failures(drawn.tally, settings.max_failed, moment.where, moment.journal)
    return drawn


def budget_of(settings: OnlineSettings, state: LoopState) -> int:
    """Generated tokens of the next iteration: less what earlier ones took too many."""
    return max(settings.tokens_per_iteration - state.overshoot, settings.trees_per_iteration)


def requests_of(
    task: Task,
    indices: Sequence[int],
    budgets: Sequence[int],
    stream: tuple[int, ...],
    first: int = 0,
    num_rollouts: int | None = None,
) -> list[GroupRequest]:
    """Groups of training items; the first has number `first`. stream: names their random streams."""
    found = []
    for number, (index, budget) in enumerate(zip(indices, budgets, strict=True), start=first):
        item, key = task.item("train", index), f"{task.name}/{index}"
        found.append(GroupRequest(number, item, key, budget, (*stream, number), num_rollouts))
    return found


def _refuse_equal_keys(task: Task, requests: Sequence[GroupRequest]) -> None:
    """Raises `DataError` where the groups of two items would be one: rollouts are those of their item's key."""
    seen: dict[str, str] = {}
    for request in requests:
        other = seen.setdefault(request.item.key, request.key)
        if other != request.key:
            raise DataError(
                f"{task.name}: items {other} and {request.key} both have the key {request.item.key!r}, so their "
                "rollouts would be one group. Give each item a key of its own."
            )


def num_practised(task: Task, settings: OnlineSettings) -> int | None:
    """The items that a run practises; None: without end.

    Raises:
        ConfigError: fewer items than groups.
    """
    sizes = [size for size in (task.num_items("train"), settings.num_items) if size is not None]
    total, num_trees = min(sizes, default=None), settings.trees_per_iteration
    if total is not None and total < num_trees:
        raise ConfigError(
            f"{task.name} has {num(total, 'training item')}, fewer than trees_per_iteration={num_trees}, and "
            f"the trees of an iteration are of different items; give trees_per_iteration: {total}, or more items."
        )
    return total


def check_failures(tally: RewardTally, max_failed: float, where: str, journal: Journal) -> None:
    """Ends a run of which too many rewards fail; the failed ones are not recorded, so `--resume` computes them again.

    Raises:
        TaskError: more than `max_failed` of the rollouts have no reward.
    """
    found = too_many_failed(tally, max_failed)
    if found is not None:
        journal.forget_from_mark()
        raise TaskError(
            f"{where}: {found} Mend the reward and go on with --resume, or raise max_failed if that is meant."
        )
