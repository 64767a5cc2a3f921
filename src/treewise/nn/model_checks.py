"""What a model and its tokens must satisfy before a step: no dropout, no weights kept between forwards, token ids in
range, known placeholders.

Each function raises an error that names the module, token or length; `nn.model.split_model` checks the architecture.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import nn
from torch.nn.utils import parametrize

from treewise.errors import ConfigError, DataError, UnsupportedModelError
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.recomputation import is_reentrant
from treewise.nn.wrapped import SUPPORTED_MODELS, base_model, named_modules
from treewise.tree.forest import Forest

NOISE = ("pdrop", "layerdrop", "jitter_noise", "neftune_noise_alpha")  # ends of names
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")


def refuse_dropout(model: nn.Module) -> None:
    """Raises if any dropout, layer drop or router noise is active.

    A shared token is computed once, so its branches cannot draw different masks, as flat rows would.

    Raises:
        UnsupportedModelError: with the first active module or attribute.
    """
    for name, module, attribute, value in _noise(model):
        if not module.training:
            continue
        if attribute == "p":
            raise UnsupportedModelError(
                f"{name or 'model'} has active dropout (p={value}); set it to 0 or call model.eval()."
            )
        raise UnsupportedModelError(
            f"{name or 'model'}.{attribute} is {value} while training; set it to 0 or call model.eval()."
        )


def zero_dropout(model: nn.Module) -> str | None:
    """Sets dropout, layer drop and router noise of all modules to 0, in place; returns a line that names them, or None.

    For measurements that compare trees with flat rows. In training such a model is an error (`refuse_dropout`).
    """
    found = list(_noise(model))
    for _, module, attribute, _ in found:
        setattr(module, attribute, 0.0)
    if not found:
        return None
    name, _, attribute, value = found[0]
    path = ".".join(part for part in (name, attribute) if part)
    return (
        f"dropout is set to 0 for this measurement, in {len(found)} places (the first: {path}, {value:g}); "
        "branches of a tree share tokens, so none can draw a mask of its own"
    )


def _noise(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, float]]:
    """Path, module, attribute and value of each dropout, layer drop and router noise above 0."""
    for name, module in named_modules(model):
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield name, module, "p", module.p
        for attribute, value in list(vars(module).items()):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value > 0 and ("dropout" in attribute or attribute.endswith(NOISE)):
                yield name, module, attribute, value


def refuse_kept_weights(model: nn.Module) -> None:
    """Raises where weights that a model computes are kept from one forward to the next.

    A walk reads them without a graph and then with one, and a probe with noise on adapters: what the first of these
    forwards left would be what the others compute with, and no gradient would pass.

    Raises:
        ConfigError: with what keeps them, and a module.
    """
    dora: Any = sys.modules.get("peft.tuners.lora.dora")
    keepers: list[tuple[str, Callable[[Any], bool]]] = []
    if parametrize._cache_enabled:
        keepers.append(("torch.nn.utils.parametrize.cached()", parametrize.is_parametrized))
    if getattr(dora, "ENABLE_DORA_CACHING", False):  # peft before 0.19 keeps none
        keepers.append(("peft's DoraCaching", lambda module: hasattr(module, "_dora_cache") and not module.training))
    for name, is_kept in keepers:
        found = next((path for path, module in named_modules(model) if is_kept(module)), None)
        if found is not None:
            raise ConfigError(
                f"{name} keeps computed weights ({found or 'of the model'}) between forwards, so some would have no "
                "gradient; call treewise outside of it."
            )


def refuse_lost_gradients(model: nn.Module) -> None:
    """Raises where layers that share keys and values are computed again by reentrant checkpoints.

    Keys and values reach later layers beside their arguments, so gradients of these would be lost; in flat training,
    too. What else may be lost so is found by the probe.

    Raises:
        UnsupportedModelError: with the first such layer.
    """
    if not any(map(is_reentrant, model.modules())):
        return
    for name, module in named_modules(model):
        if getattr(module, "is_kv_shared_layer", False) is True:
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) reads keys and values of an earlier layer, which get no gradient "
                "through reentrant gradient checkpoints, in transformers' own training either; set "
                "use_reentrant=False (gradient_checkpointing_kwargs)."
            )


def refuse_tokens(lm: DecoderAndHead, forest: Forest) -> None:
    """Raises if a token of the tree has no embedding or no logit.

    Raises:
        DataError: with the largest token id and its tree position.
    """
    limit = min(lm.num_embeddings, lm.num_logits)
    largest = int(forest.token_ids.max())
    if largest >= limit:
        position = int(forest.token_ids.argmax())
        raise DataError(
            f"token id {largest} at tree position {position} (depth {forest.depth[position]}) is beyond the "
            f"model's {limit} embeddings; was the data tokenised for another model?"
        )


def refuse_positions(lm: DecoderAndHead, forest: Forest) -> None:
    """Raises if a path is longer than the model's table of positions; on a GPU reading beyond it ends the process.

    Raises:
        DataError: with the length, the table and its size.
    """
    length, found = int(forest.depth.max()) + 1, position_table(lm.decoder)
    if found is not None and length > found[0]:
        raise DataError(
            f"the longest path has {length:,} tokens, and the model a table of {found[0]:,} positions ({found[1]}); "
            f"shorten the trajectories to {found[0]:,} tokens, or leave the longer ones out."
        )


def num_positions(config: Any) -> int | None:
    """The positions that a model was made for (`max_position_embeddings` of its text); None where it does not say."""
    size = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
    return size if isinstance(size, int) and size > 0 else None


def position_table(decoder: nn.Module) -> tuple[int, str] | None:
    """How many positions a decoder has a table for, learned or computed once, and its name; None without a table."""
    size = num_positions(getattr(decoder, "config", None))
    if size is None:
        return None
    for name, module in named_modules(decoder):
        if isinstance(module, nn.Embedding) and any(word in name for word in ("position", "wpe")):
            offset: int = getattr(module, "offset", 0)  # OPT's begins at the third row
            if module.num_embeddings - offset == size:
                return size, name
    for name, buffer in decoder.named_buffers():
        if name.endswith(("position_ids", "embed_positions")) and size in buffer.shape:
            return size, name
    return None


def refuse_candidates(lm: DecoderAndHead, token_ids: np.ndarray | None) -> None:
    """Raises `DataError` if a candidate token of a teacher ([P] integers; None: no teacher) has no logit."""
    limit, largest = min(lm.num_embeddings, lm.num_logits), -1 if token_ids is None else int(token_ids.max())
    if largest >= limit:
        raise DataError(
            f"teacher_ids hold token {largest}, which is beyond the model's {limit} tokens; a teacher with another "
            "vocabulary needs its candidates translated."
        )


def placeholders(model: nn.Module) -> dict[str, int]:
    """Token ids that stand for an image, a video or a sound, by their names in the model's configuration."""
    config = base_model(model).config
    if config.get_text_config() is config:
        return {}
    found = {name: getattr(config, name, None) for name in _PLACEHOLDERS}
    return {name: token for name, token in found.items() if isinstance(token, int)}


