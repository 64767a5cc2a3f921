"""From hidden rows of a micro-batch to log-probs of its edges, and to its share of a separable loss."""

import numpy as np
import torch

from treewise.errors import DataError
from treewise.logprobs import edge_logprobs
from treewise.objectives import SeparableObjective, Terms
from treewise.walk import Walk


def edge_values(
    walk: Walk, number: int, rows: torch.Tensor, is_needed: np.ndarray, temperature: float
) -> tuple[torch.Tensor, np.ndarray] | None:
    """Log-probs of the needed edges that leave a micro-batch ([E]), and the tree positions of their targets ([E])."""
    edges = walk.edges(number, is_needed)
    if len(edges.target) == 0:
        return None
    device = rows.device
    tokens = torch.as_tensor(walk.plan.forest.token_ids[edges.target], dtype=torch.long, device=device)
    source = torch.as_tensor(edges.source, device=device)
    logprobs, _ = edge_logprobs(rows, walk.parts.head(temperature), source, tokens)
    return logprobs, edges.target


class SeparableLoss:
    """Maps hidden rows of micro-batches to their share of a separable loss, and adds the shares up."""

    def __init__(
        self, walk: Walk, objective: SeparableObjective, temperature: float, denominator: float | None
    ) -> None:
        forest = walk.plan.forest
        self.walk, self.objective, self.temperature = walk, objective, temperature
        self.terms: Terms = objective.terms(forest)
        self.denominator = objective.denominator(forest) if denominator is None else denominator
        if len(self.terms.positions) == 0:
            raise DataError("no trained token in the forest; a step on it would do nothing.")
        if not self.denominator > 0:
            raise DataError(f"the loss would be divided by {self.denominator}; it must be positive.")
        self.is_needed = np.zeros(forest.num_tokens, dtype=bool)
        self.is_needed[self.terms.positions] = True
        self.num_trained_tokens = int(self.is_needed.sum())
        self._shares: list[torch.Tensor] = []

    def __call__(self, number: int, rows: torch.Tensor) -> torch.Tensor | None:
        values = edge_values(self.walk, number, rows, self.is_needed, self.temperature)
        if values is None:
            return None
        logprobs, targets = values
        device = logprobs.device
        edge_of_term, term = self._terms_of(targets)
        streams = {
            name: torch.as_tensor(stream[term], dtype=logprobs.dtype, device=device)
            for name, stream in self.terms.streams.items()
        }
        per_term = logprobs[torch.as_tensor(edge_of_term, device=device)]
        loss = self.objective.token_losses(per_term, streams).sum() / self.denominator
        self._shares.append(loss.detach())
        return loss

    def _terms_of(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For every term on these targets: which edge it reads, and its number."""
        first = np.searchsorted(self.terms.positions, targets, side="left")
        count = np.searchsorted(self.terms.positions, targets, side="right") - first
        edge = np.repeat(np.arange(len(targets)), count)
        offsets = np.cumsum(count) - count
        return edge, np.repeat(first - offsets, count) + np.arange(int(count.sum()))

    def total(self) -> float:
        """The loss; the only host synchronisation of a step."""
        return float(torch.stack(self._shares).double().sum())
