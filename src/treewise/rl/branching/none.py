"""`none`: independent rollouts, what flat RL samples. The baseline of every comparison."""

from dataclasses import dataclass

import numpy as np

from treewise.rl.branching.protocol import Branch, Signals, require
from treewise.rl.branching.rollout_tree import RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBranching:
    """roots: rollouts that start at the prompt in one round."""

    roots: int = 8

    def __post_init__(self) -> None:
        require(self.roots >= 1, f"roots={self.roots} must be at least 1.")


def independent(
    _tree: RolloutTree,
    _signals: Signals,
    settings: NoBranching,
    _rng: np.random.Generator,
) -> list[Branch]:
    """Always `roots` more rollouts from the prompt."""
    return [Branch(count=settings.roots)]
