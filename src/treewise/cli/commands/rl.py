"""`treewise rl --data rollouts.jsonl --model M --objective grpo`: the model update of RL, on rollouts of any engine.

With `--tasks` in place of `--data` the run makes its rollouts itself: `cli/online_run.py`.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.cli import online_run, run_folder, training_run
from treewise.cli.aliases import ALIASES
from treewise.cli.config import RunConfig, parse_flags, read_config, read_keys, reference_of, typed_settings
from treewise.cli.keys import RL as KEYS
from treewise.cli.keys import formatter_with, key_names, rl_aliases
from treewise.cli.output import is_first_rank
from treewise.cli.values import read_file
from treewise.data.io.files import parsed_object
from treewise.data.sources import open_sources
from treewise.errors import ConfigError, DataError
from treewise.nn.adapters import adapter_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treewise.objectives import Objective
    from treewise.rl.update import Update
    from treewise.trainer import TreeTrainingArguments
    from treewise.tree.trajectory import Trajectory

# Other defaults than those of supervised training: one epoch, small constant steps, no decay.
DEFAULTS = {
    "num_train_epochs": 1.0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "save_strategy": "epoch",
}
# Metrics of the line that ends an epoch.
SHOWN = (
    *("loss", "clip_fraction", "approx_kl", "kl", "entropy", "ratio", "sampler_weight", "logprob_gap"),
    *("student_mass", "teacher_mass"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command. Every key of the configuration is a flag, too."""
    parser.usage = (
        "treewise rl [CONFIG.yaml] (--data ROLLOUTS --objective NAME | --tasks TASK) --model MODEL "
        "--output_dir FOLDER [--key value ...] [--resume [CHECKPOINT]] [--overwrite] [--dry_run]"
    )
    parser.formatter_class = formatter_with(lambda: key_names([*KEYS, *online_run.names()]))
    parser.epilog = (
        "Objectives and advantages are explained in docs/objectives.md, those with --tasks in docs/online-rl.md, "
        "further keys in docs/keys.md."
    )
    training_run.add_flags(parser, "the folder")


def all_keys() -> dict[str, Any]:
    """Every key with its type, on recorded rollouts and with tasks."""
    return {**KEYS, **online_run.keys()}


def run(args: argparse.Namespace) -> int:
    """Updates the model; returns the exit code."""
    config_path, overrides = training_run.split_words(args)
    in_file = () if config_path is None else read_file(Path(config_path), ())
    given = {ALIASES.get(key, key) for key in (*parse_flags(overrides), *in_file)}
    if "tasks" in given:
        return _run_online(args, config_path, overrides)
    if "data" not in given:
        read_keys(config_path, overrides, all_keys(), rl_aliases())  # an unknown key is named first
        others = ", ".join(f"--{key}" for key in ("model", "output_dir") if key not in given)
        raise ConfigError(
            "give --data, recorded rollouts to train on, or --tasks, what the run is to sample itself"
            + (f"; and {others}." if others else ".")
        )
    config = read_config(config_path, overrides, KEYS, rl_aliases())
    if config.eval_data is not None:
        raise ConfigError("eval_data is not a key of treewise rl: rollouts of another policy do not measure this one.")
    training_run.check_flags(args, config)
    for name, value in DEFAULTS.items():
        config.training.setdefault(name, value)
    objective = rollout_objective(config)
    training_run.training_arguments(config)  # whose errors come before data is read
    return _run_recorded(args, training_run.with_template_date(args, config), objective)


def _run_recorded(args: argparse.Namespace, config: RunConfig, objective: "Objective") -> int:
    """Credits the recorded rollouts, computes their log-probs and trains on them; returns the exit code."""
    from treewise.cli.progress import EpochMeans, GapWarning
    from treewise.nn.wrapped import num_embeddings
    from treewise.rl import checks as rl_checks
    from treewise.rl import update as rl_update  # slow to import
    from treewise.rl.tasks.rewards import MAX_FAILED
    from treewise.trainer.run_summary import num_optimizer_steps

    dataset, _, tokenizer = training_run.load_data(config, read_only=args.dry_run)
    trees = [tree.labelled_trajectories() for tree in dataset]
    _check_rewards(config, trees, objective)
    update = rl_update.credited(
        trees,
        objective,
        method=config.more.get("advantages"),
        settings=config.more.get("advantages_settings"),
        drop_flat_groups=bool(config.more.get("drop_flat_groups")),
        max_failed=config.more.get("max_failed", MAX_FAILED),
    )
    arguments = _arguments(config, len(update.trees))
    model = training_run.load_model(config, arguments)
    dataset.check_vocabulary(num_embeddings(model))
    num_updates = num_optimizer_steps(arguments, len(update.trees))
    update = rl_update.with_streams(
        update,
        objective,
        num_updates=num_updates,
        old_logprobs=config.more.get("old_logprobs", "auto"),
        has_reference=config.more.get("reference") is not None,
    )
    if args.dry_run:
        _print_update(config, update)
        return training_run.dry_run(arguments, model, update.trees, objective)
    command = shlex.join(["treewise", "rl", *args.overrides])
    folder = Path(arguments.output_dir)
    facts = [dataset.fingerprint, config.model, config.more.get("reference"), config.dtype]
    with run_folder.opened(args, config, arguments, num_updates) as opened:
        saved = rl_update.load_scores(folder, update, facts) if opened.resume_from else None
        update = saved or _scored(config, arguments, model, update)
        _print_update(config, update)
        if saved is None and is_first_rank():
            rl_update.save_scores(folder, update, facts)
        callbacks = [EpochMeans(SHOWN), GapWarning(config.more.get("logprob_gap_limit", rl_checks.MAX_GAP))]
        if is_first_rank():
            for line in rl_checks.warnings_of(update.trees, getattr(objective, "weighting", "per_trajectory")):
                print(f"warning: {line}", file=sys.stderr)
        trainer = {"model": model, "processing_class": tokenizer, "objective": objective}
        training_run.train(arguments, command, opened, callbacks, train_dataset=update.trees, **trainer)
    return 0


