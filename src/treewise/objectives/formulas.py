"""The formulas of policy gradients, per token. All arguments are tensors of one shape, [P].

`logprobs` are the policy's, with a graph; `old`, `reference` and `sampler` are given numbers.
"""

import torch
from torch import Tensor

from treewise.shapes import Bool, Float, Int

PerTerm = Float[Tensor, " P"]

KL_ESTIMATORS = ("k1", "k2", "k3")


def clipped_surrogate(
    ratios: PerTerm,
    advantages: PerTerm,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
) -> PerTerm:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, and for A < 0 no more than `-dual_clip A`.

    Sources: PPO (arXiv 1707.06347, eq. 7); bounds that differ: DAPO (arXiv 2503.14476, eq. 10); dual clip: Ye et al.
    (arXiv 1912.09729, eq. 5). TRL's `delta` is the same as `dual_clip` wherever it exceeds `1 + clip_high`.
    """
    surrogate = ratios * advantages
    if clip_low is not None or clip_high is not None:
        low = None if clip_low is None else 1 - clip_low
        high = None if clip_high is None else 1 + clip_high
        surrogate = torch.minimum(surrogate, ratios.clamp(low, high) * advantages)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    return -surrogate


def is_clipped(
    ratios: PerTerm, advantages: PerTerm, clip_low: float | None, clip_high: float | None
) -> Bool[Tensor, " P"]:
    """Where the clipped surrogate has no gradient: the ratio has left the bounds on the side that the advantage
    rewards.
    """
    below = torch.zeros_like(ratios, dtype=torch.bool) if clip_low is None else ratios < 1 - clip_low
    above = torch.zeros_like(ratios, dtype=torch.bool) if clip_high is None else ratios > 1 + clip_high
    return (below & (advantages < 0)) | (above & (advantages > 0))


def weighted_logprob(weights: PerTerm, advantages: PerTerm, logprobs: PerTerm) -> PerTerm:
    """`-sg(w) A log p`: REINFORCE (Williams, 1992) for w = 1, CISPO (arXiv 2506.13585, eq. 4) for a capped ratio."""
    return -weights.detach() * advantages * logprobs


def kl_estimate(logprobs: PerTerm, reference: PerTerm, estimator: str) -> PerTerm:
    """An estimate of KL(policy || reference) from tokens of the policy, one per token.

    With `d = log p - log q`: k1 is `d`, k2 is `d^2 / 2`, k3 is `exp(-d) + d - 1` (Schulman, "Approximating KL
    Divergence", 2020; k3 is GRPO's). As a loss k1 has a gradient of mean zero on policy, and k2's is that of the KL.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.exp(-difference) + difference - 1


def sampler_weights(ratios: PerTerm, correction: str, lowest: float | None, highest: float | None) -> PerTerm:
    """Importance weights of tokens that another engine sampled.

    `truncate`: `min(ratio, highest)`, and at least `lowest` where given (truncated importance sampling; Ionides, 2008;
    for the gap between sampler and trainer Yao et al., 2025). `mask`: the ratio inside `[lowest, highest]` and 0
    outside (masked importance sampling, IcePop).
    """
    if correction == "truncate":
        return ratios.clamp(lowest, highest)
    outside = torch.zeros_like(ratios, dtype=torch.bool)
    if lowest is not None:
        outside |= ratios < lowest
    if highest is not None:
        outside |= ratios > highest
    return ratios.masked_fill(outside, 0.0)


def sums_over(sequence: Int[Tensor, " P"], values: PerTerm) -> PerTerm:
    """[P] for every term the sum of `values` over the terms of its sequence (numbered from 0, below P)."""
    totals = torch.zeros_like(values).index_add(0, sequence, values)
    return totals[sequence]
