"""Names of other libraries for our keys, in one table: what users of transformers, TRL, axolotl, torchtune, unsloth and
LLaMA-Factory type.

Every command resolves them before it checks a key, and prints what it took them for. A dot leads into a mapping. A
command's own key always wins: `save_every` is `save_steps` in `treewise train`, and itself in `treewise rl --tasks`.
"""

from collections.abc import Iterable, Mapping, Sequence

from treewise.errors import ConfigError

_NAMES_OF = {
    "model": "model_name_or_path model_name model_path base_model pretrained_model_name_or_path",
    "tokenizer": "tokenizer_name_or_path tokenizer_name",
    "dtype": "torch_dtype precision",
    "data": "dataset datasets dataset_name dataset_path train_data train_dataset train_file data_path",
    "eval_data": "eval_dataset eval_file val_data validation_file test_datasets",
    "eval_split": "val_set_size val_size",
    "output_dir": "output out out_dir output_folder save_dir",
    "num_workers": "num_proc dataset_num_proc dataset_processes preprocessing_num_workers",
    "max_length": "max_seq_length max_seq_len sequence_len seq_length cutoff_len model_max_length",
    "chat_template": "chat_template_path",
    "train_on": "roles_to_train",
    "learning_rate": "lr",
    "num_train_epochs": "epochs num_epochs n_epochs",
    "max_steps": "steps",
    "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "grad_accum gradient_accumulation grad_accumulation_steps",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler scheduler",
    "warmup_steps": "warmup warmup_ratio num_warmup_steps",
    "weight_decay": "wd",
    "max_grad_norm": "clip_grad_norm grad_clip gradient_clipping max_norm",
    "use_cpu": "cpu no_cuda",
    "save_steps": "save_every save_interval",
    "eval_steps": "eval_every eval_interval",
    "logging_steps": "log_every_n_steps log_every",
    "save_total_limit": "max_checkpoints",
    "lora": "peft",
    "lora.r": "lora_r lora_rank",
    "lora.lora_alpha": "lora_alpha",
    "lora.lora_dropout": "lora_dropout",
    "lora.target_modules": "lora_target lora_target_modules",
    "lora.modules_to_save": "lora_modules_to_save",
    "lora.use_rslora": "use_rslora",
    "lora.use_dora": "use_dora",
}
ALIASES: Mapping[str, str] = {name: key for key, names in _NAMES_OF.items() for name in names.split()}

# Keys of transformers 5.23, with their names in the releases before.
EARLIER = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}

# Words that are keys elsewhere and that nothing here corresponds to, below what to do instead.
_INSTEAD_OF = {
    "give lora (a mapping), and load_in_4bit: true for QLoRA": "adapter",
    "give lora (a mapping), as in lora: {r: 16}": "use_peft use_lora",
    "give lora (a mapping), or leave it out to train all weights": "finetuning_type",
    "give lora.target_modules: all-linear": "lora_target_linear",
    "attention chooses (auto, reference, cascade, flex, flash or cudnn)": "attn_implementation flash_attention",
    "leave it out: trees of a batch share micro-batches of max_tokens": "packing sample_packing",
    "leave it out: nothing is padded": "pad_to_sequence_len padding_free group_by_length",
    "train_on chooses which turns are trained": "train_on_inputs assistant_only_loss completion_only_loss mask_prompt",
    "the form of a record is found by its keys: docs/forms.md": "dataset_text_field",
    "leave it out: special tokens are the tokenizer's": "special_tokens",
    "give save_strategy: steps and save_steps": "saves_per_epoch",
    "give eval_strategy: steps and eval_steps": "evals_per_epoch",
    "set the environment's WANDB_PROJECT, and report_to: wandb": "wandb_project",
    "it is a flag: --resume [CHECKPOINT]": "resume",
    "use --resume [CHECKPOINT]": "resume_from",
    "it is a flag: --overwrite": "overwrite_output_dir",
}
INSTEAD: Mapping[str, str] = {word: advice for advice, words in _INSTEAD_OF.items() for word in words.split()}


# The model's own role in axolotl's `roles_to_train`, in the names of chats.
SAMPLED_ROLES = ("assistant", "gpt", "model", "chatgpt")


def train_on_of_roles(value: object, location: str) -> str:
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
    further = {**ALIASES, **{new: old for new, old in EARLIER.items() if old in keys}}
    return {alias: name for alias, name in further.items() if alias not in keys} | dict(own or {})


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
