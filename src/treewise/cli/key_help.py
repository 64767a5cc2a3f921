"""What each key of a configuration is for, by group: for `--help`, the JSON schema and shell completion."""

import argparse
import dataclasses
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treewise.cli.aliases import ALIASES

HELP: Mapping[str, str] = {
    "model": "a folder, a Hub name, a .gguf file, or smollm2-demo",
    "data": "files, folders or globs; one or a list",
    "eval_data": "as data; evaluated each epoch, or as eval_strategy says",
    "output_dir": "the run's folder",
    "gguf_file": "a GGUF file inside model",
    "dtype": "of the parameters: float32, bfloat16, float16, float64, auto (the checkpoint's)",
    "tokenizer": "folder or name; the model's where not given",
    "num_workers": "processes that render; all cores for large data",
    "on_bad_record": "error, or quarantine: write it out, count it, go on",
    "lora": "settings of peft.LoraConfig; with a flag --lora.r 16",
    "load_in_4bit": "QLoRA: weights in 4 bits (bitsandbytes) below the adapters of lora",
    "load_in_8bit": "weights in 8 bits (bitsandbytes) below the adapters of lora",
    "thinking": "as_inference (every call as the model saw it) or keep (all reasoning)",
    "train_on": "which turns are trained: all_assistant or last_assistant",
    "merge_siblings": "merge declared siblings with equal tokens",
    "images_from_network": "download images of http and https addresses",
    "group_by": "field that names a record's tree, in place of group or task_id",
    "max_length": "longest trajectory allowed, in tokens; a longer one is an error",
    "chat_template": "a Jinja template, a file that holds one, or chatml",
    "on_drift": "warn or error where a row's text gives other token ids than it holds",
    "chat_template_kwargs": "further variables for the template, such as enable_thinking",
    "per_device_train_batch_size": "trees of a batch",
    "gradient_accumulation_steps": "batches of an optimizer step",
    "num_train_epochs": "passes over the data",
    "max_steps": "optimizer steps; in place of num_train_epochs",
    "learning_rate": "the highest one of the schedule",
    "lr_scheduler_type": "linear, cosine, constant, constant_with_warmup, ...",
    "warmup_steps": "steps of rising learning rate; below 1: a fraction of all steps",
    "optim": "adamw_torch_fused, adamw_torch, sgd, adafactor, ...",
    "weight_decay": "of AdamW",
    "max_grad_norm": "gradients are clipped to this norm; 0: never",
    "bf16": "compute in bfloat16, with parameters of dtype",
    "activation_checkpointing": "recompute activations in the backward",
    "use_cpu": "also where there is a GPU",
    "seed": "of the order of trees and of new adapters",
    "data_seed": "of the order of trees, in place of seed",
    "full_determinism": "kernels that repeat bit for bit",
    "eval_strategy": "no, steps or epoch",
    "eval_steps": "steps between evaluations",
    "per_device_eval_batch_size": "trees of a batch of an evaluation",
    "save_strategy": "no, steps, epoch or best",
    "save_steps": "steps between checkpoints",
    "save_total_limit": "checkpoints that are kept",
    "load_best_model_at_end": "by eval_loss",
    "report_to": "none, all, wandb, tensorboard, ...",
    "run_name": "for trackers",
    "logging_steps": "steps between lines of the log",
    "objective": "grpo, dr_grpo, dapo, gspo, cispo, ppo, reinforce, ...",
    "objective_settings": "of the objective, a mapping; each is a flag of its own, too",
    "advantages": "how they follow from rewards: grpo, rloo, dr_grpo, ..., or given",
    "advantages_settings": "of the advantages, a mapping",
    "old_logprobs": "auto, recompute, sampler or given",
    "reference": "the model of the KL term; the starting policy where not given",
    "mini_batches": "optimizer steps that an epoch is cut into",
    "logprob_gap_limit": "a run warns where sampler and policy differ by more (1: no gap)",
    "drop_flat_groups": "leave out groups whose rewards are all equal, and groups of one rollout",
}
GROUPS: Mapping[str, Sequence[str]] = {
    "Model and data": (
        *("model", "data", "output_dir", "eval_data", "tokenizer", "dtype", "gguf_file", "num_workers"),
        "on_bad_record",
    ),
    "Adapters": ("lora", "load_in_4bit", "load_in_8bit"),
    "Rendering of records": (
        *("thinking", "train_on", "merge_siblings", "group_by", "max_length", "chat_template"),
        *("chat_template_kwargs", "on_drift"),
    ),
    "Reinforcement learning": (
        *("objective", "objective_settings", "advantages", "advantages_settings", "old_logprobs", "reference"),
        *("mini_batches", "drop_flat_groups", "logprob_gap_limit"),
    ),
    "Trees": (
        *("max_tokens", "attention", "merge_across_trees", "temperature", "offload", "router_z_coefficient"),
        *("weighting", "normalization", "constant"),
    ),
    "Steps": (
        *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_epoch", "num_train_epochs"),
        "max_steps",
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "bf16"),
        "initial_optimizer",
        *("activation_checkpointing", "prepare_ahead", "use_cpu", "seed", "data_seed", "full_determinism"),
    ),
    "Evaluation, checkpoints, logs": (
        *("eval_strategy", "eval_steps", "per_device_eval_batch_size", "save_strategy", "save_steps"),
        *("save_total_limit", "async_checkpoints", "load_best_model_at_end", "push_to_hub", "hub_model_id"),
        *("logging_steps", "report_to", "run_name", "profile"),
    ),
    "When something goes wrong": ("nonfinite", "max_skipped_steps", "spike_factor", "on_save_failure"),
    "Several processes": (
        "sharded",
        "shard_config",
        "tp_size",
        "ep_size",
        "context_size",
        "balance_ranks",
        "balance_costs",
    ),
}
WIDTH = 100
COLUMN = 32


