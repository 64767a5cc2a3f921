"""From a forest and a budget to a plan: micro-batches, and the order in which they run.

A forest that fits is one micro-batch. Otherwise open tokens run first, without a graph, and leave a gateway (a KV cache
with gradients); closed micro-batches run forward and backward once; then the open ones run again with a graph, their
backward starting from the gateway's gradients (activation checkpointing of whole micro-batches). Where that is cheaper,
an open micro-batch is held instead: its activations are kept and it runs once.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from treewise.errors import PlanError
from treewise.planning.bin_packing import best_fit, in_order
from treewise.planning.partition import Partition, partition
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, TRAIN, MicroBatch, Pass, Plan
from treewise.tree.forest import Forest, one_forest

# Open bins when pieces are packed in order; fewer open bins keep fewer gateways alive.
NUM_OPEN_BINS = (4, 16, 64, 256)

Pack = Callable[[Sequence[int], int], list[list[int]]]  # sizes and a capacity to the indices in each bin


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
        return Plan.whole(whole, max_tokens)
    cut = partition(whole, int(max_tokens), hold)
    fewest = assemble(whole, int(max_tokens), cut, best_fit)
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
        near = assemble(whole, int(max_tokens), cut, partial(in_order, num_open_bins=num_open_bins))
        if near.num_closed_micro_batches <= at_most:
            return min((fewest, near), key=lambda candidate: candidate.peak_gateway_tokens)
    return fewest


def assemble(forest: Forest, budget: int, cut: Partition, pack: Pack) -> Plan:
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
