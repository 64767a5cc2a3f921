"""The mask of a micro-batch in two vectors, what a layer adds to it, and how kernels that know no mask cover it.

Rows that follow one another down the tree form a chain (a heavy path), which plain causal attention covers whole. The
path above a chain is seen by every row of it: one rectangle, no mask. So `plan_blocks` cuts a micro-batch into row
blocks, each with the keys that all its rows see and a small rest. Chains too short for a call of their own are joined,
with a mask over the few keys that not all of them see. An image whose tokens attend both ways is a block of its own,
whose rows all see all of it. Costs are in query-key pairs.

Letters: T queries, G gateway keys, K = G + T keys (gateway keys first), H query heads, D head size.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import torch

from treewise.nn.platform.tensors import to_device
from treewise.planning.plans import Layout

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")

# Cost of a kernel call beyond its pairs, and the rows below which a call is not cheaper (measured on two CPU cores).
PAIRS_PER_CALL = 4096
MIN_ROWS = 48
# Blocks of layers with windows stay below this many rows, joined chains below so many: of a tile about half is hidden,
# and computed (measured on a CPU: 64 and 96 are alike, 256 takes 1.04 to 1.27 times as long).
MAX_TILE_ROWS = 256
MAX_JOINED_ROWS = 96

Ranges = tuple[tuple[int, int], ...]
_MISSING: Any = object()


@dataclass(eq=False)
class TreeMask:
    """Query q sees key k exactly when `lo[k] <= q < hi[k]`.

    A key is seen from its own row on: `lo[k] = k`. Where images attend both ways (Gemma 3) an image's keys are seen
    from its first row on: `lo[k]` is that row. No fork and no cut is inside an image, so one interval is still enough.

    lo, hi, key_depth: [K] int32 NumPy, kept on the host for planning. `on(device)` gives the tensors. without_window:
    the mask of layers without a window, where it is another one (Gemma 4).
    """

    lo: np.ndarray
    hi: np.ndarray
    key_depth: np.ndarray
    num_queries: int
    without_window: "TreeMask | None" = None
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_layout(
        cls, layout: Layout, rows_before: np.ndarray | None = None, *, only_windows: bool = False
    ) -> "TreeMask":
        """The mask of a micro-batch.

        rows_before: [T] int64, how many rows before its own a key is seen already; 0 but for tokens of images that
        attend both ways. only_windows: they do so in layers with a window alone.
        """
        causal = cls(layout.lo, layout.hi, layout.key_depth, layout.num_tokens)
        if rows_before is not None and rows_before.any():
            lo = layout.lo.copy()
            lo[len(lo) - layout.num_tokens :] -= rows_before.astype(lo.dtype)
            return cls(lo, layout.hi, layout.key_depth, layout.num_tokens, causal if only_windows else None)
        return causal

    @property
    def num_keys(self) -> int:
        return len(self.lo)

    @property
    def num_gateway_keys(self) -> int:
        return len(self.lo) - self.num_queries

    def of_layer(self, rule: "LayerRule") -> "TreeMask":
        """The mask of a layer with this rule."""
        return self if self.without_window is None or rule.window is not None else self.without_window

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`lo`, `hi` and `key_depth` as [K] int32 tensors; the depths of the queries are the last T of `key_depth`."""
        return self.derived(_on_device, device)

    def derived(self, make: "Callable[[TreeMask, *_Arguments], _Result]", *arguments: *_Arguments) -> _Result:
        """`make(self, *arguments)`, computed once per micro-batch and shared by all layers; arguments are hashable."""
        key = (make, *arguments)
        result: _Result = self._derived.get(key, _MISSING)
        if result is _MISSING:
            result = self._derived[key] = make(self, *arguments)
        return result


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What one layer asks of attention beyond the tree.

    window: keys at a distance of `window` tokens or more are hidden. chunk: keys of another chunk of `chunk` depths are
    hidden. softcap: scores become `softcap * tanh(scores / softcap)`. scaling: factor of the scores.
    """

    scaling: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.chunk is None and self.softcap is None


def _on_device(mask: TreeMask, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lo_K, hi_K, depth_K = to_device(np.stack((mask.lo, mask.hi, mask.key_depth)), device, torch.int32).unbind()
    return lo_K, hi_K, depth_K


# -- row blocks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, end) of the queries.

    full: ranges on the key axis that every row sees. rest: ranges on the key axis, own rows last, that need the mask.
    tile: [rows, rest keys] bool, or None where the rest is the block's own rows: in causal order, or, if not is_causal,
    all of them for every row.
    """

    start: int
    end: int
    full: Ranges
    rest: Ranges
    tile: np.ndarray | None
    is_causal: bool


