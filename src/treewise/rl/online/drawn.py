"""What an iteration draws: requests for groups; and what it has drawn: its groups, in the order of their items,
and what they leave in the loop's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treewise.errors import ConfigError, num
from treewise.rl.curriculum import PractisedItem
from treewise.rl.online.collector import Collected, Group, GroupRequest
from treewise.rl.online.journal import LoopState
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks.protocol import Task
from treewise.rl.tasks.rewards import RewardTally


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

    def add(self, collected: Collected, indices: Sequence[int], budgets: Sequence[int]) -> None:
        """Takes in the next wave. budgets: generated tokens of each of its groups."""
        wave = self.waves[-1] + 1 if self.waves else 0
        self.groups += collected.groups
        self.indices += indices
        self.waves += [wave] * len(indices)
        self.extra_budget += sum(budgets) if wave else 0
        self.tally.add(collected.tally)
        for name, seconds in collected.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def figures(self) -> dict[str, float]:
        """What is logged: groups that were drawn, trained, and refilled, where there were any; what reward functions
        logged.
        """
        num_refilled = float(sum(wave > 0 for wave in self.waves))
        shown = {"refilled_trees": num_refilled} if num_refilled else {}
        if len(self.kept) < len(self.groups):
            shown |= {"drawn_trees": float(len(self.groups)), "kept_trees": float(len(self.kept))}
        return shown | {name: float(np.mean(values)) for name, values in self.tally.metrics.items()}

    def outcomes(self, book: SuccessBook) -> list[PractisedItem]:
        """What came of all groups so far. book: before it observes them."""
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
