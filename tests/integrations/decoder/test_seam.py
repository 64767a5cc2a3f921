"""The seam at the decoder: every form of rows against each row alone, when it serves, and what it leaves."""

import copy
from itertools import chain

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import treewise as tw
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.recomputation import set_recomputation
from treewise.testing.families import tiny_model
from treewise.testing.oracle import gradient_error, gradients_of

CLOSE = 1e-6  # in float64; transformers computes norms in float32
IGNORED = -100
PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42, 43]]
ROWS = [prompt + answer for prompt in PROMPTS for answer in ([10, 11], [10, 12, 13], [14], [15, 16, 17, 18])]


def model_of(family="llama", dtype=torch.float64, **changes):
    model = tiny_model(family, dtype, **changes)
    model.config._experts_implementation_internal = "eager"  # the grouped kernel knows no float64
    return model


def padded(side="right", rows=ROWS, more=1):
    """[B, L] tokens, mask and labels; answers are scored."""
    width = max(map(len, rows)) + more
    ids, mask = torch.full((len(rows), width), 3), torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for number, row in enumerate(rows):
        start = {"right": 0, "left": width - len(row), "both": (width - len(row)) // 2}[side]
        part = slice(start, start + len(row))
        ids[number, part], mask[number, part] = torch.tensor(row), 1
        labels[number, start + 4 : start + len(row)] = torch.tensor(row[4:])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(rows=ROWS):
    """[1, F] tokens whose positions start anew, and no mask. With a cache transformers would not cut them there."""
    labels = [([IGNORED] * 4 + row[4:])[: len(row)] for row in rows]
    return {
        "input_ids": torch.tensor([[*chain(*rows)]]),
        "position_ids": torch.tensor([[place for row in rows for place in range(len(row))]]),
        "labels": torch.tensor([[*chain(*labels)]]),
        "use_cache": False,
    }


def alone(model, rows=ROWS):
    """Loss and gradients of each row by itself: the mean over all scored tokens."""
    model.zero_grad()
    count = sum(len(row) - 4 for row in rows)
    total = 0.0
    for row in rows:
        labels = torch.tensor([[IGNORED] * 4 + row[4:]])
        loss = model(input_ids=torch.tensor([row]), labels=labels).loss * (len(row) - 4) / count
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def through(model, inputs, loss_of=lambda out: out.loss):
    model.zero_grad()
    out = model(**inputs)
    loss = loss_of(out)
    loss.backward()
    return loss.item(), gradients_of(model), out


def assert_shared(model, inputs, rows=ROWS, **options):
    expected, gradients = alone(model, rows)
    sharing = tw.share_prefixes(model, **options)
    found, tree, _ = through(model, inputs)
    assert (sharing.counts.num_calls, sharing.counts.num_left) == (1, 0), sharing.counts
    assert found == pytest.approx(expected, rel=CLOSE)
    assert gradient_error(tree, gradients) < CLOSE
    return sharing


# -- rows in every form -----------------------------------------------------------------------------------------------

FORMS = {
    "right": padded("right"),
    "left": padded("left"),
    "both sides": padded("both"),
    "mask of floats": padded() | {"attention_mask": padded()["attention_mask"].float()},
    "mask of flags": padded() | {"attention_mask": padded()["attention_mask"].bool()},
    "positions beside a mask": padded("left")
    | {"position_ids": (padded("left")["attention_mask"].cumsum(1) - 1).clamp(min=0)},
    "packed": packed(),
    "packed, with bounds": packed()
    | {"cu_seq_lens_q": torch.tensor([0, *torch.tensor([*map(len, ROWS)]).cumsum(0)], dtype=torch.int32)},
    "two packed rows": {
        name: value.view(2, -1) if isinstance(value, torch.Tensor) else value
        for name, value in packed([row for row in ROWS if len(row) == 7] * 2).items()
    },
}


@pytest.mark.parametrize("max_tokens", [None, 6])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows(form, max_tokens):
    rows = [row for row in ROWS if len(row) == 7] * 2 if form == "two packed rows" else ROWS
    assert_shared(model_of(), FORMS[form], rows, max_tokens=max_tokens)


def test_rows_of_one_length_need_no_mask():
    rows = [row for row in ROWS if len(row) == 7]
    labels = torch.tensor([[IGNORED] * 4 + row[4:] for row in rows])
    assert_shared(model_of(), {"input_ids": torch.tensor(rows), "labels": labels}, rows, min_ratio=0)


def test_padding_behind_packed_sequences():
    """Tokens of their own, as axolotl fills rows up: the embedding of padding is zero, and so are its hidden rows."""
    inputs = packed()
    filled = {"input_ids": 0, "labels": IGNORED, "position_ids": 0}
    inputs |= {name: nn.functional.pad(inputs[name], (0, 6), value=value) for name, value in filled.items()}
    model = model_of()
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
    assert_shared(model, inputs)


def test_a_sequence_of_one_token():
    rows = [*ROWS, [5]]
    inputs = packed(rows)
    model = model_of()
    expected = through(model, inputs)
    sharing = tw.share_prefixes(model)
    found = through(model, inputs)
    assert sharing.counts.num_calls == 1
    assert found[0] == pytest.approx(expected[0], rel=CLOSE)
    assert gradient_error(found[1], expected[1]) < CLOSE


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "gpt2", "granite", "phi3"])
def test_families(family):
    assert_shared(model_of(family), padded())


