"""Models that change after an engine was built, and calls that would silently do nothing."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import DoraCaching
from torch import nn
from torch.nn.utils import parametrize

from tests.needs import GEMMA_2
from treewise import Distillation, Forest, Trajectory, TreeEngine
from treewise.engine import checks, step
from treewise.errors import ConfigError, DataError, UnsupportedModelError
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_logprobs, flat_sft, gradient_error, gradients_of

TOLERANCE = 5e-6
ROLLOUTS = [Trajectory([3, 4, 5, 6, 7, 8]), Trajectory([3, 4, 5, 9, 10]), Trajectory([3, 4, 11, 12, 13, 14, 15])]
FOREST = Forest.from_trajectories(ROLLOUTS)
BUDGETS = pytest.mark.parametrize("max_tokens", [None, 4])


def check(engine: TreeEngine, model: nn.Module) -> None:
    model.zero_grad()
    loss = engine.step(FOREST).loss
    found = gradients_of(model)
    expected_loss, _, expected = flat_sft(model, ROLLOUTS)
    assert loss == pytest.approx(expected_loss, rel=expected.tolerance)
    assert gradient_error(found, expected) < expected.tolerance


@BUDGETS
def test_a_head_that_was_replaced(max_tokens: int | None) -> None:
    model = tiny_model(tie_word_embeddings=False)
    engine = TreeEngine(model, max_tokens)
    engine.step(FOREST)
    model.resize_token_embeddings(70)
    check(engine, model)
    model.lm_head = nn.Linear(32, 70)
    check(engine, model)


@BUDGETS
def test_adapters_that_were_added(max_tokens: int | None) -> None:
    model = tiny_model(tie_word_embeddings=False)
    engine = TreeEngine(model, max_tokens)
    engine.step(FOREST)
    targets = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    check(engine, get_peft_model(model, targets))


def with_other_logits(model: nn.Module, change: str) -> None:
    """What changes the logits outside of the decoder."""
    if change == "hook":
        model.register_forward_hook(lambda _, __, out: {**out, "logits": out.logits * 1.5})
    elif change == "forward":
        own = model.forward

        def forward(*args, **kwargs):
            out = own(*args, **kwargs)
            out.logits = out.logits * 1.5
            return out

        model.forward = forward
    elif change == "class":
        model.__class__ = type("Louder", (type(model),), {"forward": louder_forward(type(model).forward)})
    elif change == "attribute":
        model.logit_scale = 1.5
    elif change == "configuration":
        model.config.logits_scaling = 1.5
    else:
        model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] + args[0].mean(1, keepdim=True),))


def louder_forward(own):
    def forward(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    return forward


@BUDGETS
@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", "hook", "LlamaForCausalLM has other forward hooks"),
        ("llama", "forward", "LlamaForCausalLM has another forward"),
        ("llama", "class", "Louder has another class"),
        ("cohere", "attribute", "CohereForCausalLM.logit_scale is 1.5, was"),
        ("granite", "configuration", "config.logits_scaling is 1.5, was"),
        ("llama", "layer", r"model.layers.1 \(LlamaDecoderLayer\) has other forward pre-hooks"),
    ],
)
def test_what_a_model_does_since_its_last_step(family: str, change: str, named: str, max_tokens: int | None) -> None:
    model = tiny_model(family)
    engine = TreeEngine(model, max_tokens)
    engine.step(FOREST)
    with_other_logits(model, change)
    with pytest.raises(UnsupportedModelError, match=named):
        engine.step(FOREST)


def test_states_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, probed = tiny_model(), []
    own = checks.probe
    monkeypatch.setattr(checks, "probe", lambda *args, **kwargs: probed.append(own(*args, **kwargs)))
    engine = TreeEngine(model, 4)

    def count(change: Callable[[], object]) -> int:
        before = len(probed)
        for _ in range(2):
            change()
            engine.step(FOREST)
            with torch.no_grad():
                engine.evaluate(FOREST)
        return len(probed) - before

    assert count(lambda: None) == 1
    assert count(lambda: model.eval() if model.training else model.train()) == 1
    assert count(lambda: model.model.embed_tokens.requires_grad_(False)) == 1
    assert count(lambda: None) == 0
    handle = model.register_forward_hook(lambda *_: None)
    assert count(lambda: None) == 1
    handle.remove()
    assert count(lambda: None) == 0


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_an_attention_that_was_chosen_anew(before: str) -> None:
    model = tiny_model()
    engine = TreeEngine(model, 4)
    engine.step(FOREST)
    model.set_attn_implementation(before)
    check(engine, model)


@GEMMA_2
def test_another_default_device_changes_nothing() -> None:
    model = tiny_model("gemma2")
    expected_loss, _, expected = flat_sft(model, ROLLOUTS)
    model.zero_grad()
    with torch.device("meta"):
        engine = TreeEngine(model, 4, check=False)
        loss = engine.step(FOREST).loss
    assert loss == pytest.approx(expected_loss, rel=expected.tolerance)
    assert gradient_error(gradients_of(model), expected) < expected.tolerance


@BUDGETS
def test_weights_that_change_before_the_backward_are_an_error(max_tokens: int | None) -> None:
    model = tiny_model()
    loss = sum(each.sum() for each in TreeEngine(model, max_tokens).logprobs(FOREST))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3)
    # ConfigError in parts; autograd's own where it is one graph.
    with pytest.raises((ConfigError, RuntimeError), match=r"changed between|modified by an inplace"):
        loss.backward()


def test_a_step_without_gradients_is_an_error() -> None:
    model = tiny_model()
    engine = TreeEngine(model, 4)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off, pytest.raises(ConfigError, match="disabled"):
            engine.step(FOREST)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter"):
        engine.step(FOREST)


def test_a_teacher_of_another_vocabulary_is_named() -> None:
    streams = {"teacher_ids": np.full((4, 1), 64), "teacher_logprobs": np.full((4, 1), -0.5)}
    forest = Forest.from_trajectories([Trajectory([3, 4, 5, 6], **streams)])
    engine = TreeEngine(tiny_model())
    for call in (engine.step, engine.evaluate):
        with pytest.raises(DataError, match="teacher_ids hold token 64"):
            call(forest, Distillation())


@pytest.mark.parametrize("max_tokens", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_hooks_on_gradients_run_once_with_the_whole_gradient(max_tokens: int | None, tied: bool) -> None:
    """As layer-wise optimizers do: clip, step and drop each gradient as it comes. Any of them twice is another step."""

    def clipped(grad: torch.Tensor) -> torch.Tensor:
        return grad * (1e-2 / grad.norm()).clamp(max=1)

    def descend(each: torch.Tensor) -> None:
        assert not each.grad.is_sparse
        with torch.no_grad():
            each -= 10 * each.grad / (1 + each.grad.norm())
        each.grad = None

    model = tiny_model(tie_word_embeddings=tied)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        for parameter in each.parameters():
            parameter.register_hook(clipped)
            parameter.register_post_accumulate_grad_hook(descend)
    count = sum(len(item) - 1 for item in ROLLOUTS)
    (-sum(flat_logprobs(twin, item).sum() for item in ROLLOUTS) / count).backward()  # in one backward
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    TreeEngine(model, max_tokens).step(FOREST)
    moved = {name: each.detach() - before[name] for name, each in model.named_parameters()}
    expected = {name: each.detach() - before[name] for name, each in twin.named_parameters()}
    assert gradient_error(moved, expected) < TOLERANCE
    assert all(each.grad is None and len(each._backward_hooks) == 1 for each in model.parameters())


def test_hooks_stay_and_do_not_run_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny_model(), []
    weight = model.lm_head.weight
    handle = weight.register_post_accumulate_grad_hook(calls.append)
    weight.grad = torch.ones_like(weight)
    engine = TreeEngine(model, 4)
    engine.evaluate(FOREST)
    with monkeypatch.context() as patch:
        patch.setattr(step, "run_decoder", lambda *_args, **_options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step(FOREST)
    assert not calls
    assert bool((weight.grad == 1).all())
    engine.step(FOREST)
    assert len(calls) == 1
    handle.remove()
    engine.step(FOREST)
    assert len(calls) == 1


def test_adapters_on_parameters_are_no_change_of_weights() -> None:
    # PEFT puts them on at every forward, which counts the parameter's version up.
    adapters = LoraConfig(r=2, target_parameters=["experts.gate_up_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model("mixtral"), adapters)
    _, _, expected = flat_sft(model, ROLLOUTS)
    model.zero_grad()
    engine = TreeEngine(model, 4)
    halves = [sum(each.sum() for each in engine.logprobs(FOREST)) for _ in range(2)]
    (-(halves[0] + halves[1]) / 2 / sum(len(each) - 1 for each in ROLLOUTS)).backward()
    assert gradient_error(gradients_of(model), expected) < expected.tolerance


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@BUDGETS
def test_weights_that_are_kept_between_forwards_are_refused(max_tokens: int | None) -> None:
    """A walk at a budget reads them without a graph first, and a probe with parameters of its own."""
    model = tiny_model("llama")
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())
    engine = TreeEngine(model, max_tokens)
    words = r"cached\(\) keeps computed weights \(model.layers.0.mlp.up_proj\)"
    with parametrize.cached(), pytest.raises(ConfigError, match=words):
        engine.step(FOREST)
    check(engine, model)


def test_a_cache_of_adapters_is_refused() -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)).eval()
    engine = TreeEngine(model)
    with DoraCaching(), pytest.raises(ConfigError, match=r"peft's DoraCaching keeps computed weights \(base_model"):
        engine.step(FOREST)
    check(engine, model)


def test_a_probe_draws_no_random_number_of_the_run() -> None:
    model = tiny_model("llama")
    model.model.layers[0].register_forward_pre_hook(lambda *_: None if torch.rand(1) < 2 else ())
    before = torch.get_rng_state()
    TreeEngine(model).check(FOREST)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_what_layers_read_beside_their_arguments_needs_checkpoints_that_are_not_reentrant() -> None:
    """As states of another layer; seen when such checkpoints are switched on after the model was probed."""
    model: Any = tiny_model("llama").train()
    first, second, *_ = (layer.mlp for layer in model.model.layers)
    kept: dict[str, torch.Tensor] = {}
    first.register_forward_hook(lambda _module, _inputs, output: kept.update(own=output))
    second.register_forward_hook(lambda _module, _inputs, output: output + 0.5 * kept["own"])
    engine = TreeEngine(model)
    check(engine, model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    words = (
        r"gradient of .* differs on the tree .* reentrant gradient checkpoints pass no gradient .*another kind of check"
    )
    with pytest.raises(UnsupportedModelError, match=words):
        engine.step(FOREST)
    model.gradient_checkpointing_disable()
    check(engine, model)
