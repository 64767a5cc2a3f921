"""`treewise rl --tasks`: the online loop from a configuration."""

import argparse
import typing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.cli import agent_run, run_folder, training_run
from treewise.cli.config import RunConfig
from treewise.cli.keys import ONLINE, RENDERING, TASKS, declared
from treewise.cli.output import is_first_rank
from treewise.errors import ConfigError, num

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treewise.objectives import Objective
    from treewise.rl.online import OnlineSettings
    from treewise.rl.tasks.protocol import Task
    from treewise.trainer import TreeTrainingArguments

REQUIRED = ("model", "tasks", "output_dir")
_NO_DATA = "with tasks no recorded data is read; leave it out"
# Keys of epochs over recorded data, with what an online run has in their place.
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("num_train_epochs", "max_steps"), "with tasks give iterations"),
    "per_device_train_batch_size": "with tasks give trees_per_iteration",
    **dict.fromkeys(("gradient_accumulation_steps", "steps_per_epoch"), "with tasks give mini_batches"),
    **dict.fromkeys(("save_steps", "save_strategy"), "with tasks give save_every"),
    **dict.fromkeys(("eval_steps", "eval_strategy", "eval_on_start", "eval_delay"), "with tasks give eval_every"),
    **dict.fromkeys(("eval_split", "per_device_eval_batch_size"), "with tasks give eval_items"),
    **dict.fromkeys(("logging_steps", "logging_strategy", "logging_first_step"), "every iteration is logged"),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "the model after the last iteration is saved",
    ),
    "data_seed": "with tasks give seed, or tasks_seed",
    **dict.fromkeys(
        declared(*RENDERING).keys() - {"max_length", "chat_template", "routing_replay", "template_date"}, _NO_DATA
    ),
    **dict.fromkeys(("num_workers", "on_bad_record", "prepare_ahead", "train_sampling_strategy"), _NO_DATA),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_prefetch_factor"), _NO_DATA),
    "dataloader_multiprocessing_context": _NO_DATA,
    "chat_template_kwargs": "with tasks the template has no further variables; write them into chat_template",
}


def names() -> list[str]:
    """The names of `keys`, without importing what declares them."""
    return [*declared(*ONLINE), *TASKS]


def keys() -> dict[str, Any]:
    """Every key of the loop with its type."""
    from treewise.rl.online.settings import OnlineSettings

    return {**typing.get_type_hints(OnlineSettings, include_extras=True), **TASKS}


def run(args: argparse.Namespace, config: RunConfig, objective: "Objective") -> None:
    """Runs the loop, or with `--dry_run` checks everything and prints what it would do.

    Raises:
        ConfigError: settings that contradict one another, or that recorded rollouts alone have.
    """
    from treewise.engine.engine import TreeEngine
    from treewise.models.load_model import load_tokenizer
    from treewise.rl.online import OnlineTrainer
    from treewise.rl.online.tasks_by_name import task_named
    from treewise.rl.samplers import sampler_named
    from treewise.rl.samplers.by_name import entry_of

    recorded: list[Any] = [config.data, config.eval_data]
    if any(data is not None for data in recorded):
        raise ConfigError(
            "tasks and data are both given: a run samples its rollouts or trains on recorded ones, not both."
        )
    arguments = training_run.training_arguments(config)
    config = training_run.with_template_date(args, config)
    settings, more = _settings(config, objective), config.more
    given = (more.get("tasks_settings"), more.get("reward_functions") or ())
    agent = more.get("agent")
    if agent is None and more.get("agent_settings"):
        raise ConfigError("agent_settings are given without an agent; give agent: file.py:function, or a command.")
    weights, seed = more.get("reward_weights"), more.get("tasks_seed", 0)
    task = task_named(more["tasks"], *given, seed, weights, is_for_agent=agent is not None)
    name, sampler_settings = config.more.get("sampler", "transformers"), config.more.get("sampler_settings") or {}
    entry_of(name)
    folder = {"weights_folder": str(Path(config.training["output_dir"]) / "server_weights")}
    named = (config.model, config.gguf_file) if config.tokenizer is None else (config.tokenizer,)
    tokenizer = load_tokenizer(*named)
    model = training_run.load_model(config, arguments)
    if is_first_rank():
        print(_summary(config, settings, task))
    if agent is not None:
        agent_run.collector_of(config, settings, task, tokenizer, model, arguments).close()  # the agent loads
    elif args.dry_run or not settings.reward_workers:  # workers take seconds to start, and the run's own find the same
        _check_first_prompt(task, tokenizer, settings, arguments, model)
    if args.dry_run:
        TreeEngine(model, arguments.max_tokens, arguments.attention)
        return
    with run_folder.opened(args, config, arguments, settings.iterations) as opened:
        collector = None
        if agent is not None:
            collector = agent_run.collector_of(config, settings, task, tokenizer, model, arguments)
        trainer = OnlineTrainer(
            model,
            task,
            tokenizer,
            settings,
            arguments,
            objective=objective,
            sampler=sampler_named(name, sampler_settings, model, of_servers=folder),
            reference=_reference(config),
            collector=collector,
        )
        trainer.train(opened.resume_from or True if args.resume else None)
        if opened.finished_steps is not None:
            run_folder.tell_finished(arguments.output_dir, opened.finished_steps, is_online=True)
        elif is_first_rank():
            print(f"model saved to {arguments.output_dir}")


