"""`learnability`: items in proportion to p (1 - p), the variance of their outcomes (2502.12272 ranks by it).

p is the mean of an item's posterior in the book, or with `thompson` a draw from it (as MoPPS, 2507.04632, draws), so
that an item of which little is known may come although its mean is near 0 or 1. The draw is named by the seed, the
iteration and the wave.
"""

from dataclasses import dataclass

import numpy as np

from treewise.rl.curriculum.protocol import Chosen, View, drawn_by_weight, uncertainty


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnabilitySettings:
    """thompson: p is drawn from each item's posterior instead of being its mean. The book's are `book_settings`."""

    thompson: bool = False


def by_learnability(view: View, count: int, settings: LearnabilitySettings) -> Chosen:
    """Different items, drawn one after another in proportion to p (1 - p)."""
    counts = view.counts()
    if not settings.thompson:
        return drawn_by_weight(view, count, uncertainty(counts))
    rng = view.rng
    rates: np.ndarray = rng.beta(counts[:, 0], counts[:, 1])
    return drawn_by_weight(view, count, rates * (1 - rates), rng)
