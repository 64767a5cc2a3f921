"""Taking models apart: wrappers, adapters, quantised layers, heads that are none, masks and scales that hide."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from treewise import Forest, Trajectory, TreeEngine
from treewise.errors import UnsupportedModelError
from treewise.nn.attention import check_masks
from treewise.nn.attention.mask import LayerRule
from treewise.nn.attention.mask_audit import Observation
from treewise.nn.decoder import parameters_of
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of
from treewise.testing.strategies import random_tree

ROLLOUTS = [Trajectory([3, 4, 5, 6, 7, 8]), Trajectory([3, 4, 5, 9, 10]), Trajectory([3, 4, 11, 12, 13, 14, 15])]


def check(model: nn.Module, flat_model: nn.Module | None = None, attention: str = "auto") -> None:
    _, _, expected = flat_sft(model if flat_model is None else flat_model, ROLLOUTS)
    forest = Forest.from_trajectories(ROLLOUTS)
    for max_tokens in (None, 4):
        model.zero_grad()
        TreeEngine(model, max_tokens, attention).step(forest)
        found = {name.removeprefix("_orig_mod."): grad for name, grad in gradients_of(model).items()}
        assert found.keys() == expected.keys()
        assert gradient_error(found, expected) < expected.tolerance


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_and_untied_heads(is_tied: bool) -> None:
    check(tiny_model(tie_word_embeddings=is_tied))


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_a_compiled_model_is_trained_through_the_model_inside() -> None:
    model = tiny_model()
    check(torch.compile(model), model)


class Int8Linear(nn.Module):
    """A frozen layer that holds its weight in eight bits, as quantised bases do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", torch.round(linear.weight.detach() / scale).to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.codes.to(hidden.dtype) * self.scale).t()


def test_adapters_beside_quantised_frozen_layers() -> None:
    base = tiny_model()
    for layer in base.model.layers:
        layer.mlp.down_proj = Int8Linear(layer.mlp.down_proj)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    check(model)


def test_a_quantised_head_is_run_by_its_own_forward() -> None:
    model = tiny_model(tie_word_embeddings=False)
    head = model.lm_head
    model.lm_head = Int8Linear(head)
    with pytest.raises(UnsupportedModelError, match="the head is a Int8Linear without out_features"):
        TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))
    model.lm_head.out_features = head.out_features
    check(model)


@pytest.mark.parametrize("kind", [AutoModelForTokenClassification, AutoModelForSequenceClassification])
def test_classifiers_and_reward_heads_are_refused(kind: type) -> None:
    with pytest.raises(UnsupportedModelError, match="no language-model head"):
        TreeEngine(kind.from_config(tiny_model().config))


@pytest.mark.filterwarnings("default")  # of building the model: transformers' own
def test_rows_with_image_tokens_are_refused() -> None:
    model = tiny_model("llava", image_token_index=60)
    TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))
    with pytest.raises(UnsupportedModelError, match="position 2 holds token 60, the image_token_"):
        TreeEngine(model).step(Forest.from_trajectories([Trajectory([3, 4, 60, 5])]))


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("family", "rope", "limit"),
    [
        ("phi3", {**LONGROPE, "original_max_position_embeddings": 8}, 8),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, 7),
    ],
)
def test_positions_that_depend_on_the_length_of_a_sequence_are_refused_where_they_do(
    family: str, rope: dict, limit: int
) -> None:
    rope = {"rope_theta": 10000.0, **rope}
    model = tiny_model(family, rope_parameters=rope, max_position_embeddings=8, original_max_position_embeddings=8)
    check(model)
    long = [*ROLLOUTS, Trajectory([3, 4, *range(5, limit + 4)])]
    assert len(long[-1].token_ids) == limit + 1
    with pytest.raises(UnsupportedModelError, match=f"longest path has {limit + 1} tokens, but from {limit + 1} on"):
        TreeEngine(model).step(Forest.from_trajectories(long))


def test_value_heads_are_refused() -> None:
    class WithValueHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pretrained_model, self.v_head = tiny_model(), nn.Linear(32, 1)

    with pytest.raises(UnsupportedModelError, match=r"value head.*pass its pretrained_model"):
        TreeEngine(WithValueHead())
    with pytest.raises(UnsupportedModelError, match=r"str is not a transformers model. Load it first"):
        TreeEngine("runs/lora")


def test_a_model_that_is_random_while_training_is_refused() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: (args[0] + torch.randn_like(args[0]),))
    with pytest.raises(UnsupportedModelError, match=r"leaks|is random while training"):
        TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))


def test_a_window_that_only_the_mask_knows_is_found_at_any_length() -> None:
    """Phi-3.5-MoE tells its window to its mask alone; the tiny tree is far shorter than this window."""
    model = tiny_model("phimoe", sliding_window=2047)
    TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))
    model.model.layers[0].self_attn.config = type(model.config)(**{**model.config.to_dict(), "sliding_window": 2048})
    model.model.layers[0].self_attn.config._attn_implementation_internal = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="mask hides PhimoeAttention the key 2047 tokens back"):
        TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))


@pytest.mark.parametrize(
    ("said", "true"),
    [
        (LayerRule(1.0), LayerRule(1.0, window=5000)),
        (LayerRule(1.0, window=4096), LayerRule(1.0, window=4097)),
        (LayerRule(1.0, window=4096), LayerRule(1.0)),
        (LayerRule(1.0), LayerRule(1.0, chunk=8192)),
        (LayerRule(1.0, chunk=8192), LayerRule(1.0, chunk=4096)),
    ],
    ids=str,
)
def test_masks_are_compared_at_long_distances(said: LayerRule, true: LayerRule) -> None:
    def function_of(rule: LayerRule):
        def shows(batch, head, query, key):
            seen = key <= query
            if rule.window is not None:
                seen &= key > query - rule.window
            if rule.chunk is not None:
                seen &= key // rule.chunk == query // rule.chunk
            return seen

        return shows

    module = nn.Identity()
    for rule in (said, true):
        check_masks([Observation(module, rule, function_of(rule))])
    with pytest.raises(UnsupportedModelError, match="the model's mask"):
        check_masks([Observation(module, said, function_of(true))])


def test_a_mask_of_a_models_own_is_refused() -> None:
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    own = torch.zeros(1, 1, 1, 1)
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": own}), with_kwargs=True
    )
    with pytest.raises(UnsupportedModelError, match="builds a mask of its own"):
        TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))


def test_layers_that_hand_on_more_than_keys_are_found_by_the_probe() -> None:
    """A shift by one token along a path is exact in one micro-batch and lost at the edge of two."""
    model = tiny_model(num_hidden_layers=2)
    layer = model.model.layers[0]

    def add_first_row(_, args, kwargs):
        context = kwargs.get("treewise")
        first = args[0][:, :1] if context is None or not context.reads else 0.0
        return (args[0] + first, *args[1:]), kwargs

    layer.register_forward_pre_hook(add_first_row, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="other rows under a budget than without"):
        TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_a_layer_called_twice_refuses_checkpointing_with_a_budget() -> None:
    model = tiny_model("diffllama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    TreeEngine(model).step(Forest.from_trajectories(ROLLOUTS))
    with pytest.raises(UnsupportedModelError, match="attends 2 times in one forward"):
        TreeEngine(model, 4).step(Forest.from_trajectories(ROLLOUTS))


def test_the_probe_takes_tokens_that_are_all_the_same() -> None:
    """Tokens that are all the same make the probe's branches one; it must not mistake that for a leak."""
    model = tiny_model()
    tree = random_tree(np.random.default_rng(0), 5, 3)
    TreeEngine(model).step(Forest.from_nodes([-1, 0], [[5, 5, 5], [5, 5]]))
    TreeEngine(model).step(tree)


def test_models_that_drop_keyword_arguments_still_follow() -> None:
    assert parameters_of(type(tiny_model("stablelm").model))[1]
    check(tiny_model("stablelm"))


@pytest.mark.representatives("auto")
@pytest.mark.parametrize("attention", ["auto", "flex"])
def test_layers_that_count_rows_are_told_depths(attention: str) -> None:
    # Llama 4's layers without rotary positions: nothing differs below position `floor_scale`.
    model = tiny_model("llama4_text", no_rope_layers=[0, 1, 0], floor_scale=4, attn_scale=1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    check(model, attention=attention)


@pytest.mark.representatives("gpt_neo-True")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("family", ["codegen", "gpt_neo", "gptj"])
def test_layers_from_before_the_attention_interface(family: str, is_checkpointed: bool) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    untouched = copy.deepcopy(model)
    check(model, untouched)
    check(model, untouched, attention="reference")
    check(copy.deepcopy(model), untouched)
    ids = torch.arange(3, 12)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, untouched(input_ids=ids).logits)
    generated = [each.eval().generate(ids, max_new_tokens=4, do_sample=False) for each in (model, untouched)]
    assert torch.equal(*generated)
