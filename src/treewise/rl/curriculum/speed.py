"""`speed`: many items are screened with few rollouts each, and those with both outcomes go on (SPEED, 2506.09016).

The screening counts against the iteration's budget: its tokens are sampled tokens like all others. The screened
rollouts of an item that goes on are part of its tree; those of the others are recorded, inform the book, and are not
trained. The paper merges the screening of one step with the continuation of the step before to fill its engine, and
trains rollouts that are one update old; here an iteration screens for itself, and stays on policy.
"""

from dataclasses import dataclass

from treewise.rl.branching.protocol import require
from treewise.rl.curriculum.protocol import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSettings:
    """screened: items that are screened for each tree of an iteration. rollouts: of the screening of one item."""

    screened: int = 2
    rollouts: int = 4

    def __post_init__(self) -> None:
        require(self.screened >= 1, f"screened={self.screened} must be at least 1.")
        require(self.rollouts >= 2, f"rollouts={self.rollouts} must be at least 2: one has but one outcome.")


def has_both_outcomes(outcome: Outcome, _settings: object) -> bool:
    """Whether the screening had successes and failures: 0 < p < 1."""
    return 0 < outcome.num_successes < len(outcome.rewards)
