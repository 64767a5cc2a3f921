"""Routing replay: a mixture of experts trains through the experts that its sampler chose, and samplers record them.

A sampler in another precision, with other kernels or older weights chooses other experts than the trainer for some
tokens, and then the trainer's log-prob is that of another network (Ma et al. 2025, Stabilizing MoE RL by aligning
training and inference routers, arXiv:2510.11370). Here the recorded experts are taken, and their weights are computed
from the live logits, so routers get their gradient.

How a router computes weights differs by family: softmax before or after the choice, a sigmoid with a bias for the
choice alone, groups of experts first. All choose by `topk`, of which the last is over the experts. So the router's own
forward runs, and within it that `topk` returns the recorded experts with the values at them. Where groups are chosen
before, those of the recorded experts are. A router that chooses in another way is refused by its class.

Letters: T tokens of a micro-batch, L layers with a router, E experts, k of them chosen, G groups.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from treewise.errors import DataError, UnsupportedModelError, num
from treewise.nn.decoder import SUPPORTED_MODELS, DecoderAndHead
from treewise.nn.guest import Guest, RunningMicroBatch
from treewise.nn.lending import lend_to, lent, replace_forward
from treewise.nn.platform.tensors import to_device
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

_WAY_OUT = f"so the experts of a sampler cannot be replayed; set routing_replay=off. {SUPPORTED_MODELS}"


# -- routers of a model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Router:
    """A router of a decoder. layer: of the decoder's layers, counted from 0. logits: where its output holds them."""

    path: str
    module: nn.Module
    layer: int
    logits: int


def routers_of(decoder: nn.Module) -> list[Router]:
    """The routers of a decoder, in the order of their layers; none in a dense model."""
    kinds: dict[Any, int] = {}
    for part in decoder.modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}) if isinstance(part, PreTrainedModel) else {}
        found = recorded.get("router_logits", ())
        for each in found if isinstance(found, list | tuple) else [found]:
            kinds[getattr(each, "target_class", each)] = getattr(each, "index", 0)
    return [
        Router(path, module, int(found.group(1)), kinds[type(module)])
        for path, module in decoder.named_modules()
        if type(module) in kinds and (found := re.search(r"(?:^|\.)(\d+)\.", path))
    ]


def install(decoder: nn.Module) -> list[Router]:
    """Lets the routers of a decoder take recorded experts, and record them; a second call changes nothing.

    Raises:
        UnsupportedModelError: no router, or one whose forward has been replaced already.
    """
    routers = routers_of(decoder)
    if not routers:
        raise UnsupportedModelError(f"{type(decoder).__name__} has no router that transformers names, {_WAY_OUT}")
    modules = dict(decoder.named_modules())
    for number, router in enumerate(routers):
        if any(name.rpartition(".")[2] == "experts" for name, _ in router.module.named_modules()):
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
    with heard(decoder):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=next(decoder.parameters()).device), use_cache=False)
        for router in routers_of(decoder):
            if "_treewise_choice" not in vars(router.module):
                raise _not_called(router)
    return [_sizes(router, vars(router.module)["_treewise_choice"]) for router in routers_of(decoder)]


def _sizes(router: Router, choice: "Choice") -> RouterSizes:
    return RouterSizes(router.layer, choice.num_experts, choice.num_chosen, choice.num_groups, choice.num_chosen_groups)