def plan_blocks(mask: TreeMask, window: int | None, chunk: int | None) -> list[Block]:
    """Covers every visible pair exactly once."""
    planner = _Planner(mask, window, chunk)
    drafts: list[_Draft] = []
    for start, end, path in planner.chains():
        alone = planner.draft(start, end, path, is_joined=False)
        if drafts:
            joined = planner.join(drafts[-1], alone)
            if joined is not None:
                drafts[-1] = joined
                continue
        drafts.append(alone)
    return [planner.finish(draft) for draft in drafts]


@dataclass(frozen=True, slots=True)
class _Path:
    """The keys above a row, shallowest first; `gateway`: those of them that gateways hold.

    Their depths are consecutive and their subtrees nested, so the keys that a rule shows are a range, located by
    bisection. is_mixed: the union of several paths, without these properties.
    """

    keys: np.ndarray
    gateway: np.ndarray
    is_mixed: bool = False


@dataclass(frozen=True, slots=True)
class _Draft:
    """A block in planning. `common` path keys are seen by all rows, `partial` ones by some; `cost` in pairs.

    needs_tile: its own square is neither causal nor, for an image that attends both ways (is_image), whole.
    """

    start: int
    end: int
    path: _Path
    needs_tile: bool
    is_image: bool
    common: list[np.ndarray]
    partial: list[np.ndarray]
    cost: float


