"""`segments`: every path forks after each stretch of a fixed number of tokens, up to a width.

Source: TreePO (arXiv 2508.17445): segments of 512 tokens, a first divergence, then an equal share of the width that is
left for every path that goes on (`fixed_avg`), and, once all have ended below the width, a fallback to an earlier
segment of a path that ended, drawn at random.

What differs from the paper: what was begun is finished before more begins. Each path keeps the tokens that it may still
take until its longest end, and only what the budget has beyond that starts or forks another; rollouts that end early
give theirs back. So a budget that ends is not spent on paths that never do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treewise.rl.branching.protocol import Branch, Count, Signals, open_ends
from treewise.rl.branching.rollout_tree import PROMPT, RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBranching:
    """segment_tokens: generated tokens of a segment. width: rollouts of a tree. first: segments that start at the
    prompt. branches: the most that continue one segment. fallback: whether to go back where all have ended.
    """

    segment_tokens: Count = 512
    width: Count = 16
    first: Count = 8
    branches: Count = 2
    fallback: bool = True

    def ask(self, tree: RolloutTree, signals: Signals, rng: np.random.Generator) -> list[Branch]:
        """Continues every segment that has not ended; once `width` rollouts ended, starts anew at the prompt.

        The nodes of the tree must be left unfinished where they reached `Branch.max_tokens`.
        """
        size, first = self.segment_tokens, min(self.first, self.width)
        growing = open_ends(tree)
        free = _Free(tree, signals, growing)
        num_trees = -(-len(tree.roots) // first)
        room = self.width * num_trees - len(tree.leaves)
        share, more = divmod(max(room, len(growing)), max(len(growing), 1))
        branches = []
        for number, index in enumerate(growing):
            forks = min(share + (number < more), self.branches) - 1
            branches.append(Branch(index, len(tree[index]), 1 + free.take(index, forks), max_tokens=size))
        missing = -len(tree.roots) % first  # of the last tree, where the budget did not reach for all
        if missing and (count := free.take(PROMPT, missing)):
            branches.append(Branch(PROMPT, 0, count, max_tokens=size))
        if branches:
            return branches
        ends = [index for index in range(len(tree)) if not tree[index].has_ended]
        if room > 0 and self.fallback and ends:
            index = int(rng.choice(ends))
            count = max(free.take(index, min(room, self.branches)), 1)
            return [Branch(index, len(tree[index]), count, max_tokens=size)]
        return [Branch(PROMPT, 0, max(free.take(PROMPT, first), 1), max_tokens=size)]


class _Free:
    """What a budget has beyond the longest ends of the paths that grow; without limit where one is not known."""

    def __init__(self, tree: RolloutTree, signals: Signals, growing: Sequence[int]) -> None:
        self.tree, self.longest = tree, signals.longest_tokens
        self.left = None if self.longest is None else signals.budget_left
        if self.left is not None:
            self.left -= sum(map(self._cost, growing))

    def take(self, index: int, wanted: int) -> int:
        """How many of so many further paths from the end of a node (or `PROMPT`) may begin."""
        if self.left is None or wanted <= 0:
            return max(wanted, 0)
        count = min(wanted, max(self.left // self._cost(index), 0))
        self.left -= count * self._cost(index)
        return count

    def _cost(self, index: int) -> int:
        assert self.longest is not None
        done = 0 if index == PROMPT else self.tree.num_sampled_before(index, len(self.tree[index]))
        return max(self.longest - done, 1)
