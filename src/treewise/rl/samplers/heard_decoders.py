"""Decoders around which the experts that a mixture's routers choose are recorded (`want_routes`).

Each decoder of `decoder.py` computes other tokens in its forwards, so each has its own way to find in them what a row
was given: the tokens of its prefix, then one with each step.

Letters: G groups (distinct prefixes), R rows, L routers, k experts of a token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from treewise.nn.model import split_model
from treewise.nn.routing import HeardRoutes, heard
from treewise.rl.samplers.decoder import CopiedCache, Decoder, Recompute
from treewise.rl.samplers.shared_prefix import PREFILL_TOKENS, Prefix, SharedPrefix

NO_ROUTES = np.zeros((0, 1, 1), dtype=np.int16)  # of a prefix of one token, which each row computes itself


class RowRoutes:
    """parts: of each row that a batch began with, in their order, int16 [tokens, L, k] each."""

    def __init__(self) -> None:
        self.parts: list[list[np.ndarray]] = []
        self._alive: list[int] = []  # the rows that go on

    def begin(self, of_prefixes: Sequence[np.ndarray], num_rows: Sequence[int]) -> None:
        """Takes what was chosen for the tokens of each group's prefix."""
        self.parts = [[own] for own, count in zip(of_prefixes, num_rows, strict=True) for _ in range(count)]
        self._alive = list(range(len(self.parts)))

    def add(self, of_rows: np.ndarray) -> None:
        """Takes what was chosen for the next token of each row that goes on, [R, L, k]."""
        for row, own in zip(self._alive, of_rows, strict=True):
            self.parts[row].append(own[None])

    def keep(self, rows: Sequence[int]) -> None:
        """As `Decoder.keep`."""
        self._alive = [self._alive[row] for row in rows]


class HeardSharedPrefix(SharedPrefix):
    """Tokens of a prefix are computed by `_prefill`, but for its last one, which each of its rows computes."""

    def __init__(self, model: nn.Module, routes: HeardRoutes) -> None:
        super().__init__(model)
        self.heard, self.routes = routes, RowRoutes()
        self._num_rows: Sequence[int] = ()
        self._of_prefixes: list[np.ndarray] = []
        self._of_forwards: list[np.ndarray] = []  # of the present call of `_prefill`, [rows, tokens, L, k] each

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        self._num_rows, self._of_prefixes = num_rows, []
        return super().start(prefixes, num_rows, max_new_tokens)

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits = super().step(token_ids)
        if not self.routes.parts:
            self.routes.begin(self._of_prefixes, self._num_rows)
        self.routes.add(self.heard.taken(len(self.prefix_lengths) * self.width)[self.slots, 0])
        return logits

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.routes.keep(rows)

    def _prefill(
        self, bucket: Sequence[Prefix], before: Prefix, known: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> DynamicCache:
        self._of_forwards = []
        cache = super()._prefill(bucket, before, known)
        num_computed = sum(forward.shape[1] for forward in self._of_forwards)
        num_known = max(max(map(len, bucket)) - 1 - num_computed, 0)  # taken from the prefix before
        begun = [self._of_prefixes[-1][:num_known]] if num_known else []
        for row, prefix in enumerate(bucket):  # what all share was computed in one row
            own = [*begun, *(each[row if len(each) > 1 else 0] for each in self._of_forwards)]
            self._of_prefixes.append(np.concatenate(own)[: len(prefix) - 1] if own else NO_ROUTES)
        return cache

    def _forward(self, rows: Sequence[Prefix], cache: DynamicCache, start: int) -> None:
        for low in range(0, len(rows[0]), PREFILL_TOKENS):
            super()._forward([row[low : low + PREFILL_TOKENS] for row in rows], cache, start + low)
            self._of_forwards.append(self.heard.taken(len(rows)))


class HeardCopies:
    """Around a `CopiedCache`, which computes whole prefixes, then one token of each row."""

    needs_equal_lengths = True

    def __init__(self, decoder: CopiedCache, routes: HeardRoutes) -> None:
        self.decoder, self.heard, self.routes = decoder, routes, RowRoutes()

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        logits = self.decoder.start(prefixes, num_rows, max_new_tokens)
        self.routes.begin(list(self.heard.taken(len(prefixes))), num_rows)
        return logits

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits = self.decoder.step(token_ids)
        self.routes.add(self.heard.taken(len(token_ids))[:, 0])
        return logits

    def keep(self, rows: list[int]) -> None:
        self.decoder.keep(rows)
        self.routes.keep(rows)


class HeardRecompute:
    """Around a `Recompute`, which computes whole rows, padded at their ends, again and again."""

    needs_equal_lengths = False

    def __init__(self, decoder: Recompute, routes: HeardRoutes) -> None:
        self.decoder, self.heard, self.routes = decoder, routes, RowRoutes()

    def start(self, prefixes: Sequence[Prefix], num_rows: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        logits = self.decoder.start(prefixes, num_rows, max_new_tokens)
        first = np.cumsum([0, *num_rows])[:-1]
        taken = self.heard.taken(sum(num_rows))
        self.routes.begin([taken[row, : len(prefix)] for row, prefix in zip(first, prefixes, strict=True)], num_rows)
        return logits

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits = self.decoder.step(token_ids)
        newest = [len(row) - 1 for row in self.decoder.rows]
        self.routes.add(self.heard.taken(len(newest))[range(len(newest)), newest])
        return logits

    def keep(self, rows: list[int]) -> None:
        self.decoder.keep(rows)
        self.routes.keep(rows)


@contextmanager
def listening_to(decoder: Decoder) -> Iterator[HeardSharedPrefix | HeardCopies | HeardRecompute]:
    """A decoder like this one, whose `routes` are of the rows of the batch that it decodes within.

    Raises:
        UnsupportedModelError: as `routing.heard`.
    """
    assert isinstance(decoder, SharedPrefix | CopiedCache | Recompute)
    with heard(split_model(decoder.model).decoder) as routes:
        if isinstance(decoder, SharedPrefix):
            yield HeardSharedPrefix(decoder.model, routes)
        elif isinstance(decoder, CopiedCache):
            yield HeardCopies(decoder, routes)
        else:
            yield HeardRecompute(decoder, routes)
