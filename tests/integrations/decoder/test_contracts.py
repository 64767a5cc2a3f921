"""How OpenRLHF, SkyRL, Automodel and torchtitan call their models, which need GPUs themselves: trees against rows.

Each stand-in calls a model as the wrapper of that project does, and makes of its answer what that wrapper makes. Its
rows without the line are the oracle.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import treewise as tw
from tests.integrations.decoder.test_seam import CLOSE, IGNORED, model_of, padded
from treewise.errors import UnsupportedModelError
from treewise.testing.oracle import gradient_error, gradients_of

TEMPERATURE = 0.7


def test_rows_with_adapters_of_their_own_are_left():
    """PEFT's `adapter_names`, whose hooks stay on adapters for the call alone."""
    kind = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(model_of(), kind, "one")
    model.add_adapter("two", kind)
    model.double().eval()
    batch = padded()
    names = ["one", "two", "__base__", *["two"] * (len(batch["input_ids"]) - 3)]
    expected = model(**batch, adapter_names=names).logits
    sharing = tw.share_prefixes(model)
    assert torch.equal(model(**batch, adapter_names=names).logits, expected)
    assert sharing.counts.left == {"adapter_names gives rows adapters of their own (PEFT)": 1}
    model(**batch)
    assert (sharing.counts.num_calls, sharing.counts.num_left) == (1, 1)


def scored_later(logits, ids):
    """[B, L] log-probs of each row's next tokens, the first token's at the end, as RL trainers roll them."""
    return logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None])[..., 0]


def positions_with_ones(mask):
    """Positions of real tokens; padding has position 1."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)


# -- OpenRLHF 0.11.2: `Actor.forward` ---------------------------------------------------------------------------------


def openrlhf_padded(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    out = model(ids, attention_mask=mask, position_ids=positions_with_ones(mask))
    out["logits"] = out["logits"].to(torch.float64)  # float32 there
    out["logits"].div_(TEMPERATURE)
    return scored_later(out["logits"], ids)[mask.bool()]


def openrlhf_packed(model, batch):
    ids, positions = without_padding(batch)
    out = model(ids, attention_mask=None, position_ids=positions)
    out["logits"] = out["logits"].to(torch.float64)
    return scored_later(out["logits"].div_(TEMPERATURE), ids)[0]


def without_padding(batch):
    """The real tokens in one row, and their positions in their own."""
    real = batch["attention_mask"].bool()
    return batch["input_ids"][real][None], positions_with_ones(batch["attention_mask"])[real][None]


# -- SkyRL 0.4.0: `HFModelWrapper.forward` ----------------------------------------------------------------------------


def skyrl_padded(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(ids, attention_mask=mask, position_ids=positions_with_ones(mask))["logits"]
    logits.div_(TEMPERATURE)
    with torch.no_grad():  # entropies, which are logged
        assert -(logits.log_softmax(-1) * logits.softmax(-1)).sum(-1).min() > 0
    return scored_later(logits, ids)[mask.bool()]


def skyrl_packed(model, batch):
    ids, positions = without_padding(batch)
    logits = model(ids, attention_mask=None, position_ids=positions)["logits"]
    logits.div_(TEMPERATURE)
    return scored_later(logits, ids)[0]


# -- Automodel 0.7.0: the fine-tuning recipe's forward and loss -------------------------------------------------------


def automodel_logits(model, batch):
    out = model(**{name: value for name, value in batch.items() if name != "labels"})
    return -nn.functional.cross_entropy(
        out.logits.flatten(0, 1), next_labels(batch), ignore_index=IGNORED, reduction="none"
    )


def automodel_linear(model, batch):
    """With a cross-entropy that multiplies by the head's weight itself, a part of the rows at a time."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    out = model(**{**inputs, "logits_to_keep": 1, "output_hidden_states": True})
    assert "hidden_states" in out
    assert out.logits.shape[1] == 1
    hidden, weight = out.hidden_states[-1].flatten(0, 1), model.get_output_embeddings().weight
    losses = [
        nn.functional.cross_entropy(rows @ weight.T, labels, ignore_index=IGNORED, reduction="none")
        for rows, labels in zip(hidden.split(5), next_labels(batch).split(5), strict=True)
    ]
    return -torch.cat(losses)


def next_labels(batch):
    return nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].flatten()


CALLS = (openrlhf_padded, openrlhf_packed, skyrl_padded, skyrl_packed, automodel_logits, automodel_linear)


def loss_and_gradients(call, model, batch):
    """Of a policy gradient with another weight for each token."""
    model.zero_grad()
    log_probs = call(model, batch)
    weights = torch.linspace(-1, 2, len(log_probs), dtype=log_probs.dtype)
    (log_probs * weights).sum().backward()
    return log_probs.detach(), gradients_of(model)


@pytest.mark.parametrize("max_tokens", [None, 6])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("call", CALLS, ids=lambda each: each.__name__)
def test_calls_of(call, side, max_tokens):
    batch, model = padded(side), model_of()
    model.config.use_cache = False  # as each of them sets it
    expected, gradients = loss_and_gradients(call, model, batch)
    sharing = tw.share_prefixes(model, max_tokens)
    found, tree = loss_and_gradients(call, model, batch)
    assert (sharing.counts.num_calls, sharing.counts.num_left) == (1, 0), sharing.counts
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
    assert gradient_error(tree, gradients) < CLOSE


def test_rewards_of_openrlhf_without_gradients():
    """Old and reference log-probs."""
    batch, model = padded("left"), model_of().eval()
    with torch.no_grad():
        expected = openrlhf_padded(model, batch)
        sharing = tw.share_prefixes(model)
        torch.testing.assert_close(openrlhf_padded(model, batch), expected, rtol=CLOSE, atol=CLOSE)
    assert sharing.counts.num_calls == 1


# -- torchtitan 0.3.0: a decoder of its own ---------------------------------------------------------------------------


class TitanDecoder(nn.Module):
    """Its parts and its call: `model(tokens, positions=, attention_masks=)`."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(64, 8), nn.ModuleDict({"0": nn.Linear(8, 8)})
        self.norm, self.lm_head = nn.RMSNorm(8), nn.Linear(8, 64, bias=False)

    def forward(self, tokens, positions=None, attention_masks=None):
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))


def test_models_that_are_not_of_transformers_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="TitanDecoder is not a transformers model"):
        tw.share_prefixes(TitanDecoder())
