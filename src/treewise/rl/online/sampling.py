"""Grows the rollout trees of an iteration: rounds of branches, sampled as one batch each, until budgets are spent.

A round asks each tree's policy for branches, continues all of them turn by turn, gives the rollouts that ended their
rewards, and goes on with the next round. Everything is a function of weights, settings, items and seed.

Trees do not depend on one another, so each of several processes grows its own, and all get the whole: environments,
samples and rewards of a tree are those of one process, and it does not matter which.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treewise.distributed import ranks
from treewise.errors import TaskError
from treewise.rl.branching import PROMPT, Branch, Branching, RolloutTree
from treewise.rl.online.continuation import Continuation, Limits
from treewise.rl.online.conversations import Conversation
from treewise.rl.online.journal import Journal, completion_from_json, completion_to_json, question_of
from treewise.rl.online.rewarding import judge
from treewise.rl.samplers import Sampler, SampleRequest
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import RewardRunner, TaskItem
from treewise.rl.tasks.rewards import RewardTally

logger = logging.getLogger("treewise")


@dataclass(eq=False, slots=True)
class GrowingTree:
    """The tree of one item while it grows.

    number: of the tree in its iteration. key: names the item in the book. budget: tokens that the sampler may make.
    conversations: what each node ended as, by node. num_sampled: tokens that came from the sampler, counted as they
    came: what the budget is charged. num_chosen: first tokens of branches that a policy drew from recorded candidates.
    num_refused: branches from which an environment could not be brought back.
    """

    number: int
    item: TaskItem
    key: str
    tree: RolloutTree
    first: Conversation
    budget: int
    seed: tuple[int, ...]
    rng: np.random.Generator
    conversations: dict[int, Conversation] = field(default_factory=dict)
    num_started: int = 0
    num_sampled: int = 0
    num_chosen: int = 0
    num_refused: int = 0
    is_complete: bool = False

    @property
    def budget_left(self) -> int:
        """Tokens that the sampler may still make; negative where the tree passed its budget."""
        return self.budget - self.num_sampled

    def continued(self, branches: Sequence[Branch], limits: Limits) -> list[Continuation]:
        """Continuations for a round of branches. Branches that an environment refuses are counted and left out."""
        started = []
        for branch in branches:
            for _ in range(branch.count):
                self.num_started += 1
                try:
                    conversation = self._conversation_at(branch)
                except TaskError as error:
                    self.num_refused += 1
                    logger.warning("%s; this branch is left out (%d so far)", error, self.num_refused)
                    continue
                started.append(Continuation(self.tree, branch, conversation, limits, (*self.seed, self.num_started)))
        return started

    def add(self, continuation: Continuation) -> int:
        """Adds a finished continuation as a node; its index."""
        index = self.tree.add(continuation.node())
        self.conversations[index] = continuation.conversation
        self.num_sampled += continuation.num_drawn
        self.num_chosen += continuation.num_chosen
        return index

    def grown(self) -> dict[str, Any]:
        """What came of it, as plain JSON values."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {"tree": self.tree.to_json(), **counts}

    def take_grown(self, values: dict[str, Any]) -> None:
        """Becomes what another process has grown."""
        self.tree = RolloutTree.from_json(values["tree"])
        for name in _COUNTS:
            setattr(self, name, values[name])

    def _conversation_at(self, branch: Branch) -> Conversation:
        num_tokens = len(self.tree.prefix_ids(branch.node, branch.position))
        source = self.first if branch.node == PROMPT else self.conversations[branch.node]
        return source.branch(num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What the rounds of an iteration need besides its trees.

    request: what all requests have in common; its prefix is replaced. expected_tokens: of a rollout, from earlier
    iterations. progress: is called with the tokens of each batch. seconds: of sampling and of rewards, added up.
    """

    branching: Branching
    sampler: Sampler
    book: SuccessBook
    rewards: RewardRunner
    journal: Journal
    limits: Limits
    request: SampleRequest
    expected_tokens: float | None = None
    progress: Callable[[int], None] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"sampling": 0.0, "reward": 0.0})


_COUNTS = ("num_started", "num_sampled", "num_chosen", "num_refused", "is_complete")


def grow_trees(trees: Sequence[GrowingTree], rounds: Rounds) -> None:
    """Rounds until every tree has spent its budget, or its policy asks for nothing. Every process calls this with the
    same trees, grows those whose number is its own, and gets the others.

    Raises:
        TaskError: a reward failed on any process, and the runner raises.
    """
    if ranks.count() == 1:
        return _grow(trees, rounds)
    own = [each for each in trees if each.number % ranks.count() == ranks.own()]
    before, seconds = rounds.rewards.failures.copy(), dict(rounds.seconds)
    tally, rounds.rewards.tally = rounds.rewards.tally, RewardTally()

    def work() -> Any:
        _grow(own, rounds)
        failures = rounds.rewards.failures - before
        return [(each.number, each.grown()) for each in own], failures, rounds.seconds, rounds.rewards.tally

    parts = ranks.on_every_rank(work)
    grown = {number: values for found, *_ in parts for number, values in found}
    mine = {each.number for each in own}
    for each in trees:
        if each.number not in mine:
            each.take_grown(grown[each.number])
    rounds.rewards.failures = sum((failures for _, failures, *_ in parts), Counter(before))
    for *_, part in parts:
        tally.add(part)
    rounds.rewards.tally = tally
    for name in seconds:  # of the slowest process, which the others wait for
        rounds.seconds[name] = max(times[name] for _, _, times, _ in parts)


def _grow(trees: Sequence[GrowingTree], rounds: Rounds) -> None:
    while True:
        batch = [(tree, each) for tree in trees for each in _next_round(tree, rounds)]
        if not batch:
            return
        continue_all([each for _, each in batch], rounds)
        ended = []
        for tree, each in batch:
            index = tree.add(each)
            if tree.tree[index].has_ended:
                ended.append((tree.tree, index, tree.item, tree.conversations[index]))
        started = time.perf_counter()
        judge(ended, rounds.rewards, rounds.journal)
        rounds.seconds["reward"] += time.perf_counter() - started


def continue_all(continuations: Sequence[Continuation], rounds: Rounds) -> None:
    """Samples continuations, turn after turn, until all have ended."""
    started = time.perf_counter()
    while active := [each for each in continuations if not each.is_finished]:
        requests = [each.request(rounds.request) for each in active]

        def sample(requests: list[SampleRequest] = requests) -> Any:
            return [[completion_to_json(each) for each in group] for group in rounds.sampler.sample(requests)]

        answers = rounds.journal.once("sample", question_of(requests), sample)
        for each, (answer,) in zip(active, answers, strict=True):
            each.take(completion_from_json(answer))
        if rounds.progress is not None:
            rounds.progress(sum(len(answer["token_ids"]) for (answer,) in answers))
    rounds.seconds["sampling"] += time.perf_counter() - started


def _next_round(tree: GrowingTree, rounds: Rounds) -> list[Continuation]:
    if tree.is_complete:
        return []
    points = getattr(rounds.branching.settings, "points", "turns")
    signals = rounds.book.signals(tree.key, tree.tree, points)
    longest = min(rounds.limits.max_new_tokens, rounds.limits.max_length - len(tree.tree.prompt_ids))
    signals = replace(signals, expected_tokens=rounds.expected_tokens, longest_tokens=longest)
    branches = rounds.branching.next_requests(tree.tree, signals, tree.budget_left, tree.rng)
    started = tree.continued(branches, rounds.limits)
    tree.is_complete = not started  # also where every branch was refused: the policy would ask for the same again
    return started
