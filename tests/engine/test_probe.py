"""The probe: exact models pass in any precision, leaks and lost gradients are errors in any precision."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tests.image_models import FAMILIES, IMAGE_TOKEN, png, seeing_model
from tests.needs import EXPERTS, GEMMA_3, KERNELS
from treewise import DPO, SFT, Forest, Trajectory, TreeEngine
from treewise.engine import edge_scorer, step
from treewise.engine.probe import probe
from treewise.errors import UnsupportedModelError
from treewise.nn import lm_head
from treewise.nn.attention import NOTHING, interface
from treewise.nn.attention.gateway import Gateway
from treewise.nn.model import split_model
from treewise.nn.recurrent import kinds
from treewise.planning.plans import lay_out
from treewise.serve.adapter_slots import Shape, Slots
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of
from treewise.tree.images import ImageSpan

IDS = np.array([5, 9, 17, 23, 31, 40, 8, 12, 55, 3, 20, 44])
ROLLOUTS = [Trajectory([3, 4, 5, 6, 7, 8]), Trajectory([3, 4, 5, 9, 10]), Trajectory([3, 4, 11, 12, 13, 14, 15])]


def louder(model: nn.Module, factor: float = 3.0) -> Any:
    """With larger weights, as trained models have beside tiny random ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor if parameter.dim() > 1 else 1)
    return model


def run_probes(model: nn.Module) -> None:
    probe(split_model(model), "reference", Forest.from_trajectories([Trajectory(IDS)]))


def averaged(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A leak: every token reads the mean of all tokens."""
    return (args[0] + 0.5 * args[0].mean(1, keepdim=True), *args[1:]), kwargs


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2", "glm4", "exaone4"])
def test_models_with_a_norm_after_each_layer_pass_under_autocast(family: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run_probes(louder(tiny_model(family)))


@pytest.mark.representatives("0", "3", "6")
@pytest.mark.parametrize("seed", range(12))
def test_mixtures_of_experts_pass_in_bfloat16(seed: int) -> None:
    torch.manual_seed(seed)
    run_probes(louder(tiny_model("qwen3_moe")).bfloat16())


@pytest.mark.parametrize(("seed", "is_trained"), [(3, False), (15, False), (29, True)])
def test_adapters_of_rank_1_pass_in_float64(seed: int, is_trained: bool) -> None:
    """A norm after each layer makes a result of rank 1 little more than its sign, which the model's own rounding to
    float32 can turn at single rows."""
    slots = Slots(tiny_model("gemma2", torch.float64), trains_all=False)
    weights = slots.new_weights(Shape(1), seed)
    torch.manual_seed(seed)
    for name, parameter in weights.parameters.items():
        if is_trained and "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    ids = np.random.default_rng(seed).integers(0, 64, 60)
    with slots.using(weights), torch.set_grad_enabled(not is_trained):
        probe(split_model(slots.model), "reference", Forest.from_trajectories([Trajectory(ids)]))


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


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [("model.layers.0.mlp.down_proj", torch.nan, "hidden rows"), ("lm_head", torch.inf, "logits")],
)
def test_weights_that_are_not_finite_are_named_so(path: str, value: float, what: str) -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.get_submodule(path).weight.data[3, 2] = value
    with pytest.raises(UnsupportedModelError, match=rf"{what} that are not finite: weights of {path}\.weight are not"):
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


def in_a_loop(self: Any, *args: Any) -> torch.Tensor:
    """A product of experts of others, which is right."""
    return type(self).forward.__wrapped__(self, *args)


def without_backward(self: Any, *args: Any) -> torch.Tensor:
    """As DeepGEMM's: kernels write into empty tensors, which no graph reaches."""
    return in_a_loop(self, *args).detach()


def rounded(self: Any, *args: Any) -> torch.Tensor:
    """With weights of experts in another precision."""
    return in_a_loop(self, *args) * 1.02


@EXPERTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("product", "words"),
    [
        (in_a_loop, ""),
        (without_backward, r"mlp.(gate.weight|experts.gate_up_proj) has no gradient on the tree"),
        (rounded, "differ"),
    ],
)
def test_an_untried_product_of_experts_is_held_against_a_loop(
    product: Any, words: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if product is rounded and dtype is torch.bfloat16:
        pytest.skip("2 % of the experts' part are within what bfloat16 moves")
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "of_others", product)
    model = louder(tiny_model("qwen3_moe")).to(dtype)
    model.set_experts_implementation("of_others")
    with pytest.raises(UnsupportedModelError, match=words) if words else nullcontext() as caught:
        run_probes(model)
    assert caught is None or "experts_implementation='of_others'; grouped_mm is tested" in str(caught.value)
    assert model.config._experts_implementation == "of_others"


@KERNELS
@pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels may be there")
@pytest.mark.parametrize("name", ["deepgemm", "sonicmoe"])
def test_a_product_of_experts_that_does_not_load_is_named(name: str) -> None:
    model = tiny_model("qwen3_moe", torch.bfloat16)
    model.set_experts_implementation(name)
    with pytest.raises(
        UnsupportedModelError, match=f"ImportError: .*experts_implementation='{name}'; grouped_mm is tested"
    ):
        TreeEngine(model).step([Trajectory([3, 4, 5])])


def test_the_probe_leaves_gradients_and_their_hooks_alone() -> None:
    model = tiny_model()
    calls: list[nn.Parameter] = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(calls.append)
    run_probes(model)
    assert not calls
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())


@pytest.mark.parametrize("objective", [SFT(), DPO(reference_free=True), lambda logprobs: -torch.cat(logprobs).sum()])
@pytest.mark.parametrize("max_tokens", [None, 4])
def test_a_backward_without_a_gradient_is_an_error(max_tokens: int | None, objective: Any) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(1))
    model.register_parameter("unused", unused)
    items = [replace(item, reward=float(index), group="a") for index, item in enumerate(ROLLOUTS)]
    with pytest.raises(UnsupportedModelError, match=r"nothing that .* computes on a tree requires a gradient"):
        TreeEngine(model, max_tokens).step(Forest.from_trajectories(items), objective)


@pytest.mark.filterwarnings("default")  # of building the model: transformers' own
@GEMMA_3
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


# -- deliberate faults ------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
FAULTS: dict[str, tuple[Callable[[Patch, Any], object], str]] = {}


def fault(family: str = "llama", *settings: Any) -> Callable[..., Any]:
    """Registers a fault of tiny models of this family, once for each setting."""

    def register(inject: Callable[..., object]) -> Callable[..., object]:
        for each in settings or ((),):
            given = each if isinstance(each, tuple) else (each,)
            name = "-".join([inject.__name__, *(getattr(each, "__name__", str(each)) for each in given)])
            FAULTS[name] = partial(_apply, inject, given), family
        return inject

    return register


def _apply(inject: Callable[..., object], given: tuple[Any, ...], patch: Patch, model: Any) -> None:
    inject(patch, model, *given)


def on_trees(layer: nn.Module) -> Callable[[], bool]:
    """Whether the present forward of a layer is of a tree."""
    is_tree = [False]

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        is_tree[0] = kwargs.get("treewise") is not None

    layer.register_forward_pre_hook(note, with_kwargs=True)
    return lambda: is_tree[0]


def on_rows(patch: Patch, change: Callable[[torch.Tensor], torch.Tensor], model: Any, *, trees_alone: bool) -> None:
    """The rows ([1, L, M]) that the second layer's MLP adds are changed."""
    layer = model.model.layers[1]
    is_tree = on_trees(layer)
    layer.mlp.register_forward_hook(lambda _, __, out: change(out) if is_tree() or not trees_alone else out)


def beyond(count: int, rows: torch.Tensor) -> torch.Tensor:
    return (torch.arange(rows.shape[1]) >= count)[None, :, None]


def on_layouts(patch: Patch, change: Callable[[Any], dict[str, np.ndarray]]) -> None:
    def changed(*args: Any) -> Any:
        layout = lay_out(*args)
        return replace(layout, **change(layout))

    patch.setattr(step, "lay_out", changed)


