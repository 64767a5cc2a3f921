"""A grown gradient is the gradient of the grown model; a grown state is one that an optimizer goes on from."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.grow.test_families import save_random
from treewise.errors import CheckpointError, ConfigError
from treewise.grow import grow
from treewise.grow.configuration import Growth
from treewise.grow.growth import grown_entry, load_whole
from treewise.grow.growth_plan import plan_of, shapes_of
from treewise.trainer.checkpoint import optimizer_state
from treewise.trainer.checkpoint.contents import load_initial_optimizer


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    if not hasattr(model.config, "num_experts"):  # products of experts are of 32 bits at most
        model.double()
    model.eval()(input_ids=tokens, labels=tokens).loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("family", "changes", "target"),
    [
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}, Growth(2, inner=3)),
        ("qwen2", {"tie_word_embeddings": True}, Growth(3)),
        ("gemma3_text", {"tie_word_embeddings": True}, Growth(2)),
        ("gemma3_text", {"tie_word_embeddings": False}, Growth(2)),
        ("opt", {"tie_word_embeddings": True}, Growth(2)),
        ("phi3", {}, Growth(2)),
        ("qwen3_moe", {"norm_topk_prob": True}, Growth(2, experts=3)),
        ("olmo2", {}, Growth(2)),
    ],
)
def test_grown_gradients_are_those_of_the_grown_model(
    family: str, changes: dict[str, bool], target: Growth, tmp_path: Path
) -> None:
    save_random(tmp_path / "small", family, **changes)
    grow(
        tmp_path / "small", tmp_path / "big", width=target.width, inner=target.inner, experts=target.experts, noise=0.0
    )
    small = load_whole(tmp_path / "small")
    plan = plan_of(small.config, target)
    expected = gradients(load_whole(tmp_path / "big"))
    shapes = shapes_of(plan.grown_config)
    own = gradients(small)
    assert set(own) == set(expected)
    for name, gradient in own.items():
        found = grown_entry(name, "exp_avg", gradient, plan, shapes)
        torch.testing.assert_close(found, expected[name], rtol=2e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        squared = grown_entry(name, "exp_avg_sq", gradient**2, plan, shapes)
        torch.testing.assert_close(squared, found**2)


def trained(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model after one step of AdamW, and the checkpoint of it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    tokens = torch.arange(20).reshape(2, 10)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.save_pretrained(folder)
    optimizer_state.save_optimizer(folder, optimizer_state.optimizer_state(optimizer, model))
    return model, optimizer


def test_an_optimizer_goes_on_from_a_grown_state(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "qwen2")
    _, before = trained(tmp_path / "small")
    report = grow(tmp_path / "small", tmp_path / "big", width=2, num_layers=4, optimizer="grow")
    assert report.optimizer == "grow"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "big")
    names = dict(model.named_parameters())
    small = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "small").named_parameters())
    even = list(small)[::2]
    groups = [[], []]
    for name, parameter in names.items():
        parts = name.split(".layers.")
        source = name if len(parts) == 1 else f"{parts[0]}.layers.{int(parts[1][0]) // 2}{parts[1][1:]}"
        groups[source not in even].append(parameter)
    optimizer = torch.optim.AdamW([{"params": each} for each in groups], lr=7e-4, weight_decay=0.3)
    load_initial_optimizer(tmp_path / "big", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [7e-4, 7e-4]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3]
    assert not optimizer.state.get(names["model.layers.1.mlp.up_proj.weight"])  # begins as the identity
    moment = optimizer.state[names["model.layers.2.mlp.up_proj.weight"]]["exp_avg"]
    of_small = next(
        state["exp_avg"]
        for parameter, state in before.state.items()
        if parameter.shape == (40, 32) and torch.equal(parameter, small["model.layers.1.mlp.up_proj.weight"])
    )
    torch.testing.assert_close(moment, of_small.repeat(2, 2) / 2)
    tokens = torch.arange(20).reshape(2, 10)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_what_cannot_be_grown_or_loaded(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    with pytest.raises(ConfigError, match=r"no optimizer\.safetensors"):
        grow(tmp_path / "small", tmp_path / "big", width=2, optimizer="grow")
    with pytest.raises(ConfigError, match="choose drop, or grow with operator copy or stack"):
        grow(tmp_path / "small", tmp_path / "big", width=2, operator="mango", optimizer="grow")
    trained(tmp_path / "small")
    text = (tmp_path / "small" / "optimizer.json").read_text()
    file = tmp_path / "small" / "optimizer.safetensors"
    whole = file.read_bytes()
    (tmp_path / "small" / "optimizer.json").write_text(text.replace('exp_avg"', 'row_mean"'))
    save_file({re.sub("exp_avg$", "row_mean", name): each for name, each in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="keeps 'row_mean', which has no growth rule"):
        grow(tmp_path / "small", tmp_path / "big", width=2, optimizer="grow")
    assert not list(tmp_path.glob("*big*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        load_initial_optimizer(tmp_path, model, torch.optim.AdamW(model.parameters()))
    (tmp_path / "small" / "optimizer.json").write_text(text)
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"initial_optimizer: .*AdamW -> SGD"):
        load_initial_optimizer(tmp_path / "small", model, torch.optim.SGD(model.parameters()))
    assert json.loads(text)["kind"] == "AdamW"
    assert load_file(tmp_path / "small" / "optimizer.safetensors")
