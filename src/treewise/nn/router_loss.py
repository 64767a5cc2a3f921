"""Losses on the routers of mixtures of experts, equal to those of flat training.

The load-balancing loss (Fedus et al. 2022, Switch Transformer, arXiv:2101.03961, equations 4 to 6, as transformers
computes it over all layers at once) is `E * sum_e count_e / R * probability_e / R`: over the R rows of routers, all
layers and tokens, how often expert e is among the chosen ones, and the sum of the probabilities given to it. A shared
token of a tree stands for one row in every trajectory through it, so it is weighted by its multiplicity. Counts carry
no gradient. Given those of the whole step, the loss is a sum over rows, so it can be computed in parts: a first walk
without a graph counts, and the training walk adds each micro-batch's part. Where an optimizer step is spread over
several calls or ranks, their counts (`RouterCounts`) are added up before any of them trains. The z-loss (Zoph et al.
2022, ST-MoE, arXiv:2202.08906, equation 5) is a sum over rows anyway.

Letters: T tokens of a micro-batch, M model width, L layers with a router, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from treewise.errors import UnsupportedModelError
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.guest import Guest, MicroBatchOutput
from treewise.nn.platform.tensors import to_device
from treewise.nn.recomputation import is_reentrant


@dataclass(frozen=True, slots=True)
class RouterLossRule:
    """The router losses of a model: experts chosen for each token, and the factors of both losses. counts_recorded:
    where recorded experts are replayed, these are counted, and not what the routers would choose now."""

    num_chosen: int
    aux_coefficient: float
    z_coefficient: float = 0.0
    counts_recorded: bool = False


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Statistics of a step's routers, every token weighted by its multiplicity.

    aux_loss, z_loss: before their factors. expert_load: [L, E] float64, the fraction of a layer's choices that went to
    each expert; each row sums to 1.
    """

    aux_loss: float
    z_loss: float
    expert_load: np.ndarray


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """What the load-balancing loss needs of all trees of an optimizer step; those of parts of a step add up.

    experts: [E] float64, how often each expert is chosen, over all layers, by multiplicity. num_rows: layers with a
    router times flat tokens.
    """

    experts: np.ndarray
    num_rows: float

    def __add__(self, other: "RouterCounts") -> "RouterCounts":
        return RouterCounts(self.experts + other.experts, self.num_rows + other.num_rows)


