"""What an objective on preferences compares its data with: log-probs of a reference, mismatched completions.

The reference scores the data once, before the first step. Without a model of its own it is the trained model as it
starts, with the adapters that it then has (new ones change nothing).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from treewise.base.progress import busy_with
from treewise.distributed import ranks
from treewise.distributed.parts import mesh_of
from treewise.engine.engine import TreeEngine
from treewise.nn.device import on_device
from treewise.objectives import DPO, KTO, Objective, with_mismatched
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.survey import survey
from treewise.tree.forest import Forest, forest_of
from treewise.tree.trajectory import Trajectory


class ScoredTrees(list[list[Trajectory]]):
    """Trees with the reference's log-probs. The fingerprint is that of the data and the names of what scored it, so a
    run may be resumed where sums of floats round otherwise.
    """

    def __init__(self, trees: Sequence[list[Trajectory]], facts: Sequence[object]) -> None:
        super().__init__(trees)
        self.fingerprint = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def with_references(
    dataset: Any,
    objective: Objective | None,
    model: nn.Module,
    reference: nn.Module | None,
    args: TreeTrainingArguments,
    processor: ProcessorMixin | PreTrainedTokenizerBase | None = None,
) -> object:
    """The data with `ref_logprobs` where the objective needs them and a row lacks them; else as it is.

    Parameters:
        model: the trained one, before its first step.
        reference: a model; None for the trained one.
    """
    if not isinstance(objective, DPO | KTO) or isinstance(dataset, ScoredTrees) or dataset is None:
        return dataset
    if isinstance(dataset, dict):
        own = (objective, model, reference, args, processor)
        return {name: with_references(each, *own) for name, each in dataset.items()}
    items = [dataset[index] for index in range(len(dataset))]
    trees = [list(forest_of(tree).trajectories) for tree in items]
    scorer = model if reference is None else reference

    def engine() -> TreeEngine:
        return TreeEngine(
            on_device(scorer, args.device),
            args.max_tokens,
            args.attention,
            temperature=args.temperature,
            processor=processor,
        )

    whole = compared(trees, objective, engine, int(args.per_device_train_batch_size))
    if whole is trees:
        return dataset
    names = [getattr(each.config, "_name_or_path", "") for each in (model, scorer)]
    dtype = str(next(scorer.parameters()).dtype)
    return ScoredTrees(whole, [survey(dataset).fingerprint, *names, dtype, repr(objective)])


def compared(
    trees: list[list[Trajectory]], objective: DPO | KTO, engine: Callable[[], TreeEngine], batch_size: int
) -> list[list[Trajectory]]:
    """Trees with what an objective on preferences compares them with, where they lack it: KTO's mismatched completions,
    and `ref_logprobs` by the engine of the reference.
    """
    wants_baseline = isinstance(objective, KTO) and objective.baseline == "mismatched"
    if wants_baseline and all(row.reward is not None for tree in trees for row in tree):
        trees = with_mismatched(trees)
    is_scored = all(row.ref_logprobs is not None for tree in trees for row in tree)
    is_free = getattr(objective, "reference_free", False)
    return trees if is_scored or is_free else with_logprobs(engine(), trees, "ref_logprobs", batch_size)


def with_logprobs(
    engine: TreeEngine, trees: Sequence[Sequence[Trajectory]], stream: str, batch_size: int
) -> list[list[Trajectory]]:
    """Trajectories with a stream of the engine's log-probs. Ranks share the work and all get the whole."""

    def own_part() -> dict[int, list[np.ndarray]]:
        found = {}
        first, step = engine.turn
        own = range(first, len(trees), step)
        for start in range(0, len(own), batch_size):
            numbers = own[start : start + batch_size]
            rows, tree_of = zip(*((item, number) for number in numbers for item in trees[number]), strict=True)
            items = iter(engine.scored(rows, stream=stream, tree_of=tree_of))
            found.update({number: [getattr(next(items), stream) for _ in trees[number]] for number in numbers})
        engine.drain()  # sharded: until the others have scored theirs
        return found

    is_training = engine.model.training
    engine.model.eval()  # dropout has no place in a measurement
    try:
        mesh = mesh_of(engine.model)
        if mesh is not None and mesh.needs_lockstep:
            with torch.no_grad():
                engine.check(Forest.from_trajectories(trees[0]))  # a probe is of one tree on all ranks
            if engine.lacks_lockstep:
                engine.enable_lockstep(ranks.gather_texts)
        with busy_with(f"computing {stream}"):
            parts = ranks.on_every_rank(own_part)
    finally:
        engine.model.train(is_training)
    whole: dict[int, list[Any]] = {number: arrays for part in parts for number, arrays in part.items()}
    return [
        [replace(item, **{stream: array}) for item, array in zip(tree, whole[number], strict=True)]
        for number, tree in enumerate(trees)
    ]
