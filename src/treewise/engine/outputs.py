"""What one step computed, for those who log it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treewise.engine.scoring import ObjectiveLoss
from treewise.nn.router_loss import Routing, RoutingReport
from treewise.planning.planner import Plan


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed.

    loss: the sum of token losses divided by the denominator. metrics: means that the objective reports, over `weight`,
    the sum of the loss weights of its trained tokens; so metrics of several steps are combined by their weights.
    routing: where a loss on routers was added, which `loss` then holds, what they did.
    """

    loss: float
    num_trained_tokens: int
    num_tree_tokens: int
    num_flat_tokens: int
    num_computed_tokens: int
    num_micro_batches: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    weight: float = 0.0
    routing: RoutingReport | None = None


def output_of(
    run: Plan, losses: ObjectiveLoss | float, is_single_walk: bool = False, routing: Routing | None = None
) -> StepOutput:
    """The output of a step or an evaluation.

    losses: of an objective, or the value of any other loss, which is a function of all log-probs."""
    forest = run.forest
    if isinstance(losses, ObjectiveLoss):
        (loss, metrics), weight, num_trained = losses.totals(), losses.terms.weight, losses.num_trained_tokens
    else:
        loss, metrics, weight = losses, {}, 0.0
        num_trained = forest.num_flat_tokens - forest.num_trajectories
    if routing is not None:
        loss += float(routing.total())
    first_walk = 0 if run.is_whole or is_single_walk else forest.num_tokens
    return StepOutput(
        loss=loss,
        num_trained_tokens=num_trained,
        num_tree_tokens=forest.num_tokens,
        num_flat_tokens=forest.num_flat_tokens,
        num_computed_tokens=run.num_computed_tokens + first_walk,
        num_micro_batches=run.num_micro_batches,
        metrics=metrics,
        weight=weight,
        routing=None if routing is None else routing.report(),
    )
