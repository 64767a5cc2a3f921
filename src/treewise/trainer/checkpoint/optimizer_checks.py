"""What an optimizer's files must hold before they are read: every entry of every parameter, in its shape and dtype.

An entry that is missing, misshapen or not finite would give wrong weights silently. What belongs there follows from the
optimizer itself: a new one of its class takes one step on a parameter of a few numbers.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from treewise.errors import CheckpointError

# Shape and dtype of a tensor; the name of the type of anything else.
Kind = tuple[tuple[int, ...], torch.dtype] | str
_SIZES = (2, 3, 5, 7, 11, 13)  # of the small parameter's axes: all different, so a state's axes are recognised
# Means or sums of squares, of which optimizers take roots.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_avg_sq_row", "exp_avg_sq_col", "exp_inf", "step")


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def refuse_other_state(optimizer: Any, names: dict[int, str], found: Mapping[str, dict[str, Kind]]) -> None:
    """Compares what a file holds with what the optimizer's own steps make.

    names: of the optimizer's parameters, by index. found: by parameter with a state the kinds of its entries.

    Raises:
        CheckpointError: names the first entry that is missing, unknown, or of another shape or dtype.
    """
    index, first_of = 0, dict[tuple[int, int], set[str]]()
    for number, group in enumerate(inner_optimizer(optimizer).param_groups):
        for parameter in group["params"]:
            name, index = names[index], index + 1
            if name not in found:
                continue
            expected = _kinds_after_a_step(optimizer, group, parameter)
            entries = found[name]
            like = first_of.setdefault((number, parameter.dim()), set(entries))
            wanted = like if expected is None else set(expected)
            if set(entries) != wanted:
                raise CheckpointError(
                    f"the optimizer's state of {name} has {_listed(entries)}; this run's keeps "
                    f"{_listed(wanted)}. Use an earlier checkpoint, or start a new run from the weights."
                )
            for entry, kind in (expected or {}).items():
                if entries[entry] != kind and not (_is_number(kind) and _is_number(entries[entry])):
                    raise CheckpointError(
                        f"the optimizer's state of {name} has {entry} as {_described(entries[entry])}, where this run "
                        f"keeps {_described(kind)}. Use an earlier checkpoint, or start a new run from the weights."
                    )


def refuse_values(entries: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for values that no step makes: not finite, or a mean of squares below zero.

    entries: by `parameter/entry` tensors (of shards: this rank's) or numbers.
    """
    for name, value in entries.items():
        if isinstance(value, bool) or not isinstance(value, torch.Tensor | int | float):
            continue
        is_larger = type(value) is int and value.bit_length() > 63
        tensor = torch.as_tensor(math.inf if is_larger else value)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"the optimizer's state {name} holds numbers that are not finite.")
        if name.endswith("/step") and bool((tensor != tensor.round()).any()):
            raise CheckpointError(f"the optimizer's state {name} is {tensor.max():g}; steps are whole.")
        if name.rsplit("/", 1)[-1] in _SQUARES and tensor.numel() and bool((tensor < 0).any()):
            raise CheckpointError(f"the optimizer's state {name} holds {tensor.min():g}; it is never below 0.")


def settled_groups(saved: list[dict[str, Any]], now: list[dict[str, Any]], own: set[str]) -> list[dict[str, Any]]:
    """The settings of this run's groups, with what steps and schedules change (rates, counters) from the saved ones.

    own: names of settings that steps do not change.

    Raises:
        CheckpointError: a flag that differs, or a number that is not one.
    """
    settled = []
    for then, group in zip(saved, now, strict=True):
        taken = dict(group)
        for name, value in group.items():
            if name == "params" or name in own or name not in then:
                continue
            if value is None or isinstance(value, bool | str):
                if then[name] != value:
                    raise CheckpointError(
                        f"the optimizer of the checkpoint has {name}={then[name]!r}, now {value!r}; its state does not "
                        "fit. Resume with the former, or start a new run from the checkpoint's weights."
                    )
                continue
            _refuse_rate(name, then[name], value)
            taken[name] = then[name]
        settled.append(taken)
    return settled


def _refuse_rate(name: str, then: Any, now: Any) -> None:
    numbers = [float(each) for each in (then if isinstance(then, tuple | list) else [then]) if _is_real(each)]
    sizes_differ = isinstance(now, tuple | list) != isinstance(then, tuple | list)
    if sizes_differ or not numbers or not all(map(math.isfinite, numbers)) or (name.endswith("lr") and numbers[0] < 0):
        raise CheckpointError(f"the optimizer of the checkpoint has {name}={then!r}, which no run sets (now {now!r}).")


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kinds_after_a_step(optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Kind] | None:
    """Kinds of a parameter's entries once it was trained; None for classes that take no step on a small CPU tensor."""
    kind = type(inner_optimizer(optimizer))
    small = nn.Parameter(torch.zeros(_SIZES[: parameter.dim()], dtype=parameter.dtype))
    small.grad = torch.zeros_like(small)
    known = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in group.items() if name != "params"}
    try:
        twin = kind([small], **{name: value for name, value in settings.items() if name in known})
        twin.param_groups[0].update(
            {name: value for name, value in settings.items() if name not in ("fused", "foreach")}
        )
        twin.step()
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    sizes = dict(zip(_SIZES, parameter.shape, strict=False))
    return {
        entry: (tuple(sizes.get(size, size) for size in value.shape), value.dtype)
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for entry, value in twin.state[small].items()
    }


def _is_number(kind: Kind) -> bool:
    return kind in ("int", "float") or kind[0] == ()


def _described(kind: Kind) -> str:
    return f"one {kind}" if isinstance(kind, str) else f"{list(kind[0])} {str(kind[1]).removeprefix('torch.')}"


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "no entries"
