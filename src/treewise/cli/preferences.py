"""Preference objectives of `treewise train`: the reference scores the data once, before the first step."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from treewise.cli.config import RunConfig
from treewise.cli.objective import typed_settings
from treewise.errors import ConfigError

if TYPE_CHECKING:
    from treewise.data import Trees
    from treewise.trainer import TreeTrainingArguments
    from treewise.tree.trajectory import Trajectory


class ScoredTrees:
    """Trees with the reference's log-probs. The fingerprint is that of the data and the names of what scored it, so a
    run may be resumed where sums of floats round otherwise.
    """

    def __init__(self, trees: "Sequence[list[Trajectory]]", facts: Sequence[object]) -> None:
        self._trees = trees
        self.fingerprint = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._trees)

    def __getitem__(self, index: int) -> "list[Trajectory]":
        return self._trees[index]


def objective_of(config: RunConfig) -> Any:
    """The objective that the configuration names; None for SFT, whose settings are keys of their own.

    Raises:
        ConfigError: an unknown objective or setting, or one that belongs to `treewise rl`.
    """
    from treewise.objectives.registry import OBJECTIVES, PREFERENCES, objective_named

    name = config.more.get("objective")
    settings = config.more.get("objective_settings") or {}
    if name in (None, "sft"):
        for key in ("objective_settings", "reference"):
            if config.more.get(key):
                raise ConfigError(f"{key} belongs to objective: {', '.join(PREFERENCES)}; SFT has keys of its own.")
        return None
    if name in OBJECTIVES and name not in PREFERENCES:
        raise ConfigError(f"objective {name!r} needs rollouts: use treewise rl. Here: sft, {', '.join(PREFERENCES)}.")
    return objective_named(name, **typed_settings(name, settings))


def with_references(
    config: RunConfig,
    arguments: "TreeTrainingArguments",
    model: Any,
    objective: Any,
    train_data: "Trees",
    eval_data: "Trees | None",
) -> "tuple[ScoredTrees, ScoredTrees | None]":
    """Both data sets with `ref_logprobs`: of `reference`, or of the model as it starts, without adapters."""
    from treewise.cli.load_model import load_weights
    from treewise.engine.engine import TreeEngine
    from treewise.objectives import KTO, with_mismatched
    from treewise.rl.rollout_batch import scored

    name = config.more.get("reference")
    scorer = model if name is None else load_weights(name, None, config.dtype)
    without_adapters = getattr(scorer, "disable_adapter", nullcontext)
    engine = TreeEngine(
        scorer.to(arguments.device), arguments.max_tokens, arguments.attention, temperature=arguments.temperature
    )
    size = int(arguments.per_device_train_batch_size)

    def of(data: "Trees") -> ScoredTrees:
        trees = [tree.labelled_trajectories() for tree in data]
        if isinstance(objective, KTO) and objective.baseline == "mismatched":
            trees = with_mismatched(trees)
        if not getattr(objective, "reference_free", False):
            with without_adapters():
                trees = [list(tree) for tree in scored(engine, trees, "ref_logprobs", size)]
        return ScoredTrees(trees, [data.fingerprint, config.model, name, config.dtype, repr(objective)])

    return of(train_data), None if eval_data is None else of(eval_data)