@pytest.mark.parametrize("family", ["granitemoehybrid", "gemma4_text", "got_ocr2"])
def test_outputs_of_other_classes(family):
    """That of a decoder is declared wrongly, inherits its rows, or belongs to a model that could see."""
    model = tiny_model(family, torch.float32)
    loss, gradients = alone(model)
    tw.share_prefixes(model)
    found, tree, _ = through(model, padded())
    assert found == pytest.approx(loss, rel=1e-5)
    assert gradient_error(tree, gradients) < 1e-4


def test_recurrent_layers():
    model = tiny_model("qwen3_next", torch.float32)
    loss, gradients = alone(model)
    sharing = tw.share_prefixes(model)
    found, tree, _ = through(model, padded())
    assert sharing.counts.num_calls == 1
    assert found == pytest.approx(loss, rel=1e-5)
    assert gradient_error(tree, gradients) < 1e-5


# -- what follows the decoder -----------------------------------------------------------------------------------------


def test_the_head_projects_each_row_of_the_tree_once():
    model = model_of()
    rows = []
    model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape))
    sharing = assert_shared(model, padded())
    assert "once for each tree token in 1 of 1 calls" in str(sharing)


@pytest.mark.parametrize("keep", [1, 3, torch.arange(2, 6)], ids=["last", "some", "chosen"])
def test_logits_to_keep(keep):
    model = model_of()
    inputs = {name: value for name, value in padded("left").items() if name != "labels"} | {"logits_to_keep": keep}
    probe = torch.linspace(-1, 2, 64, dtype=torch.float64)
    real = inputs["attention_mask"][:, keep if isinstance(keep, torch.Tensor) else slice(-keep, None)].bool()

    def loss_of(out):
        return (out.logits.log_softmax(-1) * probe * real[..., None]).sum()

    expected = through(model, inputs, loss_of)
    tw.share_prefixes(model)
    found = through(model, inputs, loss_of)
    torch.testing.assert_close(found[2].logits[real], expected[2].logits[real], atol=CLOSE, rtol=CLOSE)
    assert gradient_error(found[1], expected[1]) < CLOSE


def test_two_calls_for_one_loss():
    """Pairs, chosen and rejected, in calls of their own whose losses depend on one another."""

    def loss_of(model):
        model.zero_grad()
        inputs = [padded(rows=ROWS[:4]), padded(rows=ROWS[4:])]
        first, second = (model(**each).logits.log_softmax(-1)[:, 3:5].square().mean() for each in inputs)
        (first - second).sigmoid().log().neg().backward()
        return gradients_of(model)

    model = model_of()
    expected = loss_of(model)
    sharing = tw.share_prefixes(model)
    assert gradient_error(loss_of(model), expected) < CLOSE
    assert sharing.counts.num_calls == 2


