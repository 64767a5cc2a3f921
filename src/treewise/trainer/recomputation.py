"""Whether a run computes layers again in the backward (gradient checkpointing).

`auto` leaves them alone while the predicted peak of the first step fits into the free memory. With a measured budget it
measures both ways, and takes the faster one by the planner's costs: larger micro-batches whose layers run twice, or
smaller ones that cut more trees. The gradients are the same either way.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from treewise.distributed import ranks
from treewise.engine.engine import TreeEngine
from treewise.engine.prepared import AUTO, Budget
from treewise.engine.step_memory import step_memory
from treewise.errors import UnsupportedModelError, bytes_as_text
from treewise.nn.gradients import gradient_bytes
from treewise.nn.platform.memory import free_bytes
from treewise.nn.platform.tensors import autocast_dtype
from treewise.nn.recomputation import set_recomputation
from treewise.objectives.protocol import Objective
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.plans import Plan
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")

USABLE = 0.9  # of the free memory; the rest is for workspaces and fragmentation


def recompute_as_set(
    engine: TreeEngine,
    first: Callable[[], Forest],
    objective: Objective,
    args: TreeTrainingArguments,
    *,
    reserve_bytes: int = 0,
) -> None:
    """Switches layers of a run that are computed again on, as its settings say; every rank calls this.

    first: what steps are like, read where it matters. Where one rank needs it, all compute again. reserve_bytes: see
    `choose_recomputation`.
    """
    given = [getattr(args, f"{name}_checkpointing_kwargs", None) for name in ("activation", "gradient")]
    settings = next((each for each in given if each), None)
    if args.recomputation is True:
        set_recomputation(engine.model, wanted=True, settings=settings)
        return
    wanted = choose_recomputation(engine, first(), objective, settings, reserve_bytes=reserve_bytes)
    if any(ranks.on_every_rank(lambda: wanted)):
        set_recomputation(engine.model, wanted=True, settings=settings)


def choose_recomputation(
    engine: TreeEngine,
    forest: Forest,
    objective: Objective,
    settings: Mapping[str, Any] | None = None,
    *,
    reserve_bytes: int = 0,
) -> bool:
    """Whether layers are computed again, for steps on forests like this one; they are switched so.

    The engine's budget is measured then, if it is to be. reserve_bytes: memory that the optimizer is still going to
    take. A model whose memory cannot be predicted computes them again, with a warning.
    """
    model: Any = engine.model
    set_recomputation(model, wanted=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or not getattr(model, "supports_gradient_checkpointing", False):
        return False
    if engine.budget.setting == AUTO and not engine.budget.is_measured:
        wanted = _faster(engine, forest, settings)
    else:
        plan = engine.plan(forest)
        free = free_bytes(engine.lm.device) - gradient_bytes(parameters) - reserve_bytes
        try:
            peak = _peak(engine, plan, objective)
        except UnsupportedModelError as error:
            logger.warning("activation_checkpointing=auto: layers are computed again, which takes least. %s", error)
            set_recomputation(model, wanted=True, settings=settings)
            return True
        wanted = peak > USABLE * free
        logger.info(
            "activation_checkpointing=auto: %s; a step is predicted to take %s, and %s are free",
            "layers are computed again" if wanted else "nothing is computed again",
            bytes_as_text(peak),
            bytes_as_text(max(0, free)),
        )
    set_recomputation(model, wanted, settings)
    return wanted


def _peak(engine: TreeEngine, plan: Plan, objective: Objective) -> int:
    kind = engine.lm.device.type
    return step_memory(
        engine.model,
        plan,
        kind,
        autocast=autocast_dtype(kind),
        router_loss=engine.router_loss_rule,
        outputs=objective.outputs,
    ).total


def _faster(engine: TreeEngine, forest: Forest, settings: Mapping[str, Any] | None) -> bool:
    """Measures the budget without and with layers that are computed again; keeps that of the faster plan."""
    recovers, tried = engine.budget.recovers, list[tuple[float, bool, Budget]]()
    for wanted in (False, True):
        set_recomputation(engine.model, wanted, settings)
        engine.budget = budget = Budget(AUTO)
        budget.recovers = recovers
        plan = engine.plan(forest)
        again = FORWARD_FRACTION * forest.num_tokens if wanted else 0.0
        tried.append((plan.relative_cost + again, wanted, budget))
        if plan.is_whole:  # nothing is computed twice, or nothing more by a larger budget
            break
    cost, wanted, engine.budget = min(tried, key=lambda each: each[:2])
    logger.info(
        "activation_checkpointing=auto: %s, with %s tokens at a time (%s)",
        "layers are computed again" if wanted else "nothing is computed again",
        engine.budget.tokens,
        ", ".join(f"{each[2].tokens}: {each[0] / cost:.2f} of its time" for each in tried),
    )
    return wanted