class _Planner:
    def __init__(self, mask: TreeMask, window: int | None, chunk: int | None) -> None:
        self.mask, self.window, self.chunk = mask, window, chunk
        self.num_gateway = mask.num_gateway_keys
        self.hi = mask.hi.astype(np.int64)
        self.own_hi = self.hi[self.num_gateway :]
        self.depth = mask.key_depth.astype(np.int64)
        self.is_plain = window is None and chunk is None
        # Images that attend both ways, as ranges of rows.
        own_lo = mask.lo[self.num_gateway :].astype(np.int64)
        starts, counts = np.unique(own_lo[own_lo < np.arange(len(own_lo))], return_counts=True)
        self.image_end = dict(zip(starts.tolist(), (starts + counts + 1).tolist(), strict=True))
        self.image_starts = sorted(self.image_end)

    def chains(self) -> Iterator[tuple[int, int, _Path]]:
        """Yields (first row, end row, path above the first row) in order."""
        num_rows = len(self.own_hi)
        leaf = np.flatnonzero(self.own_hi == np.arange(1, num_rows + 1))
        starts = np.concatenate([[0], leaf + 1])[:-1].tolist()
        stack: list[_Chain] = []
        for start, end in zip(starts, (leaf + 1).tolist(), strict=True):
            while stack and self.own_hi[stack[-1].start] <= start:
                stack.pop()
            if stack:
                above = stack[-1]
                # Subtree ends shrink down a chain, so the rows above `start` are its first ones.
                num_above = bisect_left(range(above.start, above.end), -start, key=lambda row: -int(self.own_hi[row]))
                path = above.path_to(above.start + num_above)
            else:
                gateway = slice(0, self.num_gateway)
                keys = np.flatnonzero((self.mask.lo[gateway] <= start) & (start < self.hi[gateway]))
                path = _Path(keys, keys)
            chain = _Chain(start, end, path, self.num_gateway)
            stack.append(chain)
            if self.is_plain and not self.image_starts:
                yield start, end, path
                continue
            for first, last in self._pieces(start, end):
                yield first, last, path if first == start else chain.path_to(first)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """A chain in parts: images by themselves and whole, the rest in ranges that a tile may have, if need be."""
        within = slice(bisect_left(self.image_starts, start), bisect_left(self.image_starts, end))
        first = start
        for image in [*self.image_starts[within], end]:
            step = max(image - first, 1) if self.is_plain else MAX_TILE_ROWS
            for row in range(first, image, step):
                yield row, min(row + step, image)
            if image < end:
                first = self.image_end[image]
                yield image, first

    def draft(self, start: int, end: int, path: _Path, is_joined: bool) -> _Draft:
        rows = self.depth[self.num_gateway + start : self.num_gateway + end]
        shallow, deep = int(rows.min()), int(rows.max())
        if path.is_mixed:
            common, partial = self._split_mixed(path.keys, start, end, shallow, deep)
        else:
            common, partial = self._split(path.keys, end, shallow, deep)
        num_rows, num_common, num_partial = end - start, sum(map(len, common)), sum(map(len, partial))
        # A window or a chunk boundary may fall between rows of one block.
        cuts_square = self.window is not None and deep - shallow >= self.window
        cuts_square |= self.chunk is not None and shallow // self.chunk != deep // self.chunk
        needs_tile = is_joined or num_partial > 0 or cuts_square
        is_image = self.image_end.get(start) == end
        is_causal = not needs_tile and not is_image
        square = num_rows**2 / 2 if is_causal else num_rows * (num_rows + num_partial)
        calls = 1 + (num_common > 0)
        cost = square + max(num_rows, MIN_ROWS) * num_common + PAIRS_PER_CALL * calls
        return _Draft(start, end, path, needs_tile, is_image, common, partial, cost)

    def _split(self, keys: np.ndarray, end: int, shallow: int, deep: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The keys of a path that all rows see, and those that some see: ranges of it."""
        if len(keys) == 0:
            return [], []
        top, seen, first = int(self.depth[keys[0]]), 0, 0
        last = bisect_left(range(len(keys)), 1, key=lambda at: self.hi[keys[at]] < end)  # the first that ends before
        if self.window is not None:
            seen, first = shallow - self.window + 1 - top, deep - self.window + 1 - top
        if self.chunk is not None:
            seen = max(seen, shallow // self.chunk * self.chunk - top)
            first = max(first, deep // self.chunk * self.chunk - top)
            last = min(last, (shallow // self.chunk + 1) * self.chunk - top)
        seen, first, last = (min(max(bound, 0), len(keys)) for bound in (seen, first, last))
        if first >= last:
            return [], [keys[seen:]]
        return [keys[first:last]], [keys[seen:first], keys[last:]]

    def _split_mixed(
        self, path: np.ndarray, start: int, end: int, shallow: int, deep: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        depth = self.depth[path]
        is_common = (self.mask.lo[path] <= start) & (self.hi[path] >= end)
        is_seen = np.ones(len(path), dtype=bool)
        if self.window is not None:
            is_common &= deep - depth < self.window
            is_seen &= shallow - depth < self.window
        if self.chunk is not None:
            same = depth // self.chunk
            is_common &= (same == shallow // self.chunk) & (same == deep // self.chunk)
            is_seen &= (same >= shallow // self.chunk) & (same <= deep // self.chunk)
        return [path[is_common]], [path[is_seen & ~is_common]]

    def join(self, left: _Draft, right: _Draft) -> _Draft | None:
        """One block for two neighbours, or None where two are cheaper."""
        if right.end - left.start > MAX_JOINED_ROWS:
            return None
        path, above = left.path, right.path.gateway
        if len(above) and above is not path.gateway and not np.array_equal(path.gateway, above):
            # Neighbours below different gateways; within one subtree the left path holds all that is above.
            path = _Path(np.union1d(path.keys, above), np.union1d(path.gateway, above), is_mixed=True)
        both = self.draft(left.start, right.end, path, is_joined=True)
        return both if both.cost <= left.cost + right.cost else None

    def finish(self, draft: _Draft) -> Block:
        start, end = draft.start, draft.end
        own = (self.num_gateway + start, self.num_gateway + end)
        partial = np.concatenate([*draft.partial, np.zeros(0, dtype=np.int64)])
        rest = (*_ranges(partial), own)
        tile = self._tile(start, end, partial) if draft.needs_tile else None
        full = _ranges(np.concatenate([*draft.common, np.zeros(0, dtype=np.int64)]))
        return Block(start, end, full, rest, tile, is_causal=tile is None and not draft.is_image)

    def _tile(self, start: int, end: int, partial: np.ndarray) -> np.ndarray:
        keys = np.concatenate([partial, np.arange(start, end) + self.num_gateway])
        rows = np.arange(start, end)[:, None]
        seen = (self.mask.lo[keys] <= rows) & (rows < self.hi[keys])
        row_depth = self.depth[self.num_gateway + start : self.num_gateway + end, None]
        if self.window is not None:
            seen &= row_depth - self.depth[keys] < self.window
        if self.chunk is not None:
            seen &= row_depth // self.chunk == self.depth[keys] // self.chunk
        return seen


class _Chain:
    """Rows that follow one another down the tree, and the path above the first."""

    def __init__(self, start: int, end: int, path: _Path, num_gateway: int) -> None:
        self.start, self.end, self.path, self.num_gateway = start, end, path, num_gateway
        self._down_to_leaf: np.ndarray | None = None

    def path_to(self, row: int) -> _Path:
        """The path above a row of this chain; a view into one array, which all rows share."""
        if self._down_to_leaf is None:
            own = np.arange(self.start, self.end, dtype=np.int64) + self.num_gateway
            self._down_to_leaf = np.concatenate([self.path.keys, own])
        return _Path(self._down_to_leaf[: len(self.path.keys) + row - self.start], self.path.gateway)


def _ranges(keys: np.ndarray) -> Ranges:
    """Ascending keys as contiguous ranges."""
    if len(keys) == 0:
        return ()
    breaks = np.flatnonzero(np.diff(keys) != 1) + 1
    starts = keys[np.concatenate([[0], breaks])]
    ends = keys[np.concatenate([breaks - 1, [len(keys) - 1]])] + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))
