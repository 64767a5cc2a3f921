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

    loss_error: relative. max_logprob_error, rms_logprob_error: absolute, natural logarithm. gradient_error,
    values_error: norm of the difference over the norm, whole gradient: of a step, and of a backward through
    `engine.logprobs`. All are relative to `reference`: flat training in the model's dtype, or in float32 for
    low-precision models. limits: the largest allowed errors, by name. parameters: worst first. num_levels: gateways on
    the longest path; has_gap: whether rows were read of a gateway that are not neighbours; is_cut: whether rows were
    made shorter for the budget. at_budgets: the same under other budgets. seconds_*: one cold run each. flop_bound:
    flat / tree FLOPs, the flat side as run here, with the logits of every row.
    """

    model: str
    dtype: str
    attention: str
    max_tokens: int | None
    num_micro_batches: int
    num_levels: int
    has_gap: bool
    is_cut: bool
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
    values_error: float
    flat_loss_error: float | None
    flat_rms_logprob_error: float | None
    flat_gradient_error: float | None
    limits: dict[str, float]
    parameters: tuple[ParameterError, ...]
    seconds_flat: float
    seconds_tree: float
    flop_bound: float
    at_budgets: "tuple[VerificationReport, ...]" = ()

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
            "values": self.values_error,
            "worst_parameter": self.worst_parameter.error,
        }

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each error beyond its limit, those at other budgets last; NaN is beyond every limit."""
        below = [
            f"{failure} under max_tokens {part.max_tokens:,}" for part in self.at_budgets for failure in part.failures
        ]
        return (*self._own_failures, *below)

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
        extra["at_budgets"] = [each.to_dict() for each in self.at_budgets]
        return {**asdict(self), "parameters": [asdict(parameter) for parameter in self.parameters], **extra}

    def describe(self, num_parameters: int = 5) -> str:
        """The comparison as a plain-text table: each error under each budget; the worst parameters after a failure.

        80 columns hold it, which is what a terminal has at least.
        """
        parts = (self, *self.at_budgets)
        names = ("loss", "max_logprob", "rms_logprob", "gradient", "values", "worst_parameter")
        labels = ("loss", "log-probs, largest", "log-probs, rms", "gradient of a step", "gradient of log-probs")
        limits = [f"{self.limits[name]:.1e}" if name in self.limits else "" for name in names]
        errors = [
            (label, *(f"{part.errors[name]:.1e}" for part in parts), limit)
            for label, name, limit in zip((*labels, "worst parameter"), names, limits, strict=True)
        ]
        facts: list[tuple[str, list[str]]] = [
            ("micro-batches", [f"{part.num_micro_batches:,}" for part in parts]),
            ("gateways on a path", [f"{part.num_levels:,}" for part in parts]),
            ("gaps in gateways", ["yes" if part.has_gap else "no" for part in parts]),
            ("tree tokens", [f"{part.num_tree_tokens:,}{' (cut)' if part.is_cut else ''}" for part in parts]),
            ("seconds, tree", [f"{part.seconds_tree:.2f}" for part in parts]),
            ("seconds, flat", [f"{part.seconds_flat:.2f}" for part in parts]),
        ]
        rows = [("error", *map(_budget, parts), "limit"), *errors, *((label, *row, "") for label, row in facts)]
        worst = self._worst_side.worst_parameter
        lines = [
            f"flat and tree: {'equal' if self.passed else 'DIFFERENT'}",
            *_aligned(rows),
            f"{self.model}, {self.dtype}, attention {self.attention}; loss {self.loss_flat:.8f}, of the tree "
            f"{self.loss_tree:.8f}",
            f"{num(self.num_trajectories, 'trajectory', 'trajectories')}, {num(self.num_trees, 'tree')}, "
            f"{num(self.num_flat_tokens, 'flat token')}, {num(self.num_tree_tokens, 'tree token')}; "
            f"reference: {self.reference}",
            f"worst parameter: {worst.name} (gradient norm {worst.norm:.2e})",
            f"by FLOPs {self.flop_bound:.2f} x, as the flat side computes the logits of all its rows; measured "
            f"{self.speed_up:.2f} x, efficiency {self.efficiency:.2f}",
        ]
        if not self.passed:
            parameters = self._worst_side.parameters
            worst_rows = [
                (parameter.name, f"{parameter.norm:.3e}", f"{parameter.error:.3e}") for parameter in parameters
            ]
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
        """The first of those under other budgets that fails, unless this one does."""
        return self if self._own_failures else next((each for each in self.at_budgets if each.failures), self)


def _budget(report: VerificationReport) -> str:
    return "whole" if report.num_micro_batches == 1 else f"at {report.max_tokens:,}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column on the left, the others on the right of their widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines
