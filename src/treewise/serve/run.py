"""A client's model in memory, and the settings of its optimizer's steps."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from tinker import types

from treewise.errors import DataError, NonFiniteError
from treewise.serve.adapter_slots import OwnedWeights
from treewise.serve.step_window import StepWindow
from treewise.serve.weights import ServedModel, WeightsError

_MOST = 1e37  # settings of an optimizer, and what is made of them, fit into float32


@dataclass(slots=True, eq=False)
class Run:
    """window: what its calls share until the next step. sums: loss, flat, tree and computed tokens, seconds since its
    last optimizer step. moved: which step changed the
    weights last, and with which settings; empty: none did."""

    weights: OwnedWeights
    facts: dict[str, Any]
    window: StepWindow
    steps: int = 0
    moved: str = ""
    used: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for an optimizer step."""
        return self.window.has_gradients or any(
            parameter.grad is not None for parameter in self.weights.parameters.values()
        )

    def forget_gradients(self, *, with_moments: bool = False) -> None:
        """Drops those that the parameters have, and those of the window; and what the optimizer remembers, too."""
        self.window.forget()
        self.weights.forget(with_moments=with_moments)

    @property
    def largest(self) -> float:
        """The largest absolute value among the weights; not finite where one is not."""
        norms = [
            torch.linalg.vector_norm(parameter.detach(), math.inf) for parameter in self.weights.parameters.values()
        ]
        return float(torch.stack(norms).max())

    def optimize(self, model: ServedModel, adam: types.AdamParams) -> float:
        """The step of `ServedModel.optimize`, counted. Its errors come with the size of the weights."""
        is_moved = self.has_gradients
        try:
            norm = model.optimize(self.weights, adam)
        except NonFiniteError as error:
            since = f", since {self.moved}" if self.moved else ""
            raise NonFiniteError(f"{error} The largest of the weights is {self.largest:.1e}{since}.") from None
        self.steps += 1
        if is_moved:
            fields = types.AdamParams.model_fields
            shown = [name for name in fields if name == "learning_rate" or getattr(adam, name) != fields[name].default]
            self.moved = f"step {self.steps} with " + ", ".join(f"{name}={getattr(adam, name):g}" for name in shown)
        return norm

    def blame(self, name: str) -> WeightsError:
        """The error of weights with which nothing can be computed."""
        largest = self.largest
        what = f"became so large (up to {largest:.1e}) in {self.moved} that the model's log-probs are not numbers"
        if not math.isfinite(largest):
            what = f"became non-finite in {self.moved}"
        if not self.moved:
            what = "give log-probs that are not numbers, as they were made or loaded"
        return WeightsError(f"the weights of run {name} {what}; load a checkpoint from before, or begin a new run.")


def read_adam(asked: dict[str, Any]) -> types.AdamParams:
    """The settings of a step, from a request as JSON. Raises `DataError`."""
    if "optimizer_params" in asked:
        raise DataError(f"optimizer {asked['optimizer_params'].get('type')!r} is not implemented; send AdamParams.")
    given: dict[str, float | None] = asked["adam_params"]
    for name, value in given.items():  # what was not finite is None in JSON
        if value is None or not 0 <= value <= _MOST or (name.startswith("beta") and value >= 1):
            raise DataError(f"{name}={value} must be a finite number, 0 to {_MOST:g}, and below 1 for a beta.")
    adam = types.AdamParams.model_validate(given)
    if adam.learning_rate * max(adam.weight_decay, 1 / (1 - adam.beta1)) > _MOST:
        raise DataError(
            f"learning_rate={adam.learning_rate} with weight_decay={adam.weight_decay} and beta1={adam.beta1} makes "
            f"steps beyond {_MOST:g}."
        )
    return adam