def refuse_placeholders(lm: DecoderAndHead, token_ids: np.ndarray) -> None:
    """Raises if a token stands for an image, a video or a sound. token_ids: [T] integers, by tree position.

    Raises:
        UnsupportedModelError: with the token and its tree position.
    """
    for name, token in placeholders(lm.model).items():
        positions = np.flatnonzero(token_ids == token)
        if len(positions) > 0:
            raise UnsupportedModelError(
                f"tree position {positions[0]} holds token {token}, the {name} of {type(lm.model).__name__}. "
                f"An image needs its file (images=); videos and sounds are not supported. {SUPPORTED_MODELS}"
            )


def refuse_lengths(model: nn.Module, length: int, what: str, advice: str) -> None:
    """Raises if rows of `length` tokens are longer than `length_limit` allows.

    A shared token would need other frequencies for every trajectory through it, and a sampler that keeps keys would use
    those of a row's beginning for its end. The one rule for training and for sampling.

    what, advice: begin and end the message.

    Raises:
        UnsupportedModelError: with the length up to which the model follows a tree.
    """
    found = length_limit(model)
    if found is not None and length > found[0]:
        limit, kind = found
        raise UnsupportedModelError(
            f"{what} has {length} tokens, but from {limit + 1} on the {kind!r} position encoding of "
            f"{type(model).__name__} depends on the length of a sequence, which shared tokens do not "
            f"have. {advice}, or fix the encoding's factor in the configuration."
        )


def length_limit(model: nn.Module) -> tuple[int, str] | None:
    """The most tokens of a row whose rotary frequencies do not depend on its length, and the kind that does beyond it
    (`dynamic`, `longrope`); None where none does."""
    found = []
    for module in model.modules():
        kinds = vars(module).get("rope_type")
        if not isinstance(kinds, str | dict):
            continue
        all_rules: Any = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind != "longrope" and "dynamic" not in kind:
                continue
            rules = all_rules if layer is None else all_rules.get(layer, {})
            fixed: Any = getattr(module, "original_max_seq_len", None)
            limit = rules.get("original_max_position_embeddings") if kind == "longrope" else fixed and fixed - 1
            if limit is not None:
                found.append((int(limit), str(kind)))
    return min(found, default=None)
