"""Samples from the model that is being trained, in this process: no second copy, no weights to hand over.

A rollout depends on weights, request and seed alone (draw.py). What else is in a batch changes logits by rounding only;
`isolate_requests=True` gives each request a batch of its own and takes even that away, bit for bit, for less speed.
transformers' own continuous batching (`generate_batch`) draws all rows from one global generator, which it reseeds, so
its tokens depend on the whole batch; nor does it return entropies or candidates. That is why it is not used here.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.base import features
from treewise.base.progress import busy_with, tell_progress
from treewise.errors import ConfigError, NonFiniteError, RequestRefusedError, num
from treewise.nn.model_checks import length_limit, refuse_lengths
from treewise.nn.wrapped import num_embeddings, uncompiled
from treewise.rl.samplers.decoder import DECODERS, Decoder, choose_decoder
from treewise.rl.samplers.draw import draw_tokens, stream_key
from treewise.rl.samplers.protocol import Completion, Done, SampleRequest, TextStops
from treewise.tree.images import ImageSpan

METHODS = ("auto", *DECODERS)
_STREAMS = {"logprobs": np.float32, "entropies": np.float32, "top_ids": np.int32, "top_logprobs": np.float32}
MAX_UNPADDED_TOKENS = 1 << 15  # of prefixes of one length that one forward computes


@dataclass(eq=False, slots=True)
class _SampledRow:
    """One continuation while it grows."""

    request_index: int
    request: SampleRequest
    continuation: int
    token_ids: list[int] = field(default_factory=list)
    streams: dict[str, list[Any]] = field(default_factory=dict)  # by name in `Completion`
    routes: list[np.ndarray] = field(default_factory=list)  # [tokens, L, k] each, of prefix and continuation


class TransformersSampler:
    """The default sampler: continues token ids with a transformers causal LM, PEFT-wrapped too.

    Parameters:
        model: is left exactly as it was; dropout and gradient checkpointing are off while it samples.
        max_rows: the most continuations that are computed at once.
        max_cached_tokens: the most tokens whose keys and values are alive at once (a lone row may need more).
        isolate_requests: a batch for each request, so that its bits do not depend on the others.
        method: `auto` takes the first of `shared_prefix`, `copied_cache`, `recompute` whose logits equal those of a
            plain forward on this model, and logs which.
        processor: the model's, for prompts with images.
    """

    takes_rules = True

    def __init__(
        self,
        model: nn.Module,
        *,
        max_rows: int = 64,
        max_cached_tokens: int = 262_144,
        isolate_requests: bool = False,
        method: str = "auto",
        processor: object = None,
    ) -> None:
        if method not in METHODS:
            raise ConfigError(f"sampling method {method!r} is unknown; choose one of {', '.join(METHODS)}.")
        if max_rows < 1 or max_cached_tokens < 1:
            raise ConfigError(f"max_rows ({max_rows}) and max_cached_tokens ({max_cached_tokens}) must be at least 1.")
        self.model = model
        self.max_rows = max_rows
        self.max_cached_tokens = max_cached_tokens
        self.isolate_requests = isolate_requests
        self.method, self.processor = method, processor
        self._decoder: type[Decoder] | None = None
        self._is_limited = length_limit(model) is not None
        self._lock = threading.Lock()  # a decoder switches the model's attention, and several threads may sample

    @property
    def settings(self) -> dict[str, Any]:
        """What another sampler of the same kind is made with, beside its model."""
        return {name: getattr(self, name) for name in ("max_rows", "max_cached_tokens", "isolate_requests", "method")}

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """See `Sampler`. Raises as `sample_in_parts`."""
        results: list[tuple[Completion, ...]] = [()] * len(requests)
        self.sample_in_parts(requests, results.__setitem__)
        return results

    def sample_in_parts(self, requests: Sequence[SampleRequest], done: Done) -> None:
        """See `protocol.sample_in_parts`: a part is a batch of at most `max_rows`.

        Raises:
            NonFiniteError: the model gives logits that are not numbers.
            UnsupportedModelError: a row might become longer than training follows; nothing is sampled.
            RequestRefusedError: a prefix holds an id that the model has no embedding of; nothing is sampled.
        """
        if not requests:
            return
        self._refuse_unknown(requests)
        if self._is_limited:
            longest = max(requests, key=lambda request: len(request.prefix_ids) + request.max_new_tokens)
            num_prefix, num_new = len(longest.prefix_ids), longest.max_new_tokens
            what = f"a prefix of {num_prefix} tokens with max_new_tokens={num_new}"
            refuse_lengths(self.model, num_prefix + num_new, what, "Lower max_new_tokens or shorten the prompt")
        rows = [
            _SampledRow(index, request, i)
            for index, request in enumerate(requests)
            for i in range(request.num_continuations)
        ]
        with sampling_mode(self.model):
            with self._lock:
                if self._decoder is None:
                    known = [token for request in requests for token in dict.fromkeys(request.prefix_ids)]
                    self._decoder = choose_decoder(self.model, self.method, known)
            missing = Counter(row.request_index for row in rows)
            for batch in self._batches(rows):
                with self._lock, busy_with(f"sampling {num(len(batch), 'continuation')} side by side"):
                    self._run(batch)
                missing.subtract(row.request_index for row in batch)
                for index in dict.fromkeys(row.request_index for row in batch):
                    if not missing[index]:
                        done(index, tuple(_completion(row) for row in rows if row.request_index == index))

    def _refuse_unknown(self, requests: Sequence[SampleRequest]) -> None:
        size = num_embeddings(self.model)
        for request in requests:
            if not 0 <= min(request.prefix_ids) <= max(request.prefix_ids) < size:
                wrong = next(token for token in request.prefix_ids if not 0 <= token < size)
                raise RequestRefusedError(f"token id {wrong} is beyond the model's {size:,} embeddings.")

    def update(self, model: nn.Module | None) -> None:
        """Nothing to hand over: the weights are those that are trained. A new model replaces the old one."""
        if model is not None and model is not self.model:
            self.model, self._decoder = model, None
            self._is_limited = length_limit(model) is not None

    def close(self) -> None:
        """Nothing to give back."""

    def _batches(self, rows: list[_SampledRow]) -> Iterator[list[_SampledRow]]:
        """Rows in batches, those of one prefix side by side, and prefixes with a common beginning near one another."""
        assert self._decoder is not None
        shares: dict[tuple[bool, int], list[_SampledRow]] = {}
        for row in rows:
            length = len(row.request.prefix_ids) if self._decoder.needs_equal_lengths else 0
            is_alone = self.isolate_requests or bool(row.request.images)
            shares.setdefault((is_alone, row.request_index if is_alone else length), []).append(row)
        for share in shares.values():
            batch: list[_SampledRow] = []
            for row in sorted(share, key=lambda row: row.request.prefix_ids):
                if batch and not self._fits([*batch, row]):
                    yield batch
                    batch = []
                batch.append(row)
            yield batch

    def _fits(self, batch: list[_SampledRow]) -> bool:
        assert self._decoder is not None
        counts = Counter(row.request.prefix_ids for row in batch)
        num_prefix, places = len(counts) * max(map(len, counts)), len(counts) * max(counts.values())
        if self._decoder.needs_equal_lengths and num_prefix > MAX_UNPADDED_TOKENS and len(counts) > 1:
            return False
        cached = num_prefix + places * max(row.request.max_new_tokens for row in batch)
        return places <= self.max_rows and cached <= self.max_cached_tokens

    def _seen(self, images: Sequence[ImageSpan]) -> Decoder:
        found: Decoder = features.seen_prompts.SeenPrompt(self.model, self.processor, images)
        return found

    def _run(self, rows: list[_SampledRow]) -> None:
        """Samples the rows of a batch to their ends."""
        assert self._decoder is not None
        images = rows[0].request.images
        decoder: Decoder = self._decoder(self.model) if not images else self._seen(images)
        if not any(row.request.want_routes for row in rows):
            _decode(rows, decoder)
            return
        with features.heard_decoders.listening_to(decoder) as heard:
            _decode(rows, heard)
        for row, parts in zip(rows, heard.routes.parts, strict=True):
            row.routes = parts


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, no gradient checkpointing, no graph, no compiled layers; afterwards every module is as it was
    before, also after an error."""
    training: list[Any] = [module for module in model.modules() if module.training]
    checkpointed: list[Any] = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True
    ]
    try:
        model.eval()
        for module in checkpointed:
            module.gradient_checkpointing = False
        with torch.no_grad(), uncompiled(model):
            yield
    finally:
        for module in training:
            module.training = True
        for module in checkpointed:
            module.gradient_checkpointing = True


