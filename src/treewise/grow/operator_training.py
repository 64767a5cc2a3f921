"""Fits a learned operator: the large weights are made anew at each step, trained on trees, and their gradients are
carried on into the operator. The small model is frozen.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treewise.engine import TreeEngine
from treewise.errors import ConfigError
from treewise.grow.operators import Ligo, Mango, Operator
from treewise.grow.widening import Widening
from treewise.objectives import SFT

logger = logging.getLogger("treewise")


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """How an operator is fitted.

    Attributes:
        rank: of Mango's tensor ring.
        steps: optimizer steps; the papers take 100.
        learning_rate: of Adam, on the maps.
        trees_per_step: trees of one step.
        max_tokens: budget of a micro-batch, or None: whole trees.
    """

    rank: int = 1
    steps: int = 100
    learning_rate: float = 1e-3
    trees_per_step: int = 1
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FittedOperator:
    """The large model with its weights, the loss at each step, and a hash over tokens and weights of the trees."""

    model: Any
    losses: list[float]
    data_sha256: str


def trained_operator(
    name: str,
    model: Any,
    grown_config: Any,
    layer_sources: list[int],
    forests: Sequence[Any],
    settings: OperatorSettings,
    seed: int,
    widening: Widening | None = None,
) -> FittedOperator:
    """Fits an operator and makes the large weights.

    Parameters:
        name: `ligo` or `mango`.
        model: the small model, float32.
        grown_config: configuration of the large one.
        layer_sources: the small layer of each large one.
        forests: trees to fit on, taken in turn.
        settings: steps, rank, learning rate.
        seed: of the maps' noise.
        widening: factors of what is copied.

    Raises:
        ConfigError: a rank or number of steps below 1, or a token beyond the model's vocabulary.
    """
    from transformers import AutoModelForCausalLM

    if settings.rank < 1 or settings.steps < 1:
        raise ConfigError(f"rank is {settings.rank}, steps is {settings.steps}; both must be at least 1.")
    highest = max(int(forest.token_ids.max()) for forest in forests)
    if highest >= model.config.vocab_size:
        raise ConfigError(f"the data holds token {highest}, but vocab_size is {model.config.vocab_size}.")
    grown = AutoModelForCausalLM.from_config(grown_config, dtype=torch.float32)
    operator = make_operator(name, model, grown, layer_sources, settings.rank, seed, widening)
    optimizer = torch.optim.Adam(operator.parameters(), lr=settings.learning_rate)
    engine = TreeEngine(grown, max_tokens=settings.max_tokens)
    losses = []
    for step in range(settings.steps):
        losses.append(_fit_step(operator, grown, engine, optimizer, _trees_of_step(forests, step, settings)))
    _make_weights(operator, grown)
    return FittedOperator(grown.to(grown_config.dtype or torch.float32), losses, _hash_of(forests))


def make_operator(
    name: str,
    model: Any,
    grown: Any,
    layer_sources: list[int],
    rank: int,
    seed: int,
    widening: Widening | None = None,
) -> Operator:
    """The operator as it begins: a copy, but for a little noise."""
    shapes = {key: tuple(tensor.shape) for key, tensor in grown.state_dict().items()}
    factor = grown.config.hidden_size // model.config.hidden_size
    arguments = (model, shapes, model.config, layer_sources, widening or Widening(width=factor), seed)
    return Ligo(*arguments) if name == "ligo" else Mango(*arguments, rank=rank)


def _fit_step(operator: Operator, grown: Any, engine: TreeEngine, optimizer: Any, trees: list[Any]) -> float:
    tensors, parameters = _make_weights(operator, grown), dict(grown.named_parameters())
    loss = engine.step(trees, SFT()).loss
    made = [name for name in parameters if tensors[name].requires_grad and parameters[name].grad is not None]
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward([tensors[name] for name in made], [parameters[name].grad for name in made])
    optimizer.step()
    return float(loss)


def _make_weights(operator: Operator, grown: Any) -> dict[str, torch.Tensor]:
    """Puts the weights that the operator makes into the large model; returns them with their graph."""
    tensors = operator()
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            parameter.copy_(tensors[name])
            parameter.grad = None
    return tensors


def _trees_of_step(forests: Sequence[Any], step: int, settings: OperatorSettings) -> list[Any]:
    first = step * settings.trees_per_step
    return [forests[index % len(forests)] for index in range(first, first + settings.trees_per_step)]


def _hash_of(forests: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for forest in forests:
        digest.update(forest.token_ids.tobytes())
        digest.update(forest.parent.tobytes())
        digest.update(forest.token_weights().tobytes())
    return digest.hexdigest()
