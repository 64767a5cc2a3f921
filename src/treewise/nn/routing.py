"""Routing replay: a mixture of experts trains through the experts that its sampler chose, and samplers record them.

A sampler in another precision, with other kernels or older weights chooses other experts than the trainer for some
tokens, and then the trainer's log-prob is that of another network (Ma et al. 2025, Stabilizing MoE RL by aligning
training and inference routers, arXiv:2510.11370). Here the recorded experts are taken, and their weights are computed
from the live logits, so routers get their gradient.

How a router computes weights differs by family: softmax before or after the choice, a sigmoid with a bias for the
choice alone, groups of experts first. All choose by `topk`, of which the last is over the experts. So the router's own
forward runs, and within it a `topk` over as many as it has experts returns the recorded ones with the values at them.
Where groups are chosen before, those of the recorded experts are. A router that chooses in another way is refused by
its class. How it chooses is read in that forward, of which there is no other before: what a model keeps (adapters keep
a weight, checkpoints count tensors) would be that of a forward without a graph.

Letters: T tokens of a micro-batch, L layers with a router, E experts, k of them chosen, G groups.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from treewise.errors import DataError, UnsupportedModelError, num
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.guest import Guest, RunningMicroBatch
from treewise.nn.lending import lend_to, lent, replace_forward
from treewise.nn.platform.releases import is_before
from treewise.nn.platform.tensors import to_device
from treewise.nn.wrapped import SUPPORTED_MODELS, named_modules
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

_WAY_OUT = f"so the experts of a sampler cannot be replayed; set routing_replay=off. {SUPPORTED_MODELS}"


# -- routers of a model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Router:
    """A router of a decoder. layer: of the decoder's layers, counted from 0. num_experts: among which it chooses, the
    rows of its projection; 0: it has none."""

    path: str
    module: nn.Module
    layer: int
    num_experts: int


def routers_of(decoder: nn.Module) -> list[Router]:
    """The routers of a decoder, in the order of their layers; none in a dense model."""
    kinds: set[Any] = set()
    for part in decoder.modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}) if isinstance(part, PreTrainedModel) else {}
        found = recorded.get("router_logits", ())
        listed = found if isinstance(found, list | tuple) else [found]
        kinds.update(getattr(each, "target_class", each) for each in listed)
    return [
        Router(path, module, int(found.group(1)), _num_experts(module))
        for path, module in named_modules(decoder)
        if type(module) in kinds and (found := re.search(r"(?:^|\.)(\d+)\.", path))
    ]


def _num_experts(router: nn.Module) -> int:
    for part in router.modules():  # of an adapted projection the base is the first
        if isinstance(part, nn.Linear):  # its weight may be packed
            return part.out_features
        for weight in part.parameters(recurse=False):
            if weight.dim() == 2:
                return weight.shape[0]
    return 0


def install(decoder: nn.Module) -> list[Router]:
    """Lets the routers of a decoder take recorded experts, and record them; a second call changes nothing.

    Raises:
        UnsupportedModelError: no router, or one whose forward has been replaced already.
    """
    routers = routers_of(decoder)
    if not routers:
        later = " (5.19 names those of all mixtures)" if is_before("5.19") else ""
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no router that transformers names{later}, {_WAY_OUT}"
        )
    modules = dict(named_modules(decoder))
    for number, router in enumerate(routers):
        if any(name.rpartition(".")[2] == "experts" for name, _ in named_modules(router.module)):
            raise UnsupportedModelError(
                f"{router.path} ({type(router.module).__name__}) chooses experts of several kinds, {_WAY_OUT}"
            )
        router.module.__dict__["_treewise_router"] = number, router
        replace_forward(router.module, router.path, forward, _WAY_OUT)
        prefix = router.path.split(f".{router.layer}.")[0]
        lend_to(modules[f"{prefix}.{router.layer}"], router.module)
    return routers


@dataclass(frozen=True, slots=True)
class RouterSizes:
    """layer: see `Router`. num_experts: that it has; num_chosen: of them for a token, in at most num_chosen_groups of
    num_groups."""

    layer: int
    num_experts: int
    num_chosen: int
    num_groups: int = 1
    num_chosen_groups: int = 1


@torch.no_grad()
def router_sizes(model: nn.Module, decoder: nn.Module) -> list[RouterSizes]:
    """Those of each router, from a forward of two tokens; none in a dense model.

    Raises:
        UnsupportedModelError: see `install`.
    """
    if not routers_of(decoder):
        return []
    with heard(decoder) as routes:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=next(decoder.parameters()).device), use_cache=False)
        routes.taken(1)
    return list(routes.sizes.values())


def _not_called(router: Router) -> UnsupportedModelError:
    why = "use_kernels=True, or another forward around it?"
    if {"original_module", "modules_to_save"} & set(router.path.split(".")):
        why = "modules_to_save has copies of it, of which one runs; target_parameters adapts a router"
    return UnsupportedModelError(
        f"{router.path} ({type(router.module).__name__}) is not called by its layer ({why}), {_WAY_OUT}"
    )


def check_record(experts: np.ndarray, sizes: Sequence[RouterSizes], location: str) -> None:
    """Raises `DataError` for the experts of a row ([n, L, k]) that routers of these sizes cannot have chosen."""
    columns = _columns([size.layer for size in sizes], experts, location)
    for column, each in zip(columns, sizes, strict=True):
        _check_column(experts[:, column], each, lambda token: f"{location}: routed_experts[{token}]")


def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
    """The forward of a router: its own, with the experts that its layer's tree has, or while it is heard."""
    context = lent(self)
    routes = vars(self).get("_treewise_heard") if context is None else context.routes
    if routes is None:
        return type(self).forward(self, *args, **kwargs)
    return _on_routes(self, routes, context is not None and context.is_done, args, kwargs)


