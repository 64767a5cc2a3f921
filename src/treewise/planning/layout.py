"""The arrays of one micro-batch: tokens, positions, the two interval vectors of its mask, and its edges.

Letters: T own tokens, G gateway tokens, K = G + T keys (gateway keys first), E edges.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treewise.planning.planner import Plan
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import concatenated_ranges


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrays of one micro-batch.

    positions: [T] int64 tree positions, ascending. token_ids: [T] int32. depth: [T] int32 position ids.
    lo, hi: [K] int32; query q sees key k exactly when lo[k] <= q < hi[k]. key_depth: [K] int32.
    gateway_batches: [A] int64, the open micro-batches that are read, ascending. gateway_rows: [G] int64, rows of the
    tokens that are read. gateway_bounds: [A + 1] int64, where the rows of each micro-batch begin.
    """

    positions: np.ndarray
    token_ids: np.ndarray
    depth: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    key_depth: np.ndarray
    gateway_batches: np.ndarray
    gateway_rows: np.ndarray
    gateway_bounds: np.ndarray

    @property
    def gateway(self) -> list[tuple[int, np.ndarray]]:
        """For each open micro-batch that is read, its index and the rows that are read ([g] int64, ascending)."""
        bounds = self.gateway_bounds.tolist()
        return [
            (above, self.gateway_rows[low:high])
            for above, (low, high) in zip(self.gateway_batches.tolist(), pairwise(bounds), strict=True)
        ]

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges `source -> target` that leave a micro-batch's tokens, ordered by source.

    source: [E] int64 own row whose hidden state predicts. target: [E] int64 tree position of the predicted token,
    which at a cut belongs to another micro-batch.
    """

    source: np.ndarray
    target: np.ndarray


def lay_out(plan: Plan, micro_batch: int) -> Layout:
    """The arrays of micro-batch `micro_batch` of a plan.

    Gateway tokens are computed per run, not per token: all tokens of a run without forks are seen by the same queries.
    """
    forest, ranges = plan.forest, plan.micro_batches[micro_batch].ranges
    if plan.is_whole:
        own, none = np.arange(forest.num_tokens), np.zeros(0, dtype=np.int64)
        seen = own.astype(np.int32), forest.subtree_end.astype(np.int32), forest.depth
        return Layout(own, forest.token_ids, forest.depth, *seen, none, none, np.zeros(1, dtype=np.int64))
    positions = plan.micro_batches[micro_batch].positions()
    offsets = np.concatenate([[0], np.cumsum(ranges[:, 1] - ranges[:, 0])])
    runs = plan.open_runs
    spans = [np.arange(runs.bounds[first], runs.bounds[end]) for first, end in plan.ancestors.spans(micro_batch)]
    above = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
    first, last = (_rows_before(bound[above], ranges, offsets) for bound in (runs.start, runs.end))
    is_read = first < last
    above, first, last = above[is_read], first[is_read], last[is_read]
    length, batch = runs.length[above], runs.batch[above]
    begins = np.flatnonzero(np.diff(batch, prepend=-1))
    own_hi = _rows_before(forest.subtree_end[positions], ranges, offsets)
    own_depth = forest.depth[positions]
    return Layout(
        positions=positions,
        token_ids=forest.token_ids[positions],
        depth=own_depth,
        lo=np.concatenate([np.repeat(first.astype(np.int32), length), np.arange(len(positions), dtype=np.int32)]),
        hi=np.concatenate([np.repeat(last.astype(np.int32), length), own_hi.astype(np.int32)]),
        key_depth=np.concatenate([concatenated_ranges(runs.depth[above].astype(np.int32), length), own_depth]),
        gateway_batches=batch[begins],
        gateway_rows=concatenated_ranges(runs.row[above], length),
        gateway_bounds=np.append((np.cumsum(length) - length)[begins], length.sum()),
    )


def edges_of(forest: Forest, positions: np.ndarray, is_needed: np.ndarray) -> Edges:
    """The edges from a micro-batch's tokens to the targets marked in `is_needed`.

    positions: [T] int64 tree positions of the micro-batch, ascending. is_needed: [tree tokens] bool.

    A token's first child is the token after it; every further child of a fork begins a segment elsewhere.
    """
    following = positions + 1
    has_next = following < forest.num_tokens
    has_next[has_next] = forest.parent[following[has_next]] == positions[has_next]
    target = following[has_next]
    source = np.flatnonzero(has_next)
    above, branches = forest.branches
    first = np.searchsorted(above, positions)
    count = np.searchsorted(above, positions, side="right") - first
    row = np.repeat(np.arange(len(positions)), count)
    branch = branches[concatenated_ranges(first, count)]
    source, target = np.concatenate([source, row]), np.concatenate([target, branch])
    keep = is_needed[target]
    source, target = source[keep], target[keep]
    order = np.argsort(source, kind="stable")
    return Edges(source[order], target[order])


def _rows_before(positions: np.ndarray, ranges: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[n] int64, number of rows of this micro-batch before each tree position ([n] int64)."""
    index = np.searchsorted(ranges[:, 1], positions, side="right")
    inside = index < len(ranges)
    count = np.full(len(positions), offsets[-1])
    into = np.maximum(positions[inside] - ranges[index[inside], 0], 0)
    count[inside] = offsets[index[inside]] + into
    return count
