"""The seam itself: every field and gradient of TRL's fused head, when it is served, and when it is left alone."""

import copy
from functools import wraps
from types import MethodType

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

import treewise
from tests.integrations.trl.helpers import model_for_trl
from treewise.engine import checks
from treewise.testing.oracle import gradient_error, gradients_of

# PEFT still uses names that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
IGNORED = -100


def fused(family="llama", dtype=torch.float64, **head):
    model = model_for_trl(family, dtype)
    add_fused_lm_head(model, outputs=FIELDS, **head)
    return model


def batch(side="right"):
    """Six rows of two prompts, of several lengths; labels are scored after the prompt."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(9, 64, (5,), generator=generator) for _ in range(2)]
    rows = [
        torch.cat([prompt, torch.randint(9, 64, (2 + number % 4,), generator=generator)])
        for number, prompt in enumerate(prompts * 3)
    ]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for number, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        ids[number, start : start + len(row)] = row
        mask[number, start : start + len(row)] = 1
        labels[number, start + 4 : start + len(row)] = row[4:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def outputs_and_gradients(model, inputs):
    model.zero_grad()
    out = model(**inputs, fused_lm_head=True)
    weight = torch.linspace(-1, 2, out.log_probs.numel()).view(out.log_probs.shape)
    (out.loss + (weight * out.log_probs + weight.flip(1) * out.entropy).sum()).backward()
    return out, gradients_of(model)


def assert_served(model, inputs, **options):
    """Fields, loss, mask and gradients are those of TRL's own pass over the rows."""
    expected, expected_gradients = outputs_and_gradients(model, inputs)
    sharing = treewise.share_prefixes(model, **options)
    found, gradients = outputs_and_gradients(model, inputs)
    assert sharing.counts.num_calls == 1
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_alike = "loss" not in name  # transformers' routing loss is in float32, whatever the model is in
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6, msg=name, check_dtype=is_alike)
    assert gradient_error(gradients, expected_gradients) < 1e-6
    return sharing


@pytest.mark.representatives("plain-left-6", "plain-right-None", "tempered-right-6")
@pytest.mark.parametrize("max_tokens", [None, 6])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("head", [{}, {"temperature": 0.6, "cast_lm_head_to_fp32": True}], ids=["plain", "tempered"])
def test_fields_and_gradients(head, side, max_tokens):
    assert_served(fused(**head), batch(side), max_tokens=max_tokens)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2", "qwen3_moe", "gpt_oss"])
def test_heads_that_scale_or_cap_logits(family):
    assert_served(fused(family), batch(), max_tokens=16)


def test_counts():
    sharing = assert_served(fused(), batch())
    counts = sharing.counts
    assert (counts.num_rows, counts.num_flat_tokens) == (6, int(batch()["attention_mask"].sum()))
    # Two prompts of 5 tokens, and of each row all but its last token, which predicts nothing.
    assert counts.num_tree_tokens == counts.num_flat_tokens - 6 - 4 * 5
    assert counts.num_computed_tokens == counts.num_tree_tokens
    assert "share ratio" in repr(sharing)


def test_shifted_labels():
    inputs = batch()
    labels = inputs.pop("labels")
    inputs["shift_labels"] = torch.cat([labels[:, 1:], torch.full((6, 1), 3)], dim=1)
    inputs["shift_labels"][inputs["attention_mask"] == 0] = IGNORED
    assert_served(fused(), inputs)


@pytest.mark.parametrize("max_tokens", [None, 12])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_routing_losses(family, max_tokens):
    """Of all real tokens, whether or not a label depends on them, and part of the loss."""
    assert_served(fused(family), batch("left") | {"output_router_logits": True}, max_tokens=max_tokens)


def test_loss_by_the_number_of_items():
    assert_served(fused(), batch() | {"num_items_in_batch": torch.tensor(40)})


@pytest.mark.parametrize("max_tokens", [None, 6])
def test_without_gradients(max_tokens):
    model = fused().eval()
    with torch.no_grad():
        expected = model(**batch(), fused_lm_head=True)
        sharing = treewise.share_prefixes(model, max_tokens)
        found = model(**batch(), fused_lm_head=True)
    assert sharing.counts.num_calls == 1
    torch.testing.assert_close(found.entropy, expected.entropy)


def test_a_loss_of_one_field_alone():
    """Its backward gets no gradient for the others."""
    model = fused()
    treewise.share_prefixes(model, max_tokens=6)
    out = model(**batch(), fused_lm_head=True)
    assert not out.is_top1.requires_grad
    out.entropy.sum().backward()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters())


# -- calls that the model's own forward takes ------------------------------------------------------------------------


def assert_left(model, inputs, caplog, message, **options):
    """The output is exactly the model's own, and one message says why, once."""
    with torch.no_grad():
        expected = model(**inputs, fused_lm_head=True)
        sharing = treewise.share_prefixes(model, **options)
        for _ in range(2):
            found = model(**inputs, fused_lm_head=True)
            assert torch.equal(found.log_probs, expected.log_probs)
    assert (sharing.counts.num_calls, sharing.counts.num_left) == (0, 2)
    assert sum(message in record.message for record in caplog.records) == 1


def test_unknown_arguments_are_left(caplog):
    assert_left(fused(), batch() | {"token_type_ids": torch.zeros(6, 9)}, caplog, "'token_type_ids'")


def test_padding_inside_a_row_is_left(caplog):
    inputs = batch()
    inputs["attention_mask"][0, 2] = 0
    assert_left(fused(), inputs, caplog, "padding stands between")


