"""A plan: micro-batches of a forest and the order in which they run; and the arrays of each of them.

The arrays are tokens, positions, and the two interval vectors of its mask.

Letters: T own tokens, G gateway tokens, K = G + T keys (gateway keys first).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from treewise.base.progress import tell_progress
from treewise.errors import bytes_as_text, num
from treewise.planning.open_tokens import Ancestors, OpenRuns
from treewise.planning.partition import FORWARD_FRACTION, TOKENS_PER_LAUNCH
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import concatenated_ranges

FORWARD = "forward"  # no graph; leaves a gateway
HOLD = "hold"  # with a graph that is kept; leaves a gateway
TRAIN = "train"  # forward with a graph and backward at once
BACKWARD = "backward"  # backward of a held micro-batch
# Of the work of a forward and backward.
_SHARES = {FORWARD: FORWARD_FRACTION, HOLD: FORWARD_FRACTION, TRAIN: 1.0, BACKWARD: 1 - FORWARD_FRACTION}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens that one forward computes.

    ranges: [R, 2] int64, tree positions `[start, end)`, ascending. parents: indices of the open micro-batches that
    contain the parents of its tokens. is_open: others read its gateway. is_held: its graph is kept while they run.
    """

    ranges: np.ndarray
    parents: tuple[int, ...]
    is_open: bool
    is_held: bool

    @property
    def num_tokens(self) -> int:
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    def positions(self) -> np.ndarray:
        """[T] int64 tree positions, ascending."""
        return concatenated_ranges(self.ranges[:, 0], self.ranges[:, 1] - self.ranges[:, 0])


