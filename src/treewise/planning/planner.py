"""From a forest and a budget to a plan: micro-batches, and the order in which they run.

A forest that fits is one micro-batch. Otherwise open tokens run first, without a graph, and leave a gateway; closed
micro-batches run forward and backward once; then the open ones run again with a graph, their backward starting from
the gateway's gradients. Where it pays, an open micro-batch is held instead: its graph is kept and it runs once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import overload

import numpy as np

from treewise.errors import PlanError
from treewise.planning.bin_packing import best_fit, in_order
from treewise.planning.partition import Partition, partition
from treewise.tree.forest import Forest, one_forest

FORWARD = "forward"  # no graph; leaves a gateway
HOLD = "hold"  # with a graph that is kept; leaves a gateway
TRAIN = "train"  # forward with a graph and backward at once
BACKWARD = "backward"  # backward of a held micro-batch

# Bins that stay open at a time when pieces are packed in order: the fewer, the fewer gateways are alive.
NUM_OPEN_BINS = (4, 16, 64, 256)

Pack = Callable[[Sequence[int], int], list[list[int]]]  # sizes and a capacity to the indices in each bin


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens that one forward computes.

    ranges: [R, 2] int64, own tree positions `[start, end)`, ascending. parents: indices of the open micro-batches that
    its tokens hang off directly. is_open: others read its gateway. is_held: its graph is kept while they run.
    """

    ranges: np.ndarray
    parents: tuple[int, ...]
    is_open: bool
    is_held: bool

    @property
    def num_tokens(self) -> int:
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    def positions(self) -> np.ndarray:
        """[T] int64, own tree positions, ascending."""
        return np.concatenate([np.arange(start, end) for start, end in self.ranges.tolist()])


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the schedule: what to do (`forward`, `hold`, `train`, `backward`) with which micro-batch."""

    action: str
    micro_batch: int


class Ancestors(Sequence[tuple[int, ...]]):
    """For each micro-batch those above it, made when asked for: on a path of n trunks they are n * n / 2 together.

    Trunks are numbered depth-first, so most of a path is `parent = number - 1`: it is kept as spans of such numbers.
    """

    def __init__(self, parents: list[tuple[int, ...]]) -> None:
        self._parents = parents
        self._first = list(range(len(parents)))  # the first of the span that leads down to each micro-batch
        for number, above in enumerate(parents):
            if above == (number - 1,):
                self._first[number] = self._first[number - 1]

    def spans(self, number: int) -> list[tuple[int, int]]:
        """Ascending spans `[first, end)` of the micro-batches above one."""
        waiting = [-above for above in self._parents[number]]
        heapify(waiting)
        found: dict[int, int] = {}
        while waiting:
            last = -heappop(waiting)  # the last one comes first, so a span is met at its full length
            first = self._first[last]
            if first not in found:
                found[first] = last + 1
                for above in self._parents[first]:
                    heappush(waiting, -above)
        return sorted(found.items())

    def __len__(self) -> int:
        return len(self._parents)

    @overload
    def __getitem__(self, number: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, number: slice) -> list[tuple[int, ...]]: ...

    def __getitem__(self, number: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        return tuple(chain.from_iterable(range(first, end) for first, end in self.spans(number)))


@dataclass(frozen=True, slots=True)
class OpenRuns:
    """Tokens of open micro-batches as runs of neighbouring positions within a segment, in the order of micro-batches.

    Whatever hangs off an open token hangs off the end of its run, so a key's interval is that of its whole run.
    start, length: [R] int64 tree positions. end: [R] int64, end of the run's subtree. depth: [R] int64 of the first
    token. batch: [R] int64. row: [R] int64, the first token's number within its micro-batch. bounds: [open + 1] int64,
    where each micro-batch's runs begin.
    """

    start: np.ndarray
    length: np.ndarray
    end: np.ndarray
    depth: np.ndarray
    batch: np.ndarray
    row: np.ndarray
    bounds: np.ndarray


def _open_runs(forest: Forest, ranges_of: list[np.ndarray]) -> OpenRuns:
    """Open micro-batches come first in a plan, so the index into `ranges_of` is their number."""
    counts = [len(ranges) for ranges in ranges_of]
    ranges = np.concatenate([np.zeros((0, 2), dtype=np.int64), *ranges_of])
    segments = forest.segments
    first = np.searchsorted(segments.start, ranges[:, 0], side="right") - 1
    count = np.searchsorted(segments.start, ranges[:, 1]) - first
    owner = np.repeat(np.arange(len(ranges)), count)
    segment = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count - first, count)
    start = np.maximum(segments.start[segment], ranges[owner, 0])
    stop = np.minimum(np.append(segments.start, segments.num_tokens)[segment + 1], ranges[owner, 1])
    batch = np.repeat(np.arange(len(counts)), counts)[owner]
    bounds = np.searchsorted(batch, np.arange(len(counts) + 1))
    before = np.cumsum(stop - start) - (stop - start)
    return OpenRuns(
        start=start,
        length=stop - start,
        end=segments.subtree_end[segment],
        depth=segments.depth[segment] + start - segments.start[segment],
        batch=batch,
        row=before - before[bounds[batch]],
        bounds=bounds,
    )


@dataclass(frozen=True, eq=False)
class Plan:
    """Micro-batches of a forest and their schedule. `max_tokens` is None where one micro-batch takes all."""

    forest: Forest
    max_tokens: int | None
    micro_batches: tuple[MicroBatch, ...]
    schedule: tuple[Step, ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    @property
    def num_closed_micro_batches(self) -> int:
        return sum(not batch.is_open for batch in self.micro_batches)

    @property
    def is_whole(self) -> bool:
        """One micro-batch and nothing else, so autograd alone computes the gradients."""
        return len(self.micro_batches) == 1

    @cached_property
    def num_open_tokens(self) -> int:
        """Tokens whose subtree exceeds the budget."""
        return sum(batch.num_tokens for batch in self.micro_batches if batch.is_open)

    @cached_property
    def num_held_tokens(self) -> int:
        """Open tokens whose graph is kept, so they run once."""
        return sum(batch.num_tokens for batch in self.micro_batches if batch.is_held)

    @property
    def num_recomputed_tokens(self) -> int:
        """Open tokens that run twice."""
        return self.num_open_tokens - self.num_held_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Forwards of tokens, with a graph or without."""
        return self.forest.num_tokens + self.num_recomputed_tokens

    @cached_property
    def ancestors(self) -> "Ancestors":
        """For each micro-batch the open micro-batches whose gateways it reads, ascending."""
        return Ancestors([batch.parents for batch in self.micro_batches])

    @cached_property
    def open_runs(self) -> "OpenRuns":
        """The tokens of all open micro-batches as runs without forks."""
        return _open_runs(self.forest, [batch.ranges for batch in self.micro_batches if batch.is_open])

    @cached_property
    def peak_gateway_tokens(self) -> int:
        """The most open tokens whose keys and values are alive at one time."""
        return max((alive for alive, _ in self.timeline), default=0)

    @cached_property
    def timeline(self) -> tuple[tuple[int, int], ...]:
        """For each step of the schedule: gateway tokens alive, and tokens with live activations."""
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
        """A few lines for people. With the bytes of one gateway token (keys, values and their gradients, all layers)
        the gateways are given in bytes too."""
        forest = self.forest
        budget = f"{self.max_tokens:,} tokens" if self.max_tokens else "none (one micro-batch)"
        ratio = self.num_computed_tokens / forest.num_tokens
        open_batches = self.num_micro_batches - self.num_closed_micro_batches
        lines = [
            f"budget             {budget}",
            f"tree tokens        {forest.num_tokens:,} ({forest.num_flat_tokens:,} flat, "
            f"ratio {forest.share_ratio:.2f})",
            f"micro-batches      {self.num_micro_batches:,} ({self.num_closed_micro_batches:,} closed, "
            f"{open_batches:,} open)",
            f"open tokens        {self.num_open_tokens:,}",
            f"held tokens        {self.num_held_tokens:,}",
            f"recomputed tokens  {self.num_recomputed_tokens:,}",
            f"computed / tree    {ratio:.3f}",
            f"gateways           {self.peak_gateway_tokens:,} tokens at the peak",
        ]
        if gateway_bytes_per_token is not None:
            lines[-1] += f", {self.peak_gateway_tokens * gateway_bytes_per_token / 2**20:,.1f} MiB"
        return "\n".join(lines)


