"""Walks that also weigh their routers: counts first, then each micro-batch's share of the losses.

With one micro-batch nothing is walked twice: its choices are counted just before they are weighed. With several, a walk
without a graph counts before the training walk; where values of all tokens are computed first anyway, that walk counts.
"""

from collections.abc import Callable

import numpy as np
import torch

from treewise.engine.differentiable import NewRead, Part, Read, gather
from treewise.engine.walk import LossOf, Walk
from treewise.nn.router_loss import Routing

_SHARE = "router loss"


def count(walk: Walk, routing: Routing) -> None:
    """Counts the choices of a whole step by a walk without a graph."""
    with torch.no_grad():
        walk.visit(lambda number, rows: routing.count(walk.router_logits, walk.positions(number)))
    routing.is_counted = True


def with_router_loss(loss_of: LossOf, walk: Walk, routing: Routing) -> LossOf:
    """A micro-batch's loss and its share of the router losses, for one walk."""

    def both(number: int, rows: torch.Tensor) -> torch.Tensor:
        loss = loss_of(number, rows)
        share = _share(walk, routing, number)
        return share if loss is None else loss + share.to(loss.dtype)

    return both


def gather_routed(
    new_walk: Callable[[], Walk], new_read: NewRead, names: tuple[str, ...], length: int, routing: Routing
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What `gather` gives, and the sum of the router losses with their factors, a scalar, differentiable at any budget.

    Both come from the same walks: one forward, one backward.
    """
    num_micro_batches = new_walk().plan.num_micro_batches
    values = gather(new_walk, _routed(new_read, names, length, routing), (*names, _SHARE), length + num_micro_batches)
    routing.is_counted = True
    share = values.pop(_SHARE)[length:].sum()
    exact = routing.total()
    # The forward counts while it goes, so its shares are no value yet; their gradients are right.
    loss = exact.to(share) + (share - share.detach())
    return {name: value[:length] for name, value in values.items()}, loss


def _routed(new_read: NewRead, names: tuple[str, ...], length: int, routing: Routing) -> NewRead:
    """A read whose parts have one more entry, at `length + number`: the micro-batch's share."""

    def read_of(walk: Walk) -> Read:
        read = new_read(walk)

        def routed(number: int, rows: torch.Tensor) -> Part:
            part = read(number, rows)
            if not routing.is_counted and not (walk.plan.is_whole and torch.is_grad_enabled()):
                routing.count(walk.router_logits, walk.positions(number))
                routing.weigh_later(walk.router_logits, walk.positions(number))
                share = torch.zeros(1, device=rows.device, dtype=torch.promote_types(rows.dtype, torch.float32))
            else:
                share = _share(walk, routing, number)[None]
            return _extended(part, names, length + number, share)

        return routed

    return read_of


def _extended(part: Part | None, names: tuple[str, ...], entry: int, share: torch.Tensor) -> Part:
    entries, values = (np.zeros(0, dtype=np.int64), {}) if part is None else part
    num_entries = len(entries)
    longer = {}
    for name in names:
        value = values.get(name)
        if value is None:
            longer[name] = share.new_zeros(1)
        else:
            longer[name] = torch.cat([value, value.new_zeros(1, *value.shape[1:])])
    longer[_SHARE] = torch.cat([share.new_zeros(num_entries), share])
    return np.append(entries, entry), longer


def _share(walk: Walk, routing: Routing, number: int) -> torch.Tensor:
    positions = walk.positions(number)
    if walk.plan.is_whole and not routing.is_counted:
        routing.count(walk.router_logits, positions)
        routing.is_counted = True
    return routing.loss(walk.router_logits, positions)
