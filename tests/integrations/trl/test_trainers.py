"""TRL's trainers with and without the line: same rollouts, losses, metrics and steps."""

import random
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import treewise
from tests.distributed.test_mesh import fork_ranks
from tests.integrations.trl.helpers import CHECKPOINTING, Run, assert_same_training, model_for_trl, words

# PEFT and TRL still use names that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, "conversations"),
    "dpo": (DPOTrainer, DPOConfig, "pairs"),
    "kto": (KTOTrainer, KTOConfig, "unpaired"),
    "grpo": (GRPOTrainer, GRPOConfig, "prompts"),
    "rloo": (RLOOTrainer, RLOOConfig, "prompts"),
}
ORDERED = {"shuffle_dataset": False, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 6}
DPO_LOSSES = [
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft"),
]
GRPO_LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def lora(**changes):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **changes)


def reference(dtype=torch.float64):
    """Another model than the one in training, so that a mistake in either shows."""
    return {"ref_model": model_for_trl(dtype=dtype, initializer_range=0.05)}


def small_ids(completion_ids, **_):
    """A reward that a sampled completion earns in part."""
    return [float(sum(token < 32 for token in ids)) / len(ids) for ids in completion_ids]


ROLLOUTS = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 6,
    "more": lambda: {"reward_funcs": small_ids},
    "learning_rate": 0.02,
}
# A step divides by the size of the gradient, so where that is rounding alone it would be as long as any other.
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
TWICE = {**ROLLOUTS, "num_iterations": 2}


