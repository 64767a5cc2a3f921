"""`mopps`: a success rate is drawn from each item's posterior, and the items nearest to a target rate are taken
(MoPPS, 2507.04632, section 4).

The posterior with decay is the book's (`SuccessBook`): `a <- decay a + (1 - decay) a0 + s`, alike b with n - s. The
released code resets all counts to 8 after an iteration with one rollout per prompt, by the precedence of a conditional
expression; here any number of trials counts as the paper has it, and the draw is named by the seed, so that it resumes.
"""

from dataclasses import dataclass

import numpy as np

from treewise.rl.branching.protocol import require
from treewise.rl.curriculum.protocol import Chosen, View


@dataclass(frozen=True, slots=True, kw_only=True)
class MoppsSettings:
    """target: the success rate that is wanted. candidates: items drawn evenly, of which the nearest are taken; None:
    all.
    """

    target: float = 0.5
    candidates: int | None = None

    def __post_init__(self) -> None:
        require(0 < self.target < 1, f"target={self.target} must lie between 0 and 1.")
        require(self.candidates is None or self.candidates >= 1, f"candidates={self.candidates} must be at least 1.")


def nearest_to_target(view: View, count: int, settings: MoppsSettings) -> Chosen:
    """The items whose drawn rate is nearest to the target, nearest first."""
    rng = view.rng
    free = np.flatnonzero(view.is_free())
    if settings.candidates is not None and settings.candidates < len(free):
        free = np.sort(rng.choice(free, size=max(settings.candidates, min(count, len(free))), replace=False))
    counts = view.counts()[free]
    rates = rng.beta(counts[:, 0], counts[:, 1])
    nearest = np.argsort(np.abs(rates - settings.target), kind="stable")[:count]
    return Chosen([int(free[index]) for index in nearest], view.position)
