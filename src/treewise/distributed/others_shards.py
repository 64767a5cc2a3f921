"""Models that another program has sharded by FSDP2 (`fully_shard`): walks inside of their own forward and backward.

FSDP2 gathers a module's parameters by hooks on its forward, and again on its backward, which also scatters gradients.
`distributed.fsdp` shards models for walks that are all there is. Here the program's own forward surrounds them: modules
around the decoder are in the middle of theirs, and gradients of a batch that exceeds the budget come inside of the
program's backward, where FSDP2 takes a forward for a recomputation and lets layers stay whole.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from treewise.distributed import ranks
from treewise.errors import UnsupportedModelError
from treewise.nn.wrapped import is_compiled

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext

    class Unit(FSDPModule, nn.Module):
        """A module that FSDP2 gathers."""


def shards_of(model: nn.Module, decoder: nn.Module) -> "OthersShards | None":
    """The shards of a model; None for a model without any.

    Raises:
        UnsupportedModelError: FSDP1, or parameters that are not divided over all processes alone.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedModelError(
                f"the model is sharded by FSDP1 ({type(module).__name__}), whose wrappers stand between the layers; "
                "use FSDP2: fully_shard, or fsdp_version 2 (`version` in transformers' fsdp_config)."
            )
    units = [module for module in model.modules() if _is_unit(module)]
    if not units:
        return None
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            _refuse_mesh(name, parameter)
    return OthersShards(units, decoder)


def _is_unit(module: nn.Module) -> "TypeGuard[Unit]":
    return isinstance(module, FSDPModule)


def _refuse_mesh(name: str, parameter: DTensor) -> None:
    sizes, places = tuple(parameter.device_mesh.shape), parameter.placements
    if parameter.device_mesh.size() != ranks.count():
        raise UnsupportedModelError(
            f"{name} is sharded over {parameter.device_mesh.size()} of {ranks.count()} processes (a mesh of {sizes}), "
            "which then do not run the same passes; shard the model over all of them."
        )
    if sum(not each.is_replicate() for each in places) > 1:
        raise UnsupportedModelError(
            f"{name} is divided along {len(places)} axes ({', '.join(map(str, places))} on a mesh of {sizes}): "
            "share_prefixes follows FSDP2 alone. Leave tensor, expert and sequence parallelism out, or train the model "
            "by TreeTrainer (tp_size, ep_size)."
        )


