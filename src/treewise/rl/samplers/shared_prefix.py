"""Decoding with one copy of each prefix's keys and values, however many rows continue it.

Plain batched generation copies the prefix for every row and reads all copies at every step; with 1,000 tokens shared by
16 rows that is where the time goes. Here the queries of all rows of a group meet the keys of their prefix in one matrix
product, and each row's own tokens are a second, short one; one softmax spans both. The layout is a grid of G groups
by W rows; rows that have ended leave holes, which are taken out when half of the grid is empty.

Letters: G groups (distinct prefixes), W rows of a group (with holes), B = G * W, R rows, P keys of the longest prefix,
S new tokens so far, H query heads, K key heads, D head size, V vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from treewise.errors import UnsupportedModelError
from treewise.nn.platform.releases import cache_name

NAME = "treewise_shared_prefix"
PREFILL_TOKENS = 4096  # tokens of a prefix that one forward computes
FORWARD_TOKENS = 32  # what a forward costs besides its tokens, in tokens
_KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position", "attention_mask"}

Prefix = tuple[int, ...]


class SharedPrefix:
    """For models whose layers remember keys and values alone. Attention gets it as the argument `treewise_rows`.

    Attributes:
        cache: of `RowsLayer`s. prefix_lengths: int64 [G]. slots: the place in the grid of each row.
        windows: the window that each layer's attention asked for (None: none).
    """

    needs_equal_lengths = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.argument = name_of_cache(model) or "cache"
        self.cache: Cache
        self.prefix_lengths = torch.zeros(0, dtype=torch.long, device=device_of(model))
        self.slots: list[int] = []
        self.width = 0
        self.windows: dict[int, int | None] = {}

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """See `Decoder`. Prefixes in lexicographic order are computed with the fewest tokens.

        The last token of a prefix is computed as the first of each of its rows.
        """
        prefilled: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # by prefix and layer, [1, K, P', D] each
        before: Prefix = ()
        for bucket in _buckets(prefixes):
            cache = self._prefill(bucket, before, prefilled[-1] if prefilled else ())
            for row, prefix in enumerate(bucket):
                kept = (slice(row, row + 1), slice(None), slice(0, len(prefix) - 1))
                prefilled.append([(layer.keys[kept], layer.values[kept]) for layer in cache.layers])
            before = bucket[-1]
        self.width = max(num_rows)
        self.slots = [group * self.width + row for group, count in enumerate(num_rows) for row in range(count)]
        longest, places = max(map(len, prefixes)) - 1, len(prefixes) * self.width
        layers = [
            RowsLayer(
                _padded([keys for keys, _ in own], longest),
                _padded([values for _, values in own], longest),
                places,
                max_new_tokens + 1,
            )
            for own in zip(*prefilled, strict=True)
        ]
        self.cache = Cache(layers=layers)
        self.prefix_lengths = torch.tensor([len(prefix) - 1 for prefix in prefixes], device=device_of(self.model))
        last = [prefix[-1] for prefix, count in zip(prefixes, num_rows, strict=True) for _ in range(count)]
        return self.step(torch.tensor(last, device=device_of(self.model)))

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Decoder`."""
        slots = torch.tensor(self.slots, device=token_ids.device)
        grid = token_ids.new_zeros(len(self.prefix_lengths) * self.width)
        grid[slots] = token_ids
        positions = self.prefix_lengths.repeat_interleave(self.width) + self.cache.layers[0].num_own
        with _shared_attention(self.model):
            out = self.model(
                input_ids=grid[:, None],
                position_ids=positions[:, None],
                use_cache=True,
                treewise_rows=self,
                **{self.argument: self.cache},
            )
        return out.logits[:, -1].index_select(0, slots)

    def keep(self, rows: list[int]) -> None:
        """See `Decoder`."""
        self.slots = [self.slots[row] for row in rows]
        if 2 * len(self.slots) > len(self.prefix_lengths) * self.width:
            return
        members: dict[int, list[int]] = {}
        for slot in self.slots:
            members.setdefault(slot // self.width, []).append(slot)
        self.width = max(map(len, members.values()))
        filled = [slot for own in members.values() for slot in own + own[:1] * (self.width - len(own))]
        groups = torch.tensor(list(members), device=self.prefix_lengths.device)
        for layer in self.cache.layers:
            layer.select(groups, torch.tensor(filled, device=groups.device))
        self.prefix_lengths = self.prefix_lengths.index_select(0, groups)
        places = {s: group * self.width + i for group, own in enumerate(members.values()) for i, s in enumerate(own)}
        self.slots = [places[slot] for slot in self.slots]

    def _prefill(
        self, bucket: Sequence[Prefix], before: Prefix, known: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> DynamicCache:
        """Keys and values of all but the last tokens of some prefixes, one row each; what is behind them is padding.

        Tokens that all share are computed once, or taken from those `known` of the prefix `before`.
        """
        shared = min(_num_shared(bucket), *(len(prefix) - 1 for prefix in bucket))
        cache = DynamicCache()  # without a configuration: windowed layers, too, keep all keys
        start = max(min(_num_shared([bucket[0], before]), shared, len(before) - 1), 0)
        for index, (keys, values) in enumerate(known if start else ()):  # a cache of no tokens has one row for ever
            cache.update(keys[:, :, :start], values[:, :, :start], index)
        self._forward([bucket[0][start:shared]], cache, start)
        if len(bucket) > 1:
            cache.batch_repeat_interleave(len(bucket))
        width = max(map(len, bucket)) - 1 - shared
        rest = [(*prefix[shared:-1], *prefix[-1:] * (width - len(prefix) + 1 + shared)) for prefix in bucket]
        self._forward(rest, cache, shared)
        if not cache.layers:  # prefixes of one token: nothing is kept of what shows the sizes
            self._forward(bucket, cache, 0)
        return cache

    def _forward(self, rows: Sequence[Prefix], cache: DynamicCache, start: int) -> None:
        """Appends the tokens of all rows, which are equally many, to a cache that holds `start` of each."""
        extra = known_arguments(self.model, logits_to_keep=1) | {self.argument: cache}
        for low in range(0, len(rows[0]), PREFILL_TOKENS):
            part = torch.tensor([row[low : low + PREFILL_TOKENS] for row in rows], device=device_of(self.model))
            positions = torch.arange(start + low, start + low + part.shape[1], device=part.device).expand_as(part)
            self.model(input_ids=part, position_ids=positions, use_cache=True, **extra)


def _buckets(prefixes: Sequence[Prefix]) -> list[list[Prefix]]:
    """Groups neighbouring prefixes into padded batches: a prefix joins the batch before it where that costs no more
    than a forward of its own, which counts as `FORWARD_TOKENS` tokens besides those that it computes.
    """
    buckets: list[list[Prefix]] = []
    for prefix in prefixes:
        if buckets:
            bucket = buckets[-1]
            alone = len(prefix) - _num_shared([bucket[-1], prefix]) + FORWARD_TOKENS
            if _cost([*bucket, prefix]) <= _cost(bucket) + alone:
                bucket.append(prefix)
                continue
        buckets.append([prefix])
    return buckets


def _cost(bucket: Sequence[Prefix]) -> int:
    """Tokens of a padded batch, those that all share counted once."""
    shared = _num_shared(bucket)
    return shared + len(bucket) * (max(map(len, bucket)) - shared)


def _num_shared(bucket: Sequence[Prefix]) -> int:
    """Tokens that all prefixes begin with."""
    least, most = min(bucket), max(bucket)  # of all, these two share the fewest
    differs = (index for index, (a, b) in enumerate(zip(least, most, strict=False)) if a != b)
    return next(differs, min(len(least), len(most)))


def _padded(tensors: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """[1, K, P', D] tensors in one of [G, K, length, D], with zeros behind the shorter ones."""
    whole = tensors[0].new_zeros(len(tensors), tensors[0].shape[1], length, tensors[0].shape[3])
    for group, tensor in enumerate(tensors):
        whole[group, :, : tensor.shape[2]] = tensor[0]
    return whole


class RowsLayer(CacheLayerMixin):
    """Keys and values of one layer: of the prefixes, [G, K, P, D], and of the rows' own tokens, [B, K, room, D]."""

    is_sliding = False
    is_compileable = False

    def __init__(self, prefix_keys: torch.Tensor, prefix_values: torch.Tensor, num_rows: int, room: int) -> None:
        super().__init__()
        self.prefix_keys, self.prefix_values = prefix_keys, prefix_values
        self.keys = prefix_keys.new_empty(num_rows, prefix_keys.shape[1], room, prefix_keys.shape[3])
        self.values = prefix_values.new_empty(num_rows, prefix_values.shape[1], room, prefix_values.shape[3])
        self.num_own = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the layer is made whole."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token of every row; gives the new keys and values back, which attention does not read."""
        self.keys[:, :, self.num_own] = key_states[:, :, 0]
        self.values[:, :, self.num_own] = value_states[:, :, 0]
        self.num_own += 1
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return self.prefix_keys.shape[2] + self.num_own

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset; masks are made in attention, from depths."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: a row may become as long as it does."""
        return -1

    def select(self, groups: torch.Tensor, rows: torch.Tensor) -> None:
        """Keeps these groups and rows, int64 indices."""
        self.prefix_keys = self.prefix_keys.index_select(0, groups)
        self.prefix_values = self.prefix_values.index_select(0, groups)
        self.keys = self.keys.index_select(0, rows)
        self.values = self.values.index_select(0, rows)


@contextmanager
def _shared_attention(model: nn.Module) -> Iterator[None]:
    """The model's attention is `attention_forward` inside, and what it was outside."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)  # masks follow from depths, in attention
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "sub_configs")}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    treewise_rows: SharedPrefix | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention contract for one new token per row: [B, H, 1, D] in, ([B, 1, H, D], None) out.

    Raises:
        UnsupportedModelError: the model lost the batch on the way, or hands attention something that is unknown here.
    """
    del key, value  # the cache holds them
    unknown = [k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k not in _KNOWN_TENSORS]
    if treewise_rows is None or attention_mask is not None or unknown or query.shape[2] != 1:
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot decode over a shared prefix (got the batch: {treewise_rows is not None}, "
            f"mask of its own: {attention_mask is not None}, unknown tensors: {unknown}, tokens: {query.shape[2]})."
        )
    window: int | None = kwargs.get("sliding_window")
    index = cast(int, module.layer_idx)
    treewise_rows.windows[index] = window
    scaling = kwargs.get("scaling")
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    layer, lengths = treewise_rows.cache.layers[index], treewise_rows.prefix_lengths
    return _attend(query, layer, lengths, window, kwargs.get("softcap"), kwargs.get("s_aux")), None


def _attend(
    query: torch.Tensor,
    layer: RowsLayer,
    prefix_lengths: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B, H, 1, D] scaled queries to [B, 1, H, D]."""
    num_groups, num_key_heads, num_keys, _ = layer.prefix_keys.shape
    num_rows, num_heads = query.shape[:2]
    width, per_key, num_own = num_rows // num_groups, num_heads // num_key_heads, layer.num_own
    by_row = query.reshape(num_rows, num_key_heads, per_key, -1)
    by_group = by_row.reshape(num_groups, width, num_key_heads, per_key, -1).transpose(1, 2)
    by_group = by_group.reshape(num_groups, num_key_heads, width * per_key, -1)
    far = (by_group @ layer.prefix_keys.transpose(2, 3)).float()  # [G, K, W * H/K, P]
    near = (by_row @ layer.keys[:, :, :num_own].transpose(2, 3)).float()  # [B, K, H/K, S]
    if softcap is not None:
        far, near = softcap * torch.tanh(far / softcap), softcap * torch.tanh(near / softcap)
    depth = torch.arange(num_keys, device=prefix_lengths.device)
    is_hidden = depth[None] >= prefix_lengths[:, None]  # padding
    if window is not None:  # and keys that have left the window of the newest token
        is_hidden |= depth[None] <= (prefix_lengths + num_own - 1)[:, None] - window
        near[..., : max(num_own - window, 0)] = float("-inf")
    far = far.masked_fill_(is_hidden[:, None, None], float("-inf"))
    far = far.reshape(num_groups, num_key_heads, width, per_key, num_keys).transpose(1, 2)
    scores = torch.cat([far.reshape(num_rows, num_key_heads, per_key, num_keys), near], dim=-1)
    if sinks is not None:
        column = sinks.float().reshape(1, num_key_heads, per_key, 1).expand(num_rows, -1, -1, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    far_weights = weights[..., :num_keys].reshape(num_groups, width, num_key_heads, per_key, num_keys).transpose(1, 2)
    out = far_weights.reshape(num_groups, num_key_heads, width * per_key, num_keys) @ layer.prefix_values
    out = out.reshape(num_groups, num_key_heads, width, per_key, -1).transpose(1, 2)
    near_weights = weights[..., num_keys : num_keys + num_own]
    out = out.reshape(num_rows, num_key_heads, per_key, -1) + near_weights @ layer.values[:, :, :num_own]
    return out.reshape(num_rows, 1, num_heads, -1)


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model below an adapter."""
    inner: Any = model
    return cast(PreTrainedModel, inner.get_base_model() if hasattr(inner, "get_base_model") else inner)


def device_of(model: nn.Module) -> torch.device:
    """Of the first parameter, where token ids go."""
    return next(model.parameters()).device


def known_arguments(model: nn.Module, **arguments: object) -> dict[str, Any]:
    """Those arguments that the model's forward names."""
    known = inspect.signature(inner_model(model).forward).parameters
    return {name: value for name, value in arguments.items() if name in known}


def name_of_cache(model: nn.Module) -> str | None:
    """The argument of the model's forward that takes a `transformers.Cache`, and the field of its output that holds it;
    None where there is none."""
    return cache_name(inspect.signature(inner_model(model).forward).parameters)