def on_results(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """What a function of ours returns is changed."""
    own = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(own(*args, **kwargs)))


CHANGES = {
    "row mean": lambda rows: rows + rows.mean(1, keepdim=True),
    "token shift": lambda rows: rows + rows.roll(1, dims=1),
    "normalised over tokens": lambda rows: rows / rows.std(1, keepdim=True),
}


@fault("llama", *((change, trees_alone) for change in CHANGES for trees_alone in (True, False)))
def rows_changed(patch, model, change, trees_alone):
    on_rows(patch, CHANGES[change], model, trees_alone=trees_alone)


@fault("llama", 16, 24, 32, 48)
def leak_beyond(patch, model, count):
    on_layouts(patch, lambda each: {"hi": np.where(np.arange(len(each.hi)) >= count - 8, each.num_tokens, each.hi)})


@fault("llama", 16, 24, 32)
def mean_beyond(patch, model, count):
    on_rows(
        patch,
        lambda rows: rows + (rows * beyond(count, rows)).mean(1, keepdim=True) * beyond(count, rows),
        model,
        trees_alone=False,
    )


@fault("llama", 0, 10, 25, 37)
def depth_beyond(patch, model, count):
    on_layouts(patch, lambda each: {"depth": each.depth + (each.depth > count)})


@fault("llama", (32, True), (32, False), (48, False))
def scale_beyond(patch, model, count, trees_alone):
    on_rows(patch, lambda rows: rows * (1 + 0.1 * beyond(count, rows)), model, trees_alone=trees_alone)


@fault("llama", 5, 16, 36)
def extra_window(patch, model, window):
    on_results(patch, interface, "layer_rule", lambda rule: replace(rule, window=window))


@fault("mistral")
def window_of_one_more(patch, model):
    on_results(patch, interface, "layer_rule", lambda rule: replace(rule, window=rule.window + 1))


@fault("gemma2")
def cap_of_scores_is_lost(patch, model):
    louder(model, 6.0)
    on_results(patch, interface, "layer_rule", lambda rule: replace(rule, softcap=None))


@fault()
def scores_scaled(patch, model):
    on_results(patch, interface, "layer_rule", lambda rule: replace(rule, scaling=rule.scaling * 1.05))


@fault()
def edge_without_gradient(patch, model):
    own = lm_head._gradients_of

    def changed(loss_of, values, edges):
        loss, grads = own(loss_of, values, edges)
        return loss, [torch.cat([torch.zeros_like(grad[:1]), grad[1:]]) for grad in grads]

    patch.setattr(lm_head, "_gradients_of", changed)


class Scaled(torch.autograd.Function):
    """Identity whose backward has a factor."""

    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@fault("llama", *(("mlp.down_proj", "weight", factor) for factor in (1.05, 0.0, 1.01)))
@fault("qwen2", *(("self_attn.v_proj", "bias", factor) for factor in (1.05, 0.0)))
def gradient_of_one_parameter(patch, model, path, name, factor):
    layer, is_tree = model.model.layers[1].get_submodule(path), on_trees(model.model.layers[1])

    def forward(rows):
        given = {"weight": layer.weight, "bias": layer.bias}
        return nn.functional.linear(rows, **(given | {name: Scaled.apply(given[name], factor)} if is_tree() else given))

    patch.setattr(layer, "forward", forward)


@fault()
def gradient_of_one_weight_by_a_hook(patch, model):
    is_tree = on_trees(model.model.layers[1])
    model.model.layers[1].mlp.down_proj.weight.register_hook(lambda grad: grad * 1.05 if is_tree() else grad)


def on_gateways(patch: Patch, change: Callable[..., tuple[Any, ...]], name: str) -> None:
    own = getattr(Gateway, name)
    patch.setattr(Gateway, name, lambda self, *args: own(self, *change(*args)))


@fault("llama", 1.05, 1.01)
def gateway_keys_times(patch, model, factor):
    on_gateways(patch, lambda call, key, value: (call, key * factor, value), "write")


