"""An optimizer's state follows the names of its parameters."""

import pytest
import torch
from torch import nn

from treewise.errors import CheckpointError
from treewise.trainer.checkpoint.optimizer_state import load_optimizer_state, optimizer_state


def model_and_optimizer(order: list[list[str]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = dict(model.named_parameters())
    return model, torch.optim.AdamW([{"params": [named[name] for name in group]} for group in order], lr=0.1)


def test_state_is_loaded_by_name_and_not_by_order():
    model, first = model_and_optimizer([["0.weight", "1.weight"], ["0.bias", "1.bias"]])
    model(torch.ones(1, 3)).square().sum().backward()
    first.step()
    plain, tensors = optimizer_state(first, model)
    other, second = model_and_optimizer([["1.weight", "0.weight"], ["1.bias", "0.bias"]])
    load_optimizer_state(second, other, plain, tensors)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(first.state[one]["exp_avg"], second.state[two]["exp_avg"])
    other, third = model_and_optimizer([["0.weight", "0.bias"], ["1.weight", "1.bias"]])
    with pytest.raises(CheckpointError, match="in other groups"):
        load_optimizer_state(third, other, plain, tensors)