def _run_online(args: argparse.Namespace, path: str | None, overrides: list[str]) -> int:
    """Runs the online loop; returns the exit code."""
    config = read_config(path, overrides, all_keys(), rl_aliases(), online_run.REQUIRED, online_run.ELSEWHERE)
    training_run.check_flags(args, config)
    for name, value in DEFAULTS.items():
        config.training.setdefault(name, value)
    config.more.setdefault("objective", "grpo")
    settings = config.more.setdefault("objective_settings", {})
    settings.setdefault("weighting", "per_rollout")
    if config.more.get("max_staleness") and config.more["objective"] not in ("sft", "distillation"):
        settings.setdefault("sampler_correction", "truncate")
    online_run.run(args, config, rollout_objective(config))
    return 0


# -- settings ---------------------------------------------------------------------------------------------------------


def rollout_objective(config: RunConfig) -> "Objective":
    """The objective that the configuration of a run on rollouts names."""
    from treewise.objectives.registry import PREFERENCES, MissingSettingError, objective_named

    name = config.more.get("objective")
    if name is None:
        raise ConfigError(
            "give --objective: grpo, dr_grpo, dapo, gspo, cispo, ppo, reinforce, ... (docs/objectives.md)."
        )
    if name in PREFERENCES:
        raise ConfigError(f"objective {name!r} learns from preferences, not from advantages: use treewise train.")
    settings = typed_settings(name, config.more.get("objective_settings") or {})
    if name not in ("sft", "distillation"):
        settings.setdefault("measure_entropy", True)  # which everybody watches
    try:
        return objective_named(name, **settings)
    except MissingSettingError as error:
        if "max_length" in error.settings:  # --max_length is another key: the longest trajectory allowed
            raise ConfigError(
                f"{error} Give --objective_settings.max_length, the most tokens that a rollout may sample."
            ) from None
        raise


def _check_rewards(config: RunConfig, trees: Sequence[Sequence["Trajectory"]], objective: "Objective") -> None:
    """Raises `DataError` where no row has a reward or advantages, with the fields that could be one."""
    from treewise.objectives import PolicyGradient
    from treewise.rl.checks import reward_like

    items = [item for tree in trees for item in tree]
    has_any = any(item.reward is not None or item.advantages is not None for item in items)
    by_tree = (config.more.get("advantages") or "") in ("value_steps", "node_value")
    if has_any or by_tree or not isinstance(objective, PolicyGradient):
        return
    first = next((record for source in open_sources(config.data) for record in source.records()), None)
    names = reward_like({} if first is None else parsed_object(first))
    hint = f" Its fields {', '.join(names)} could be rewards: rename the right one." if names else ""
    location = items[0].source or "the rows"
    raise DataError(f"{location}: no reward in any row. Give each rollout `reward`, a number.{hint}")


def _arguments(config: RunConfig, num_trees: int) -> "TreeTrainingArguments":
    """The trainer's settings; the size of a batch follows from the number of mini-batches."""
    from treewise.rl.update import trees_per_batch

    batch = config.training.get("per_device_train_batch_size")
    count = config.more.get("mini_batches")
    if count is None:
        count = config.training.get("steps_per_epoch")
    elif count < 1:
        raise ConfigError(f"mini_batches={count} must be at least 1.")
    if count is None and batch is None:
        count = 1
    if count is not None:
        arguments = training_run.training_arguments(config)
        accumulated = arguments.gradient_accumulation_steps
        size = trees_per_batch(num_trees, count * accumulated, arguments.data_size)
        if batch not in (None, size):
            raise ConfigError(
                f"mini_batches={count} makes batches of {size} trees, but per_device_train_batch_size is {batch}; "
                "give one of them."
            )
        config.training["per_device_train_batch_size"] = size  # the most; where the trees do not divide, some have less
        config.training["steps_per_epoch"] = count
    return training_run.training_arguments(config)


def _scored(
    config: RunConfig, arguments: "TreeTrainingArguments", model: "PreTrainedModel", update: "Update"
) -> "Update":
    """The update with the log-probs of the policy and the reference."""
    from treewise.engine.engine import TreeEngine
    from treewise.nn.device import on_device
    from treewise.rl.update import scored

    def engine(model: "PreTrainedModel") -> TreeEngine:
        return TreeEngine(
            on_device(model, arguments.device),
            arguments.max_tokens,
            arguments.attention,
            temperature=arguments.temperature,
        )

    reference = reference_of(config)
    return scored(
        update,
        engine(model),
        batch_size=int(arguments.per_device_train_batch_size),
        reference=None if reference is None else engine(reference),
    )


def _print_update(config: RunConfig, update: "Update") -> None:
    from treewise.rl.update import describe

    has_adapters = config.lora or adapter_folder(config.model) is not None
    reference = config.more.get("reference") or (
        "the policy without adapters" if has_adapters else "the starting policy"
    )
    if is_first_rank():
        print(describe(update, config.more["objective"], reference))