@fault("llama", torch.bfloat16, torch.float16)
def gateway_values_downcast(patch, model, dtype):
    on_gateways(patch, lambda call, key, value: (call, key, value.to(dtype).to(value.dtype)), "write")


@fault("llama", (1.0, 0.0), (1.0, 1.05), (0.0, 1.0))
def gateway_gradients_times(patch, model, of_keys, of_values):
    on_gateways(patch, lambda call, rows, key, value: (call, rows, key * of_keys, value * of_values), "add_gradients")


@fault()
def gateway_gradients_replace_one_another(patch, model):
    own = Gateway.add_gradients

    def replaced(self, call, *args):
        self.key_grads.pop(call, None)
        self.value_grads.pop(call, None)
        own(self, call, *args)

    patch.setattr(Gateway, "add_gradients", replaced)


@fault()
def key_at_the_edge_of_a_piece_is_hidden(patch, model):
    def hidden(layout):
        lo, hi = layout.lo.copy(), layout.hi.copy()
        count = len(hi) - layout.num_tokens
        if count:
            hi[count - 1] = lo[count - 1]
        return {"hi": hi}

    on_layouts(patch, hidden)


@fault()
def one_key_too_many_of_the_sibling(patch, model):
    on_layouts(patch, lambda each: {"hi": np.minimum(each.hi + 1, each.num_tokens)})


@fault()
def multiplicity_is_ignored(patch, model):
    own = SFT.terms
    patch.setattr(SFT, "terms", lambda self, forest: own(replace(self, weighting="once"), forest))


@fault()
def scores_of_a_fork_from_the_row_before(patch, model):
    own = edge_scorer.edges_of

    def shifted(*args):
        source, target = own(*args)
        return np.where(source == 0, 0, source - (target == target[-1])), target

    patch.setattr(edge_scorer, "edges_of", shifted)


@fault()
def downcast_on_trees(patch, model):
    on_rows(patch, lambda rows: rows.bfloat16().float(), model, trees_alone=True)


@fault()
def held_micro_batches_get_no_gradient(patch, model):
    own = step.TreeContext

    def context(*args, injects, **kwargs):
        return own(*args, injects=None if kwargs["writes"] is not None else injects, **kwargs)

    patch.setattr(step, "TreeContext", context)


@fault("qwen3_moe", 1.05, 0.0)
def router_weights_times(patch, model, factor):
    layer, is_tree = model.model.layers[1], on_trees(model.model.layers[1])
    layer.mlp.register_forward_pre_hook(lambda _, args: (Scaled.apply(args[0], factor),) if is_tree() else args)


@fault("qwen3_next")
def states_of_siblings(patch, model):
    on_results(patch, kinds, "_initial", lambda states: None if states is None else states.roll(1, 0))


@fault("qwen3_next", 0.0)
@fault("lfm2", 0.01)
def state_gradients_times(patch, model, factor):
    own = Gateway.add_state_gradients
    patch.setattr(Gateway, "add_state_gradients", lambda self, *args: own(self, *args[:-1], args[-1] * factor))


def test_a_piece_whose_gradients_stop_below_an_image_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained is the projector alone: a piece of text below an image needs no gradient for itself."""
    monkeypatch.setattr(step, "EVERYTHING", NOTHING)
    model, images = seeing_model("llava"), FAMILIES["llava"].images()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("projector" in name)
    item = Trajectory([5, *[IMAGE_TOKEN] * 4, 6, 7, 8], images=(ImageSpan(png(1), 1, 5),))
    with pytest.raises(UnsupportedModelError, match=r"gradient of model\.multi_modal_projector.* differs on the tree"):
        TreeEngine(model, processor=images).check(Forest.from_trajectories([item]))


@pytest.mark.parametrize("name", FAULTS)
def test_deliberate_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, family = FAULTS[name]
    model = tiny_model(family)
    inject(monkeypatch, model)
    with pytest.raises(UnsupportedModelError) as error:
        TreeEngine(model).check(Forest.from_trajectories(ROLLOUTS))
    assert " fails on " not in str(error.value)  # by a fault that breaks instead of computing something else
