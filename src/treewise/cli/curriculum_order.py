"""`--curriculum` of commands that train on recorded trees: their order, from signals that are measured and checked."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.cli.config import RunConfig
from treewise.cli.values import coerce
from treewise.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treewise.objectives import Objective
    from treewise.rl.curriculum.recorded import RecordedOrder
    from treewise.rl.curriculum.task_sampler import Curriculum
    from treewise.trainer import TreeTrainingArguments

NUM_CHECKED = 48  # trees of the self-check


def order_of(
    config: RunConfig,
    arguments: "TreeTrainingArguments",
    model: "PreTrainedModel",
    trees: "Sequence[Any]",
    objective: "Objective | None",
) -> "RecordedOrder | None":
    """The order that the configuration asks for; None for `uniform`. Nothing is measured yet.

    trees: as the trainer gets them. objective: whose gradient a self-check measures; None for SFT.
    """
    from treewise.rl.curriculum.recorded import RecordedOrder

    curriculum = curriculum_of(config)
    if curriculum is None:
        return None
    measure = partial(_measured, curriculum, arguments, model, trees, objective)
    return RecordedOrder(curriculum, len(trees), int(arguments.order_facts()["seed"]), measure)


def curriculum_of(config: RunConfig) -> "Curriculum | None":
    """The curriculum of a configuration; None for `uniform`. Raises `ConfigError` for one that orders no records."""
    from treewise.rl.curriculum import curriculum_named
    from treewise.rl.curriculum.recorded import check_orders

    name = config.more.get("curriculum", "uniform")
    settings = config.more.get("curriculum_settings") or {}
    typed = {key: coerce(key, value, bool if key == "force" else Any) for key, value in settings.items()}
    curriculum = curriculum_named(name, **typed)
    if curriculum.name == "uniform":
        return None
    check_orders(curriculum.name)
    return curriculum


def _measured(
    curriculum: "Curriculum",
    arguments: "TreeTrainingArguments",
    model: "PreTrainedModel",
    trees: "Sequence[Any]",
    objective: "Objective | None",
) -> np.ndarray:
    """What the curriculum orders by, of all trees; a curriculum of angles is checked on some of them first."""
    from treewise.engine.engine import TreeEngine
    from treewise.rl.curriculum.recorded import check_on_trees, learnabilities, prompt_of
    from treewise.rl.curriculum.self_check import refusal
    from treewise.rl.curriculum.signals import angles_of
    from treewise.rl.online.records import write_check

    given = [trees[index] for index in range(len(trees))]
    rows = [list(each.labelled_trajectories() if hasattr(each, "labelled_trajectories") else each) for each in given]
    if curriculum.name == "learnability":
        return learnabilities(rows, 0.5)
    engine = TreeEngine(model, arguments.max_tokens, arguments.attention, temperature=arguments.temperature)
    rng = np.random.default_rng(int(arguments.order_facts()["seed"]))
    sample = [rows[index] for index in np.sort(rng.permutation(len(rows))[:NUM_CHECKED])]
    report = check_on_trees(sample, engine, objective, list)
    write_check(Path(arguments.output_dir), curriculum.name, report)
    print(report.text())
    reason = refusal(curriculum.name, report)
    if reason is not None and not curriculum.settings.force:
        raise ConfigError(f"{reason} Choose another, or force it: --curriculum_settings.force true.")
    if reason is not None:
        print(f"warning: {reason}", file=sys.stderr)
    return angles_of(engine, [prompt_of(tree) for tree in rows]).total
