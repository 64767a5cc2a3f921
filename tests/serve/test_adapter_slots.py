"""Weights that take turns in one model."""

import pytest
import torch

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.serve.adapter_slots import Shape, Slots
from treewise.testing.families import tiny_model

IDS = torch.arange(3, 12)[None]


def logits(slots, weights):
    with slots.using(weights), torch.no_grad():
        return slots.model(input_ids=IDS, use_cache=False).logits


def test_weights_stand_in_the_model_in_their_turn_alone():
    """Of two shapes and two of one shape; the base model is as it was whoever had the turn."""
    slots = Slots(tiny_model("llama").eval(), trains_all=False)
    plain = logits(slots, None)
    everybody = [slots.new_weights(Shape(rank, mlp=rank == 2), seed) for rank, seed in ((2, 0), (2, 1), (3, 0))]
    assert all(torch.equal(logits(slots, each), plain) for each in everybody)  # adapters change nothing yet
    for number, weights in enumerate(everybody):
        torch.manual_seed(number)
        for each in weights.parameters.values():
            torch.nn.init.normal_(each, std=0.1)
    first = [logits(slots, each) for each in everybody]
    assert min(float((a - b).abs().max()) for i, a in enumerate([plain, *first]) for b in [plain, *first][:i]) > 1e-3
    with pytest.raises(RuntimeError, match="ended"), slots.using(everybody[0]):
        raise RuntimeError("ended")
    for index in (2, 0, 1):
        assert torch.equal(logits(slots, everybody[index]), first[index])
    assert torch.equal(logits(slots, None), plain)


def test_all_weights_are_a_copy_for_each():
    slots = Slots(tiny_model("llama").eval(), trains_all=True)
    one, other = slots.new_weights(Shape(0), 0), slots.new_weights(Shape(0), 0)
    plain = logits(slots, None)
    with torch.no_grad():
        next(iter(one.parameters.values())).add_(1.0)
    assert not torch.equal(logits(slots, one), plain)
    assert torch.equal(logits(slots, other), plain)
    with pytest.raises(ConfigError, match="adapters were asked for"):
        slots.new_weights(Shape(2), 0)


def test_what_has_no_layer_to_adapt_is_named():
    slots = Slots(tiny_model("llama"), trains_all=False)
    with pytest.raises(UnsupportedModelError, match="no linear layer"):
        slots.new_weights(Shape(2, mlp=False, attn=False, unembed=False), 0)


@pytest.mark.parametrize("family", ["falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"])
def test_mixers_of_which_peft_refuses_a_layer_get_adapters_on_the_others(family):
    """A refusal by PEFT would come halfway, with adapters on some layers of the model that all share."""
    slots = Slots(tiny_model(family).eval(), trains_all=False)
    plain, weights = logits(slots, None), slots.new_weights(Shape(2), 0)
    assert torch.equal(logits(slots, weights), plain)
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights.parameters}
    assert "in_proj" in names
    assert "out_proj" not in names
