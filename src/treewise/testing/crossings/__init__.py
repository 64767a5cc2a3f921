"""Settings drawn together, trained as trees and as each trajectory alone, and compared: `make crossings`.

`python -m treewise.testing.crossings --minutes 10 --seed 1`. docs/testing.md.
"""

from treewise.testing.crossings.drawing import Crossings, Draw, ImpossibleError, Outcome, Report, Rule, WrongError, run

__all__ = ["Crossings", "Draw", "ImpossibleError", "Outcome", "Report", "Rule", "WrongError", "run", "training"]


def training(seed: int = 0) -> Crossings:
    """The crossings of training runs; the seed chooses families."""
    from treewise.testing.crossings import sides, space

    return Crossings(space.settings_of(seed), space.RULES, sides.check, sides.script, space.RARITY)
