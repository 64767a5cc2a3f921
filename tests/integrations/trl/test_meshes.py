"""TRL's trainers with the line on a model that transformers spread over two processes, against one without it."""

import pytest
import transformers
from accelerate import ParallelismConfig
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.distributed import DistributedConfig
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.distributed.test_mesh import fill_adapters, fork_ranks
from tests.integrations.trl.helpers import model_for_trl, settings, tiny_tokenizer
from treewise import share_prefixes
from treewise.errors import DataError

# PEFT and TRL still use names that transformers deprecates.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|set_gradient).*:FutureWarning"),
]
# Of a gradient's own norm. One process with the line is as far from one without it: 1.7e-6 at most in these runs.
TOLERANCE = 5e-6
SFT = {"shuffle_dataset": False, "train_sampling_strategy": "sequential", "per_device_train_batch_size": 6}
ROLLOUTS = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "beta": 0.0}


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"])


# Family, meshes, settings of the trainer, budget.
CASES = {
    "accumulation": ("gemma3_text", {"tp_size": 2}, {**SFT, "gradient_accumulation_steps": 2}, 12),
    "adapters": ("llama", {"tp_size": 2}, {**SFT, "peft_config": lora}, None),
    "experts": ("qwen3_moe", {"tp_size": 2, "ep_size": 2}, {**SFT, "router_aux_loss_coef": 0.1}, None),
    "rollouts": ("qwen3", {"tp_size": 2}, ROLLOUTS, None),
}


def small_ids(completion_ids, **_):
    return [float(sum(token < 32 for token in ids)) / len(ids) for ids in completion_ids]


class KeptGradients(TrainerCallback):
    """The whole gradients of each step, before they are clipped."""

    def __init__(self, model):
        self.model, self.of_steps = model, []

    def on_pre_optimizer_step(self, *_, **__):
        grads = {name: each.grad for name, each in self.model.named_parameters() if each.grad is not None}
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in grads.items()}
        self.of_steps.append({name: each.detach().clone() for name, each in whole.items()})


def trainer_of(folder, model, data, changes):
    changes = {"max_steps": 2, "max_grad_norm": 1e9, **changes}
    adapters = changes.pop("peft_config", None)
    common = {"model": model, "train_dataset": data, "processing_class": tiny_tokenizer()}
    if "num_generations" in changes:
        args = GRPOConfig(**settings(folder, **changes))
        return GRPOTrainer(args=args, reward_funcs=small_ids, **common)
    args = SFTConfig(**settings(folder, **changes))
    if adapters is None:
        return SFTTrainer(args=args, **common)
    trainer = SFTTrainer(args=args, peft_config=adapters(), **common)
    fill_adapters(trainer.model)
    return trainer


def trained(trainer, seed=5):
    """Losses and gradients; what is sampled is the same in every process that gives the same seed."""
    kept = KeptGradients(trainer.model)
    trainer.add_callback(kept)
    transformers.set_seed(seed)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], kept.of_steps


def on_two(folder, data, name):
    """Losses and gradients of two processes together, and batches that were trees."""
    # accelerate's check for tensor parallelism knows no CPUs; whatever follows it runs there, too.
    ParallelismConfig._validate_accelerator = lambda *_: None
    _, sizes, changes, max_tokens = CASES[name]

    def make():
        config = DistributedConfig(**sizes)
        model = AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=config)
        return trainer_of(folder, model, data, changes)

    if name == "rollouts":
        unseeded = make()
        share_prefixes(unseeded.model)
        with pytest.raises(DataError, match=r"tp_size=2\) have different rows.*call transformers\.set_seed"):
            unseeded.train()
    trainer = make()
    sharing = share_prefixes(trainer.model, max_tokens)
    return (*trained(trainer), sharing.counts.num_calls)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_like_one(tmp_path, conversations, prompts, name):
    family, _, changes, _ = CASES[name]
    data = prompts if name == "rollouts" else conversations
    model_for_trl(family).save_pretrained(tmp_path / "model")
    of_ranks = fork_ranks(2, lambda: on_two(tmp_path, data, name), tmp_path)
    alone = trainer_of(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "model"), data, changes)
    losses, gradients = trained(alone)
    for found_losses, found, num_trees in of_ranks:
        assert num_trees == len(gradients) * changes.get("gradient_accumulation_steps", 1)
        assert found_losses == pytest.approx(losses, rel=1e-6, abs=1e-6)
        for ours, theirs in zip(found, gradients, strict=True):
            assert ours.keys() == theirs.keys()
            for key, grad in theirs.items():
                assert float((ours[key] - grad).norm()) <= TOLERANCE * float(grad.norm()), (key, name)
