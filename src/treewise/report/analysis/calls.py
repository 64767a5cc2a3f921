"""The calls of a model in trajectories: what one row per call would hold.

A trajectory holds several where turns are merged, as in rows of `treewise record`, of `treewise rl --agent` and of
chats that are read with `thinking: keep`. Each run of its trained tokens is the answer to one; two are of one answer
where the sampler drew them in one draw.
"""

from dataclasses import dataclass

import numpy as np

from treewise.advantages import turns_of
from treewise.base.shapes import Int
from treewise.nn.flops import flat_head_rows
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class CalledRows:
    """ends: tree position of the last token of each call's row. num_trained: trained tokens in all of these rows, each
    of which trains its own answer.
    """

    ends: Int[np.ndarray, " C"]
    num_trained: int


def calls_of(forest: Forest) -> CalledRows:
    """The calls of a forest. What follows the last answer of a trajectory belongs to it. An answer that several rows of
    one rollout train was asked for once.
    """
    answers = [_answers(item) for item in forest.trajectories]
    if max(map(len, answers)) == 1:
        return CalledRows(forest.ends, flat_head_rows(forest))
    found: dict[tuple[int, int, int], int] = {}  # by rollout, tree position and draw: equal answers may be two
    for index, (rollout, own) in enumerate(zip(forest.rollout_of_trajectory.tolist(), answers, strict=True)):
        path = forest.paths[index]
        for number, (end, draw, num_trained) in enumerate(own, 1):
            last = path[end - 1] if number < len(own) else path[-1]
            found[rollout, int(last), draw] = num_trained
    return CalledRows(np.array([end for _, end, _ in found], dtype=np.int64), sum(found.values()))


def _answers(item: Trajectory) -> list[tuple[int, int, int]]:
    """The end of each answer, the draw that it began in (-1: none is known), and its trained tokens."""
    found = list[tuple[int, int, int]]()
    last = -1
    for start, end in turns_of(item):
        first, num_trained = -1 if item.draws is None else int(item.draws[start]), end - start
        if found and first >= 0 and first == last:  # tokens of an answer that are not trained
            _, first, before = found.pop()
            num_trained += before
        found.append((end, first, num_trained))
        last = -1 if item.draws is None else int(item.draws[end - 1])
    return found
