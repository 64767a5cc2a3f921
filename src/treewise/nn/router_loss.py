"""Losses on the routers of mixtures of experts, equal to those of flat training.

The load-balancing loss (Fedus et al. 2022, Switch Transformer, arXiv:2101.03961, equations 4 to 6, as transformers
computes it over all layers at once) is `E * sum_e count_e / R * probability_e / R`: over the R rows of routers, all
layers and tokens, how often expert e is among the chosen ones, and the sum of the probabilities given to it. A shared
token of a tree stands for one row in every trajectory through it, so it weighs by its multiplicity. Counts carry no
gradient.
Given those of the whole step, the loss is a sum over rows, so it can be computed in parts: a walk without a graph
counts, and the training walk adds each micro-batch's share. The z-loss (Zoph et al. 2022, ST-MoE, arXiv:2202.08906,
equation 5) is a sum over rows anyway.

Letters: T tokens of a micro-batch, L layers with a router, E experts.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from treewise.errors import UnsupportedModelError
from treewise.nn.device import to_device


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a model weighs its routers: experts chosen for a token, and the factors of both losses in the whole."""

    num_chosen: int
    aux_coefficient: float
    z_coefficient: float = 0.0


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """What a step's routers did, every token weighed by its multiplicity.

    aux_loss, z_loss: before their factors. expert_load: [L, E] float64, the share of a layer's choices that an expert
    got; each row sums to 1.
    """

    aux_loss: float
    z_loss: float
    expert_load: np.ndarray


