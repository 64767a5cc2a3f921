"""`dynamic`: groups without variance are left out and replaced by new ones, at most so many times (DAPO, 2503.14476,
section 3.2). What the replaced ones cost is counted.
"""

from dataclasses import dataclass

from treewise.rl.branching.protocol import require
from treewise.rl.curriculum.protocol import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSettings:
    """refills: times that missing groups are sampled anew in one iteration. What is still missing then is left out, so
    that an iteration of a task that is all too hard or too easy ends.
    """

    refills: int = 3

    def __post_init__(self) -> None:
        require(self.refills >= 0, f"refills={self.refills} must not be negative.")


def has_variance(outcome: Outcome, _settings: object) -> bool:
    """Whether the rewards of a group differ."""
    return not outcome.is_flat