@torch.compiler.disable
def _on_routes(
    module: nn.Module,
    routes: "HeardRoutes | RecordedRoutes",
    is_again: bool,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    number, router = vars(module)["_treewise_router"]
    with _InTopk(router, partial(routes.choose, number, router)) as choosing:
        output = type(module).forward(module, *args, **kwargs)
    if not is_again:
        routes.end(number, router, choosing.sizes())
    return output


# -- the choice within a router's forward -----------------------------------------------------------------------------


Chosen = torch.return_types.topk
Topk = Callable[[torch.Tensor], Chosen]


class _InTopk(TorchFunctionMode):
    """Within a router's forward, the calls of `topk` by which it chooses go through `choose`."""

    FUNCTIONS: ClassVar = (torch.topk, torch.Tensor.topk)

    def __init__(self, router: Router, choose: Callable[[torch.Tensor, Topk, "_InTopk"], Chosen]) -> None:
        super().__init__()
        self._router, self._choose = router, choose
        self._calls: list[tuple[tuple[int, ...], int]] = []  # shape and k

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in self.FUNCTIONS:
            return function(*args, **kwargs)
        scores: torch.Tensor = args[0]
        rest: tuple[object, ...] = args[1:]
        self._calls.append((tuple(scores.shape), int(args[1] if rest else kwargs["k"])))
        return self._choose(scores, lambda given: function(given, *rest, **kwargs), self)

    def sizes(self) -> RouterSizes:
        """How the router has chosen so far.

        Raises:
            UnsupportedModelError: not by a last `topk` over all experts.
        """
        router, num_experts = self._router, self._router.num_experts
        if not self._calls or self._calls[-1][0][-1] != num_experts:
            raise UnsupportedModelError(
                f"{router.path} ({type(router.module).__name__}) chooses experts in another way than by a topk over "
                f"its {num_experts} logits, {_WAY_OUT}"
            )
        (shape, num_chosen), before = self._calls[-1], self._calls[:-1]
        groups = [(each[-1], k) for each, k in before if _are_groups(each, num_experts, _rows(shape))]
        num_groups, num_chosen_groups = groups[-1] if groups else (1, 1)
        return RouterSizes(router.layer, num_experts, num_chosen, num_groups, num_chosen_groups)


def _are_groups(shape: Sequence[int], num_experts: int, num_tokens: int) -> bool:
    """Whether scores of a shape are those of a token's groups."""
    return _rows(shape) == num_tokens and shape[-1] < num_experts and num_experts % shape[-1] == 0


def _rows(shape: Sequence[int]) -> int:
    return int(np.prod(shape[:-1]))


# -- recording --------------------------------------------------------------------------------------------------------


class HeardRoutes:
    """The experts that a model's routers choose, forward by forward."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers
        self._chosen: list[list[torch.Tensor]] = [[] for _ in routers]
        self._last: torch.Tensor | None = None  # indices of the last topk of the router that runs
        self.sizes: dict[int, RouterSizes] = {}  # by number of the router

    def choose(self, _number: int, _router: Router, scores: torch.Tensor, topk: Topk, _choosing: _InTopk) -> Chosen:
        """The router's own choice, of which the last is kept."""
        found = topk(scores)
        self._last = found.indices.detach()
        return found

    def end(self, number: int, _router: Router, sizes: RouterSizes) -> None:
        """After the router's forward."""
        self.sizes[number] = sizes
        assert self._last is not None, "a router chooses before it ends"
        self._chosen[number].append(self._last.reshape(-1, sizes.num_chosen).to(torch.int16))

    def taken(self, num_rows: int) -> np.ndarray:
        """[R, tokens, L, k] int16, of a forward over `num_rows` rows since the last call.

        Raises:
            UnsupportedModelError: a router that was not called.
        """
        for router, each in zip(self._routers, self._chosen, strict=True):
            if not each:
                raise _not_called(router)
        whole: np.ndarray = torch.stack([torch.cat(each) for each in self._chosen], dim=1).cpu().numpy()
        for each in self._chosen:
            each.clear()
        return whole.reshape(num_rows, -1, *whole.shape[1:])


@contextmanager
def heard(model: nn.Module) -> Iterator[HeardRoutes]:
    """Within, forwards without a tree record the experts that they choose. Raises what `install` raises."""
    routers = install(model)
    routes = HeardRoutes(routers)
    with _listening(routers, routes):
        yield routes


@contextmanager
def replayed(lm: DecoderAndHead, trajectory: Trajectory) -> Iterator[None]:
    """Within, forwards of this one row without a tree take its recorded experts, as flat training with a replay would.
    Raises what `Replay` raises."""
    forest = Forest.from_trajectories([trajectory])
    replay = Replay(lm, forest)
    with _listening(install(lm.decoder), replay.of_positions(np.arange(forest.num_tokens))):
        yield
    replay.refuse_unused()


@contextmanager
def _listening(routers: Sequence[Router], routes: Any) -> Iterator[None]:
    for router in routers:
        router.module.__dict__["_treewise_heard"] = routes
    try:
        yield
    finally:
        for router in routers:
            del router.module.__dict__["_treewise_heard"]


# -- replay -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """num_recorded: tree tokens whose experts were recorded. num_otherwise: of these, tokens that some router would
    have sent to other experts. num_choices, num_otherwise_choices: the same of tokens in one layer each."""

    num_recorded: int
    num_otherwise: int
    num_choices: int
    num_otherwise_choices: int


class RecordedRoutes:
    """The recorded experts of one micro-batch. experts: [T, L, k] int64, on the host; -1 where none were recorded."""

    def __init__(self, replay: "Replay", experts: np.ndarray) -> None:
        self._replay, self._experts = replay, experts
        self._on_device: torch.Tensor | None = None
        self._otherwise: torch.Tensor | None = None  # [L, T] bool
        # Of the router that runs, [T] bool: it would have taken other experts, left out a recorded group.
        self._is_other: torch.Tensor | None = None
        self._has_other_groups: torch.Tensor | None = None

    def choose(self, number: int, router: Router, scores: torch.Tensor, topk: Topk, choosing: _InTopk) -> Chosen:
        """Recorded experts in place of a router's choice, with the values of its scores there."""
        if self._on_device is None:
            self._on_device = to_device(self._experts, scores.device, torch.long)
            self._otherwise = torch.zeros(self._experts.shape[1::-1], dtype=torch.bool, device=scores.device)
        experts_Tk = self._on_device[:, number]
        is_known_T, num_experts = experts_Tk[:, :1] >= 0, router.num_experts
        found = topk(scores)
        if _are_groups(scores.shape, num_experts, len(experts_Tk)):
            group_Tk = experts_Tk.clamp(0, num_experts - 1) // (num_experts // scores.shape[-1])
            is_needed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, group_Tk, value=True) & is_known_T
            self._has_other_groups = is_needed.scatter(-1, found.indices, value=False).any(-1)
            return topk(scores.masked_fill(is_needed, float("inf")))
        if scores.shape[-1] != num_experts or found.indices.numel() != experts_Tk.numel():
            return found
        self._replay.check(number, choosing.sizes())
        own_Tk = found.indices.reshape(experts_Tk.shape)
        self._is_other = (own_Tk.sort(-1).values != experts_Tk).any(-1) & is_known_T[:, 0]
        chosen = torch.where(is_known_T, experts_Tk, own_Tk).reshape(found.indices.shape)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def end(self, number: int, _router: Router, sizes: RouterSizes) -> None:
        """After the router's first forward."""
        self._replay.check(number, sizes)
        is_other_T = self._is_other
        assert is_other_T is not None, "a router chooses before it ends"
        if (
            sizes.num_groups > 1 and self._has_other_groups is not None
        ):  # of which the last choice is one within the recorded ones
            is_other_T = is_other_T | self._has_other_groups
        assert self._otherwise is not None
        self._otherwise[number] = is_other_T

    def otherwise(self) -> torch.Tensor:
        """[2] int64: tokens that any router would have routed otherwise, and such choices."""
        assert self._otherwise is not None
        return torch.stack([self._otherwise.any(0).sum(), self._otherwise.sum()])