def test_hidden_rows_of_the_last_layer_alone():
    model = model_of()
    inputs = {**padded(), "output_hidden_states": True}
    expected = model(**inputs)
    tw.share_prefixes(model)
    found = model(**inputs)
    real = inputs["attention_mask"].bool()
    assert len(found.hidden_states) == len(expected.hidden_states)
    torch.testing.assert_close(found.hidden_states[-1][real], expected.hidden_states[-1][real], atol=CLOSE, rtol=CLOSE)
    with pytest.raises(UnsupportedModelError, match="below the last"):
        found.hidden_states[1].mean()
    with pytest.raises(UnsupportedModelError, match="below the last"):
        _ = found.hidden_states[0] * 2


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("max_tokens", [None, 6])
def test_router_losses_are_the_models_own(family, max_tokens):
    model = model_of(family, router_aux_loss_coef=0.3)
    inputs = {**padded(), "output_router_logits": True}
    expected = through(model, inputs)
    sharing = tw.share_prefixes(model, max_tokens)
    found = through(model, inputs)
    assert sharing.counts.num_calls == 1
    assert found[2].aux_loss.item() == pytest.approx(expected[2].aux_loss.item(), rel=CLOSE)
    assert found[0] == pytest.approx(expected[0], rel=CLOSE)
    assert gradient_error(found[1], expected[1]) < CLOSE


def test_a_tuple_in_place_of_an_output():
    model = model_of()
    expected = model(**padded(), return_dict=False)
    tw.share_prefixes(model)
    assert model(**padded(), return_dict=False)[0].item() == pytest.approx(expected[0].item(), rel=CLOSE)


# -- around the model -------------------------------------------------------------------------------------------------


def test_adapters_on_and_off():
    base = model_of()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    with torch.no_grad(), model.disable_adapter():
        expected = model(**padded()).loss
    assert_shared(model, padded(), max_tokens=6)
    with torch.no_grad(), model.disable_adapter():
        assert model(**padded()).loss.item() == pytest.approx(expected.item(), rel=CLOSE)
    with model.disable_adapter():  # nothing is trained then, and a loop may not say so
        loss = model(**padded()).loss
    assert loss.item() == pytest.approx(expected.item(), rel=CLOSE)
    assert not loss.requires_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 6])
