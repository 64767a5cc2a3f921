"""What a loss is on flat rows: the terms of each trajectory, and the losses on routers.

SFT is written out from its definition, and so are the losses on routers. Any other objective computes its terms on
trajectories between which nothing is merged, so its own formulas run on flat rows. Shared tokens are recognised by the
hash of the path to them, so that `weighting` applies.

Letters: L tokens of one trajectory, P terms of one trajectory, E experts, R rows of all routers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.base import features
from treewise.engine.flat import FlatTerms, every_token
from treewise.errors import ConfigError
from treewise.nn.model import split_model
from treewise.nn.router_loss import RouterLossRule
from treewise.objectives.protocol import Objective
from treewise.objectives.sft import SFT
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory, number_rollouts


def terms_of(
    objective: Objective, items: list[Trajectory], trees: Sequence[int]
) -> tuple[list[FlatTerms], float, bool]:
    """The terms of each trajectory, the denominator, and whether the loss is a sum over tokens.

    trees: of each trajectory.

    Raises:
        ConfigError: an objective that has no flat form.
    """
    if not isinstance(objective, SFT):
        return _own_terms(items, objective, trees)
    weights = flat_weights(items, objective, trees)
    return [every_token(item, {"weights": own[1:]}) for item, own in zip(items, weights, strict=True)], 1.0, True


def flat_weights(
    trajectories: Sequence[Trajectory], objective: SFT, trees: Sequence[int] | None = None
) -> list[np.ndarray]:
    """The weight of each token's negative log-prob in the flat loss ([L] float64 per trajectory).

    Written from the definition of the objective, without a tree.
    """
    trees = [0] * len(trajectories) if trees is None else trees
    weights = _counted_weights(trajectories, objective.weighting, trees)
    rollouts = number_rollouts(trajectories)
    if objective.normalization == "trajectory_mean":
        return [weight / weight.sum() / len(weights) for weight in weights]
    if objective.normalization == "rollout_mean":
        totals = np.bincount(rollouts, weights=[weight.sum() for weight in weights])
        return [weight / totals[rollout] / len(totals) for rollout, weight in zip(rollouts, weights, strict=True)]
    if objective.normalization == "rollout_sum":
        divisor = (objective.constant or 1.0) * (int(rollouts.max()) + 1)
        return [weight / divisor for weight in weights]
    if objective.normalization == "constant":
        assert objective.constant is not None
        return [weight / objective.constant for weight in weights]
    total = sum(weight.sum() for weight in weights)
    return [weight / total for weight in weights]


def _own_terms(
    items: list[Trajectory], objective: Objective, trees: Sequence[int]
) -> tuple[list[FlatTerms], float, bool]:
    """Terms by trajectory, denominator, and whether the loss is a sum over tokens: computed by the objective itself, on
    trajectories with nothing merged."""
    unknown = set(objective.outputs) - {"log_probs", "entropy"}
    if unknown:
        raise ConfigError(f"verify computes log-probs and entropies of flat rows, not {', '.join(sorted(unknown))}.")
    plain = objective
    weighting = getattr(objective, "weighting", "per_trajectory")
    if weighting != "per_trajectory":
        weights = _counted_weights(items, weighting, trees)
        items = [replace(item, loss_weights=weight) for item, weight in zip(items, weights, strict=True)]
        settings: Any = objective  # a dataclass, as all are that weigh
        plain = replace(settings, weighting="per_trajectory")
    _refuse_joint_tokens(items, objective)
    apart = Forest.concatenate([Forest.from_trajectories([item]) for item in items])
    terms = plain.terms(apart)
    starts = np.concatenate([[0], np.cumsum([len(item) for item in items])])
    bounds = np.searchsorted(terms.positions, starts)
    tokens = apart.token_ids[terms.positions] if terms.tokens is None else terms.tokens
    flat_terms = []
    for index in range(len(items)):
        part = slice(bounds[index], bounds[index + 1])
        streams = {name: stream[part] for name, stream in terms.streams.items()}
        flat_terms.append(FlatTerms(terms.positions[part] - starts[index] - 1, tokens[part], streams))
    return flat_terms, plain.denominator(apart), plain.is_separable(apart)


def _refuse_joint_tokens(items: Sequence[Trajectory], objective: object) -> None:
    """Raises if two rows of a rollout train one token: a ratio of the whole rollout counts it once, flat rows twice."""
    if not getattr(objective, "has_sequence_ratios", False):
        return
    seen: set[tuple[int, bytes]] = set()
    for rollout, item in zip(number_rollouts(items).tolist(), items, strict=True):
        keys = _prefix_keys(item)
        trained = {(rollout, keys[position]) for position in np.flatnonzero(np.asarray(item.loss_weights)).tolist()}
        if trained & seen:
            raise ConfigError(
                "two rows of one rollout train the same token, which a ratio of whole sequences counts once; flat rows "
                "would count it twice. Verify with rollouts of one row each."
            )
        seen |= trained


def _counted_weights(trajectories: Sequence[Trajectory], weighting: str, trees: Sequence[int]) -> list[np.ndarray]:
    """[L] float64 loss weights of each trajectory, divided by how many train the token, by `weighting`."""
    weights = [np.asarray(item.loss_weights, dtype=np.float64) for item in trajectories]
    if weighting == "per_trajectory":
        return weights
    rollouts = number_rollouts(trajectories)
    of_rollout = rollouts if weighting == "per_rollout" else np.zeros_like(rollouts)
    keys = [
        [(rollout, tree, key) for key in _prefix_keys(item)]
        for rollout, tree, item in zip(of_rollout.tolist(), trees, trajectories, strict=True)
    ]
    trains = Counter(
        key for each, weight in zip(keys, weights, strict=True) for key, w in zip(each, weight, strict=True) if w
    )
    return [weight / [max(1, trains[key]) for key in each] for each, weight in zip(keys, weights, strict=True)]


def _prefix_keys(item: Trajectory) -> list[bytes]:
    """[L] hashes, each of the path to a token, the images on it and the experts that were recorded there."""
    state, keys = blake2b(digest_size=16), []
    experts = item.routed_experts
    image_at = {image.start: image.digest for image in item.images}
    for position, token in enumerate(item.token_ids.astype("<i4")):
        state.update(token.tobytes() + image_at.get(position, "").encode())
        if experts is not None:
            state.update(experts[position].tobytes())
        keys.append(state.digest())
    return keys


class FlatRouters:
    """The losses on the routers of a mixture of experts over all flat rows as one batch.

    `E * sum_e (choices_e / R) * (probability_e / R)` (Fedus et al. 2022, arXiv:2101.03961, equations 4 to 6), and the
    mean square of the log-sum-exp (Zoph et al. 2022, arXiv:2202.08906, equation 5), each with its factor.
    """

    def __init__(self, rule: RouterLossRule) -> None:
        self.rule, self.is_counted = rule, False
        self._choices: torch.Tensor | float = 0.0  # [E]
        self._num_rows = 0

    def part(self, model: nn.Module, item: Trajectory, router_logits: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Counts the rows of one trajectory ([.., E] of each layer); once all are counted, its part of the losses."""
        logits_RE = torch.cat([router_logit.reshape(-1, router_logit.shape[-1]) for router_logit in router_logits])
        logits_RE = logits_RE.to(torch.promote_types(logits_RE.dtype, torch.float32))
        probability_RE = logits_RE.softmax(-1)
        if not self.is_counted:
            chosen = probability_RE.topk(self.rule.num_chosen, dim=-1).indices
            if self.rule.counts_recorded and item.routed_experts is not None:
                forest = Forest.from_trajectories([item])
                recorded = features.routing.recorded_choices(split_model(model), forest).swapaxes(0, 1)
                of_rows = torch.from_numpy(recorded.reshape(chosen.shape)).to(chosen.device)
                chosen = torch.where(of_rows >= 0, of_rows, chosen)
            self._choices = self._choices + chosen.reshape(-1).bincount(minlength=logits_RE.shape[-1])
            self._num_rows += len(logits_RE)
            return None
        balance = logits_RE.shape[-1] * (self._choices * probability_RE.sum(0)).sum() / self._num_rows**2
        square = logits_RE.logsumexp(-1).square().sum() / self._num_rows
        return self.rule.aux_coefficient * balance + self.rule.z_coefficient * square