class Replay(Guest):
    """Replays the recorded experts of a forest in a walk.

    Raises:
        DataError: experts that were recorded by another model.
        UnsupportedModelError: see `install`.
    """

    def __init__(self, lm: DecoderAndHead, forest: Forest) -> None:
        self._forest, self._device, self._routers = forest, lm.device, install(lm.decoder)
        self._experts = forest.routed_experts  # [tree tokens, layers of the record, k]
        self._columns = _columns([router.layer for router in self._routers], self._experts, forest.source_of(0))
        self._runs: dict[int, RecordedRoutes] = {}
        self._checked: dict[int, RouterSizes] = {}  # by number of the router

    def enter(self, run: RunningMicroBatch) -> None:
        """Before the first forward, for the layout that other guests have left."""
        if run.routes is None:
            run.routes = self.of_positions(run.layout.positions)
            if run.part is None or run.part.num_own:  # else the rank has none of its tokens, and computes another's
                self._runs[run.index] = run.routes

    def of_positions(self, positions: np.ndarray) -> RecordedRoutes:
        """Those of some tree positions ([T] int64)."""
        return RecordedRoutes(self, self._experts[positions][:, self._columns].astype(np.int64))

    def check(self, number: int, sizes: RouterSizes) -> None:
        """Raises `DataError` where a router of these sizes cannot have chosen what was recorded for it."""
        if self._checked.get(number) != sizes:
            _check_column(self._experts[:, self._columns[number]], sizes, self._location)
            self._checked[number] = sizes

    def _location(self, token: int) -> str:
        sources = (self._forest.source_of(index) for index, path in enumerate(self._forest.paths) if token in path)
        return f"{next(sources, 'a tree')}: routed_experts[{self._forest.depth[token]}]"

    def refuse_unused(self) -> None:
        """After a forward: raises `UnsupportedModelError` where a router was not called, so nothing was replayed."""
        for number, router in enumerate(self._routers):
            if number not in self._checked:
                raise _not_called(router)

    def replayed(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> ReplayReport:
        """Of the last walk; each rank has counted the tokens that it computed. Raises what `refuse_unused` raises."""
        if self._runs:  # else this rank had no micro-batch
            self.refuse_unused()
        is_known = self._experts[:, self._columns, 0] >= 0
        none = torch.zeros(2, dtype=torch.long, device=self._device)
        otherwise = add_up(sum((each.otherwise() for each in self._runs.values()), none)).tolist()
        return ReplayReport(int(is_known.any(1).sum()), otherwise[0], int(is_known.sum()), otherwise[1])


def recorded_choices(lm: DecoderAndHead, forest: Forest) -> np.ndarray:
    """[tree tokens, L, k] int64, what was recorded of each router, -1 where nothing was. Raises as `Replay` does."""
    layers = [each.layer for each in install(lm.decoder)]
    experts = forest.routed_experts
    return experts[:, _columns(layers, experts, forest.source_of(0))].astype(np.int64)


def _columns(columns: list[int], experts: np.ndarray, location: str) -> list[int]:
    """The layer of a record ([n, L, k]) that each router's experts stand in: records have a layer for each router, or
    for each layer of the model. columns: the layer of each router."""
    num_recorded, last = experts.shape[1], max(columns)
    if num_recorded == len(columns):
        return list(range(len(columns)))
    without = [layer for layer in range(num_recorded) if layer not in columns]
    if num_recorded <= last or (experts[:, without] > 0).any():  # of one expert a layer, 0 may stand for none
        raise DataError(
            f"{location}: routed_experts of {num(num_recorded, 'layer')}, but the model has "
            f"{num(len(columns), 'router')} in {num(last + 1, 'layer')}; they were recorded by another model."
        )
    return columns


def _check_column(experts_Tk: np.ndarray, sizes: RouterSizes, location_of: Callable[[int], str]) -> None:
    """Raises `DataError` where a router of some sizes cannot have chosen what was recorded for it. location_of: a
    token."""
    if experts_Tk.shape[1] != sizes.num_chosen:
        raise DataError(
            f"{location_of(0).partition('[')[0]} of {num(experts_Tk.shape[1], 'expert')} a token, but layer "
            f"{sizes.layer} of the model chooses {sizes.num_chosen}; they were recorded by another model."
        )
    outside = np.flatnonzero((experts_Tk >= sizes.num_experts).any(1))
    if len(outside):
        token = int(outside[0])
        raise DataError(
            f"{location_of(token)} layer {sizes.layer}: expert {experts_Tk[token].max()}, but the model has "
            f"{sizes.num_experts} there; another model recorded them."
        )
    group_Tk = np.sort(experts_Tk // (sizes.num_experts // sizes.num_groups), axis=1)
    num_groups_T = 1 + (np.diff(group_Tk, axis=1) != 0).sum(1)
    outside = np.flatnonzero(num_groups_T > sizes.num_chosen_groups)
    if len(outside):
        token = int(outside[0])
        raise DataError(
            f"{location_of(token)} layer {sizes.layer}: experts {experts_Tk[token].tolist()} of "
            f"{num_groups_T[token]} groups, but the model chooses {sizes.num_chosen_groups} of {sizes.num_groups} "
            "there; another model recorded them."
        )