def help_of(key: str) -> str:
    """One sentence about a key."""
    if key in HELP:
        return HELP[key]
    from treewise.trainer import TreeTrainingArguments

    described = {item.name: item.metadata.get("help", "") for item in dataclasses.fields(TreeTrainingArguments)}
    text = " ".join(str(described.get(key, "")).split())
    return text.split(". ")[0].rstrip(".")


def keys_text(known: Mapping[str, Any]) -> str:
    """All keys by group, with their aliases, as `--help` shows them. known: the keys of the command."""
    aliases: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        aliases.setdefault(name.split(".")[0] if name.startswith("lora.") else name, []).append(alias)
    lines, listed = ["Keys, in CONFIG.yaml or as flags (--key value):"], set()
    for group, keys in GROUPS.items():
        members = [key for key in keys if key in known]
        listed.update(members)
        if not members:
            continue
        lines += ["", f"{group}:"]
        for key in members:
            same = f" (also: {', '.join(aliases[key])})" if key in aliases else ""
            wrapped = textwrap.wrap(help_of(key) + same, WIDTH - COLUMN)
            lines.append(f"  {key:<{COLUMN - 2}}{wrapped[0]}".rstrip())
            lines += [" " * COLUMN + rest for rest in wrapped[1:]]
    others = ", ".join(key for key in known if key not in listed)
    lines += ["", "Further keys of transformers.TrainingArguments:", *textwrap.wrap(others, WIDTH - 2)]
    return "\n".join(lines) + "\n"


def formatter_with(keys: Callable[[], Mapping[str, Any]]) -> Any:
    """A formatter of argparse whose help ends in all keys; they are looked up only when help is asked for."""

    class WithKeys(argparse.HelpFormatter):
        def format_help(self) -> str:
            return super().format_help() + "\n" + keys_text(keys())

    return WithKeys


def field_types() -> dict[str, Any]:
    """The annotations of peft's LoraConfig; none where peft is absent."""
    try:
        from peft import LoraConfig
    except ImportError:
        return {}
    return typing.get_type_hints(LoraConfig)
