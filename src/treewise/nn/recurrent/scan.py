"""Recurrences on a tree: every segment scanned once, from the state that its parent ended with.

Letters: T rows, B segments side by side, L their padded length, P cuts.
"""

from collections.abc import Callable, Sequence

import torch

from treewise.nn.recurrent.layer_context import Place
from treewise.nn.recurrent.schedule import GATEWAY, NOTHING, Group
from treewise.nn.recurrent.states import collect, spread

# [B, L, ...] inputs padded with zeros on the right, [B, ...] initial states or None for zeros, and whether end states
# are wanted, to [B, L, ...] outputs and [B, ...] end states. A place of zeros must leave the state as it is.
Scan = Callable[[list[torch.Tensor], torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor | None]]


def tree_scan(place: Place, inputs: Sequence[torch.Tensor], scan: Scan) -> torch.Tensor:
    """A recurrence over [1, T, ...] inputs; returns [1, T, ...]. States and their gradients follow the tree."""
    rows, device = place.rows, inputs[0].device
    schedule = rows.schedule
    place.count()
    order = rows.tensor("order", schedule.order, device)
    where = rows.tensor("place", schedule.place, device)
    # Rows in groups, by one copy; then split, whose backward is one concatenation.
    parts = [spread(each[0], order, where).split(schedule.sizes) for each in inputs]
    entering = place.entering(inputs)
    outs: list[torch.Tensor] = []
    ends: list[torch.Tensor | None] = []
    for number, group in enumerate(schedule.groups):
        shape = (len(group.segments), group.length)
        given = [each[number].unflatten(0, shape) for each in parts]
        initial = _initial(place, number, group, ends, entering)
        out, end = scan(given, initial, group.wants_states)
        outs.append(out.flatten(0, 1))
        ends.append(end)
    out = collect(torch.cat(outs), order, where)[None]
    leaving = None
    if schedule.cuts:
        leaving = torch.stack([_kept(ends[group])[index] for group, index in schedule.cuts])
    return place.leaving(out, leaving)


def _initial(
    place: Place, number: int, group: Group, ends: list[torch.Tensor | None], entering: torch.Tensor | None
) -> torch.Tensor | None:
    """[B, ...] initial states of a group; None where all are zero."""
    if all(source.group == NOTHING for source in group.sources):
        return None
    found: list[torch.Tensor | int] = []
    for position, source in enumerate(group.sources):
        if source.group == NOTHING:
            found.append(len(source.index))
            continue
        states = _kept(entering if source.group == GATEWAY else ends[source.group])
        index = place.rows.tensor(("source", number, position), source.index, states.device)
        found.append(states.index_select(0, index))
    like = next(each for each in found if isinstance(each, torch.Tensor))
    return torch.cat([like.new_zeros(each, *like.shape[1:]) if isinstance(each, int) else each for each in found])


def _kept(states: torch.Tensor | None) -> torch.Tensor:
    assert states is not None, "segments with others below them end with states"
    return states


def padded_chunk(length: int, largest: int, smallest: int = 16) -> int:
    """Tokens per chunk for short segments: the smallest power of two that holds them, so that padding stays small."""
    return max(min(smallest, largest), min(largest, 1 << max(length - 1, 0).bit_length()))
