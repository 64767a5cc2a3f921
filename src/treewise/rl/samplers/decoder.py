"""Decoding many rows that share prefixes, token by token: three decoders, which give the same logits up to rounding.

`SharedPrefix` (shared_prefix.py) keeps one copy of a prefix's keys and values for all rows that continue it;
`CopiedCache` copies a transformers cache for each row, so that recurrent states and any kind of layer cache follow;
`Recompute` has no cache and runs the whole rows again, for models that offer none. `choose_decoder` takes the first
whose logits are those of plain forwards, measured on the model. A prompt with images has its own (seen_prompt.py), and
experts are recorded around a decoder (heard_decoders.py).

Letters: G groups (distinct prefixes), R rows, V vocabulary.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

from treewise.errors import UnsupportedModelError
from treewise.nn.wrapped import num_embeddings
from treewise.rl.samplers.shared_prefix import (
    Prefix,
    SharedPrefix,
    device_of,
    inner_model,
    known_arguments,
    name_of_cache,
)

logger = logging.getLogger(__name__)
NUM_STEPS = 3  # of the comparison with plain forwards
TOLERANCE = 1e-3  # of the largest logit, in float32; caches order sums otherwise than a plain forward
TOLERANCE_HALF = 5e-2


class Decoder(Protocol):
    """One batch of rows. Rows are numbered by group, in the order of `prefixes`."""

    needs_equal_lengths: bool

    def __init__(self, model: nn.Module) -> None: ...

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """Logits [R, V] of the first new token of every row."""
        ...

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Appends a token, int64 [R], to each row; the logits [R, V] of the next."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows."""


def choose_decoder(model: nn.Module, method: str = "auto", token_ids: Sequence[int] = ()) -> type[Decoder]:
    """The class to sample with.

    Parameters:
        token_ids: ids that the model has seen; on others, two correct computations in bfloat16 may differ widely.

    Raises:
        UnsupportedModelError: the method that was asked for does not give the model's logits.
    """
    reasons: list[str] = []
    for name in DECODERS if method == "auto" else [method]:
        reason = why_not(model, name, token_ids)
        if reason is None:
            skipped = f" ({'; '.join(reasons)})" if reasons else ""
            logger.info("sampling from %s with %s%s", type(model).__name__, name, skipped)
            return DECODERS[name]
        reasons.append(f"{name}: {reason}")
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be sampled from. {'; '.join(reasons)}. Use method='recompute'."
    )


def why_not(model: nn.Module, name: str, token_ids: Sequence[int] = ()) -> str | None:
    """The reason why a model cannot be sampled from in this way; None where it can."""
    if name == "recompute":
        return None
    if name_of_cache(model) is None:
        return "its forward takes no cache"
    try:
        expected = _new_cache(model)
        if name == "shared_prefix" and (getattr(inner_model(model), "_is_stateful", False) or any(expected.is_linear)):
            return "it has layers with a recurrent state"
        decoder = DECODERS[name](model)
        gap, scale = _difference(decoder, Recompute(model), model, token_ids)
    except Exception as error:  # models are programs of their own; the next way is tried, and the reason logged
        return f"{type(error).__name__}: {error}"
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    limit = (TOLERANCE_HALF if half else TOLERANCE) * scale
    if not gap <= limit:
        return f"its logits differ by {gap:.2g} where {limit:.2g} is allowed"
    if isinstance(decoder, SharedPrefix):  # whose short rows do not reach a longer window
        for index, layer in enumerate(expected.layers):
            window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
            seen = decoder.windows.get(index)
            if seen != window:
                return f"layer {index} has window {window} in its cache and {seen} in its attention"
    return None


