"""The arguments with which verl's engine calls a model: the rows of its micro-batch, or why they cannot be a forest."""

from typing import Any

import torch

from treewise.integrations.batch_forest import IGNORED, NotShareable, Rows, rows_to_forest
from treewise.integrations.tree_batches import as_numpy

# Arguments that define the rows, and those that belong to the head or change nothing.
_OF_THE_ROWS = ("input_ids", "attention_mask", "position_ids", "shift_labels")
_OTHERS = ("use_cache", "return_dict", "temperature", "cu_seqlens", "cu_seqlens_cpu")


def rows_of_call(kwargs: dict[str, Any], *, is_relative: bool) -> Rows | None:
    """A micro-batch as a forest; None if it has no token with a label.

    Packed (`use_remove_padding`): one row of all sequences, which begin where positions start anew, with the label of
    each token. Padded: a mask, and the next token of each row is the label. The last token of a sequence has a label,
    too (what stands next in memory), because verl computes it and drops it later.

    Raises:
        NotShareable: the micro-batch has to be computed by verl's own forward.
    """
    for name, value in kwargs.items():
        if value is not None and name not in (*_OF_THE_ROWS, *_OTHERS):
            raise NotShareable(f"the argument {name!r} is not supported")
    token_ids, mask, positions, labels = (kwargs.get(name) for name in _OF_THE_ROWS)
    if token_ids is None:
        raise NotShareable("it has no input_ids")
    if positions is not None and positions.shape != token_ids.shape:
        raise NotShareable(f"position_ids of shape {tuple(positions.shape)} do not fit {tuple(token_ids.shape)} tokens")
    if mask is not None and mask.shape != token_ids.shape:
        raise NotShareable(f"attention_mask of shape {tuple(mask.shape)} does not fit {tuple(token_ids.shape)} tokens")
    if labels is None:
        labels = torch.roll(token_ids, shifts=-1, dims=-1)
    if mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORED)
        positions = None  # of padding they are zero; tokens of a row count on from its first
    return rows_to_forest(
        as_numpy(token_ids), as_numpy(labels), as_numpy(mask), as_numpy(positions), is_relative=is_relative
    )
