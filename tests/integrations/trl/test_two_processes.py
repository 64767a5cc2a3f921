"""TRL's trainers on two processes under DDP, batch size 1: calls of a step share on each."""

import pytest
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from tests.distributed.test_mesh import fork_ranks
from tests.integrations.trl.helpers import assert_same_training
from tests.integrations.trl.test_trainers import ROLLOUTS, lora

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("integrations/trl/test_two_processes")]
ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_micro_batches_share(build, prompts, pairs, tmp_path, kind):
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
