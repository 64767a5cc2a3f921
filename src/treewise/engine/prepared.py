"""What a step computes on the host before the model runs: a forest's plan, and the terms of its loss.

None of it depends on the weights, so it may be computed for the next batch while the present one is on the device.
"""

from dataclasses import dataclass, field

from treewise.nn.flops import FlopModel
from treewise.objectives import Objective
from treewise.objectives.protocol import Terms
from treewise.planning.fastest import fastest_plan
from treewise.planning.planner import Plan, plan
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
    settings: PlanSettings | None
    plan: Plan | None
    objective: Objective | None
    terms: Terms | None

    def forest(self) -> Forest:
        """The forest, as items of a data set give theirs (`forest_of`)."""
        return self.joined

    def plan_for(self, settings: PlanSettings) -> Plan:
        """The plan under these settings: the prepared one, if it was made under the same."""
        if self.plan is not None and self.settings == settings:
            return self.plan
        return settings.plan(self.joined)

    def terms_of(self, objective: Objective) -> Terms | None:
        """The prepared terms, if they are of this objective."""
        return self.terms if objective is self.objective else None


def as_prepared(forests: object) -> PreparedForest:
    """A prepared forest as it is, anything else (see `one_forest`) with nothing computed yet."""
    return forests if isinstance(forests, PreparedForest) else prepare(one_forest(forests), None, None)


def prepare(forest: Forest, settings: PlanSettings | None, objective: Objective | None) -> PreparedForest:
    """settings: None where the budget is not measured yet, so that there is nothing to plan with."""
    made = None if settings is None else settings.plan(forest)
    return PreparedForest(forest, settings, made, objective, None if objective is None else objective.terms(forest))
