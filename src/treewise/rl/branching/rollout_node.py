"""One sampled continuation of a rollout tree, validated when it is made."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from treewise.errors import DataError

PROMPT = -1  # the parent of a rollout's first node
STREAM_TYPES = {
    "token_ids": np.int32,
    "is_sampled": np.bool_,
    "logprobs": np.float32,
    "entropies": np.float32,
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    "turn_ends": np.int64,
}


def _not_given() -> np.ndarray:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutNode:
    """One sampled continuation. Arrays are copied and cannot be written to.

    Parameters:
        token_ids: [n] int32, tokens of its own, at least one.
        logprobs: [n] float32, natural logarithms under the distribution that they were sampled from; 0 where not
            sampled.
        parent: index of the node that it continues, or `PROMPT`.
        cut: how many of the parent's own tokens come before it; 0 for `PROMPT`.
        is_sampled: [n] bool, False for observations (tool results), which are context; True throughout by default.
        entropies: [n] float32, entropy in nats of the distribution that each token was sampled from, 0 where not
            sampled; None where the sampler gave none.
        top_ids, top_logprobs: [n, k] int32 and float32, the most probable candidates at each position; `-inf` marks an
            unused place. They go together.
        turn_ends: ascending offsets in 1..n at which a turn (what the policy wrote, and the observation that answered
            it) ends. The last turn of a node that ended ends at n.
        finish: why it ended (`stop`, `length`, ...); None while it is to be continued (a segment that reached its
            limit).
        reward: of the rollout that ends here; finite.
        error: why the rollout that ends here has no reward. It is in no row.

    Raises:
        DataError: shapes that do not fit one another, values that are not finite, a reward of a node that has not
            ended.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    parent: int = PROMPT
    cut: int = 0
    is_sampled: np.ndarray = field(default_factory=_not_given)
    entropies: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    turn_ends: np.ndarray = field(default_factory=_not_given)
    finish: str | None = None
    reward: float | None = None
    error: str | None = None

    if TYPE_CHECKING:  # what is taken is wider than what is kept

        def __init__(
            self,
            token_ids: ArrayLike,
            logprobs: ArrayLike,
            parent: int = PROMPT,
            cut: int = 0,
            is_sampled: ArrayLike = ...,
            entropies: ArrayLike | None = None,
            top_ids: ArrayLike | None = None,
            top_logprobs: ArrayLike | None = None,
            turn_ends: ArrayLike = ...,
            finish: str | None = None,
            reward: float | None = None,
            error: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        num_tokens = np.size(self.token_ids)
        if not np.size(self.is_sampled):
            object.__setattr__(self, "is_sampled", np.ones(num_tokens, dtype=bool))
        if not np.size(self.turn_ends) and self.finish is not None:
            object.__setattr__(self, "turn_ends", [num_tokens])
        for name, dtype in STREAM_TYPES.items():
            value = getattr(self, name)
            if value is not None:
                array: np.ndarray = np.array(value, dtype=dtype)
                array.setflags(write=False)
                object.__setattr__(self, name, array)
        _check_shapes(self)
        _check_outcome(self)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy generated."""
        return int(self.is_sampled.sum())

    @property
    def has_ended(self) -> bool:
        """Whether a rollout ends here."""
        return self.finish is not None


def _check_shapes(node: RolloutNode) -> None:
    if node.token_ids.ndim != 1 or not len(node.token_ids):
        raise DataError(f"a node has token_ids of shape {node.token_ids.shape}; give one flat, non-empty sequence.")
    num_tokens = len(node.token_ids)
    for name in ("is_sampled", "logprobs", "entropies"):
        stream = getattr(node, name)
        if stream is not None and stream.shape != (num_tokens,):
            raise DataError(f"a node has {name} of shape {stream.shape} for {num_tokens} tokens.")
        if stream is not None and not np.isfinite(stream).all():
            raise DataError(f"a node's {name}[{int(np.argmin(np.isfinite(stream)))}] is not finite.")
    if (node.top_ids is None) != (node.top_logprobs is None):
        raise DataError("top_ids and top_logprobs go together.")
    if node.top_ids is not None and node.top_logprobs is not None:
        is_right = node.top_ids.ndim == 2 and len(node.top_ids) == num_tokens
        if not is_right or node.top_ids.shape != node.top_logprobs.shape:
            raise DataError(f"top_ids {node.top_ids.shape} and top_logprobs {node.top_logprobs.shape} must be [n, k].")
        if np.isnan(node.top_logprobs).any():
            raise DataError("a top_logprobs value is NaN.")
    ends = node.turn_ends
    if ends.ndim != 1 or (len(ends) and (ends[0] < 1 or ends[-1] > num_tokens)) or (np.diff(ends) <= 0).any():
        raise DataError(f"turn_ends {ends.tolist()} must ascend within 1..{num_tokens}.")


def _check_outcome(node: RolloutNode) -> None:
    if node.finish is None and (node.reward is not None or node.error is not None):
        raise DataError("a node that has not ended has a reward or an error; set finish to why it ended.")
    if node.reward is not None and node.error is not None:
        raise DataError("a rollout has a reward or an error, not both.")
    if node.reward is not None:
        if not np.isfinite(node.reward):
            raise DataError(f"a reward is {node.reward}; judge the rollout with error=<the reason> instead.")
        object.__setattr__(node, "reward", float(node.reward))