def plan(forest: Forest | Sequence[Forest], max_tokens: int | None = None, *, hold: str = "auto") -> Plan:
    """Cuts a forest, or several side by side, into micro-batches of at most `max_tokens` tokens.

    Deterministic, and linear in the segments (the tokens are never visited one by one). `hold` says whether open
    micro-batches may be kept instead of computed twice: `auto` (where it is cheaper), `never`, `always` (wherever it
    fits).

    Raises:
        PlanError: a budget that is not a positive integer, or an unknown `hold`.
    """
    whole = one_forest(forest)
    if hold not in ("auto", "never", "always"):
        raise PlanError(f"hold={hold!r} is unknown; choose 'auto', 'never' or 'always'.")
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int | np.integer)):
        raise PlanError(f"max_tokens must be an integer or None, found {max_tokens!r}.")
    if max_tokens is not None and max_tokens < 1:
        raise PlanError(f"max_tokens is {max_tokens}; a micro-batch holds at least 1 token.")
    if max_tokens is None or whole.num_tokens <= max_tokens:
        everything = MicroBatch(np.array([[0, whole.num_tokens]]), (), is_open=False, is_held=False)
        return Plan(whole, max_tokens, (everything,), (Step(TRAIN, 0),))
    parts = partition(whole, int(max_tokens), hold)
    fewest = _assemble(whole, int(max_tokens), parts, best_fit)
    if not parts.trunks:
        return fewest
    # Mixing far-apart pieces keeps more gateways alive than one path needs: beyond a few budgets, pieces stay in
    # order if that adds no more than a fiftieth of the micro-batches, or one above what any packing needs.
    if fewest.peak_gateway_tokens <= _longest_open_path(parts) + 4 * int(max_tokens):
        return fewest
    num_fewest = fewest.num_closed_micro_batches
    at_most = max(num_fewest + num_fewest // 50, 1 - int(-parts.piece_size.sum() // int(max_tokens)))
    for num_open_bins in NUM_OPEN_BINS:
        near = _assemble(whole, int(max_tokens), parts, partial(in_order, num_open_bins=num_open_bins))
        if near.num_closed_micro_batches <= at_most:
            return min((fewest, near), key=lambda each: each.peak_gateway_tokens)
    return fewest


def _longest_open_path(parts: Partition) -> int:
    total: list[int] = []
    for trunk in parts.trunks:
        total.append(trunk.num_tokens + (total[trunk.parent] if trunk.parent >= 0 else 0))
    return max(total)


def _assemble(forest: Forest, budget: int, parts: Partition, pack: Pack) -> Plan:
    """Micro-batches: trunks first, parents before children, then the bins of pieces."""
    batches = [
        MicroBatch(np.array(trunk.ranges), (trunk.parent,) if trunk.parent >= 0 else (), True, trunk.is_held)
        for trunk in parts.trunks
    ]
    held = np.array([trunk.is_held for trunk in parts.trunks] + [False])[parts.piece_trunk]
    groups = [(np.flatnonzero(~held), budget)]
    by_trunk = np.argsort(parts.piece_trunk, kind="stable")
    bounds = np.searchsorted(parts.piece_trunk[by_trunk], np.arange(len(parts.trunks) + 1))
    for number, trunk in enumerate(parts.trunks):
        if trunk.is_held:
            groups.append((by_trunk[bounds[number] : bounds[number + 1]], trunk.room))
    for members, capacity in groups:
        for chosen in pack(parts.piece_size[members].tolist(), capacity):
            pieces = members[chosen]
            ranges = np.stack([parts.piece_start[pieces], (parts.piece_start + parts.piece_size)[pieces]], axis=1)
            above = np.unique(parts.piece_trunk[pieces])
            batches.append(MicroBatch(ranges, tuple(above[above >= 0].tolist()), False, False))
    return Plan(forest, budget, tuple(batches), _schedule(batches, len(parts.trunks)))


def _schedule(batches: list[MicroBatch], num_open: int) -> tuple[Step, ...]:
    """Depth-first: each micro-batch as early as its gateways allow, each backward as soon as nothing below is left."""
    waiting = [0] * num_open
    ready: list[list[int]] = [[] for _ in range(num_open)]
    steps: list[Step] = []
    for number, batch in enumerate(batches):
        for parent in batch.parents:
            waiting[parent] += 1
        if number >= num_open and batch.parents:
            ready[max(batch.parents)].append(number)
    # The largest first: where ranks run theirs side by side, the fuller ones meet.
    free = [number for number in range(num_open, len(batches)) if not batches[number].parents]
    steps += [Step(TRAIN, number) for number in sorted(free, key=lambda each: -batches[each].num_tokens)]
    for number in range(num_open):
        steps.append(Step(HOLD if batches[number].is_held else FORWARD, number))
        for closed in ready[number]:
            steps.append(Step(TRAIN, closed))
            _finish(closed, batches, waiting, steps)
    return tuple(steps)


def _finish(number: int, batches: list[MicroBatch], waiting: list[int], steps: list[Step]) -> None:
    """Marks a micro-batch as done, and runs the backward of every open one that waits for nothing else."""
    done = [number]
    while done:
        for parent in batches[done.pop()].parents:
            waiting[parent] -= 1
            if waiting[parent] == 0:
                steps.append(Step(BACKWARD if batches[parent].is_held else TRAIN, parent))
                done.append(parent)
