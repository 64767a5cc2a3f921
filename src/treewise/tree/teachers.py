"""A teacher's candidates for each token of a trajectory, and its log-probs of these."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treewise.errors import DataError
from treewise.tree import checks

MAX_TEACHER_LOGPROB = 0.02  # bfloat16 teachers round to a little more than certainty


def checked_candidates(values: ArrayLike, name: str, length: int, dtype: Any, location: str) -> np.ndarray:
    """[length, k] token ids (int32) or numbers (float32), k values for each token; numbers may be infinite or NaN.

    Raises:
        DataError: another shape or type, or a token id outside 0..2^31 - 1.
    """
    array = checks.as_array(values, name, location)
    if array.ndim != 2 or len(array) != length or array.shape[1] == 0:
        raise DataError(f"{location}: {name} has shape {array.shape}; give [{length}, k], one row per token.")
    is_id = np.issubdtype(dtype, np.integer)
    if array.dtype.kind not in ("iu" if is_id else "fiu"):
        raise DataError(f"{location}: {name} must be {'integers' if is_id else 'numbers'}, not {array.dtype}.")
    if is_id and ((array < 0) | (array > checks.MAX_TOKEN_ID)).any():
        raise DataError(f"{location}: a token id in {name} is outside 0..{checks.MAX_TOKEN_ID}.")
    return np.ascontiguousarray(array, dtype=dtype)


def check_teacher(ids: np.ndarray | None, logprobs: np.ndarray | None, location: str) -> None:
    """Checks that the candidates of a teacher and their log-probs ([n, k] each) fit one another."""
    if ids is None or logprobs is None:
        missing = "teacher_ids" if ids is None else "teacher_logprobs"
        raise DataError(f"{location}: {missing} is missing; teacher_ids and teacher_logprobs go together.")
    if ids.shape != logprobs.shape:
        raise DataError(f"{location}: teacher_ids {ids.shape} and teacher_logprobs {logprobs.shape} differ in shape.")
    if np.isnan(logprobs).any() or (logprobs > MAX_TEACHER_LOGPROB).any():
        raise DataError(
            f"{location}: a teacher_logprobs value is not a log-prob; they are natural logarithms, at most 0."
        )
    total = np.exp(logprobs[1:].astype(np.float64)).sum(1)
    if (total > 1 + MAX_TEACHER_LOGPROB).any():
        row = int(np.argmax(total)) + 1
        raise DataError(
            f"{location}: the teacher's probabilities at position {row} add up to {total[row - 1]:.4g}; "
            "are its log-probs natural logarithms of the whole distribution?"
        )