def _not_called(router: Router) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{router.path} ({type(router.module).__name__}) is not called by its layer (use_kernels=True, or another "
        f"forward around it?), {_WAY_OUT}"
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
    module: nn.Module, routes: Any, is_again: bool, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    number, router = vars(module)["_treewise_router"]
    choice = _choice_of(router, args, kwargs)
    with _InTopk(choice, lambda function, call: routes.choose(number, router, choice, function, call, is_again)):
        return type(module).forward(module, *args, **kwargs)


# -- the choice within a router's forward -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """How a router chooses. num_calls: of `topk` in its forward; the last is over `num_experts`, of which it chooses
    `num_chosen`. groups: the call that chooses `num_chosen_groups` of `num_groups` before; -1: none does."""

    num_calls: int
    num_experts: int
    num_chosen: int
    groups: int = -1
    num_groups: int = 1
    num_chosen_groups: int = 1


class _InTopk(TorchFunctionMode):
    """Within, the calls of `topk` by which a router chooses go through `choose`; without one all are listed."""

    FUNCTIONS: ClassVar = (torch.topk, torch.Tensor.topk)

    def __init__(self, choice: Choice | None, choose: Any = None) -> None:
        super().__init__()
        self._choice, self._choose = choice, choose
        self.calls: list[tuple[tuple[int, ...], int]] = []  # shape and k

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in self.FUNCTIONS:
            return function(*args, **kwargs)
        number = len(self.calls)
        self.calls.append((tuple(args[0].shape), int(args[1] if len(args) > 1 else kwargs["k"])))
        if self._choice is not None and number in (self._choice.groups, self._choice.num_calls - 1):
            return self._choose(lambda scores: function(scores, *args[1:], **kwargs), (number, args[0]))
        return function(*args, **kwargs)


def _choice_of(router: Router, args: tuple[object, ...], kwargs: dict[str, object]) -> Choice:
    """How a router chooses, from a first forward that is only listened to.

    Raises:
        UnsupportedModelError: not by a last `topk` over as many as its logits are.
    """
    known: Choice | None = vars(router.module).get("_treewise_choice")
    if known is not None:
        return known
    with torch.no_grad(), _InTopk(None) as heard:
        output: Any = type(router.module).forward(router.module, *args, **kwargs)
    logits = (output if isinstance(output, tuple) else (output,))[router.logits]
    num_experts, num_tokens = logits.shape[-1], logits.numel() // logits.shape[-1]
    if not heard.calls or heard.calls[-1][0][-1] != num_experts or _rows(heard.calls[-1][0]) != num_tokens:
        raise UnsupportedModelError(
            f"{router.path} ({type(router.module).__name__}) chooses experts in another way than by a topk over its "
            f"{num_experts} logits, {_WAY_OUT}"
        )
    groups = [
        index
        for index, (shape, _) in enumerate(heard.calls[:-1])
        if _rows(shape) == num_tokens and shape[-1] < num_experts and num_experts % shape[-1] == 0
    ]
    choice = Choice(
        num_calls=len(heard.calls),
        num_experts=num_experts,
        num_chosen=heard.calls[-1][1],
        groups=groups[-1] if groups else -1,
        num_groups=heard.calls[groups[-1]][0][-1] if groups else 1,
        num_chosen_groups=heard.calls[groups[-1]][1] if groups else 1,
    )
    router.module.__dict__["_treewise_choice"] = choice
    return choice


def _rows(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape[:-1]))


# -- recording --------------------------------------------------------------------------------------------------------


class HeardRoutes:
    """The experts that a model's routers choose, forward by forward."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers
        self._chosen: list[list[torch.Tensor]] = [[] for _ in routers]

    def choose(self, number: int, _router: Router, choice: Choice, topk: Any, call: Any, _is_again: bool) -> Any:
        """The router's own choice, which is kept."""
        index, scores = call
        found = topk(scores)
        if index == choice.num_calls - 1:
            self._chosen[number].append(found.indices.detach().reshape(-1, found.indices.shape[-1]).to(torch.int16))
        return found

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
        self._has_other_groups: Any = None  # [T] bool, of the router that runs: it would have left out a recorded group

    def choose(self, number: int, router: Router, choice: Choice, topk: Any, call: Any, is_again: bool) -> Any:
        """Recorded experts in place of a router's choice, with the values of its scores there."""
        index, scores = call
        if self._on_device is None:
            self._replay.check(number, router, choice)
            self._on_device = to_device(self._experts, scores.device, torch.long)
            self._otherwise = torch.zeros(self._experts.shape[1::-1], dtype=torch.bool, device=scores.device)
        experts_Tk = self._on_device[:, number]
        is_known_T = experts_Tk[:, :1] >= 0
        if index == choice.groups:
            group_Tk = experts_Tk.clamp(min=0) // (choice.num_experts // choice.num_groups)
            is_needed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, group_Tk, value=True) & is_known_T
            self._has_other_groups = is_needed.scatter(-1, topk(scores).indices, value=False).any(-1)
            return topk(scores.masked_fill(is_needed, float("inf")))
        found = topk(scores)
        own_Tk = found.indices.reshape(experts_Tk.shape)
        if not is_again:
            self._replay.check(number, router, choice)
            is_other_T = (own_Tk.sort(-1).values != experts_Tk).any(-1) & is_known_T[:, 0]
            if choice.groups >= 0:  # of which `found` is a choice within the recorded ones
                is_other_T = is_other_T | self._has_other_groups
            assert self._otherwise is not None
            self._otherwise[number] = is_other_T
        chosen = torch.where(is_known_T, experts_Tk, own_Tk).reshape(found.indices.shape)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

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
        self._is_checked: set[int] = set()

    def enter(self, run: RunningMicroBatch) -> None:
        """Before the first forward, for the layout that other guests have left."""
        if run.routes is None:
            run.routes = self.of_positions(run.layout.positions)
            if run.part is None or run.part.num_own:  # else the rank has none of its tokens, and computes another's
                self._runs[run.index] = run.routes

    def of_positions(self, positions: np.ndarray) -> RecordedRoutes:
        """Those of some tree positions ([T] int64)."""
        return RecordedRoutes(self, self._experts[positions][:, self._columns].astype(np.int64))

    def check(self, number: int, router: Router, choice: Choice) -> None:
        """Raises `DataError` where a router cannot have chosen what was recorded for it."""
        if number in self._is_checked:
            return
        self._is_checked.add(number)
        _check_column(self._experts[:, self._columns[number]], _sizes(router, choice), self._location)

    def _location(self, token: int) -> str:
        sources = (self._forest.source_of(index) for index, path in enumerate(self._forest.paths) if token in path)
        return f"{next(sources, 'a tree')}: routed_experts[{self._forest.depth[token]}]"

    def refuse_unused(self) -> None:
        """After a forward: raises `UnsupportedModelError` where a router was not called, so nothing was replayed."""
        for number, router in enumerate(self._routers):
            if number not in self._is_checked:
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
