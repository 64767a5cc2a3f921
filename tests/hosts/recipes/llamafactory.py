"""LLaMA-Factory's `run_exp`, which takes callbacks."""

import json
import os
from pathlib import Path
from typing import Any

from tests.hosts.material import ADAPTER
from tests.hosts.recipes.common import settings
from treewise.integrations.callback import SharePrefixes

os.environ["DISABLE_VERSION_CHECK"] = "1"  # it names the newest releases that it was tried with
os.environ["ALLOW_EXTRA_ARGS"] = "1"

from llamafactory.train.tuner import run_exp

CHAT = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
COLUMNS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}


def sft(folder: Path, model: Path, output: Path, *, line: bool, **chosen: Any) -> None:
    calls = {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": CHAT | {"system_tag": "system"}}
    train(model, output, line, folder / "calls.jsonl", calls, stage="sft", **chosen)


def sft_packed(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    """`neat_packing`: of the documents of a row it makes a mask of four dimensions, which is left to the model."""
    packed = {"packing": True, "neat_packing": True, "per_device_train_batch_size": 1}
    sft(folder, model, output, line=line, **packed)


def sft_lora(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    lora = {"finetuning_type": "lora", "lora_target": "all", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0}
    sft(folder, model, output, line=line, adapter_name_or_path=str(model / ADAPTER), **lora)


def dpo(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    pairs = {"ranking": True, "columns": COLUMNS}
    train(model, output, line, folder / "pairs.jsonl", pairs, stage="dpo", pref_beta=0.1)


def train(model: Path, output: Path, line: bool, rows: Path, form: dict[str, Any], **chosen: Any) -> None:
    output.mkdir(parents=True)
    (output / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": str(rows), **form}}))
    arguments = {
        **settings(output),
        "model_name_or_path": str(model),
        "dataset": "rows",
        "dataset_dir": str(output),
        "template": "chatml",
        "cutoff_len": 4096,
        "do_train": True,
        "finetuning_type": "full",
        "flash_attn": "sdpa",
        "disable_gradient_checkpointing": True,
        "disable_shuffling": True,
        "overwrite_output_dir": True,
        **chosen,
    }
    run_exp(arguments, callbacks=[SharePrefixes()] if line else [])
