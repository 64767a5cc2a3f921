"""`learnability`: items in proportion to p (1 - p), with p the posterior mean of the book (2502.12272 ranks by it)."""

from dataclasses import dataclass

from treewise.rl.curriculum.protocol import Chosen, View, drawn_by_weight, uncertainty


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnabilitySettings:
    """Has none; the book's are `book_settings`."""


def by_learnability(view: View, count: int, _settings: object = None) -> Chosen:
    """Different items, drawn one after another in proportion to p (1 - p)."""
    return drawn_by_weight(view, count, uncertainty(view.counts()))
