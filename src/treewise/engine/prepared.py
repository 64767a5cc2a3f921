"""What a step computes on the host before the model runs: a forest's plan, and the terms of its loss.

None of it depends on the weights, so it may be computed for the next batch while the present one is on the device.
"""

from dataclasses import dataclass, field

from treewise.nn.flops import FlopModel
from treewise.objectives import Objective
from treewise.objectives.protocol import Terms
from treewise.planning.planner import Plan, fastest_plan, plan
from treewise.tree.forest import Forest, one_forest


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan depends on beside the forest.

    is_measured: whether the budget was measured (`auto`), so that the fastest plan within it is taken. costs: of the
    model, for forests with images.
    """

    max_tokens: int | None
    is_measured: bool
    hold: str
    costs: FlopModel | None = field(default=None, compare=False)

    def plan(self, forest: Forest) -> Plan:
        """The plan of a forest; depends on the forest and these settings alone."""
        if self.costs is not None:
            return self.costs.plan(forest, self.max_tokens, hold=self.hold)
        if self.is_measured:
            return fastest_plan(forest, self.max_tokens, hold=self.hold)
        return plan(forest, self.max_tokens, hold=self.hold)


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


def as_prepared(forests: object) -> PreparedForest:
    """A prepared forest as it is, anything else (see `one_forest`) with nothing computed yet."""
    return forests if isinstance(forests, PreparedForest) else PreparedForest(one_forest(forests))
