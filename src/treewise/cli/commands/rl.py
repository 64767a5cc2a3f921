"""`treewise rl --data rollouts.jsonl --model M --objective grpo`: the model update of RL, on rollouts of any engine."""

import argparse
import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.cli import training_run
from treewise.cli.config import RunConfig, read_config
from treewise.cli.objective import typed_settings
from treewise.errors import ConfigError

if TYPE_CHECKING:
    from treewise.advantages import AdvantageReport
    from treewise.data import TreeDataset
    from treewise.rl.rollout_batch import Streams, Trees
    from treewise.trainer import TreeTrainingArguments

KEYS: dict[str, Any] = {
    "objective": str,
    "objective_settings": dict | None,
    "advantages": str,
    "advantages_settings": dict | None,
    "old_logprobs": str,
    "reference": str | None,
    "mini_batches": int | None,
    "drop_flat_groups": bool,
}
# Settings that most objectives share may be given without `objective_settings.` in front.
SHORT = (
    *("beta", "kl", "clip_low", "clip_high", "dual_clip", "max_ratio", "entropy_coefficient", "measure_entropy"),
    *("sampler_correction", "sampler_level", "sampler_min", "sampler_max", "ratio_level"),
    *("weighting", "normalization", "constant"),
)
ALIASES = {
    "epochs": "num_train_epochs",
    "output": "output_dir",
    **{name: f"objective_settings.{name}" for name in SHORT},
}
# Other defaults than those of supervised training: one epoch, small constant steps, no decay.
DEFAULTS = {
    "num_train_epochs": 1.0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "save_strategy": "epoch",
}
SCORES = "scored.safetensors"
# Metrics of the line that ends an epoch.
SHOWN = (
    *("loss", "clip_fraction", "approx_kl", "kl", "entropy", "ratio", "sampler_weight", "logprob_gap"),
    *("student_mass", "teacher_mass"),
)


@dataclass(frozen=True, slots=True)
class _Update:
    """What a run is about to train, and how it came about."""

    trees: "Trees"
    method: str | None = None
    report: "AdvantageReport | None" = None
    num_dropped: int = 0
    streams: "Streams | None" = None
    num_without_sampler: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command. Every key of the configuration is a flag, too."""
    parser.usage = (
        "treewise rl [CONFIG.yaml] --data ROLLOUTS --model MODEL --objective NAME --output FOLDER [--key value ...] "
        "[--resume [CHECKPOINT]] [--overwrite] [--dry_run]"
    )
    parser.epilog = "Keys, objectives and advantages: docs/rl.md"
    training_run.add_flags(parser, "the folder")


def run(args: argparse.Namespace) -> int:
    """Updates the model; returns the exit code."""
    config_path, overrides = training_run.split_words(args)
    config = read_config(config_path, overrides, KEYS, ALIASES)
    if config.eval_data is not None:
        raise ConfigError("eval_data is no key of treewise rl: a loss on rollouts of another policy says nothing.")
    training_run.check_flags(args, config)
    for name, value in DEFAULTS.items():
        config.training.setdefault(name, value)
    objective = _objective(config)
    if not args.dry_run and training_run.is_first_rank():
        training_run.check_folder(Path(config.training["output_dir"]), args.resume, args.overwrite)
    dataset, _, tokenizer = training_run.load_data(config)
    update = _credited(config, objective, dataset)
    arguments = _arguments(config, len(update.trees))
    model = training_run.load_model(config, arguments)
    dataset.check_vocabulary(model.get_input_embeddings().weight.shape[0])
    update = _with_streams(config, arguments, objective, update)
    if args.dry_run:
        if training_run.is_first_rank():
            print(_summary(config, update))
        return training_run.dry_run(arguments, model, update.trees)
    command = shlex.join(["treewise", "rl", *args.overrides])
    folder = Path(arguments.output_dir)
    with ExitStack() as stack:
        resume_from = training_run.begin(stack, args, config, arguments)
        update = _scored(config, arguments, dataset, model, update, folder if resume_from else None)
        if training_run.is_first_rank():
            print(_summary(config, update))
            _save_scores(folder, config, dataset, update)
        from treewise.trainer.metrics import EpochMeans

        callbacks = [EpochMeans(SHOWN)]
        training_run.train(arguments, model, tokenizer, update.trees, None, resume_from, command, objective, callbacks)
    return 0


# -- settings ---------------------------------------------------------------------------------------------------------


def _objective(config: RunConfig) -> Any:
    from treewise.objectives import objective_named

    name = config.more.get("objective")
    if name is None:
        raise ConfigError("give --objective: grpo, dr_grpo, dapo, gspo, cispo, ppo, reinforce, ... (docs/rl.md).")
    settings = typed_settings(config.more.get("objective_settings") or {})
    if name not in ("sft", "distillation"):
        settings.setdefault("measure_entropy", True)  # what everybody watches
    try:
        return objective_named(name, **settings)
    except ConfigError as error:
        if "needs max_length" in str(error):  # --max_length is another key: the longest trajectory allowed
            raise ConfigError(
                f"{error} Give --objective_settings.max_length, the most tokens that a rollout may sample."
            ) from None
        raise


def _arguments(config: RunConfig, num_trees: int) -> "TreeTrainingArguments":
    """The trainer's settings; the size of a batch follows from the number of mini-batches."""
    from treewise.rl.rollout_batch import trees_per_batch

    settings = config.more.get("objective_settings") or {}
    if settings.get("weighting") == "once":  # a token counts once per tree, so trees must stay apart
        config.training["merge_across_trees"] = False
    given = config.training.get("per_device_train_batch_size")
    count = config.more.get("mini_batches")
    if count is None and given is None:
        count = 1
    if count is not None:
        arguments = training_run.training_arguments(config)
        accumulated = arguments.gradient_accumulation_steps
        size = trees_per_batch(num_trees, count * accumulated, arguments.world_size)
        if given not in (None, size):
            raise ConfigError(
                f"mini_batches={count} makes batches of {size} trees, but per_device_train_batch_size is {given}; "
                "give one of them."
            )
        config.training["per_device_train_batch_size"] = size
    return training_run.training_arguments(config)


def _credited(config: RunConfig, objective: Any, dataset: "TreeDataset") -> _Update:
    """All rollouts with their advantages, where the objective takes any."""
    from treewise.objectives import PolicyGradient
    from treewise.rl import rollout_batch

    trees = [tree.labelled_trajectories() for tree in dataset]
    if not isinstance(objective, PolicyGradient):
        return _Update(trees)
    method = _method(config, trees)
    trees, report = rollout_batch.credit(trees, method, config.more.get("advantages_settings") or {})
    if not config.more.get("drop_flat_groups") or report is None or not report.zero_variance_groups:
        return _Update(trees, method, report)
    flat = report.zero_variance_groups
    trees = rollout_batch.without_groups(trees, flat)
    if not trees:
        raise ConfigError(f"all {len(flat):,} groups are without variance: nothing to learn from.")
    return _Update(trees, method, report, num_dropped=len(flat))


def _with_streams(config: RunConfig, arguments: "TreeTrainingArguments", objective: Any, update: _Update) -> _Update:
    """The same, knowing which log-probs it needs."""
    from treewise.rl import rollout_batch
    from treewise.trainer.run_summary import num_optimizer_steps

    num_updates = num_optimizer_steps(arguments, len(update.trees))
    old = config.more.get("old_logprobs", "auto")
    streams = rollout_batch.choose_streams(objective, update.trees, old, num_updates)
    if config.more.get("reference") is not None and streams.ref != "reference":
        why = "the rows hold ref_logprobs already" if streams.ref else "the objective has no KL to it (--beta)"
        raise ConfigError(f"reference is given, but {why}; leave one of them out.")
    trees, num_without = rollout_batch.without_partial_sampler(objective, update.trees)
    return replace(update, trees=trees, streams=streams, num_without_sampler=num_without)


def _scored(
    config: RunConfig,
    arguments: "TreeTrainingArguments",
    dataset: "TreeDataset",
    model: Any,
    update: _Update,
    held: Path | None,
) -> _Update:
    """The same with the log-probs in place. `held`: the folder of a run that goes on."""
    from treewise.cli.load_model import load_weights
    from treewise.rl import rollout_batch

    trees = None if held is None else _held_scores(held, config, dataset, update)
    if trees is None:
        name = config.more.get("reference")
        reference = None if name is None else _engine(load_weights(name, None, config.dtype), arguments)
        batch_size = int(arguments.per_device_train_batch_size)
        trees = rollout_batch.fill_streams(
            update.trees, _streams(update), _engine(model, arguments), reference, batch_size
        )
    return replace(update, trees=trees)


def _method(config: RunConfig, trees: "Trees") -> str:
    """The chosen way from rewards to advantages; the rows' own where they have some and nothing is chosen."""
    from treewise.rl import rollout_batch

    chosen = config.more.get("advantages")
    return rollout_batch.usual_method(config.more["objective"], trees) if chosen is None else str(chosen)


