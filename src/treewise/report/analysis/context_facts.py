"""What a plan takes of each process where several compute every micro-batch together (context parallelism)."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from treewise.nn.flops import FlopModel
from treewise.planning.context_parts import context_part, part_bounds
from treewise.planning.layout import lay_out
from treewise.planning.planner import BACKWARD, FORWARD, HOLD, Plan


@dataclass(frozen=True, slots=True)
class ContextReport:
    """Tokens and bytes of one process, of those that share each micro-batch.

    live_tokens: with activations; read_tokens: of other processes, whose keys and values are kept for the backward:
    both at the moment and of the process that needs most memory. bytes_sent: in one step, by one process to the others:
    keys and values of each forward, their gradients in float32 of each backward, padded to the largest part; without
    activation checkpoints, which exchange keys and values once more, and without the gradients of parameters.
    """

    size: int
    live_tokens: int
    read_tokens: int
    bytes_sent: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        return asdict(self)


def report_context(plan: Plan, flops: FlopModel, size: int, dtype: torch.dtype) -> ContextReport:
    """Tokens and bytes of the `size` processes that compute each micro-batch of a plan, with activations in `dtype`."""
    parts, padded = _parts(plan, flops, size)
    width, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    costs = width * flops.activation_values, width * flops.gateway_values
    held: list[Counter[str]] = [Counter() for _ in range(size)]
    most, most_bytes, sent_values = Counter[str](), -1, 0
    for step in plan.schedule:
        # What a hold has computed is there until its backward.
        now = [Counter[str]() if step.action == BACKWARD else part for part in parts[step.micro_batch]]
        for own, more in zip(held, now, strict=True):
            needed = costs[0] * (own["live"] + more["live"]) + costs[1] * (own["read"] + more["read"])
            if needed > most_bytes:
                most, most_bytes = own + more, needed
        if step.action in (HOLD, BACKWARD):
            for own, part in zip(held, parts[step.micro_batch], strict=True):
                own.update(part) if step.action == HOLD else own.subtract(part)
        if step.action != BACKWARD:
            sent_values += width * padded[step.micro_batch]
        if step.action not in (FORWARD, HOLD):
            sent_values += wide * padded[step.micro_batch]
    return ContextReport(size, most["live"], most["read"], (size - 1) * flops.gateway_values * sent_values)


def _parts(plan: Plan, flops: FlopModel, size: int) -> tuple[list[list[Counter[str]]], list[int]]:
    """Of each micro-batch: tokens that each process computes and reads, and the tokens of the largest part."""
    parts, padded = [], []
    for index in range(plan.num_micro_batches):
        layout = lay_out(plan, index)
        bounds = part_bounds(flops.of_tokens(layout.depth), size)
        own = [context_part(layout, bounds, number) for number in range(size)]
        parts.append([Counter(live=each.layout.num_tokens, read=len(each.rows)) for each in own])
        padded.append(int((bounds[1:] - bounds[:-1]).max()))
    return parts, padded
