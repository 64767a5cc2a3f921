"""`entropy`: branches before the tokens whose distribution was the most uncertain.

Two definitions are in use under this name. `shannon`, which the papers' texts speak of, is the entropy
`-sum p log p` of the distribution that a token was drawn from. `surprisal`, `-log p` of the token that was drawn, is
what TreeRL's EPTree computes (arXiv 2506.11902; `tree_node.py`): one draw's estimate of the former.
"""

from dataclasses import dataclass

import numpy as np

from treewise.errors import DataError, check_choice
from treewise.rl.branching.points import Point, has_branch, points_of
from treewise.rl.branching.protocol import Branch, Signals, require
from treewise.rl.branching.rollout_tree import RolloutTree
from treewise.rl.branching.variations import next_variations

DEFINITIONS = ("shannon", "surprisal")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBranching:
    """roots, variations, per_round: as of `random`. definition: `shannon` (needs the sampler's entropies) or
    `surprisal`. EPTree's (M, N, T) = (6, 2, 2) is `roots=6, per_round=4, repeats=2, variations=5` by surprisal.

    repeats: branches at one point, in one round.
    """

    roots: int = 1
    variations: int = 10
    per_round: int = 1
    repeats: int = 1
    definition: str = "shannon"

    def __post_init__(self) -> None:
        for name in ("roots", "variations", "per_round", "repeats"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1.")
        check_choice("definition", self.definition, DEFINITIONS)


def most_uncertain_tokens(
    tree: RolloutTree,
    _signals: Signals,
    settings: EntropyBranching,
    _rng: np.random.Generator,
) -> list[Branch]:
    """Branches before the tokens of the highest entropy, at points that have none yet; of equal ones the first.

    Raises:
        DataError: `shannon` without entropies.
    """

    def pick(root: int, room: int) -> list[Branch]:
        points = [point for point in points_of(tree, root, "tokens") if not has_branch(tree, point)]
        scores = np.array([_uncertainty(tree, point, settings.definition) for point in points])
        chosen = np.argsort(-scores, kind="stable")[: -(-room // settings.repeats)]
        counts = [min(settings.repeats, room - rank * settings.repeats) for rank in range(len(chosen))]
        return [
            Branch(points[index].node, points[index].position, count)
            for index, count in zip(chosen, counts, strict=True)
        ]

    return next_variations(tree, settings.roots, settings.variations, settings.per_round, pick)


def _uncertainty(tree: RolloutTree, point: Point, definition: str) -> float:
    node = tree[point.node]
    if definition == "surprisal":
        return -float(node.logprobs[point.position])
    if node.entropies is None:
        raise DataError(
            f"node {point.node} has no entropies; ask the sampler for them, or branch by definition='surprisal'."
        )
    return float(node.entropies[point.position])
