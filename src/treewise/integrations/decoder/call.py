"""The arguments of a decoder's call: the rows of its batch as a forest, or why its own forward has to compute them.

What reaches a decoder differs from trainer to trainer: padding on either side or none, positions that start anew in a
packed row, and whatever else a trainer hands through to its loss. A row is read as transformers reads it. What could
mean something else, or is not known here, is left to the model.

Letters: B rows of the batch, L tokens of a row.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from treewise.distributed import ranks
from treewise.integrations.batches.batch_forest import (
    NotShareable,
    OwnCall,
    RowRules,
    WholeRows,
    whole_rows_to_forest,
)
from treewise.integrations.batches.batch_images import OF_IMAGES, PIXELS, images_of_call
from treewise.integrations.batches.tree_batches import as_numpy, tensor_of
from treewise.integrations.decoder.outputs import NotComputed
from treewise.nn.vision import image_token_of

CACHES = ("cache", "past_key_values")  # the newer name first
# Arguments that define the rows.
_OF_THE_ROWS = {"input_ids", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"}
# Those that trainers hand through to a head or a loss, and that change no hidden row.
_OF_OTHERS = {"labels", "logits_to_keep", "num_items_in_batch", "return_dict", "shift_labels", "cache_position"}
_OF_OTHERS |= {"skip_logits", "return_token_accuracy", "use_token_scaling", "compute_loss_func", "max_length_q"}
_OF_OTHERS |= {"max_length_k", "output_hidden_states", "output_router_logits", "use_cache", "accum_dtype"}
_FORMS = ("input_ids", "attention_mask", "position_ids")
_TYPES_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")


def arguments_of(forward: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those whose value is None."""
    try:
        bound = inspect.signature(forward).bind_partial(*args, **kwargs)
    except TypeError as error:
        raise NotShareable(str(error)) from None
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        found |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return {name: value for name, value in found.items() if value is not None}


def rows_of_call(arguments: dict[str, Any], config: PretrainedConfig, rules: RowRules) -> WholeRows:
    """The batch as a forest of all its tokens.

    arguments: by name, none of them None. config: of the whole model.

    Raises:
        NotShareable: the batch has to be computed by the model's own forward.
    """
    token = image_token_of(config)
    _refuse_what_changes_rows(arguments, has_images=token is not None)
    token_ids, mask, positions = (tensor_of(arguments, name) for name in _FORMS)
    if token_ids is None:
        raise NotShareable("it has no input_ids")
    _check_forms(token_ids, mask, positions)
    ids, position_ids = as_numpy(token_ids), as_numpy(positions)
    if position_ids is not None:
        position_ids = np.broadcast_to(position_ids, ids.shape)
    if mask is None and position_ids is not None:
        _check_packing(arguments, position_ids, config)
    elif "cu_seq_lens_q" in arguments:
        raise NotShareable("cu_seq_lens_q stands beside an attention mask, or without position_ids")
    for name in _TYPES_OF_TOKENS:
        types = as_numpy(tensor_of(arguments, name))
        if types is not None and not np.array_equal(types != 0, ids == token):
            raise NotShareable(f"{name} marks other tokens than those of images")
    images = images_of_call(arguments, ids, config, token) if PIXELS in arguments else None
    return whole_rows_to_forest(ids, as_numpy(mask), position_ids, rules, images=images)


def _refuse_what_changes_rows(arguments: dict[str, Any], *, has_images: bool) -> None:
    """Raises where a batch is a step of generation, or has an argument that may change what the decoder computes."""
    for cache in (arguments[name] for name in CACHES if name in arguments):
        if isinstance(cache, NotComputed):
            cache.refuse()
    if any(name in arguments for name in CACHES) or arguments.get("use_cache"):
        raise OwnCall("a cache is given or asked for, as in generation")
    if "shift_labels" in arguments and ranks.count() > 1:
        raise NotShareable("context and sequence parallelism cut sequences over ranks (shift_labels)")
    asked = arguments.get("output_hidden_states", False)
    if not isinstance(asked, bool):
        raise NotShareable("hidden rows of single layers are asked for (output_hidden_states)")
    known = _OF_THE_ROWS | _OF_OTHERS | ({*OF_IMAGES, *_TYPES_OF_TOKENS} if has_images else set())
    for name, value in arguments.items():
        if name not in known and value is not False:
            raise NotShareable(f"the argument {name!r} is not supported")


def _check_forms(token_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    if token_ids.dim() != 2:
        raise NotShareable(f"input_ids has {token_ids.dim()} dimensions")
    if mask is not None:
        if mask.shape != token_ids.shape:
            raise NotShareable(f"attention_mask of shape {tuple(mask.shape)} beside tokens {tuple(token_ids.shape)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise NotShareable("attention_mask holds other numbers than 0 and 1, such as those of documents")
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != token_ids.shape[1]):
        raise NotShareable(f"position_ids of shape {tuple(positions.shape)} beside tokens {tuple(token_ids.shape)}")


def _check_packing(arguments: dict[str, Any], position_ids: np.ndarray, config: PretrainedConfig) -> None:
    """Raises where several sequences of a row may be meant otherwise than positions that start anew say."""
    is_first = np.diff(position_ids, axis=1, prepend=position_ids[:, :1] - 2) != 1
    if is_first[:, 1:].any() and arguments.get("use_cache", getattr(config.get_text_config(), "use_cache", False)):
        raise NotShareable("transformers does not cut rows where positions start anew unless use_cache is False")
    own = config.get_text_config()._attn_implementation  # noqa: SLF001
    previous = getattr(own, "previous", own) or ""
    if len(position_ids) > 1 and is_first[:, 1:].any() and "flash" in previous:
        raise NotShareable(f"{previous} does not cut rows where positions start anew, but for a batch of one row")
    bounds = tensor_of(arguments, "cu_seq_lens_q")
    if bounds is not None and not np.array_equal(as_numpy(bounds)[:-1], np.flatnonzero(is_first)):
        raise NotShareable("cu_seq_lens_q begins sequences at other tokens than position_ids")