def _decode(rows: list[_SampledRow], decoder: Decoder) -> None:
    """Token by token, until all rows have ended."""
    counts = Counter(row.request.prefix_ids for row in rows)
    limit = max(row.request.max_new_tokens for row in rows)
    logits = decoder.start(list(counts), list(counts.values()), limit)
    while True:
        token_ids = _append(rows, logits)
        tell_progress("token by token", max(len(row.token_ids) for row in rows), limit)
        alive = [
            i
            for i, row in enumerate(rows)
            if len(row.token_ids) < row.request.max_new_tokens and not row.request.is_stopped(row.token_ids)
        ]
        if not alive:
            return
        if len(alive) < len(rows):
            decoder.keep(alive)
            rows = [rows[i] for i in alive]
            token_ids = token_ids[torch.tensor(alive, device=token_ids.device)]
        logits = decoder.step(token_ids)


def _append(rows: list[_SampledRow], logits: torch.Tensor) -> torch.Tensor:
    """Draws a token for each row and writes it down; int64 [R]."""
    rules = [row.request for row in rows]
    keys = [stream_key(row.request.seed, row.continuation, len(row.token_ids)) for row in rows]
    want_entropy = any(rule.want_entropy for rule in rules)
    num_top = min(max(rule.num_top for rule in rules), logits.shape[-1])
    allowed = _allowed(rows, logits)
    draw = draw_tokens(logits, rules, keys, want_entropy=want_entropy, num_top=num_top, allowed=allowed)
    drawn = {name: getattr(draw, name) for name in ("token_ids", *_STREAMS)}
    values = {name: tensor.tolist() for name, tensor in drawn.items() if tensor is not None}
    for index, (row, token) in enumerate(zip(rows, values.pop("token_ids"), strict=True)):
        if not np.isfinite(values["logprobs"][index]):
            raise NonFiniteError(
                f"request {row.request_index}, continuation {row.continuation}: the model's logits are not numbers "
                f"after {len(row.token_ids)} new tokens; the weights are damaged, or their dtype overflows."
            )
        row.token_ids.append(token)
        for name, own in values.items():
            row.streams.setdefault(name, []).append(own[index])
    return draw.token_ids