def test_gradient_checkpointing(use_reentrant, max_tokens):
    model = model_of().train()
    expected, gradients = alone(model)
    set_recomputation(model, True, {"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    sharing = tw.share_prefixes(model, max_tokens)
    found, tree, _ = through(model, padded())
    assert sharing.counts.num_calls == 1
    assert found == pytest.approx(expected, rel=CLOSE)
    assert gradient_error(tree, gradients) < CLOSE


def test_a_compiled_model():
    model = model_of()
    expected, gradients = alone(model)
    sharing = tw.share_prefixes(torch.compile(model, backend="eager"))
    found, tree, _ = through(torch.compile(model, backend="eager"), padded())
    assert sharing.counts.num_calls == 1
    assert found == pytest.approx(expected, rel=CLOSE)
    assert gradient_error({name.removeprefix("_orig_mod."): each for name, each in tree.items()}, gradients) < CLOSE


def test_autocast():
    model = tiny_model("llama", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        flat = through(model, padded())
        tw.share_prefixes(model)
        tree = through(model, padded())
    exact = alone(copy.deepcopy(model))[1]
    assert gradient_error(tree[1], exact) < 1.5 * gradient_error(flat[1], exact)


def test_sums_over_rows_are_in_float32():
    """Of many equal rows in bfloat16, whose gradients would stop to grow at 256."""
    model = tiny_model("llama", torch.bfloat16)
    rows = [ROWS[0]] * 600
    flat = copy.deepcopy(model).float()
    expected = alone(flat, rows[:1])[1]
    tw.share_prefixes(model)
    found = through(model, padded(rows=rows))[1]
    assert gradient_error({name: each.float() for name, each in found.items()}, expected) < 0.05


def test_without_gradients_and_in_inference_mode():
    model = model_of().eval()
    expected = model(**padded())
    sharing = tw.share_prefixes(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = model(**padded())
        assert out.loss.item() == pytest.approx(expected.loss.item(), rel=CLOSE)
        with pytest.raises(UnsupportedModelError, match="use_cache=True"), torch.no_grad():
            model(input_ids=torch.tensor([[5]]), past_key_values=out.past_key_values)
    assert sharing.counts.num_calls == 2


def test_generation_goes_the_models_own_way():
    model = model_of().eval()
    ids = torch.tensor(ROWS[:1] * 2)
    before = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    sharing = tw.share_prefixes(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0), before)
    assert sharing.counts.num_calls == sharing.counts.num_left == 0
    assert sharing.counts.num_cached > 0


def test_a_deep_copy_computes_with_its_own_parameters():
    model = model_of()
    sharing = tw.share_prefixes(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in other.model.layers.parameters():
            each.mul_(3)
    assert other(**padded()).loss.item() != pytest.approx(model(**padded()).loss.item(), rel=1e-5)
    assert sharing.counts.num_calls == 1


def test_a_copy_of_the_decoder_alone_is_counted():
    """accelerate's regional compilation makes one, with the same parameters."""
    model = model_of()
    expected = model(**padded()).loss.item()
    sharing = tw.share_prefixes(model)
    region = model.model.__class__.__new__(model.model.__class__)
    region.__dict__.update(model.model.__dict__)
    region.forward = model.model.forward.__func__.__get__(region)
    model.model = region
    assert model(**padded()).loss.item() == pytest.approx(expected, rel=CLOSE)
    assert (sharing.counts.num_calls, sharing.counts.num_left) == (0, 1)


def test_remove_and_paused():
    model = model_of()
    sharing = tw.share_prefixes(model)
    with sharing.paused():
        model(**padded())
    assert sharing.counts.num_calls == 0
    model(**padded())
    sharing.remove()
    sharing.remove()
    assert "forward" not in vars(model.model)
    assert "forward" not in vars(model.lm_head)
    model(**padded())
    assert sharing.counts.num_calls == 1


# -- what is left to the model's own forward --------------------------------------------------------------------------


def documents(inputs):
    inputs["attention_mask"] = inputs["attention_mask"] * torch.arange(1, len(ROWS) + 1)[:, None]


def jumps(inputs):
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).repeat(len(ROWS), 1)
    inputs["position_ids"][:, 3:] = torch.arange(inputs["input_ids"].shape[1] - 3)


def four_dimensions(inputs):
    length = inputs["input_ids"].shape[1]
    mask = torch.full((len(ROWS), 1, length, length), float("-inf"), dtype=torch.float64).triu(1)
    inputs["attention_mask"] = mask


def hole(inputs):
    inputs["attention_mask"][0, 2] = 0


def inputs_embeds(inputs):
    inputs["inputs_embeds"] = torch.randn(*inputs.pop("input_ids").shape, 32, dtype=torch.float64)


def unknown(inputs):
    inputs["some_bias"] = torch.ones(3)


def attentions(inputs):
    inputs["output_attentions"] = True


def packed_with_a_cache(inputs):
    inputs.clear()
    inputs |= packed()
    del inputs["use_cache"]


def bounds(inputs):
    inputs.clear()
    inputs |= packed() | {"cu_seq_lens_q": torch.tensor([0, 3, 60], dtype=torch.int32)}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (documents, "other numbers than 0 and 1"),
        (jumps, "start anew or jump"),
        (four_dimensions, "attention_mask of shape"),
        (hole, "padding stands between"),
        (inputs_embeds, "inputs_embeds"),
        (unknown, "some_bias"),
        (attentions, "output_attentions"),
        (packed_with_a_cache, "unless use_cache is False"),
        (bounds, "cu_seq_lens_q begins"),
    ],
)
def test_left(change, why, caplog):
    model = model_of(attn_implementation="eager").eval()
    inputs = padded()
    change(inputs)
    try:
        expected = model(**inputs).loss
    except Exception as error:  # of transformers itself, which is the user's to see
        expected = error
    sharing = tw.share_prefixes(model)
    for _ in range(2):
        if isinstance(expected, Exception):
            with pytest.raises(type(expected)):
                model(**inputs)
        else:
            assert torch.equal(model(**inputs).loss, expected)
    assert (sharing.counts.num_calls, sharing.counts.num_left) == (0, 2)
    assert any(why in reason for reason in sharing.counts.left), sharing.counts.left
    assert sum(why in record.message for record in caplog.records if record.name == "treewise") == 1


@pytest.mark.parametrize("family", ["gpt2", "ctrl"])
def test_left_padding_of_a_table_of_positions_is_left(family):
    model = model_of(family)
    sharing = tw.share_prefixes(model)
    model(**padded("left"))
    assert any("absolute positions" in reason for reason in sharing.counts.left)


def test_dropout_and_noise_that_come_later_are_left():
    model = model_of().train()
    sharing = tw.share_prefixes(model)
    model(**padded())
    model.model.embed_tokens.neftune_noise_alpha = 5
    model(**padded())
    del model.model.embed_tokens.neftune_noise_alpha
    model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, nn.Dropout(0.2))
    model(**padded())
    assert (sharing.counts.num_calls, sharing.counts.num_left) == (1, 2)
    assert any("neftune" in reason for reason in sharing.counts.left)


