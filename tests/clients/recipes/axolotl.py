"""axolotl's command on YAML files like those beside its plugin (`integrations/hatchery/examples`)."""

import json
from pathlib import Path
from typing import Any

import yaml
from axolotl.cli.main import cli
from datasets import Dataset
from transformers import AutoTokenizer

NAME = "Qwen/Qwen3-8B"


def sft(steps: int) -> None:
    """Four calls of one row each before a step: branches of one agent's search."""
    calls = {"path": "calls.jsonl", "ds_type": "json", "type": "chat_template"}
    train(
        "sft",
        {"loss_fn": "cross_entropy"},
        datasets=[calls | {"roles_to_train": ["assistant"], "train_on_eos": "turn"}],
        chat_template="tokenizer_default",
        gradient_accumulation_steps=4,
        max_steps=steps,
    )


def rl(steps: int) -> None:
    """GRPO: one prompt a step, whose answers it sends one by one, and waits for each."""
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    rows = []
    for line in Path("prompts.jsonl").read_text().splitlines():
        ids = tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False)
        rows.append({"input_ids": ids, "labels": [-100] * len(ids), "attention_mask": [1] * len(ids)})
    Dataset.from_list(rows).save_to_disk("prompts")
    sampled = {"max_sample_tokens": 24, "num_samples": 6, "reward_funcs": ["tests.clients.recipes.rewards.vowels"]}
    prompts = {"path": "prompts", "ds_type": "arrow", "type": "completion"}
    train("rl", {"loss_fn": "importance_sampling", **sampled}, datasets=[prompts], max_steps=steps)


def train(name: str, hatchery: dict[str, Any], **chosen: Any) -> None:
    config = {
        "base_model": NAME,
        "plugins": ["axolotl.integrations.hatchery.HatcheryPlugin"],
        "hatchery": {"backend": "tinker", "lora_rank": 16, "pipeline": True, "save_steps": 2, **hatchery},
        "sequence_len": 4096,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "num_epochs": 1,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "val_set_size": 0,
        "seed": 5,
        "dataset_prepared_path": f"prepared-{name}",
        "output_dir": f"out-{name}",
        **chosen,
    }
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump(config))
    cli(["train", str(path), "--launcher", "python"], standalone_mode=False)
