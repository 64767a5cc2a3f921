"""Every key of a configuration, declared once: its type, limits, choices and one sentence of help.

Keys of rendering, of training and of online runs are the fields of `RenderOptions`, `TreeTrainingArguments` and
`OnlineSettings`; all others of `treewise train` and `treewise rl` stand here, with those of updates on recorded
rollouts, which online runs have, too. Flags, YAML files, the JSON schema, shell completion and `--help` are made from
them. Help and completion read those classes from their source, because importing torch and transformers takes seconds.
"""

import argparse
import ast
import dataclasses
import importlib.util
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

from treewise.cli.aliases import EARLIER, INSTEAD, names_of
from treewise.data import RenderOptions
from treewise.errors import parts_of

Keys = Mapping[str, Any]  # annotations by key


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunKeys:
    """The keys of every run besides rendering, training and those of one command."""

    model: Annotated[str, Doc("a folder, a Hub name, a .gguf file, or smollm2-demo")]
    gguf_file: Annotated[str | None, Doc("a GGUF file inside model")] = None
    dtype: Annotated[str, Doc("of the parameters: float32, bfloat16, float16, float64, auto (the checkpoint's)")] = (
        "float32"
    )
    tokenizer: Annotated[str | None, Doc("folder or name; the model's where not given")] = None
    data: Annotated[str | list[str | dict], Doc("files, folders or globs; one or a list")]
    eval_data: Annotated[
        str | list[str | dict] | None, Doc("as data; evaluated each epoch, or as eval_strategy says")
    ] = None
    eval_split: Annotated[
        float | None, Gt(0), Lt(1), Doc("in place of eval_data: this fraction of the trees is held back")
    ] = None
    lora: Annotated[dict | None, Doc("settings of peft.LoraConfig; with a flag --lora.r 16")] = None
    load_in_4bit: Annotated[bool, Doc("QLoRA: weights in 4 bits (bitsandbytes) below the adapters of lora")] = False
    load_in_8bit: Annotated[bool, Doc("weights in 8 bits (bitsandbytes) below the adapters of lora")] = False
    num_workers: Annotated[int | None, Doc("processes that render; all cores for large data")] = None
    on_bad_record: Annotated[
        Literal["error", "quarantine"], Doc("error, or quarantine: write it out, count it, go on")
    ] = "error"


