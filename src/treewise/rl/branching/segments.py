"""`segments`: every path forks after each stretch of a fixed number of tokens, up to a width.

Source: TreePO (arXiv 2508.17445): segments of 512 tokens, a first divergence, then an equal share of the width that is
left for every path that goes on (`fixed_avg`), and, once all have ended below the width, a fallback to an earlier
segment of a path that ended, drawn at random.
"""

from dataclasses import dataclass

import numpy as np

from treewise.rl.branching.protocol import Branch, Signals, require
from treewise.rl.branching.rollout_node import PROMPT
from treewise.rl.branching.rollout_tree import RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBranching:
    """segment_tokens: generated tokens of a segment. width: rollouts of a tree. first: segments that start at the
    prompt. branches: the most that continue one segment. fallback: whether to go back where all have ended.
    """

    segment_tokens: int = 512
    width: int = 16
    first: int = 8
    branches: int = 2
    fallback: bool = True

    def __post_init__(self) -> None:
        for name in ("segment_tokens", "width", "first", "branches"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1.")


def fixed_segments(
    tree: RolloutTree,
    _signals: Signals,
    settings: SegmentBranching,
    rng: np.random.Generator,
) -> list[Branch]:
    """Continues every segment that has not ended; once `width` rollouts ended, starts anew at the prompt.

    The nodes of the tree must be left unfinished where they reached `Branch.max_tokens`.
    """
    size = settings.segment_tokens
    growing = [index for index in range(len(tree)) if not tree[index].has_ended and not tree.children(index)]
    room = settings.width * _num_trees(tree, settings) - len(tree.leaves)
    if growing:
        share, more = divmod(max(room, len(growing)), len(growing))
        return [
            Branch(index, len(tree[index]), min(share + (number < more), settings.branches), max_tokens=size)
            for number, index in enumerate(growing)
        ]
    if room > 0 and settings.fallback:
        ends = [index for index in range(len(tree)) if not tree[index].has_ended]
        if ends:
            index = int(rng.choice(ends))
            return [Branch(index, len(tree[index]), min(room, settings.branches), max_tokens=size)]
    return [Branch(PROMPT, 0, min(settings.first, settings.width), max_tokens=size)]


def _num_trees(tree: RolloutTree, settings: SegmentBranching) -> int:
    """Trees that were started, each by `first` segments at the prompt."""
    return -(-len(tree.roots) // min(settings.first, settings.width))
