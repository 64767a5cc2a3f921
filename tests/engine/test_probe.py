"""The probe: exact models pass in any precision, leaks and lost gradients are errors in any precision."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from treewise import Forest, Trajectory, TreeEngine
from treewise.engine.gradient_probe import probe_gradients
from treewise.engine.probe import probe
from treewise.engine.stirring import adapters_stirred
from treewise.errors import UnsupportedModelError
from treewise.nn.model import split_model
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of

IDS = np.array([5, 9, 17, 23, 31, 40, 8, 12, 55, 3, 20, 44])
ROLLOUTS = [Trajectory([3, 4, 5, 6, 7, 8]), Trajectory([3, 4, 5, 9, 10]), Trajectory([3, 4, 11, 12, 13, 14, 15])]


def louder(model: nn.Module, factor: float = 3.0) -> Any:
    """With larger weights, as trained models have beside tiny random ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor if parameter.dim() > 1 else 1)
    return model


def run_probes(model: nn.Module) -> None:
    lm = split_model(model)
    probe(lm, "reference", IDS)
    probe_gradients(lm, "reference", IDS)


def averaged(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A leak: every token reads the mean of all tokens."""
    return (args[0] + 0.5 * args[0].mean(1, keepdim=True), *args[1:]), kwargs


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2", "glm4", "exaone4"])
def test_models_with_a_norm_after_each_layer_pass_under_autocast(family: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run_probes(louder(tiny_model(family)))


@pytest.mark.parametrize("seed", range(12))
def test_mixtures_of_experts_pass_in_bfloat16(seed: int) -> None:
    torch.manual_seed(seed)
    run_probes(louder(tiny_model("qwen3_moe")).bfloat16())


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_a_leak_is_an_error_in_any_precision(family: str, precision: str) -> None:
    model = louder(tiny_model(family))
    if precision == "bfloat16":
        model = model.bfloat16()
    model.model.layers[1].register_forward_pre_hook(averaged, with_kwargs=True)
    context = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
    with context, pytest.raises(UnsupportedModelError, match="leaks between branches"):
        run_probes(model)


def test_weights_that_are_not_finite_are_named_so() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)
    message = r"hidden rows that are not finite, .*: weights of model\.layers\.0\.mlp\.down_proj\.weight are not finite"
    with pytest.raises(UnsupportedModelError, match=message):
        run_probes(model)


def test_a_head_that_is_not_finite_is_named_so() -> None:
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[3, 2] = torch.inf
    with pytest.raises(UnsupportedModelError, match=r"logits that are not finite: weights of lm_head\.weight"):
        run_probes(model)


def detached(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cuts the graph on trees alone."""
    return (args, kwargs) if kwargs.get("treewise") is None else ((args[0].detach(), *args[1:]), kwargs)


@pytest.mark.parametrize("is_low", [False, True])
def test_a_parameter_that_the_tree_does_not_move_is_an_error(is_low: bool) -> None:
    model = louder(tiny_model(tie_word_embeddings=False))
    if is_low:
        model = model.bfloat16()
    model.model.layers[1].register_forward_pre_hook(detached, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens.weight has no gradient on the tree"):
        TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_stirred_for_the_probe_and_come_back_as_they_were() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    before = {name: (each, each.data_ptr(), each.clone(), each._version) for name, each in model.named_parameters()}
    with adapters_stirred(model):
        changed = [name for name, each in model.named_parameters() if not torch.equal(each, before[name][2])]
    assert changed == [name for name in before if "lora_" in name]
    for name, each in model.named_parameters():
        same, pointer, value, version = before[name]
        assert each is same
        assert each.data_ptr() == pointer
        assert each._version == version
        assert torch.equal(each, value)


def test_the_probe_leaves_gradients_and_their_hooks_alone() -> None:
    model = tiny_model()
    calls: list[nn.Parameter] = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(calls.append)
    run_probes(model)
    assert not calls
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("max_tokens", [None, 4])
def test_a_backward_without_a_gradient_is_an_error(max_tokens: int | None) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(1))
    model.register_parameter("unused", unused)
    with pytest.raises(UnsupportedModelError, match=r"nothing that .* computes on a tree requires a gradient"):
        TreeEngine(model, max_tokens).step(Forest.from_trajectories(ROLLOUTS))


@pytest.mark.filterwarnings("default")  # of building the model: transformers' own
def test_gemma3_with_images_has_no_cap_on_its_logits() -> None:
    """Gemma3ForConditionalGeneration does not apply `final_logit_softcapping`; Gemma3ForCausalLM does."""
    for family in ("gemma3", "gemma3_text"):
        model = tiny_model(family)
        model.config.get_text_config().final_logit_softcapping = 2.0
        louder(model, 6.0)
        _, _, expected = flat_sft(model, ROLLOUTS)
        model.zero_grad()
        TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))
        assert gradient_error(gradients_of(model), expected) < 1e-5


@pytest.mark.parametrize("change", [lambda x: x * 1.001 + 0.05, lambda x: 30 * torch.tanh(x / 30)])
def test_what_a_model_does_to_its_logits_is_found_where_they_are_small(change: Callable[..., torch.Tensor]) -> None:
    model = tiny_model()
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = forward
    with pytest.raises(UnsupportedModelError, match="logits from the same rows differ"):
        TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))
