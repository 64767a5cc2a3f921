"""Learned operators: where they begin, that their einsums are the dense maps, that fitting lowers the loss."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.experimental.grow.test_families import save_random
from treewise.errors import ConfigError
from treewise.experimental.grow import grow, operators
from treewise.experimental.grow.configuration import Growth
from treewise.experimental.grow.growth_plan import plan_of
from treewise.experimental.grow.operators import Mango, trained_operator
from treewise.experimental.grow.widening import Widening, role_of, widened
from treewise.tree import Forest, Trajectory


def begin(
    folder: Path, family: str = "qwen2", rank: int = 1, layers: int = 3
) -> tuple[Mango, object, object, Widening]:
    model = save_random(folder, family)
    plan = plan_of(model.config, Growth(2, num_layers=layers, operator="mango", noise=0.0))
    grown = AutoModelForCausalLM.from_config(plan.grown_config)
    return Mango(model, grown, plan, rank), model, grown, plan.widening


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gpt_neox", "gemma3_text", "phi3"])
def test_without_noise_it_begins_as_a_copy(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "MAP_NOISE", 0.0)
    operator, model, grown, widening = begin(tmp_path, family)
    tensors = operator()
    assert set(dict(grown.named_parameters())) <= set(tensors)
    for key, tensor in model.state_dict().items():
        if tensor.dim() == 3 or "layers.1." in key:
            continue
        role = role_of(key, tuple(tensor.shape), model.config, tuple(grown.state_dict()[key].shape))
        torch.testing.assert_close(tensors[key], widened(key, tensor, role, widening))
        assert tensors[key].shape == grown.state_dict()[key].shape


def test_the_ring_is_the_dense_map(tmp_path: Path) -> None:
    """Its einsums against the full tensor S of arXiv 2310.10699, contracted over all indices at once; at rank 1 it is
    the Kronecker product of the four maps.
    """
    operator, *_ = begin(tmp_path, rank=2)
    name, members = next((key, value) for key, value in operator.classes.items() if len(value) > 1 and " 1" in key)
    stack = operator.stacks[members[0]]
    dense = torch.einsum(
        "acbr,rpos,sklt,tqia->bcoplkiq",
        operator.matrices[name],
        operator.outputs[stack.output],
        operator.layers,
        operator.inputs[stack.input],
    )  # [b1, b2, o1, o2, l1, l2, i1, i2]
    weights = torch.stack([operator.stacks[member].weights[:, 0] for member in members])  # [b1, l1, o1, i1]
    expected = torch.einsum("bcoplkiq,bloi->ckpq", dense, weights)
    for position, member in enumerate(members):
        torch.testing.assert_close(operator.grown_stack(member)[:, 0], expected[position], rtol=1e-4, atol=1e-4)


def trees() -> list[Forest]:
    rows = [Trajectory([3, 4, 5, *[6 + branch, 7, 8 + branch] * 6]) for branch in range(3)]
    return [Forest.from_trajectories(rows)]


@pytest.mark.parametrize("rank", [1, 2])
def test_fitting_lowers_the_loss(rank: int, tmp_path: Path) -> None:
    model = save_random(tmp_path, "qwen2")
    growth = Growth(2, 3, operator="mango", noise=0.0, forests=trees(), rank=rank, steps=12, learning_rate=3e-3)
    grown, losses, _ = trained_operator(model, plan_of(model.config, growth), growth)
    assert losses[-1] < losses[0] - 0.05
    assert grown.config.num_hidden_layers == 3
    assert len(losses) == 12


@pytest.mark.representatives("qwen3_moe-2", "gpt_neox-3")
@pytest.mark.parametrize(("family", "width"), [("phi3", 2), ("mixtral", 2), ("qwen3_moe", 2), ("gpt_neox", 3)])
def test_an_operator_that_learned_nothing_keeps_the_function(
    family: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "MAP_NOISE", 0.0)
    save_random(tmp_path / "small", family)
    fit = {"operator": "mango", "forests": trees(), "steps": 1, "learning_rate": 0.0, "noise": 0.0}
    report = grow(tmp_path / "small", tmp_path / "big", width=width, **fit)
    assert report.logit_difference < 1e-5
    assert (report.steps, report.rank) == (1, 1)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "big", output_loading_info=True)
    assert not info["missing_keys"]
    grow(tmp_path / "big", tmp_path / "bigger", width=2)  # what was written can be grown again


def test_data_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    far = [Forest.from_trajectories([Trajectory([3, 61])])]
    with pytest.raises(ConfigError, match="the data holds token 61, but vocab_size is 61"):
        grow(tmp_path / "small", tmp_path / "big", width=2, operator="mango", forests=far)
    assert not list(tmp_path.glob("*big*"))


def test_gradients_of_the_maps_are_those_of_autograd(tmp_path: Path) -> None:
    """Carrying gradients from the engine into the operator equals differentiating the whole by torch."""
    from treewise.engine import TreeEngine
    from treewise.objectives import SFT

    operator, _, grown, _ = begin(tmp_path, layers=2)
    operator, grown = operator.double(), grown.double()
    operator.stacks = [replace(each, weights=each.weights.double()) for each in operator.stacks]
    tensors = {name: each.double() for name, each in operator().items()}
    forest = trees()[0]
    row = torch.tensor([[int(token) for token in forest.trajectories[0].token_ids]])
    only = Forest.from_trajectories([forest.trajectories[0]])
    logits = torch.func.functional_call(grown, tensors, kwargs={"input_ids": row}).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], row[0, 1:])
    expected = torch.autograd.grad(loss, list(operator.parameters()), allow_unused=True)
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            parameter.copy_(tensors[name])
    TreeEngine(grown).step(only, SFT())
    tensors = {name: each.double() for name, each in operator().items()}
    made = [name for name, _ in grown.named_parameters() if tensors[name].requires_grad]
    torch.autograd.backward(
        [tensors[name] for name in made], [dict(grown.named_parameters())[name].grad for name in made]
    )
    for parameter, gradient in zip(operator.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


def test_unequal_layers_are_an_error(tmp_path: Path) -> None:
    model = save_random(tmp_path, "qwen3_moe", mlp_only_layers=[0])
    plan = plan_of(model.config, Growth(2, operator="mango", noise=0.0))
    with pytest.raises(NotImplementedError, match="in 1 of 2 layers"):
        Mango(model, AutoModelForCausalLM.from_config(plan.grown_config), plan)
