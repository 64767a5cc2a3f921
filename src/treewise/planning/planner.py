"""From a forest and a budget to a plan: micro-batches, and the order in which they run.

A forest that fits is one micro-batch. Otherwise open tokens run first, without a graph, and leave a gateway (a KV cache
with gradients); closed micro-batches run forward and backward once; then the open ones run again with a graph, their
backward starting from the gateway's gradients (activation checkpointing of whole micro-batches). Where that is cheaper,
an open micro-batch is held instead: its activations are kept and it runs once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import attrgetter
from typing import overload

import numpy as np

from treewise.errors import PlanError, bytes_as_text, num
from treewise.planning.bin_packing import best_fit, in_order
from treewise.planning.partition import FORWARD_FRACTION, TOKENS_PER_LAUNCH, Partition, partition
from treewise.tree.forest import Forest, one_forest
from treewise.tree.prefix_merge import concatenated_ranges

FORWARD = "forward"  # no graph; leaves a gateway
HOLD = "hold"  # with a graph that is kept; leaves a gateway
TRAIN = "train"  # forward with a graph and backward at once
BACKWARD = "backward"  # backward of a held micro-batch

# Open bins when pieces are packed in order; fewer open bins keep fewer gateways alive.
NUM_OPEN_BINS = (4, 16, 64, 256)

Pack = Callable[[Sequence[int], int], list[list[int]]]  # sizes and a capacity to the indices in each bin


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


@dataclass(frozen=True, eq=False)
class Plan:
    """Micro-batches of a forest and their schedule. `max_tokens` is None where one micro-batch takes all."""

    forest: Forest
    max_tokens: int | None
    micro_batches: tuple[MicroBatch, ...]
    schedule: tuple[Pass, ...]

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

    @property
    def is_whole(self) -> bool:
        """Whether there is a single micro-batch, so that autograd alone computes the gradients."""
        return len(self.micro_batches) == 1

    @cached_property
    def num_open_tokens(self) -> int:
        """Tokens whose subtree exceeds the budget."""
        return sum(batch.num_tokens for batch in self.micro_batches if batch.is_open)

    @cached_property
    def num_held_tokens(self) -> int:
        """Open tokens whose graph is kept, so that they run once."""
        return sum(batch.num_tokens for batch in self.micro_batches if batch.is_held)

    @property
    def num_recomputed_tokens(self) -> int:
        """Open tokens that run twice."""
        return self.num_open_tokens - self.num_held_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Forwards of tokens, with a graph or without."""
        return self.forest.num_tokens + self.num_recomputed_tokens

    @property
    def relative_cost(self) -> float:
        """Tokens of forward and backward that take as long: its own, and what recomputation and micro-batches add."""
        num_forwards = sum(step.action == FORWARD for step in self.schedule)
        launches = self.num_micro_batches + FORWARD_FRACTION * num_forwards
        tokens = self.forest.num_tokens + FORWARD_FRACTION * self.num_recomputed_tokens
        return tokens + TOKENS_PER_LAUNCH * launches

    @cached_property
    def ancestors(self) -> "Ancestors":
        """For each micro-batch the open micro-batches whose gateways it reads, ascending."""
        return Ancestors([batch.parents for batch in self.micro_batches])

    @cached_property
    def open_runs(self) -> "OpenRuns":
        """The tokens of all open micro-batches, which come first in a plan, as runs without forks."""
        ranges_of = [batch.ranges for batch in self.micro_batches if batch.is_open]
        counts = [len(ranges) for ranges in ranges_of]
        ranges = np.concatenate([np.zeros((0, 2), dtype=np.int64), *ranges_of])
        segments = self.forest.segments
        first = np.searchsorted(segments.start, ranges[:, 0], side="right") - 1
        count = np.searchsorted(segments.start, ranges[:, 1]) - first
        owner = np.repeat(np.arange(len(ranges)), count)
        segment = concatenated_ranges(first, count)
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


