"""From hidden rows of a micro-batch to what the model says about its edges, and to the loss of an objective."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from treewise.engine.walk import Walk
from treewise.errors import DataError
from treewise.nn.device import to_device
from treewise.nn.lm_head import edge_values
from treewise.objectives import Objective
from treewise.tree.forest import Forest


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which tokens are scored, each predicted from the path to its parent.

    positions: [P] int64 tree positions, ascending, none of them a first token. tokens: [P] token ids that are scored at
    these positions; None: the tree's own, and then each position is projected once however often it is listed.
    outputs: names out of `logprobs.OUTPUTS`.
    """

    positions: np.ndarray
    tokens: np.ndarray | None = None
    outputs: tuple[str, ...] = ("log_probs",)

    @classmethod
    def every_token(cls, forest: Forest, outputs: tuple[str, ...] = ("log_probs",)) -> "Wanted":
        """All tokens but first ones."""
        return cls(np.flatnonzero(forest.parent >= 0), None, outputs)

    def entries(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For every entry at these positions: which of `targets` it belongs to, and its number."""
        first = np.searchsorted(self.positions, targets, side="left")
        count = np.searchsorted(self.positions, targets, side="right") - first
        edge = np.repeat(np.arange(len(targets)), count)
        offsets = np.cumsum(count) - count
        return edge, np.repeat(first - offsets, count) + np.arange(int(count.sum()))


class Scorer:
    """Scores the wanted tokens that the micro-batches of one walk predict."""

    def __init__(self, walk: Walk, wanted: Wanted, temperature: float) -> None:
        self.walk, self.wanted, self.temperature = walk, wanted, temperature
        self.is_needed = np.zeros(walk.plan.forest.num_tokens, dtype=bool)
        self.is_needed[wanted.positions] = True

    def __call__(self, number: int, rows: torch.Tensor) -> tuple[np.ndarray, dict[str, torch.Tensor]] | None:
        """The numbers of the wanted entries that micro-batch `number` predicts ([E]), and their values ([E]) by name;
        None where there are none.
        """
        edges = self.walk.edges(number, self.is_needed)
        if len(edges.target) == 0:
            return None
        edge, entry = self.wanted.entries(edges.target)
        device = rows.device
        own = self.wanted.tokens is None
        tokens = self.walk.plan.forest.token_ids[edges.target] if own else self.wanted.tokens[entry]  # type: ignore[index]
        values = edge_values(
            rows,
            self.walk.head(self.temperature),
            edges.source if own else edges.source[edge],
            to_device(tokens, device, torch.long),
            self.wanted.outputs,
        )
        if own and len(entry) != len(edges.target):
            index = to_device(edge, device)
            values = {name: value[index] for name, value in values.items()}
        return entry, values


class ObjectiveLoss:
    """The loss of an objective on one forest: what has to be scored for it, its shares, and what a step reports."""

    def __init__(self, forest: Forest, objective: Objective, denominator: float | None) -> None:
        self.objective = objective
        self.terms = objective.terms(forest)
        self.denominator = objective.denominator(forest) if denominator is None else denominator
        if len(self.terms.positions) == 0:
            raise DataError("no trained token in the forest; a step on it would do nothing.")
        if not self.denominator > 0:
            raise DataError(f"the loss would be divided by {self.denominator}; it must be positive.")
        self.wanted = Wanted(self.terms.positions, self.terms.tokens, objective.outputs)
        self.num_trained_tokens = len(np.unique(self.terms.positions))
        self._shares: list[dict[str, torch.Tensor]] = []

    def share(self, entries: np.ndarray | None, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of some terms, by their numbers, or of all, from what the model says about them."""
        like = values["log_probs"]
        streams = {
            name: _as_tensor(stream if entries is None else stream[entries], like)
            for name, stream in self.terms.streams.items()
        }
        loss = self.objective.token_losses(values, streams).sum() / self.denominator
        with torch.no_grad():
            seen = {name: value.detach() for name, value in values.items()}
            found = self.objective.token_metrics(seen, streams)
        self._shares.append({"": loss.detach()} | {name: value.sum() for name, value in found.items()})
        return loss

    def reader(self, walk: Walk, temperature: float) -> Callable[[int, torch.Tensor], torch.Tensor | None]:
        """From a micro-batch's number and hidden rows to its share, for objectives that are separable."""
        score = Scorer(walk, self.wanted, temperature)

        def share_of(number: int, rows: torch.Tensor) -> torch.Tensor | None:
            scored = score(number, rows)
            return None if scored is None else self.share(*scored)

        return share_of

    def totals(self) -> tuple[float, dict[str, float]]:
        """The loss and the metrics; the only host synchronisation of a step."""
        names = list(self._shares[0])
        table = torch.stack([torch.stack([share[name] for name in names]) for share in self._shares])
        loss, *sums = table.double().sum(0).tolist()
        return loss, {name: total / self.terms.weight for name, total in zip(names[1:], sums, strict=True)}


def _as_tensor(stream: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return to_device(stream, like.device, like.dtype if stream.dtype.kind == "f" else torch.long)
