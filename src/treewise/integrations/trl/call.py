"""The arguments of a call with `fused_lm_head=True`: the rows of its batch with their images, or why they cannot become
a forest.

Letters: B rows of the batch, L tokens of a row.
"""

from collections.abc import Mapping

import numpy as np
import torch
from transformers import PretrainedConfig

from treewise.distributed import ranks
from treewise.errors import ConfigError
from treewise.integrations.batches.batch_forest import NotShareable, RowRules, Rows, rows_to_forest
from treewise.integrations.batches.batch_images import OF_IMAGES, PIXELS, images_of_call
from treewise.integrations.batches.tree_batches import as_numpy, tensor_of
from treewise.nn.vision import image_token_of

# Arguments of a forward that define the rows, or that do not change what a fused head returns.
_SUPPORTED = {"input_ids", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"}
_SUPPORTED |= {"max_length_k", "seq_idx", "use_cache", "return_dict", "logits_to_keep", "output_router_logits"}
# Arguments of the fused head itself.
_OF_THE_HEAD = {"fused_lm_head", "labels", "shift_labels", "num_items_in_batch"}


def rows_of_call(
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    config: PretrainedConfig,
    rules: RowRules,
    keeps_all: bool,
) -> tuple[Rows | None, torch.Tensor]:
    """The batch as a forest (None if no label is scored), and the labels, [B, L - 1] or [B, L], each at the index of
    the token that predicts it.

    config: of the whole model. rules, keeps_all: as in `rows_to_forest`.

    Raises:
        NotShareable: the batch has to be computed by the model's own forward.
        ConfigError: a call without labels.
    """
    token = image_token_of(config)
    arguments = _arguments(args, kwargs, _SUPPORTED if token is None else _SUPPORTED | set(OF_IMAGES))
    labels, shifted = tensor_of(kwargs, "labels"), tensor_of(kwargs, "shift_labels")
    if labels is None and shifted is None:
        raise ConfigError("a fused head scores labels, and this call has none: pass labels= or shift_labels=.")
    if shifted is not None and ranks.count() > 1:
        raise NotShareable("context and sequence parallelism cut sequences over ranks (shift_labels)")
    token_ids = tensor_of(arguments, "input_ids")
    assert token_ids is not None
    if shifted is not None:
        labels = shifted
    else:
        assert labels is not None
        labels = labels[:, 1:]
    if token_ids.shape[0] != labels.shape[0] or token_ids.shape[1] - labels.shape[1] not in (0, 1):
        raise NotShareable(f"labels of shape {tuple(labels.shape)} do not fit {tuple(token_ids.shape)} tokens")
    ids = as_numpy(token_ids)
    for name in ("mm_token_type_ids", "token_type_ids"):
        types = as_numpy(tensor_of(arguments, name))
        if types is not None and not np.array_equal(types != 0, ids == token):
            raise NotShareable(f"{name} marks other tokens than those of images")
    rows = rows_to_forest(
        ids,
        as_numpy(labels),
        as_numpy(tensor_of(arguments, "attention_mask")),
        as_numpy(_expanded(tensor_of(arguments, "position_ids"), token_ids)),
        rules,
        keeps_all=keeps_all,
        images=images_of_call(arguments, ids, config, token) if PIXELS in arguments else None,
    )
    return rows, labels


def _arguments(args: tuple[object, ...], kwargs: Mapping[str, object], supported: set[str]) -> dict[str, object]:
    """The arguments by name.

    Raises:
        NotShareable: an argument is not supported, as it may change what the model computes.
    """
    arguments: dict[str, object] = dict(zip(("input_ids", "attention_mask"), args, strict=False))
    if len(args) > 2:
        raise NotShareable(f"its forward has {len(args)} arguments without names")
    arguments |= {name: value for name, value in kwargs.items() if name not in _OF_THE_HEAD and value is not None}
    for name, value in arguments.items():
        if name not in supported and not (value is False and name.startswith("output_")):
            raise NotShareable(f"the argument {name!r} is not supported")
    for name in ("input_ids", "attention_mask"):
        if (given := tensor_of(arguments, name)) is not None and given.dim() != 2:
            raise NotShareable(f"{name} has {given.dim()} dimensions")
    if "input_ids" not in arguments:
        raise NotShareable("it has no input_ids")
    return arguments


def _expanded(position_ids: torch.Tensor | None, token_ids: torch.Tensor) -> torch.Tensor | None:
    if position_ids is None:
        return None
    if position_ids.dim() != 2:
        raise NotShareable(f"position_ids has {position_ids.dim()} dimensions")
    return position_ids.expand(token_ids.shape)
