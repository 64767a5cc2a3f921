"""The interface between engine and objective. Letters: P terms."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from treewise.base.shapes import Float, Shaped
from treewise.tree.forest import Forest

# [P] each, by name: what the model computes (`Objective.outputs`), and what trajectories carry (`Terms.streams`).
Values = dict[str, Float[Tensor, " P"]]
Streams = dict[str, Shaped[Tensor, " P"]]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a loss.

    positions: [P] int64, the tree position of each term's token, ascending.
    streams: [P] arrays for `token_losses`; floats are converted to the dtype of the log-probs, integers to int64.
    tokens: [P] int64 token ids to score instead of the tree's own (candidates of a teacher).
    weight: the divisor of metrics, a sum of loss weights.
    """

    positions: np.ndarray
    streams: dict[str, np.ndarray]
    tokens: np.ndarray | None = None
    weight: float = 0.0


def may_merge_trees(objective: object) -> bool:
    """Whether trees of one batch may be merged: not where a shared token counts once per tree (`weighting="once"`)."""
    return getattr(objective, "weighting", None) != "once"


@runtime_checkable
class Objective(Protocol):
    """A loss that is a sum over trained tokens, divided by a denominator that adds up over forests."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The values of each term that the loss needs: `log_probs`, `entropy`, ... (`nn.lm_head.OUTPUTS`)."""
        ...

    def is_separable(self, forest: Forest) -> bool:
        """Whether the sum of `token_losses` over all terms is the sum of it over the terms of each tree token alone.

        Then the gradient with respect to a token's values depends on these values alone, `token_losses` is called on
        the terms of one micro-batch after the other, and a partitioned forest takes a single walk. Otherwise it is
        called once, on all terms, and the forest takes two.
        """
        ...

    def denominator(self, forest: Forest) -> float:
        """The divisor of the sum of losses; additive over forests."""
        ...

    def terms(self, forest: Forest) -> Terms:
        """The trained tokens, with everything that `token_losses` needs."""
        ...

    def token_losses(self, values: Values, streams: Streams) -> Float[Tensor, " P"]:
        """Losses whose sum, divided by the denominator, is the loss. values, streams: [P] tensors by name."""
        ...

    def token_metrics(self, values: Values, streams: Streams) -> dict[str, Float[Tensor, " P"]]:
        """Contributions whose sums, divided by `Terms.weight`, are the metrics of a step; called without a graph."""
        ...
