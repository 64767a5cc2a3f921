"""Windows by themselves: a trainer accumulates gradients over several calls, which share what they have in common.

accelerate's loops (transformers.Trainer, TRL, axolotl, ms-swift, LLaMA-Factory, a loop with `accelerator.accumulate`)
say before each forward whether more micro-batches follow (`GradientState.sync_gradients`), and call
`accelerator.backward`, after which they clip. So a window opens at a call after which more follow, and ends in the last
`backward`, before anything reads a gradient. With several processes under DDP each has a window of its own, and their
gradients are added up when it has ended (`late_sum`).
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from treewise.base import features
from treewise.distributed import ranks
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.integrations.batches.late_sum import LateSum, active, why_not
from treewise.nn.wrapped import is_peft, unwrap_model
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.engine.window import StepCalls, Window

_listening: "weakref.WeakSet[AccumulationWindow]" = weakref.WeakSet()
_own_backward: list[Callable[..., None]] = []  # of accelerate's class, while some listen


class AccumulationWindow:
    """The window of one engine under a loop of accelerate.

    A window in which nothing was shared is not worth its keys and values: until rows that came alone would have shared
    something, calls are computed by themselves.

    min_ratio: tokens of all calls for each that is computed, below which a window is not worth it.
    window: of the engine, used again step by step. why_off: why no window opens; None: one may. paused: a context in
    which the model's forwards are its own.
    """

    def __init__(self, engine: TreeEngine, model: nn.Module, min_ratio: float) -> None:
        self._engine, self._model, self._min_ratio = engine, model, min_ratio
        self.paused: Callable[[], AbstractContextManager[None]] = nullcontext
        self._is_worth_it = True
        self._calls: StepCalls
        self._has_graphs = False  # of a call of this step
        self.window: Window | None = None
        self.num_windows = 0
        self._late_sum: LateSum | None = None  # of several processes, once a call has shown their DDP
        self.why_off: str | None = None
        try:
            self.window = features.window.new_window(engine)
        except (ConfigError, UnsupportedModelError) as error:
            self.why_off = str(error)
            return
        self._calls = features.window.StepCalls()
        _listen(self)

    def __str__(self) -> str:
        return str(self.window)

    @property
    def is_due(self) -> bool:
        """Whether the present call belongs to several between two steps."""
        if self._engine.in_window is not None:  # the caller's own
            return True
        return self._is_ready() and (more_follow() or self._calls.num_flat_tokens > 0)

    def _is_ready(self) -> bool:
        """Whether a window may open; of several processes, in a forward of a DDP that can add up late."""
        if self.window is None or ranks.count() == 1:
            return self.window is not None
        parallel = active()
        if parallel is None or not self._is_inside(parallel):
            if self._late_sum is None:
                self.why_off = "several processes, and a forward outside of DDP's"
            return False
        why = why_not(parallel)
        if self._late_sum is not None:
            is_another = self._late_sum.parallel is not parallel  # a second trainer wraps it anew
            if is_another or (why is not None and not self._calls.num_flat_tokens):  # between steps
                self._late_sum.remove()
                self._late_sum = None
        if self._late_sum is None:
            self.why_off = why
            if why is None:
                self._late_sum = LateSum(parallel, lambda: self._is_open)
        return self._late_sum is not None

    @property
    def _is_open(self) -> bool:
        """Whether this step has calls that a window may hold."""
        return self.window is not None and self._is_worth_it and self._calls.num_flat_tokens > 0

    @contextmanager
    def around(self, forest: Forest) -> Iterator[None]:
        """Inside, the engine computes a call on a forest within the window, if one is due and worth it."""
        is_own = self._engine.in_window is None and self.is_due
        if is_own:
            self._calls.add(forest)
            self._has_graphs |= torch.is_grad_enabled()
        is_entered = is_own and self._is_worth_it
        if is_entered:
            self._engine.in_window = self.window
        try:
            yield
        finally:
            if is_entered:
                self._engine.in_window = None

    @property
    def is_worth_it(self) -> bool:
        """Whether the present call may share with others."""
        return self._engine.in_window is not None or (self.is_due and self._is_worth_it)

    def observe(self, forest: Forest) -> None:
        """Notes rows that are left to the model's own forward."""
        if self._engine.in_window is None and self.is_due:
            self._calls.add(forest)

    def end(self) -> None:
        """The last backward before a step is over: gradients of all calls are added to the parameters'."""
        if self.window is None or not self._calls.num_flat_tokens:
            return
        calls, self._calls, self._has_graphs = self._calls, features.window.StepCalls(), False
        self._is_worth_it = calls.num_flat_tokens >= self._min_ratio * calls.num_tree_tokens
        self.num_windows += self.window.num_calls > 0
        with self.paused():
            self.window.end()
        if self._late_sum is not None:
            self._late_sum.add_up()

    def off(self) -> None:
        """No window from now on; gradients that came back are added first."""
        self.end()
        self.window, self.why_off = None, "switched off"
        if self._late_sum is not None:
            self._late_sum.remove()
        _listening.discard(self)
        _stop_listening()

    def ends_with(self, accelerator: Any) -> bool:
        """Whether an accelerator trains this model, or calls have been without gradients, as of a reference model: what
        steps are to others, it may change at (TRL's `sync_ref_model`, which torch's count of changes does not see)."""
        models = accelerator._models  # noqa: SLF001
        return not self._has_graphs or any(map(self._is_inside, models))

    def _is_inside(self, wrapped: Any) -> bool:
        inner = unwrap_model(wrapped)
        return self._model in (inner, inner.get_base_model() if is_peft(inner) else inner)


def more_follow() -> bool:
    """Whether a loop of accelerate is at a micro-batch after which more come before the step."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.GradientState._shared_state:  # noqa: SLF001
        return False
    return not module.GradientState().sync_gradients


def _listen(window: AccumulationWindow) -> None:
    from accelerate import Accelerator

    _listening.add(window)
    if _own_backward:
        return
    own = Accelerator.backward

    @functools.wraps(own)
    def backward(accelerator: Any, loss: torch.Tensor, **kwargs: Any) -> None:
        own(accelerator, loss, **kwargs)
        if accelerator.sync_gradients:
            for each in list(_listening):
                if each.ends_with(accelerator):
                    each.end()

    _own_backward.append(own)
    Accelerator.backward = backward


def _stop_listening() -> None:
    if _listening or not _own_backward:
        return
    from accelerate import Accelerator

    Accelerator.backward = _own_backward.pop()
