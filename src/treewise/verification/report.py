"""The result of a verification: errors of the tree against flat training, their limits, the parameters, worst first."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treewise.errors import VerificationError, num


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
    dtype, or in float32 for low-precision models. limits: the largest allowed errors, by name. parameters: worst
    first. at_budget: the same at half of the largest tree, where no budget was asked for. seconds_*: one cold run
    each. flop_bound: flat / tree FLOPs, the flat side as run here, with the logits of every row.
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
    at_budget: "VerificationReport | None" = None

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
        """One line for each error beyond its limit, those at the budget last; NaN is beyond every limit."""
        below = () if self.at_budget is None else self.at_budget.failures
        where = f" under max_tokens {self.at_budget.max_tokens:,}" if self.at_budget is not None else ""
        return (*self._own_failures, *(f"{each}{where}" for each in below))

    @property
    def _own_failures(self) -> tuple[str, ...]:
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
        extra["at_budget"] = None if self.at_budget is None else self.at_budget.to_dict()
        return {**asdict(self), "parameters": [asdict(each) for each in self.parameters], **extra}

    def describe(self, num_parameters: int = 5) -> str:
        """The comparison as a plain-text table: each error beside its limit; the worst parameters after a failure.

        80 columns hold it, which is what a terminal has at least.
        """
        budget = "whole trees" if self.max_tokens is None else f"max_tokens {self.max_tokens:,}"
        loss, worst = (f"{self.loss_flat:.8f}", f"{self.loss_tree:.8f}"), self._worst_side.worst_parameter
        part = self.at_budget
        columns = () if part is None else (f"at {num(part.max_tokens or 0, 'token')}",)
        below = ("", "") if part is None else (f"{part.num_computed_tokens:,}", f"{part.seconds_tree:.2f} s")
        rows = [
            ("", "flat", "tree", "error", *columns, "limit"),
            self._error_row("loss", "loss", *loss),
            self._error_row("log-probs, largest", "max_logprob"),
            self._error_row("log-probs, rms", "rms_logprob"),
            self._error_row("gradient, relative", "gradient", f"norm {self.gradient_norm:.4g}"),
            self._error_row("worst parameter", "worst_parameter"),
            ("tokens computed", f"{self.num_flat_tokens:,}", f"{self.num_computed_tokens:,}", "", below[0]),
            (
                "one run each",
                f"{self.seconds_flat:.2f} s",
                f"{self.seconds_tree:.2f} s",
                f"{self.speed_up:.2f} x",
                below[1],
            ),
        ]
        rows = [(*row, "") if part is not None and len(row) < len(rows[0]) else row for row in rows]
        lines = [
            f"flat and tree: {'equal' if self.passed else 'DIFFERENT'}",
            *_aligned(rows),
            f"{self.model}, {self.dtype}, attention {self.attention}, {budget}",
            f"{num(self.num_trajectories, 'trajectory', 'trajectories')}, {num(self.num_trees, 'tree')}, "
            f"{num(self.num_tree_tokens, 'tree token')}; "
            f"reference: {self.reference}",
            f"worst parameter: {worst.name} (gradient norm {worst.norm:.2e})",
            f"by FLOPs {self.flop_bound:.2f} x, as the flat side computes the logits of all its rows; efficiency "
            f"{self.efficiency:.2f}",
        ]
        if not self.passed:
            parameters = self._worst_side.parameters
            worst_rows = [(each.name, f"{each.norm:.3e}", f"{each.error:.3e}") for each in parameters]
            header = ("worst parameters", "norm of the gradient", "relative error")
            lines += ["", *_aligned([header, *worst_rows[:num_parameters]]), "", *self.failures]
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raises `VerificationError`, naming the worst parameter, if any error is beyond its limit."""
        if not self.passed:
            worst = self._worst_side.worst_parameter
            raise VerificationError(
                f"{self.model}: tree and flat training differ: {'; '.join(self.failures)}. "
                f"Worst parameter: {worst.name} ({worst.error:.2e})."
            )

    @property
    def _worst_side(self) -> "VerificationReport":
        """The one that the worst parameter is taken from: this one, unless it is only at the budget that some fail."""
        fails_below = self.at_budget is not None and not self._own_failures and self.at_budget.failures
        return self.at_budget if self.at_budget is not None and fails_below else self

    def _error_row(self, label: str, name: str, flat: str = "", tree: str = "") -> tuple[str, ...]:
        limit = f"{self.limits[name]:.1e}" if name in self.limits else ""
        below = () if self.at_budget is None else (f"{self.at_budget.errors[name]:.1e}",)
        return label, flat, tree, f"{self.errors[name]:.1e}", *below, limit


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column on the left, the others on the right of their widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines
