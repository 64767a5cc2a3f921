"""An optimizer's state follows the names of its parameters, and files that were cut are errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from treewise.errors import CheckpointError
from treewise.trainer.checkpoint.optimizer_state import load_optimizer, optimizer_state, save_optimizer
from treewise.trainer.checkpoint.weights import save_shards


def model_and_optimizer(order: list[list[str]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = dict(model.named_parameters())
    return model, torch.optim.AdamW([{"params": [named[name] for name in group]} for group in order], lr=0.1)


def test_state_is_loaded_by_name_and_not_by_order(tmp_path: Path) -> None:
    model, first = model_and_optimizer([["0.weight", "1.weight"], ["0.bias", "1.bias"]])
    model(torch.ones(1, 3)).square().sum().backward()
    first.step()
    save_optimizer(tmp_path, optimizer_state(first, model))
    other, second = model_and_optimizer([["1.weight", "0.weight"], ["1.bias", "0.bias"]])
    load_optimizer(tmp_path, second, other)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(first.state[one]["exp_avg"], second.state[two]["exp_avg"])
    other, third = model_and_optimizer([["0.weight", "0.bias"], ["1.weight"], [], ["1.bias"]])
    load_optimizer(tmp_path, third, other)  # as on another mesh
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(first.state[one]["exp_avg_sq"], third.state[two]["exp_avg_sq"])
    first.param_groups[1]["lr"] = 0.2
    save_optimizer(tmp_path, optimizer_state(first, model))
    with pytest.raises(CheckpointError, match=r"in groups of lr=0.1 and 0.2, and this run"):
        load_optimizer(tmp_path, third, other)


A, B = "0.weight", "1.weight"  # of one shape
Tensors = dict[str, torch.Tensor]


def saved(folder: Path) -> tuple[nn.Module, Any]:
    """Files of an optimizer after a step, and a model and optimizer that they fit."""
    model, optimizer = model_and_optimizer([[A, B], ["0.bias", "1.bias"]])
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    folder.mkdir(exist_ok=True)
    save_optimizer(folder, optimizer_state(optimizer, model))
    return model_and_optimizer([[A, B], ["0.bias", "1.bias"]])


def without(values: dict[str, Any], *path: Any) -> None:
    *parents, last = path
    for each in parents:
        values = values[each]
    del values[last]


def at(values: Any, path: tuple[Any, ...], value: Any) -> None:
    for each in path[:-1]:
        values = values[each]
    values[path[-1]] = value


def forget_parameter(plain: Any, tensors: Tensors) -> None:
    for entry in plain["state"].pop(A):
        del plain["shapes"][f"{A}/{entry}"], tensors[f"{A}/{entry}"]


def reshape(plain: Any, tensors: Tensors) -> None:
    tensors[f"{A}/exp_avg"] = torch.zeros(2, 3)
    plain["shapes"][f"{A}/exp_avg"] = [[2, 3], "float32"]


def to_other_group(plain: Any, _: Tensors) -> None:
    plain["groups"][1]["lr"] = 1.0
    plain["groups"][1]["params"].append(plain["groups"][0]["params"].pop())


FIELDS = ("state", "shapes", "groups", "kind")
# What is done to the values of optimizer.json and to the tensors, and what the error says.
CUTS: dict[str, tuple[Callable[[Any, Tensors], object], str]] = {
    "a moment's tensor": (lambda p, t: t.pop(f"{A}/exp_avg"), "0.weight/exp_avg is missing"),
    "a moment's shape": (lambda p, t: without(p, "shapes", f"{A}/exp_avg"), "damaged .KeyError: '0.weight/exp_avg'"),
    "a parameter": (forget_parameter, "0.weight has no state"),
    "all of them": (lambda p, t: at(p, ("state",), {}), "0.bias has no state"),
    **{name: (lambda p, t, name=name: without(p, name), f"damaged .KeyError: '{name}'") for name in FIELDS},
    "a group": (lambda p, t: without(p, "groups", 1), "bias has no state"),
    "a group's parameters": (lambda p, t: without(p, "groups", 1, "params"), "damaged .KeyError: 'params'"),
    "a member": (lambda p, t: without(p, "groups", 0, "params", 0), "0.weight has no state"),
    "a member in another group": (to_other_group, r"in groups of lr=0.1 and 1.0, and this run has them in one"),
    "a flag": (lambda p, t: at(p, ("groups", 0, "maximize"), True), "maximize=True, now False"),
    "other kind": (lambda p, t: at(p, ("kind",), "SGD"), "optim: SGD -> AdamW"),
    "shape": (reshape, r"0.weight has exp_avg as \[2, 3\], and the parameter is \[3, 3\]"),
    "shape of the tensor": (lambda p, t: at(t, (f"{A}/exp_avg",), torch.zeros(2, 3)), r"6 numbers of \[2, 3\]"),
    "no shape": (lambda p, t: at(p, ("shapes", f"{A}/exp_avg", 0), [-3, 3]), "damaged .RuntimeError"),
    "dtype of the tensor": (lambda p, t: at(t, (f"{A}/exp_avg",), torch.zeros(3, 3).half()), "float16, where 9 of"),
    "no dtype": (lambda p, t: at(p, ("shapes", f"{A}/exp_avg", 1), "load"), "damaged .TypeError"),
    "a number for a name": (lambda p, t: at(p, ("groups", 0, "params", 0), 0), "json: 0 has no state"),
    "a tensor for a list": (lambda p, t: at(p, ("state",), []), "damaged .AttributeError"),
}


@pytest.mark.parametrize("name", CUTS)
def test_files_that_were_cut_are_errors(name: str, tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path)
    load_optimizer(tmp_path, optimizer, model)
    cut, message = CUTS[name]
    json_file, tensor_file = tmp_path / "optimizer.json", tmp_path / "optimizer.safetensors"
    plain, tensors = json.loads(json_file.read_text()), load_file(tensor_file)
    cut(plain, tensors)
    json_file.write_text(json.dumps(plain))
    save_file({key: each.clone() for key, each in tensors.items()}, tensor_file)
    with pytest.raises(CheckpointError, match=message):
        load_optimizer(tmp_path, optimizer, model)


@pytest.mark.parametrize("file", ["optimizer.json", "optimizer.safetensors"])
@pytest.mark.parametrize("share", [None, 0.0, 0.3, 0.999])
def test_files_that_end_early_are_errors(file: str, share: float | None, tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path)
    content = (tmp_path / file).read_bytes()
    if share is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match="damaged"):
        load_optimizer(tmp_path, optimizer, model)


def test_a_lost_or_cut_file_of_shards_is_an_error(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path)
    whole = load_file(tmp_path / "optimizer.safetensors")
    (tmp_path / "optimizer.safetensors").unlink()
    folder = tmp_path / "optimizer"
    folder.mkdir()
    for rank, rows in enumerate((slice(0, 2), slice(2, 3))):  # as two processes write them
        parts = {name: each[rows].clone() for name, each in whole.items() if each.dim()}
        parts |= {name: each for name, each in whole.items() if not each.dim() and not rank}
        offsets = {
            name: {"saved_offsets": [rows.start if axis == 0 else 0 for axis in range(each.dim())]}
            for name, each in parts.items()
        }
        save_file(parts, folder / f"shard-{rank}.safetensors", metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
    load_optimizer(tmp_path, optimizer, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], whole[f"{name}/exp_avg"])
    for rank in (0, 1):
        file = folder / f"shard-{rank}.safetensors"
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=r"is missing|a file is missing or is another run"):
            load_optimizer(tmp_path, optimizer, model)
        file.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match="missing or damaged"):
            load_optimizer(tmp_path, optimizer, model)
        file.write_bytes(content)


def test_parameters_that_were_never_trained_have_no_state_and_get_none(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer([[A, B], ["0.bias", "1.bias"]])
    model[1](torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    save_optimizer(tmp_path, optimizer_state(optimizer, model))
    other, fresh = model_and_optimizer([[A, B], ["0.bias", "1.bias"]])
    load_optimizer(tmp_path, fresh, other)
    assert [parameter in fresh.state for parameter in other.parameters()] == [False, False, True, True]
    save_shards(tmp_path / "optimizer", optimizer_state(optimizer, model).tensors)
    (tmp_path / "optimizer.safetensors").unlink()
    load_optimizer(tmp_path, fresh, other)
    assert torch.equal(fresh.state[other[1].bias]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"])
