"""Log-probs and entropies of edges within a window: each edge is projected once in all calls.

A call gets the values of its edges, and gives back a number for each: the gradient of its loss. At the end come the
gradients of the head and of the hidden rows, for edges that have one: from the logits, where these are held as the
graphs of the decoder are, else by one projection more. So a prompt that no call trains is projected once, whatever the
vocabulary; and nothing as large as the head is added up call by call.

Letters: E edges of a call, P edges of a window, R hidden rows, M model width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treewise.engine.window.known_rows import GrowingRows, lengthened
from treewise.nn.held_logits import HeldLogits, can_hold, hold_logits
from treewise.nn.lm_head import AnyHead, edge_loss, edge_values
from treewise.nn.platform.tensors import to_device


@dataclass(frozen=True, slots=True, eq=False)
class ScoresMark:
    """The edges that there were at a time: [P] keys, ascending, and the place of each."""

    keys: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Edges whose logits are held. first: the place of the first. numbers: [R] int64, of their rows."""

    first: int
    numbers: np.ndarray
    logits: HeldLogits

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + len(self.logits.source))


class Scores:
    """Edges of a window: a hidden row, by its number, and a token. outputs: of `lm_head.OUTPUTS`."""

    def __init__(self, outputs: tuple[str, ...]) -> None:
        self.outputs = outputs
        self._values = [GrowingRows() for _ in outputs]
        self._gradients: list[Tensor | None] = [None] * len(outputs)  # [P] each
        self._keys = self._places = np.zeros(0, dtype=np.int64)
        self._held: list[_Held] = []

    @property
    def num_bytes(self) -> int:
        """Of the logits that are held."""
        return sum(each.logits.num_bytes for each in self._held)

    @property
    def num_edges(self) -> int:
        return len(self._keys)

    @property
    def has_gradients(self) -> bool:
        return any(total is not None for total in self._gradients)

    def places(
        self, numbers: np.ndarray, tokens: np.ndarray, hidden: Tensor, head: AnyHead, *, holds: bool
    ) -> tuple[np.ndarray, Tensor]:
        """[E] int64, where the edges stand, on the host and on the device; values of new ones are computed.

        numbers: [E] int64, of the rows. tokens: [E] int64. hidden: [R, M] of all numbers. holds: the logits of new ones
        for the backward.
        """
        keys, of_edge = np.unique(numbers * head.num_tokens + tokens, return_inverse=True)
        at = np.searchsorted(self._keys, keys)
        is_known = at < len(self._keys)
        is_known[is_known] = self._keys[at[is_known]] == keys[is_known]
        places = np.empty(len(keys), dtype=np.int64)
        places[is_known] = self._places[at[is_known]]
        if not is_known.all():
            new = keys[~is_known]
            places[~is_known] = self.num_edges + np.arange(len(new))
            self._compute(new, hidden, head, holds=holds and can_hold(head))
            low = at[~is_known]
            self._keys = np.insert(self._keys, low, new)
            self._places = np.insert(self._places, low, places[~is_known])
        found = places[of_edge]
        return found, to_device(found, hidden.device)

    def _compute(self, keys: np.ndarray, hidden: Tensor, head: AnyHead, *, holds: bool) -> None:
        numbers, source = np.unique(keys // head.num_tokens, return_inverse=True)
        rows = hidden.index_select(0, to_device(numbers, hidden.device))
        tokens = to_device(keys % head.num_tokens, hidden.device)
        if holds:
            logits = hold_logits(rows, head, source, tokens, self.outputs)
            self._held.append(_Held(self.num_edges, numbers, logits))
            found = logits.values()
        else:
            with torch.no_grad():
                found = edge_values(rows, head, source, tokens, self.outputs)
        for values, name in zip(self._values, self.outputs, strict=True):
            values.append(found[name])

    def values(self, places_E: Tensor) -> list[Tensor]:
        """[E] each, by output."""
        return [each.rows.index_select(0, places_E) for each in self._values]

    def record(self, _: np.ndarray, places_E: Tensor, grads: tuple[Tensor | None, ...]) -> None:
        """Adds gradients of what `values` gave."""
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            total = self._gradients[index]
            if total is None or len(total) < self.num_edges:
                larger = grad.new_zeros(self._values[index].capacity)
                if total is not None:
                    larger[: len(total)] = total
                total = self._gradients[index] = larger
            total.index_add_(0, places_E, grad)

    def forget_gradients(self) -> None:
        self._gradients = [None] * len(self.outputs)

    def mark(self) -> ScoresMark:
        return ScoresMark(self._keys, self._places)

    def go_back(self, mark: ScoresMark) -> None:
        """Forgets the edges since."""
        self._keys, self._places = mark.keys, mark.places
        self._held = [each for each in self._held if each.first < len(mark.keys)]
        for values in self._values:
            values.num_rows = len(mark.keys)

    def let_go(self) -> None:
        """Frees logits; the backward projects again."""
        self._held = []

    def backward(self, hidden: Tensor, head: AnyHead) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Adds the gradients of the head, which collects them; gives those of hidden rows ([R, M]) with their numbers
        ([R] int64, some of them twice), in parts. hidden: rows of all numbers.
        """
        totals = {
            name: lengthened(total, self.num_edges)
            for name, total in zip(self.outputs, self._gradients, strict=True)
            if total is not None
        }
        if not totals:
            return
        is_used = torch.stack([total != 0 for total in totals.values()]).any(0).cpu().numpy()
        while self._held:
            held = self._held.pop()  # free once it is done
            edges = np.flatnonzero(is_used[held.places])
            is_used[held.places] = False
            if len(edges):
                index = to_device(held.first + edges, hidden.device)
                own = {name: total.index_select(0, index) for name, total in totals.items()}
                rows, grad = held.logits.backward(edges, own, head)
                yield held.numbers[rows], grad
        used = np.flatnonzero(is_used[self._places])  # in the order of the keys
        if len(used):
            yield self._again(used, totals, hidden, head)

    def _again(
        self, used: np.ndarray, totals: dict[str, Tensor], hidden: Tensor, head: AnyHead
    ) -> tuple[np.ndarray, Tensor]:
        """The part of edges whose logits are not held. used: [n] int64, which of the keys."""
        places = to_device(self._places[used], hidden.device)
        grads = {name: total.index_select(0, places) for name, total in totals.items()}

        def loss_of(values: dict[str, Tensor], edges: slice) -> Tensor:
            return torch.stack([(values[name] * grad[edges]).sum() for name, grad in grads.items()]).sum()

        numbers, source = np.unique(self._keys[used] // head.num_tokens, return_inverse=True)
        rows = hidden.index_select(0, to_device(numbers, hidden.device)).requires_grad_()
        tokens = to_device(self._keys[used] % head.num_tokens, hidden.device)
        loss, _ = edge_loss(rows, head, source, tokens, loss_of, self.outputs)
        loss.backward()
        assert rows.grad is not None
        return numbers, rows.grad
