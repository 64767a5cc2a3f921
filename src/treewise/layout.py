"""What one micro-batch hands to a model: tokens, positions, the two interval vectors of its mask, and its edges.

Letters: T own tokens, G gateway tokens, K = G + T keys (gateway keys first), E edges.
"""

from dataclasses import dataclass

import numpy as np

from treewise.forest import Forest
from treewise.planner import Plan


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrays of one micro-batch.

    positions: [T] int64 tree positions, ascending. token_ids: [T] int32. depth: [T] int32 position ids.
    lo, hi: [K] int32; query q sees key k exactly when lo[k] <= q < hi[k]. key_depth: [K] int32.
    gateway: for each open micro-batch read, its index and which of its tokens are read ([g] int64, ascending).
    """

    positions: np.ndarray
    token_ids: np.ndarray
    depth: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    key_depth: np.ndarray
    gateway: tuple[tuple[int, np.ndarray], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_gateway_tokens(self) -> int:
        return len(self.lo) - len(self.positions)


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges `source -> target` that leave a micro-batch's tokens, ordered by source.

    source: [E] int64 own row whose hidden state predicts. target: [E] int64 tree position of the predicted token,
    which at a cut belongs to another micro-batch.
    """

    source: np.ndarray
    target: np.ndarray


def lay_out(plan: Plan, number: int) -> Layout:
    """The arrays of micro-batch `number` of a plan."""
    forest, batch = plan.forest, plan.micro_batches[number]
    positions = batch.positions()
    ranges = batch.ranges
    offsets = np.concatenate([[0], np.cumsum(ranges[:, 1] - ranges[:, 0])])
    own_hi = _rows_before(forest.subtree_end[positions], ranges, offsets)
    lo, hi, depth = [np.arange(len(positions))], [own_hi], [forest.depth[positions]]
    gateway: list[tuple[int, np.ndarray]] = []
    for above in reversed(plan.ancestors[number]):
        tokens = plan.micro_batches[above].positions()
        first = _rows_before(tokens, ranges, offsets)
        last = _rows_before(forest.subtree_end[tokens], ranges, offsets)
        read = np.flatnonzero(first < last)
        if len(read):
            gateway.insert(0, (above, read))
            lo.insert(0, first[read])
            hi.insert(0, last[read])
            depth.insert(0, forest.depth[tokens[read]])
    return Layout(
        positions=positions,
        token_ids=forest.token_ids[positions],
        depth=forest.depth[positions],
        lo=np.concatenate(lo).astype(np.int32),
        hi=np.concatenate(hi).astype(np.int32),
        key_depth=np.concatenate(depth),
        gateway=tuple(gateway),
    )


def edges_of(forest: Forest, positions: np.ndarray, is_needed: np.ndarray) -> Edges:
    """The edges from a micro-batch's tokens (ascending positions) to the targets marked in `is_needed` ([T] bool).

    A token's first child is the token after it; every further child of a fork begins a segment elsewhere.
    """
    following = positions + 1
    has_next = following < forest.num_tokens
    has_next[has_next] = forest.parent[following[has_next]] == positions[has_next]
    target = following[has_next]
    source = np.flatnonzero(has_next)
    starts = forest.segments.start
    branches = starts[(forest.parent[starts] >= 0) & (forest.parent[starts] != starts - 1)]
    above = forest.parent[branches]
    row = np.searchsorted(positions, above)
    inside = row < len(positions)
    inside[inside] = positions[row[inside]] == above[inside]
    source, target = np.concatenate([source, row[inside]]), np.concatenate([target, branches[inside]])
    keep = is_needed[target]
    source, target = source[keep], target[keep]
    order = np.argsort(source, kind="stable")
    return Edges(source[order], target[order])


def _rows_before(positions: np.ndarray, ranges: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """How many own rows lie before each tree position."""
    index = np.searchsorted(ranges[:, 1], positions, side="right")
    inside = index < len(ranges)
    count = np.full(len(positions), offsets[-1])
    into = np.maximum(positions[inside] - ranges[index[inside], 0], 0)
    count[inside] = offsets[index[inside]] + into
    return count
