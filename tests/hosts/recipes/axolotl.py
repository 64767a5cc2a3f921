"""axolotl's command on a YAML file, with treewise as one of its plugins."""

import sys
from pathlib import Path
from typing import Any

import axolotl.cli.train  # imported before runs are forked, as below
import axolotl.core.builders
import axolotl.train  # noqa: F401
import yaml
from axolotl.cli.main import cli

from tests.hosts.material import ADAPTER
from tests.hosts.recipes.common import RATE, STEPS

PLUGIN = "treewise.integrations.axolotl.TreewisePlugin"


def sft(folder: Path, model: Path, output: Path, *, line: bool, **chosen: Any) -> None:
    calls = {"path": str(folder / "calls.jsonl"), "ds_type": "json", "type": "chat_template"}
    train(model, output, line, datasets=[calls | {"roles_to_train": ["assistant"], "train_on_eos": "turn"}], **chosen)


def sft_packed(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    sft(folder, model, output, line=line, sample_packing=True, pad_to_sequence_len=True, micro_batch_size=1)


def sft_lora(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    kernels = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    lora = {"adapter": "lora", "lora_model_dir": str(model / ADAPTER), "lora_target_linear": True, "lora_dropout": 0.0}
    sft(folder, model, output, line=line, lora_r=8, lora_alpha=16, **lora, **kernels)


def dpo(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    kind = {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}
    pairs = {"path": str(folder / "pairs.jsonl"), "ds_type": "json", "type": kind, "split": "train"}
    train(model, output, line, rl="dpo", datasets=[pairs])


def grpo(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
    kind = "prompts_of_axolotl.prompts"
    prompts = {"path": str(folder / "prompts.jsonl"), "ds_type": "json", "type": kind, "split": "train"}
    chosen = {"use_vllm": False, "reward_funcs": ["tests.hosts.material.reward"], "num_generations": 4}
    chosen |= {"max_completion_length": 24, "beta": 0.04, "temperature": 1.0}
    train(model, output, line, rl="grpo", trl=chosen, datasets=[prompts])


def refused_neftune(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    calls = {"path": str(folder / "calls.jsonl"), "ds_type": "json", "type": "chat_template"}
    train(model, output, True, datasets=[calls], neftune_noise_alpha=5)


def train(model: Path, output: Path, line: bool, **chosen: Any) -> None:
    config = {
        "base_model": str(model),
        "output_dir": str(output),
        "dataset_prepared_path": str(output / "prepared"),
        "chat_template": "tokenizer_default",
        "sequence_len": 4096,
        "attn_implementation": "sdpa",
        "sample_packing": False,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "optimizer": "adamw_torch",
        "learning_rate": RATE,
        "lr_scheduler": "constant",
        "max_grad_norm": 1.0,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "num_epochs": 4,
        "save_steps": STEPS,
        "logging_steps": 1,
        "seed": 5,
        "sequential_sampling": True,
        "curriculum_sampling": True,
        "val_set_size": 0,
        **chosen,
    }
    if line:
        config["plugins"] = [PLUGIN]
    output.mkdir(parents=True)
    path = output / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    cli(["train", str(path), "--launcher", "python"], standalone_mode=False)
