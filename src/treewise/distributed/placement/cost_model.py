"""What a rank's share of a step costs: three counts, and the seconds of each.

    seconds = seconds_per_token * tokens + seconds_per_pair * pairs + seconds_per_micro_batch * micro-batches

A token or pair counts 1 for its forward and backward. Where a plan computes it a second time, forward only, it counts
the forward's share more. Before anything is measured the three prices come from FLOPs; later they are fitted to the
run's own steps by non-negative least squares, as AReaL-DTA does for its tree time model.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np

from treewise.errors import ConfigError
from treewise.planning.partition import FORWARD_SHARE, TOKENS_PER_LAUNCH
from treewise.planning.planner import BACKWARD, Plan
from treewise.tree.forest import Forest

# The backward of attention costs 2.5 forwards (FlashAttention, arXiv 2307.08691, computes the scores again).
PAIR_FORWARD_SHARE = 1 / 3.5
# What the prior counts for against one measured step. Small: a dozen steps that differ outweigh it.
PRIOR_WEIGHT = 0.002
# A step that took this much longer or shorter than predicted counts half (Cauchy's weights): compilation, other jobs.
ODD_RATIO = 0.1
# No price falls below this share of its prior: a few odd steps must not make tokens free.
LEAST_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed in one step on one rank.

    tokens, pairs: forward and backward of one is 1. micro_batches: forwards of the model, with a graph or without.
    """

    tokens: float
    pairs: float
    micro_batches: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.pairs + other.pairs, self.micro_batches + other.micro_batches)


def pairs_before(forest: Forest) -> np.ndarray:
    """[T + 1] int64, attention pairs of all tokens that lie before a tree position."""
    return np.concatenate([[0], np.cumsum(forest.depth + np.int64(1))])


def work_of(plan: Plan) -> Work:
    """The work of a plan, what it computes twice included."""
    again = [batch.ranges for batch in plan.micro_batches if batch.is_open and not batch.is_held]
    recomputed_pairs = 0
    if again:
        ranges = np.concatenate(again)
        length = ranges[:, 1] - ranges[:, 0]
        # A range of open tokens may run through several segments of one path, so depths are summed token by token.
        below = pairs_before(plan.forest)
        recomputed_pairs = int((below[ranges[:, 1]] - below[ranges[:, 0]]).sum())
        assert int(length.sum()) == plan.num_recomputed_tokens
    return Work(
        tokens=plan.forest.num_tokens + FORWARD_SHARE * plan.num_recomputed_tokens,
        pairs=plan.forest.num_tree_pairs + PAIR_FORWARD_SHARE * recomputed_pairs,
        micro_batches=sum(step.action != BACKWARD for step in plan.schedule),
    )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a token, of a query-key pair (each forward and backward) and of a micro-batch.

    Only their ratios matter to a placement.

    Raises:
        ConfigError: a price that is negative or not finite, or a token that costs nothing.
    """

    seconds_per_token: float
    seconds_per_pair: float
    seconds_per_micro_batch: float

    def __post_init__(self) -> None:
        if not all(np.isfinite(price) and price >= 0 for price in astuple(self)):
            raise ConfigError(f"prices must be finite and not negative, found {self}.")
        if self.seconds_per_token + self.seconds_per_pair <= 0:
            raise ConfigError("tokens and pairs cannot both be free.")

    @classmethod
    def from_flops(cls, flops_per_token: float, flops_per_pair: float, flops_per_second: float = 1e12) -> "CostModel":
        """Prices before anything is measured.

        flops_per_token: of its linear layers (and head), forward and backward. flops_per_pair: of attention in all
        layers, forward and backward. A micro-batch counts as many tokens as the planner takes it for.
        """
        per_token = flops_per_token / flops_per_second
        return cls(per_token, flops_per_pair / flops_per_second, TOKENS_PER_LAUNCH * per_token)

    def seconds(self, work: Work) -> float:
        """Predicted seconds of some work."""
        return (
            self.seconds_per_token * work.tokens
            + self.seconds_per_pair * work.pairs
            + self.seconds_per_micro_batch * work.micro_batches
        )


class CostFit:
    """Prices that follow the measured steps of a run; the prior's until there are some.

    All ranks must place with the same prices: fit on one rank, with the measurements of all, and broadcast the three
    numbers. Measure forward and backward of a rank's own work, without the optimizer and without the first step.
    """

    def __init__(self, prior: CostModel, num_kept: int = 256) -> None:
        self.prior = prior
        self._measured: deque[tuple[Work, float]] = deque(maxlen=num_kept)

    def add(self, work: Work, seconds: float) -> None:
        """One measurement. Nothing was computed, or no time passed: it says nothing and is left out."""
        if work.tokens > 0 and seconds > 0 and np.isfinite(seconds):
            self._measured.append((work, float(seconds)))

    def model(self) -> CostModel:
        """The prices that fit the kept measurements best."""
        works, seconds = [work for work, _ in self._measured], [time for _, time in self._measured]
        return fit(self.prior, works, seconds)


def fit(prior: CostModel, works: Sequence[Work], seconds: Sequence[float]) -> CostModel:
    """Prices from measured steps: non-negative least squares of relative errors, with the prior as a weak measurement.

    The prior gives ratios only: it is scaled to the measured time first. So steps that are all alike change the scale
    and keep the ratios.
    """
    if not works:
        return prior
    counts = np.array([astuple(work) for work in works], dtype=np.float64)
    measured = np.asarray(seconds, dtype=np.float64)
    prices = np.array(astuple(prior))
    prices *= np.median(measured / (counts @ prices))
    # In shares of the scaled prior all three unknowns are near 1; a price that the prior calls free stays free.
    known = np.flatnonzero(prices > 0)
    rows = (counts * prices)[:, known] / measured[:, None]
    weight = np.ones(len(rows))
    pull = np.sqrt(PRIOR_WEIGHT) * np.eye(len(known))
    for _ in range(5):
        left = np.concatenate([rows * np.sqrt(weight)[:, None], pull])
        right = np.concatenate([np.sqrt(weight), pull.sum(axis=1)])
        shares = np.maximum(non_negative_least_squares(left, right), LEAST_SHARE)
        weight = 1 / (1 + np.square((rows @ shares - 1) / ODD_RATIO))
    prices[known] *= shares
    return CostModel(*prices.tolist())


def non_negative_least_squares(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The `x >= 0` that minimises `|left @ x - right|`, by trying every set of unknowns that are not zero.

    left: [rows, n] of full column rank, n at most a handful. right: [rows].
    """
    num_unknowns = left.shape[1]
    best, best_error = np.zeros(num_unknowns), float(right @ right)
    for size in range(1, num_unknowns + 1):
        for chosen in combinations(range(num_unknowns), size):
            found = np.zeros(num_unknowns)
            found[list(chosen)] = np.linalg.lstsq(left[:, chosen], right, rcond=None)[0]
            error = float(np.square(left @ found - right).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = found, error
    return best
