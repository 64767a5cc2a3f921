"""Weights come from the files that a manifest lists, and all of them come."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.helpers import tiny_model
from treewise.errors import CheckpointError
from treewise.testing.families import tiny_model as family_model
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.weights import load_weights


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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
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