def plan(forest: Forest | Sequence[Forest], max_tokens: int | None = None, *, hold: str = "auto") -> Plan:
    """Cuts a forest, or several side by side, into micro-batches of at most `max_tokens` tokens.

    Deterministic, and linear in the number of segments, not tokens. hold: whether open micro-batches keep their
    activations instead of being recomputed: `auto` (where it is cheaper), `never`, `always` (wherever they fit).

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
        return Plan(whole, max_tokens, (everything,), (Pass(TRAIN, 0),))
    cut = partition(whole, int(max_tokens), hold)
    fewest = _assemble(whole, int(max_tokens), cut, best_fit)
    if not cut.trunks:
        return fewest
    # Mixing far-apart pieces keeps more gateways alive than one path needs: beyond a few budgets, pieces stay in
    # order if that adds at most 2 % of the micro-batches, or at most one to the lower bound of any packing.
    open_path: list[int] = []  # tokens from the root to the end of each trunk
    for trunk in cut.trunks:
        open_path.append(trunk.num_tokens + (open_path[trunk.parent] if trunk.parent >= 0 else 0))
    if fewest.peak_gateway_tokens <= max(open_path) + 4 * int(max_tokens):
        return fewest
    num_fewest = fewest.num_closed_micro_batches
    at_most = max(num_fewest + num_fewest // 50, 1 - int(-cut.piece_size.sum() // int(max_tokens)))
    for num_open_bins in NUM_OPEN_BINS:
        near = _assemble(whole, int(max_tokens), cut, partial(in_order, num_open_bins=num_open_bins))
        if near.num_closed_micro_batches <= at_most:
            return min((fewest, near), key=lambda candidate: candidate.peak_gateway_tokens)
    return fewest


def _assemble(forest: Forest, budget: int, cut: Partition, pack: Pack) -> Plan:
    """Micro-batches: trunks first, parents before children, then the bins of pieces."""
    batches = [
        MicroBatch(
            np.array(trunk.ranges),
            (trunk.parent,) if trunk.parent >= 0 else (),
            is_open=True,
            is_held=trunk.is_held,
        )
        for trunk in cut.trunks
    ]
    is_below_held = np.array([trunk.is_held for trunk in cut.trunks] + [False])[cut.piece_trunk]
    groups = [(np.flatnonzero(~is_below_held), budget)]
    by_trunk = np.argsort(cut.piece_trunk, kind="stable")
    bounds = np.searchsorted(cut.piece_trunk[by_trunk], np.arange(len(cut.trunks) + 1))
    for index, trunk in enumerate(cut.trunks):
        if trunk.is_held:
            groups.append((by_trunk[bounds[index] : bounds[index + 1]], trunk.room))
    for members, capacity in groups:
        for chosen in pack(cut.piece_size[members].tolist(), capacity):
            pieces = members[chosen]
            ranges = np.stack([cut.piece_start[pieces], (cut.piece_start + cut.piece_size)[pieces]], axis=1)
            above = np.unique(cut.piece_trunk[pieces])
            parents = tuple(above[above >= 0].tolist())
            batches.append(MicroBatch(ranges, parents, is_open=False, is_held=False))
    return Plan(forest, budget, tuple(batches), _schedule(batches, len(cut.trunks)))


def _schedule(batches: list[MicroBatch], num_open: int) -> tuple[Pass, ...]:
    """Depth-first: each micro-batch as early as its gateways allow, each backward after everything below."""
    waiting = [0] * num_open
    ready: list[list[int]] = [[] for _ in range(num_open)]
    passes: list[Pass] = []
    for index, batch in enumerate(batches):
        for parent in batch.parents:
            waiting[parent] += 1
        if index >= num_open and batch.parents:
            ready[max(batch.parents)].append(index)
    # The largest first: ranks that run in lockstep then run their full micro-batches at the same turns.
    free = [index for index in range(num_open, len(batches)) if not batches[index].parents]
    passes += [Pass(TRAIN, index) for index in sorted(free, key=lambda index: -batches[index].num_tokens)]
    for index in range(num_open):
        passes.append(Pass(HOLD if batches[index].is_held else FORWARD, index))
        for closed in ready[index]:
            passes.append(Pass(TRAIN, closed))
            _finish(closed, batches, waiting, passes)
    return tuple(passes)


def _finish(micro_batch: int, batches: list[MicroBatch], waiting: list[int], passes: list[Pass]) -> None:
    """Adds the backward of every open micro-batch that waited for this one alone."""
    done = [micro_batch]
    while done:
        for parent in batches[done.pop()].parents:
            waiting[parent] -= 1
            if waiting[parent] == 0:
                passes.append(Pass(BACKWARD if batches[parent].is_held else TRAIN, parent))
                done.append(parent)


# -- The fastest plan at or below a budget, by the costs of the planner (`Plan.relative_cost`) ------------------------


# Budgets that are tried: the largest, and so many more, each a sixteenth of it below the last.
SIXTEENTHS, NUM_SMALLER = 16, 4


def fastest_plan(forest: Forest, max_tokens: int | None, *, hold: str = "auto") -> Plan:
    """The plan of the least `relative_cost` for budgets of at most `max_tokens`, with no more memory than that.

    Holding nothing may fill micro-batches better, and so may a smaller budget, which is taken where the gateways that
    it adds are not more tokens than it saves: a gateway token takes less than a token with activations. Of equal plans
    that of the largest budget. Deterministic: it depends on the forest and the arguments alone. Arguments as in `plan`.

    Raises:
        PlanError: see `treewise.plan`.
    """
    largest = plan(forest, max_tokens, hold=hold)
    if max_tokens is None or largest.is_whole:
        return largest
    candidates = [largest]
    for budget in [max_tokens, *smaller_budgets(max_tokens)]:
        if budget >= forest.images.largest:
            found = [] if budget == max_tokens else [plan(forest, budget, hold=hold)]
            if hold == "auto" and (found or candidates)[0].num_held_tokens:
                found.append(plan(forest, budget, hold="never"))
            room = largest.peak_gateway_tokens + max_tokens - budget
            candidates += [each for each in found if each.peak_gateway_tokens <= room]
    return min(candidates, key=attrgetter("relative_cost"))


def smaller_budgets(max_tokens: int) -> list[int]:
    """The budgets below `max_tokens` that `fastest_plan` tries, descending: in sixteenths, down to three quarters."""
    budgets = {max_tokens * part // SIXTEENTHS for part in range(SIXTEENTHS - NUM_SMALLER, SIXTEENTHS)}
    return sorted(budgets - {0, max_tokens}, reverse=True)
