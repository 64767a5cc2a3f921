"""In which order row segments are scanned, and which of them side by side as one padded batch.

NumPy only. A segment is scanned after the one that it continues. Segments are taken by height (how many segments lie
below), not by depth: a chain of turns with side branches then takes one small call per turn for the chain, and one
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
    """Initial states of some segments of a group that come from one place.

    group: the group that ended with them, `GATEWAY`, or `NOTHING` (zeros). index: [n] int64, which of its states.
    """

    group: int
    index: np.ndarray


@dataclass(frozen=True, slots=True)
class Group:
    """Segments scanned side by side, padded on the right to `length` tokens.

    segments: [B] int64, ordered as the sources give their initial states. wants_states: whether end states are needed.
    """

    segments: np.ndarray
    length: int
    wants_states: bool
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Groups in order, and the padded axis that they share.

    order: [sum of B * length] int64, the row at each padded place, -1 for padding. place: [T] int64, the padded place
    of each row. cuts: (group, index in it) of each cut segment. entering: segments whose state comes from a gateway.
    """

    groups: tuple[Group, ...]
    order: np.ndarray
    place: np.ndarray
    cuts: tuple[tuple[int, int], ...]
    entering: np.ndarray

    @property
    def sizes(self) -> list[int]:
        return [len(group.segments) * group.length for group in self.groups]


def make_schedule(segments: RowSegments) -> Schedule:
    """Groups by falling height; parents come before children."""
    height = heights(segments.parent)
    entering = np.flatnonzero(segments.gateway >= 0)
    is_read = np.zeros(segments.num_segments, dtype=bool)
    is_read[segments.parent[segments.parent >= 0]] = True
    is_read[segments.cuts] = True
    group_of, index_of = np.full(segments.num_segments, NOTHING), np.zeros(segments.num_segments, dtype=np.int64)
    groups: list[Group] = []
    by_height = np.argsort(-height, kind="stable")
    for level in np.split(by_height, np.flatnonzero(np.diff(height[by_height])) + 1):
        for wants_states in (True, False):
            for chosen in _side_by_side(level[is_read[level] == wants_states], segments.length):
                group = _group(chosen, segments, group_of, index_of, entering, wants_states)
                group_of[group.segments], index_of[group.segments] = len(groups), np.arange(len(chosen))
                groups.append(group)
    order, place = _padded_axis(groups, segments)
    cuts = tuple(zip(group_of[segments.cuts].tolist(), index_of[segments.cuts].tolist(), strict=True))
    return Schedule(tuple(groups), order, place, cuts, entering)


def _group(
    chosen: np.ndarray,
    segments: RowSegments,
    group_of: np.ndarray,
    index_of: np.ndarray,
    entering: np.ndarray,
    wants_states: bool,
) -> Group:
    parent = segments.parent[chosen]
    source = np.where(parent >= 0, group_of[parent], np.where(segments.gateway[chosen] >= 0, GATEWAY, NOTHING))
    index = np.where(parent >= 0, index_of[parent], np.searchsorted(entering, chosen))
    by_source = np.argsort(source, kind="stable")
    chosen, source, index = chosen[by_source], source[by_source], index[by_source]
    sources = tuple(Source(int(each), index[source == each]) for each in np.unique(source))
    return Group(chosen, int(segments.length[chosen].max()), wants_states, sources)


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


def _padded_axis(groups: list[Group], segments: RowSegments) -> tuple[np.ndarray, np.ndarray]:
    parts = []
    for group in groups:
        step = np.arange(group.length)
        rows = segments.start[group.segments, None] + step
        parts.append(np.where(step < segments.length[group.segments, None], rows, -1).ravel())
    order = np.concatenate(parts)
    place = np.empty(int(segments.end[-1]), dtype=np.int64)
    is_row = order >= 0
    place[order[is_row]] = np.flatnonzero(is_row)
    return order, place
