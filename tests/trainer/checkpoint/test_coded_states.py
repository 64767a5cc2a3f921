"""States of 8 bits are saved in parts, and come back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.checkpoint.test_optimizer_state import A, B, model_and_optimizer
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint import coded_states
from treewise.trainer.checkpoint import load_optimizer as load_module
from treewise.trainer.checkpoint.load_optimizer import load_optimizer
from treewise.trainer.checkpoint.optimizer_state import optimizer_state, save_optimizer


class Coded(torch.Tensor):
    """A tensor that is made of others, as torchao's states of 8 bits are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, *_: Any) -> "Coded":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, table: torch.Tensor, signed: bool, _dtype: torch.dtype) -> None:
        self.codes, self.table, self.signed = codes, table, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "table"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, facts: Any, *_: Any) -> "Coded":
        return cls(parts["codes"], parts["table"], *facts)

    @classmethod
    def __torch_dispatch__(cls, _function: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Any:
        return args[0]


TABLE = torch.arange(256, dtype=torch.float32)  # one for all parameters


class Coding(torch.optim.Optimizer):
    """Keeps codes for weights, and numbers for biases. in_dict: as bitsandbytes does."""

    in_dict = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 1 or parameter.device.type == "meta":
                self.state[parameter]["exp_avg"] = torch.ones_like(parameter)
                continue
            codes = (7 * torch.arange(parameter.numel())).reshape(parameter.shape).to(torch.uint8)
            if self.in_dict:
                self.state[parameter]["quantized"] = {"state1": codes, "qmap1": TABLE}
            else:
                self.state[parameter]["exp_avg"] = Coded(codes, TABLE, True, torch.float32)


@pytest.mark.parametrize("in_dict", [False, True])
def test_states_of_8_bits_are_saved_in_parts(in_dict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_states, "COMPOSED", {"Coded": __name__})
    monkeypatch.setattr(Coding, "in_dict", in_dict)
    monkeypatch.setattr(load_module, "_kinds_after_a_step", lambda *_: None)
    model, _ = model_and_optimizer([[A, B], ["0.bias", "1.bias"]])
    first, second = Coding(model.parameters()), Coding(model.parameters())
    first.step()
    save_optimizer(tmp_path, optimizer_state(first, model))
    load_optimizer(tmp_path, second, model)
    for parameter in model.parameters():
        one, two = first.state[parameter], second.state[parameter]
        if parameter.dim() == 1:
            assert torch.equal(one["exp_avg"], two["exp_avg"])
        elif in_dict:
            assert torch.equal(one["quantized"]["state1"], two["state1"].to(torch.uint8))
            assert torch.equal(two["qmap1"], TABLE)
        else:
            assert type(two["exp_avg"]) is Coded
            assert torch.equal(one["exp_avg"].codes, two["exp_avg"].codes)
            assert torch.equal(two["exp_avg"].table, TABLE)
            assert two["exp_avg"].signed
    content = json.loads((tmp_path / "optimizer.json").read_text())
    if not in_dict:
        content["state"][A]["exp_avg.is"][0] = "Popen"
        (tmp_path / "optimizer.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="exp_avg is a Popen, which no optimizer of this version keeps"):
            load_optimizer(tmp_path, second, model)
