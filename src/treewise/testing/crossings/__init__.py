"""Settings drawn together, trained as trees and as each trajectory alone, and compared: `make crossings`.

`python -m treewise.testing.crossings --minutes 10 --seed 1`. docs/testing.md.
"""

from treewise.testing.crossings.drawing import Crossings, Draw, ImpossibleError, Outcome, Report, Rule, WrongError, run

__all__ = [
    "Crossings",
    "Draw",
    "ImpossibleError",
    "Outcome",
    "Report",
    "Rule",
    "WrongError",
    "online_loop",
    "run",
    "training",
]


def training(seed: int = 0) -> Crossings:
    """The crossings of training runs; the seed chooses families."""
    from treewise.testing.crossings import sides, space
    from treewise.testing.crossings.script import script

    return Crossings(space.settings_of(seed), space.RULES, sides.check, script, space.RARITY)


def online_loop() -> Crossings:
    """The crossings of runs that sample their rollouts."""
    from treewise.testing.crossings import online

    return Crossings(online.SETTINGS, online.RULES, online.check, online.script)
