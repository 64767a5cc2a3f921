"""`turns`: branches at the ends of turns, drawn at random or where the policy was the least certain.

Sources: Tree-GRPO (arXiv 2509.21240): a turn drawn uniformly. AT2PO (arXiv 2601.04767): the turns of the highest mean
`-log p` of what the policy wrote, less a penalty for each further branch that they have.
"""

from dataclasses import dataclass

import numpy as np

from treewise.errors import check_choice
from treewise.rl.branching.points import Point, points_of
from treewise.rl.branching.protocol import Branch, Signals, require
from treewise.rl.branching.rollout_tree import RolloutTree
from treewise.rl.branching.variations import next_variations

ORDERS = ("random", "uncertain")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBranching:
    """roots: rollouts that start at the prompt at a time. variations: the most rollouts below one root. per_round: the
    most branches below one root in one round. order: `random` (Tree-GRPO) or `uncertain` (AT2PO). penalty: of
    `uncertain`, for each branch that a turn has besides the first continuation, in nats.
    """

    roots: int = 2
    variations: int = 5
    per_round: int = 2
    order: str = "random"
    penalty: float = 0.05

    def __post_init__(self) -> None:
        for name in ("roots", "variations", "per_round"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1.")
        check_choice("order", self.order, ORDERS)
        require(self.penalty >= 0, f"penalty={self.penalty} must not be negative.")


def whole_turns(
    tree: RolloutTree,
    _signals: Signals,
    settings: TurnBranching,
    rng: np.random.Generator,
) -> list[Branch]:
    """One branch at each chosen turn, which then goes on differently; turns that end a rollout are left out."""

    def pick(root: int, room: int) -> list[Branch]:
        points = points_of(tree, root, "turns")
        if not points:
            return []
        if settings.order == "random":
            chosen = rng.choice(len(points), size=min(room, len(points)), replace=False)
        else:
            scores = np.array([turn_surprisal(tree, point) - _penalty(tree, point, settings) for point in points])
            chosen = np.argsort(-scores, kind="stable")[:room]
        return [Branch(points[index].node, points[index].position) for index in chosen]

    return next_variations(tree, settings.roots, settings.variations, settings.per_round, pick)


def turn_surprisal(tree: RolloutTree, point: Point) -> float:
    """Mean `-log p` of the tokens that the policy wrote in the turn that ends at a point, of the node's own."""
    node = tree[point.node]
    earlier = node.turn_ends[node.turn_ends < point.position]
    turn = slice(int(earlier[-1]) if len(earlier) else 0, point.position)
    own = node.is_sampled[turn]
    return -float(node.logprobs[turn][own].mean(dtype=np.float64)) if own.any() else 0.0


def _penalty(tree: RolloutTree, point: Point, settings: TurnBranching) -> float:
    return settings.penalty * sum(tree[child].cut == point.position for child in tree.children(point.node))