def test_little_to_share_is_left_unless_it_would_not_fit():
    ids = torch.arange(9, 57).view(4, 12)
    inputs = {"input_ids": ids, "labels": ids}
    sharing = tw.share_prefixes(model_of())
    sharing.model(**inputs)
    assert sharing.counts.num_left == 1
    sharing = tw.share_prefixes(model_of(), max_tokens=20)
    sharing.model(**inputs)
    assert sharing.counts.num_calls == 1


def unmasked(inputs):
    """Tokens of padding are labels, too, as in loops that copy the tokens."""
    inputs["labels"] = inputs["input_ids"].clone()


def first_scored(inputs):
    """The first token of a row is predicted by the padding to its left."""
    inputs |= padded("left")
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)


def first_scored_and_shifted(inputs):
    first_scored(inputs)
    inputs["shift_labels"] = nn.functional.pad(inputs["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize("change", [unmasked, first_scored, first_scored_and_shifted])
def test_labels_of_padding_are_left(change, wrapped):
    model, inputs = model_of(), padded()
    change(inputs)
    if wrapped:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).double()
    expected = through(model, inputs)
    sharing = tw.share_prefixes(model)
    found = through(model, inputs)
    assert found[0] == expected[0]
    assert gradient_error(found[1], expected[1]) == 0
    with torch.no_grad():
        assert model(**inputs).loss.item() == expected[0]
    assert sharing.counts.left == {"a label is predicted by a padding token": 2}
    through(model, padded("left"))
    assert sharing.counts.num_calls == 1


@pytest.mark.parametrize("read", ["logits", "hidden rows"])
def test_a_loss_of_ones_own_that_reads_padding(read):
    model = model_of()
    inputs = {name: value for name, value in padded().items() if name != "labels"}
    tw.share_prefixes(model)
    out = model(**inputs, output_hidden_states=True)
    values, mask = (
        (out.logits.log_softmax(-1) if read == "logits" else out.hidden_states[-1])[..., 3],
        inputs["attention_mask"],
    )
    (values * mask).sum().backward(retain_graph=True)
    with pytest.raises(UnsupportedModelError, match="reads logits or hidden rows of padding"):
        values.sum().backward()


@pytest.mark.parametrize("max_tokens", [None, 6])
@pytest.mark.parametrize("trains", ["all", "head"])
@pytest.mark.parametrize(
    "loss_of",
    [
        pytest.param(lambda logits: logits.square().mean(), id="squares"),
        pytest.param(lambda logits: torch.distributions.Categorical(logits=logits).entropy().mean(), id="entropy"),
    ],
)
def test_a_loss_that_reads_padding_is_never_a_number(loss_of, trains, max_tokens):
    """Also where zeros in place of padding would have no gradient, or the head alone is trained."""
    model = model_of()
    if trains == "head":
        only_the_head(model)
    inputs = {name: value for name, value in padded().items() if name != "labels"}
    tw.share_prefixes(model, max_tokens=max_tokens)
    with pytest.raises(UnsupportedModelError, match="reads logits or hidden rows of padding"):
        loss_of(model(**inputs).logits).backward()


def only_the_head(model):
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)