OWN: Keys = typing.get_type_hints(RunKeys, include_extras=True)
TRAIN: Keys = {
    "objective": Annotated[
        str | None, Doc("train: sft, dpo, ipo, kto; rl: grpo, dr_grpo, dapo, gspo, cispo, ppo, reinforce, ...")
    ],
    "objective_settings": Annotated[dict | None, Doc("of the objective, a mapping; each is a flag of its own, too")],
    "reference": Annotated[
        str | None, Doc("the model that log-probs are compared with; the starting one where not given")
    ],
}
RL: Keys = {
    **TRAIN,
    "advantages": Annotated[str, Doc("how they follow from rewards: grpo, rloo, dr_grpo, ..., or given")],
    "advantages_settings": Annotated[dict | None, Doc("of the advantages, a mapping")],
    "old_logprobs": Annotated[str, Doc("auto, recompute, sampler or given")],
    "mini_batches": Annotated[int | None, Doc("optimizer steps that an epoch is cut into")],
    "drop_flat_groups": Annotated[bool, Doc("leave out groups that teach nothing, as where all rewards are equal")],
    "max_failed": Annotated[float, Ge(0), Le(1), Doc("the share of rollouts that may have no reward")],
    "logprob_gap_limit": Annotated[
        float, Ge(1), Doc("a run warns where sampler and policy differ by more (1: no gap)")
    ],
}
TASKS: Keys = {
    "tasks": Annotated[str, Doc("what is practised: reasoning_gym:NAME, sum, rows.jsonl, module:name, file.py:name")],
    "agent": Annotated[
        str | None,
        Doc("a program that does the tasks (rows of a file): file.py:function, module:function, or a command"),
    ],
    "agent_settings": Annotated[dict | None, Doc("of its episodes, a mapping (docs/agents.md)")],
    "tasks_settings": Annotated[dict | None, Doc("of the task, a mapping")],
    "tasks_seed": Annotated[int, Doc("other seeds make other items")],
    "reward_functions": Annotated[list[str], Doc("of rows: module:function or file.py:function; several add up")],
    "reward_weights": Annotated[list[float] | None, Doc("what each of reward_functions counts")],
    "sampler": Annotated[str, Doc("transformers (this process), a server: vllm, openai; or module:Class")],
    "sampler_settings": Annotated[dict | None, Doc("of the sampler, a mapping")],
}
# Keys of transformers that few know by their names.
_THEIRS = {
    "output_dir": "the run's folder",
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
    "activation_checkpointing": "recompute activations in the backward; auto: where the first step would not fit",
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
    "push_to_hub": "upload the model to the Hub at the end",
    "hub_model_id": "the Hub's name of what is uploaded",
    "logging_steps": "steps between lines of the log",
}
_THEIRS |= {old: _THEIRS[new] for new, old in EARLIER.items() if new in _THEIRS}
_GROUPS = {
    "Model and data": (
        "model data output_dir eval_data eval_split tokenizer dtype gguf_file num_workers on_bad_record"
    ),
    "Adapters": "lora load_in_4bit load_in_8bit",
    "Rendering of records": (
        "thinking train_on merge_siblings routing_replay group_by max_length chat_template chat_template_kwargs "
        "template_date on_drift on_hidden max_record_bytes images_from_network images_from_local_network image_folder "
        "max_image_bytes"
    ),
    "Reinforcement learning": (
        "objective objective_settings advantages advantages_settings old_logprobs reference mini_batches "
        "drop_flat_groups max_failed logprob_gap_limit"
    ),
    "Trees": (
        "max_tokens attention compile_layers merge_across_trees temperature offload router_z_coefficient "
        "router_loss_choices weighting normalization constant"
    ),
    "Steps": (
        "per_device_train_batch_size gradient_accumulation_steps steps_per_epoch num_train_epochs max_steps "
        "learning_rate lr_scheduler_type warmup_steps optim weight_decay max_grad_norm bf16 float32_gradients "
        "activation_checkpointing prepare_ahead use_cpu seed data_seed full_determinism"
    ),
    "Evaluation, checkpoints, logs": (
        "eval_strategy eval_steps per_device_eval_batch_size save_strategy save_steps save_total_limit "
        "load_best_model_at_end push_to_hub hub_model_id logging_steps report_to run_name"
    ),
    "When something goes wrong": "nonfinite max_skipped_steps spike_factor on_save_failure verify_saves",
    "Several processes": "sharded shard_config tp_size ep_size context_size balance_ranks",
}
GROUPS = {title: keys.split() for title, keys in _GROUPS.items()}
ONLINE_GROUP = "Online runs (tasks in place of data)"  # every key of ours that no group above has
# transformers' own flags that the command line answers in another way.
ELSEWHERE = {
    "resume_from_checkpoint": "use --resume [CHECKPOINT]",
    "do_train": "`treewise train` always trains",
    **dict.fromkeys(("do_eval", "do_predict"), "give eval_data"),
    "local_rank": "torchrun sets it",
    "debug": "use --debug",
    **INSTEAD,
}
WIDTH = 100
COLUMN = 32
# The classes whose fields are keys, each in a file of its package.
RENDERING = ("treewise", "data/io/options.py", "RenderOptions")
TRAINING = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("treewise", "trainer/arguments.py", "TreeTrainingArguments"),
)
ONLINE = ("treewise", "rl/online/settings.py", "OnlineSettings")
POLICY_GRADIENT = ("treewise", "objectives/policy_gradient.py", "PolicyGradient")


def schema(more: Keys | None = None) -> dict[str, Any]:
    """The annotation of every key; `more` are those of one command."""
    from treewise.trainer import TreeTrainingArguments

    training = typing.get_type_hints(TreeTrainingArguments, include_extras=True)
    names = [item.name for item in dataclasses.fields(TreeTrainingArguments) if item.init]
    rendering = typing.get_type_hints(RenderOptions, include_extras=True)
    return {**OWN, **rendering, **{name: training[name] for name in names if name not in ELSEWHERE}, **(more or {})}


