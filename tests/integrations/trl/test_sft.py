"""SFTTrainer with and without the line: same losses, metrics and steps."""

import random

import pytest
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from tests.integrations.trl.helpers import CHECKPOINTING, Run, assert_same_training, model_for_trl, words

# PEFT and TRL still use names that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def lora(**changes):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **changes)


ORDERED = {"shuffle_dataset": False, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 6}


def test_ten_steps_on_conversations(build, conversations):
    run = assert_same_training(build(SFTTrainer, SFTConfig, conversations, max_steps=10, **ORDERED))
    counts = run.sharings[0].counts
    assert counts.share_ratio > 1.5
    assert counts.num_computed_tokens == counts.num_tree_tokens


@pytest.mark.exhaustive
def test_a_budget_far_below_one_row(build, conversations):
    run = assert_same_training(build(SFTTrainer, SFTConfig, conversations, max_steps=2, **ORDERED), max_tokens=4)
    assert run.sharings[0].counts.num_computed_tokens > run.sharings[0].counts.num_tree_tokens


@pytest.mark.representatives("lora-False-12")
@pytest.mark.parametrize(
    ("peft", "checkpointing", "max_tokens"),
    [(None, False, None), (None, True, 12), (lora, True, None), (lora, False, 12)],
)
def test_assistant_only_loss(build, conversations, peft, checkpointing, max_tokens):
    changes = {"assistant_only_loss": True, CHECKPOINTING: checkpointing}
    assert_same_training(build(SFTTrainer, SFTConfig, conversations, peft=peft, **changes), max_tokens=max_tokens)


@pytest.mark.representatives("loss_type", "gradient_accumulation_steps")
@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dft"},
        {"optim": "adamw_torch", "learning_rate": 1e-3},
        {"gradient_accumulation_steps": 2},
        {"max_length": 12},
        {"pad_to_multiple_of": 16},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings(build, conversations, changes):
    assert_same_training(build(SFTTrainer, SFTConfig, conversations, **ORDERED, **changes))


@pytest.mark.parametrize("completion_only", [True, False])
def test_prompts_and_completions(build, unpaired, completion_only):
    data = unpaired.remove_columns("label")
    assert_same_training(build(SFTTrainer, SFTConfig, data, completion_only_loss=completion_only, **ORDERED))


def test_tool_calls(build):
    rng = random.Random(4)
    tools = [{"type": "function", "function": {"name": "w3", "description": "w4", "parameters": {}}}]
    rows = []
    for _ in range(4):
        start = [{"role": "user", "content": words(rng, 4, 8)}]
        call = {"type": "function", "function": {"name": "w3", "arguments": {"w5": "w6"}}}
        start.append({"role": "assistant", "content": words(rng, 1, 2), "tool_calls": [call]})
        for _ in range(3):
            messages = [*start, {"role": "tool", "name": "w3", "content": words(rng, 2, 4)}]
            messages.append({"role": "assistant", "content": words(rng, 2, 4)})
            rows.append({"messages": messages, "tools": tools})
    run = assert_same_training(
        build(SFTTrainer, SFTConfig, Dataset.from_list(rows), assistant_only_loss=True, **ORDERED)
    )
    assert run.sharings[0].counts.share_ratio > 1.5


@pytest.mark.representatives("12")
@pytest.mark.parametrize("max_tokens", [None, 12])
def test_rows_without_padding(build, conversations, max_tokens):
    """`padding_free` flattens the batch into one row; its sequences share prefixes like rows do."""
    make = build(SFTTrainer, SFTConfig, conversations, padding_free=True, max_length=None, **ORDERED)
    assert assert_same_training(make, max_tokens=max_tokens).sharings[0].counts.share_ratio > 1.5


def test_packed_rows(build, conversations):
    make = build(
        SFTTrainer, SFTConfig, conversations, packing=True, max_length=64, per_device_train_batch_size=2, max_steps=2
    )
    assert_same_training(make, min_ratio=0)


@pytest.mark.representatives("24")
@pytest.mark.parametrize("max_tokens", [None, 24])
def test_routing_loss_of_a_mixture_of_experts(build, conversations, max_tokens):
    make = build(
        SFTTrainer,
        SFTConfig,
        conversations,
        model=lambda: model_for_trl("qwen3_moe"),
        router_aux_loss_coef=0.1,
        **ORDERED,
    )
    run = assert_same_training(make, max_tokens=max_tokens)
    assert run.logs[0]["aux_loss"] > 0.5


@pytest.mark.exhaustive
def test_evaluation_is_shared_too(build, conversations):
    make = build(
        SFTTrainer,
        SFTConfig,
        conversations,
        more=lambda: {"eval_dataset": conversations},
        eval_strategy="steps",
        eval_steps=1,
    )
    run = assert_same_training(make, max_tokens=16)
    assert run.sharings[0].counts.num_calls > 3


def test_label_smoothing_keeps_the_full_logits(build, conversations):
    with pytest.warns(FutureWarning, match="label_smoothing_factor"):
        assert_same_training(build(SFTTrainer, SFTConfig, conversations, label_smoothing_factor=0.1))


def test_dropout_is_left_as_it_was(build, conversations, caplog):
    make = build(SFTTrainer, SFTConfig, conversations, peft=lambda: lora(lora_dropout=0.1), max_steps=2)
    flat, tree = Run(make, share=False), Run(make, share=True)
    assert tree.logs == flat.logs
    assert tree.sharings[0].counts.num_calls == 0
    assert sum("dropout mask" in record.message for record in caplog.records) == 1
