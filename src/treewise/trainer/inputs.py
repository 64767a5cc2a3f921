"""What a trainer is given becomes what it computes with: models by name, new adapters, records as trees."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed

from treewise.base import features
from treewise.data.raw import is_raw_data
from treewise.distributed.parts import mesh_of, take_over
from treewise.errors import ConfigError, num
from treewise.objectives.protocol import Objective
from treewise.objectives.sft import SFT, checked_objective
from treewise.trainer.arguments import TreeTrainingArguments

# Arguments of other trainers, which this one does not have.
_ELSEWHERE = {
    "tokenizer": "it is processing_class",
    "ref_model": "it is reference",
    "data_collator": "trees are made of records and never padded; leave it out",
    "formatting_func": "give records in a form of docs/forms.md",
    "compute_metrics": "an evaluation measures eval_loss alone",
    "compute_loss_func": "give objective=, a loss of docs/objectives.md",
    "reward_funcs": "give rewards in the rows; tw.OnlineTrainer calls reward functions",
}


def as_trees(
    name: str,
    dataset: object,
    tokenizer: PreTrainedTokenizerBase | None,
    render: Any,
) -> Any:
    """A data set of trees, loaded where records are given. Raises `ConfigError` for an empty one, or something else."""
    if dataset is None:
        return None
    if name == "eval_dataset" and isinstance(dataset, dict):
        return {key: as_trees(f"eval_dataset[{key!r}]", value, tokenizer, render) for key, value in dataset.items()}
    if is_raw_data(dataset):
        from treewise.data import load_trees

        return load_trees(dataset, tokenizer, options=render)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(f"{name} is a {type(dataset).__name__}, which has no length and indices; give a list.")
    if len(dataset) == 0:
        raise ConfigError(f"{name} is empty.")
    return dataset


def check_preferences(dataset: object, objective: Objective) -> None:
    """Raises `ConfigError` where SFT would imitate the rejected completions of preference data."""
    report = getattr(dataset, "report", None)
    num_preferences = getattr(report, "num_preferences", 0)
    if report is not None and num_preferences and isinstance(objective, SFT):
        raise ConfigError(
            f"{num_preferences:,} of {num(report.num_records, 'record')}: preference pairs or labelled completions; "
            "SFT would imitate the rejected ones. Give objective dpo, ipo or kto, or data of chosen ones alone."
        )


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


def loaded(
    model: nn.Module | str | Path | None, processor: object, dataset: object, peft_config: object, seed: int
) -> tuple[nn.Module | None, object]:
    """Model and tokenizer, loaded where they are given by name, and the model with new adapters where asked for."""
    if isinstance(processor, str | Path):
        processor = features.load_model.load_processor(str(processor))
    is_named = isinstance(model, str | Path)
    name = str(model) if is_named else getattr(getattr(model, "config", None), "_name_or_path", "")
    if isinstance(model, str | Path):
        model = features.load_model.load_weights(name)
    if processor is None and (is_named or (is_raw_data(dataset) and Path(name or "absent").is_dir())):
        processor = features.load_model.load_processor(name, required=False)
    if peft_config is not None:
        if not isinstance(peft_config, Mapping) and not hasattr(peft_config, "peft_type"):
            raise ConfigError(f"peft_config is a {type(peft_config).__name__}; give a peft.LoraConfig or a mapping.")
        if model is None:
            raise ConfigError("peft_config needs a model; with model_init let it return one with adapters.")
        set_seed(seed)  # adapters start from random numbers
        model = features.adapters.adapted(model, peft_config, name or None)
    return model, processor


def check_mesh(model: nn.Module | None, args: TreeTrainingArguments) -> None:
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