class OthersShards:
    """The modules of a model that FSDP2 gathers as units.

    decoder: whose forward is called inside of the model's.
    """

    def __init__(self, units: "list[Unit]", decoder: nn.Module) -> None:
        inside = {id(module) for module in decoder.modules() if module is not decoder}
        self._decoder, self.units = decoder, units
        self.layers = [unit for unit in units if id(unit) in inside]
        self.around = [unit for unit in units if id(unit) not in inside]

    @property
    def root(self) -> "Unit | None":
        """The outermost unit that calls the decoder; None where layers alone are units."""
        return next((unit for unit in self.around if any(each is self._decoder for each in unit.modules())), None)

    def divide(self) -> None:
        """Leaves nothing whole, as a forward without a backward may."""
        for unit in self.units:
            unit.reshard()

    @property
    def device(self) -> torch.device:
        """Where the processes add numbers up."""
        return torch.device(self.units[0]._get_fsdp_state()._device)  # noqa: SLF001

    @property
    def dtypes(self) -> set[torch.dtype]:
        """In which units compute, where not in the dtype of their parameters."""
        policies = [unit._get_fsdp_state()._mp_policy for unit in self.units]  # noqa: SLF001
        return {policy.param_dtype for policy in policies if policy.param_dtype is not None}

    @contextmanager
    def ends_whole(self) -> Iterator[None]:
        """Within a forward of the model: inside, the modules around the layers are whole, and are called without hooks
        of FSDP2, which a second forward would have free them in the middle of the first one."""
        with ExitStack() as ending:
            for unit in self.layers:  # a probe puts back what it took, where layers may have stayed whole since
                ending.callback(unit.reshard)
            for unit in self.around:
                unit.unshard()
                if not any(module is self._decoder for module in unit.modules()):
                    ending.callback(unit.reshard)  # a head, which is not in the middle of its forward
                ending.enter_context(_without_own_hooks(unit))
            yield

    @contextmanager
    def within_backward(self, walked: nn.Module) -> Iterator[None]:
        """Within a backward of the model: inside, walks gather layers as outside of any backward.

        walked: what walks call, the decoder or a part of it.
        """
        # One that has a head in it, too, is in the middle of its own backward.
        others = [unit._get_fsdp_state() for unit in self.around]  # noqa: SLF001
        states = {id(state): state for state in (unit._get_fsdp_state() for unit in self.layers)}.values()  # noqa: SLF001
        # One that no forward has reached has nothing of what units share.
        own = [each for each in states if each not in others and hasattr(each._comm_ctx, "post_forward_order")]  # noqa: SLF001
        with ExitStack() as ending:
            for shared in {id(state._state_ctx): state._state_ctx for state in own}.values():  # noqa: SLF001
                ending.enter_context(_ended_by(shared, [state for state in own if state._state_ctx is shared]))  # noqa: SLF001
            ending.enter_context(self._freed_after_forward(walked, own))
            yield

    @contextmanager
    def _freed_after_forward(self, walked: nn.Module, states: "list[FSDPState]") -> Iterator[None]:
        """Inside, a layer is whole during its own forward and backward alone; a recomputation is in the latter."""
        units = [unit for unit in self.layers if unit._get_fsdp_state() in states]  # noqa: SLF001
        if is_compiled(walked):  # hooks would have layers compiled once more
            yield
            return
        is_forward = False

        def begin(*_: object) -> None:
            nonlocal is_forward
            is_forward = True

        def end(*_: object) -> None:
            nonlocal is_forward
            is_forward = False

        def free(unit: "Unit", *_: object) -> None:
            if is_forward:
                unit.reshard()

        hooks = [walked.register_forward_pre_hook(begin), walked.register_forward_hook(end)]
        hooks += [unit.register_forward_hook(free) for unit in units]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def _ended_by(shared: "FSDPStateContext", states: "list[FSDPState]") -> Iterator[None]:
    """Inside, a backward ends with some units alone, as if they were all; that around it ends with the others.

    What it did to these units is ended first: those of a later call are through, as autograd takes later calls first.

    shared: what all units under one root share.
    """
    order = states[0]._comm_ctx.post_forward_order  # noqa: SLF001
    before = shared.all_states, shared.post_backward_final_callback_queued, [*order]
    shared.all_states = states
    states[0]._root_post_backward_final_callback()  # noqa: SLF001
    shared.post_backward_final_callback_queued = False
    try:
        yield
    finally:
        shared.all_states, shared.post_backward_final_callback_queued, order[:] = before


@contextmanager
def _without_own_hooks(unit: "Unit") -> Iterator[None]:
    """Inside, FSDP2's hooks on a module's forward do not run, but that tensors are cast as by these; others do."""
    state, names = unit._get_fsdp_state(), ("_forward_pre_hooks", "_forward_hooks")  # noqa: SLF001
    before = {name: vars(unit)[name] for name in names}
    for name, hooks in before.items():
        vars(unit)[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_of(hook, state))
    policy = state._mp_policy  # noqa: SLF001

    def cast(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        is_float = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in args]
        return tuple(each.to(policy.param_dtype) if yes else each for each, yes in zip(args, is_float, strict=True))

    casts = policy.param_dtype is not None and policy.cast_forward_inputs
    hook = unit.register_forward_pre_hook(cast) if casts else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        vars(unit).update(before)


def _is_of(hook: object, state: object) -> bool:
    while hook is not None:
        if getattr(hook, "__self__", None) is state:
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False
