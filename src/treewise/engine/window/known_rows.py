"""What a window has computed: its rows by their prefixes, and rows of results in memory that grows.

Letters: T tokens of a call's tree.
"""

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

_TOKEN = np.dtype(np.int32)


class KnownRows:
    """The rows of a window, each of whose tokens has a number.

    They are kept in the order of their bytes: the row that shares the longest prefix with a new one is next to it.
    """

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._numbers: list[np.ndarray] = []  # [n] int64

    def copy(self) -> "KnownRows":
        """The rows so far; what is added to one of both is not in the other."""
        other = KnownRows()
        other._rows, other._numbers = self._rows.copy(), self._numbers.copy()
        return other

    def number(self, forest: Forest) -> np.ndarray:
        """[T] int64, the numbers of a tree's tokens, -1 for tokens that are new."""
        numbers = np.full(forest.num_tokens, -1)
        for path in forest.paths:
            known = self._prefix(_bytes_of(forest, path))
            numbers[path[: len(known)]] = known
        return numbers

    def add(self, forest: Forest, numbers: np.ndarray) -> None:
        """The rows of a tree, whose tokens have these numbers ([T] int64)."""
        for path in forest.paths:
            self._add(_bytes_of(forest, path), numbers[path])

    def trajectories(self) -> list[Trajectory]:
        """All rows, none of them the beginning of another."""
        return [Trajectory(np.frombuffer(row, dtype=_TOKEN), source="the window") for row in self._rows]

    def numbers_on(self, forest: Forest) -> np.ndarray:
        """[T] int64, the numbers of the tokens of the tree of `trajectories()`."""
        numbers = np.zeros(forest.num_tokens, dtype=np.int64)
        for path, known in zip(forest.paths, self._numbers, strict=True):
            numbers[path] = known
        return numbers

    def _prefix(self, row: bytes) -> np.ndarray:
        """[n] int64, the numbers of the tokens of the longest known prefix."""
        place, best = bisect_left(self._rows, row), np.zeros(0, dtype=np.int64)
        for index in (place - 1, place):
            if 0 <= index < len(self._rows):
                length = _common_bytes(row, self._rows[index]) // _TOKEN.itemsize
                best = self._numbers[index][:length] if length > len(best) else best
        return best

    def _add(self, row: bytes, numbers: np.ndarray) -> None:
        place = bisect_left(self._rows, row)
        if place < len(self._rows) and self._rows[place].startswith(row):
            return
        if place and row.startswith(self._rows[place - 1]):  # which it replaces, at the same place
            self._rows[place - 1], self._numbers[place - 1] = row, numbers
            return
        self._rows.insert(place, row)
        self._numbers.insert(place, numbers)


class StepCalls:
    """What the calls of a step have in common, whether a window computes them or not.

    num_flat_tokens: of all rows. num_call_tokens: of each call's tree. num_tree_tokens: of the tree of all calls.
    """

    def __init__(self) -> None:
        self._known = KnownRows()
        self.num_flat_tokens = self.num_call_tokens = self.num_tree_tokens = 0

    def add(self, forest: Forest) -> None:
        """One more call."""
        numbers = self._known.number(forest)
        new = numbers < 0
        count = int(new.sum())
        numbers[new] = self.num_tree_tokens + np.arange(count)
        self._known.add(forest, numbers)
        self.num_flat_tokens += forest.num_flat_tokens
        self.num_call_tokens += forest.num_tokens
        self.num_tree_tokens += count


def merged(forest: Forest) -> tuple[Forest, np.ndarray]:
    """The tree in which equal prefixes are one, also of rows that were given as trees of their own; and where each
    token stands in it ([T] int64)."""
    edges = np.stack([forest.parent, forest.token_ids], axis=1)
    if len(np.unique(edges, axis=0)) == forest.num_tokens:
        return forest, np.arange(forest.num_tokens)
    whole = Forest.from_trajectories([Trajectory(item.token_ids) for item in forest.trajectories])
    places = np.zeros(forest.num_tokens, dtype=np.int64)
    for path, own in zip(forest.paths, whole.paths, strict=True):
        places[path] = own
    return whole, places


def _bytes_of(forest: Forest, path: np.ndarray) -> bytes:
    return forest.token_ids[path].astype(_TOKEN, copy=False).tobytes()


def _common_bytes(one: bytes, other: bytes) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def lengthened(rows: Tensor, size: int) -> Tensor:
    """[size, ...] rows: the first ones, or all and zeros."""
    if len(rows) >= size:
        return rows[:size]
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


class GrowingRows:
    """[n, ...] rows that are appended, in memory that doubles."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.num_rows = 0

    @property
    def rows(self) -> Tensor:
        """All rows so far; there has to be one."""
        assert self._memory is not None
        return self._memory[: self.num_rows]

    @property
    def capacity(self) -> int:
        """Rows that there is memory for."""
        return 0 if self._memory is None else len(self._memory)

    def append(self, rows: Tensor) -> None:
        end = self.num_rows + len(rows)
        if self._memory is None or end > len(self._memory):
            larger = rows.new_empty(max(end, 2 * self.num_rows), *rows.shape[1:])
            if self._memory is not None:
                larger[: self.num_rows] = self.rows
            self._memory = larger
        self._memory[self.num_rows : end] = rows.detach()
        self.num_rows = end
