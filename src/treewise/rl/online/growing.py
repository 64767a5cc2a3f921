"""Grows rollout trees: rounds of branches, sampled and rewarded, until budgets are spent.

A round of a tree asks its policy for branches, continues all of them until those that ended have their rewards
(`continuing.py`, with the rollouts of all other trees), and the next one begins. Everything is a function of weights,
settings, items and seed.

Trees do not depend on one another. So each goes through its rounds by itself, and each of several processes grows its
own, and all get the whole: environments, samples and rewards of a tree are those of one process, and it does not matter
which.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from treewise.distributed import ranks
from treewise.rl.branching import PROMPT, Branch, RolloutTree, Signals
from treewise.rl.online.collector import GroupRequest
from treewise.rl.online.continuing import Rounds, continue_all
from treewise.rl.online.rollout import Continuation, Conversation
from treewise.rl.tasks.rewards import RewardTally

logger = logging.getLogger("treewise")
_say_once = cache(logger.warning)

_GROWN = ("tree", "num_started", "num_sampled", "num_chosen", "num_refused", "is_complete")  # what processes exchange


@dataclass(eq=False, slots=True)
class GrowingTree:
    """The tree of a request while it grows.

    first: the conversation behind the prompt. rng: of the branching policy. conversations: what each node ended as, by
    node. num_sampled: tokens that came from the sampler, counted as they came: what the budget is charged. num_chosen:
    first tokens of branches that a policy drew from recorded candidates. num_refused: branches from which an
    environment could not be brought back.
    """

    request: GroupRequest
    tree: RolloutTree
    first: Conversation
    rng: np.random.Generator
    conversations: dict[int, Conversation] = field(default_factory=dict)
    num_started: int = 0
    num_sampled: int = 0
    num_chosen: int = 0
    num_refused: int = 0
    is_complete: bool = False

    def next_round(self, rounds: Rounds) -> list[Continuation]:
        """What the policy asks for next; nothing once the tree is complete."""
        if self.is_complete:
            return []
        limits = rounds.limits
        signals = Signals(
            success=rounds.moment.state.book.success(self.request.key),  # before its own rollouts, which `lcr` counts
            expected_tokens=rounds.expected_tokens,
            longest_tokens=min(limits.max_new_tokens, limits.max_length - len(self.tree.prompt_ids)),
        )
        started = []
        budget_left = self.request.budget - self.num_sampled  # negative where the tree passed its budget
        for branch in rounds.branching.next_requests(self.tree, signals, budget_left, self.rng):
            if branch.node != PROMPT and not self.first.can_return:
                _say_once("the environment cannot be copied or played again: trees branch at their prompts alone")
                branch = Branch(count=branch.count)
            source = self.first if branch.node == PROMPT else self.conversations[branch.node]
            num_tokens = len(self.tree.prefix_ids(branch.node, branch.position))
            for _ in range(branch.count):
                self.num_started += 1
                seed = (*self.request.seed, self.num_started)
                started.append(Continuation(self.tree, branch, source.branch(num_tokens), limits, seed))
        self.is_complete = True  # until a branch is added: where all were refused, the policy would ask for the same
        return started

    def add(self, continuation: Continuation) -> None:
        """Adds a finished continuation as a node; not a refused one."""
        if continuation.refused is not None:
            self.num_refused += 1
            if self.num_refused.bit_count() == 1:  # the 1st, 2nd, 4th, ...
                logger.warning("%s; this branch is left out (%d so far)", continuation.refused, self.num_refused)
            return
        self.is_complete = False
        index = self.tree.add(continuation.node())
        self.conversations[index] = continuation.conversation
        self.num_sampled += continuation.num_drawn
        self.num_chosen += continuation.num_chosen


def grow_trees(trees: Sequence[GrowingTree], rounds: Rounds) -> None:
    """Rounds until every tree has spent its budget, or its policy asks for nothing. Every process calls this with the
    same trees, grows those whose number is its own, and gets the others.

    Raises:
        TaskError: a reward failed on any process, and the runner raises.
    """
    if ranks.count() == 1:
        return _grow(trees, rounds)
    own = [tree for tree in trees if tree.request.number % ranks.count() == ranks.own()]
    rewards, seconds = rounds.rewards, dict(rounds.seconds)
    assert rewards is not None
    before, tally, rewards.tally = rewards.failures.copy(), rewards.tally, RewardTally()

    def work() -> Any:
        _grow(own, rounds)
        grown = {tree.request.number: {name: getattr(tree, name) for name in _GROWN} for tree in own}
        return grown, rewards.failures - before, rounds.seconds, rewards.tally

    parts = ranks.on_every_rank(work)
    for tree in trees:
        number = tree.request.number
        found = parts[number % ranks.count()][0][number]
        for name in _GROWN if tree not in own else ():
            setattr(tree, name, found[name])
    rewards.failures = sum((failures for _, failures, *_ in parts), Counter(before))
    for *_, part in parts:
        tally.add(part)
    rewards.tally = tally
    for name in seconds:  # of the slowest process, which the others wait for
        rounds.seconds[name] = max(times[name] for _, _, times, _ in parts)


def _grow(trees: Sequence[GrowingTree], rounds: Rounds) -> None:
    """Each tree begins its next round when all of its own rollouts have their rewards, whatever others wait for."""
    under_way: dict[Continuation, tuple[GrowingTree, list[Continuation]]] = {}

    def next_round(tree: GrowingTree) -> list[Continuation]:
        batch = tree.next_round(rounds)
        under_way.update(dict.fromkeys(batch, (tree, batch)))
        return batch

    def ended(continuation: Continuation) -> list[Continuation]:
        tree, batch = under_way.pop(continuation)
        if any(other in under_way for other in batch):
            return []
        for done in batch:
            tree.add(done)
        return next_round(tree)

    continue_all([continuation for tree in trees for continuation in next_round(tree)], rounds, ended)
