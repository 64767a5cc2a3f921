"""Weights come from the files that a manifest lists, and all of them come."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.helpers import tiny_model
from treewise.errors import CheckpointError, ConfigError
from treewise.testing.families import tiny_model as family_model
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.weights import load_weights, refuse_unsaved


def saved(model, tmp_path, step=1, without=()):
    """A checkpoint of a model."""
    folder = store.new_folder(tmp_path, step)
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        save_file({name: each for name, each in state.items() if name not in without}, file, {"format": "pt"})
    return store.publish(folder, {"step": step})


def scrambled(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def assert_equal(one, other):
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_stray_file_is_not_loaded(tmp_path, family):
    model = family_model(family)
    checkpoint = saved(model, tmp_path)
    zeros = {name: torch.zeros_like(each) for name, each in load_file(checkpoint / "model.safetensors").items()}
    save_file(zeros, checkpoint / "model_zero.safetensors", {"format": "pt"})
    other = scrambled(family_model(family))
    load_weights(other, checkpoint)
    assert_equal(model, other)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_missing_weight_is_an_error_by_name(tmp_path, family):
    model = family_model(family)
    checkpoint = saved(model, tmp_path, without=["model.norm.weight"])
    with pytest.raises(CheckpointError, match=r"checkpoint-1: holds no weights for model\.norm\.weight \(1 in all\)"):
        load_weights(scrambled(family_model(family)), checkpoint)


def test_adapters_are_loaded_whole_or_not_at_all(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        return peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))

    model = scrambled(adapted())
    load_weights(other := adapted(), saved(model, tmp_path))
    trained = [(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True) if one.requires_grad]
    assert trained
    assert all(torch.equal(one, two) for one, two in trained)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    with pytest.raises(CheckpointError, match=r"holds no weights for .*q_proj\.lora_B\.weight"):
        load_weights(adapted(), saved(model, tmp_path, 2, without=[name]))


OF_PEFT = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning", "ignore::UserWarning")
ADAPTERS = {
    "lora": {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"},
    "lora with biases": {"peft_type": "LORA", "r": 2, "target_modules": "all-linear", "bias": "all"},
    "head": {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "tokens": {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    "vera": {"peft_type": "VERA", "r": 2, "target_modules": ["q_proj"]},
    "ia3": {"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []},
}


def adapted(name):
    peft = pytest.importorskip("peft")
    settings = dict(ADAPTERS[name])
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(settings.pop("peft_type"))]
    return peft.get_peft_model(tiny_model(), kind(task_type="CAUSAL_LM", **settings))


@OF_PEFT
@pytest.mark.parametrize("name", ADAPTERS)
def test_what_adapters_train_is_saved(name):
    refuse_unsaved(adapted(name))


@OF_PEFT
def test_parameters_that_are_trained_beside_adapters_are_an_error_before_training():
    model = adapted("lora")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        getattr(model.base_model.model.model.layers[0], norm).weight.requires_grad_(True)
    with pytest.raises(
        ConfigError, match=r"2 parameters trained beside .*layers\.0\.input_layernorm\.weight.*modules_to_save"
    ):
        refuse_unsaved(model)


@OF_PEFT
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_rows_that_peft_would_not_save_are_an_error_before_training(tmp_path, target):
    peft = pytest.importorskip("peft")
    tiny_model().save_pretrained(tmp_path)
    model = type(tiny_model()).from_pretrained(tmp_path)
    model.resize_token_embeddings(70)
    other = {"embed_tokens": "lm_head", "lm_head": "embed_tokens"}[target]
    with pytest.raises(ConfigError, match=f"{other} was resized from 61 tokens, and would be in no checkpoint"):
        refuse_unsaved(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", target])))
    refuse_unsaved(peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj", target])))