def loop_values(config: RunConfig) -> dict[str, Any]:
    """What the configuration gives of the fields of `OnlineSettings`."""
    from treewise.rl.online.settings import OnlineSettings

    names = {field.name for field in fields(OnlineSettings)}
    return {name: value for name, value in config.more.items() if name in names and value is not None}


def _settings(config: RunConfig, objective: "Objective") -> "OnlineSettings":
    from treewise.rl.online.settings import OnlineSettings
    from treewise.rl.update import method_of

    values = loop_values(config)
    values["advantages"] = method_of(objective, values.get("advantages"), (), values.get("advantages_settings"))
    return OnlineSettings(**values)


def _check_first_prompt(
    task: "Task",
    tokenizer: object,
    settings: "OnlineSettings",
    arguments: "TreeTrainingArguments",
    model: "PreTrainedModel",
) -> None:
    """Raises what the first prompt of a run would: of a chat template that cannot write it, of `reset`, of tools, of
    its length.
    """
    from treewise.rl.online.trees import tree_collector

    collector = tree_collector(task, tokenizer, settings, arguments, model)
    try:
        collector.prompt_ids(task.item("train", 0))
    finally:
        collector.close()


def _reference(config: RunConfig) -> "PreTrainedModel | None":
    """The model of a KL term: the one that the run starts from, where none is given and no adapters are trained."""
    from treewise.models.load_model import load_weights

    name = config.more.get("reference")
    has_kl = bool((config.more.get("objective_settings") or {}).get("beta"))
    if name is None and (not has_kl or config.lora is not None):
        return None
    return load_weights(name or config.model, None if name else config.gguf_file, config.dtype)


def _summary(config: RunConfig, settings: "OnlineSettings", task: "Task") -> str:
    lines = [
        ("task", task.name),
        ("objective", f"{config.more['objective']}, advantages {settings.advantages}"),
        ("branching", f"{settings.branching} {dict(settings.branching_settings) or ''}".strip()),
        ("iterations", f"{settings.iterations:,}, {num(settings.updates_per_iteration, 'optimizer step')} each"),
        (
            "budget",
            f"{num(settings.tokens_per_iteration, 'generated token')} an iteration in "
            f"{num(settings.trees_per_iteration, 'tree')}, {settings.max_new_tokens:,} a rollout at most",
        ),
        ("sampler", config.more.get("sampler", "transformers")),
    ]
    if config.more.get("agent"):
        lines = [line for line in lines if line[0] not in ("branching", "budget")]
        lines += agent_run.summary(config, settings)
    return "\n".join(f"{name:<12} {value}" for name, value in lines)
