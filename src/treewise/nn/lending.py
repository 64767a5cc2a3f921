"""Modules inside of a layer that need the tree of the layer's call, which their own arguments do not hold.

The tree arrives at a layer as the keyword argument `treewise`, or on the empty attention mask; a hook before the
layer's forward lends it to such modules (recurrent mixers, routers of experts), and one after it takes it back.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from treewise.errors import UnsupportedModelError
from treewise.nn.attention.interface import TreeContext


def lend_to(layer: nn.Module, module: nn.Module) -> None:
    """From now on each forward of `layer` lends its tree to a module inside of it; a second call changes nothing."""
    borrowers: list[nn.Module] = layer.__dict__.setdefault("_treewise_borrowers", [])
    if all(borrower is not module for borrower in borrowers):
        borrowers.append(module)
    if not vars(layer).get("_treewise_lends"):
        layer.__dict__["_treewise_lends"] = True
        layer.register_forward_pre_hook(_lend, with_kwargs=True)
        layer.register_forward_hook(_take_back, always_call=True)


def lent(module: nn.Module) -> TreeContext | None:
    """The tree of the layer's call that runs; None for a forward without a tree."""
    context: TreeContext | None = vars(module).get("_treewise_lent")
    return context


def replace_forward(module: nn.Module, path: str, forward: Callable[..., Any], why: str) -> None:
    """Puts a forward in place of the module's own, which it calls as `type(module).forward`; a second call changes
    nothing. why: ends the message: what cannot be done, and what to do.

    Raises:
        UnsupportedModelError: the module's forward has been replaced already.
    """
    holder = "_old_forward" if "_old_forward" in vars(module) else "forward"  # accelerate keeps the forward there
    current = vars(module).get(holder)
    if getattr(current, "__func__", None) is forward:
        return
    if current is not None and getattr(current, "__func__", None) is not type(module).forward:
        raise UnsupportedModelError(f"{path} ({type(module).__name__}) runs a forward that replaces its own, so {why}")
    module.__dict__[holder] = MethodType(forward, module)


@torch.compiler.disable
def _lend(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
    """Hook before a layer's forward. Gradient checkpointing calls hooks once, not when it recomputes, so the function
    that it recomputes sets the tree again.
    """
    _restore_checkpointing(layer)  # an interrupt (Ctrl-C) skips the hook after the forward
    context = kwargs.get("treewise")
    if context is None:
        context = next(_on_masks((*args, *kwargs.values())), None)
    _give(layer, context)
    checkpoint = vars(layer).get("_gradient_checkpointing_func")
    if context is not None and checkpoint is not None:
        layer.__dict__["_treewise_checkpoint"] = checkpoint
        layer.__dict__["_gradient_checkpointing_func"] = partial(_checkpoint, layer, context, checkpoint)


def _on_masks(values: Iterable[object]) -> Iterator[TreeContext]:
    return iter([value.treewise for value in values if isinstance(value, Tensor) and hasattr(value, "treewise")])


@torch.compiler.disable
def _take_back(layer: nn.Module, _args: object, _output: object) -> None:
    _give(layer, None)
    _restore_checkpointing(layer)


def _restore_checkpointing(layer: nn.Module) -> None:
    if "_treewise_checkpoint" in vars(layer):
        layer.__dict__["_gradient_checkpointing_func"] = layer.__dict__.pop("_treewise_checkpoint")


def _checkpoint(
    layer: nn.Module, context: TreeContext, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: object
) -> object:
    def lending(*args: object) -> object:
        borrowers = vars(layer)["_treewise_borrowers"]
        before = [lent(borrower) for borrower in borrowers]
        _give(layer, context)
        try:
            return function(*args)
        finally:
            for each, context_before in zip(borrowers, before, strict=True):
                each.__dict__["_treewise_lent"] = context_before

    return checkpoint(lending, *args)


def _give(layer: nn.Module, context: TreeContext | None) -> None:
    for each in vars(layer)["_treewise_borrowers"]:
        each.__dict__["_treewise_lent"] = context