def _difference(
    decoder: Decoder, reference: Decoder, model: nn.Module, token_ids: Sequence[int]
) -> tuple[float, float]:
    """Largest difference of logits over a few steps of two groups, and the largest logit."""
    vocabulary = num_embeddings(model)
    draw = torch.Generator().manual_seed(0)
    num = 6 + 4 * NUM_STEPS
    ids = [*token_ids[:num], *torch.randint(0, vocabulary, (num,), generator=draw).tolist()][:num]
    short = 6 if decoder.needs_equal_lengths else 4
    prefixes = [tuple(ids[:6]), tuple([*ids[:3], *ids[4:7]][:short])]
    pair = (decoder, reference)
    outs = [way.start(prefixes, [2, 2], NUM_STEPS).float() for way in pair]
    gaps, scales = [], []
    for step in range(NUM_STEPS + 1):
        gaps.append(float((outs[0] - outs[1]).abs().max()))
        scales.append(float(outs[1].abs().max()))
        if step < NUM_STEPS:
            rows = [1, 2] if step else [0, 1, 2, 3]
            tokens = torch.tensor(ids[6 + 4 * step :][: len(rows)], device=outs[0].device)
            for way in pair if step == 1 else ():
                way.keep(rows)
            outs = [way.step(tokens).float() for way in pair]
    return float("inf") if any(gap != gap for gap in gaps) else max(gaps), max(scales)


class Recompute:
    """No cache: every step runs whole rows, padded at their ends, where a causal model does not look."""

    needs_equal_lengths = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rows: list[list[int]] = []

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        del max_new_tokens
        self.rows = [list(prefix) for prefix, count in zip(prefixes, num_rows, strict=True) for _ in range(count)]
        return self._logits()

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        for row, token in zip(self.rows, token_ids.tolist(), strict=True):
            row.append(token)
        return self._logits()

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def _logits(self) -> torch.Tensor:
        width = max(map(len, self.rows))
        padded = torch.tensor([row + row[-1:] * (width - len(row)) for row in self.rows], device=device_of(self.model))
        logits = self.model(input_ids=padded, **known_arguments(self.model, use_cache=False)).logits
        last = torch.tensor([len(row) - 1 for row in self.rows], device=logits.device)
        return logits[torch.arange(len(self.rows), device=logits.device), last]


class CopiedCache:
    """A transformers cache of all prefixes, copied for each row. Prefixes of a batch have one length: no padding."""

    needs_equal_lengths = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.argument = name_of_cache(model) or "cache"
        self.cache: Cache = _new_cache(model)
        self.length = 0

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        del max_new_tokens
        self.cache, self.length = _new_cache(self.model), 0
        logits = self._forward(torch.tensor(prefixes, device=device_of(self.model)), 0)
        rows = [group for group, count in enumerate(num_rows) for _ in range(count)]
        self.keep(rows)
        return logits[rows]

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Decoder`."""
        return self._forward(token_ids[:, None], self.length)

    def _forward(self, ids: torch.Tensor, first: int, **more: torch.Tensor) -> torch.Tensor:
        """first: the position of the first of these tokens. more: further arguments of the model."""
        positions = torch.arange(first, first + ids.shape[1], device=ids.device).expand(len(ids), -1)
        extra = known_arguments(self.model, use_cache=True, position_ids=positions, logits_to_keep=1)
        out = self.model(input_ids=ids, **{self.argument: self.cache}, **{**extra, **more})
        self.cache = getattr(out, self.argument, None) or self.cache
        self.length += ids.shape[1]
        return out.logits[:, -1]

    def keep(self, rows: list[int]) -> None:
        """See `Decoder`; a row may come several times."""
        self.cache.reorder_cache(torch.tensor(rows, device=device_of(self.model)))


DECODERS: Mapping[str, type[Decoder]] = {
    "shared_prefix": SharedPrefix,
    "copied_cache": CopiedCache,
    "recompute": Recompute,
}


def _new_cache(model: nn.Module) -> DynamicCache:
    """An empty cache with the layers that the model's configuration asks for."""
    return DynamicCache(config=inner_model(model).config.get_text_config(decoder=True))
