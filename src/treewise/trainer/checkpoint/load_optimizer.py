"""Reads an optimizer's state into the optimizer of a run that goes on.

Before a tensor is made, the list in `optimizer.json` is compared with what this run's optimizer keeps, because an entry
that is missing, misshapen or not finite would give wrong weights silently. What belongs there follows from the
optimizer itself: a new one of its class takes one step on a parameter without values.
"""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from treewise.distributed import ranks
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint.coded_states import in_parts, whole
from treewise.trainer.checkpoint.json_values import from_plain
from treewise.trainer.checkpoint.optimizer_state import OPTIMIZER, OptimizerState, checksum, inner, names_of
from treewise.trainer.checkpoint.weights import load_shards, refuse_gaps

# Settings of optimizers that steps do not change, so that those of a resumed run apply. Learning rates follow the
# schedule.
SETTINGS = {
    *("weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha", "rho", "lambd", "lr_decay"),
    *("momentum_decay", "decoupled_weight_decay", "foreach", "fused"),
}
# Means or sums of squares, of which optimizers take roots, and counts.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_avg_sq_row", "exp_avg_sq_col", "exp_inf", "step")
_WAY_OUT = "Use an earlier checkpoint, or start a new run from the weights."


def load_optimizer(folder: Path, optimizer: Optimizer, model: nn.Module) -> None:
    """Reads the files of `save_optimizer`, parameter by parameter, whatever their order in a group; files and optimizer
    may each be sharded. Settings that do not change by themselves (`SETTINGS`) stay as they are.

    Raises:
        CheckpointError: files that are cut, damaged, or of another optimizer or model; names what differs.
    """
    listed, checksums = _content(folder)
    names, now = names_of(optimizer, model), optimizer.state_dict()["param_groups"]
    _refuse_other_parameters(listed, optimizer, names)
    _refuse_other_entries(listed, optimizer, names)
    read = _with_tensors(folder, listed, checksums, dict(model.named_parameters()))
    ranks.on_every_rank(lambda: _refuse_values(dict(read.flat())))
    # torch gives the state of the n-th saved parameter of a group to its n-th one; so parameters are those of this run.
    # And those of its groups: on a mesh transformers makes one for each mesh that parameters are on.
    then = {name: group for group in listed.groups for name in group["params"]}
    groups = [_settled_group([then[names[index]] for index in group["params"]], group) for group in now]
    state = {index: whole(read.entries[name]) for index, name in names.items() if name in read.entries}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


# -- files ------------------------------------------------------------------------------------------------------------


class Listing(TypedDict, total=False):
    """`optimizer.json`. shapes: of each tensor its shape, its dtype and a checksum. without_state: parameters that were
    never trained."""

    kind: str
    state: dict[str, dict[str, Any]]
    shapes: dict[str, list[Any]]
    groups: object
    rest: object
    without_state: list[str]