def _engine(model: Any, arguments: "TreeTrainingArguments") -> Any:
    from treewise.engine.engine import TreeEngine

    return TreeEngine(
        model.to(arguments.device), arguments.max_tokens, arguments.attention, temperature=arguments.temperature
    )


def _streams(update: _Update) -> "Streams":
    assert update.streams is not None
    return update.streams


# -- log-probs of a run that goes on ----------------------------------------------------------------------------------


def _score_facts(config: RunConfig, dataset: "TreeDataset", update: _Update) -> dict[str, str]:
    facts = [dataset.fingerprint, config.model, config.more.get("reference"), config.dtype, update.num_dropped]
    return {"treewise": json.dumps([*facts, _streams(update).old, _streams(update).ref, sum(map(len, update.trees))])}


def _save_scores(folder: Path, config: RunConfig, dataset: "TreeDataset", update: _Update) -> None:
    """Keeps computed log-probs, so that a run that goes on trains against the same, bit for bit."""
    import os

    import numpy as np
    from safetensors.numpy import save_file

    names = _computed(update)
    if not names:
        return
    items = [item for tree in update.trees for item in tree]
    arrays = {name: np.concatenate([getattr(item, name) for item in items]) for name in names}
    part = folder / f".{SCORES}.part"
    save_file(arrays, part, metadata=_score_facts(config, dataset, update))
    os.replace(part, folder / SCORES)


def _held_scores(folder: Path, config: RunConfig, dataset: "TreeDataset", update: _Update) -> "Trees | None":
    """The trees with the log-probs that the run began with; None where there are none of this data and model."""
    import numpy as np
    from safetensors import SafetensorError, safe_open

    names = _computed(update)
    if not names or not (folder / SCORES).is_file():
        return None
    try:
        with safe_open(folder / SCORES, "numpy") as file:
            if file.metadata() != _score_facts(config, dataset, update):
                return None
            arrays = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError):
        return None
    ends = np.cumsum([len(item) for tree in update.trees for item in tree])[:-1]
    parts: Any = {name: iter(np.split(array, ends)) for name, array in arrays.items()}
    return [
        [replace(item, **{name: next(part) for name, part in parts.items()}) for item in tree] for tree in update.trees
    ]


def _computed(update: _Update) -> list[str]:
    found = ["old_logprobs"] if _streams(update).old == "policy" else []
    return [*found, "ref_logprobs"] if _streams(update).ref == "reference" else found


# -- what is printed --------------------------------------------------------------------------------------------------

_OLD = {
    "given": "the rows' own",
    "sampler": "the sampler's",
    "policy": "computed with the policy before the update",
    None: "not needed (one update of the policy that sampled: the ratio is 1)",
}
_REF = {"given": "the rows' own", None: "not needed (no KL)"}


def _summary(config: RunConfig, update: _Update) -> str:
    from treewise.tree.trajectory import number_rollouts

    lines = [("objective", str(config.more["objective"]))]
    report = update.report
    items = [item for tree in update.trees for item in tree]
    if update.method is not None:
        groups = len({repr(item.group) for item in items})
        lines.append(
            ("rollouts", f"{int(number_rollouts(items).max()) + 1:,} in {groups:,} groups, {len(items):,} rows")
        )
        lines.append(("advantages", update.method if report is None else report.method))
    if report is not None:
        lines.append(("mean reward", f"{report.mean_reward:.4g}"))
        flat = len(report.zero_variance_groups)
        what = "left out" if update.num_dropped else "they teach nothing"
        lines.append(("groups without variance", f"{flat:,} of {report.num_groups:,}" + (f" ({what})" if flat else "")))
        if report.groups_of_one:
            lines.append(("groups of one rollout", f"{len(report.groups_of_one):,} (compared with nothing)"))
        lines += [("", note) for note in report.notes]
    if update.method is not None:
        lines.append(("old log-probs", _OLD[_streams(update).old]))
        name = config.more.get("reference") or ("the policy without adapters" if config.lora else "the starting policy")
        lines.append(("reference log-probs", _REF.get(_streams(update).ref, f"computed with {name}")))
        lines.append(("logprob gap", _gap(items, update.num_without_sampler)))
    return "\n".join(f"{name:<24} {value}" for name, value in lines)


def _gap(items: Sequence[Any], num_without: int) -> str:
    """How far the policy's log-probs are from those that the sampler reported, where both are known."""
    from treewise.objectives import logprob_gap

    if num_without:
        return f"unknown ({num_without:,} of {len(items):,} rows have no sampler_logprobs)"
    if any(item.old_logprobs is None for item in items):
        return "measured in the first step"
    return f"{logprob_gap(items):.4f} (1: none)"