class RouterLoss:
    """Both router losses of one step, computed micro-batch by micro-batch.

    multiplicity: [tree tokens], how many trajectories go through each. step_counts: of the whole optimizer step, of
    which these trees are a part; None: these trees are the step. add_up: returns the sum of a tensor over the ranks
    that compute these trees together, a part of the tokens each; None: this rank computes all. experts: [tree tokens,
    L, k] int64, the experts that are counted as chosen, -1 for a token whose router chooses now; None: all do.
    """

    def __init__(
        self,
        rule: RouterLossRule,
        multiplicity: np.ndarray,
        step_counts: RouterCounts | None = None,
        add_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
        experts: np.ndarray | None = None,
    ) -> None:
        self.rule, self.multiplicity, self.step_counts, self._add_up = rule, multiplicity, step_counts, add_up
        self._experts = experts
        self._num_counted = 0  # tree tokens
        self._counts: torch.Tensor | None = None  # [L, E] float64, how often each expert is chosen
        self._sums: torch.Tensor | None = None  # [E + 1] float32 or wider, see `_row_sums`

    @property
    def is_counted(self) -> bool:
        """Whether every tree token has been counted."""
        return self._num_counted == len(self.multiplicity)

    def finish_counting(self) -> None:
        """After a walk: adds up what the ranks have counted that compute these trees together; all call this."""
        if self._add_up is None or self.is_counted:
            return
        assert self._counts is not None
        assert self._sums is not None
        self._counts, self._sums = self._add_up(self._counts), self._add_up(self._sums)
        self._num_counted = len(self.multiplicity)

    def counts(self) -> RouterCounts:
        """Those of these trees, once every token is counted."""
        self.finish_counting()
        assert self.is_counted
        assert self._counts is not None
        return RouterCounts(self._counts.sum(0).cpu().numpy(), self._num_rows())

    def _num_rows(self) -> float:
        assert self._counts is not None
        return len(self._counts) * float(self.multiplicity.sum())

    def part(self, router_logits: tuple[torch.Tensor, ...], positions: np.ndarray) -> torch.Tensor:
        """A micro-batch's part of both losses with their factors: a scalar with a graph, float32 or wider.

        The first walk over a step counts, without a graph, and its parts are 0 until every token is counted. A step of
        one micro-batch counts and computes its loss at once.

        router_logits: L tensors [T, E]. positions: [T] int64 tree positions of the micro-batch's tokens.
        """
        sums = self._row_sums(router_logits, positions)
        if not self.is_counted:
            self._count(router_logits, positions, sums.detach())
        if not self.is_counted and self.step_counts is None:
            assert not torch.is_grad_enabled(), "a walk with gradients before all tokens are counted"
            return sums.new_zeros(())
        return self._with_factors(self._terms(sums))

    def total(self) -> torch.Tensor:
        """Both losses of these trees with their factors, a scalar without a graph; those of a step's parts add up."""
        self.finish_counting()
        assert self._sums is not None
        return self._with_factors(self._terms(self._sums))

    def report(self) -> RoutingReport:
        """Statistics of the step, once every token is counted."""
        self.finish_counting()
        assert self._counts is not None
        assert self._sums is not None
        aux, z = self._terms(self._sums).double().tolist()
        counts = self._counts.cpu().numpy()
        return RoutingReport(aux, z, counts / counts.sum(1, keepdims=True))

    @torch.no_grad()
    def _count(self, router_logits: tuple[torch.Tensor, ...], positions: np.ndarray, sums: torch.Tensor) -> None:
        counts = torch.stack([self._choices(logits, positions, layer) for layer, logits in enumerate(router_logits)])
        self._counts = counts if self._counts is None else self._counts + counts
        self._sums = sums if self._sums is None else self._sums + sums
        self._num_counted += len(positions)

    def _row_sums(self, router_logits: tuple[torch.Tensor, ...], positions: np.ndarray) -> torch.Tensor:
        """[E + 1]: weighted sums over rows of the probability of each expert, and of the squared log-sum-exp."""
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
        if self.step_counts is None:  # these stay on the device, which the host need not wait for
            assert self._counts is not None
            count_E, num_rows = self._counts.sum(0).to(sums.device, sums.dtype), self._num_rows()
        else:
            count_E = to_device(self.step_counts.experts, sums.device, sums.dtype)
            num_rows = self.step_counts.num_rows
        return torch.stack([len(count_E) * (count_E @ sums[:-1]) / num_rows**2, sums[-1] / num_rows])

    def _with_factors(self, terms: torch.Tensor) -> torch.Tensor:
        return self.rule.aux_coefficient * terms[0] + self.rule.z_coefficient * terms[1]

    def _choices(self, logits: torch.Tensor, positions: np.ndarray, layer: int) -> torch.Tensor:
        """[E] float64: how often each expert is chosen, by weight. Sums of whole numbers, so exact in any order."""
        chosen = torch.topk(torch.softmax(logits, dim=-1), self.rule.num_chosen, dim=-1).indices
        if self._experts is not None:
            recorded = to_device(self._experts[positions, layer], logits.device, torch.long)
            chosen = torch.where(recorded >= 0, recorded, chosen)
        weight_T = self._weights(logits, positions).double()
        count_E = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
        return count_E.index_add_(0, chosen.reshape(-1), weight_T.repeat_interleave(self.rule.num_chosen))

    def _weights(self, logits: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return to_device(self.multiplicity[positions], logits.device, wide)


class RouterLosses(Guest):
    """The router losses of a step, added by its walks. counts: of the whole step, where these trees are a part.
    experts: see `RouterLoss`."""

    reads_routers = True

    def __init__(
        self,
        rule: RouterLossRule,
        multiplicity: np.ndarray,
        counts: RouterCounts | None = None,
        add_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
        experts: np.ndarray | None = None,
    ) -> None:
        self.router_loss = RouterLoss(rule, multiplicity, counts, add_up, experts)

    @property
    def needs_visit(self) -> bool:  # type: ignore[override]
        return self.router_loss.step_counts is None and not self.router_loss.is_counted

    def loss(self, output: MicroBatchOutput) -> torch.Tensor:
        return self.router_loss.part(output.router_logits, output.positions)

    def end_visit(self) -> None:
        self.router_loss.finish_counting()

    def added_loss(self) -> float:
        return float(self.router_loss.total())

    def report(self) -> RoutingReport:
        return self.router_loss.report()


def router_logits(lm: DecoderAndHead, output: ModelOutput, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[T, E] router logits of each layer with a router, from what the decoder returned, and its hidden rows ([T, M]).

    Raises:
        UnsupportedModelError: a model that returns none, or none with a graph.
    """
    layers = getattr(output, "router_logits", None) or ()
    logits = tuple(layer.reshape(-1, layer.shape[-1]) for layer in layers if isinstance(layer, torch.Tensor))
    if not logits:
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} returns no router logits, so it has no loss on them; set "
            "output_router_logits=False."
        )
    # transformers keeps router logits while a layer runs, which such a checkpoint does without a graph.
    if (
        hidden.requires_grad
        and not any(logit.requires_grad for logit in logits)
        and any(map(is_reentrant, lm.decoder.modules()))
    ):
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} returns router logits without gradients under reentrant gradient "
            "checkpointing, so a loss on them would train nothing; set use_reentrant=False "
            "(gradient_checkpointing_kwargs), or output_router_logits=False."
        )
    return logits


def router_loss_rule(
    base: PreTrainedModel, *, wants_aux: bool | None, z_coefficient: float = 0.0, choices: str = "live"
) -> RouterLossRule | None:
    """The router losses of a model, or None if neither the caller nor the configuration asks for one.

    wants_aux: whether to add the load-balancing loss; None: as the configuration says (`output_router_logits`).
    choices: that are counted where recorded experts are replayed, `live` or `replayed`.

    Raises:
        UnsupportedModelError: the model has no such loss.
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
            f"{name} has no loss on its routers: its configuration lacks router_aux_loss_coef or num_experts_per_tok; "
            "set output_router_logits=False."
        )
    aux_coefficient = float(coefficient or 0.0) if wants_aux else 0.0
    return RouterLossRule(int(num_chosen), aux_coefficient, z_coefficient, counts_recorded=choices == "replayed")


@torch.no_grad()
def check_router_loss(model: nn.Module, rule: RouterLossRule, token_ids: torch.Tensor) -> None:
    """Compares the load-balancing loss with that of the model's own forward. token_ids: [n] int64, a few tokens.

    Raises:
        UnsupportedModelError: the model has no such loss, or computes another one.
    """
    name = type(model).__name__
    out = model(input_ids=token_ids[None], output_router_logits=True, use_cache=False)
    own = getattr(out, "aux_loss", None)
    if not isinstance(own, torch.Tensor):
        raise UnsupportedModelError(
            f"{name} adds no load-balancing loss of its own; set output_router_logits=False (router_aux_loss=False)."
        )
    logits = tuple(router_logit.reshape(-1, router_logit.shape[-1]) for router_logit in out.router_logits)
    router_loss = RouterLoss(RouterLossRule(rule.num_chosen, 1.0), np.ones(len(token_ids)))
    ours = float(router_loss.part(logits, np.arange(len(token_ids))))
    if not abs(ours - float(own)) <= 1e-2 * abs(float(own)):
        raise UnsupportedModelError(
            f"{name} computes a load-balancing loss of {float(own):.4g} where treewise computes {ours:.4g}; it "
            "differs from Mixtral's. Set output_router_logits=False (router_aux_loss=False)."
        )


def _first(base: PreTrainedModel, config: PreTrainedConfig, names: tuple[str, ...]) -> int | float | None:
    values = (getattr(owner, name, None) for owner in (base, config) for name in names)
    return next((value for value in values if isinstance(value, int | float)), None)
