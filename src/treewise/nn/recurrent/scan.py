"""Recurrences and short convolutions on a tree: every segment once, from the state that its parent ended with, or
behind the last tokens of its path.

Letters: T rows, B segments side by side, L their padded length, P cuts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treewise.nn.recurrent.rows import LayerContext, collect, gather, spread
from treewise.nn.recurrent.segments import GATEWAY, NOTHING, SegmentBatch
from treewise.shapes import Float

# [B, L, ...] inputs padded with zeros on the right, [B, ...] initial states or None for zeros, and whether end states
# are wanted, to [B, L, ...] outputs and [B, ...] end states. A row of zeros must leave the state unchanged.
Scan = Callable[[list[torch.Tensor], torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor | None]]
# [1, C, L] to [1, C, L], causal, zeros before the first row.
Conv = Callable[[torch.Tensor], torch.Tensor]
_SMALLEST_CHUNK = 16


def tree_scan(layer: LayerContext, inputs: Sequence[Float[Tensor, "1 T ..."]], scan: Scan) -> Float[Tensor, "1 T ..."]:
    """A recurrence over [1, T, ...] inputs; returns [1, T, ...]. States and their gradients follow the tree."""
    rows, device = layer.rows, inputs[0].device
    schedule = rows.schedule
    layer.count()
    order = rows.tensor("order", schedule.order, device)
    where = rows.tensor("position", schedule.position, device)
    # Rows in batches, by one copy; then split, whose backward is one concatenation.
    parts = [spread(each[0], order, where).split(schedule.sizes) for each in inputs]
    entering = layer.entering(inputs)
    outs: list[torch.Tensor] = []
    ends: list[torch.Tensor | None] = []
    for index, batch in enumerate(schedule.batches):
        shape = (len(batch.segments), batch.length)
        padded = [each[index].unflatten(0, shape) for each in parts]
        initial = _initial(layer, index, batch, ends, entering)
        out, end = scan(padded, initial, batch.wants_states)
        outs.append(out.flatten(0, 1))
        ends.append(end)
    out = collect(torch.cat(outs), order, where)[None]
    leaving = None
    if schedule.cuts:
        leaving = torch.stack([_kept(ends[batch])[row] for batch, row in schedule.cuts])
    return layer.leaving(out, leaving)


def _initial(
    layer: LayerContext, index: int, batch: SegmentBatch, ends: list[torch.Tensor | None], entering: torch.Tensor | None
) -> torch.Tensor | None:
    """[B, ...] initial states of batch `index` of the schedule; None where all are zero."""
    if all(source.batch == NOTHING for source in batch.sources):
        return None
    states_or_counts: list[torch.Tensor | int] = []
    for position, source in enumerate(batch.sources):
        if source.batch == NOTHING:
            states_or_counts.append(len(source.index))
            continue
        states = _kept(entering if source.batch == GATEWAY else ends[source.batch])
        rows = layer.rows.tensor(("source", index, position), source.index, states.device)
        states_or_counts.append(states.index_select(0, rows))
    like = next(each for each in states_or_counts if isinstance(each, torch.Tensor))
    zeros = like.new_zeros
    return torch.cat([zeros(each, *like.shape[1:]) if isinstance(each, int) else each for each in states_or_counts])


def _kept(states: torch.Tensor | None) -> torch.Tensor:
    assert states is not None, "segments with others below them have end states"
    return states


def padded_chunk(length: int, largest: int) -> int:
    """Tokens per chunk for short segments: the smallest power of two that holds them, so that padding stays small."""
    return max(min(_SMALLEST_CHUNK, largest), min(largest, 1 << max(length - 1, 0).bit_length()))


def tree_conv(layer: LayerContext, inputs: Float[Tensor, "1 C T"], width: int, conv: Conv) -> Float[Tensor, "1 C T"]:
    """A causal convolution over [1, C, T] inputs; row t sees itself and the `width - 1` tokens above it.

    Computes T + S * (width - 1) rows for S segments. Where the path above a segment is shorter, it is
    padded with zeros, as at the beginning of a sequence.
    """
    rows = layer.rows
    layer.count()
    if width == 1 or (rows.is_one_path and not len(rows.segments.cuts)):
        return conv(inputs)
    index = rows.conv_index(width, inputs.device)
    own_TC = inputs[0].transpose(0, 1)
    axis = [own_TC, own_TC.new_zeros(1, own_TC.shape[1])]
    tails = layer.entering([inputs])
    if tails is not None:
        axis.append(tails.to(own_TC.dtype).flatten(0, 1))
    extended = torch.cat(axis)
    out = conv(gather(extended, index.gather).transpose(0, 1)[None])
    out = out.index_select(2, index.keep)
    leaving = None
    if len(rows.segments.cuts):
        leaving = gather(extended, index.tails.flatten()).unflatten(0, index.tails.shape)
    return layer.leaving(out, leaving)
