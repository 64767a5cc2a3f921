"""What a step is given and what it returns: a budget, a forest with its plan and the terms of its loss; its output.

Plan and terms do not depend on the weights, so they may be computed for the next batch while the present one is on the
device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.errors import ConfigError, num
from treewise.objectives.protocol import Objective, Terms
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.nn.flops import FlopModel

AUTO = "auto"


class Budget:
    """Tokens that may hold activations at a time.

    setting: a number, None (no limit) or `auto` (from the free memory, measured at the first step). tokens: at present;
    None: no limit, or not measured yet. recovers: whether a step that runs out of memory may run again with half.

    Raises:
        ConfigError: another setting.
    """

    def __init__(self, setting: int | str | None) -> None:
        is_number = isinstance(setting, int | np.integer) and not isinstance(setting, bool)
        if not (setting is None or setting == AUTO or (is_number and int(setting) > 0)):
            raise ConfigError(f"max_tokens={setting!r}; give a positive number of tokens, None, or 'auto'.")
        self.setting = setting
        self.tokens: int | None = int(setting) if isinstance(setting, int | np.integer) else None
        self.is_measured = setting != AUTO
        self.recovers = True

    def take(self, tokens: int) -> None:
        """Takes what was measured before, by a run that is resumed: plans are those of a measured budget."""
        self.tokens, self.is_measured = tokens, True

    def fix(self, settings: str) -> None:
        """Raises `ConfigError` for `auto`: ranks that run passes together (by these settings) cannot measure on their
        own, and none may run a step again.
        """
        if self.setting == AUTO:
            raise ConfigError(
                "max_tokens='auto' measures the free memory of each rank, and ranks that run passes together "
                f"{settings} need one budget; give max_tokens a number, or None."
            )
        self.recovers = False


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan depends on beside the forest.

    is_measured: whether the budget was measured (`auto`), so that the fastest plan within it is taken. costs: of the
    model, for forests with images. least_tokens: a micro-batch of fewer is no faster (`nn.launching`); the fastest plan
    is taken then, too.
    """

    max_tokens: int | None
    is_measured: bool
    hold: str
    costs: "FlopModel | None" = field(default=None, compare=False)
    least_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PreparedForest:
    """A forest with its plan and the terms of one objective (`TreeEngine.prepare`); each is None where not computed.

    settings: of the plan. Where they are no longer the engine's (a budget that was halved), it plans again.
    """

    joined: Forest
    settings: PlanSettings | None = None
    plan: Plan | None = None
    objective: Objective | None = None
    terms: Terms | None = None

    def forest(self) -> Forest:
        """The forest, as items of a data set give theirs (`forest_of`)."""
        return self.joined


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed.

    loss: the sum of token losses divided by the denominator. metrics: means that the objective reports, over `weight`,
    the sum of the loss weights of its trained tokens; so metrics of several steps are combined by their weights.
    num_computed_tokens: forwards of tokens, recomputed ones included; within a window those of tokens that no earlier
    call had computed. routing: statistics of the routers, where `loss`
    holds a router loss. replay: of recorded experts, how many the routers would have chosen otherwise.
    """

    loss: float
    num_trained_tokens: int
    num_tree_tokens: int
    num_flat_tokens: int
    num_computed_tokens: int
    num_micro_batches: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    weight: float = 0.0
    routing: Any = None
    replay: Any = None

    def __repr__(self) -> str:
        counts = [num(self.num_trained_tokens, "trained token"), num(self.num_tree_tokens, "tree token")]
        counts += num(self.num_flat_tokens, "flat token"), num(self.num_micro_batches, "micro-batch", "micro-batches")
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return f"StepOutput(loss {self.loss:.6g}, {', '.join(counts)}{metrics})"