@pytest.mark.parametrize("max_tokens", [None, 6])
@pytest.mark.parametrize("adapts", [False, True])
def test_a_head_alone_is_trained(adapts, max_tokens):
    """No walk within a backward, which would find nothing to train."""
    model = model_of(tie_word_embeddings=False)
    if adapts:
        config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        model = get_peft_model(model, config).to(torch.float64)
    else:
        only_the_head(model)
    assert_shared(model, padded(), max_tokens=max_tokens)


@pytest.mark.parametrize("trains", ["head", "nothing"])
def test_a_steering_vector_around_what_is_frozen(trains):
    """Its gradient is not the decoder's to see: such rows are the model's own."""
    model = model_of(tie_word_embeddings=False)
    if trains == "head":
        only_the_head(model)
    else:
        model.requires_grad_(False)
    vector = torch.ones(model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    model.model.layers[0].register_forward_hook(lambda _, __, output: output + vector)
    (expected,) = torch.autograd.grad(model(**padded()).loss, vector)
    sharing = tw.share_prefixes(model)
    model(**padded()).loss.backward()
    torch.testing.assert_close(vector.grad, expected)
    assert "hooks on forwards" in str(sharing.counts)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "lfm2"])
def test_packed_rows_that_the_model_does_not_cut_are_left(family):
    model = tiny_model(family, torch.float32)
    expected = model(**packed()).loss
    sharing = tw.share_prefixes(model)
    assert torch.equal(model(**packed()).loss, expected)
    assert any("does not cut rows" in reason for reason in sharing.counts.left), sharing.counts.left


SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4}
POSITIONS = {
    "queries are scaled": ("ministral3", {"rope_parameters": {**SCALED, "llama_4_scaling_beta": 0.5}}),
    "frequencies depend on lengths": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 8},
    ),
}


@pytest.mark.parametrize(("family", "changes"), POSITIONS.values(), ids=POSITIONS)
def test_padding_that_moves_positions_of_such_models_is_left(family, changes):
    """As positions are counted from a row's first cell, padding included, where none are given."""
    model, inputs = model_of(family, **changes), padded("left", more=8)
    expected = model(**inputs).loss
    sharing = tw.share_prefixes(model)
    assert torch.equal(model(**inputs).loss, expected)
    assert sharing.counts.num_left == 1
    model(**{name: value[:, :7] for name, value in padded().items()})
    assert sharing.counts.num_calls == 1


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_no_model():
    with pytest.raises(ConfigError, match="takes a model, found a str"):
        tw.share_prefixes("model")
    with pytest.raises(ConfigError, match="window='all'"):
        tw.share_prefixes(model_of(), window="all")
    with pytest.raises(ConfigError, match="min_ratio=-1"):
        tw.share_prefixes(model_of(), min_ratio=-1)


def test_a_forward_of_unsloth():
    model = model_of()

    class Attention(type(model.model.layers[0].self_attn)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    Attention.forward.__module__ = "unsloth.models.llama"
    model.model.layers[0].self_attn.__class__ = Attention
    with pytest.raises(UnsupportedModelError, match="unsloth's forward"):
        tw.share_prefixes(model)


def test_a_bare_decoder():
    with pytest.raises(UnsupportedModelError, match="head"):
        tw.share_prefixes(model_of().model)


def test_an_engine_of_deepspeed():
    class DeepSpeedEngine(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"
    with pytest.raises(UnsupportedModelError, match="DeepSpeedEngine is DeepSpeed's"):
        tw.share_prefixes(DeepSpeedEngine(model_of()))
