"""The result of a verification: errors of the tree against flat training, their limits, the parameters, worst first."""

from dataclasses import asdict, dataclass
from typing import Any

from treewise.errors import VerificationError


@dataclass(frozen=True, slots=True)
class ParameterError:
    """Norm of one parameter's flat gradient, and the norm of its difference to the tree's, relative to it."""

    name: str
    norm: float
    error: float


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The result of `verify`. Errors are those of the tree; `flat_*_error` are those of low-precision flat training.

    loss_error: relative. max_logprob_error, rms_logprob_error: absolute, natural logarithm. gradient_error: norm of
    the difference over the norm, whole gradient. All are relative to `reference`: flat training in the model's
    dtype, or in float32 for low-precision models. limits: the largest allowed errors, by name. parameters: worst first.
    seconds_*: one cold run each. flop_bound: flat / tree FLOPs, the flat side as run here, with the logits of every row.
    """

    model: str
    dtype: str
    attention: str
    max_tokens: int | None
    num_micro_batches: int
    num_trajectories: int
    num_trees: int
    num_flat_tokens: int
    num_tree_tokens: int
    num_computed_tokens: int
    num_trained_tokens: int
    reference: str
    loss_flat: float
    loss_tree: float
    loss_error: float
    max_logprob_error: float
    rms_logprob_error: float
    gradient_norm: float
    gradient_error: float
    flat_loss_error: float | None
    flat_rms_logprob_error: float | None
    flat_gradient_error: float | None
    limits: dict[str, float]
    parameters: tuple[ParameterError, ...]
    seconds_flat: float
    seconds_tree: float
    flop_bound: float

    @property
    def worst_parameter(self) -> ParameterError:
        return self.parameters[0]

    @property
    def speed_up(self) -> float:
        """Flat seconds / tree seconds, one cold run each; measure with `treewise bench`."""
        return self.seconds_flat / self.seconds_tree

    @property
    def efficiency(self) -> float:
        """Speed-up / FLOP bound."""
        return self.speed_up / self.flop_bound

    @property
    def errors(self) -> dict[str, float]:
        """Each error that has a limit."""
        return {
            "loss": self.loss_error,
            "max_logprob": self.max_logprob_error,
            "rms_logprob": self.rms_logprob_error,
            "gradient": self.gradient_error,
            "worst_parameter": self.worst_parameter.error,
        }

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each error beyond its limit; NaN is beyond every limit."""
        errors = self.errors
        return tuple(
            f"{name} error {errors[name]:.2e} is beyond {limit:.2e}"
            + (f" ({self.worst_parameter.name})" if name == "worst_parameter" else "")
            for name, limit in self.limits.items()
            if not errors[name] <= limit
        )

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        extra = {
            "worst_parameter": self.worst_parameter.name,
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "passed": self.passed,
            "failures": list(self.failures),
        }
        return {**asdict(self), "parameters": [asdict(each) for each in self.parameters], **extra}

    def describe(self) -> str:
        """A few lines for people."""
        worst = self.worst_parameter
        verdict = "equal" if self.passed else "DIFFERENT"
        budget = "whole" if self.max_tokens is None else f"max_tokens {self.max_tokens:,}"
        lines = [
            f"{verdict}: {self.model}, {self.dtype}, attention {self.attention}, {budget}",
            f"trajectories       {self.num_trajectories:,} in {self.num_trees:,} trees, "
            f"{self.num_flat_tokens:,} flat tokens, {self.num_tree_tokens:,} tree tokens",
            f"loss               {self.loss_flat:.8f} flat, {self.loss_tree:.8f} tree",
            f"reference          {self.reference}",
            *(f"{name + ' error':<18} {error:.2e}{self._limit(name)}" for name, error in self.errors.items()),
            f"worst parameter    {worst.name} (gradient norm {worst.norm:.2e})",
            f"seconds            {self.seconds_flat:.2f} flat, {self.seconds_tree:.2f} tree, speed-up "
            f"{self.speed_up:.2f}, FLOP bound {self.flop_bound:.2f}, efficiency {self.efficiency:.2f} (one run each)",
            *(f"FAILED             {line}" for line in self.failures),
        ]
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raises `VerificationError`, naming the worst parameter, if any error is beyond its limit."""
        if not self.passed:
            worst = self.worst_parameter
            raise VerificationError(
                f"{self.model}: tree and flat training differ: {'; '.join(self.failures)}. "
                f"Worst parameter: {worst.name} ({worst.error:.2e})."
            )

    def _limit(self, name: str) -> str:
        return f" (limit {self.limits[name]:.2e})" if name in self.limits else ""
