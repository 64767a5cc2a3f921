"""In which order row segments are scanned, and which of them side by side as one padded batch.

NumPy only. A segment is scanned after the one that it continues. Segments are taken by height (how many segments lie
below), not by depth: a chain of turns with side branches then takes one small call per turn of the chain, and one
call for all branches together. Segments of one height share a padded batch where padding costs less than another call.
"""

from dataclasses import dataclass

import numpy as np

from treewise.nn.recurrent.segments import RowSegments, heights

# Padded tokens that cost as much as one more call of a scan.
CALL_TOKENS = 32
NOTHING, GATEWAY = -1, -2


@dataclass(frozen=True, slots=True)
class Source:
    """Initial states of some segments of a batch that come from one source.

    batch: index of the batch that ended with them, `GATEWAY`, or `NOTHING` (zeros). index: [n] int64 in its states.
    """

    batch: int
    index: np.ndarray


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments scanned side by side, padded on the right to `length` tokens.

    segments: [B] int64, ordered as the sources give their initial states. wants_states: whether end states are needed.
    """

    segments: np.ndarray
    length: int
    wants_states: bool
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Batches in order, and the padded axis that they share.

    order: [sum of B * length] int64, the row at each padded position, -1 for padding. position: [T] int64, the
    inverse. cuts: (batch, index in it) of each cut segment. entering: segments whose state comes from a gateway.
    """

    batches: tuple[SegmentBatch, ...]
    order: np.ndarray
    position: np.ndarray
    cuts: tuple[tuple[int, int], ...]
    entering: np.ndarray

    @property
    def sizes(self) -> list[int]:
        return [len(batch.segments) * batch.length for batch in self.batches]


def make_schedule(segments: RowSegments) -> Schedule:
    """Batches by falling height; parents come before children."""
    height = heights(segments.parent)
    entering = np.flatnonzero(segments.gateway >= 0)
    is_read = np.zeros(segments.num_segments, dtype=bool)
    is_read[segments.parent[segments.parent >= 0]] = True
    is_read[segments.cuts] = True
    batch_of, index_of = np.full(segments.num_segments, NOTHING), np.zeros(segments.num_segments, dtype=np.int64)
    batches: list[SegmentBatch] = []
    by_height = np.argsort(-height, kind="stable")
    for level in np.split(by_height, np.flatnonzero(np.diff(height[by_height])) + 1):
        for wants_states in (True, False):
            for chosen in _side_by_side(level[is_read[level] == wants_states], segments.length):
                batch = _batch(chosen, segments, batch_of, index_of, entering, wants_states)
                batch_of[batch.segments], index_of[batch.segments] = len(batches), np.arange(len(chosen))
                batches.append(batch)
    order, position = _padded_axis(batches, segments)
    cuts = tuple(zip(batch_of[segments.cuts].tolist(), index_of[segments.cuts].tolist(), strict=True))
    return Schedule(tuple(batches), order, position, cuts, entering)


def _batch(
    chosen: np.ndarray,
    segments: RowSegments,
    batch_of: np.ndarray,
    index_of: np.ndarray,
    entering: np.ndarray,
    wants_states: bool,
) -> SegmentBatch:
    parent = segments.parent[chosen]
    source = np.where(parent >= 0, batch_of[parent], np.where(segments.gateway[chosen] >= 0, GATEWAY, NOTHING))
    index = np.where(parent >= 0, index_of[parent], np.searchsorted(entering, chosen))
    by_source = np.argsort(source, kind="stable")
    chosen, source, index = chosen[by_source], source[by_source], index[by_source]
    sources = tuple(Source(int(each), index[source == each]) for each in np.unique(source))
    return SegmentBatch(chosen, int(segments.length[chosen].max()), wants_states, sources)


def _side_by_side(members: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
    """Splits segments into batches so that padded tokens plus calls cost least.

    Only batches of neighbouring lengths are tried, cut where the length passes a power of two.
    """
    if not len(members):
        return []
    members = members[np.argsort(length[members], kind="stable")]
    sizes = length[members]
    bounds = np.append(np.flatnonzero(np.diff(np.ceil(np.log2(sizes)), prepend=-1)), len(members)).tolist()
    # cheapest[j]: cost of everything before bounds[j], and where its last batch begins
    cheapest: list[tuple[int, int]] = [(0, 0)]
    for last in range(1, len(bounds)):
        longest = int(sizes[bounds[last] - 1])
        costs = [
            (cheapest[first][0] + CALL_TOKENS + (bounds[last] - bounds[first]) * longest, first)
            for first in range(last)
        ]
        cheapest.append(min(costs))
    batches, last = [], len(bounds) - 1
    while last > 0:
        first = cheapest[last][1]
        batches.append(members[bounds[first] : bounds[last]])
        last = first
    return batches[::-1]


def _padded_axis(batches: list[SegmentBatch], segments: RowSegments) -> tuple[np.ndarray, np.ndarray]:
    parts = []
    for batch in batches:
        step = np.arange(batch.length)
        rows = segments.start[batch.segments, None] + step
        parts.append(np.where(step < segments.length[batch.segments, None], rows, -1).ravel())
    order = np.concatenate(parts)
    position = np.empty(int(segments.end[-1]), dtype=np.int64)
    is_row = order >= 0
    position[order[is_row]] = np.flatnonzero(is_row)
    return order, position
