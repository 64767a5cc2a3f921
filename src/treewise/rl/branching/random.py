"""`random`: branches at points drawn uniformly. The control that an uncertainty rule has to beat."""

from dataclasses import dataclass

import numpy as np

from treewise.errors import check_choice
from treewise.rl.branching.points import KINDS, points_of
from treewise.rl.branching.protocol import Branch, Signals, require
from treewise.rl.branching.rollout_tree import RolloutTree
from treewise.rl.branching.variations import next_variations


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBranching:
    """roots: rollouts that start at the prompt at a time. variations: the most rollouts below one root. per_round: the
    most branches below one root in one round. points: `tokens` or `turns` (their ends).
    """

    roots: int = 1
    variations: int = 10
    per_round: int = 1
    points: str = "tokens"

    def __post_init__(self) -> None:
        for name in ("roots", "variations", "per_round"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1.")
        check_choice("points", self.points, KINDS)


def random_points(
    tree: RolloutTree,
    _signals: Signals,
    settings: RandomBranching,
    rng: np.random.Generator,
) -> list[Branch]:
    """Branches at points of all variations so far, each as likely as another; without replacement within a round."""

    def pick(root: int, room: int) -> list[Branch]:
        points = points_of(tree, root, settings.points)
        if not points:
            return []
        chosen = rng.choice(len(points), size=min(room, len(points)), replace=False)
        return [Branch(points[index].node, points[index].position) for index in chosen]

    return next_variations(tree, settings.roots, settings.variations, settings.per_round, pick)