@dataclass(frozen=True, slots=True)
class Pass:
    """One entry of a schedule: an action (`forward`, `hold`, `train`, `backward`) and the index of a micro-batch."""

    action: str
    micro_batch: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Micro-batches of a forest and their schedule. `max_tokens` is None where one micro-batch takes all.

    is_whole: there is a single micro-batch, so that autograd alone computes the gradients.
    """

    forest: Forest
    max_tokens: int | None
    micro_batches: tuple[MicroBatch, ...]
    schedule: tuple[Pass, ...]
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_whole", len(self.micro_batches) == 1)

    @classmethod
    def whole(cls, forest: Forest, max_tokens: int | None) -> "Plan":
        """The plan of a forest that fits: one micro-batch."""
        everything = MicroBatch(np.array([[0, forest.num_tokens]]), (), is_open=False, is_held=False)
        return cls(forest, max_tokens, (everything,), (Pass(TRAIN, 0),))

    def __repr__(self) -> str:
        budget = "none" if self.max_tokens is None else f"{self.max_tokens:,}"
        count = num(self.num_micro_batches, "micro-batch", "micro-batches")
        return f"Plan({count}, budget {budget}, {self.num_computed_tokens:,} tokens computed, {self.forest!r})"

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    @property
    def num_closed_micro_batches(self) -> int:
        return sum(not batch.is_open for batch in self.micro_batches)

    @cached_property
    def num_open_tokens(self) -> int:
        """Tokens whose subtree exceeds the budget."""
        return sum(batch.num_tokens for batch in self.micro_batches if batch.is_open)

    @cached_property
    def num_held_tokens(self) -> int:
        """Open tokens whose graph is kept, so that they run once."""
        return sum(batch.num_tokens for batch in self.micro_batches if batch.is_held)

    @cached_property
    def num_recomputed_tokens(self) -> int:
        """Open tokens that run twice."""
        return sum(batch.num_tokens for batch in self.micro_batches if batch.is_open and not batch.is_held)

    @property
    def num_computed_tokens(self) -> int:
        """Forwards of tokens, with a graph or without."""
        return self.forest.num_tokens + (0 if self.is_whole else self.num_recomputed_tokens)

    @property
    def relative_cost(self) -> float:
        """Tokens of forward and backward that take as long: its own, and what recomputation and micro-batches add."""
        num_forwards = sum(step.action == FORWARD for step in self.schedule)
        launches = self.num_micro_batches + FORWARD_FRACTION * num_forwards
        tokens = self.forest.num_tokens + FORWARD_FRACTION * self.num_recomputed_tokens
        return tokens + TOKENS_PER_LAUNCH * launches

    def cost(self, least_tokens: int = 0) -> float:
        """As `relative_cost`, where a micro-batch of fewer than `least_tokens` takes as long as one of so many."""
        missing = (
            _SHARES[step.action] * max(0, least_tokens - self.micro_batches[step.micro_batch].num_tokens)
            for step in self.schedule
        )
        return self.relative_cost + (sum(missing) if least_tokens else 0)

    def work(self, step: Pass, *, trains: bool) -> int:
        """Forwards over a token that a pass is worth; a backward is two. trains: else each micro-batch runs once."""
        batch = self.micro_batches[step.micro_batch]
        if not trains:
            return 0 if step.action == BACKWARD or (step.action == TRAIN and batch.is_open) else batch.num_tokens
        return batch.num_tokens * {FORWARD: 1, HOLD: 1, BACKWARD: 2, TRAIN: 3}[step.action]

    def told(self, passes: Iterable[Pass], *, trains: bool) -> Iterator[Pass]:
        """The passes; before the first and after each, whoever listens gets how many tokens are done."""
        what, num_tokens = "forward and backward" if trains else "forward", self.forest.num_tokens
        done, total = 0, sum(self.work(step, trains=trains) for step in self.schedule)
        tell_progress(what, 0, num_tokens)
        for step in passes:
            yield step
            done += self.work(step, trains=trains)
            tell_progress(what, num_tokens * done // total, num_tokens)

    @cached_property
    def ancestors(self) -> Ancestors:
        """For each micro-batch the open micro-batches whose gateways it reads, ascending."""
        return Ancestors([batch.parents for batch in self.micro_batches])

    @cached_property
    def open_runs(self) -> OpenRuns:
        """The tokens of all open micro-batches, which come first in a plan, as runs without forks."""
        return OpenRuns.of([batch.ranges for batch in self.micro_batches if batch.is_open], self.forest.segments)

    @cached_property
    def peak_gateway_tokens(self) -> int:
        """Maximum number of open tokens whose keys and values are alive at a time."""
        return max((alive for alive, _ in self.timeline), default=0)

    @cached_property
    def timeline(self) -> tuple[tuple[int, int], ...]:
        """For each step of the schedule: gateway tokens alive, and tokens that hold activations."""
        alive, held, points = 0, 0, []
        for step in self.schedule:
            batch = self.micro_batches[step.micro_batch]
            size = batch.num_tokens
            if step.action in (FORWARD, HOLD):
                alive += size
            points.append((alive, held + (0 if step.action == BACKWARD else size)))
            if step.action == HOLD:
                held += size
            elif step.action == BACKWARD:
                held -= size
                alive -= size
            elif batch.is_open and step.action == TRAIN:
                alive -= size
        return tuple(points)

    def describe(self, gateway_bytes_per_token: int | None = None) -> str:
        """The plan as text. gateway_bytes_per_token: keys, values and their gradients of all layers, to show bytes."""
        forest = self.forest
        budget = num(self.max_tokens, "token") if self.max_tokens else "none (one micro-batch)"
        ratio = self.num_computed_tokens / forest.num_tokens
        open_batches = self.num_micro_batches - self.num_closed_micro_batches
        lines = [
            f"budget             {budget}",
            f"tree tokens        {forest.num_tokens:,} ({forest.num_flat_tokens:,} flat, "
            f"share ratio {forest.share_ratio:.2f})",
            f"micro-batches      {self.num_micro_batches:,} ({self.num_closed_micro_batches:,} closed, "
            f"{open_batches:,} open)",
            f"open tokens        {self.num_open_tokens:,}",
            f"held tokens        {self.num_held_tokens:,}",
            f"recomputed tokens  {self.num_recomputed_tokens:,}",
            f"computed / tree    {ratio:.3f}",
            f"gateways           {self.peak_gateway_tokens:,} tokens at the peak",
        ]
        if gateway_bytes_per_token is not None:
            lines[-1] += f", {bytes_as_text(self.peak_gateway_tokens * gateway_bytes_per_token)}"
        return "\n".join(lines)


# -- the arrays of one micro-batch -------------------------------------------------------------------------------------


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


def _rows_before(positions: np.ndarray, ranges: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[n] int64, number of rows of this micro-batch before each tree position ([n] int64)."""
    index = np.searchsorted(ranges[:, 1], positions, side="right")
    inside = index < len(ranges)
    count = np.full(len(positions), offsets[-1])
    into = np.maximum(positions[inside] - ranges[index[inside], 0], 0)
    count[inside] = offsets[index[inside]] + into
    return count
