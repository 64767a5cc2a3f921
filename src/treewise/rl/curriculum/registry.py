"""Every curriculum by its name in a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from treewise.errors import ConfigError, check_setting_types, did_you_mean
from treewise.rl.curriculum.gain import GainSettings, by_angle, by_shuffled_rank, gain_after
from treewise.rl.curriculum.learnability import LearnabilitySettings, by_learnability
from treewise.rl.curriculum.protocol import Choose, Keep, Learn
from treewise.rl.curriculum.uniform import DynamicSettings, UniformSettings, has_variance, in_passes


class CurriculumKind(NamedTuple):
    """settings: a frozen dataclass. choose: the first items of an iteration. refill: those that replace what `keep`
    leaves out. keep: which trees are trained. learn: the memory after an iteration. needs_pool: whether it ranks the
    items of a pool, which must have an end. measures_angles: whether it needs the angles of all items, and at
    each iteration those of what was drawn.
    """

    settings: type
    choose: Choose
    refill: Choose | None = None
    keep: Keep | None = None
    learn: Learn | None = None
    needs_pool: bool = False
    measures_angles: bool = False


def _gain(choose: Choose) -> CurriculumKind:
    return CurriculumKind(GainSettings, choose, learn=gain_after, needs_pool=True, measures_angles=True)


CURRICULA: Mapping[str, CurriculumKind] = {
    "uniform": CurriculumKind(UniformSettings, in_passes),
    "dynamic": CurriculumKind(DynamicSettings, in_passes, refill=in_passes, keep=has_variance),
    "learnability": CurriculumKind(LearnabilitySettings, by_learnability, needs_pool=True),
    "gain": _gain(by_angle),
    "gain_shuffled": _gain(by_shuffled_rank),
}
# Names of earlier versions, and what to use in their place.
GONE: Mapping[str, str] = {
    "mopps": "learnability, with curriculum_settings.thompson=true",
    "vcrl": "dynamic",
    "speed": "dynamic",
    "gain_x_learnability": "gain or learnability",
}


@dataclass(frozen=True, slots=True)
class Curriculum:
    """A curriculum with its settings; make one with `curriculum_named`."""

    name: str
    settings: Any

    @property
    def kind(self) -> CurriculumKind:
        """Its rules."""
        return CURRICULA[self.name]

    @property
    def num_refills(self) -> int:
        """How often an iteration may replace what is left out."""
        return int(getattr(self.settings, "refills", 0))


def curriculum_named(name: str, **settings: Any) -> Curriculum:
    """The curriculum of a configuration: `curriculum_named("learnability", thompson=True)`. Hyphens count as
    underscores.

    Raises:
        ConfigError: an unknown name or setting, or a value that is out of range or of another type.
    """
    own = name.replace("-", "_")
    if own in GONE:
        raise ConfigError(f"curriculum {name!r} is gone; use {GONE[own]}.")
    if own not in CURRICULA:
        raise ConfigError(f"unknown curriculum {name!r}.{did_you_mean(own, CURRICULA)} Known: {', '.join(CURRICULA)}.")
    make = CURRICULA[own].settings
    check_setting_types(f"curriculum {name!r}", settings, {each.name: each.type for each in fields(make)})
    return Curriculum(own, make(**settings))
