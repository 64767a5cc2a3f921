"""An optimizer's state in safetensors and JSON, under the names of its parameters: any number of processes resumes it.

`optimizer.json` lists every tensor and holds all else. The manifest of a checkpoint has the SHA-256 of both files, so
what is read is what was saved; here it is compared with this run: the kind of optimizer, its parameters, and the
settings of their groups.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from treewise.errors import CheckpointError
from treewise.trainer.checkpoint.json_values import from_plain, to_plain
from treewise.trainer.checkpoint.weights import load_shards

OPTIMIZER = "optimizer"  # .safetensors and .json; with sharded parameters a folder
# Settings of optimizers that steps do not change, so that those of a resumed run apply. Learning rates follow the
# schedule.
SETTINGS = {
    *("weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha", "rho", "lambd", "lr_decay"),
    *("momentum_decay", "decoupled_weight_decay", "foreach", "fused"),
}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """kind: the optimizer's class. entries: by parameter and entry, tensors (on rank 0, or shards) and other values.
    groups: settings of the groups, with names for `params`. rest: what its `state_dict` holds beside.
    """

    kind: str
    entries: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    rest: dict[str, Any]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The entries that are tensors, by `parameter/entry`."""
        entries = ((name, *item) for name, each in self.entries.items() for item in each.items())
        return {f"{name}/{entry}": value for name, entry, value in entries if isinstance(value, torch.Tensor)}

    def mapped(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> "OptimizerState":
        """With other tensors. change: of `parameter/entry` and a tensor."""
        entries = {
            name: {
                entry: change(f"{name}/{entry}", value) if isinstance(value, torch.Tensor) else value
                for entry, value in each.items()
            }
            for name, each in self.entries.items()
        }
        return replace(self, entries=entries)


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """The state of an optimizer; its tensors are those that the optimizer has."""
    state, names = optimizer.state_dict(), _names(optimizer, model)
    return OptimizerState(
        kind=type(_inner(optimizer)).__name__,
        entries={names[index]: dict(entries) for index, entries in state["state"].items()},
        groups=[{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]],
        rest={key: value for key, value in state.items() if key not in ("state", "param_groups")},
    )


def save_optimizer(folder: Path, state: OptimizerState, *, is_sharded: bool = False) -> None:
    """Writes a state; without its tensors where they are shards, which `save_shards` writes.

    Raises:
        CheckpointError: a value that cannot be saved without pickle.
    """
    tensors: dict[str, torch.Tensor] = {}
    entries = to_plain(state.entries, tensors)
    if not is_sharded:
        tensors = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
        save_file(tensors, folder / f"{OPTIMIZER}.safetensors")
    members = [name for group in state.groups for name in group["params"]]
    content = {
        "kind": state.kind,
        "state": entries,
        "without_state": [name for name in members if name not in state.entries],  # were never trained
        "groups": to_plain(state.groups),
        "rest": to_plain(state.rest),
        "shapes": {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()},
    }
    (folder / f"{OPTIMIZER}.json").write_text(json.dumps(content), encoding="utf-8")


def read_optimizer(folder: Path, parameters: dict[str, nn.Parameter] | None = None) -> OptimizerState:
    """What `save_optimizer` wrote, with whole tensors, or shards of those of `parameters` that are sharded.

    Raises:
        CheckpointError: files that are cut or were changed.
    """
    path = folder / f"{OPTIMIZER}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (shape, dtype, *_) in content["shapes"].items()
        }
        entries = {name: from_plain(each, tensors) for name, each in content["state"].items()}
        listed = OptimizerState(content["kind"], entries, from_plain(content["groups"]), from_plain(content["rest"]))
        members = [name for group in listed.groups for name in group["params"]]
        unlisted = set(members) ^ {*entries, *content.get("without_state", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: damaged ({type(error).__name__}: {error}).") from error
    if unlisted:
        raise CheckpointError(f"{path.name}: {min(map(str, unlisted))} has no state; the file was cut.")

    def blank(name: str, kind: torch.Tensor) -> torch.Tensor:
        owner = (parameters or {}).get(name.rpartition("/")[0])
        if owner is not None and isinstance(owner.data, DTensor) and owner.shape == kind.shape:
            return torch.empty_like(owner.data, dtype=kind.dtype)
        return torch.empty(kind.shape, dtype=kind.dtype)

    read = listed.mapped(blank)
    place = folder / OPTIMIZER if (folder / OPTIMIZER).is_dir() else folder
    if place == folder and not (folder / f"{OPTIMIZER}.safetensors").is_file():
        raise CheckpointError(f"{OPTIMIZER}.safetensors: missing or damaged.")
    load_shards(place, read.tensors)
    return read


def load_optimizer(folder: Path, optimizer: Optimizer, model: nn.Module) -> None:
    """Reads the files of `save_optimizer`, parameter by parameter, whatever their order in a group; files and optimizer
    may each be sharded. Settings that do not change by themselves (`SETTINGS`) stay as they are.

    Raises:
        CheckpointError: files that are cut, or of another optimizer or model; names what differs.
    """
    names, now = _names(optimizer, model), optimizer.state_dict()["param_groups"]
    read, kind = read_optimizer(folder, dict(model.named_parameters())), type(_inner(optimizer)).__name__
    if read.kind != kind:
        raise CheckpointError(
            f"optim: {read.kind} -> {kind}: the saved state does not fit another optimizer. Resume with "
            f"{read.kind}, or start a new run from the checkpoint's weights."
        )
    # torch gives the state of the n-th saved parameter of a group to its n-th one; so parameters are those of this run.
    # And those of its groups: on a mesh transformers makes one for each mesh that parameters are on.
    then = {name: group for group in read.groups for name in group["params"]}
    if set(then) != set(names.values()):
        changed = ", ".join(sorted(map(str, set(then) ^ set(names.values())))[:5])
        raise CheckpointError(
            f"the optimizer of the checkpoint trained other parameters ({changed}); resume with the same model, "
            "adapters and optimizer."
        )
    for index, parameter in enumerate(each for group in _inner(optimizer).param_groups for each in group["params"]):
        for entry, value in read.entries.get(names[index], {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == parameter.dim() and value.shape != parameter.shape:
                raise CheckpointError(
                    f"the optimizer's state of {names[index]} has {entry} as {list(value.shape)}, and the parameter is "
                    f"{list(parameter.shape)}; it is of another model."
                )
    groups = [_settled_group([then[names[index]] for index in group["params"]], group) for group in now]
    state = {index: read.entries[name] for index, name in names.items() if name in read.entries}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of accelerate's."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _names(optimizer: Optimizer, model: nn.Module) -> dict[int, str]:
    """The names of an optimizer's parameters by their indices in its `state_dict`."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    flat = [parameter for group in _inner(optimizer).param_groups for parameter in group["params"]]
    return {index: known.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(flat)}


def _settled_group(saved: Sequence[dict[str, Any]], now: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group of this run, with what steps and schedules change (rates, counters) from the saved ones.

    saved: the groups that the checkpoint had its parameters in.

    Raises:
        CheckpointError: a flag that differs, or saved groups that differ in one or in a number.
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
        if (new is None or isinstance(new, bool | str)) and old != new:
            raise CheckpointError(
                f"the optimizer of the checkpoint has {name}={old!r}, now {new!r}; its state does not fit. Resume "
                "with the former, or start a new run from the checkpoint's weights."
            )
    return {**now, **{name: then[name] for name in changing}}
