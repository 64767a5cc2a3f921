"""Short causal convolutions on a tree: one call over all segments, each preceded by the last tokens of its path."""

from collections.abc import Callable

import torch
from torch import Tensor

from treewise.nn.recurrent.layer_context import LayerContext
from treewise.nn.recurrent.states import gather
from treewise.shapes import Float

# [1, C, L] to [1, C, L], causal, zeros before the first row.
Conv = Callable[[torch.Tensor], torch.Tensor]


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
