"""What a rank's part of a step costs: three counts, and the seconds of each.

    seconds = seconds_per_token * tokens + seconds_per_pair * pairs + seconds_per_micro_batch * micro-batches

A token or pair counts 1 for its forward and backward; a second forward of it, where a plan recomputes it, adds the
forward's fraction. The three costs come from FLOPs.
"""

from dataclasses import astuple, dataclass

import numpy as np

from treewise.errors import ConfigError
from treewise.planning.partition import FORWARD_FRACTION, PAIR_FORWARD_FRACTION, TOKENS_PER_LAUNCH
from treewise.planning.plans import BACKWARD, Plan
from treewise.tree.forest import Forest


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed in one step on one rank.

    tokens, pairs: forward and backward of one counts 1. micro_batches: forwards of the model, with a graph or without.
    """

    tokens: float
    pairs: float
    micro_batches: float


def pairs_before(forest: Forest) -> np.ndarray:
    """[T + 1] int64, attention pairs of all tokens before a tree position."""
    return np.concatenate([[0], np.cumsum(forest.depth + np.int64(1))])


def work_of(plan: Plan) -> Work:
    """The work of a plan, including what it recomputes."""
    recomputed = [batch.ranges for batch in plan.micro_batches if batch.is_open and not batch.is_held]
    recomputed_pairs = 0
    if recomputed:
        ranges = np.concatenate(recomputed)
        # A range of open tokens may run through several segments of one path, so depths are summed token by token.
        before = pairs_before(plan.forest)
        recomputed_pairs = int((before[ranges[:, 1]] - before[ranges[:, 0]]).sum())
    return Work(
        tokens=plan.forest.num_tokens + FORWARD_FRACTION * plan.num_recomputed_tokens,
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
        """Estimated costs (seconds per token, per pair, per micro-batch), from FLOPs.

        flops_per_token: of its linear layers and head, forward and backward. flops_per_pair: of attention in all
        layers, forward and backward. A micro-batch costs `TOKENS_PER_LAUNCH` tokens, as in the planner.
        """
        per_token = flops_per_token / flops_per_second
        return cls(per_token, flops_per_pair / flops_per_second, TOKENS_PER_LAUNCH * per_token)

    def seconds(self, work: Work) -> float:
        """How long a rank takes for this work."""
        return (
            self.seconds_per_token * work.tokens
            + self.seconds_per_pair * work.pairs
            + self.seconds_per_micro_batch * work.micro_batches
        )
