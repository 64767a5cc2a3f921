"""`transformers.Trainer` and a plain loop of accelerate, on recorded calls of an agent."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import treewise as tw
from tests.hosts.recipes.common import RATE, STEPS, settings, write_logs

IGNORED = -100


def rows_of(folder: Path, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Each chat with the tokens of its replies as labels."""
    rows = []
    for line in (folder / "calls.jsonl").read_text().splitlines():
        chat = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids = chat["input_ids"]
        trained = zip(ids, chat["assistant_masks"], strict=True)
        rows.append({"input_ids": ids, "labels": [token if is_reply else IGNORED for token, is_reply in trained]})
    return rows


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", IGNORED)}


def trainer(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    run = Trainer(
        network,
        TrainingArguments(**settings(output), train_sampling_strategy="sequential"),
        train_dataset=rows_of(folder, tokenizer),
        data_collator=collate,
    )
    sharing = tw.share_prefixes(run.model) if line else None
    run.train()
    print(sharing)


def accelerate(folder: Path, model: Path, output: Path, *, line: bool) -> None:
    chosen = settings(output)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=chosen["gradient_accumulation_steps"])
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    loader = DataLoader(
        rows_of(folder, tokenizer), batch_size=chosen["per_device_train_batch_size"], collate_fn=collate
    )
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    sharing = tw.share_prefixes(network) if line else None
    logs: list[dict[str, float]] = []
    with write_logs(output, logs):
        while len(logs) < STEPS:
            losses = []
            for batch in loader:
                with accelerator.accumulate(network):
                    loss = network(**batch).loss
                    accelerator.backward(loss)
                    losses.append(float(loss))
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(network.parameters(), 1.0)
                        logs.append({"loss": sum(losses) / len(losses), "grad_norm": float(norm)})
                        losses = []
                    optimizer.step()
                    optimizer.zero_grad()
                if len(logs) == STEPS:
                    break
    accelerator.unwrap_model(network).save_pretrained(output / f"checkpoint-{STEPS}")
    print(sharing)
