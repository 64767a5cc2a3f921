"""The flat oracle of the probe, `verify` and tests: every trajectory alone, by the model's own forward.

Plain code without trees. The mean over trained tokens, which the probe takes, is written out here. What other losses
are on flat rows, those on routers too, stands in `flat_terms`; a function gets the flat log-probs.

Letters: V vocabulary, L tokens of one trajectory, P terms of one trajectory, N trajectories.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from treewise.base import features
from treewise.base.progress import tell_progress
from treewise.errors import ConfigError
from treewise.nn.model import split_model
from treewise.objectives.protocol import Objective
from treewise.objectives.sft import SFT
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.nn.router_loss import RouterLossRule

Loss = Callable[[list[torch.Tensor]], torch.Tensor]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class FlatTerms:
    """The terms of one trajectory: the row that predicts each ([P] int64), the token that is scored there ([P] int64),
    and the objective's streams ([P] each)."""

    row: np.ndarray
    token: np.ndarray
    streams: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class FlatRun:
    """The loss; the sum of the sizes of its terms, which may cancel; the log-probs of each trajectory's own tokens
    ([L - 1] float64 on the host); and the gradients of the loss by these ([L - 1] on the device), where it depends on
    nothing else, else None. reaches: whether the values of any trajectory depend on something that is trained, which a
    row of text does not where the tower of images alone is."""

    loss: float
    size: float
    logprobs: list[torch.Tensor]
    slopes: list[torch.Tensor] | None
    reaches: bool