def _content(folder: Path) -> tuple[OptimizerState, dict[str, Any]]:
    """`optimizer.json` with tensors that have a shape and a dtype alone, and their checksums. Its parts agree: each
    entry of a parameter is a value, or refers to the tensor of its own name, which is listed; no other tensor is; every
    parameter has a state or was never trained.
    """
    path = folder / f"{OPTIMIZER}.json"
    try:
        content: Listing = json.loads(path.read_text(encoding="utf-8"))
        referred = set()
        for name, each in content["state"].items():
            for entry, value in each.items():
                if isinstance(value, dict) and value.get("__is__") == "tensor":
                    if value["name"] != f"{name}/{entry}":
                        raise CheckpointError(f"{path.name}: {entry} of {name} refers to the tensor {value['name']!r}.")
                    referred.add(value["name"])
        for odd in sorted(referred ^ set(content["shapes"])):
            what = "listed with no shape" if odd in referred else "of no parameter"
            raise CheckpointError(f"{path.name}: {odd} is {what}.")
        tensors = {name: _on_meta(name, *each) for name, each in content["shapes"].items()}
        entries = {name: from_plain(each, tensors) for name, each in content["state"].items()}
        listed = OptimizerState(content["kind"], entries, from_plain(content["groups"]), from_plain(content["rest"]))
        if not isinstance(listed.kind, str) or not isinstance(listed.rest, dict):
            raise CheckpointError(f"{path.name}: kind is {listed.kind!r}.")
        checksums = {name: each[2] for name, each in content["shapes"].items() if each[2:] not in ([], [None])}
        members = [name for group in listed.groups for name in group["params"]]
        unlisted = set(members) ^ {*entries, *content.get("without_state", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: damaged ({type(error).__name__}: {error}).") from error
    if unlisted or len(set(members)) < len(members):
        what = f"{min(map(str, unlisted))} has no state" if unlisted else "a parameter is in two groups"
        raise CheckpointError(f"{path.name}: {what}, and is not among those that were never trained; the file was cut.")
    return listed, checksums


def _on_meta(name: str, shape: Sequence[int], dtype: str, *_: object) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    except (AttributeError, RuntimeError, TypeError):
        raise CheckpointError(f"{OPTIMIZER}.json: {name} has the shape {shape} and dtype {dtype!r}.") from None


def _with_tensors(
    folder: Path, listed: OptimizerState, checksums: dict[str, Any], parameters: dict[str, nn.Parameter]
) -> OptimizerState:
    """Reads what is listed: into shards for the parameters that are sharded, else into whole tensors.

    checksums: of tensors that were whole when they were saved.
    """
    is_sharded = (folder / OPTIMIZER).is_dir()
    place = folder / OPTIMIZER if is_sharded else folder
    if not is_sharded and not (folder / f"{OPTIMIZER}.safetensors").is_file():
        raise CheckpointError(f"{OPTIMIZER}.safetensors: missing or damaged.")
    for name in sorted(refuse_gaps(place, listed.tensors) - set(listed.tensors)):
        if "/" in name:  # else a weight of the model, whose file lies beside
            raise CheckpointError(f"{OPTIMIZER}.safetensors: {name} is unknown to its list.")

    def blank(name: str, kind: torch.Tensor) -> torch.Tensor:
        """Where anything were left unread, it is not a number (or zero)."""
        fill = float("nan") if kind.dtype.is_floating_point else 0
        owner = parameters.get(name.rpartition("/")[0])
        if owner is not None and isinstance(owner.data, DTensor) and owner.shape == kind.shape:
            return torch.full_like(owner.data, fill, dtype=kind.dtype)
        return torch.full(kind.shape, fill, dtype=kind.dtype)

    read = listed.mapped(blank)
    load_shards(place, read.tensors)
    for name, tensor in read.tensors.items():
        if name in checksums and not isinstance(tensor, DTensor) and checksums[name] != checksum(tensor):
            raise CheckpointError(f"{OPTIMIZER}.safetensors: {name} is not what was saved (its checksum differs).")
    return read


# -- a state against the optimizer that is to have it ------------------------------------------------------------------


def _refuse_other_parameters(listed: OptimizerState, optimizer: Optimizer, names: dict[int, str]) -> None:
    """Raises `CheckpointError` for another kind of optimizer, or one of other parameters."""
    kind = type(inner(optimizer)).__name__
    if listed.kind != kind:
        raise CheckpointError(
            f"optim: {listed.kind} -> {kind}: the saved state does not fit another optimizer. Resume with "
            f"{listed.kind}, or start a new run from the checkpoint's weights."
        )
    then = {name for group in listed.groups for name in group["params"]}
    if then != set(names.values()):
        changed = ", ".join(sorted(map(str, then ^ set(names.values())))[:5])
        raise CheckpointError(
            f"the optimizer of the checkpoint trained other parameters ({changed}); resume with the same model, "
            "adapters and optimizer."
        )


def _refuse_other_entries(listed: OptimizerState, optimizer: Optimizer, names: dict[int, str]) -> None:
    """Raises `CheckpointError` for the first entry that the optimizer's own steps would not make: missing, unknown, or
    of another shape or dtype. Of a class that takes no step without values, parameters of a group are compared.
    """
    index, first_of = 0, dict[tuple[int, int, bool], set[str]]()
    for number, group in enumerate(inner(optimizer).param_groups):
        for parameter in group["params"]:
            name, index = names[index], index + 1
            if name not in listed.entries:
                continue
            found = {entry: _kind(value) for entry, value in listed.entries[name].items()}
            expected = _kinds_after_a_step(inner(optimizer), group, parameter)
            is_coded = any(kind.endswith("uint8") for kind in found.values())  # of 8 bits; small parameters are not
            like = number, parameter.dim(), is_coded
            wanted = first_of.setdefault(like, set(found)) if expected is None else set(expected)
            if set(found) != wanted:
                raise CheckpointError(
                    f"the optimizer's state of {name} has {', '.join(sorted(found)) or 'no entries'}; this run's keeps "
                    f"{', '.join(sorted(wanted)) or 'no entries'}. {_WAY_OUT}"
                )
            for entry, kind in (expected or {}).items():
                if found[entry] != kind:
                    raise CheckpointError(
                        f"the optimizer's state of {name} has {entry} as {found[entry]}, where this run keeps {kind}. "
                        f"{_WAY_OUT}"
                    )


def _kinds_after_a_step(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, str] | None:
    """Kinds of a parameter's entries once it was trained; None for classes that take no step without values, or keep
    another number of bits for some parameters (bitsandbytes' manager)."""
    if hasattr(optimizer, "mng"):
        return None
    kind, settings = type(optimizer), {**group, "fused": None, "foreach": None}
    del settings["params"]
    empty = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    empty.grad = torch.empty_like(empty)
    known = inspect.signature(kind.__init__).parameters
    try:
        twin = kind([empty], **{name: value for name, value in settings.items() if name in known})
        twin.param_groups[0].update(settings)
        twin.step()
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    return {entry: _kind(value) for entry, value in in_parts(twin.state[empty]).items()}


def _kind(value: object) -> str:
    """Shape and dtype in words."""
    if isinstance(value, torch.Tensor) and value.dim():
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    is_number = isinstance(value, torch.Tensor) or type(value) in (int, float)
    return "one number" if is_number else f"one {type(value).__name__}"


def _refuse_values(entries: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for values that no step makes: not finite, or a mean of squares below zero.

    entries: by `parameter/entry`.
    """
    for name, value in entries.items():
        if isinstance(value, bool) or not isinstance(value, torch.Tensor | int | float):
            continue
        is_larger = type(value) is int and value.bit_length() > 63
        tensor = torch.as_tensor(math.inf if is_larger else value)
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"the optimizer's state {name} holds numbers that are not finite.")
        if name.endswith("/step") and bool((tensor != tensor.round()).any()):
            raise CheckpointError(f"the optimizer's state {name} is {tensor.max():g}; steps are whole.")
        if name.rpartition("/")[2] in _SQUARES and tensor.numel() and bool((tensor < 0).any()):
            raise CheckpointError(f"the optimizer's state {name} holds {tensor.min():g}; it is never below 0.")


def _settled_group(saved: Sequence[dict[str, Any]], now: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group of this run, with what steps and schedules change (rates, counters) from the saved ones.

    saved: the groups that the checkpoint had its parameters in.

    Raises:
        CheckpointError: a flag that differs, a number that is not one, or saved groups that differ in either.
    """
    if not saved:  # a group of no parameters
        return now
    then = saved[0]
    changing = [name for name in now if name in then and name not in SETTINGS and name != "params"]
    for name in changing:
        old, new = then[name], now[name]
        if other := next((each for each in saved if each is not then and each.get(name) != old), None):
            raise CheckpointError(
                f"the optimizer of the checkpoint had these parameters in groups of {name}={old!r} and "
                f"{other.get(name)!r}, and this run has them in one; resume with the same groups."
            )
        if new is None or isinstance(new, bool | str):
            if old != new:
                raise CheckpointError(
                    f"the optimizer of the checkpoint has {name}={old!r}, now {new!r}; its state does not fit. Resume "
                    "with the former, or start a new run from the checkpoint's weights."
                )
            continue
        values = list(old) if isinstance(old, tuple | list) else [old]
        numbers = [float(value) for value in values if _kind(value) == "one number"]
        is_other_form = isinstance(new, tuple | list) != isinstance(old, tuple | list)
        is_rate = bool(numbers) and all(map(math.isfinite, numbers)) and not (name.endswith("lr") and numbers[0] < 0)
        if is_other_form or not is_rate:
            raise CheckpointError(
                f"the optimizer of the checkpoint has {name}={old!r}, which no run sets (now {new!r})."
            )
    return {**now, **{name: then[name] for name in changing}}
