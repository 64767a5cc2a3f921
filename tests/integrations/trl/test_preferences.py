"""DPOTrainer and KTOTrainer with and without the line: same losses, metrics and steps."""

import pytest
import torch
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from tests.integrations.trl.helpers import CHECKPOINTING, assert_same_training, model_for_trl

DPO_LOSSES = [
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
]

# PEFT and TRL still use names that transformers deprecates.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def reference(dtype=torch.float64):
    """Another model than the one in training, so that a mistake in either shows."""
    return {"ref_model": model_for_trl(dtype=dtype, initializer_range=0.05)}


@pytest.mark.parametrize("max_tokens", [None, 24])
def test_dpo_ten_steps(build, pairs, max_tokens):
    make = build(DPOTrainer, DPOConfig, pairs, more=reference, max_steps=10)
    run = assert_same_training(make, max_tokens=max_tokens)
    assert len(run.sharings) == 2
    assert all(sharing.counts.share_ratio > 1.2 for sharing in run.sharings)


@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_dpo_losses(build, pairs, loss_type):
    label_smoothing = 0.1 if loss_type in ("exo_pair", "robust") else 0.0
    changes = {"loss_type": loss_type, "label_smoothing": label_smoothing, "max_steps": 1}
    assert_same_training(build(DPOTrainer, DPOConfig, pairs, more=reference, **changes))


@pytest.mark.parametrize(("checkpointing", "max_tokens"), [(True, None), (False, 24)])
def test_dpo_with_the_adapter_off_as_reference(build, pairs, checkpointing, max_tokens):
    make = build(DPOTrainer, DPOConfig, pairs, peft=lora, **{CHECKPOINTING: checkpointing})
    assert len(assert_same_training(make, max_tokens=max_tokens).sharings) == 1


def test_dpo_in_mixed_precision(build, pairs):
    """Here accelerate wraps the reference model before the line is called, and the trained one after it."""
    models = {"model": lambda: model_for_trl(dtype=torch.float32), "more": lambda: reference(torch.float32)}
    make = build(DPOTrainer, DPOConfig, pairs, **models, bf16=True, max_steps=2)
    assert_same_training(make, tolerance=0.03)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("max_tokens", [None, 24])
def test_kto_ten_steps(build, unpaired, max_tokens):
    make = build(
        KTOTrainer,
        KTOConfig,
        unpaired,
        more=reference,
        max_steps=10,
        train_sampling_strategy="sequential",
    )
    assert_same_training(make, max_tokens=max_tokens, min_ratio=0)


@pytest.mark.parametrize(
    ("loss_type", "peft", "checkpointing"),
    [("kto", lora, True), ("kto", lora, False), ("apo_zero_unpaired", None, True), ("apo_zero_unpaired", lora, False)],
)
def test_kto_losses(build, unpaired, loss_type, peft, checkpointing):
    more = None if peft else reference
    changes = {"loss_type": loss_type, CHECKPOINTING: checkpointing, "max_steps": 2}
    assert_same_training(build(KTOTrainer, KTOConfig, unpaired, peft=peft, more=more, **changes), min_ratio=0)