class FlatLoss:
    """A loss on trajectories that are computed one after the other.

    processor: the model's, for images. temperature: divides the logits. routers: the losses on routers that are added;
    None: none. trees: [N] the tree of each trajectory, where equal prefixes of two trees count apart; None: they count
    together.

    Raises:
        ConfigError: an objective that has no flat form, or neither an objective nor a function.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        objective: Objective | Loss,
        processor: object = None,
        *,
        temperature: float = 1.0,
        routers: "RouterLossRule | None" = None,
        trees: Sequence[int] | None = None,
    ) -> None:
        self.items, self.objective, self.processor = list(trajectories), objective, processor
        self.temperature, self.routers = temperature, routers
        trees = [0] * len(self.items) if trees is None else trees
        self.denominator, self.is_separable = 1.0, True
        if objective == SFT():  # the mean over trained tokens, as the probe takes it
            weights = [item.loss_weights[1:].astype(np.float64) for item in self.items]
            total = sum(weight.sum() for weight in weights)
            self.terms = [
                every_token(item, {"weights": each / total}) for item, each in zip(self.items, weights, strict=True)
            ]
        elif isinstance(objective, Objective):
            found = features.flat_terms.terms_of(objective, self.items, trees)
            self.terms, self.denominator, self.is_separable = found
        elif callable(objective):
            self.terms, self.is_separable = [every_token(each, {}) for each in self.items], False
        else:
            raise ConfigError(f"objective is a {type(objective).__name__}; give an objective or a function.")

    def run(self, model: nn.Module, device: torch.device) -> FlatRun:
        """Adds the gradients into `.grad`, where they are enabled and the loss has some.

        One pass over the trajectories, or two where the loss is not a sum over tokens: values of all of them, then each
        once more with the loss's gradients on its values. The losses on routers count in a pass before.
        """
        slopes: list[Values] | None = None
        loss = size = 0.0
        routers = None if self.routers is None else features.flat_terms.FlatRouters(self.routers)
        if routers is not None or not self.is_separable:
            with torch.no_grad():
                values_N = [
                    self._values(model, device, index, routers)[0] for index in self._rows("flat forward", model)
                ]
            if not self.is_separable:
                loss, size, slopes = self._slopes(values_N)
            if routers is not None:
                routers.is_counted = True
        logprobs_N, own_slopes, reaches = [], [], False
        for index in self._rows("flat training", model):
            values, logprobs, router_loss = self._values(model, device, index, routers)
            if values["log_probs"].requires_grad:
                reaches = True
                values["log_probs"].retain_grad()
            elif torch.is_grad_enabled():  # nothing trained is below, but the loss still has a slope in them
                values["log_probs"].requires_grad_()
            if slopes is None:
                losses = self._losses(values, [self.terms[index]])
                loss, size = loss + losses.sum().item(), size + losses.abs().sum().item()
                total = losses.sum()
            else:
                total = torch.stack([(values[name] * slope).sum() for name, slope in slopes[index].items()]).sum()
            if router_loss is not None:
                loss, size = loss + router_loss.item(), size + router_loss.item()
                total = total + router_loss.to(total)
            if total.requires_grad:
                total.backward()
            logprobs_N.append(logprobs)
            own_slopes.append(self._own_slopes(index, values["log_probs"].grad))
        found = [each for each in own_slopes if each is not None]
        return FlatRun(loss, size, logprobs_N, found if len(found) == len(self.items) else None, reaches)

    def warm_up(self, model: nn.Module, device: torch.device) -> None:
        """Forward and backward of the shortest trajectory, and of the shortest with an image, so that the timed run
        does not load kernels."""
        lengths = [(bool(item.images), len(item), index) for index, item in enumerate(self.items)]
        for sees in {each for each, _, _ in lengths}:
            *_, shortest = min(each for each in lengths if each[0] == sees)
            total = self._values(model, device, shortest)[0]["log_probs"].sum()
            if total.requires_grad:  # it reaches something that is trained
                total.backward()

    def _rows(self, what: str, model: nn.Module) -> Iterator[int]:
        """The indices of the trajectories, each with its recorded experts in place until the next is asked for; tells
        whoever listens how many tokens are done.
        """
        done, total = 0, sum(map(len, self.items))
        for index, item in enumerate(self.items):
            tell_progress(what, done, total)
            has_experts = item.routed_experts is not None
            with features.routing.replayed(split_model(model), item) if has_experts else nullcontext():
                yield index
            done += len(item)
        tell_progress(what, done, total)

    def _values(
        self, model: nn.Module, device: torch.device, index: int, routers: Any = None
    ) -> tuple[Values, torch.Tensor, torch.Tensor | None]:
        """[P] values of a trajectory's terms by name, the [L - 1] log-probs of its own tokens without a graph, and its
        part of the losses on routers."""
        logits_LV, lse_L, ids, router_logits = flat_logits(
            model, self.items[index], self.processor, device, self.temperature, with_routers=routers is not None
        )
        logprobs = (logits_LV.detach().gather(1, ids[1:, None])[:, 0] - lse_L.detach()).double().cpu()
        row = torch.tensor(self.terms[index].row, device=device)
        token = torch.tensor(self.terms[index].token, dtype=torch.long, device=device)
        values = {"log_probs": logits_LV[row, token] - lse_L[row]}
        if isinstance(self.objective, Objective) and "entropy" in self.objective.outputs:
            probabilities = torch.exp(logits_LV - lse_L[:, None])
            values["entropy"] = (lse_L - (probabilities * logits_LV).sum(-1))[row]
        return values, logprobs, None if routers is None else routers.part(model, self.items[index], router_logits)

    def _own_slopes(self, index: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        """[L - 1] gradients by a trajectory's own log-probs; None where the loss depends on more than these.

        grad: [P] by those of its terms.
        """
        terms, ids = self.terms[index], self.items[index].token_ids
        has_more = isinstance(self.objective, Objective) and tuple(self.objective.outputs) != ("log_probs",)
        if grad is None or has_more or self.routers is not None or (terms.token != ids[terms.row + 1]).any():
            return None
        own = torch.zeros(len(ids) - 1, dtype=grad.dtype, device=grad.device)
        return own.index_add_(0, torch.tensor(terms.row, device=grad.device), grad)

    def _losses(self, values: Values, terms: Sequence[FlatTerms]) -> torch.Tensor:
        """The objective's token losses, by its denominator."""
        assert isinstance(self.objective, Objective)
        like, streams = values["log_probs"], {}
        for name in terms[0].streams:
            stream = np.concatenate([term.streams[name] for term in terms])
            dtype = like.dtype if stream.dtype.kind == "f" else torch.long
            streams[name] = torch.tensor(stream, dtype=dtype, device=like.device)
        return self.objective.token_losses(values, streams) / self.denominator

    def _slopes(self, values: list[Values]) -> tuple[float, float, list[Values]]:
        """The loss, its size, and its gradients by every trajectory's values."""
        leaves = [{name: value.detach().requires_grad_() for name, value in each.items()} for each in values]
        if isinstance(self.objective, Objective):
            joined = {name: torch.cat([each[name] for each in leaves]) for name in leaves[0]}
            losses = self._losses(joined, self.terms)
            loss, size = losses.sum(), losses.abs().sum()
        else:
            loss = self.objective([each["log_probs"] for each in leaves])
            size = loss.abs()
        flat = [leaf for each in leaves for leaf in each.values()]
        slopes = iter(torch.autograd.grad(loss, flat, materialize_grads=True))
        return loss.item(), size.item(), [{name: next(slopes) for name in each} for each in leaves]


def flat_logits(
    model: nn.Module,
    item: Trajectory,
    processor: object,
    device: torch.device,
    temperature: float = 1.0,
    *,
    with_routers: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
    """[L - 1, V] logits by the model's own forward, in float32 or wider, log-sum-exps, the tokens, and those of the
    routers of each layer, where asked for."""
    ids = torch.tensor(item.token_ids, dtype=torch.long, device=device)
    seen = features.images.flat_images(model, processor, item, ids) if item.images else {}
    asked = {"output_router_logits": True} if with_routers else {}
    output = model(input_ids=ids[None], use_cache=False, **asked, **seen)
    logits_LV = output.logits[0, :-1]
    logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32)) / temperature
    # Not log_softmax: on CPU in float32 it is biased for large vocabularies (torch 2.13: 5e-6 at 150,000 tokens,
    # where logsumexp is at 4e-8), which alone put SmolLM2's flat gradient 5e-5 away from float64, 3e-6 without it.
    return logits_LV, torch.logsumexp(logits_LV, dim=-1), ids, output.router_logits if with_routers else ()


def every_token(item: Trajectory, streams: dict[str, np.ndarray]) -> FlatTerms:
    """A term for each token of a trajectory but the first. streams: [L - 1] each."""
    return FlatTerms(np.arange(len(item) - 1), item.token_ids[1:], streams)