def budgets(kind: str, *sizes: int | None, **changes: Any) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The same run at several budgets of the line."""
    return [(kind, changes, {"max_tokens": size}) for size in sizes]


# Trainer, its settings, arguments of the line; QUICK are those of every run of the tests.
QUICK = [
    ("sft", {"max_steps": 10, **ORDERED}, {}),
    ("sft", {"assistant_only_loss": True, "peft": lora}, {"max_tokens": 12}),
    *(("sft", {**ORDERED, **each}, {}) for each in ({"loss_type": "dft"}, {"gradient_accumulation_steps": 2})),
    # `padding_free` flattens the batch into one row; its sequences share prefixes like rows do.
    ("sft", {"padding_free": True, "max_length": None, **ORDERED}, {"max_tokens": 12}),
    ("sft", {"packing": True, "max_length": 64, "per_device_train_batch_size": 2, "max_steps": 2}, {"min_ratio": 0}),
    ("grpo", {**ROLLOUTS, "max_steps": 10}, {"max_tokens": 20}),
    ("grpo", {**TWICE, "loss_type": "dapo", "beta": 0.0}, {"max_tokens": 20}),
    ("grpo", {**TWICE, "max_steps": 2, "temperature": 0.7}, {}),
    ("grpo", {**TWICE, "max_steps": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}, {}),
    ("grpo", {**TWICE, "max_steps": 2, "importance_sampling_level": "sequence", "loss_type": "grpo"}, {}),
]
REST = [
    ("sft", {"max_steps": 2, **ORDERED}, {"max_tokens": 4}),  # far below one row
    *budgets("sft", 12, assistant_only_loss=True, **{CHECKPOINTING: True}),
    *budgets("sft", None, assistant_only_loss=True, peft=lora, **{CHECKPOINTING: True}),
    *budgets("sft", None, assistant_only_loss=True),
    *(("sft", {**ORDERED, **each}, {}) for each in (ADAMW, {"max_length": 12}, {"pad_to_multiple_of": 16})),
    *budgets("sft", None, padding_free=True, max_length=None, **ORDERED),
    *budgets("rloo", None, 20, **ROLLOUTS, max_steps=10, beta=0.0),
    *budgets("grpo", None, **ROLLOUTS, max_steps=10),
    *(
        ("grpo", {**TWICE, "loss_type": loss, "beta": 0.0, "importance_sampling_level": level}, {"max_tokens": size})
        for loss, size in zip(GRPO_LOSSES, [None, 20] * 4, strict=True)
        for level in (["sequence"] if loss == "luspo" else ["token"])
    ),
    *(
        ("grpo", {**TWICE, "max_steps": 2, **each}, {})
        for each in (
            *({"top_entropy_quantile": 0.4}, {"mask_truncated_completions": True}, {"entropy_coef": 0.01}, ADAMW),
        )
    ),
    *budgets("dpo", None, 24, more=reference, max_steps=10),
    *(
        ("dpo", {"more": reference, "loss_type": each, "label_smoothing": smoothing, "max_steps": 1}, {})
        for each in DPO_LOSSES
        for smoothing in ([0.1] if each in ("exo_pair", "robust") else [0.0])
    ),
    *budgets("dpo", None, peft=lora, **{CHECKPOINTING: True}),  # the adapter off is the reference
    *budgets("dpo", 24, peft=lora),
    *(
        ("kto", {"more": reference, "max_steps": 4, "train_sampling_strategy": "sequential"}, line)
        for line in ({"min_ratio": 0}, {"min_ratio": 0, "max_tokens": 24})
    ),
    *(
        ("kto", {"loss_type": loss, "peft": peft, CHECKPOINTING: on, "more": more, "max_steps": 2}, {"min_ratio": 0})
        for loss, peft, on, more in (
            *(("kto", lora, True, None), ("kto", lora, False, None)),
            *(("apo_zero_unpaired", None, True, reference), ("apo_zero_unpaired", lora, False, None)),
        )
    ),
]


@pytest.mark.parametrize(
    ("kind", "changes", "line"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in REST)]
)
def test_runs(build, request, kind, changes, line):
    trainer, config, data = TRAINERS[kind]
    run = assert_same_training(build(trainer, config, request.getfixturevalue(data), **changes), **line)
    assert len(run.sharings) == (2 if changes.get("more") is reference else 1)
    counts = run.sharings[0].counts
    if "min_ratio" not in line:
        assert counts.share_ratio > 1.2
    if line.get("max_tokens") is None:
        assert counts.num_computed_tokens == counts.num_tree_tokens
    if line.get("max_tokens") == 4:
        assert counts.num_computed_tokens > counts.num_tree_tokens


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


@pytest.mark.representatives("24")
@pytest.mark.parametrize("max_tokens", [None, 24])
def test_routing_loss_of_a_mixture_of_experts(build, conversations, max_tokens):
    model = lambda: model_for_trl("qwen3_moe")  # noqa: E731
    make = build(SFTTrainer, SFTConfig, conversations, model=model, router_aux_loss_coef=0.1, **ORDERED)
    assert assert_same_training(make, max_tokens=max_tokens).logs[0]["aux_loss"] > 0.5


@pytest.mark.exhaustive
def test_evaluation_is_shared_too(build, conversations):
    changes = {"more": lambda: {"eval_dataset": conversations}, "eval_strategy": "steps", "eval_steps": 1}
    run = assert_same_training(build(SFTTrainer, SFTConfig, conversations, **changes), max_tokens=16)
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


@pytest.mark.exhaustive
def test_dpo_in_mixed_precision(build, pairs):
    """Here accelerate wraps the reference model before the line is called, and the trained one after it."""
    models = {"model": lambda: model_for_trl(dtype=torch.float32), "more": lambda: reference(torch.float32)}
    assert_same_training(build(DPOTrainer, DPOConfig, pairs, **models, bf16=True, max_steps=2), tolerance=0.03)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.representatives("False-20")
@pytest.mark.parametrize(("checkpointing", "max_tokens"), [(True, None), (False, 20)])
def test_grpo_with_kl_to_the_model_without_its_adapter(build, prompts, checkpointing, max_tokens):
    make = build(GRPOTrainer, GRPOConfig, prompts, peft=lora, **TWICE, beta=0.1, **{CHECKPOINTING: checkpointing})
    run = assert_same_training(make, max_tokens=max_tokens)
    assert any(abs(entry.get("kl", 0.0)) > 1e-4 for entry in run.logs)


@pytest.mark.representatives("grpo")
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_kl_to_a_reference_model(build, prompts, tmp_path, kind):
    """The trainer loads the reference model from where the trained one came from."""
    model_for_trl().save_pretrained(tmp_path / "model")
    settings = {"beta": 0.1, "model_init_kwargs": {"dtype": "auto"}, **TWICE}
    make = build(*TRAINERS[kind][:2], prompts, model=str(tmp_path / "model"), **settings)
    assert len(assert_same_training(make, max_tokens=20).sharings) == 2


def test_generation_goes_the_models_own_way(build, prompts):
    trainer = build(GRPOTrainer, GRPOConfig, prompts, **ROLLOUTS)()
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 5, "do_sample": False}
    trainer.model.eval()
    before = trainer.model.generate(ids, **options)
    sharing = treewise.share_prefixes(trainer.model)
    assert torch.equal(trainer.model.generate(ids, **options), before)
    assert sharing.counts.num_calls == sharing.counts.num_left == 0


@pytest.mark.slow
@pytest.mark.xdist_group("integrations/trl/two processes")
@pytest.mark.representatives("grpo")
@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_micro_batches_share_on_two_processes(build, prompts, pairs, tmp_path, kind):
    """Under DDP, batch size 1."""
    makes = {
        "grpo": build(GRPOTrainer, GRPOConfig, prompts, **{**ROLLOUTS, **ONE}),
        "dpo": build(DPOTrainer, DPOConfig, pairs, peft=lora, **ONE),
    }

    def work():
        [sharing] = assert_same_training(makes[kind]).sharings
        return str(sharing), sharing.counts.share_ratio

    for printed, ratio in fork_ranks(2, work, tmp_path):
        assert "one another: 3 steps so far" in printed
        assert ratio > 1.5
