"""The rounds that most policies share: first rollouts from the prompt, then variations of each, then the next ones.

A root and all that continues it are the variations of one rollout, at most V of them. Where no root may or can be
varied, new roots start: with V = 1 a policy is `none`.
"""

from collections.abc import Callable

from treewise.rl.branching.protocol import Branch
from treewise.rl.branching.rollout_tree import RolloutTree


def next_variations(
    tree: RolloutTree, roots: int, variations: int, per_round: int, pick: Callable[[int, int], list[Branch]]
) -> list[Branch]:
    """The next round.

    Parameters:
        roots: rollouts that start at the prompt at a time.
        variations: V, the most rollouts below one root, itself included.
        per_round: the most branches below one root in one round.
        pick: chooses at most so many branches below a root; none where it has no reason to branch.
    """
    branches: list[Branch] = []
    for root in tree.roots:
        room = min(variations - len(tree.below(root)), per_round)
        if room > 0:
            branches += pick(root, room)
    return branches or [Branch(count=roots)]
