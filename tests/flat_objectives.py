"""Objectives on padded rows, written plainly from their papers: what the engine's losses are compared with.

Nothing here is shared with the library but trajectories and the names of settings. Rows are right-padded; `[n, t]` is
token t of row n. `loss_of_rows` has them all; `run_alone` runs each trajectory by itself, `run_padded` all in
one batch.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import logsigmoid, pad

from tests.replayed_rows import Replayer
from treewise.objectives import DPO, KTO, SFT, Distillation
from treewise.tree.trajectory import Trajectory


@dataclass
class Rows:
    """logprobs, entropy: [N, L] with a graph; everything: [N, L, V]. Column 0 is 0: nothing predicts a first token."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    everything: torch.Tensor


def run_padded(model: nn.Module, items: Sequence[Trajectory]) -> Rows:
    """All trajectories in one batch through the model's own forward, with a padding mask."""
    length = max(len(item) for item in items)
    ids = torch.zeros(len(items), length, dtype=torch.long)
    mask = torch.zeros(len(items), length, dtype=torch.long)
    for row, item in enumerate(items):
        ids[row, : len(item)] = torch.from_numpy(item.token_ids.astype(np.int64))
        mask[row, : len(item)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    everything = torch.log_softmax(logits[:, :-1], dim=-1)
    everything = pad(everything, (0, 0, 1, 0))
    chosen = torch.gather(everything, 2, ids[..., None])[..., 0]
    entropy = -(everything.exp() * everything).sum(-1)
    first = torch.zeros(1, length, dtype=torch.bool)
    first[:, 0] = True
    return Rows(chosen.masked_fill(first, 0), entropy.masked_fill(first, 0), everything)


def run_alone(
    model: nn.Module,
    items: Sequence[Trajectory],
    *,
    temperature: float = 1.0,
    seen: Callable[[Trajectory], dict[str, torch.Tensor]] | None = None,
    replayer: Replayer | None = None,
) -> Rows:
    """Every trajectory by itself through the model's own forward; seen: what it takes besides token ids; replayer: of
    recorded experts, which are then taken."""
    length = max(len(item) for item in items)
    rows = []
    for item in items:
        ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
        with replayer.row(item) if replayer else nullcontext():
            logits = model(input_ids=ids, use_cache=False, **(seen(item) if seen else {})).logits[0, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        everything = torch.log_softmax(logits, dim=-1)
        chosen = everything.gather(1, ids[0, 1:, None])[:, 0]
        entropy = -(everything.exp() * everything).sum(-1)
        after = length - len(item)
        rows.append((pad(chosen, (1, after)), pad(entropy, (1, after)), pad(everything, (0, 0, 1, after))))
    return Rows(*(torch.stack(parts) for parts in zip(*rows, strict=True)))


def loss_of_rows(rows: Rows, items: Sequence[Trajectory], objective: Any) -> torch.Tensor:
    """The loss of an objective, or of a function of the list of log-probs ([length - 1] each)."""
    if isinstance(objective, SFT):
        return averaged(-rows.logprobs, items, objective)
    if isinstance(objective, DPO | KTO):
        return preference_loss(rows.logprobs, items, objective)
    if isinstance(objective, Distillation):
        return distillation_loss(rows, items, objective)
    if hasattr(objective, "surrogate"):
        return policy_loss(rows, items, objective)
    loss: torch.Tensor = objective([rows.logprobs[row, 1 : len(item)] for row, item in enumerate(items)])
    return loss


def stream(items: Sequence[Trajectory], name: str, like: torch.Tensor) -> torch.Tensor:
    """[N, L] a stream of the trajectories, 0 where they have ended."""
    result = torch.zeros_like(like)
    for row, item in enumerate(items):
        result[row, : len(item)] = torch.tensor(getattr(item, name)).to(like.dtype)
    return result.detach()


def rollouts_of(items: Sequence[Trajectory]) -> list[list[int]]:
    """Rows of each rollout."""
    rows: dict[object, list[int]] = defaultdict(list)
    for row, item in enumerate(items):
        rows[("alone", row) if item.rollout is None else (item.group, item.rollout)].append(row)
    return list(rows.values())


def _path(item: Trajectory, at: int) -> object:
    """What a token shares with those of other rows: the tokens up to it, the images among them, and their experts."""
    seen = tuple((image.start, image.digest) for image in item.images if image.start <= at)
    experts = b"" if item.routed_experts is None else item.routed_experts[: at + 1].tobytes()
    return tuple(item.token_ids[: at + 1].tolist()), seen, experts


def weights_of(items: Sequence[Trajectory], weighting: str, like: torch.Tensor) -> torch.Tensor:
    """Loss weights, divided by how many rows (all, or of the rollout) train a token with the same tokens before it."""
    weights = stream(items, "loss_weights", like)
    rows_of_rollout = rollouts_of(items)
    mates = {"once": [list(range(len(items)))], "per_rollout": rows_of_rollout}.get(weighting, [])
    for rows in mates:
        trains: dict[object, list[tuple[int, int]]] = defaultdict(list)
        for row in rows:
            for at in np.flatnonzero(items[row].loss_weights).tolist():
                trains[_path(items[row], at)].append((row, at))
        for places in trains.values():
            for row, at in places:
                weights[row, at] /= len(places)
    return weights


def averaged(losses: torch.Tensor, items: Sequence[Trajectory], settings: Any) -> torch.Tensor:
    """The sum of weighted token losses by its normalization; settings: an objective's."""
    weights = weights_of(items, settings.weighting, losses)
    if settings.normalization == "token_mean":
        return (weights * losses).sum() / weights.sum()
    if settings.normalization == "trajectory_mean":
        return ((weights * losses).sum(1) / weights.sum(1)).mean()
    if settings.normalization == "constant":
        return (weights * losses).sum() / settings.constant
    rollouts = rollouts_of(items)
    per_rollout = []
    for rows in rollouts:
        total = (weights[rows] * losses[rows]).sum()
        if settings.normalization == "rollout_mean":
            total = total / weights[rows].sum()
        per_rollout.append(total / (settings.constant or 1))
    return torch.stack(per_rollout).mean()


def distinct(items: Sequence[Trajectory], rows: list[int], like: torch.Tensor) -> torch.Tensor:
    """[rows, L] 1 / how many of these rows train the same token: a rollout's tokens, each once."""
    counts = torch.zeros_like(like)
    trains: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for number, row in enumerate(rows):
        for at in np.flatnonzero(items[row].loss_weights).tolist():
            trains[_path(items[row], at)].append((number, at))
    for places in trains.values():
        for number, at in places:
            counts[number, at] = 1 / len(places)
    return counts


def over_rollouts(values: torch.Tensor, items: Sequence[Trajectory], is_mean: bool) -> torch.Tensor:
    """[N, L] the sum or mean of a rollout's trained tokens, at each of its tokens."""
    result = torch.zeros_like(values)
    for rows in rollouts_of(items):
        share = distinct(items, rows, values[rows])
        total = (share * values[rows]).sum() / (share.sum() if is_mean else 1)
        row_mask = torch.zeros_like(values)
        row_mask[rows] = 1
        result = result + row_mask * total
    return result


def over_turns(values: torch.Tensor, items: Sequence[Trajectory]) -> torch.Tensor:
    """[N, L] the mean of a turn's tokens, at each of its tokens: a turn is a run of trained tokens of a row."""
    result = torch.zeros_like(values)
    for row, item in enumerate(items):
        at = 0
        while at < len(item):
            end = at
            while end < len(item) and item.loss_weights[end] > 0:
                end += 1
            if end > at:
                places = torch.zeros_like(values)
                places[row, at:end] = 1
                result = result + places * values[row, at:end].mean()
            at = end + 1
    return result


def policy_loss(rows: Rows, items: Sequence[Trajectory], settings: Any) -> torch.Tensor:
    """The loss of a `PolicyGradient`."""
    logp = rows.logprobs
    has_old = items[0].old_logprobs is not None
    old = stream(items, "old_logprobs", logp) if has_old else logp.detach()
    advantages = stream(items, "advantages", logp)
    log_ratio = logp - old
    if settings.ratio_level == "sequence":
        log_ratio = over_rollouts(log_ratio, items, is_mean=True)
    if settings.ratio_level == "turn":
        log_ratio = over_turns(log_ratio, items)
    ratio = torch.exp(log_ratio)
    if settings.surrogate == "reinforce":
        losses = -advantages * logp
    elif settings.surrogate == "cispo":
        losses = -torch.where(ratio > settings.max_ratio, settings.max_ratio, ratio).detach() * advantages * logp
    else:
        clipped = ratio
        if settings.clip_low is not None:
            clipped = torch.where(clipped < 1 - settings.clip_low, 1 - settings.clip_low, clipped)
        if settings.clip_high is not None:
            clipped = torch.where(clipped > 1 + settings.clip_high, 1 + settings.clip_high, clipped)
        losses = torch.where(ratio * advantages < clipped * advantages, -ratio * advantages, -clipped * advantages)
        if settings.dual_clip is not None:
            worst = -settings.dual_clip * advantages
            losses = torch.where((advantages < 0) & (losses > worst), worst, losses)
    if settings.sampler_correction:
        gap = old.detach() - stream(items, "sampler_logprobs", logp)
        if settings.sampler_level == "sequence":
            gap = over_rollouts(gap, items, is_mean=False)
        weight = torch.exp(gap)
        low = 0.0 if settings.sampler_min is None else settings.sampler_min
        high = float("inf") if settings.sampler_max is None else settings.sampler_max
        if settings.sampler_correction == "truncate":
            weight = weight.clamp(low, high)
        else:
            weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
        losses = losses * weight
    if settings.beta:
        reference = stream(items, "ref_logprobs", logp)
        if settings.kl == "k1":
            kl = logp - reference
        elif settings.kl == "k2":
            kl = 0.5 * (logp - reference) ** 2
        else:
            kl = torch.exp(reference - logp) - (reference - logp) - 1
        losses = losses + settings.beta * kl
    if settings.entropy_coefficient:
        losses = losses - settings.entropy_coefficient * rows.entropy
    return averaged(losses, items, settings)


def distillation_loss(rows: Rows, items: Sequence[Trajectory], settings: Any) -> torch.Tensor:
    """The loss of a `Distillation`."""
    losses = torch.zeros_like(rows.logprobs)
    for row, item in enumerate(items):
        assert item.teacher_ids is not None
        assert item.teacher_logprobs is not None
        for at in np.flatnonzero(item.loss_weights):
            is_used = np.isfinite(item.teacher_logprobs[at])
            teacher = torch.from_numpy(item.teacher_logprobs[at][is_used]).to(losses.dtype)
            student = rows.everything[row, at, torch.from_numpy(item.teacher_ids[at][is_used].astype(np.int64))]
            q, p = teacher.exp(), student.exp()
            if settings.tail == "renormalize":
                q, p = q / q.sum(), p / p.sum()
            if settings.tail == "bucket":
                q, p = torch.cat([q, 1 - q.sum(0, keepdim=True)]), torch.cat([p, 1 - p.sum(0, keepdim=True)])
            entropy = (q * q.log()).sum() if settings.divergence == "forward_kl" else 0.0
            losses[row, at] = entropy - (q * p.log()).sum()
    return averaged(losses, items, settings)


def preference_loss(logprobs: torch.Tensor, items: Sequence[Trajectory], settings: DPO | KTO) -> torch.Tensor:
    """The loss of a `DPO` or `KTO`."""
    rollouts = rollouts_of(items)
    weights = stream(items, "loss_weights", logprobs)
    free = isinstance(settings, DPO) and settings.reference_free
    gaps = logprobs if free else logprobs - stream(items, "ref_logprobs", logprobs)
    scores = []
    for rows in rollouts:
        share = distinct(items, rows, logprobs[rows]) * weights[rows]
        score = (share * gaps[rows]).sum()
        scores.append(score / share.sum() if isinstance(settings, DPO) and settings.loss == "ipo" else score)
    rewards = [items[rows[0]].reward for rows in rollouts]
    beta = settings.beta
    if isinstance(settings, KTO):
        unlabelled = [score for score, reward in zip(scores, rewards, strict=True) if reward is None]
        mismatched = settings.baseline == "mismatched"
        baseline = torch.stack(unlabelled).mean().detach().clamp(min=0) if mismatched else torch.zeros(())
        losses = []
        for score, reward in zip(scores, rewards, strict=True):
            if reward is not None and reward > settings.threshold:
                losses.append(settings.desirable_weight * (1 - torch.sigmoid(beta * (score - baseline))))
            elif reward is not None:
                losses.append(settings.undesirable_weight * (1 - torch.sigmoid(beta * (baseline - score))))
        return torch.stack(losses).mean()
    groups = [items[rows[0]].group for rows in rollouts]
    losses = []
    for chosen, better in enumerate(rewards):
        for rejected, worse in enumerate(rewards):
            if groups[chosen] != groups[rejected] or better is None or worse is None or better <= worse:
                continue
            difference = scores[chosen] - scores[rejected]
            if settings.loss == "ipo":
                losses.append((difference - 1 / (2 * beta)) ** 2)
            elif settings.loss == "hinge":
                losses.append(torch.relu(1 - beta * difference))
            else:
                smooth = settings.label_smoothing
                losses.append(-(1 - smooth) * logsigmoid(beta * difference) - smooth * logsigmoid(-beta * difference))
    return torch.stack(losses).mean()
