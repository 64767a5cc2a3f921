"""A tree of the first prompt, before anything is sampled: what sharding is checked and a budget is measured with."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from treewise.tree.trajectory import Trajectory


class FirstTree(Sequence[list[Trajectory]]):
    """A data set of that tree alone, of two rollouts of the prompt's own tokens, made when it is first asked for.

    prompt_ids: gives the prompt of the first training item.
    """

    def __init__(self, prompt_ids: Callable[[], list[int]]) -> None:
        self._prompt_ids = prompt_ids

    @cached_property
    def _tree(self) -> list[Trajectory]:
        ids = self._prompt_ids()
        weights = [0.0] * len(ids) + [1.0]
        rows = [[*ids, ids[0]], [*ids, ids[-1] + (ids[0] == ids[-1])]]
        return [
            Trajectory(row, weights, advantages=1.0, group=0, reward=1.0, source="the first prompt") for row in rows
        ]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return [self._tree][index]
