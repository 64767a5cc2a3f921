"""Draws tokens from logits so that each depends on its own random stream alone.

The Gumbel-max trick: the token with the greatest `logprob + gumbel` is a draw from the distribution. The Gumbel of
token `v` at index `t` of continuation `i` is a hash of (seed, i, t, v), computed on the device of the logits, so it
does not matter what else is in the batch, which row it is, or how often the process was started. Logits that differ by
rounding (other rows in a batch change how a matrix product is cut) change a draw only where the two best candidates
are as close as that: about one token in a million, against one in ten thousand for the inverse of a cumulative sum.
The hash is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

Letters: R rows, V vocabulary, k the number of most likely tokens asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treewise.rl.samplers.protocol import SampleRequest

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
ROWS_AT_ONCE = 16  # bounds the memory of the random numbers: float64 and int64 of [rows, V]


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """token_ids int64 [R]; logprobs and entropies float32 [R]; top_ids int64 and top_logprobs float32 [R, k], of what
    could have been drawn, `-inf` where that is less than k.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    entropies: torch.Tensor | None
    top_ids: torch.Tensor | None
    top_logprobs: torch.Tensor | None


def stream_key(seed: int, continuation: int, index: int) -> int:
    """The 64-bit key of one draw, as a signed integer: equal arguments, equal random numbers."""
    key = 0
    for part in (seed, continuation, index):
        key = _mix((key ^ _mix(part & _MASK)) + _GAMMA)
    return _signed(key)


def draw_tokens(
    logits: torch.Tensor,
    rules: Sequence[SampleRequest],
    keys: Sequence[int],
    want_entropy: bool = False,
    num_top: int = 0,
    allowed: torch.Tensor | None = None,
) -> DrawnTokens:
    """One token for each row: temperature, then what is allowed, then top-k and top-p, then the draw, and what is
    recorded of it: of the distribution before all cuts.

    Parameters:
        logits: [R, V], any float dtype.
        rules: the request of each row, for its temperature, top_k and top_p.
        keys: `stream_key` of each row.
        allowed: bool [R, V], at least one of each row; None: all.
    """
    values = [rule.temperature or 1.0 for rule in rules]
    # Not torch's default, which a model that another thread loads may change.
    temperatures = torch.tensor(values, dtype=torch.float32, device=logits.device)
    is_greedy = torch.tensor([rule.temperature == 0 for rule in rules], device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    left = logprobs if allowed is None else logprobs.masked_fill(~allowed, float("-inf"))
    kept = _truncated(left, rules) if any(rule.truncates for rule in rules) else left
    best = left.argmax(-1)
    ids = torch.empty_like(best)
    for low in range(0, len(rules), ROWS_AT_ONCE):
        rows = slice(low, low + ROWS_AT_ONCE)
        key = torch.tensor(list(keys[rows]), dtype=torch.int64, device=logits.device)
        scores = kept[rows].double() - exponentials(key, kept.shape[1]).log_()
        ids[rows] = torch.where(is_greedy[rows], best[rows], scores.argmax(-1))
    top = None
    if num_top:
        is_best = torch.zeros_like(logprobs, dtype=torch.bool).scatter_(1, best[:, None], value=True)
        top = torch.where(is_greedy[:, None] & ~is_best, float("-inf"), kept).topk(num_top, dim=-1)
    return DrawnTokens(
        token_ids=ids,
        logprobs=logprobs.gather(1, ids[:, None])[:, 0],
        entropies=torch.special.entr(logprobs.exp()).sum(-1) if want_entropy else None,  # 0 where a logit is -inf
        top_ids=None if top is None else top.indices,
        top_logprobs=None if top is None else top.values,
    )


def _truncated(logprobs: torch.Tensor, rules: Sequence[SampleRequest]) -> torch.Tensor:
    """Log-probs with what top-k, then top-p leave out at -inf."""
    kept = logprobs.clone()
    for row, rule in enumerate(rules):
        if not rule.truncates:
            continue
        ordered, order = logprobs[row].sort(descending=True, stable=True)
        if rule.top_k:
            ordered, order = ordered[: rule.top_k], order[: rule.top_k]
        share = (ordered - ordered.logsumexp(0)).double().exp()
        size = int((share.cumsum(0) - share < rule.top_p).sum())  # the least set whose share reaches top_p
        ordered, order = ordered[: max(size, 1)], order[: max(size, 1)]
        kept[row] = float("-inf")
        kept[row, order] = ordered
    return kept


def can_be_drawn(request: SampleRequest, top_logprobs: np.ndarray) -> np.ndarray:
    """[T, k] bool, which of a server's candidates, [T, k] from before its cuts and most likely first, the same cuts
    leave."""
    rank = np.arange(top_logprobs.shape[1])
    if request.temperature == 0:
        return np.broadcast_to(rank == 0, top_logprobs.shape)
    masses = np.exp(top_logprobs.astype(np.float64))
    is_left = np.broadcast_to(rank < (request.top_k or len(rank)), top_logprobs.shape)
    total = (masses * is_left).sum(1, keepdims=True) if request.top_k else 1.0
    return is_left & ((masses.cumsum(1) - masses) / total < request.top_p)


def exponentials(keys: torch.Tensor, num_columns: int) -> torch.Tensor:
    """float64 [R, num_columns] of independent draws from the exponential distribution, by hash.

    Parameters:
        keys: int64 [R].
    """
    state = torch.arange(1, num_columns + 1, device=keys.device).mul_(_signed(_GAMMA)) + keys[:, None]
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        # A shift of int64 drags the sign along; the mask takes it off.
        state ^= (state >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            state *= _signed(factor)
    uniform = (state >> 11).bitwise_and_((1 << 53) - 1).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_()


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