def _allowed(rows: list[_SampledRow], logits: torch.Tensor) -> torch.Tensor | None:
    """bool [R, V], which ids the rows' rules let follow; None: all."""
    rules = [row.request.rules if isinstance(row.request, TextStops) else None for row in rows]
    if not any(rules):
        return None
    found = np.ones(logits.shape, dtype=bool)
    for index, (row, rule) in enumerate(zip(rows, rules, strict=True)):
        if rule is not None and (own := rule.allowed(row.token_ids)) is not None:
            found[index] = False
            found[index, : len(own)] = own[: found.shape[1]]
            if not found[index].any():
                raise RequestRefusedError("the rules of the reply let no token follow.")
    return torch.from_numpy(found).to(logits.device)


def _completion(row: _SampledRow) -> Completion:
    request, num_top = row.request, row.request.num_top
    asked = ["logprobs", *["entropies"] * request.want_entropy, *["top_ids", "top_logprobs"] * bool(num_top)]
    routes = [route for route in row.routes if len(route)]
    arrays: dict[str, Any] = {name: np.array(row.streams[name], dtype=_STREAMS[name]) for name in asked}
    return Completion(
        token_ids=np.array(row.token_ids, dtype=np.int32),
        finish_reason="stop" if request.is_stopped(row.token_ids) else "length",
        routed_experts=np.sort(np.concatenate(routes), axis=-1) if routes and request.want_routes else None,
        **{name: array[:, :num_top] if array.ndim == 2 else array for name, array in arrays.items()},
    )
