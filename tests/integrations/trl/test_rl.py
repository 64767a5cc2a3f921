"""GRPOTrainer and RLOOTrainer with and without the line: same rollouts, losses, metrics and steps."""

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import treewise
from tests.integrations.trl.helpers import CHECKPOINTING, assert_same_training, model_for_trl

GRPO_LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]

# PEFT and TRL still use names that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


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


@pytest.mark.representatives("20")
@pytest.mark.parametrize("max_tokens", [None, 20])
def test_grpo_ten_steps(build, prompts, max_tokens):
    run = assert_same_training(build(GRPOTrainer, GRPOConfig, prompts, **ROLLOUTS, max_steps=10), max_tokens=max_tokens)
    assert run.sharings[0].counts.share_ratio > 1.4


@pytest.mark.representatives("dapo-20")
@pytest.mark.parametrize(("loss_type", "max_tokens"), [*zip(GRPO_LOSSES, [None, 20] * 4, strict=True)])
def test_grpo_losses_over_several_updates_of_the_same_rollouts(build, prompts, loss_type, max_tokens):
    level = "sequence" if loss_type == "luspo" else "token"
    changes = {"loss_type": loss_type, "importance_sampling_level": level, "num_iterations": 2, "beta": 0.0}
    assert_same_training(build(GRPOTrainer, GRPOConfig, prompts, **ROLLOUTS, **changes), max_tokens=max_tokens)


@pytest.mark.representatives("temperature", "steps_per_generation", "importance_sampling_level")
@pytest.mark.parametrize(
    "changes",
    [
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"top_entropy_quantile": 0.4},
        {"temperature": 0.7},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
        {"mask_truncated_completions": True},
        {"entropy_coef": 0.01},
        {"optim": "adamw_torch", "learning_rate": 1e-3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_grpo_settings(build, prompts, changes):
    changes = {**ROLLOUTS, "num_iterations": 2, "max_steps": 2, **changes}
    assert_same_training(build(GRPOTrainer, GRPOConfig, prompts, **changes))


@pytest.mark.representatives("False-20")
@pytest.mark.parametrize(("checkpointing", "max_tokens"), [(True, None), (False, 20)])
def test_grpo_with_kl_to_the_model_without_its_adapter(build, prompts, checkpointing, max_tokens):
    changes = {"beta": 0.1, CHECKPOINTING: checkpointing, "num_iterations": 2}
    make = build(GRPOTrainer, GRPOConfig, prompts, peft=lora, **ROLLOUTS, **changes)
    run = assert_same_training(make, max_tokens=max_tokens)
    assert any(abs(entry.get("kl", 0.0)) > 1e-4 for entry in run.logs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("max_tokens", [None, 20])
def test_rloo_ten_steps(build, prompts, max_tokens):
    make = build(RLOOTrainer, RLOOConfig, prompts, **ROLLOUTS, max_steps=10, beta=0.0)
    assert_same_training(make, max_tokens=max_tokens)


@pytest.mark.representatives("GRPOTrainer-GRPOConfig")
@pytest.mark.parametrize(("trainer", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_kl_to_a_reference_model(build, prompts, tmp_path, trainer, config):
    """The trainer loads the reference model from where the trained one came from."""
    model_for_trl().save_pretrained(tmp_path / "model")
    settings = {"beta": 0.1, "num_iterations": 2, "model_init_kwargs": {"dtype": "auto"}}
    make = build(trainer, config, prompts, model=str(tmp_path / "model"), **settings, **ROLLOUTS)
    run = assert_same_training(make, max_tokens=20)
    assert len(run.sharings) == 2


def test_generation_goes_the_models_own_way(build, prompts):
    trainer = build(GRPOTrainer, GRPOConfig, prompts, **ROLLOUTS)()
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 5, "do_sample": False}
    trainer.model.eval()
    before = trainer.model.generate(ids, **options)
    sharing = treewise.share_prefixes(trainer.model)
    assert torch.equal(trainer.model.generate(ids, **options), before)
    assert sharing.counts.num_calls == sharing.counts.num_left == 0
