"""A tree of the first prompt, before anything is sampled: what sharding is checked and a budget is measured with."""

from collections.abc import Sequence

from treewise.tree.forest import Forest, forest_of
from treewise.tree.trajectory import Trajectory


def first_tree(prompt_ids: Sequence[int]) -> Forest:
    """Of two rollouts of the prompt's own tokens."""
    ids = list(prompt_ids)
    weights = [0.0] * len(ids) + [1.0]
    rows = [[*ids, ids[0]], [*ids, ids[-1] + (ids[0] == ids[-1])]]
    return forest_of(
        [Trajectory(row, weights, advantages=1.0, group=0, reward=1.0, source="the first prompt") for row in rows]
    )
