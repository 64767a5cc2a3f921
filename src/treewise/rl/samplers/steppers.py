"""Three ways to run a model token by token over many rows that share prefixes.

A stepper computes each distinct prefix once and then one token of every row per step. `SharedPrefix`
(shared_prefix.py) keeps one copy of a prefix's keys and values for all rows that continue it; `CopiedCache` copies a
transformers cache for each row, so that recurrent states and any kind of layer cache follow; `Recompute` has no cache
and runs the whole rows again, for models that offer none. All three give the same logits up to rounding.

Letters: G groups (distinct prefixes), R rows, V vocabulary, P tokens of a prefix.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache

Prefix = tuple[int, ...]


class Stepper(Protocol):
    """One batch of rows. Rows are numbered by group, in the order of `prefixes`."""

    needs_equal_lengths: bool

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """Logits [R, V] of the first new token of every row."""

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Appends a token, int64 [R], to each row; the logits [R, V] of the next."""

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows."""


class Recompute:
    """No cache: every step runs whole rows, padded at their ends, where a causal model does not look."""

    needs_equal_lengths = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rows: list[list[int]] = []

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """See `Stepper`."""
        del max_new_tokens
        self.rows = [list(prefix) for prefix, count in zip(prefixes, num_rows, strict=True) for _ in range(count)]
        return self._logits()

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Stepper`."""
        for row, token in zip(self.rows, token_ids.tolist(), strict=True):
            row.append(token)
        return self._logits()

    def keep(self, rows: list[int]) -> None:
        """See `Stepper`."""
        self.rows = [self.rows[row] for row in rows]

    def _logits(self) -> torch.Tensor:
        width = max(map(len, self.rows))
        device = next(self.model.parameters()).device
        padded = torch.tensor([row + row[-1:] * (width - len(row)) for row in self.rows], device=device)
        logits = self.model(input_ids=padded, **known_arguments(self.model, use_cache=False)).logits
        last = torch.tensor([len(row) - 1 for row in self.rows], device=logits.device)
        return logits[torch.arange(len(self.rows), device=logits.device), last]


class CopiedCache:
    """A transformers cache per prefix, copied for each row. Rows of a batch have prefixes of one length: no padding."""

    needs_equal_lengths = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.argument = cache_argument(model) or "past_key_values"
        self.cache: Any = None
        self.length = 0

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """See `Stepper`."""
        del max_new_tokens
        self.length = len(prefixes[0])
        device = next(self.model.parameters()).device
        caches, logits = [], []
        for prefix in prefixes:
            cache = new_cache(self.model)
            out = self._forward(torch.tensor([prefix], device=device), cache, 0)
            caches.append(getattr(out, self.argument, None) or cache)
            logits.append(out.logits[:, -1])
        self.cache = stacked(caches, num_rows)
        counts = torch.tensor(list(num_rows), device=device)
        return torch.cat(logits).repeat_interleave(counts, dim=0)

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Stepper`."""
        out = self._forward(token_ids[:, None], self.cache, self.length)
        self.length += 1
        return out.logits[:, -1]

    def keep(self, rows: list[int]) -> None:
        """See `Stepper`."""
        device = next(self.model.parameters()).device
        index = torch.tensor(rows, device=device)
        for layer in self.cache.layers:
            _map_tensors([layer], layer, lambda found: found[0].index_select(0, index))

    def _forward(self, ids: torch.Tensor, cache: Any, start: int) -> Any:
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(len(ids), -1)
        extra = known_arguments(self.model, use_cache=True, position_ids=positions, logits_to_keep=1)
        return self.model(input_ids=ids, **{self.argument: cache}, **extra)


def cache_argument(model: nn.Module) -> str | None:
    """The argument of the model's forward that takes a `transformers.Cache`; None where there is none."""
    known = inspect.signature(_inner(model).forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in known), None)


def new_cache(model: nn.Module) -> DynamicCache:
    """An empty cache with the layers that the model's configuration asks for."""
    return DynamicCache(config=_inner(model).config.get_text_config(decoder=True))


def is_attention_only(model: nn.Module) -> bool:
    """Whether every layer's memory is its keys and values."""
    return not getattr(_inner(model), "_is_stateful", False) and not any(new_cache(model).is_linear)


def stacked(caches: list[Any], num_rows: Sequence[int]) -> Any:
    """One cache whose rows are those of the given ones, each repeated `num_rows` times."""
    whole = copy.copy(caches[0])
    whole.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy.copy(layers[0])
        _map_tensors(list(layers), layer, lambda found: _repeated(found, num_rows))
        whole.layers.append(layer)
    return whole


def _repeated(tensors: list[torch.Tensor], num_rows: Sequence[int]) -> torch.Tensor:
    return torch.cat([tensor.expand(count, *tensor.shape[1:]) for tensor, count in zip(tensors, num_rows, strict=True)])


def _map_tensors(layers: list[Any], target: Any, change: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    """Sets every per-row tensor of `target` to `change` of the same tensors of `layers`."""
    for name, value in vars(layers[0]).items():
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            setattr(target, name, change([getattr(layer, name) for layer in layers]))
        elif isinstance(value, dict):
            mapped = dict(value)
            for key, item in value.items():
                if isinstance(item, torch.Tensor) and item.dim() > 1:
                    mapped[key] = change([getattr(layer, name)[key] for layer in layers])
            setattr(target, name, mapped)


def known_arguments(model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Those arguments that the model's forward names."""
    known = inspect.signature(_inner(model).forward).parameters
    return {name: value for name, value in arguments.items() if name in known}


def _inner(model: nn.Module) -> Any:
    """The transformers model below an adapter."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner
