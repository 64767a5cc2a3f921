"""Recurrent layers of a model: which there are, which can follow a tree, and the forward that follows it.

A mixer's class and module stay as they are. The mixer *instance* gets a forward that, when a tree is given, runs the
class's own forward with its functions over tokens replaced (`kinds.FUNCTIONS`), in a copy of the globals that this
forward sees; without a tree it is the class's forward. The tree arrives as the keyword argument `treewise`. Where a
decoder layer does not pass it on, a hook on that layer sets it on the mixer for the duration of the layer's forward; a
recomputation by gradient checkpointing calls the layer again with the same arguments, so the hook sets it again.
"""

from collections import Counter
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from treewise.errors import UnsupportedModelError
from treewise.nn.attention.interface import TreeContext, context_of
from treewise.nn.lending import lend_to, lent, replace_forward
from treewise.nn.model import RECURRENT_CLASSES, RECURRENT_PARAMETERS
from treewise.nn.platform.releases import calls_by_name, held_functions, own_forward, replaced_functions
from treewise.nn.recurrent.kinds import FUNCTIONS, KINDS, MIXERS, SINGLE_STEPS, Replaced
from treewise.nn.recurrent.rows import LayerContext
from treewise.nn.wrapped import named_modules

_HELP = "Supported models: docs/models.md."


def kinds_of(model: nn.Module) -> dict[str, str]:
    """The recurrent layers that can follow a tree: path in the model -> kind, such as `short convolution, Mamba2`."""
    return {path: kind for path, module in named_modules(model) if (kind := _kind(module))}


def refuse_unknown(model: nn.Module, name: str) -> None:
    """Raises if a part of the model carries state from token to token in a way that is unknown here.

    Raises:
        UnsupportedModelError: naming the layer.
    """
    known = kinds_of(model)
    for path, module in named_modules(model):
        if any(path == each or path.startswith(each + ".") for each in known):
            continue
        if isinstance(module, nn.Conv1d):
            raise UnsupportedModelError(
                f"{name}.{path} is a convolution over tokens that cannot follow a tree yet. {_HELP}"
            )
        own = {*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))}
        if own & RECURRENT_PARAMETERS or type(module).__name__ in RECURRENT_CLASSES:
            raise UnsupportedModelError(
                f"{name}.{path} ({type(module).__name__}) is a recurrent layer that cannot follow a tree yet. {_HELP}"
            )


def install(model: nn.Module) -> None:
    """Lets the recurrent layers of a model follow the tree that its forward is given; a second call changes nothing.

    Raises:
        UnsupportedModelError: a layer whose forward has been replaced already.
    """
    modules = dict(named_modules(model))
    for path in kinds_of(model):
        mixer = modules[path]
        mixer.__dict__["_treewise_name"] = path
        why = f"it cannot follow a tree; load the model without replaced layers (use_kernels=False). {_HELP}"
        replace_forward(mixer, path, forward, why)
        lend_to(modules[path.rpartition(".")[0]], mixer)


def forward(self: nn.Module, *args: object, treewise: TreeContext | None = None, **kwargs: Any) -> object:
    """The forward of a mixer, with a tree by keyword, set by its layer's hook, or on the empty attention mask.

    Raises:
        UnsupportedModelError: the tree was lost on the way here, or has no row segments.
    """
    context = treewise if treewise is not None else lent(self)
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 4:  # the empty mask of `TreeContext.empty_mask`
        context = context_of(self, mask, context)
        if context is not None:
            kwargs["attention_mask"] = None
    if context is None:
        return type(self).forward(self, *args, **kwargs)
    if context.rows is None:
        raise UnsupportedModelError(f"{type(self).__name__} is recurrent, but its tree has no row segments.")
    return _on_tree(self, context, args, kwargs)


@torch.compiler.disable
def _on_tree(mixer: nn.Module, context: TreeContext, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
    """The forward of a mixer over the tree of `context`: the same code, other functions behind the names in it."""
    calls: Counter[str] = Counter()
    _, call = context.next_call(mixer)  # some models run a layer several times
    is_carried = context.carried.includes(mixer, call)

    def layer_of(name: str) -> LayerContext:
        calls[name] += 1
        return LayerContext(context, f"{vars(mixer)['_treewise_name']}:{name}:{call}:{calls[name]}", is_carried)

    if type(mixer).__name__ in MIXERS:
        return MIXERS[type(mixer).__name__][1](mixer, layer_of, *args, **kwargs)

    def stand_in(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: FUNCTIONS[name](layer_of(name), original, *args, **kwargs)

    if held_functions(mixer):
        return type(mixer).forward(Replaced(mixer, **replaced_functions(mixer, stand_in)), *args, **kwargs)
    return _with_globals(type(mixer).forward, stand_in)(mixer, *args, **kwargs)


def _with_globals(function: Any, stand_in: Callable[[str, Callable[..., Any]], object]) -> FunctionType:
    """A copy of a function (and of functions that it wraps) in which the known names are replaced."""
    own = function.__globals__
    replaced = {name: stand_in(name, own[name]) for name in function.__code__.co_names if name in FUNCTIONS}
    cells = tuple(
        CellType(_with_globals(cell.cell_contents, stand_in)) if isinstance(_content(cell), FunctionType) else cell
        for cell in function.__closure__ or ()
    )
    copy = FunctionType(function.__code__, {**own, **replaced}, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _kind(module: nn.Module) -> str:
    """The kinds of a recurrent layer (or short convolution) that can follow a tree; empty for any other module."""
    if type(module).__name__ in MIXERS:
        return MIXERS[type(module).__name__][0]
    known = _functions(module)
    return ", ".join(kind for name, kind in KINDS.items() if name in known)


def _functions(module: nn.Module) -> set[str]:
    """Names of known functions over tokens that a module's own forward calls, or holds."""
    if not calls_by_name():
        return held_functions(module)
    function = own_forward(type(module))
    code = getattr(function, "__code__", None)
    if code is None:
        return set()
    return {name for name in code.co_names if name in FUNCTIONS or name in SINGLE_STEPS} & function.__globals__.keys()


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
