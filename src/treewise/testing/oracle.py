"""Flat training for tests: one trajectory at a time through the model's own forward (`treewise.engine.flat`).

What two right computations may differ by is measured, not remembered: by how far flat float32 training is from flat
float64 training of the same model, on the processor at hand. `assert_equals_flat` compares `TreeEngine`, as training
uses it, with the model's own forward (`treewise.verification`): transformers computes the norms of most families in
float32; a family whose norms are torch's own (`tiny_model("gpt_neox", torch.float64)`) agrees to 1e-10.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from treewise.engine.flat import FlatLoss, flat_logits
from treewise.errors import ConfigError
from treewise.nn.whole_gradients import Gradients, gradient_error, gradients_of
from treewise.objectives import SFT, Objective
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory
from treewise.verification import verify
from treewise.verification.report import VerificationReport

# Trees and flat rows round the same sums in another order. Over draws of models and rows, trees were 0.8 to 2.1 times
# as far from float64 as flat rows; both errors together are at most 1 + 3 times the flat one.
TIMES_FLAT = 4.0
# A flat gradient may be near float64 by chance; 8 units in the last place of float32 are always allowed for.
LEAST_ROUNDING = 8 * 2.0**-24
WORST_ROUNDING = 1e-3


class FlatGradients(dict[str, torch.Tensor]):
    """Gradients of flat training by name.

    wide: makes the same in float64.
    """

    def __init__(self, gradients: Gradients, wide: Callable[[], Gradients]) -> None:
        super().__init__(gradients)
        self._wide = wide

    @cached_property
    def tolerance(self) -> float:
        """How far another right float32 computation may be from these gradients, as `gradient_error` measures it."""
        return self.tolerance_from(self._wide())

    def tolerance_from(self, exact: Gradients) -> float:
        """The same by the given gradients in float64, which are near, or neither is a reference."""
        assert gradient_error(self, exact) < WORST_ROUNDING, "float32 is too far from float64 to compare anything with"
        return TIMES_FLAT * max(LEAST_ROUNDING, gradient_error(self, exact))


def flat_logprobs(model: nn.Module, trajectory: Trajectory) -> torch.Tensor:
    """[length - 1] log-probs of every token but the first, with a graph."""
    logits, lse, ids, _ = flat_logits(model, trajectory, None, next(model.parameters()).device)
    return logits.gather(1, ids[1:, None])[:, 0] - lse


def flat_sft(model: nn.Module, trajectories: Sequence[Trajectory]) -> tuple[float, list[torch.Tensor], FlatGradients]:
    """Loss, log-probs ([length - 1] each) and gradients of the weighted token mean over all trajectories."""
    model.zero_grad()
    some = next(model.parameters())
    run = FlatLoss(trajectories, SFT()).run(model, some.device)
    wide = torch.promote_types(some.dtype, torch.float32)
    logprobs_N = [logprob.to(some.device, wide) for logprob in run.logprobs]
    return run.loss, logprobs_N, FlatGradients(gradients_of(model), lambda: flat_sft(wide_copy(model), trajectories)[2])


def flat_loss(
    model: nn.Module, trajectories: Sequence[Trajectory], loss_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[float, FlatGradients]:
    """Any loss of all trajectories' log-probs, in one graph."""
    model.zero_grad()
    loss = loss_of([flat_logprobs(model, item) for item in trajectories])
    loss.backward()
    gradients = FlatGradients(gradients_of(model), lambda: flat_loss(wide_copy(model), trajectories, loss_of)[1])
    return float(loss.detach()), gradients


def wide_copy(model: nn.Module) -> nn.Module:
    """In float64, but for what a family's code computes in float32 whatever the dtype (most norms, recurrences)."""
    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "eager"  # the grouped kernel knows no float64
    return wide


# -- the assertion ----------------------------------------------------------------------------------------------------


def assert_equals_flat(
    model: nn.Module,
    trajectories: Sequence[Trajectory] | Forest,
    objective: Objective | Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    *,
    max_tokens: int | Sequence[int | None] | None = None,
    attention: str = "auto",
    tolerance: float | None = None,
    processor: object = None,
) -> VerificationReport:
    """Asserts that trees give the loss, the log-probs and the gradients of training every trajectory alone.

    Parameters:
        model: any causal language model of transformers, on any device. Its mode and `.grad`s are restored.
        trajectories: what is trained, or a forest of them.
        objective: an objective, or a function from the list of log-probs ([L - 1] each) to a scalar; `SFT()` if None.
        max_tokens: budget of a micro-batch (None: whole trees), or several, tried one after the other.
        attention: an implementation, or `auto`.
        tolerance: relative error allowed in the whole gradient; None for the one of the model's dtype
            (`treewise.verify`: 1e-6 in float64, 1e-5 in float32).
        processor: the model's processor, for trajectories with images.

    Returns:
        The report of the last budget.

    Raises:
        VerificationError: a difference beyond the tolerance, also an AssertionError; the message holds the numbers.
        ConfigError: an objective that flat rows cannot express.
    """
    if isinstance(trajectories, Forest):
        trajectories = trajectories.trajectories
    budgets = max_tokens if isinstance(max_tokens, Sequence) else [max_tokens]
    if not budgets:
        raise ConfigError("max_tokens is an empty list; give at least one budget, or None for whole trees.")
    for budget in budgets:
        report = verify(
            model,
            trajectories,
            [budget],
            attention=attention,
            objective=objective,
            tolerance=tolerance,
            processor=processor,
        )
        report.raise_if_failed()
    return report
