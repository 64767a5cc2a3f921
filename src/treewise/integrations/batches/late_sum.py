"""Windows under DistributedDataParallel: gradients of all processes are added up once, after the window's end.

DDP adds gradients up while a backward computes them, and in a window it computes none. So the last forward of a step is
one after which nothing is added up, as within `no_sync`; and once the window has ended, DDP sees a backward whose
gradients are those that are there. Buckets, hooks on them and unused parameters stay DDP's own, so that a process whose
calls share nothing, and add up in their last backward, meets the others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from treewise.base.shapes import Context
from treewise.errors import ConfigError
from treewise.nn.gradients import have_hooks

Box = dict[int, Tensor]


class LateSum:
    """Of one model under DDP. is_due: whether the present forward's gradients are added up later."""

    def __init__(self, parallel: DistributedDataParallel, is_due: Callable[[], bool]) -> None:
        self.parallel, self._is_due = parallel, is_due
        self._is_owed = self._is_held_back = False
        self._hooks = [
            parallel.register_forward_pre_hook(self._before),
            parallel.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """From now on DDP adds up in each backward."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, parallel: Any, _: Any) -> None:
        self._is_held_back = torch.is_grad_enabled() and parallel.require_backward_grad_sync and self._is_due()
        if self._is_held_back:
            parallel.require_backward_grad_sync, self._is_owed = False, True

    def _after(self, parallel: Any, _: Any, __: Any) -> None:
        """Also after an error. Buffers are sent before the next forward on all processes or on none."""
        if self._is_held_back:
            parallel.require_backward_grad_sync = parallel.require_forward_param_sync = True
            self._is_held_back = False

    def add_up(self) -> None:
        """Replaces the gradients by their means over all processes, if that is due."""
        if not self._is_owed:
            return
        self._is_owed = False
        parallel = self.parallel
        named = parallel.module.named_parameters()
        trained = [each for name, each in named if each.requires_grad and name not in parallel.parameters_to_ignore]
        box = {index: each.grad for index, each in enumerate(trained) if each.grad is not None}
        # DDP waits for all of them; where some may be unused, for one, or else the others wait for this process.
        num_awaited = int(not box) if parallel.find_unused_parameters else len(trained)
        for index in range(num_awaited):
            if index not in box:
                box[index] = torch.zeros_like(trained[index])
        with torch.enable_grad():
            total = torch.stack([_Given.apply(trained[index], box, index) for index in box]).sum()
        for each in trained:
            each.grad = None
        parallel.reducer.prepare_for_backward([total] if parallel.find_unused_parameters else [])
        total.backward()


@contextmanager
def summed_late(parallel: DistributedDataParallel) -> Iterator[None]:
    """Inside, backwards add nothing up; the end does, unless with an error.

    Raises:
        ConfigError: what `why_not` says.
    """
    if why := why_not(parallel):
        raise ConfigError(f"a window of several processes: {why}. Take it off, or leave the window out.")
    late_sum = LateSum(parallel, lambda: True)
    try:
        yield
        late_sum.add_up()
    finally:
        late_sum.remove()


def why_not(parallel: DistributedDataParallel) -> str | None:
    """Why gradients cannot be added up late; None: they can."""
    if parallel.static_graph or parallel.mixed_precision is not None:
        return "DDP with static_graph or mixed_precision"
    # Processes that have no more rows answer what is added up in a backward, and nothing after it.
    if parallel._join_config.enable:  # noqa: SLF001
        return "DDP within join (uneven inputs)"
    if have_hooks(parallel.parameters()):
        return "hooks on gradients under DDP, which would run on those of one process"
    return None


def active() -> DistributedDataParallel | None:
    """The DDP whose forward is running."""
    found: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()  # noqa: SLF001
    return found


def refuse_early_sum() -> None:
    """Raises `ConfigError` for a call in a window after whose backward DDP would add up what is not there yet."""
    parallel = active()
    if parallel is not None and torch.is_grad_enabled() and parallel.require_backward_grad_sync:
        raise ConfigError(
            "DDP would add gradients up after this call's backward, and those of a window come at its end. Give "
            "share_prefixes the model with DDP around it, or call it within `model.no_sync()`."
        )


class _Given(torch.autograd.Function):
    """A number whose gradient for a parameter is the one in a box, which it takes out."""

    @staticmethod
    def forward(ctx: Context, parameter: Tensor, box: Box, index: int) -> Tensor:
        ctx.of = box, index
        return parameter.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, _: Tensor) -> tuple[Tensor, None, None]:
        box, index = ctx.of
        return box.pop(index), None, None
