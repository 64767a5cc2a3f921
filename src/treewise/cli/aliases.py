"""Names of other libraries for our keys, in one table: what users of transformers, TRL, axolotl, torchtune, unsloth and
LLaMA-Factory type.

Every command resolves them before it checks a key, and prints what it took them for. A dot leads into a mapping. A
command's own key always wins: `save_every` is `save_steps` in `treewise train`, and itself in `treewise rl --tasks`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treewise.errors import ConfigError

ALIASES: Mapping[str, str] = {
    # model and data
    "model_name_or_path": "model",
    "model_name": "model",
    "model_path": "model",
    "base_model": "model",
    "pretrained_model_name_or_path": "model",
    "tokenizer_name_or_path": "tokenizer",
    "tokenizer_name": "tokenizer",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "dataset": "data",
    "datasets": "data",
    "dataset_name": "data",
    "dataset_path": "data",
    "train_data": "data",
    "train_dataset": "data",
    "train_file": "data",
    "data_path": "data",
    "eval_dataset": "eval_data",
    "eval_file": "eval_data",
    "val_data": "eval_data",
    "validation_file": "eval_data",
    "test_datasets": "eval_data",
    "output": "output_dir",
    "out": "output_dir",
    "out_dir": "output_dir",
    "output_folder": "output_dir",
    "save_dir": "output_dir",
    "num_proc": "num_workers",
    "dataset_num_proc": "num_workers",
    "dataset_processes": "num_workers",
    "preprocessing_num_workers": "num_workers",
    # rendering
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "sequence_len": "max_length",
    "seq_length": "max_length",
    "cutoff_len": "max_length",
    "model_max_length": "max_length",
    "chat_template_path": "chat_template",
    "roles_to_train": "train_on",
    # steps
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "n_epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "gradient_accumulation": "gradient_accumulation_steps",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "scheduler": "lr_scheduler_type",
    "warmup": "warmup_steps",
    "warmup_ratio": "warmup_steps",
    "num_warmup_steps": "warmup_steps",
    "wd": "weight_decay",
    "clip_grad_norm": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "cpu": "use_cpu",
    "no_cuda": "use_cpu",
    "save_every": "save_steps",
    "save_interval": "save_steps",
    "eval_every": "eval_steps",
    "eval_interval": "eval_steps",
    "log_every_n_steps": "logging_steps",
    "log_every": "logging_steps",
    "max_checkpoints": "save_total_limit",
    # adapters
    "peft": "lora",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_alpha": "lora.lora_alpha",
    "lora_dropout": "lora.lora_dropout",
    "lora_target": "lora.target_modules",
    "lora_target_modules": "lora.target_modules",
    "lora_modules_to_save": "lora.modules_to_save",
    "use_rslora": "lora.use_rslora",
    "use_dora": "lora.use_dora",
}

# Words that are keys elsewhere and that nothing here corresponds to: what to do instead.
INSTEAD: Mapping[str, str] = {
    "adapter": "give lora (a mapping), and load_in_4bit: true for QLoRA",
    "use_peft": "give lora (a mapping), as in lora: {r: 16}",
    "use_lora": "give lora (a mapping), as in lora: {r: 16}",
    "finetuning_type": "give lora (a mapping), or leave it out to train all weights",
    "attn_implementation": "attention chooses (auto, reference, cascade or flex)",
    "flash_attention": "attention chooses (auto, reference, cascade or flex)",
    "packing": "leave it out: trees of a batch share micro-batches of max_tokens",
    "sample_packing": "leave it out: trees of a batch share micro-batches of max_tokens",
    "pad_to_sequence_len": "leave it out: nothing is padded",
    "padding_free": "leave it out: nothing is padded",
    "group_by_length": "leave it out: nothing is padded",
    "train_on_inputs": "train_on chooses which turns are trained",
    "assistant_only_loss": "train_on chooses which turns are trained",
    "completion_only_loss": "train_on chooses which turns are trained",
    "mask_prompt": "train_on chooses which turns are trained",
    "dataset_text_field": "the form of a record is found by its keys: docs/data.md",
    "wandb_project": "set the environment's WANDB_PROJECT, and report_to: wandb",
    "resume": "it is a flag: --resume [CHECKPOINT]",
    "resume_from": "use --resume [CHECKPOINT]",
    "overwrite_output_dir": "it is a flag: --overwrite",
}


# The model's own role in axolotl's `roles_to_train`, in the names of chats.
SAMPLED_ROLES = ("assistant", "gpt", "model", "chatgpt")


def train_on_of_roles(value: Any, location: str) -> str:
    """`train_on` for axolotl's `roles_to_train`.

    Raises:
        ConfigError: a role whose messages the model did not sample, or none.
    """
    roles = [value] if isinstance(value, str) else value
    if not isinstance(roles, list) or not roles or any(role not in SAMPLED_ROLES for role in roles):
        raise ConfigError(
            f"{location}: roles_to_train is {value!r}; only what the model sampled is trained: [assistant]. "
            "Leave out single messages by train: false or weight: 0."
        )
    return "all_assistant"


def names_of(known: Iterable[str], own: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every further name of the keys of a command, with what it stands for. known: the keys. own: names of the command
    itself, which may lead from a key of training into a mapping (`weighting` to `objective_settings.weighting`).
    """
    keys = set(known)
    return {alias: name for alias, name in ALIASES.items() if alias not in keys} | dict(own or {})


def resolve_flags(words: Sequence[str], options: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The words with every alias of an option, and every hyphen in its name, written as the parser has it.

    Parameters:
        words: of a command line.
        options: what the parser knows, such as `--max_tokens`.

    Returns:
        The words, and the aliases with what each stands for.
    """
    known = set(options)
    resolved, renamed = [], []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in known:
            name = flag[2:].replace("-", "_")
            target = f"--{ALIASES.get(name, name)}"
            if target in known:
                if name in ALIASES:
                    renamed.append((name, ALIASES[name]))
                word = target + equals + value
        resolved.append(word)
    return resolved, renamed


def as_text(renamed: Iterable[tuple[str, str]]) -> str:
    """What is printed of the aliases in use: `read as: lr -> learning_rate`."""
    pairs = dict.fromkeys(renamed)
    return "read as: " + ", ".join(f"{alias} -> {name}" for alias, name in pairs)
