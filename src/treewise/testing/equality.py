"""The assertion of an equivalence test: the tree gives the loss and the gradients of flat training.

The tree side is `TreeEngine`, as training uses it. The flat side is the model's own forward, one trajectory after the
other (`treewise.verification`), in the model's own dtype. transformers computes the norms of most families in float32;
a family whose norms are torch's own (`tiny_model("gpt_neox", torch.float64)`) agrees to 1e-10.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from treewise.errors import ConfigError
from treewise.objectives import Objective
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory
from treewise.verification import verify
from treewise.verification.report import VerificationReport


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
            budget,
            attention=attention,
            objective=objective,
            tolerance=tolerance,
            processor=processor,
        )
        report.raise_if_failed()
    return report
