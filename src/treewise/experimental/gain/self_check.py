"""The self-check of `gain`: whether angles predict, on a sample of one's own tasks, what they claim to: the norm of
each task's own gradient.

A signal predicts by its rank correlation with these norms; one whose bootstrap interval is not above zero is useless
here. Where all norms are the same, as where rewards differ within no task, nothing is measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treewise.engine.engine import TreeEngine
from treewise.errors import DataError, num
from treewise.experimental.gain.signals import angles_of, gradient_norms
from treewise.objectives import Objective
from treewise.tree.trajectory import Trajectory

LEVEL = 0.95
CLAIMED = ("angle", "intra", "inter")  # `length` claims nothing: it shows what the number of prompt tokens predicts
_TARGET = "norm of the policy gradient"


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
    a, b = (values - values.mean() for values in (ranks(first), ranks(second)))
    scale = math.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum()) / scale if scale else 0.0


def require_tasks(num_tasks: int) -> None:
    """Raises `DataError` where so few tasks have no rank correlation."""
    if num_tasks < 3:
        raise DataError(f"{num(num_tasks, 'task')}; a rank correlation needs at least 3 (check_items).")


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
    resampled = [spearman(signal[indices], target[indices]) for indices in drawn]
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Correlation(value, float(low), float(high), len(signal))


@dataclass(frozen=True, slots=True)
class SignalCheck:
    """One signal against the norms. is_claimed: whether it claims to predict them."""

    signal: str
    correlation: Correlation
    is_claimed: bool


@dataclass(frozen=True, slots=True)
class CheckReport:
    """checks: of every signal. num_tasks, num_rollouts: of the sample. num_tokens: generated for it. num_varied: tasks
    whose rewards differ.
    """

    checks: tuple[SignalCheck, ...]
    num_tasks: int
    num_rollouts: int
    num_tokens: int
    num_varied: int

    @property
    def useless(self) -> list[str]:
        """Signals whose interval is not above zero though they claim to predict."""
        measured = [check for check in self.checks if check.is_claimed and check.correlation.is_measurable]
        return [check.signal for check in measured if not check.correlation.is_above_zero]

    @property
    def not_measurable(self) -> list[str]:
        """Signals that claim to predict what is the same for all tasks."""
        return [check.signal for check in self.checks if check.is_claimed and not check.correlation.is_measurable]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "useless": self.useless, "not_measurable": self.not_measurable}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CheckReport":
        """What `to_dict` gave."""
        checks = tuple(
            SignalCheck(check["signal"], Correlation(**check["correlation"]), check["is_claimed"])
            for check in values["checks"]
        )
        return cls(checks, *(values[name] for name in ("num_tasks", "num_rollouts", "num_tokens", "num_varied")))

    def text(self) -> str:
        """A table for a terminal, and the verdict on each signal."""
        lines = [
            f"{num(self.num_tasks, 'task')}, {num(self.num_rollouts, 'rollout')} "
            f"({self.num_tokens:,} generated tokens); "
            f"rewards differ within {num(self.num_varied, 'task')}",
            f"{'signal':<8} rank correlation with the {_TARGET}, 95 %",
        ]
        for check in self.checks:
            verdict = "useful" if check.correlation.is_above_zero else "useless here"
            line = f"{check.signal:<8} {check.correlation!s:<24} "
            lines.append(line + verdict * (check.is_claimed and check.correlation.is_measurable))
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

    def refusal(self) -> str | None:
        """Why `gain` is useless here, in a sentence; None where it is not."""
        check = next(check for check in self.checks if check.signal == "angle")
        if check.correlation.is_above_zero:
            return None
        tasks = num(self.num_tasks, "task")
        if not check.correlation.is_measurable:
            what = f"whose worth is not measurable here, over {tasks}: {self.why_not_measurable}"
        else:
            what = (
                f"which is useless here: its rank correlation with the {_TARGET} is {check.correlation} over {tasks}, "
                "not above zero."
            )
        return f"curriculum 'gain' draws by angle, {what}"


def check_signals(
    signals: Mapping[str, np.ndarray], norms: np.ndarray, *, num_rollouts: int, num_tokens: int, num_varied: int
) -> CheckReport:
    """Correlates every signal with the norms, [tasks] each. Where rewards differ within no task, a gradient is that of
    other terms of the loss, which no signal claims to predict.

    Raises:
        DataError: values that are not finite, or fewer than 3 tasks.
    """
    if not num_varied:
        norms = np.zeros_like(norms)
    checks = (SignalCheck(name, correlation(values, norms), name in CLAIMED) for name, values in signals.items())
    return CheckReport(tuple(checks), len(norms), num_rollouts, num_tokens, num_varied)


def check_angles(
    trees: Sequence[list[Trajectory]],
    prompts: Sequence[Sequence[int]],
    engine: TreeEngine,
    objective: Objective,
    credited: Callable[[list[Trajectory]], list[Trajectory]],
    *,
    num_tokens: int,
    num_shared: int | None = None,
) -> CheckReport:
    """Compares the angles of prompts, and their lengths, with the norms of the gradients of their rollouts. Tasks with
    fewer than two rewards are left out.

    Parameters:
        trees: the rollouts of each task that have a reward.
        credited: gives rollouts their advantages, and the log-probs that the objective needs.
        num_tokens: generated for the check.
        num_shared: tokens that all prompts of the pool begin with, as of `angles_of`.

    Raises:
        DataError: fewer than 3 tasks are left.
    """
    pairs = [(rows, prompt) for rows, prompt in zip(trees, prompts, strict=True) if len(rows) >= 2]
    require_tasks(len(pairs))
    rows, prompts = [tree for tree, _ in pairs], [prompt for _, prompt in pairs]
    angles = angles_of(engine, prompts, num_shared)
    return check_signals(
        {
            **{"angle": angles.total, "intra": angles.intra, "inter": angles.inter},
            "length": np.array([float(len(prompt)) for prompt in prompts]),
        },
        np.array(gradient_norms(engine, [credited(own) for own in rows], objective)),
        num_rollouts=sum(map(len, trees)),
        num_tokens=num_tokens,
        num_varied=sum(len({row.reward for row in tree}) > 1 for tree in rows),
    )
