"""What `swift sft` and `swift rlhf` call, with treewise as one of the external plugins."""

from collections.abc import Callable
from pathlib import Path

from swift.pipelines import rlhf_main, sft_main

import treewise.integrations
from tests.hosts.recipes.common import RATE, STEPS, records, write_records

PLUGIN = Path(treewise.integrations.__path__[0]) / "swift" / "plugin.py"
REWARD = Path(__file__).parents[1] / "plugins" / "digits_of_swift.py"


def sft(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    train(sft_main, [], model, output, line, dataset=folder / "calls.jsonl")


def dpo(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair["chosen"]},
            ],
            "rejected_response": pair["rejected"],
        }
        for pair in records(folder / "pairs.jsonl")
    ]
    train(rlhf_main, ["--rlhf_type", "dpo"], model, output, line, dataset=write_records(output, rows))


def grpo(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    chosen = ["--rlhf_type", "grpo", "--use_vllm", "false", "--reward_funcs", "digits", "--num_generations", "4"]
    chosen += ["--max_completion_length", "24", "--beta", "0.04", "--temperature", "1.0", "--loss_type", "grpo"]
    problems = records(folder / "prompts.jsonl")
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in problems]
    train(rlhf_main, chosen, model, output, line, REWARD, dataset=write_records(output, rows))


def train(
    command: Callable[..., object],
    chosen: list[str],
    model: Path,
    output: Path,
    line: bool,
    *plugins: Path,
    dataset: Path,
) -> None:
    settings = {
        "model": model,
        "model_type": "llama",
        "template": "chatml",
        "dataset": dataset,
        "output_dir": output,
        "torch_dtype": "float32",
        "attn_impl": "sdpa",
        "tuner_type": "full",
        "gradient_checkpointing": "false",
        "check_model": "false",
        "dataset_shuffle": "false",
        "train_dataloader_shuffle": "false",
        "dataloader_num_workers": 0,
        "max_length": 4096,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "weight_decay": 0,
        "max_grad_norm": 1.0,
        "report_to": "none",
        "use_hf": "true",
        "add_version": "false",
        "seed": 5,
    }
    files = [*plugins, *([PLUGIN] if line else [])]
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += ["--external_plugins", *map(str, files)] if files else []
    words += ["--callbacks", "treewise"] if line else []
    command([*chosen, *words])
