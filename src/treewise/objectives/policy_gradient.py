"""Policy gradients: one dataclass whose settings are the differences between the methods of the literature.

Letters: F flat tokens, P terms (trained flat tokens, in the order of their tree positions), R rollouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treewise.base.shapes import Float, Int
from treewise.errors import ConfigError, DataError, check_choice
from treewise.objectives.protocol import Streams, Terms, Values
from treewise.objectives.sft import (
    check_settings,
    denominator,
    normalized_weights,
    require_whole_rollouts,
    rollout_of_tokens,
)
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# -- The formulas of policy gradients, per token. All arguments are tensors of one shape, [P] -------------------------


PerTerm = Float[Tensor, " P"]

KL_ESTIMATORS = ("k1", "k2", "k3")


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


SURROGATES = ("clip", "reinforce", "cispo")
LEVELS = ("token", "sequence")
RATIO_LEVELS = ("token", "turn", "sequence")
CORRECTIONS = ("truncate", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """A loss on advantages, `sum over tokens of w [ s L(r, A) + beta KL - entropy_coefficient H ] / denominator`.

    Per token: w the loss weight, A the advantage, r the importance ratio to `old_logprobs` (exactly 1, with its
    gradient, where trajectories have none: data of the policy itself), s the weight that corrects for another engine's
    sampling (truncated importance sampling, TIS, or masked, IcePop), KL an estimate against `ref_logprobs`, H the
    entropy of the model's distribution. The names in `treewise.objectives.registry` fill in the settings of papers.

    Parameters:
        surrogate: L. `clip`: PPO's clipped one; `reinforce`: `-A log p`; `cispo`: `-sg(min(r, max_ratio)) A log p`.
        ratio_level: `token`: `r = exp(log p - old)`; `sequence`: one ratio for a rollout, the exponential of the mean
            of these differences over its trained tokens (GSPO); `turn`: one for each turn, a maximal run of trained
            tokens of a trajectory (AT2PO, arXiv 2601.04767).
        clip_low, clip_high: r is clipped to `[1 - clip_low, 1 + clip_high]`; None leaves a side open.
        dual_clip: for A < 0, L is at most `-dual_clip A`; above `1 + clip_high`, commonly 3.
        max_ratio: of `cispo`.
        kl, beta: estimator (`k1`, `k2`, `k3`) and its factor; beta=0 needs no reference.
        entropy_coefficient: adds entropy as a bonus; averaged like the rest of the loss, as in verl (TRL takes the
            token mean, whatever the loss type; with `token_mean` both are the same).
        sampler_correction: None, `truncate` or `mask`, see `sampler_weights`; needs `sampler_logprobs` (verl:
            `rollout_log_probs`, prime-rl: `inference_logprobs`). The ratio is `exp(old - sampler)`, with the current
            log-probs, detached, for `old` where there are none.
        sampler_level: `token`, or `sequence`: one weight for a rollout, from the sum of differences over its tokens.
        sampler_min, sampler_max: bounds of that weight.
        weighting: `per_trajectory`: a shared token counts once for every trajectory that trains it, with that
            trajectory's advantage, as flat training does; `once`: the mean of these terms; `per_rollout`: the sum over
            rollouts of the mean over each rollout's rows.
        normalization, constant: see `treewise.objectives.sft`.
        measure_entropy: report the entropy although no bonus needs it.
        usual_advantages: how rewards become advantages where rows have none and nothing else is chosen: a name of
            `treewise rl --advantages`. The objectives of papers carry the one that they were published with; None: one
            has to be chosen.

    Raises:
        ConfigError: an unknown name, or settings that contradict one another.
    """

    surrogate: str = "clip"
    ratio_level: str = "token"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    max_ratio: float | None = None
    kl: str = "k3"
    beta: float = 0.0
    entropy_coefficient: float = 0.0
    sampler_correction: str | None = None
    sampler_level: str = "token"
    sampler_min: float | None = None
    sampler_max: float | None = 2.0
    weighting: str = "per_trajectory"
    normalization: str = "token_mean"
    constant: float | None = None
    measure_entropy: bool = False
    usual_advantages: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("surrogate", SURROGATES),
            ("ratio_level", RATIO_LEVELS),
            ("kl", KL_ESTIMATORS),
            ("sampler_correction", (None, *CORRECTIONS)),
            ("sampler_level", LEVELS),
        ):
            check_choice(name, getattr(self, name), choices)
        check_settings(self.weighting, self.normalization, self.constant)
        self._check_bounds()

    def _check_bounds(self) -> None:
        for name in ("clip_low", "clip_high", "beta", "sampler_min"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value} must not be negative.")
        if self.dual_clip is not None and not self.dual_clip > 1 + (self.clip_high or 0):
            raise ConfigError(f"dual_clip={self.dual_clip} must exceed 1 + clip_high.")
        if (self.surrogate == "cispo") != (self.max_ratio is not None):
            raise ConfigError("surrogate='cispo' and max_ratio=<the largest weight> go together.")
        if self.max_ratio is not None and not self.max_ratio > 0:
            raise ConfigError(f"max_ratio={self.max_ratio} must be positive.")
        if self.ratio_level != "token" and self.surrogate == "reinforce":
            raise ConfigError(f"surrogate='reinforce' has no ratio, so ratio_level={self.ratio_level!r} has no effect.")
        if self.sampler_correction is not None and self.sampler_min is None and self.sampler_max is None:
            raise ConfigError("sampler_correction needs sampler_min or sampler_max.")
        if self.sampler_min is not None and self.sampler_max is not None and self.sampler_min >= self.sampler_max:
            raise ConfigError(f"sampler_min={self.sampler_min} must be less than sampler_max={self.sampler_max}.")

    # -- the protocol -------------------------------------------------------------------------------------------------

    @property
    def has_sequence_ratios(self) -> bool:
        """Whether some ratio is one of a whole rollout, in which a token that several rows train counts once."""
        return self.ratio_level == "sequence" or self._corrects_sequences

    @property
    def _corrects_sequences(self) -> bool:
        return self.sampler_correction is not None and self.sampler_level == "sequence"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log_probs", "entropy") if self.entropy_coefficient or self.measure_entropy else ("log_probs",)

    def is_separable(self, forest: Forest) -> bool:
        """Not with ratios of whole sequences or turns, but for CISPO's on policy, which are 1; nor with weights of
        whole sequences that start from the current log-probs, because no `old_logprobs` are given.
        """
        has_old = _is_given(forest, "old_logprobs")
        by_token = self.ratio_level == "token" or (self.surrogate == "cispo" and not has_old)
        return by_token and (has_old or not self._corrects_sequences)

    def denominator(self, forest: Forest) -> float:
        return denominator(forest, self.weighting, self.normalization, self.constant)

    def terms(self, forest: Forest) -> Terms:
        """Every trained token of every trajectory.

        Raises:
            DataError: a stream that the settings need is missing, or rows of a rollout whose ratio they need.
        """
        weights_F, plain_F = normalized_weights(forest, self.weighting, self.normalization)
        trained = np.flatnonzero(weights_F)
        trained = trained[np.argsort(forest.path_index[trained], kind="stable")]
        streams = {"weights": weights_F, "plain_weights": plain_F, "advantages": forest.flat_stream("advantages")}
        for name, is_needed in (
            ("old_logprobs", False),
            ("ref_logprobs", self.beta != 0),
            ("sampler_logprobs", self.sampler_correction is not None),
        ):
            if is_needed or _is_given(forest, name):
                streams[name] = forest.flat_stream(name)
        streams = {name: stream[trained] for name, stream in streams.items()}
        if self.has_sequence_ratios:
            streams |= self._sequence_streams(forest, trained, streams)
        if self.ratio_level == "turn":
            turn = _turn_of_tokens(forest)[trained]
            streams |= {"turn": turn, "mean_of_turn": 1.0 / np.bincount(turn)[turn]}
        return Terms(forest.path_index[trained], streams, weight=float(plain_F.sum()))

    def token_losses(self, values: Values, streams: Streams) -> Float[Tensor, " P"]:
        """[P] float losses. values: `log_probs`, `entropy` [P]. streams: those of `terms` [P]."""
        logprobs, advantages = values["log_probs"], streams["advantages"]
        losses = self._surrogate(logprobs, advantages, streams)
        if self.sampler_correction is not None:
            losses = losses * self._sampler_weights(logprobs, streams)
        if self.beta:
            losses = losses + self.beta * kl_estimate(logprobs, streams["ref_logprobs"], self.kl)
        if self.entropy_coefficient:
            losses = losses - self.entropy_coefficient * values["entropy"]
        return streams["weights"] * losses

    def token_metrics(self, values: Values, streams: Streams) -> Values:
        """Means over trained tokens, by their loss weights.

        ratio, clip_fraction: of the importance ratios, where `old_logprobs` are given; approx_kl: k3 of the policy
        against them. kl: against the reference, by the chosen estimator. entropy: where it is computed. sampler_ratio,
        sampler_weight: of the correction, before and after its bounds; sampler_truncated: the share of tokens that
        these changed. logprob_gap: mean of `exp(|old - sampler|)`, of the current log-probs without old ones; 1 is no
        gap (NeMo RL's `token_mult_prob_error`, whose guide calls a drift beyond 1.02 a problem).
        """
        logprobs = values["log_probs"]
        metrics = {}
        if "old_logprobs" in streams:
            metrics["approx_kl"] = kl_estimate(streams["old_logprobs"], logprobs, "k3")
            if self.surrogate != "reinforce":
                ratios = self._ratios(logprobs, streams)
                metrics |= {"ratio": ratios, "clip_fraction": self._is_clipped(ratios, streams["advantages"])}
        if self.beta:
            metrics["kl"] = kl_estimate(logprobs, streams["ref_logprobs"], self.kl)
        if "entropy" in values:
            metrics["entropy"] = values["entropy"]
        if self.sampler_correction is not None:
            ratio, weight = self._sampler_ratios(logprobs, streams), self._sampler_weights(logprobs, streams)
            metrics |= {"sampler_ratio": ratio, "sampler_weight": weight, "sampler_truncated": ratio != weight}
        if "sampler_logprobs" in streams:
            policy = streams.get("old_logprobs", logprobs)
            metrics["logprob_gap"] = torch.exp((policy - streams["sampler_logprobs"]).abs())
        return {name: streams["plain_weights"] * value for name, value in metrics.items()}

    # -- formulas -----------------------------------------------------------------------------------------------------

    def _surrogate(self, logprobs: torch.Tensor, advantages: torch.Tensor, streams: Streams) -> torch.Tensor:
        if self.surrogate == "reinforce":
            return weighted_logprob(torch.ones_like(logprobs), advantages, logprobs)
        ratios = self._ratios(logprobs, streams)
        if self.surrogate == "cispo":
            return weighted_logprob(ratios.clamp(max=self.max_ratio), advantages, logprobs)
        # `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, and for A < 0 no more than `-dual_clip A`. Sources: PPO
        # (arXiv 1707.06347, eq. 7); bounds that differ: DAPO (arXiv 2503.14476, eq. 10); dual clip: Ye et al. (arXiv
        # 1912.09729, eq. 5). TRL's `delta` is the same as `dual_clip` wherever it exceeds `1 + clip_high`.
        surrogate = ratios * advantages
        if self.clip_low is not None or self.clip_high is not None:
            low = None if self.clip_low is None else 1 - self.clip_low
            high = None if self.clip_high is None else 1 + self.clip_high
            surrogate = torch.minimum(surrogate, ratios.clamp(low, high) * advantages)
        if self.dual_clip is not None:
            bounded = torch.maximum(surrogate, self.dual_clip * advantages)
            surrogate = torch.where(advantages < 0, bounded, surrogate)
        return -surrogate

    def _ratios(self, logprobs: torch.Tensor, streams: Streams) -> torch.Tensor:
        if self.surrogate == "cispo" and "old_logprobs" not in streams:
            return torch.ones_like(logprobs)  # no sum over other terms: the loss is separable then
        differences = logprobs - streams.get("old_logprobs", logprobs.detach())
        if self.ratio_level == "sequence":
            differences = sums_over(streams["sequence"], streams["mean_fraction"] * differences)
        elif self.ratio_level == "turn":
            differences = sums_over(streams["turn"], streams["mean_of_turn"] * differences)
        return torch.exp(differences)

    def _is_clipped(self, ratios: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Where the clipped surrogate has no gradient: the ratio has left the bounds on the side that the advantage
        rewards.
        """
        if self.surrogate == "cispo":
            assert self.max_ratio is not None
            return ratios > self.max_ratio
        nowhere = torch.zeros_like(ratios, dtype=torch.bool)
        below = nowhere if self.clip_low is None else ratios < 1 - self.clip_low
        above = nowhere if self.clip_high is None else ratios > 1 + self.clip_high
        return (below & (advantages < 0)) | (above & (advantages > 0))

    def _sampler_ratios(self, logprobs: torch.Tensor, streams: Streams) -> torch.Tensor:
        if "sampler_log_ratio" in streams:  # of a sequence, known before the model has run
            log_ratio = streams["sampler_log_ratio"]
        else:
            log_ratio = streams.get("old_logprobs", logprobs.detach()) - streams["sampler_logprobs"]
            if self.sampler_level == "sequence":
                log_ratio = sums_over(streams["sequence"], streams["fraction"] * log_ratio)
        return torch.exp(log_ratio)

    def _sampler_weights(self, logprobs: torch.Tensor, streams: Streams) -> torch.Tensor:
        assert self.sampler_correction is not None
        ratios = self._sampler_ratios(logprobs, streams)
        return sampler_weights(ratios, self.sampler_correction, self.sampler_min, self.sampler_max)

    def _sequence_streams(
        self, forest: Forest, trained: np.ndarray, streams: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """[P] the rollout of each term (`sequence`), and its fraction in that rollout's sum and mean.

        A token that several rows of one rollout train was sampled once, so its terms split it evenly.
        """
        require_whole_rollouts(forest, "a ratio of whole sequences")
        rollout = rollout_of_tokens(forest)[trained]
        _, sequence = np.unique(rollout, return_inverse=True)
        _, token, count = np.unique(
            sequence * forest.num_tokens + forest.path_index[trained], return_inverse=True, return_counts=True
        )
        fraction = 1.0 / count[token]
        sequence_streams = {
            "sequence": sequence,
            "fraction": fraction,
            "mean_fraction": fraction / np.bincount(sequence, weights=fraction)[sequence],
        }
        if self._corrects_sequences and "old_logprobs" in streams:
            gap = streams["old_logprobs"].astype(np.float64) - streams["sampler_logprobs"]
            sequence_streams["sampler_log_ratio"] = np.bincount(sequence, weights=fraction * gap)[sequence]
        return sequence_streams


def logprob_gap(trajectories: Sequence[Trajectory], stream: str = "old_logprobs") -> float:
    """Mean of `exp(|stream - sampler_logprobs|)` over trained tokens, by their loss weights: 1 is no gap.

    Score first: `engine.scored(trajectories, stream="old_logprobs")`. The same as the metric of a policy gradient.

    Raises:
        DataError: a trajectory without one of the two streams.
    """
    total = weight = 0.0
    for index, item in enumerate(trajectories):
        values, sampler = getattr(item, stream), item.sampler_logprobs
        if values is None or sampler is None:
            missing = stream if values is None else "sampler_logprobs"
            raise DataError(f"{item.source or f'trajectory {index}'}: no {missing}, so there is no gap to measure.")
        weights = np.asarray(item.loss_weights, dtype=np.float64)
        total += float((weights * np.exp(np.abs(values.astype(np.float64) - sampler))).sum())
        weight += float(weights.sum())
    if not weight:
        raise DataError("no trajectory given, so there is no gap to measure.")
    return total / weight


def _turn_of_tokens(forest: Forest) -> np.ndarray:
    """[F] int64, the number of the turn that each trained flat token belongs to; of others that of the turn before.

    No turn spans two trajectories, because a first token is never trained.
    """
    is_trained = forest.flat_stream("loss_weights") > 0
    is_start = is_trained & ~np.concatenate([[False], is_trained[:-1]])
    return np.cumsum(is_start) - 1


def _is_given(forest: Forest, name: str) -> bool:
    """Whether any trajectory has the stream; `flat_stream` then raises if one has not."""
    if forest.tree_streams:
        return forest.has_stream(name)
    return any(getattr(item, name) is not None for item in forest.trajectories)
