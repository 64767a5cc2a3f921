"""Open tokens of a plan: which micro-batches are above each one, and their tokens as runs without forks.

A forest that fits a budget has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import overload

import numpy as np

from treewise.tree.prefix_merge import Segments, concatenated_ranges


class Ancestors(Sequence[tuple[int, ...]]):
    """For each micro-batch those above it, computed on access: on a path of n trunks they are n * n / 2 in total.

    Trunks are in depth-first order, so most of a path is `parent = index - 1`: it is stored as spans of such indices.
    """

    def __init__(self, parents: list[tuple[int, ...]]) -> None:
        self._parents = parents
        self._first = list(range(len(parents)))  # of the span that ends at each micro-batch
        for index, above in enumerate(parents):
            if above == (index - 1,):
                self._first[index] = self._first[index - 1]

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Ascending spans `[first, end)` of the micro-batches above one."""
        waiting = [-above for above in self._parents[index]]
        heapify(waiting)
        spans: dict[int, int] = {}
        while waiting:
            last = -heappop(waiting)  # in descending order, so a span is entered at its end
            first = self._first[last]
            if first not in spans:
                spans[first] = last + 1
                for above in self._parents[first]:
                    heappush(waiting, -above)
        return sorted(spans.items())

    def __len__(self) -> int:
        return len(self._parents)

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, ...]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return tuple(chain.from_iterable(range(first, end) for first, end in self.spans(index)))


@dataclass(frozen=True, slots=True)
class OpenRuns:
    """Tokens of open micro-batches as runs of neighbouring positions within a segment, in the order of micro-batches.

    A run has no fork inside: everything below any of its tokens is below its last one, so all keys of a run share one
    `hi`.
    start, length: [R] int64 tree positions. end: [R] int64, end of the run's subtree. depth: [R] int64 of the first
    token. batch: [R] int64. row: [R] int64, the first token's row within its micro-batch. bounds: [open + 1] int64,
    where each micro-batch's runs begin.
    """

    start: np.ndarray
    length: np.ndarray
    end: np.ndarray
    depth: np.ndarray
    batch: np.ndarray
    row: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, ranges_of: Sequence[np.ndarray], segments: Segments) -> "OpenRuns":
        """The runs of open micro-batches, from the ranges of each ([R, 2] int64) and the segments of the forest."""
        counts = [len(ranges) for ranges in ranges_of]
        ranges = np.concatenate([np.zeros((0, 2), dtype=np.int64), *ranges_of])
        first = np.searchsorted(segments.start, ranges[:, 0], side="right") - 1
        count = np.searchsorted(segments.start, ranges[:, 1]) - first
        owner = np.repeat(np.arange(len(ranges)), count)
        segment = concatenated_ranges(first, count)
        start = np.maximum(segments.start[segment], ranges[owner, 0])
        stop = np.minimum(np.append(segments.start, segments.num_tokens)[segment + 1], ranges[owner, 1])
        batch = np.repeat(np.arange(len(counts)), counts)[owner]
        bounds = np.searchsorted(batch, np.arange(len(counts) + 1))
        before = np.cumsum(stop - start) - (stop - start)
        return cls(
            start=start,
            length=stop - start,
            end=segments.subtree_end[segment],
            depth=segments.depth[segment] + start - segments.start[segment],
            batch=batch,
            row=before - before[bounds[batch]],
            bounds=bounds,
        )
