"""Preference losses on whole rollouts: DPO and its kin on pairs, KTO on labelled completions.

The score of a rollout is the sum of `log p - log q` over its trained tokens, with q the reference (`ref_logprobs`): a
token that several rows of it train counts once. Rewards are the preferences: pairs are rollouts of one group with
different rewards. No loss here is separable, so the engine takes two walks.

Letters: P terms (trained flat tokens, in the order of their tree positions), S rollouts, Q pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from treewise.base.shapes import Float
from treewise.errors import ConfigError, DataError, check_choice, num
from treewise.objectives.protocol import Streams, Terms, Values
from treewise.objectives.sft import require_whole_rollouts, rollout_of_tokens
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

PAIR_LOSSES = ("sigmoid", "ipo", "hinge")
BASELINES = ("mismatched", "zero")


class _OfWholeRollouts:
    """What the engine reads of every loss on scores of rollouts."""

    __slots__ = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log_probs",)

    @property
    def is_on_preferences(self) -> bool:
        """Whether data are compared with a reference, or with mismatched completions, before they are trained."""
        return True

    @property
    def needs_whole_groups(self) -> bool:
        """Whether all rollouts of a group must be in one call of the engine."""
        return True

    @property
    def has_sequence_ratios(self) -> bool:
        """A token that several rows of a rollout train counts once."""
        return True

    def is_separable(self, forest: Forest) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(_OfWholeRollouts):
    """A loss of the difference of two scores, averaged over pairs. Needs `reward`, `group` and `ref_logprobs`.

    Every two rollouts of a group with different rewards are a pair, of which the one with the higher reward is chosen.
    With d the score of the chosen minus that of the rejected rollout, a pair's loss is

    * `sigmoid`: `-log sigmoid(beta d)` (DPO, arXiv 2305.18290, eq. 7). `label_smoothing` e mixes in the pair turned
      round: `-(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)` (conservative DPO).
    * `ipo`: `(d - 1 / (2 beta))^2`, with means over tokens instead of sums as scores (arXiv 2310.12036, eq. 17; the
      means as in TRL).
    * `hinge`: `max(0, 1 - beta d)` (SLiC, arXiv 2305.10425).

    reference_free: scores are `log p` alone. Token weights other than 0 and 1 scale a token's part of the score.

    Raises:
        ConfigError: an unknown loss, or a value out of its range.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    reference_free: bool = False

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, PAIR_LOSSES)
        _check_beta(self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 0.5.")
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(f"label_smoothing belongs to loss='sigmoid', not {self.loss!r}.")

    def denominator(self, forest: Forest) -> float:
        """The number of pairs."""
        return float(len(_pairs(forest, _rewards(forest, "DPO"))[0]))

    def terms(self, forest: Forest) -> Terms:
        """Every trained token, with the scores' weights, and the pairs.

        Raises:
            DataError: a rollout without a reward, a group without a pair, a missing reference, a part of a rollout.
        """
        chosen, rejected = _pairs(forest, _rewards(forest, "DPO"))
        positions, streams = _score_streams(forest, needs_reference=not self.reference_free)
        for name, pairs in (("chosen", chosen), ("rejected", rejected)):
            if len(pairs) > len(positions):
                raise DataError(f"{len(pairs)} pairs for {len(positions)} trained tokens; make groups smaller.")
            streams[name] = np.full(len(positions), -1)  # [P], filled up: a term may hold a pair
            streams[name][: len(pairs)] = pairs
        return Terms(positions, streams, weight=float(len(chosen)))

    def token_losses(self, values: Values, streams: Streams) -> Float[Tensor, " P"]:
        """[P] the loss of each pair, then zeros. values: `log_probs` [P]."""
        is_pair, difference = self._differences(values, streams)
        if self.loss == "ipo":
            losses = (difference - 1 / (2 * self.beta)).square()
        elif self.loss == "hinge":
            losses = torch.relu(1 - self.beta * difference)
        else:
            smooth = self.label_smoothing
            losses = -(1 - smooth) * logsigmoid(self.beta * difference)
            if smooth:
                losses = losses - smooth * logsigmoid(-self.beta * difference)
        return torch.where(is_pair, losses, 0.0)

    def token_metrics(self, values: Values, streams: Streams) -> Values:
        """Means over pairs: rewards_chosen and rewards_rejected (beta times the score), reward_margin, and
        reward_accuracy, the fraction of pairs of which the chosen rollout has the higher score.
        """
        is_pair, _ = self._differences(values, streams)
        score_P = self.beta * _scores(values, streams)
        chosen, rejected = score_P[streams["chosen"]], score_P[streams["rejected"]]
        metrics = {
            "rewards_chosen": chosen,
            "rewards_rejected": rejected,
            "reward_margin": chosen - rejected,
            "reward_accuracy": (chosen > rejected).to(chosen.dtype),
        }
        return {name: torch.where(is_pair, value, 0.0) for name, value in metrics.items()}

    def _differences(self, values: Values, streams: Streams) -> tuple[Tensor, Tensor]:
        """[P] which entries are pairs, and the difference of scores of each; others hold the first's."""
        is_pair = streams["chosen"] >= 0
        score_P = _scores(values, streams, mean=self.loss == "ipo")
        first = torch.zeros_like(streams["chosen"])
        chosen, rejected = (torch.where(is_pair, streams[name], first) for name in ("chosen", "rejected"))
        return is_pair, score_P[chosen] - score_P[rejected]


@dataclass(frozen=True, slots=True, kw_only=True)
class IPO(DPO):
    """`DPO(loss="ipo")` (arXiv 2310.12036)."""

    loss: str = field(default="ipo", init=False, repr=False)
    label_smoothing: float = field(default=0.0, init=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KTO(_OfWholeRollouts):
    """A loss of labelled completions, averaged over them (arXiv 2402.01306, eq. 8). Needs `ref_logprobs` and `reward`.

    With s the score of a rollout and z a baseline, `w (1 - sigmoid(beta (s - z)))` where it is desirable (its reward
    exceeds `threshold`), and `w (1 - sigmoid(beta (z - s)))` where it is not.

    Parameters:
        baseline: z. `mismatched`: the mean score, at least 0 and without gradient, of the rollouts without a reward:
            completions put behind prompts that they do not belong to (`with_mismatched` makes them), over all rollouts
            of one call of the engine, and of `TreeTrainer` over all of an optimizer step. `zero`: 0. Or the number.
        desirable_weight, undesirable_weight: w.
        threshold: rewards above it are desirable.

    Raises:
        ConfigError: an unknown baseline, or a value out of its range.
    """

    beta: float = 0.1
    baseline: str | float = "mismatched"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.baseline, str):
            check_choice("baseline", self.baseline, BASELINES)
        elif not math.isfinite(self.baseline):
            raise ConfigError(f"baseline={self.baseline} must be finite.")
        _check_beta(self.beta)
        for name in ("desirable_weight", "undesirable_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be a number of at least 0.")

    def denominator(self, forest: Forest) -> float:
        """The number of labelled rollouts."""
        return float(np.isfinite(_rewards(forest)).sum())

    def terms(self, forest: Forest) -> Terms:
        """Every trained token, with its rollout's label: 1, -1, or 0 for a mismatched one.

        Raises:
            DataError: no mismatched rollout where the baseline needs some, a missing reference, a part of a rollout.
        """
        rewards_S = _rewards(forest)
        is_labelled = np.isfinite(rewards_S)
        if self.baseline == "mismatched" and is_labelled.all():
            raise DataError(
                "KTO's baseline needs rollouts without a reward, of completions behind other prompts; "
                "add them by tw.objectives.with_mismatched, or set baseline='zero'."
            )
        if not is_labelled.any():
            raise DataError("no rollout has a reward, so KTO has no label to learn from.")
        positions, streams = _score_streams(forest, needs_reference=True)
        label_S = np.where(is_labelled, np.where(rewards_S > self.threshold, 1, -1), 0)
        streams["label"] = label_S[streams["sequence"]]
        streams["is_first"] = np.zeros(len(positions), dtype=np.int64)
        streams["is_first"][np.unique(streams["sequence"], return_index=True)[1]] = 1
        return Terms(positions, streams, weight=float(is_labelled.sum()))

    def token_losses(self, values: Values, streams: Streams) -> Float[Tensor, " P"]:
        """[P] the loss of each rollout at its first term, and zeros. values: `log_probs` [P]."""
        label = streams["label"]
        score = _scores(values, streams)[streams["sequence"]]
        shifted = self.beta * label * (score - self._baseline(score.detach(), streams))
        weight = torch.where(label > 0, self.desirable_weight, self.undesirable_weight).to(score.dtype)
        losses = weight * (1 - torch.sigmoid(shifted))
        return torch.where((streams["is_first"] > 0) & (label != 0), losses, 0.0)

    def token_metrics(self, values: Values, streams: Streams) -> Values:
        """Means over labelled rollouts: reward (beta times the score, its sign turned where undesirable), baseline."""
        score = _scores(values, streams)[streams["sequence"]]
        is_counted = ((streams["is_first"] > 0) & (streams["label"] != 0)).to(score.dtype)
        baseline = self._baseline(score, streams)
        return {
            "signed_reward": is_counted * self.beta * streams["label"] * score,
            "baseline": is_counted * baseline,
        }

    def _baseline(self, score_P: Tensor, streams: Streams) -> Tensor:
        """A scalar: the constant, or the mean score of mismatched completions, at least 0."""
        if self.baseline != "mismatched":
            return score_P.new_tensor(0.0 if self.baseline == "zero" else self.baseline)
        is_counted = ((streams["is_first"] > 0) & (streams["label"] == 0)).to(score_P.dtype)
        return ((is_counted * score_P).sum() / is_counted.sum()).clamp(min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedScores(KTO):
    """Sums of what KTO's baseline is the mean of, for a step that is spread over calls and ranks: as metrics the scores
    and the number of mismatched rollouts, each over the number of labelled ones.
    """

    baseline: str | float = "zero"

    def token_metrics(self, values: Values, streams: Streams) -> Values:
        """[P] each, at the first term of a mismatched rollout; else 0."""
        score = _scores(values, streams)[streams["sequence"]]
        is_counted = ((streams["is_first"] > 0) & (streams["label"] == 0)).to(score.dtype)
        return {"score": is_counted * score, "count": is_counted}


def _check_beta(beta: float) -> None:
    if not 0 < beta < float("inf"):
        raise ConfigError(f"beta={beta} must be positive.")


def _rewards(forest: Forest, needed_by: str | None = None) -> np.ndarray:
    """[S] float64, the reward of each rollout; NaN without one. Raises `DataError` where rows of a rollout disagree."""
    if forest.trajectories is None:
        raise DataError("a preference loss needs trajectories; this declared tree is too large to hold them flat.")
    rollout_N = forest.rollout_of_trajectory
    rewards = np.full(int(rollout_N.max()) + 1, np.nan)
    for index, (item, rollout) in enumerate(zip(forest.trajectories, rollout_N.tolist(), strict=True)):
        if item.reward is None:
            if needed_by is not None:
                raise DataError(f"{forest.source_of(index)}: no reward; {needed_by} prefers the higher of a group.")
            continue
        if np.isfinite(rewards[rollout]) and rewards[rollout] != item.reward:
            raise DataError(f"{forest.source_of(index)}: rows of one rollout have different rewards.")
        rewards[rollout] = item.reward
    return rewards


def _pairs(forest: Forest, rewards_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[Q] int64 each, the chosen and the rejected rollout of every pair.

    Raises:
        DataError: a rollout without a group, a group without two rollouts of different rewards.
    """
    assert forest.trajectories is not None
    members: dict[object, dict[int, None]] = {}
    for index, (item, rollout) in enumerate(
        zip(forest.trajectories, forest.rollout_of_trajectory.tolist(), strict=True)
    ):
        if item.group is None:
            raise DataError(f"{forest.source_of(index)}: no group; the rollouts of one group are compared in pairs.")
        members.setdefault(item.group, {})[rollout] = None
    chosen: list[int] = []
    rejected: list[int] = []
    for group, rollouts in members.items():
        pairs = [(a, b) for a in rollouts for b in rollouts if rewards_S[a] > rewards_S[b]]
        if not pairs:
            raise DataError(
                f"group {group!r}: {num(len(rollouts), 'rollout')} with equal rewards, so none is preferred; leave it "
                "out, and let the two completions of a pair share a group of their own."
            )
        chosen += [a for a, _ in pairs]
        rejected += [b for _, b in pairs]
    return np.array(chosen, dtype=np.int64), np.array(rejected, dtype=np.int64)


def _score_streams(forest: Forest, *, needs_reference: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """[P] tree positions, ascending, and streams: each term's rollout (`sequence`), its weight in that rollout's score,
    and the reference.
    """
    require_whole_rollouts(forest, "a preference loss")
    weights_F = forest.flat_weights()
    trained = np.flatnonzero(weights_F)
    trained = trained[np.argsort(forest.path_index[trained], kind="stable")]
    sequence = rollout_of_tokens(forest)[trained]
    _, token, count = np.unique(
        sequence * forest.num_tokens + forest.path_index[trained], return_inverse=True, return_counts=True
    )
    streams = {"sequence": sequence, "weights": weights_F[trained] / count[token]}
    if needs_reference:
        streams["ref_logprobs"] = forest.flat_stream("ref_logprobs")[trained]
    return forest.path_index[trained], streams


def _scores(values: Values, streams: Streams, *, mean: bool = False) -> Float[Tensor, " P"]:
    """[P] the score of each rollout by its index (there are at most P), then zeros."""
    logprobs, sequence, weights = values["log_probs"], streams["sequence"], streams["weights"]
    ratios = logprobs - streams["ref_logprobs"] if "ref_logprobs" in streams else logprobs
    sums = torch.zeros_like(logprobs).index_add(0, sequence, weights * ratios)
    if not mean:
        return sums
    lengths = torch.zeros_like(logprobs).index_add(0, sequence, weights)
    return sums / torch.where(lengths > 0, lengths, 1.0)


# -- Completions behind prompts of others, of which KTO's baseline is the mean score ----------------------------------


def with_mismatched(trees: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """Each tree with, for each of its labelled trajectories, the completion of the one before in the data behind its
    prompt: no reward, a rollout of its own. The prompt is shared, so only completions are computed more.

    A prompt is what stands before the first trained token. The first trajectory takes the last one's completion.

    Raises:
        DataError: fewer than two completions.
    """
    labelled = [item for tree in trees for item in tree if item.reward is not None]
    completions = {(tuple(ids), tuple(weights)) for _, ids, weights in map(_parts, labelled)}
    if len(completions) < 2:
        raise DataError("KTO's baseline needs at least two different completions; set baseline='zero'.")
    before = dict(zip(map(id, labelled), [labelled[-1], *labelled[:-1]], strict=True))
    result = []
    for tree in trees:
        rows = list(tree)
        for number, item in enumerate(tree):
            if item.reward is not None:
                rows.append(_mismatched(item, before[id(item)], number))
        result.append(rows)
    return result


def _parts(item: Trajectory) -> tuple[np.ndarray, list[int], list[float]]:
    """A trajectory's prompt, and its completion with weights."""
    start = int(np.flatnonzero(item.loss_weights)[0])
    return item.token_ids[:start], item.token_ids[start:].tolist(), item.loss_weights[start:].tolist()


def _mismatched(item: Trajectory, other: Trajectory, number: int) -> Trajectory:
    prompt, _, _ = _parts(item)
    begin, ids, weights = _parts(other)
    moved = len(prompt) - len(begin)
    images = [image for image in item.images if image.end <= len(prompt)]
    images += [
        replace(image, start=image.start + moved, end=image.end + moved)
        for image in other.images
        if image.start >= len(begin)
    ]
    return Trajectory(
        np.concatenate([prompt, ids]).astype(np.int32),
        np.concatenate([np.zeros(len(prompt)), weights]),
        group=item.group,
        images=tuple(images),
        rollout=f"mismatched {number} of {item.rollout!r}",
        source=f"{item.source or 'trajectory'} with the completion of {other.source or 'another'}",
    )
