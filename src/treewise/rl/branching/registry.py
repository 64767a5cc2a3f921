"""Every branching policy by its name in a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from treewise.errors import ConfigError, check_setting_types, did_you_mean
from treewise.rl.branching.entropy import EntropyBranching, most_uncertain_tokens
from treewise.rl.branching.lcr import LcrBranching, open_outcomes
from treewise.rl.branching.none import NoBranching, independent
from treewise.rl.branching.protocol import Branch, Rule, Signals, open_ends, within_budget
from treewise.rl.branching.random import RandomBranching, random_points
from treewise.rl.branching.rollout_tree import RolloutTree
from treewise.rl.branching.segments import SegmentBranching, fixed_segments
from treewise.rl.branching.turns import TurnBranching, whole_turns


class BranchingKind(NamedTuple):
    """settings: a frozen dataclass. rule: a pure function of the tree, the signals, the settings and a generator.
    streams: what the sampler is asked to record (`entropies`, `top`), where every setting needs it.
    """

    settings: type
    rule: Rule
    streams: tuple[str, ...] = ()


BRANCHINGS: Mapping[str, BranchingKind] = {
    "none": BranchingKind(NoBranching, independent),
    "random": BranchingKind(RandomBranching, random_points),
    "entropy": BranchingKind(EntropyBranching, most_uncertain_tokens, ("entropies",)),
    "segments": BranchingKind(SegmentBranching, fixed_segments),
    "turns": BranchingKind(TurnBranching, whole_turns),
    "lcr": BranchingKind(LcrBranching, open_outcomes),
}
# Names of earlier versions, and what to use in their place.
GONE: Mapping[str, str] = {"arpo": "turns, with branching_settings.order=uncertain"}


@dataclass(frozen=True, slots=True)
class Branching:
    """A policy with its settings; make one with `branching_named`."""

    name: str
    settings: Any

    @property
    def streams(self) -> tuple[str, ...]:
        """What the sampler must record besides tokens and their log-probs."""
        if getattr(self.settings, "definition", "shannon") != "shannon":
            return ()
        return BRANCHINGS[self.name].streams

    def next_requests(
        self, tree: RolloutTree, signals: Signals, budget_left: int, rng: np.random.Generator
    ) -> list[Branch]:
        """The requests of the next round, which may be sampled as one batch; empty where the budget is spent and every
        path has ended (or nothing tells how long one may get: `Signals.longest_tokens`).

        Parameters:
            tree: so far; a rollout without a reward has no outcome.
            budget_left: generated tokens (`RolloutTree.num_sampled_tokens` counts those spent).
        """
        if budget_left <= 0 and (signals.longest_tokens is None or not open_ends(tree)):
            return []
        signals = replace(signals, budget_left=budget_left)
        branches = BRANCHINGS[self.name].rule(tree, signals, self.settings, rng)
        return within_budget(branches, tree, signals, budget_left)


def branching_named(name: str, **settings: Any) -> Branching:
    """The policy of a configuration: `branching_named("lcr", variations=5)`.

    Raises:
        ConfigError: an unknown name or setting, or a value that is out of range or of another type.
    """
    if name in GONE:
        raise ConfigError(f"branching {name!r} is gone; use {GONE[name]}.")
    if name not in BRANCHINGS:
        hint = did_you_mean(name, BRANCHINGS)
        raise ConfigError(f"unknown branching {name!r}.{hint} Known: {', '.join(BRANCHINGS)}.")
    make = BRANCHINGS[name].settings
    check_setting_types(f"branching {name!r}", settings, {each.name: each.type for each in fields(make)})
    return Branching(name, make(**settings))
