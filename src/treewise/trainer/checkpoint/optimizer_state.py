"""The state of a run besides its weights, in safetensors and JSON: optimizer, schedule, random generators.

The optimizer's state is stored under the names of the parameters, so that any number of processes can resume it.
Nothing is pickled, and no format that could run code is read.
"""

import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from treewise.distributed import ranks
from treewise.distributed.fsdp import like_shard, whole_tensor
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint.json_values import from_plain, to_plain
from treewise.trainer.checkpoint.optimizer_checks import (
    Kind,
    inner_optimizer,
    refuse_other_state,
    refuse_values,
    settled_groups,
)
from treewise.trainer.checkpoint.sharded_io import load_shards, save_shards

OPTIMIZER = "optimizer"  # .safetensors and .json
SCHEDULE = "schedule.json"
# Settings of optimizers that steps do not change, so that those of a resumed run apply. Learning rates follow the
# schedule.
SETTINGS = {
    *("weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha", "rho", "lambd", "lr_decay"),
    *("momentum_decay", "decoupled_weight_decay", "foreach", "fused"),
}


def optimizer_state(optimizer: Any, model: nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state of an optimizer: plain values, and its tensors by `parameter name/entry`.

    Raises:
        CheckpointError: a value that cannot be saved without pickle.
    """
    state = optimizer.state_dict()
    names = _names(optimizer, model)
    tensors: dict[str, torch.Tensor] = {}
    entries = {names[index]: entry for index, entry in state["state"].items()}
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    plain = {
        "kind": _kind_of(optimizer),
        "state": {name: to_plain(entry, tensors, name) for name, entry in entries.items()},
        "without_state": [name for name in names.values() if name not in entries],  # were never trained
        "groups": to_plain(groups),
        "rest": to_plain(rest),
    }
    return plain, tensors


def load_optimizer_state(optimizer: Any, model: nn.Module, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Loads the result of `optimizer_state`, parameter by parameter, whatever their order in a group. Settings that do
    not change by themselves (`SETTINGS`) stay as they are.

    Raises:
        CheckpointError: another kind of optimizer than the saved one, or one that trains other parameters.
    """
    _refuse_other_parameters(optimizer, model, plain)
    index_of = {name: index for index, name in _names(optimizer, model).items()}
    now, groups = optimizer.state_dict()["param_groups"], from_plain(plain["groups"])
    optimizer.load_state_dict(
        {
            "state": {index_of[name]: from_plain(entry, tensors) for name, entry in plain["state"].items()},
            # torch gives the state of the n-th saved parameter of a group to its n-th one.
            "param_groups": settled_groups(groups, now, SETTINGS),
        }
    )


def save_optimizer_shards(folder: Path, tensors: dict[str, torch.Tensor], group: Any = None) -> None:
    """Writes the tensors of `optimizer_state` if they are shards. Every rank calls this. group: as in `save_shards`."""
    save_shards(folder / OPTIMIZER, tensors, group)


def gather(tensors: dict[str, torch.Tensor]) -> None:
    """Replaces shards by whole tensors in host memory, in place, on rank 0; other ranks keep nothing of them. Every
    rank calls this.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            whole = whole_tensor(tensor)
            tensors[name] = whole.cpu() if ranks.own() == 0 else torch.empty(0)


def save_optimizer(folder: Path, plain: Any, tensors: dict[str, torch.Tensor], *, is_sharded: bool) -> None:
    """Writes the result of `optimizer_state` on rank 0, without tensors that are shards."""
    if ranks.own() != 0:
        return
    if not is_sharded:
        tensors = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
        save_file(tensors, _tensor_file(folder))
    shapes = {name: [*_kind(each), None if is_sharded else _checksum(each)] for name, each in tensors.items()}
    _write_json(folder / f"{OPTIMIZER}.json", {**plain, "shapes": shapes})


def load_optimizer(folder: Path, optimizer: Any, model: nn.Module) -> None:
    """Reads the files of `save_optimizer` into an optimizer. Either may be sharded. All that the files say of
    themselves is compared with the optimizer before a tensor is made, and values are looked at before they are used.

    Raises:
        CheckpointError: files that are cut, damaged, or of another optimizer or model; names what differs.
    """
    plain = read_plain(folder)
    shapes = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype, *_) in plain["shapes"].items()}
    _refuse_other_parameters(optimizer, model, plain)
    kinds: dict[str, dict[str, Kind]] = {
        name: {entry: shapes.get(f"{name}/{entry}") or type(value).__name__ for entry, value in entries.items()}
        for name, entries in plain["state"].items()
    }
    refuse_other_state(optimizer, _names(optimizer, model), kinds)
    parameters = dict(model.named_parameters())
    owner_of = {name: parameters.get(name.rsplit("/", 1)[0]) for name in shapes}
    if (folder / OPTIMIZER).is_dir():
        tensors = {name: _blank(owner_of[name], *kind) for name, kind in shapes.items()}
        load_shards(folder / OPTIMIZER, tensors)
    else:
        tensors = read_tensors(folder, plain)
        for name, whole in tensors.items():
            owner = owner_of[name]
            if owner is not None and isinstance(owner.data, DTensor) and owner.shape == whole.shape:
                tensors[name] = like_shard(whole, owner.data)
    local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in tensors.items()}
    ranks.on_every_rank(lambda: refuse_values({**_numbers(plain), **local}))
    load_optimizer_state(optimizer, model, plain, tensors)


def read_plain(folder: Path) -> Any:
    """`optimizer.json`, whose parts agree with one another: each entry of a parameter is a value, or refers to the
    tensor of its own name, of which shape and dtype are listed; no other tensor is.

    Raises:
        CheckpointError: a file that is cut or was changed.
    """
    path = folder / f"{OPTIMIZER}.json"
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        referred = set()
        for name, entries in plain["state"].items():
            for entry, value in entries.items():
                if _is_reference(value):
                    if value["name"] != f"{name}/{entry}":
                        raise CheckpointError(f"{path.name}: {entry} of {name} refers to the tensor {value['name']!r}.")
                    referred.add(value["name"])
        if referred != set(plain["shapes"]):
            odd = sorted(referred ^ set(plain["shapes"]))
            raise CheckpointError(
                f"{path.name}: {odd[0]} is {'listed with no shape' if odd[0] in referred else 'of no parameter'}."
            )
        for name, (shape, dtype, *_) in plain["shapes"].items():
            if not all(type(size) is int and size >= 0 for size in shape) or not isinstance(
                getattr(torch, dtype), torch.dtype
            ):
                raise CheckpointError(f"{path.name}: {name} has the shape {shape} and dtype {dtype!r}.")
        if not isinstance(plain["kind"], str) or not isinstance(from_plain(plain["rest"]), dict):
            raise CheckpointError(f"{path.name}: kind is {plain['kind']!r}.")
        params = [name for group in from_plain(plain["groups"]) for name in group["params"]]
        unlisted = set(params) ^ {*plain["state"], *plain.get("without_state", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: damaged ({type(error).__name__}: {error}).") from error
    if unlisted or len(set(params)) < len(params):
        what = f"{min(map(str, unlisted))} has no state" if unlisted else "a parameter is in two groups"
        raise CheckpointError(f"{path.name}: {what}, and is not among those that were never trained; the file was cut.")
    return plain


def read_tensors(folder: Path, plain: Any) -> dict[str, torch.Tensor]:
    """The whole tensors that `read_plain` lists, each in the shape, dtype and with the checksum listed.

    Raises:
        CheckpointError: a tensor that is missing, is not listed, or is another one.
    """
    path, shapes = _tensor_file(folder), plain["shapes"]
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name}: missing or damaged ({error}).") from error
    for name in sorted(set(shapes) ^ set(tensors)):
        raise CheckpointError(f"{path.name}: {name} is {'missing' if name in shapes else 'unknown to its list'}.")
    for name, (shape, dtype, *checksum) in shapes.items():
        if _kind(tensors[name]) != (shape, dtype):
            found_shape, found = _kind(tensors[name])
            raise CheckpointError(f"{path.name}: {name} is {found_shape} {found}, listed as {shape} {dtype}.")
        if checksum and checksum[0] not in (None, _checksum(tensors[name])):
            raise CheckpointError(f"{path.name}: {name} is not what was saved (its checksum differs).")
    return tensors


def _refuse_other_parameters(optimizer: Any, model: nn.Module, plain: Any) -> None:
    """Raises `CheckpointError` if the file is of another kind of optimizer, or its groups hold other parameters."""
    then, kind = plain["kind"], _kind_of(optimizer)
    if then != kind:
        raise CheckpointError(
            f"optim: {then} -> {kind}: the saved state does not fit another optimizer. Resume with {then}, or "
            "start a new run from the checkpoint's weights."
        )
    index_of = {name: index for index, name in _names(optimizer, model).items()}
    now, groups = optimizer.state_dict()["param_groups"], from_plain(plain["groups"])
    known = {name for group in groups for name in group["params"]}
    members = [{index_of.get(name) for name in group["params"]} for group in groups]
    if known != set(index_of) or members != [set(group["params"]) for group in now]:
        changed = sorted(map(str, known.symmetric_difference(index_of)))
        raise CheckpointError(
            f"the optimizer of the checkpoint trained other parameters ({', '.join(changed[:5]) or 'in other groups'});"
            " resume with the same model, adapters and optimizer."
        )


def _blank(owner: nn.Parameter | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What shards are read into: where anything were left unread, it is not a number (or zero)."""
    fill = float("nan") if dtype.is_floating_point else 0
    if owner is not None and isinstance(owner.data, DTensor) and tuple(owner.shape) == shape:
        return torch.full_like(owner.data, fill, dtype=dtype)
    return torch.full(shape, fill, dtype=dtype)


def _numbers(plain: Any) -> dict[str, Any]:
    """Values of the state that are no tensors of their own, by `parameter/entry`."""
    return {
        f"{name}/{entry}": from_plain(value)
        for name, entries in plain["state"].items()
        for entry, value in entries.items()
        if not _is_reference(value)
    }


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__is__") == "tensor"


def _kind(tensor: torch.Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes: a state that lies under the name of another one of its shape is noticed."""
    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
    return zlib.crc32(flat.numpy().data)


def schedule_state(scheduler: Any) -> Any:
    """The state of a learning-rate schedule as plain values."""
    return {"kind": type(scheduler).__name__, "state": to_plain(scheduler.state_dict())}


def save_schedule(folder: Path, state: Any) -> None:
    """Writes the result of `schedule_state`."""
    _write_json(folder / SCHEDULE, state)


def load_schedule(folder: Path, scheduler: Any, optimizer: Any) -> None:
    """Reads the file of `save_schedule`, and sets the learning rates of the next step.

    Schedules that are functions of the step's number (all of transformers' but two) go on by the settings of this run:
    its rate, warm-up and length. Others go on from their state.

    Raises:
        CheckpointError: another kind of schedule, or another rate in one that goes on from its state.
    """
    saved = json.loads((folder / SCHEDULE).read_text(encoding="utf-8"))
    state, kind = from_plain(saved["state"]), type(scheduler).__name__
    if saved["kind"] != kind:
        raise CheckpointError(
            f"lr_scheduler_type: {saved['kind']} -> {kind}: the saved state does not fit another schedule. "
            "Resume with the former, or start a new run from the checkpoint's weights."
        )
    own = list(getattr(scheduler, "base_lrs", ()))
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        rates = [base * rule(state["last_epoch"]) for base, rule in zip(own, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state |= {"base_lrs": own, "_last_lr": rates}
    elif own != list(state.get("base_lrs", own)):
        raise CheckpointError(
            f"learning rate: {state['base_lrs']} -> {own}: a {kind} continues from the saved rate. Resume with the "
            "former, or start a new run from the checkpoint's weights."
        )
    scheduler.load_state_dict(state)


def random_state() -> Any:
    """The generators of this process, as plain values: Python's, NumPy's, torch's, and those of its CUDA devices."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - callbacks and transformers draw from the global generator
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    return to_plain(state)


def save_random_state(folder: Path, rank: int, state: Any) -> None:
    """Writes the result of `random_state`."""
    _write_json(_random_file(folder, rank), state)


def load_random_state(folder: Path, rank: int) -> bool:
    """Reads the file of `save_random_state` for this rank; False if there was no such rank. Only callbacks depend on
    it: the order of steps has a generator of its own, and dropout is an error.
    """
    path = _random_file(folder, rank)
    if not path.is_file():
        return False
    state = from_plain(json.loads(path.read_text(encoding="utf-8")))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.random.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    return True


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _names(optimizer: Any, model: nn.Module) -> dict[int, str]:
    """The names of an optimizer's parameters by their indices in its `state_dict`."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    flat = [parameter for group in inner_optimizer(optimizer).param_groups for parameter in group["params"]]
    return {index: known.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(flat)}


def _kind_of(optimizer: Any) -> str:
    return type(inner_optimizer(optimizer)).__name__


def _tensor_file(folder: Path) -> Path:
    return folder / f"{OPTIMIZER}.safetensors"


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank}.json"
