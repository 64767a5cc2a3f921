"""A trajectory: one root-to-leaf token sequence with its per-token streams, validated when it is made.

A trajectory is what a flat trainer would train on, and all that users bring. Streams have one value per token and
align with `token_ids`; the value at position 0 of a stream that speaks about predictions (weights, log-probs) has no
meaning, because nothing predicts a first token.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from treewise.errors import DataError

MAX_TOKEN_ID = np.iinfo(np.int32).max
MAX_TEACHER_LOGPROB = 0.02  # bfloat16 teachers round to a little more than certainty


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One token sequence and what is trained on it.

    Every array has one value per token (teacher streams: one row). `token_ids` and `teacher_ids` become int32, every
    other stream float32.

    Parameters:
        token_ids: non-negative integers, at least two.
        loss_weights: non-negative; 1 for every token but the first where not given. Zero means context.
        advantages: one per token, or one number for all tokens.
        old_logprobs: log-probs of the tokens under the policy before the update (natural logarithm).
        ref_logprobs: log-probs of the tokens under a reference policy.
        group: trajectories of one group are compared with one another (the samples of one prompt).
        reward: one number for the whole trajectory.
        rollout: trajectories cut from one rollout (compaction, sub-agents) share this id.
        source: where it came from, for error messages (`rollouts.jsonl:17`).
        sampler_logprobs: log-probs of the tokens as the engine that sampled them reported them. They differ from
            `old_logprobs` by that engine's own rounding and kernels, and by the updates since.
        teacher_ids: [n, k], candidates of a teacher for each position; row `t` speaks about token `t`, like log-probs.
        teacher_logprobs: [n, k], the teacher's log-probs of these candidates; `-inf` marks an unused place.
        rollout_weight: the loss weight of the whole rollout, all its trajectories together. Needed only where the
            trajectories of one rollout are spread over several forests; `treewise.advantages` fills it.

    Raises:
        DataError: an empty or non-integer sequence, a negative id, a stream of another length, a value that is not
            finite, a negative weight, a weight on the first token, no trained token at all, or teacher streams that
            do not fit one another.
    """

    token_ids: np.ndarray
    loss_weights: np.ndarray | None = None
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    group: Hashable = None
    reward: float | None = None
    rollout: Hashable = None
    source: str = ""
    sampler_logprobs: np.ndarray | None = None
    teacher_ids: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    rollout_weight: float | None = None

    if TYPE_CHECKING:  # what is taken is wider than what is kept

        def __init__(
            self,
            token_ids: ArrayLike,
            loss_weights: ArrayLike | None = None,
            advantages: ArrayLike | None = None,
            old_logprobs: ArrayLike | None = None,
            ref_logprobs: ArrayLike | None = None,
            group: Hashable = None,
            reward: float | None = None,
            rollout: Hashable = None,
            source: str = "",
            sampler_logprobs: ArrayLike | None = None,
            teacher_ids: ArrayLike | None = None,
            teacher_logprobs: ArrayLike | None = None,
            rollout_weight: float | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        place = self.source or "trajectory"
        ids = _token_ids(self.token_ids, place)
        object.__setattr__(self, "token_ids", ids)
        weights = _default_weights(len(ids)) if self.loss_weights is None else self.loss_weights
        object.__setattr__(self, "loss_weights", _checked_weights(weights, len(ids), place))
        for name in ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _stream(value, name, len(ids), place, scalar=name == "advantages"))
        if self.teacher_ids is not None or self.teacher_logprobs is not None:
            teacher = checked_teacher(self.teacher_ids, self.teacher_logprobs, len(ids), place)
            object.__setattr__(self, "teacher_ids", teacher[0])
            object.__setattr__(self, "teacher_logprobs", teacher[1])
        for name in ("reward", "rollout_weight"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _finite_number(getattr(self, name), name, place))
        if self.rollout_weight is not None and self.rollout_weight <= 0:
            raise DataError(f"{place}: rollout_weight is {self.rollout_weight:g}; it must be positive.")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens whose loss weight is not zero."""
        assert self.loss_weights is not None
        return int(np.count_nonzero(self.loss_weights))


def number_rollouts(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """[N] int64, the number of each trajectory's rollout, in order of first appearance.

    Trajectories that share `rollout` within one `group` are one rollout; one without a rollout id is its own.
    """
    seen: dict[object, int] = {}
    keys = [(index,) if item.rollout is None else (item.group, item.rollout) for index, item in enumerate(trajectories)]
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def _token_ids(values: Sequence[int] | np.ndarray, place: str) -> np.ndarray:
    ids = as_array(values, "token_ids", place)
    if ids.ndim != 1:
        raise DataError(f"{place}: token_ids has {ids.ndim} dimensions; give one flat sequence of integers.")
    if len(ids) == 0:
        raise DataError(f"{place}: token_ids is empty; a trajectory needs at least two tokens.")
    # NumPy takes a bool among integers for one, so a list is asked for the types that it holds.
    if ids.dtype.kind not in "iu" or (isinstance(values, list | tuple) and bool in set(map(type, values))):
        raise DataError(f"{place}: token_ids must be integers, found {_first_wrong(values, int | np.integer)}.")
    bad = np.flatnonzero((ids < 0) | (ids > MAX_TOKEN_ID))
    if len(bad):
        raise DataError(f"{place}: token id {ids[bad[0]]} at position {bad[0]} is outside 0..{MAX_TOKEN_ID}.")
    if len(ids) == 1:
        raise DataError(f"{place}: one token only, so no token is predicted; a trajectory needs at least two.")
    return np.ascontiguousarray(ids, dtype=np.int32)


def _default_weights(length: int) -> np.ndarray:
    weights = np.ones(length, dtype=np.float32)
    weights[0] = 0
    return weights


def _checked_weights(values: Sequence[float] | np.ndarray, length: int, place: str) -> np.ndarray:
    weights = _stream(values, "loss_weights", length, place)
    if weights[0] != 0:
        raise DataError(f"{place}: loss_weights[0] is {weights[0]:g}, but nothing predicts a first token; set it to 0.")
    bad = np.flatnonzero(weights < 0)
    if len(bad):
        raise DataError(
            f"{place}: loss weight {weights[bad[0]]:g} at position {bad[0]} is negative; advantages carry the sign."
        )
    if not weights.any():
        raise DataError(f"{place}: no trained token (all {length} loss weights are 0); drop it or weight its answers.")
    return weights


def _stream(
    values: float | Sequence[float] | np.ndarray, name: str, length: int, place: str, scalar: bool = False
) -> np.ndarray:
    array = as_array(values, name, place)
    if scalar and array.ndim == 0:
        array = np.full(length, array)
    if array.ndim != 1 or len(array) != length:
        found = len(array) if array.ndim == 1 else f"shape {array.shape}"
        raise DataError(f"{place}: {found} {name} for {length} tokens; they must align with token_ids.")
    if array.dtype.kind not in "fiub":
        raise DataError(f"{place}: {name} must be numbers, found {_first_wrong(values, float | int | np.number)}.")
    with np.errstate(over="ignore"):
        stream = np.ascontiguousarray(array, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(stream))
    if len(bad):
        raise DataError(f"{place}: {name}[{bad[0]}] is {array[bad[0]]}; every value must be finite.")
    return stream


def checked_teacher(ids: object, logprobs: object, length: int, place: str) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of a teacher ([length, k] int32) and their log-probs ([length, k] float32), validated."""
    if ids is None or logprobs is None:
        missing = "teacher_ids" if ids is None else "teacher_logprobs"
        raise DataError(f"{place}: {missing} is missing; teacher_ids and teacher_logprobs go together.")
    candidates, values = as_array(ids, "teacher_ids", place), as_array(logprobs, "teacher_logprobs", place)
    for name, array, kinds in (("teacher_ids", candidates, "iu"), ("teacher_logprobs", values, "fiu")):
        if array.ndim != 2 or len(array) != length or array.shape[1] == 0:
            raise DataError(f"{place}: {name} has shape {array.shape}; give [{length}, k], one row per token.")
        if array.dtype.kind not in kinds:
            raise DataError(f"{place}: {name} must be {'integers' if kinds == 'iu' else 'numbers'}, not {array.dtype}.")
    if candidates.shape != values.shape:
        raise DataError(f"{place}: teacher_ids {candidates.shape} and teacher_logprobs {values.shape} differ in shape.")
    if ((candidates < 0) | (candidates > MAX_TOKEN_ID)).any():
        raise DataError(f"{place}: a teacher's token id is outside 0..{MAX_TOKEN_ID}.")
    values = np.ascontiguousarray(values, dtype=np.float32)
    if np.isnan(values).any() or (values > MAX_TEACHER_LOGPROB).any():
        raise DataError(f"{place}: a teacher_logprobs value is not a log-prob; they are natural logarithms, at most 0.")
    total = np.exp(values[1:].astype(np.float64)).sum(1)
    if (total > 1 + MAX_TEACHER_LOGPROB).any():
        row = int(np.argmax(total)) + 1
        raise DataError(
            f"{place}: the teacher's probabilities at position {row} add up to {total[row - 1]:.4g}; "
            "are its log-probs natural logarithms of the whole distribution?"
        )
    return np.ascontiguousarray(candidates, dtype=np.int32), values


def _finite_number(value: float, name: str, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise DataError(f"{place}: {name} must be a number, found {type(value).__name__}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise DataError(f"{place}: {name} is {number}; it must be finite.")
    return number


def as_array(values: object, name: str, place: str) -> np.ndarray:
    """What a caller gave as an array of any shape and type; ragged lists are refused by name and place."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{place}: {name} is not a flat sequence of numbers ({error}).") from None


def _first_wrong(values: object, right: type | UnionType) -> str:
    """Names the first element of a wrong type, which says more than NumPy's common type does."""
    if isinstance(values, Sequence) and not isinstance(values, str):
        for position, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, right):
                return f"{type(value).__name__} at position {position}"
    return str(np.asarray(values).dtype)
