"""An optimizer's state in safetensors and JSON, under the names of its parameters: any number of processes resumes it.

`optimizer.json` lists every tensor and holds all else.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer

from treewise.trainer.checkpoint.coded_states import apart, in_parts
from treewise.trainer.checkpoint.json_values import to_plain

OPTIMIZER = "optimizer"  # .safetensors and .json; with sharded parameters a folder


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
        return {name: value for name, value in self.flat() if isinstance(value, torch.Tensor)}

    def flat(self) -> Iterator[tuple[str, Any]]:
        """Every entry with its value, by `parameter/entry`."""
        return ((f"{name}/{entry}", value) for name, each in self.entries.items() for entry, value in each.items())

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
    state, names = optimizer.state_dict(), names_of(optimizer, model)
    return OptimizerState(
        kind=type(inner(optimizer)).__name__,
        entries={names[index]: in_parts(entries) for index, entries in state["state"].items()},
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
        tensors = apart({name: each.detach().cpu().contiguous() for name, each in tensors.items()})
        save_file(tensors, folder / f"{OPTIMIZER}.safetensors")
    members = [name for group in state.groups for name in group["params"]]
    content = {
        "kind": state.kind,
        "state": entries,
        "without_state": [name for name in members if name not in state.entries],  # were never trained
        "groups": to_plain(state.groups),
        "rest": to_plain(state.rest),
        "shapes": {
            name: [list(each.shape), str(each.dtype).removeprefix("torch."), None if is_sharded else checksum(each)]
            for name, each in tensors.items()
        },
    }
    (folder / f"{OPTIMIZER}.json").write_text(json.dumps(content), encoding="utf-8")


def inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of accelerate's."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def names_of(optimizer: Optimizer, model: nn.Module) -> dict[int, str]:
    """The names of an optimizer's parameters by their indices in its `state_dict`."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    flat = [parameter for group in inner(optimizer).param_groups for parameter in group["params"]]
    return {index: known.get(id(parameter), f"parameter {index}") for index, parameter in enumerate(flat)}


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes: a state that lies under the name of another one of its shape is noticed."""
    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
    return zlib.crc32(flat.numpy().data)
