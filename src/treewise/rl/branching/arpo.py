"""`arpo`: branches after a tool's answer where it made the policy less certain than it was at first.

Source: ARPO (arXiv 2507.19849, section 3.1): after each tool call, the change of entropy over the first tokens of the
next turn, against those of the first turn, normalised by the logarithm of the vocabulary; a branch with probability
`base + weight * change`. The released code sums `-p log p` of the ten best candidates over up to 20 tokens, without
averaging over tokens, so that its entropy grows with their number; here it is the mean (docs/tree-credit.md).
"""

from dataclasses import dataclass

import numpy as np

from treewise.errors import DataError
from treewise.rl.branching.points import has_branch, points_of
from treewise.rl.branching.protocol import Branch, Signals, require
from treewise.rl.branching.rollout_tree import RolloutTree
from treewise.rl.branching.variations import next_variations


@dataclass(frozen=True, slots=True, kw_only=True)
class ArpoBranching:
    """roots: rollouts that start at the prompt at a time. variations: the most rollouts below one root. beam: rollouts
    that a branch makes of one, itself included. base, weight: of the probability of a branch. window: tokens at the
    begin of a turn whose entropy counts.
    """

    roots: int = 1
    variations: int = 10
    beam: int = 2
    base: float = 0.5
    weight: float = 0.5
    window: int = 20

    def __post_init__(self) -> None:
        for name in ("roots", "variations", "window"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1.")
        require(self.beam >= 2, f"beam={self.beam} must be at least 2: the rollout and one branch.")
        require(0 <= self.base <= 1, f"base={self.base} must lie in 0..1.")


def after_tool_calls(
    tree: RolloutTree, signals: Signals, settings: ArpoBranching, rng: np.random.Generator
) -> list[Branch]:
    """Goes over the ends of turns that have no branch yet, and draws for each whether it gets `beam - 1`.

    Raises:
        DataError: nodes without entropies, or no `signals.vocab_size`.
    """

    def pick(root: int, room: int) -> list[Branch]:
        branches: list[Branch] = []
        initial = turn_entropy(tree, root, 0, settings.window, signals.vocab_size)
        for point in points_of(tree, root, "turns"):
            if room <= 0:
                break
            change = turn_entropy(tree, point.node, point.position, settings.window, signals.vocab_size) - initial
            if not has_branch(tree, point) and rng.random() - settings.weight * change <= settings.base:
                branches.append(Branch(point.node, point.position, min(settings.beam - 1, room)))
                room -= branches[-1].count
        return branches

    return next_variations(tree, settings.roots, settings.variations, settings.variations, pick)


def turn_entropy(tree: RolloutTree, index: int, start: int, window: int, vocab_size: int | None) -> float:
    """Mean entropy of the first `window` generated tokens of the turn that begins at a place, in units of the largest
    possible one.
    """
    node = tree[index]
    if node.entropies is None or vocab_size is None:
        what = f"entropies of node {index}" if node.entropies is None else "signals.vocab_size"
        raise DataError(
            f"branching 'arpo' needs {what}; ask the sampler for entropies and give the model's vocabulary."
        )
    later = node.turn_ends[node.turn_ends > start]
    end = int(later[0]) if len(later) else len(node)
    sampled = np.flatnonzero(node.is_sampled[start:end])[:window] + start
    return float(node.entropies[sampled].mean() / np.log(vocab_size)) if len(sampled) else 0.0