@dataclass(eq=False)
class Routing:
    """The routers of one step: first counted, then weighed.

    multiplicity: of every tree token. counts: [L, E] float64, how often each expert is chosen. `count`, `weigh_later`
    and `loss` take the router logits of one micro-batch, a tuple of L tensors [T, E], and its tokens' tree positions.
    """

    rule: RoutingRule
    multiplicity: np.ndarray
    counts: torch.Tensor | None = None
    is_counted: bool = False
    _shares: list[torch.Tensor] = field(default_factory=list)
    _sums: torch.Tensor | None = None

    def count(self, router_logits: tuple[torch.Tensor, ...], positions: np.ndarray) -> None:
        """Adds a micro-batch's choices to the counts of the step."""
        with torch.no_grad():
            found = torch.stack([self._choices(logits, positions) for logits in router_logits])
        self.counts = found if self.counts is None else self.counts + found

    def loss(self, router_logits: tuple[torch.Tensor, ...], positions: np.ndarray) -> torch.Tensor:
        """A micro-batch's share of both losses with their factors, with a graph; needs the counts of the whole step."""
        assert self.is_counted
        terms = self._terms(self._row_sums(router_logits, positions))
        self._shares.append(terms.detach())
        return self.rule.aux_coefficient * terms[0] + self.rule.z_coefficient * terms[1]

    def weigh_later(self, router_logits: tuple[torch.Tensor, ...], positions: np.ndarray) -> None:
        """Keeps a micro-batch's sums, for `total` once all is counted."""
        with torch.no_grad():
            found = self._row_sums(router_logits, positions)
        self._sums = found if self._sums is None else self._sums + found

    def total(self) -> torch.Tensor:
        """Both losses of the whole step with their factors, without a graph."""
        terms = torch.stack(self._shares).sum(0) if self._sums is None else self._terms(self._sums)
        return self.rule.aux_coefficient * terms[0] + self.rule.z_coefficient * terms[1]

    def report(self) -> RoutingReport:
        """What the routers did, once every micro-batch was weighed."""
        assert self.counts is not None
        terms = torch.stack(self._shares).sum(0) if self._sums is None else self._terms(self._sums)
        aux, z = terms.double().tolist()
        counts = self.counts.cpu().numpy()
        return RoutingReport(aux, z, counts / counts.sum(1, keepdims=True))

    def _row_sums(self, router_logits: tuple[torch.Tensor, ...], positions: np.ndarray) -> torch.Tensor:
        """[E + 1]: sums over rows, by weight, of the probability of each expert, and of the squared log-sum-exp."""
        total = None
        for logits in router_logits:
            weight_T = self._weights(logits, positions)
            probability_E = weight_T @ torch.softmax(logits, dim=-1).to(weight_T.dtype)
            square = weight_T @ torch.logsumexp(logits.to(weight_T.dtype), dim=-1).square()
            sums = torch.cat([probability_E, square[None]])
            total = sums if total is None else total + sums
        assert total is not None
        return total

    def _terms(self, sums: torch.Tensor) -> torch.Tensor:
        """[2] the load-balancing loss and the z-loss, without factors, from sums over rows."""
        assert self.counts is not None
        num_rows = len(self.counts) * float(self.multiplicity.sum())
        count_E = self.counts.sum(0).to(sums.dtype)
        return torch.stack([len(count_E) * (count_E @ sums[:-1]) / num_rows**2, sums[-1] / num_rows])

    def _choices(self, logits: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        """[E] float64: how often each expert is chosen, by weight. Sums of whole numbers, so exact in any order."""
        chosen = torch.topk(torch.softmax(logits, dim=-1), self.rule.num_chosen, dim=-1).indices
        weight_T = self._weights(logits, positions).double()
        found = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
        return found.index_add_(0, chosen.reshape(-1), weight_T.repeat_interleave(self.rule.num_chosen))

    def _weights(self, logits: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return to_device(self.multiplicity[positions], logits.device, wide)


def rule_of(base: Any, wants_aux: bool | None, z_coefficient: float) -> RoutingRule | None:
    """The routing rule of a model, or None where no loss on its routers is asked for.

    wants_aux: whether to add the load-balancing loss; None asks the configuration (`output_router_logits`).

    Raises:
        UnsupportedModelError: asked of a model that gives no router logits or has no such loss.
    """
    config = base.config.get_text_config()
    if wants_aux is None:
        wants_aux = bool(
            getattr(config, "output_router_logits", False) or getattr(base.config, "output_router_logits", False)
        )
    if not wants_aux and not z_coefficient:
        return None
    name = type(base).__name__
    coefficient = _first(base, config, ("router_aux_loss_coef", "aux_loss_coef"))
    num_chosen = _first(base, config, ("num_experts_per_tok", "moe_k", "top_k", "num_experts_per_token"))
    if num_chosen is None or (wants_aux and coefficient is None):
        raise UnsupportedModelError(
            f"{name} has no loss on its routers that treewise knows (router_aux_loss_coef, num_experts_per_tok); set "
            "output_router_logits=False."
        )
    return RoutingRule(int(num_chosen), float(coefficient or 0.0) if wants_aux else 0.0, z_coefficient)


@torch.no_grad()
def check_rule(model: Any, rule: RoutingRule, token_ids: torch.Tensor) -> None:
    """Compares the load-balancing loss with that of the model's own forward, on a few tokens ([n]).

    Raises:
        UnsupportedModelError: the model adds none, or another one.
    """
    name = type(model).__name__
    out = model(input_ids=token_ids[None], output_router_logits=True, use_cache=False)
    own = getattr(out, "aux_loss", None)
    if not isinstance(own, torch.Tensor):
        raise UnsupportedModelError(
            f"{name} adds no load-balancing loss of its own; set output_router_logits=False (router_aux_loss=False)."
        )
    logits = tuple(each.reshape(-1, each.shape[-1]) for each in out.router_logits)
    everywhere = np.arange(len(token_ids))
    routing = Routing(RoutingRule(rule.num_chosen, 1.0), np.ones(len(token_ids)))
    routing.count(logits, everywhere)
    routing.is_counted = True
    ours = float(routing.loss(logits, everywhere))
    if not abs(ours - float(own)) <= 1e-2 * abs(float(own)):
        raise UnsupportedModelError(
            f"{name} computes a load-balancing loss of {float(own):.4g} where treewise finds {ours:.4g}; it is another "
            "one than Mixtral's. Set output_router_logits=False (router_aux_loss=False)."
        )


def _first(base: Any, config: Any, names: tuple[str, ...]) -> Any:
    for owner in (base, config):
        for name in names:
            if isinstance(getattr(owner, name, None), int | float):
                return getattr(owner, name)
    return None
