"""What a rank's part of a step costs: three counts, and the seconds of each.

    seconds = seconds_per_token * tokens + seconds_per_pair * pairs + seconds_per_micro_batch * micro-batches

A token or pair counts 1 for its forward and backward; a second forward of it, where a plan recomputes it, adds the
forward's fraction. The three costs come from FLOPs until measurements exist, and are then fitted to the run's own steps
by least squares, as AReaL-DTA does for its tree time model.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import product

import numpy as np

from treewise.errors import ConfigError
from treewise.planning.partition import FORWARD_FRACTION, PAIR_FORWARD_FRACTION, TOKENS_PER_LAUNCH
from treewise.planning.planner import BACKWARD, Plan
from treewise.tree.forest import Forest

# Weight of the prior relative to one measured step. Small: a dozen steps that differ outweigh it.
PRIOR_WEIGHT = 0.002
# No cost falls below this fraction of its prior: a few outliers must not make tokens free.
MIN_COST_FRACTION = 0.02


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed in one step on one rank.

    tokens, pairs: forward and backward of one counts 1; an image counts as the tokens that cost as much.
    micro_batches: forwards of the model, with a graph or without.
    """

    tokens: float
    pairs: float
    micro_batches: float


def pairs_before(forest: Forest) -> np.ndarray:
    """[T + 1] int64, attention pairs of all tokens before a tree position."""
    return np.concatenate([[0], np.cumsum(forest.depth + np.int64(1))])


def work_of(plan: Plan, image_tokens: float = 0.0) -> Work:
    """The work of a plan, including what it recomputes. image_tokens: tokens that cost as much as its images."""
    recomputed = [batch.ranges for batch in plan.micro_batches if batch.is_open and not batch.is_held]
    recomputed_pairs = 0
    if recomputed:
        ranges = np.concatenate(recomputed)
        # A range of open tokens may run through several segments of one path, so depths are summed token by token.
        before = pairs_before(plan.forest)
        recomputed_pairs = int((before[ranges[:, 1]] - before[ranges[:, 0]]).sum())
    return Work(
        tokens=plan.forest.num_tokens + FORWARD_FRACTION * plan.num_recomputed_tokens + image_tokens,
        pairs=plan.forest.num_tree_pairs + PAIR_FORWARD_FRACTION * recomputed_pairs,
        micro_batches=sum(step.action != BACKWARD for step in plan.schedule),
    )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a token, of a query-key pair (each forward and backward) and of a micro-batch.

    Only their ratios matter to a placement.

    Raises:
        ConfigError: a cost that is negative or not finite, or tokens and pairs that both cost nothing.
    """

    seconds_per_token: float
    seconds_per_pair: float
    seconds_per_micro_batch: float

    def __post_init__(self) -> None:
        if not all(np.isfinite(cost) and cost >= 0 for cost in astuple(self)):
            raise ConfigError(f"costs must be finite and not negative, found {self}.")
        if self.seconds_per_token + self.seconds_per_pair <= 0:
            raise ConfigError("seconds_per_token and seconds_per_pair are both 0; one must be positive.")

    @classmethod
    def from_flops(cls, flops_per_token: float, flops_per_pair: float, flops_per_second: float = 1e12) -> "CostModel":
        """Estimated costs (seconds per token, per pair, per micro-batch), from FLOPs until measurements exist.

        flops_per_token: of its linear layers and head, forward and backward. flops_per_pair: of attention in all
        layers, forward and backward. A micro-batch costs `TOKENS_PER_LAUNCH` tokens, as in the planner.
        """
        per_token = flops_per_token / flops_per_second
        return cls(per_token, flops_per_pair / flops_per_second, TOKENS_PER_LAUNCH * per_token)

    def seconds(self, work: Work) -> float:
        """Predicted seconds."""
        return (
            self.seconds_per_token * work.tokens
            + self.seconds_per_pair * work.pairs
            + self.seconds_per_micro_batch * work.micro_batches
        )


def fit(prior: CostModel, works: Sequence[Work], seconds: Sequence[float]) -> CostModel:
    """Costs from measured steps: least squares of errors relative to the measured time, so that a step which was slow
    for another reason (compilation, other jobs) weighs little, with the prior as a weak measurement. A step without
    tokens, or whose time is not positive and finite, is no measurement; without any the prior holds.

    All ranks must place with the same costs: fit on one rank, with the measurements of all, and broadcast the three
    numbers. Measure forward and backward of a rank's own work, without the optimizer and without the first step.

    The prior is scaled to the measured time first, so only its ratios matter: steps that are all alike change the scale
    and keep the ratios.
    """
    pairs = zip(works, seconds, strict=True)
    valid = [(astuple(work), time) for work, time in pairs if work.tokens > 0 and time > 0 and np.isfinite(time)]
    if not valid:
        return prior
    counts, measured = np.array([work for work, _ in valid]), np.array([time for _, time in valid])
    costs = np.array(astuple(prior))
    costs *= np.median(measured / (counts @ costs))
    # As fractions of the scaled prior all unknowns are near 1; what costs nothing in the prior is not fitted.
    fitted = np.flatnonzero(costs > 0)
    rows = (counts * costs)[:, fitted] / measured[:, None]
    prior_rows = np.sqrt(PRIOR_WEIGHT) * np.eye(len(fitted))
    left = np.concatenate([rows, prior_rows])
    right = np.concatenate([np.ones(len(rows)), prior_rows.sum(axis=1)])
    fractions = bounded_least_squares(left, right, MIN_COST_FRACTION)
    costs[fitted] *= fractions
    return CostModel(*costs.tolist())


def bounded_least_squares(left: np.ndarray, right: np.ndarray, least: float) -> np.ndarray:
    """The `x >= least` ([n] float64) that minimises `|left @ x - right|`, by trying every set of unknowns above it.

    left: [rows, n] float64 of full column rank, with a small n. right: [rows] float64.
    """
    candidates = []
    for is_free in map(np.array, product((True, False), repeat=left.shape[1])):
        found = np.full(left.shape[1], least)
        rest = right - least * left[:, ~is_free].sum(axis=1)
        found[is_free] = np.linalg.lstsq(left[:, is_free], rest, rcond=None)[0]
        if (found >= least).all():
            candidates.append((float(np.square(left @ found - right).sum()), found.tolist()))
    return np.array(min(candidates)[1])