def key_names(more: Iterable[str] = ()) -> list[str]:
    """The keys of `schema` without their types, and without the seconds that torch and transformers take."""
    training = [name for heading in TRAINING for name in declared(*heading) if name not in ELSEWHERE]
    return list(dict.fromkeys([*OWN, *declared(*RENDERING), *training, *more]))


@cache
def declared(package: str, file: str, name: str) -> Mapping[str, str]:
    """The fields of a dataclass that a caller may give, each with the first sentence of its docstring about it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    names = [node.target.id for node in fields if "init=False" not in ast.unparse(node)]  # type: ignore[union-attr]
    texts = _entries(ast.get_docstring(found) or "")
    return {name: texts.get(name, "").split(". ")[0].rstrip(".").replace("`", "") for name in names}


def _entries(docstring: str) -> dict[str, str]:
    """What a docstring says under "Parameters:" of each name; several may share an entry."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.partition("Parameters:\n")[2].splitlines():
        if not line.startswith(8 * " "):
            of_names, _, text = line.strip().partition(": ")
            names = of_names.split(", ")
            texts |= dict.fromkeys(names, text)
        else:
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def help_of(key: str, *, with_tasks: bool = False) -> str:
    """One sentence about a key. with_tasks: of a command that practises tasks, too, where a few mean something else."""
    for keys in (OWN, RL, TASKS):
        for _, about in parts_of(keys.get(key, str)):
            for each in about:
                if isinstance(each, Doc):
                    return each.documentation
    of_records = next(filter(None, (declared(*each).get(key) for each in (RENDERING, *TRAINING))), "")
    of_tasks = declared(*ONLINE).get(key, "")
    if with_tasks and of_records and of_tasks:
        return f"{of_records}; with tasks: {of_tasks}"
    return _THEIRS.get(key) or of_records or of_tasks


def keys_text(known: Iterable[str]) -> str:
    """All keys by group, with their aliases, as `--help` shows them. known: the keys of the command."""
    keys_of_command, ours = list(known), set(declared(*TRAINING[0]))
    aliases: dict[str, list[str]] = {}
    for alias, name in names_of(keys_of_command).items():
        aliases.setdefault(name.split(".")[0] if name.startswith("lora.") else name, []).append(alias)
    lines, listed = ["Keys, in CONFIG.yaml or as flags (--key value):"], set[str]()
    rest = [key for key in keys_of_command if key not in ours and not any(key in keys for keys in GROUPS.values())]
    for group, keys in {**GROUPS, ONLINE_GROUP: rest}.items():
        here = (key if key in keys_of_command else EARLIER.get(key) for key in keys)
        members = [key for key in here if key in keys_of_command]
        listed.update(members)
        if not members:
            continue
        lines += ["", f"{group}:"]
        for key in members:
            same = f" (also: {', '.join(aliases[key])})" if key in aliases else ""
            wrapped = textwrap.wrap(help_of(key, with_tasks="tasks" in keys_of_command) + same, WIDTH - COLUMN) or [""]
            lines.append(f"  {key:<{COLUMN - 2}}{wrapped[0]}".rstrip())
            lines += [" " * COLUMN + more for more in wrapped[1:]]
    others = ", ".join(key for key in keys_of_command if key not in listed)
    lines += ["", "Further keys of transformers.TrainingArguments:", *textwrap.wrap(others, WIDTH - 2)]
    return "\n".join(lines) + "\n"


def formatter_with(keys: Callable[[], Iterable[str]]) -> Any:
    """A formatter of argparse whose help ends in all keys; they are looked up only when help is asked for."""

    class WithKeys(argparse.HelpFormatter):
        def format_help(self) -> str:
            return super().format_help() + "\n" + keys_text(keys())

    return WithKeys


def rl_aliases() -> dict[str, str]:
    """Short names of keys: settings of a policy gradient need no `objective_settings.` in front."""
    others = ("surrogate", "usual_advantages")  # --objective chooses the one, --advantages is in place of the other
    return {name: f"objective_settings.{name}" for name in declared(*POLICY_GRADIENT) if name not in others}
