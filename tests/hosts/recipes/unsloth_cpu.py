"""unsloth's backend for CPUs, which it takes where it finds no accelerator: its loader, and TRL's SFTTrainer as it
leaves it."""

from pathlib import Path
from typing import Any

import torch
import unsloth  # before TRL, as it asks
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from tests.hosts.recipes.common import records, settings
from treewise.integrations.callback import SharePrefixes


def sft(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    network, tokenizer = loaded(model)
    run(network, tokenizer, folder, output, line)


def refused_gpu_layers(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    """A layer whose forward is one of unsloth's own, as its backend for GPUs puts it in."""
    network, tokenizer = loaded(model)
    kind = type(network.model.layers[0].self_attn)

    class Attention(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    Attention.forward.__module__ = "unsloth.models.llama"
    network.model.layers[0].self_attn.__class__ = Attention
    run(network, tokenizer, folder, output, line)


def loaded(model: Path) -> tuple[Any, Any]:
    network, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        model_name=str(model), max_seq_length=4096, dtype=torch.float32, load_in_4bit=False, full_finetuning=True
    )
    return network, tokenizer


def run(network: Any, tokenizer: Any, folder: Path, output: Path, line: bool) -> None:
    order = {"shuffle_dataset": False, "train_sampling_strategy": "sequential", "packing": False}
    arguments = SFTConfig(**settings(output, **order, assistant_only_loss=True, max_length=4096))
    SFTTrainer(
        model=network,
        args=arguments,
        train_dataset=Dataset.from_list(records(folder / "calls.jsonl")),
        processing_class=tokenizer,
        callbacks=[SharePrefixes()] if line else [],
    ).train()