def test_nothing_to_share_is_left(caplog):
    caplog.set_level("INFO", logger="treewise")
    ids = torch.arange(9, 57).view(4, 12)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert_left(fused(), inputs, caplog, "little to share")
    sharing = treewise.share_prefixes(fused(), max_tokens=20)  # but the rows would not fit the budget
    sharing.model(**inputs, fused_lm_head=True)
    assert sharing.counts.num_calls == 1


def test_no_scored_label_is_a_differentiable_zero():
    model = fused()
    sharing = treewise.share_prefixes(model)
    inputs = batch()
    inputs["labels"][:] = IGNORED
    model(**inputs, fused_lm_head=True).log_probs.sum().backward()
    assert sharing.counts.num_left == 1


def test_a_deep_copy_computes_with_its_own_parameters():
    model = fused()
    sharing = treewise.share_prefixes(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
        entropy = other(**batch(), fused_lm_head=True).entropy
    assert entropy.max() == pytest.approx(torch.log(torch.tensor(64.0)).item())
    assert sharing.counts.num_calls == 0


def test_remove():
    model = fused()
    before = model.forward
    sharing = treewise.share_prefixes(model)
    sharing.remove()
    sharing.remove()
    assert model.forward == before
    model(**batch(), fused_lm_head=True)
    assert sharing.counts.num_calls == 0


# -- before the trainer, and with wrappers ---------------------------------------------------------------------------


def test_before_the_trainer_gives_the_model_its_head():
    """The first batch comes to the decoder, later ones to the fused head."""
    expected, _ = outputs_and_gradients(fused(), batch())
    model = model_for_trl()
    sharing = treewise.share_prefixes(model)
    add_fused_lm_head(model, outputs=FIELDS)
    for num_calls in (1, 2):
        found, _ = outputs_and_gradients(model, batch())
        torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-6, rtol=1e-6)
        assert sharing.counts.num_calls == num_calls
    assert "fused head" in str(sharing)


def test_adapters_on_and_off():
    base = model_for_trl()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    add_fused_lm_head(base, outputs=FIELDS)
    with torch.no_grad(), model.disable_adapter():
        expected = model(**batch(), fused_lm_head=True).log_probs
    assert_served(model, batch(), max_tokens=12)
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(model(**batch(), fused_lm_head=True).log_probs, expected)


def test_a_model_that_the_trainer_compiled():
    """As accelerate does for `torch_compile=True`; layers that are compiled in place stay so."""
    model = fused()
    expected, expected_gradients = outputs_and_gradients(model, batch())
    treewise.share_prefixes(model, max_tokens=6)
    model.model.layers[0].mlp.compile(backend="eager", dynamic=True)
    found, gradients = outputs_and_gradients(torch.compile(model, backend="eager"), batch())
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-6, rtol=1e-6)
    found_gradients = {name.removeprefix("_orig_mod."): grad for name, grad in gradients.items()}
    assert gradient_error(found_gradients, expected_gradients) < 1e-6


def test_autocast_around_the_head_holds_for_the_decoder_too():
    """accelerate wraps a reference model so before anybody can call share_prefixes."""
    model = fused(dtype=torch.float32).eval()
    inner = model.forward

    @wraps(inner.__func__)
    def mixed(self, *args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner.__func__(self, *args, **kwargs)

    model.forward = MethodType(mixed, model)
    sharing = treewise.share_prefixes(model)
    dtypes = set()
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *each: dtypes.add(each[-1].dtype))
    with torch.no_grad():
        found = model(**batch(), fused_lm_head=True)
    assert sharing.counts.num_calls == 1
    assert dtypes == {torch.bfloat16}
    sharing.remove()
    with torch.no_grad():
        expected = model(**batch(), fused_lm_head=True)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=0.1, rtol=0.05)


def test_out_of_memory_in_the_forward_is_tried_again_in_smaller_parts(monkeypatch, caplog):
    model = fused()
    expected, expected_gradients = outputs_and_gradients(model, batch())
    sharing = treewise.share_prefixes(model)
    own = model.model.forward

    def with_little_memory(input_ids, **kwargs):
        if input_ids.shape[1] > 12:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return own(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model.model, "forward", with_little_memory)
    monkeypatch.setattr(checks, "probe", lambda *args, **kwargs: None)  # of more tokens
    found, gradients = outputs_and_gradients(model, batch())
    assert sharing.engine.max_tokens <= 12
    assert any("out of memory" in record.message for record in caplog.records)
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    assert gradient_error(gradients, expected_gradients) < 1e-6


# -- refusals --------------------------------------------------------------------------------------------------------


def test_prompt_learning_is_refused():
    base = model_for_trl()
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    add_fused_lm_head(base)
    before = base.forward
    with pytest.raises(treewise.errors.UnsupportedModelError, match="learns a prompt"):
        treewise.share_prefixes(model)
    assert base.forward == before


def test_an_unknown_head_is_refused():
    model = model_for_trl()

    def forward(self, *args, fused_lm_head=False, **kwargs):
        return self.head_of_another_version(*args, **kwargs)

    model.forward = MethodType(forward, model)
    with pytest.raises(treewise.errors.UnsupportedModelError, match="a head that treewise does not support"):
        treewise.share_prefixes(model)


def test_a_call_without_labels_is_an_error():
    model = fused()
    treewise.share_prefixes(model)
    with pytest.raises(treewise.errors.ConfigError, match="labels"):
        model(input_ids=batch()["input_ids"], fused_lm_head=True)


def test_a_trainer_in_place_of_its_model_is_named() -> None:
    class Trainer:
        train_dataset = ()

    with pytest.raises(treewise.errors.ConfigError, match=r"found a Trainer\. Give it the trainer's model"):
        treewise.share_prefixes(Trainer())  # type: ignore[arg-type]
