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
from treewise.trainer.checkpoint.load_optimizer import load_optimizer
from treewise.trainer.checkpoint.optimizer_state import optimizer_state, save_optimizer
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


def swap(values: dict[str, Any], one: str, other: str) -> None:
    values[one], values[other] = values[other], values[one]


def forget(plain: Any, tensors: Tensors) -> None:
    """A moment, in all places that a file has."""
    del plain["state"][A]["exp_avg"], plain["shapes"][f"{A}/exp_avg"], tensors[f"{A}/exp_avg"]


def forget_parameter(plain: Any, tensors: Tensors) -> None:
    for entry in plain["state"].pop(A):
        del plain["shapes"][f"{A}/{entry}"], tensors[f"{A}/{entry}"]


def reshape(plain: Any, tensors: Tensors) -> None:
    tensors[f"{A}/exp_avg"] = torch.zeros(2, 3)
    plain["shapes"][f"{A}/exp_avg"] = [[2, 3], "float32"]


def retype(plain: Any, tensors: Tensors) -> None:
    tensors[f"{A}/exp_avg"] = tensors[f"{A}/exp_avg"].to(torch.bfloat16)
    plain["shapes"][f"{A}/exp_avg"] = [[3, 3], "bfloat16"]


def extra(plain: Any, tensors: Tensors) -> None:
    plain["state"][A]["max_exp_avg_sq"] = {"__is__": "tensor", "name": f"{A}/max_exp_avg_sq"}
    plain["shapes"][f"{A}/max_exp_avg_sq"] = [[3, 3], "float32"]
    tensors[f"{A}/max_exp_avg_sq"] = torch.zeros(3, 3)


def endless(plain: Any, tensors: Tensors) -> None:
    plain["state"][A]["step"] = 10**400
    del plain["shapes"][f"{A}/step"], tensors[f"{A}/step"]


def to_other_group(plain: Any, _: Tensors) -> None:
    plain["groups"][1]["lr"] = 1.0
    plain["groups"][1]["params"].append(plain["groups"][0]["params"].pop())


def fill(entry: str, value: float) -> Callable[[Any, Tensors], None]:
    def change(plain: Any, tensors: Tensors) -> None:
        tensors[f"{A}/{entry}"] = torch.full_like(tensors[f"{A}/{entry}"], value)
        del plain["shapes"][f"{A}/{entry}"][2]

    return change


# What is done to the values of optimizer.json and to the tensors, and what the error says.
CUTS: dict[str, tuple[Callable[[Any, Tensors], object], str]] = {
    "a moment": (forget, r"state of 0.weight has exp_avg_sq, step; this run's keeps exp_avg, exp_avg_sq, step"),
    "a moment's tensor": (lambda p, t: t.pop(f"{A}/exp_avg"), "0.weight/exp_avg is missing"),
    "a moment's entry": (lambda p, t: without(p, "state", A, "exp_avg"), "0.weight/exp_avg is of no parameter"),
    "a moment's shape": (lambda p, t: without(p, "shapes", f"{A}/exp_avg"), "is listed with no shape"),
    "a parameter": (forget_parameter, "0.weight has no state, and is not among those that were never trained"),
    "a parameter's entry": (lambda p, t: without(p, "state", A), "0.weight/exp_avg is of no parameter"),
    "all of them": (lambda p, t: at(p, ("state",), {}), "is of no parameter"),
    "state": (lambda p, t: without(p, "state"), "damaged .KeyError: 'state'"),
    "shapes": (lambda p, t: without(p, "shapes"), "damaged .KeyError: 'shapes'"),
    "groups": (lambda p, t: without(p, "groups"), "damaged .KeyError: 'groups'"),
    "kind": (lambda p, t: without(p, "kind"), "damaged .KeyError: 'kind'"),
    "a group": (lambda p, t: without(p, "groups", 1), "bias has no state, and is not among"),
    "a group's parameters": (lambda p, t: without(p, "groups", 1, "params"), "damaged .KeyError: 'params'"),
    "a member": (lambda p, t: without(p, "groups", 0, "params", 0), "0.weight has no state"),
    "a name twice": (lambda p, t: at(p, ("groups", 0, "params", 0), B), "0.weight has no state"),
    "a member in another group": (to_other_group, r"in groups of lr=0.1 and 1.0, and this run has them in one"),
    "a flag": (lambda p, t: at(p, ("groups", 0, "maximize"), True), "maximize=True, now False"),
    "a rate": (lambda p, t: at(p, ("groups", 0, "lr"), float("nan")), "lr=nan, which no run sets"),
    "a rate of text": (lambda p, t: at(p, ("groups", 0, "lr"), "high"), "lr='high', which no run sets"),
    "other kind": (lambda p, t: at(p, ("kind",), "SGD"), "optim: SGD -> AdamW"),
    "shape": (reshape, r"0.weight has exp_avg as \[2, 3\] float32, where this run keeps \[3, 3\] float32"),
    "shape of the tensor": (lambda p, t: at(t, (f"{A}/exp_avg",), torch.zeros(2, 3)), r"6 numbers of \[2, 3\]"),
    "shape of the list": (lambda p, t: at(p, ("shapes", f"{A}/exp_avg", 0), [9]), r"has exp_avg as \[9\] float32"),
    "no shape": (lambda p, t: at(p, ("shapes", f"{A}/exp_avg", 0), [-3, 3]), r"has the shape \[-3, 3\]"),
    "dtype": (retype, r"as \[3, 3\] bfloat16, where this run keeps \[3, 3\] float32"),
    "dtype of the tensor": (lambda p, t: at(t, (f"{A}/exp_avg",), torch.zeros(3, 3).half()), "float16, where 9 of"),
    "no dtype": (lambda p, t: at(p, ("shapes", f"{A}/exp_avg", 1), "load"), "and dtype 'load'"),
    "extra entry": (extra, "has exp_avg, exp_avg_sq, max_exp_avg_sq, step; this run's keeps"),
    "extra tensor": (
        lambda p, t: at(t, ("2.weight/exp_avg",), torch.zeros(3)),
        "2.weight/exp_avg is unknown to its list",
    ),
    "a moment not finite": (fill("exp_avg", float("nan")), "0.weight/exp_avg holds numbers that are not finite"),
    "a square below zero": (fill("exp_avg_sq", -1.0), "0.weight/exp_avg_sq holds -1; it is never below 0"),
    "a step below zero": (fill("step", -1.0), "0.weight/step holds -1"),
    "a part of a step": (fill("step", 1.5), "0.weight/step is 1.5; steps are whole"),
    "a step beyond numbers": (endless, "0.weight/step holds numbers that are not finite"),
    "a number for a name": (lambda p, t: at(p, ("groups", 0, "params", 0), 0), "json: 0 has no state"),
    "swapped tensors": (lambda p, t: swap(t, f"{A}/exp_avg", f"{B}/exp_avg"), "is not what was saved"),
    "swapped references": (lambda p, t: swap(p["state"], A, B), "refers to the tensor '1.weight"),
    "a moment of another": (
        lambda p, t: at(p, ("state", A, "exp_avg", "name"), f"{B}/exp_avg"),
        "exp_avg of 0.weight refers to the tensor '1.weight/exp_avg'",
    ),
    "a step of text": (lambda p, t: at(p, ("state", A, "step"), "2"), "0.weight/step is of no parameter"),
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
