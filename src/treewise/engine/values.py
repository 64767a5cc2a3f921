"""Values of a forest's tokens as differentiable functions of a model, at any budget.

With one micro-batch a result is an ordinary graph. With several, the forward runs without a graph, and the backward is
the walk, which adds parameter gradients into `.grad`; so a result is usable inside any loss, more than once in a graph,
and under autocast.
"""

from typing import Any, Protocol

import numpy as np
import torch

from treewise.engine.differentiable import Read, gather
from treewise.engine.routed import gather_routed
from treewise.engine.scoring import Scorer, Wanted
from treewise.engine.walk import Walk
from treewise.errors import ConfigError
from treewise.nn.device import to_device
from treewise.nn.model import ModelParts
from treewise.nn.router_loss import Routing, RoutingRule
from treewise.planning.planner import Plan
from treewise.tree.forest import Forest


class Engine(Protocol):
    """What the functions of this module ask of `TreeEngine`."""

    parts: ModelParts
    temperature: float

    def new_walk(self, run: Plan, routing: Routing | None = None) -> Walk: ...

    def routing(self, run: Plan, rule: RoutingRule | None = None) -> Routing | None: ...


def tree_logprobs(engine: Engine, run: Plan) -> torch.Tensor:
    """[T] log-probs of the tree's tokens (0 for first tokens), as one differentiable function at any budget."""
    return tree_values(engine, run)["log_probs"]


def tree_values(
    engine: Engine, run: Plan, outputs: tuple[str, ...] = ("log_probs",), is_needed: np.ndarray | None = None
) -> dict[str, torch.Tensor]:
    """[T] values of the tree's tokens by name (see `logprobs.edge_values`), differentiable as `tree_logprobs` is.

    is_needed: [T] bool; others, and first tokens, are 0 and cost no projection.
    """
    return routed_values(engine, run, outputs, is_needed, None)[0]


def tree_values_and_router_loss(
    engine: Engine,
    run: Plan,
    outputs: tuple[str, ...] = ("log_probs",),
    is_needed: np.ndarray | None = None,
    rule: RoutingRule | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What `tree_values` gives, and the loss on the model's routers, a scalar that is differentiable as they are.

    Both come from the same walks. rule: the factors of both router losses; the engine's own where not given.

    Raises:
        ConfigError: no rule, here or in the engine.
    """
    routing = engine.routing(run, rule)
    if routing is None:
        raise ConfigError("no loss on routers is asked for; give a rule, or router_aux_loss=True to the engine.")
    return routed_values(engine, run, outputs, is_needed, routing)


def routed_values(
    engine: Engine, run: Plan, outputs: tuple[str, ...], is_needed: np.ndarray | None, routing: Routing | None
) -> tuple[dict[str, torch.Tensor], Any]:
    """[T] values by name, and the router losses (0 without)."""
    wanted = Wanted.every_token(run.forest, outputs)
    if is_needed is not None:
        wanted = Wanted(wanted.positions[is_needed[wanted.positions]], None, outputs)
    values, router_loss = routed_scores(engine, run, wanted, routing)
    index = to_device(wanted.positions, engine.parts.device)
    scattered = {
        name: torch.zeros(run.forest.num_tokens, dtype=value.dtype, device=value.device).index_copy(0, index, value)
        for name, value in values.items()
    }
    return scattered, router_loss


def scores(engine: Engine, run: Plan, wanted: Wanted) -> dict[str, torch.Tensor]:
    """[P] values of the wanted tokens by name, in their order, differentiable as `tree_logprobs` is."""
    return routed_scores(engine, run, wanted, None)[0]


def routed_scores(
    engine: Engine, run: Plan, wanted: Wanted, routing: Routing | None
) -> tuple[dict[str, torch.Tensor], Any]:
    """What `scores` gives, and the router losses of the same walks (0 without)."""

    def read_of(walk: Walk) -> Read:
        return Scorer(walk, wanted, engine.temperature)

    def new_walk() -> Walk:
        return engine.new_walk(run, routing)

    length = len(wanted.positions)
    if routing is None:
        return gather(new_walk, read_of, wanted.outputs, length), 0.0
    return gather_routed(new_walk, read_of, wanted.outputs, length, routing)


def hidden_rows(engine: Engine, run: Plan) -> torch.Tensor:
    """[T, M] final hidden states of the tree's tokens, in the model's dtype, differentiable as `tree_logprobs` is."""

    def read_of(walk: Walk) -> Read:
        return lambda number, rows: (walk.positions(number), {"rows": rows})

    return gather(lambda: engine.new_walk(run), read_of, ("rows",), run.forest.num_tokens)["rows"]


def restore(logprobs_T: torch.Tensor, forest: Forest) -> list[torch.Tensor]:
    """Per-trajectory log-probs. The transpose of this gather is gradient restoration."""
    index = to_device(forest.path_index, logprobs_T.device)
    flat_F = logprobs_T[index]
    return [part[1:] for part in flat_F.split(forest.path_lengths.tolist())]
