"""Rank correlation with a bootstrap interval: whether a signal predicts what it claims to."""

from dataclasses import dataclass

import numpy as np

from treewise.errors import DataError

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Correlation:
    """Spearman's rank correlation over tasks, and the percentile interval of `LEVEL` from resampled tasks.

    value, low, high: -1..1. A signal or a target that is the same for all tasks predicts nothing: its correlation is 0.
    """

    value: float
    low: float
    high: float
    num_tasks: int

    @property
    def is_above_zero(self) -> bool:
        """Whether the whole interval is."""
        return self.low > 0

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def ranks(values: np.ndarray) -> np.ndarray:
    """[..., n] float64, ranks from 0 along the last axis; equal values share the mean of theirs."""
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise DataError(
            f"{int((~np.isfinite(values)).sum())} of {values.size} values are not finite; they cannot be ranked."
        )
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=-1)
    size = values.shape[-1]
    index = np.broadcast_to(np.arange(size), values.shape)
    is_first = np.ones(values.shape, dtype=bool)
    is_first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    is_last = np.ones(values.shape, dtype=bool)
    is_last[..., :-1] = is_first[..., 1:]
    first = np.maximum.accumulate(np.where(is_first, index, 0), axis=-1)
    last = np.minimum.accumulate(np.where(is_last, index, size - 1)[..., ::-1], axis=-1)[..., ::-1]
    result = np.empty(values.shape)
    np.put_along_axis(result, order, (first + last) / 2, axis=-1)
    return result


def spearman(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """[...] float64, the correlation of ranks along the last axis; 0 where one of them is constant."""
    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    scale = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return np.divide((a * b).sum(-1), scale, out=np.zeros(scale.shape), where=scale > 0)


def correlation(signal: np.ndarray, target: np.ndarray, num_samples: int = 2000, seed: int = 0) -> Correlation:
    """The rank correlation of two values of each task, [n] each, with its bootstrap interval.

    Raises:
        DataError: values that are not finite, or fewer than 3 tasks.
    """
    signal, target = np.asarray(signal, dtype=np.float64), np.asarray(target, dtype=np.float64)
    if len(signal) != len(target) or len(signal) < 3:
        raise DataError(
            f"{len(signal)} and {len(target)} tasks; a rank correlation needs as many of one as of the other, at "
            "least 3."
        )
    drawn = np.random.default_rng(seed).integers(0, len(signal), (num_samples, len(signal)))
    value = float(spearman(signal, target))
    low, high = np.quantile(spearman(signal[drawn], target[drawn]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Correlation(value, float(low), float(high), len(signal))
