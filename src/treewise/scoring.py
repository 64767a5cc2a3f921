"""From hidden rows of a micro-batch to what the model says about its edges, and to its share of a separable loss."""

from dataclasses import dataclass

import numpy as np
import torch

from treewise.errors import DataError
from treewise.forest import Forest
from treewise.logprobs import edge_values
from treewise.objectives import SeparableObjective, Terms
from treewise.walk import Walk


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
            self.walk.parts.head(self.temperature),
            torch.as_tensor(edges.source if own else edges.source[edge], device=device),
            torch.as_tensor(tokens, dtype=torch.long, device=device),
            self.wanted.outputs,
        )
        if own and len(entry) != len(edges.target):
            index = torch.as_tensor(edge, device=device)
            values = {name: value[index] for name, value in values.items()}
        return entry, values


class SeparableLoss:
    """Maps hidden rows of micro-batches to their share of a separable loss, and adds the shares up."""

    def __init__(
        self, walk: Walk, objective: SeparableObjective, temperature: float, denominator: float | None
    ) -> None:
        forest = walk.plan.forest
        self.objective = objective
        self.terms: Terms = objective.terms(forest)
        self.denominator = objective.denominator(forest) if denominator is None else denominator
        if len(self.terms.positions) == 0:
            raise DataError("no trained token in the forest; a step on it would do nothing.")
        if not self.denominator > 0:
            raise DataError(f"the loss would be divided by {self.denominator}; it must be positive.")
        self.score = Scorer(walk, Wanted(self.terms.positions), temperature)
        self.num_trained_tokens = int(self.score.is_needed.sum())
        self._shares: list[torch.Tensor] = []

    def __call__(self, number: int, rows: torch.Tensor) -> torch.Tensor | None:
        scored = self.score(number, rows)
        if scored is None:
            return None
        term, values = scored
        logprobs = values["log_probs"]
        streams = {
            name: torch.as_tensor(stream[term], dtype=logprobs.dtype, device=logprobs.device)
            for name, stream in self.terms.streams.items()
        }
        loss = self.objective.token_losses(logprobs, streams).sum() / self.denominator
        self._shares.append(loss.detach())
        return loss

    def total(self) -> float:
        """The loss; the only host synchronisation of a step."""
        return float(torch.stack(self._shares).double().sum())
