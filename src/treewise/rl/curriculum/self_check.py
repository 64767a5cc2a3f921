"""The self-check: whether a curriculum's signal predicts, on a sample of one's own tasks, what it claims to predict.

Of each task one half of its rollouts is what is known, the other half is what comes: a posterior that is compared with
the rollouts that it was made of would look good on noise. A signal predicts by its rank correlation with what comes;
one whose bootstrap interval is not above zero is useless here. Where what comes is the same for all tasks, as where
rewards differ within none, nothing is measured.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treewise.errors import DataError, num

LEVEL = 0.95
# What each signal claims to predict. `length` claims nothing: it shows what the number of prompt tokens alone predicts.
CLAIMS = {
    "angle": "gradient_norm",
    "intra": "gradient_norm",
    "inter": "gradient_norm",
    "learnability": "variance",
    "length": None,
}
TARGETS = {"gradient_norm": "norm of the policy gradient", "variance": "observed p (1 - p)"}
SIGNAL_OF = {"learnability": "learnability", "gain": "angle"}  # by which a curriculum draws


@dataclass(frozen=True, slots=True)
class Correlation:
    """Spearman's rank correlation over tasks, and the percentile interval of `LEVEL` from resampled tasks.

    value, low, high: -1..1; 0 where signal or target are the same for all tasks. is_measurable: whether the target
    differs among them, without which no signal could predict it. A signal that does not differ predicts nothing.
    """

    value: float
    low: float
    high: float
    num_tasks: int
    is_measurable: bool = True

    @property
    def is_above_zero(self) -> bool:
        """Whether the whole interval is."""
        return self.low > 0

    def __str__(self) -> str:
        if not self.is_measurable:
            return "not measurable"
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def ranks(values: np.ndarray) -> np.ndarray:
    """[n] float64, ranks from 0; equal values share the mean of theirs."""
    values = np.asarray(values, dtype=np.float64)
    if num_wrong := int((~np.isfinite(values)).sum()):
        raise DataError(f"{num_wrong} of {values.size} values are not finite; they cannot be ranked.")
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts + 1) / 2)[group])


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """The correlation of ranks of two [n]; 0 where one of them is constant."""
    a, b = (each - each.mean() for each in (ranks(first), ranks(second)))
    scale = math.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum()) / scale if scale else 0.0


def require_tasks(num_tasks: int) -> None:
    """Raises `DataError` where so few tasks have no rank correlation."""
    if num_tasks < 3:
        raise DataError(f"{num(num_tasks, 'task')}; a rank correlation needs at least 3 (--items).")


def correlation(signal: np.ndarray, target: np.ndarray, num_samples: int = 2000, seed: int = 0) -> Correlation:
    """The rank correlation of two values of each task, [n] each, with its bootstrap interval.

    Raises:
        DataError: values that are not finite, or fewer than 3 tasks.
    """
    signal, target = np.asarray(signal, dtype=np.float64), np.asarray(target, dtype=np.float64)
    require_tasks(len(signal))
    value = spearman(signal, target)
    if (target == target[0]).all():
        return Correlation(0.0, 0.0, 0.0, len(signal), is_measurable=False)
    drawn = np.random.default_rng(seed).integers(0, len(signal), (num_samples, len(signal)))
    resampled = [spearman(signal[each], target[each]) for each in drawn]
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Correlation(value, float(low), float(high), len(signal))


@dataclass(frozen=True, slots=True)
class SignalCheck:
    """One signal against one target. is_claimed: whether it claims to predict this one."""

    signal: str
    target: str
    correlation: Correlation
    is_claimed: bool


@dataclass(frozen=True, slots=True)
class CheckReport:
    """checks: every signal against every target. num_tasks, num_rollouts: of the sample. num_tokens: generated for it.
    num_varied: tasks whose rewards differ.
    """

    checks: tuple[SignalCheck, ...]
    num_tasks: int
    num_rollouts: int
    num_tokens: int
    num_varied: int

    @property
    def useless(self) -> list[str]:
        """Signals whose interval is not above zero for what they claim to predict."""
        measured = [each for each in self.checks if each.is_claimed and each.correlation.is_measurable]
        return [each.signal for each in measured if not each.correlation.is_above_zero]

    @property
    def not_measurable(self) -> list[str]:
        """Signals for which what they claim to predict is the same for all tasks."""
        return [each.signal for each in self.checks if each.is_claimed and not each.correlation.is_measurable]

    def claimed(self, signal: str) -> SignalCheck | None:
        """A signal against what it claims to predict; None where this was not measured."""
        return next((each for each in self.checks if each.signal == signal and each.is_claimed), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "useless": self.useless, "not_measurable": self.not_measurable}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CheckReport":
        """What `to_dict` gave."""
        checks = tuple(
            SignalCheck(each["signal"], each["target"], Correlation(**each["correlation"]), each["is_claimed"])
            for each in values["checks"]
        )
        return cls(checks, *(values[name] for name in ("num_tasks", "num_rollouts", "num_tokens", "num_varied")))

    def text(self) -> str:
        """A table for a terminal, and the verdict on each signal."""
        lines = [
            f"{num(self.num_tasks, 'task')}, {num(self.num_rollouts, 'rollout')} "
            f"({self.num_tokens:,} generated tokens); "
            f"rewards differ within {num(self.num_varied, 'task')}",
            f"{'signal':<14} {'predicts':<30} {'rank correlation, 95 %':<24}",
        ]
        for each in self.checks:
            verdict = "useful" if each.correlation.is_above_zero else "useless here"
            line = f"{each.signal:<14} {TARGETS[each.target]:<30} {each.correlation!s:<24} "
            lines.append(line + verdict * (each.is_claimed and each.correlation.is_measurable))
        if self.useless:
            lines.append(f"useless here: {', '.join(self.useless)}; the interval is not above zero.")
        if self.not_measurable:
            lines.append(f"not measurable here: {', '.join(self.not_measurable)}; {self.why_not_measurable}")
        return "\n".join(line.rstrip() for line in lines)

    @property
    def why_not_measurable(self) -> str:
        """Why, and what to do."""
        if self.num_varied:
            return "what they predict is the same for all tasks. Take more tasks or rollouts."
        return (
            "rewards differ within no task, so all gradients are zero. Take more rollouts of each task, a higher "
            "temperature, or tasks that are neither always nor never solved."
        )


def check_signals(
    signals: Mapping[str, np.ndarray],
    targets: Mapping[str, np.ndarray],
    *,
    num_rollouts: int,
    num_tokens: int,
    num_varied: int,
) -> CheckReport:
    """Correlates every signal with every target, [tasks] each. Where rewards differ within no task, a gradient is that
    of other terms of the loss, which no signal claims to predict.

    Raises:
        DataError: values that are not finite, or fewer than 3 tasks.
    """
    if not num_varied:
        targets = {name: np.zeros_like(values) for name, values in targets.items()}
    checks = tuple(
        SignalCheck(signal, target, correlation(values, targets[target]), CLAIMS[signal] == target)
        for signal, values in signals.items()
        for target in targets
    )
    num_tasks = len(next(iter(targets.values())))
    return CheckReport(checks, num_tasks, num_rollouts, num_tokens, num_varied)


def refusal(curriculum: str, report: CheckReport) -> str | None:
    """Why a curriculum's signal is useless here, in a sentence; None where it is not, or was not measured."""
    check = report.claimed(SIGNAL_OF.get(curriculum, ""))
    if check is None or check.correlation.is_above_zero:
        return None
    if not check.correlation.is_measurable:
        return (
            f"curriculum {curriculum!r} draws by {check.signal}, whose worth is not measurable here, over "
            f"{num(report.num_tasks, 'task')}: {report.why_not_measurable}"
        )
    return (
        f"curriculum {curriculum!r} draws by {check.signal}, which is useless here: its rank correlation with the "
        f"{TARGETS[check.target]} is {check.correlation} over {num(report.num_tasks, 'task')}, not above zero."
    )
