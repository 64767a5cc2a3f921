"""From token sequences to the segments of a forest in depth-first order.

Sequences are sorted, and the longest common prefix of each with its predecessor gives its new tokens: the
new tokens of the sorted sequences, one after the other, are the prefix tree in depth-first pre-order. Nothing here
loops over tokens in Python; loops run over sequences or segments.

The order of siblings is free, so the child with the most tokens is laid first. The path to any token then consists
of at most log2(segments) + 1 contiguous runs (heavy-light decomposition; Sleator and Tarjan, 1983), which lets
attention read the keys of a path without gathering them one by one.

Letters: N sequences, S segments, T tree tokens, F flat tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treewise.base.arrays import Ints


def concatenated_ranges(starts: Ints, lengths: Ints) -> Ints:
    """[sum of lengths] of the dtype of `starts`: `starts[i] .. starts[i] + lengths[i]`, one range after the other."""
    shifts = (starts - (np.cumsum(lengths) - lengths)).astype(starts.dtype)
    return np.repeat(shifts, lengths) + np.arange(int(lengths.sum()), dtype=starts.dtype)


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of a forest in depth-first pre-order, and where its trajectories end.

    start: [S] first tree position.
    parent: [S] index of the parent segment, -1 for a root.
    depth: [S] depth of the first token.
    subtree_end: [S] one past the last tree position below the segment.
    end_segment: [N] segment in which each trajectory ends, always at its last token.
    source: [S] index of the first token in what the segments were laid out from (flat sequences, nodes, a forest); its
        other tokens follow there.
    num_tokens: T.
    """

    start: Ints
    parent: Ints
    depth: Ints
    subtree_end: Ints
    end_segment: Ints
    source: Ints
    num_tokens: int

    @property
    def lengths(self) -> Ints:
        """[S] tokens of each: the distance to the next start, or to the end."""
        return np.diff(self.start, append=self.num_tokens)

    @property
    def path_lengths(self) -> Ints:
        """[N] int64, tokens of each trajectory."""
        return self.depth[self.end_segment] + self.lengths[self.end_segment]

    @property
    def token_source(self) -> Ints:
        """[T] int64, index of each tree token in what the segments were laid out from."""
        return concatenated_ranges(self.source, self.lengths)

    @classmethod
    def concatenate(cls, parts: Sequence["Segments"]) -> "Segments":
        """Segments side by side, as those of one forest; `source` counts in the concatenation."""
        num_tokens = np.cumsum([0, *(part.num_tokens for part in parts)])
        num_segments = np.cumsum([0, *(len(part.start) for part in parts)])

        def joined(name: str, shifts: Ints) -> Ints:
            return np.concatenate([getattr(part, name) + shift for part, shift in zip(parts, shifts[:-1], strict=True)])

        start = joined("start", num_tokens)
        is_root = np.concatenate([part.parent < 0 for part in parts])
        return cls(
            start=start,
            parent=np.where(is_root, -1, joined("parent", num_segments)),
            depth=np.concatenate([part.depth for part in parts]),
            subtree_end=joined("subtree_end", num_tokens),
            end_segment=joined("end_segment", num_segments),
            source=start,
            num_tokens=int(num_tokens[-1]),
        )


def in_order(flat_ids: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """The order of N sequences by their tokens ([N]), and what each shares with the one before it in that order ([N]).

    flat_ids and offsets: see `merge_sequences`.
    """
    # Big-endian bytes compare as the non-negative integers do, so memcmp does the work.
    blob = memoryview(flat_ids.astype(">i4").tobytes())
    bounds: list[int] = (offsets * 4).tolist()
    keys = [bytes(blob[low:high]) for low, high in pairwise(bounds)]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    shared = np.zeros(len(order), dtype=np.int64)
    starts: list[int] = offsets[:-1][order].tolist()
    lengths: Ints = np.diff(offsets)[order]
    for row, limit in enumerate(np.minimum(lengths[:-1], lengths[1:]).tolist(), start=1):
        if not limit:
            continue
        left, right = starts[row - 1], starts[row]
        differs = flat_ids[left : left + limit] != flat_ids[right : right + limit]
        first = int(differs.argmax())
        shared[row] = first if differs[first] else limit
    return order, shared


def common_prefix(one: Ints, two: Ints) -> int:
    """Tokens with which both begin."""
    length = min(len(one), len(two))
    differs = np.flatnonzero(one[:length] != two[:length])
    return int(differs[0]) if len(differs) else length


def merge_sequences(flat_ids: Ints, offsets: Ints) -> Segments:
    """Merges the shared prefixes of N sequences, token by token.

    flat_ids: [F] int32, the sequences one after the other. offsets: [N + 1] where each begins.
    """
    order, lcp = in_order(flat_ids, offsets)
    begins: Ints = offsets[:-1][order]
    lengths: Ints = np.diff(offsets)[order]
    num_new = lengths - lcp
    run_start = np.concatenate([[0], np.cumsum(num_new)])
    num_tokens = int(run_start[-1])
    run_start = run_start[:-1]
    owner, _ = _neighbours(lcp)
    # The token before a run's first one; for a repeated sequence, which has no new token, its own last token.
    before = np.where(lcp > 0, run_start[owner] + lcp - 1 - lcp[owner], -1)
    has_new = num_new > 0
    start = np.unique(np.concatenate([run_start[has_new], before[has_new] + 1]))
    start = start[start < num_tokens]
    run_of_segment = np.flatnonzero(has_new)[np.searchsorted(run_start[has_new], start, side="right") - 1]
    depth = lcp[run_of_segment] + start - run_start[run_of_segment]
    is_run_start = start == run_start[run_of_segment]
    parent_token = np.where(is_run_start, before[run_of_segment], start - 1)
    parent = np.searchsorted(start, parent_token, side="right") - 1
    end_token = np.where(has_new, run_start + num_new - 1, before)
    end_segment = np.empty(len(order), dtype=np.int64)
    end_segment[order] = np.searchsorted(start, end_token, side="right") - 1
    source = begins[run_of_segment] + depth
    return heavy_first(start, parent, depth, end_segment, source, num_tokens)


def restrict(segments: Segments, trajectory_index: Ints) -> Segments:
    """The segments on the paths of some trajectories ([n] int64, indices into `end_segment`), laid out anew.

    `token_source` is the tree position that each token had before.
    """
    ends = np.bincount(segments.end_segment[trajectory_index], minlength=len(segments.start))
    total = np.concatenate([[0], np.cumsum(ends)])
    after = np.searchsorted(segments.start, segments.subtree_end)
    is_used = total[after] > total[:-1]
    rank = np.cumsum(is_used) - 1
    length = segments.lengths[is_used]
    parent = segments.parent[is_used]
    return heavy_first(
        start=np.cumsum(length) - length,
        parent=np.where(parent >= 0, rank[parent], -1),
        depth=segments.depth[is_used],
        end_segment=rank[segments.end_segment[trajectory_index]],
        source=segments.start[is_used],
        num_tokens=int(length.sum()),
    )


def path_index(segments: Segments) -> Ints:
    """[F] int64, tree positions of every trajectory, one after the other."""
    length = segments.lengths
    level = [0] * len(segments.parent)  # segments above each; parents come first
    parents: list[int] = segments.parent.tolist()
    for row, above in enumerate(parents):
        if above >= 0:
            level[row] = level[above] + 1
    num_links = np.array(level, dtype=np.int64)[segments.end_segment] + 1
    link_offsets = np.cumsum(num_links) - num_links
    chain = np.empty(int(num_links.sum()), dtype=np.int64)
    current, slot = segments.end_segment.copy(), link_offsets + num_links - 1
    while len(current):
        chain[slot] = current
        current = segments.parent[current]
        alive = current >= 0
        current, slot = current[alive], slot[alive] - 1
    return concatenated_ranges(segments.start[chain], length[chain])


def path_to(segments: Segments, segment: int) -> Ints:
    """Tree positions of the path from the root to the last token of one segment."""
    chain = []
    while segment >= 0:
        chain.append(segment)
        segment = int(segments.parent[segment])
    links = np.array(chain[::-1])
    ends = np.append(segments.start, segments.num_tokens)
    return concatenated_ranges(segments.start[links], ends[links + 1] - segments.start[links])


def _neighbours(values: Ints) -> tuple[Ints, Ints]:
    """For each row the nearest earlier row with a smaller value (itself where there is none), and the nearest later row
    whose value is at most as large (the number of rows where there is none).
    """
    items: list[int] = values.tolist()
    before, after = list(range(len(items))), [len(items)] * len(items)
    stack: list[int] = []  # rows whose later neighbour is still to come; their values ascend
    for row, value in enumerate(items):
        while stack and items[stack[-1]] >= value:
            after[stack.pop()] = row
        if stack:
            before[row] = stack[-1]
        stack.append(row)
    return np.array(before, dtype=np.int64), np.array(after, dtype=np.int64)


def heavy_first(
    start: Ints,
    parent: Ints,
    depth: Ints,
    end_segment: Ints,
    source: Ints,
    num_tokens: int,
) -> Segments:
    """Moves the heaviest child of every segment in front of its siblings, and fills in the subtree ends.

    A move shifts whole subtrees, so all new positions come from one cumulative sum over per-segment shifts.
    """
    num_segments = len(start)
    bounds = np.append(start, num_tokens)
    _, after = _neighbours(depth)  # the next segment that is not below it
    size = bounds[after] - start
    # The child with the most tokens, of equals the first; -1 for a leaf. Later assignments win, so it comes last.
    heavy = np.full(num_segments, -1, dtype=np.int64)
    children = np.flatnonzero(parent >= 0)
    by_weight = children[np.lexsort((-children, size[children]))]
    heavy[parent[by_weight]] = by_weight
    is_heavy = np.zeros(num_segments, dtype=bool)
    is_heavy[heavy[heavy >= 0]] = True
    inner = parent >= 0
    chosen = np.where(inner, heavy[parent], -1)
    first_child_position = np.where(inner, bounds[parent + 1], 0)
    shift = np.zeros(num_segments, dtype=np.int64)
    shift[is_heavy] = first_child_position[is_heavy] - start[is_heavy]
    before_heavy = inner & ~is_heavy & (start < start[chosen])
    shift[before_heavy] = size[chosen[before_heavy]]
    total = np.zeros(num_segments + 1, dtype=np.int64)
    np.add.at(total, np.arange(num_segments), shift)
    np.subtract.at(total, after, shift)
    new_start = start + np.cumsum(total[:-1])
    order = np.argsort(new_start, kind="stable")
    rank = np.empty(num_segments, dtype=np.int64)
    rank[order] = np.arange(num_segments)
    start, parent = new_start[order], parent[order]
    return Segments(
        start=start,
        parent=np.where(parent >= 0, rank[parent], -1),
        depth=depth[order],
        subtree_end=start + size[order],
        end_segment=rank[end_segment],
        source=source[order],
        num_tokens=num_tokens,
    )
