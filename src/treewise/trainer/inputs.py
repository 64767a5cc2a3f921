"""What a trainer is given becomes what it computes with: models by name, new adapters, data scored by a reference.

The reference of a preference objective scores the data once, before the first step. Without a model of its own it is
the trained model as it starts, with the adapters that it then has (new ones change nothing).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback, set_seed

from treewise.data import RenderOptions
from treewise.data.sources import is_raw_data
from treewise.distributed import ranks
from treewise.distributed.mesh import mesh_of, take_over
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, busy_with
from treewise.nn import load_model
from treewise.nn.adapters import adapted
from treewise.objectives import DPO, KTO, Objective, with_mismatched
from treewise.objectives.registry import checked_objective
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.data_loader import survey
from treewise.tree.forest import Forest, forest_of
from treewise.tree.trajectory import Trajectory

# Arguments of other trainers, which this one does not have.
_ELSEWHERE = {
    "tokenizer": "it is processing_class",
    "ref_model": "it is reference",
    "data_collator": "trees are made of records and never padded; leave it out",
    "formatting_func": "give records in a form of docs/data.md",
    "compute_metrics": "an evaluation measures eval_loss alone",
    "compute_loss_func": "give objective=, a loss of docs/objectives.md",
    "reward_funcs": "give rewards in the rows; tw.OnlineTrainer calls reward functions",
}


class MoreArguments(TypedDict, total=False):
    """Arguments of `TreeTrainer` that few callers give; its docstring or that of transformers' `Trainer` tells them."""

    reference: PreTrainedModel | str | Path | None
    peft_config: object
    render: RenderOptions | Mapping[str, object] | None
    model_init: Callable[..., PreTrainedModel] | None
    callbacks: list[TrainerCallback] | None
    optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None]


def check_given(model: object, model_init: object, dataset: object, objective: object, others: Iterable[str]) -> None:
    """Raises `ConfigError` for what no run can begin with: arguments of other trainers, something else than a model."""
    for name in others:
        hint = _ELSEWHERE.get(name) or "see help(treewise.TreeTrainer)"
        raise ConfigError(f"TreeTrainer takes no {name}: {hint}.")
    if model is None and model_init is None:
        raise ConfigError("a run needs a model, its name, or model_init.")
    if model is not None and not isinstance(model, str | Path | nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}; give a model of transformers, or its name.")
    if type(dataset) is dict:
        raise ConfigError("train_dataset is a dict; give a list of records, each a dict, or a path.")
    checked_objective(objective)
    if objective is not None and not hasattr(objective, "denominator"):
        raise ConfigError(
            f"the objective is a {type(objective).__name__}; a run needs one with terms (docs/objectives.md, An "
            "objective of your own). Functions of log-probs are for engine.step."
        )


def loaded(model: object, processor: object, dataset: object, peft_config: object, seed: int) -> tuple[Any, Any]:
    """Model and tokenizer, loaded where they are given by name, and the model with new adapters where asked for."""
    if isinstance(processor, str | Path):
        processor = load_model.load_processor(str(processor))
    is_named = isinstance(model, str | Path)
    name = str(model) if is_named else getattr(getattr(model, "config", None), "_name_or_path", "")
    model = load_model.load_weights(name) if is_named else model
    if processor is None and (is_named or (is_raw_data(dataset) and Path(name or "absent").is_dir())):
        processor = load_model.load_processor(name, required=False)
    if peft_config is not None:
        if not isinstance(peft_config, Mapping) and not hasattr(peft_config, "peft_type"):
            raise ConfigError(f"peft_config is a {type(peft_config).__name__}; give a peft.LoraConfig or a mapping.")
        if model is None:
            raise ConfigError("peft_config needs a model; with model_init let it return one with adapters.")
        set_seed(seed)  # adapters start from random numbers
        model = adapted(model, peft_config, name or None)
    return model, processor


def check_mesh(model: PreTrainedModel | None, args: TreeTrainingArguments) -> None:
    """Raises `ConfigError` where the settings name another mesh than the one that the model was loaded on."""
    if model is None:
        return
    mesh = mesh_of(model)
    own = (1, 1) if mesh is None else (mesh.tensor.size(), mesh.expert.size())
    if own != (args.tp_size, args.ep_size):
        raise ConfigError(
            f"tp_size={args.tp_size}, ep_size={args.ep_size}, and the model was loaded with tp_size={own[0]}, "
            f"ep_size={own[1]}; load it with treewise.distributed.mesh.load_on_mesh(folder, tp_size={args.tp_size}, "
            f"ep_size={args.ep_size}), or change the settings."
        )
    if mesh is not None:
        take_over(model)


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
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
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
    trees = [
        list(tree.labelled_trajectories() if hasattr(tree, "labelled_trajectories") else forest_of(tree).trajectories)
        for tree in items
    ]
    scorer = model if reference is None else reference

    def engine() -> TreeEngine:
        return TreeEngine(
            scorer.to(args.device), args.max_tokens, args.attention, temperature=args.temperature, processor=processor
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
            items = iter(engine.scored([item for number in numbers for item in trees[number]], stream=stream))
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
