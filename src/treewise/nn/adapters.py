"""Adapters (PEFT): new ones, and folders of saved ones, which stand for their base model with the adapters on it."""

import copy
import dataclasses
import importlib.util
import json
import logging
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.base.own_files import read_own
from treewise.base.paths import path_of
from treewise.base.weight_files import check_saved, shapes_of
from treewise.errors import ConfigError, pip_install

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig
    from torch import nn
    from transformers import PreTrainedModel

ADAPTERS, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # in a folder of adapters
DEMO_MODEL = "smollm2-demo"
MAX_REASON = 300  # characters of an error of transformers; some list every model
logger = logging.getLogger("treewise")


def adapted(
    model: "nn.Module", lora: "Mapping[str, object] | LoraConfig", base: str | None = None
) -> "PreTrainedModel":
    """The model with new adapters: settings of `peft.LoraConfig`, or such an object. base: the model's name, which is
    saved with them and by which it is found again.

    In settings, `target_modules: q_proj` is a name, as a list of one is; `all-linear` and texts with other characters
    than those of names are what they are in peft, the second regular expressions.

    Raises:
        ConfigError: settings that peft does not take for this model, a name that no module has, or a model that has
            adapters.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"adapters need the peft package: {pip_install('peft')}.")
    from peft import get_peft_model

    if hasattr(model, "peft_config"):
        raise ConfigError(
            "lora: the model is a folder of adapters, which are trained further without lora; for new ones merge them "
            "into the weights first (peft's merge_and_unload, then save_pretrained)."
        )

    there = _module_names(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft about transformers
            # `warn_of_parted_tables` says what.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            settings = lora_config(lora) if isinstance(lora, Mapping) else lora
            if isinstance(lora, Mapping):
                _refuse_unknown_names(model, settings)
            _refuse_unknown_tokens(model, settings)
            made: PreTrainedModel = get_peft_model(model, settings)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        found = f" {there}" if re.search("target.modules|No modules", str(error), re.IGNORECASE) else ""
        raise ConfigError(f"lora: {' '.join(str(error).split())[:MAX_REASON]}{found}") from error
    if base is not None:
        for each in made.peft_config.values():
            each.base_model_name_or_path = base
    return made


_NAMES = ("target_modules", "exclude_modules")  # a text is a regular expression in peft, and a list holds names
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*(\s*,\s*[\w-]+(\.[\w-]+)*)*")


def lora_config(lora: "Mapping[str, object]") -> "LoraConfig":
    """Settings as peft's object.

    Raises:
        ValueError, TypeError: of peft, for settings that it does not take together.
    """
    from peft import LoraConfig

    own = copy.deepcopy(dict(lora))  # peft writes into its lists
    return LoraConfig(**{"task_type": "CAUSAL_LM", **own, **_listed_names(lora)})


def _listed_names(lora: "Mapping[str, object]") -> dict[str, list[str]]:
    """Settings whose text is a name, or several with commas between them, as lists."""
    texts = {key: text.strip() for key in _NAMES if isinstance(text := lora.get(key), str)}
    return {
        key: [name.strip() for name in text.split(",")]
        for key, text in texts.items()
        if text != "all-linear" and _NAME.fullmatch(text)
    }


def _refuse_unknown_names(model: "nn.Module", settings: "LoraConfig") -> None:
    """Raises `ConfigError` for names that nothing has; peft leaves out all but the last."""
    modules, parameters = ([path for path, _ in each] for each in (model.named_modules(), model.named_parameters()))
    for key in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters"):
        names, paths = getattr(settings, key, None), parameters if key == "target_parameters" else modules
        unknown = [
            name
            for name in sorted(names if isinstance(names, list | set | tuple) else ())
            if not any(path == name or path.endswith(f".{name}") for path in paths)
        ]
        if unknown and key == "target_parameters":
            raise ConfigError(f"lora.{key}: no parameter is called {', '.join(unknown)}.")
        if unknown:
            raise ConfigError(f"lora.{key}: no module is called {', '.join(unknown)}. {_module_names(model)}")


def _refuse_unknown_tokens(model: "nn.Module", settings: Any) -> None:
    """Raises `ConfigError` for trained tokens that a table does not have, or that are named twice."""
    from treewise.nn.wrapped import named_modules, num_embeddings, weight_of

    given = getattr(settings, "trainable_token_indices", None) or ()
    for name, indices in given.items() if isinstance(given, Mapping) else (("", given),):
        tables = [each for path, each in named_modules(model) if name and f".{path}".endswith(f".{name}")]
        num_tokens = weight_of(tables[0]).shape[0] if tables else num_embeddings(model)
        odd = [index for index in indices if not 0 <= index < num_tokens]
        odd += [index for index, count in Counter(indices).items() if count > 1]
        if odd:
            raise ConfigError(
                f"lora.trainable_token_indices: {odd[0]} is named twice, or is none of the {num_tokens:,} tokens "
                f"of {name or 'the model'}."
            )


def _module_names(model: "nn.Module") -> str:
    """The modules with weights, by the last parts of their paths, as a sentence."""
    from treewise.nn.wrapped import named_modules

    names = dict.fromkeys(path.rpartition(".")[2] for path, each in named_modules(model) if hasattr(each, "weight"))
    return f"There are {', '.join(names)}."


def adapter_folder(name: str) -> Path | None:
    """The folder of a name that holds adapters and no model of its own; None for every other name."""
    folder = path_of(name)
    return folder if (folder / ADAPTERS).is_file() and not (folder / "config.json").is_file() else None


@contextmanager
def base_of(adapters: Path) -> Iterator[str]:
    """The name of the model that adapters were trained on; errors of what is loaded inside say how to give it."""
    file = adapters / ADAPTERS
    settings = read_own(file, json.loads, "save the adapters again")
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base.strip():
        raise ConfigError(f"{file}: no base_model_name_or_path; write the folder or name of the base model there.")
    beside = adapters / base
    if not path_of(base).exists() and beside.exists():  # a path from the folder itself
        base = str(beside)
    if adapter_folder(base) is not None:  # or the folder itself
        raise ConfigError(f"{file}: base_model_name_or_path is {base}, which holds adapters; name a model there.")
    try:
        yield base
    except ConfigError as error:
        raise ConfigError(
            f"{adapters}: its base model: {error} If it was moved, write its place into {file}, as "
            "base_model_name_or_path."
        ) from error


def adapter_config(adapters: Path) -> "PeftConfig":
    """The settings of saved adapters, as those of training."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"{adapters}: a folder of adapters needs the peft package: {pip_install('peft')}.")
    from peft import PeftConfig

    with named_errors(str(adapters), "adapters"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = PeftConfig.from_pretrained(str(adapters))
        except KeyError as error:  # of peft's table of types
            raise ConfigError(f"{adapters / ADAPTERS}: peft_type is {error}, which this peft does not have.") from None
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None and field.default is None:
            continue
        is_count = isinstance(value, int) and not isinstance(value, bool) and (field.name != "r" or value > 0)
        if field.type in (int, "int") and not is_count:
            kind = "a positive whole number" if field.name == "r" else "a whole number"
            raise ConfigError(f"{adapters / ADAPTERS}: {field.name} is {value!r:.60}; it must be {kind}.")
    _check_ranks(config, adapters)
    config.inference_mode = False
    return config


def with_saved(model: "PreTrainedModel", adapters: Path) -> "PreTrainedModel":
    """The model with the adapters of a folder, trainable; with as many tokens as they were saved with.

    Raises:
        ConfigError: peft is missing; adapters that are pickled, incomplete, or of another model.
    """
    config = adapter_config(adapters)
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    weights = adapters / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise ConfigError(f"{adapters}: no {weights.name}; adapters are read from safetensors alone.")
    check_saved(adapters)
    with named_errors(str(adapters), "adapters of its base model"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with safe_open(weights, framework="pt") as stored:
            found = set(stored.keys())
        _resize(model, adapters)
        model = PeftModel.from_pretrained(model, str(adapters), is_trainable=True, config=config)
    lacking = sorted(set(get_peft_model_state_dict(model, save_embedding_layers=False)) - found)
    if lacking:
        raise ConfigError(f"{weights}: {len(lacking):,} weights of the adapters are not there, the first {lacking[0]}.")
    known = set(get_peft_model_state_dict(model, save_embedding_layers=True))
    odd = sorted(name for name in found - known if "lora_" in name)
    if odd:  # a name in target_modules was changed, say
        raise ConfigError(f"{weights}: {len(odd):,} weights that {ADAPTERS} has no place for, the first {odd[0]}.")
    return model


_RANKS = ("r", "init_r", "target_r", "rank", "num_virtual_tokens", "token_dim", "encoder_hidden_size", "n_frequency")


def _check_ranks(config: "PeftConfig", adapters: Path) -> None:
    """Raises `ConfigError` for settings of adapters that are larger than all that is saved of them."""
    if not (adapters / ADAPTER_WEIGHTS).is_file():  # said where they are loaded
        return
    num_values = sum(map(math.prod, shapes_of(adapters / ADAPTER_WEIGHTS).values()))
    named = {name: getattr(config, name, None) for name in _RANKS}
    pattern = getattr(config, "rank_pattern", None)
    named |= {f"rank_pattern[{name!r}]": rank for name, rank in pattern.items()} if isinstance(pattern, dict) else {}
    for name, value in named.items():
        if isinstance(value, int) and value > max(num_values, 1):
            raise ConfigError(
                f"{adapters / ADAPTERS}: {name} is {value:,}, and {ADAPTER_WEIGHTS} holds {num_values:,} values in all."
            )


_WITHIN_TABLE = {"base_layer", "original_module", "modules_to_save", "token_adapter", "weight"}  # parts of names


def saved_tables(model: "PreTrainedModel", shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Rows of the model's tables of tokens, embeddings and head, that are whole among saved adapters, by module.

    Where a vocabulary was resized, peft saves the tables with the adapters.

    shapes: of saved tensors, by name.
    """
    found = {}
    for key, shape in shapes.items():
        for name in tables_of(model):
            before, is_there, rest = key.partition(f"{name}.")
            if is_there and before in ("", "base_model.model.") and set(rest.split(".")) <= _WITHIN_TABLE:
                found[name] = int(shape[0])
    return found


def tables_of(model: "PreTrainedModel") -> "dict[str, nn.Module]":
    """The modules of the embeddings and the head, by path."""
    from treewise.nn.wrapped import named_modules

    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {path: module for path, module in named_modules(model) if any(module is table for table in tables)}


def parted_table(model: "PreTrainedModel") -> str | None:
    """The path of a table of tokens that shares its weights with the other, and whose adapters the other has not.

    Weights with such adapters merged into them are another model: both tables get what one was trained to be, or, where
    a copy was trained whole, it is lost as soon as the weights are tied again.
    """
    from treewise.nn.wrapped import weight_of

    tables = tables_of(model)
    if len(tables) < 2 or len({id(weight_of(each)) for each in tables.values()}) > 1:
        return None
    adapters = {path: _adapter_of(each) for path, each in tables.items()}
    if len(set(adapters.values())) == 1:
        return None
    return next(path for path, adapter in adapters.items() if adapter is not None)


def warn_of_parted_tables(model: "nn.Module") -> None:
    """Logs that the adapters of a model cannot be merged, where they cannot."""
    from treewise.nn.wrapped import base_model, is_peft

    path = parted_table(base_model(model)) if is_peft(model) else None
    if path is not None:
        logger.warning(
            "%s has adapters of its own, and shares its weights with the other table of tokens (tie_word_embeddings): "
            "they train and load as they are, but merged into the weights (peft's merge_and_unload) they would give "
            "another model. modules_to_save: [embed_tokens] with ensure_weight_tying trains both as one.",
            path,
        )


def _adapter_of(table: "nn.Module") -> int | None:
    """What stands for the active adapters of a table: equal where they are the same; None without any."""
    if getattr(table, "disable_adapters", False) or getattr(table, "merged", False):
        return None
    delta: object = getattr(getattr(table, "token_adapter", table), "trainable_tokens_delta", None)
    if delta is not None:
        return id(delta)
    copies: nn.ModuleDict | None = getattr(table, "modules_to_save", None)
    if copies is not None:
        return hash(tuple(id(copy.weight) for copy in copies.values()))
    return id(table) if hasattr(table, "base_layer") else None


def num_saved_tokens(model: "PreTrainedModel", adapters: Path) -> int | None:
    """Tokens of the tables that a folder of adapters holds; None where it holds none. Of a model without data, too."""
    rows = saved_tables(model, _saved_shapes(adapters))
    return next(iter(rows.values()), None)


def _saved_shapes(adapters: Path) -> dict[str, tuple[int, ...]]:
    weights = adapters / ADAPTER_WEIGHTS
    return shapes_of(weights) if weights.is_file() else {}  # said where they are loaded


def _resize(model: "PreTrainedModel", adapters: Path) -> None:
    """Gives a base model as many tokens as its adapters were saved with, whose rows they hold.

    Raises:
        ConfigError: they lack the rows of one of the tables.
    """
    from treewise.nn.wrapped import num_embeddings, weight_of

    rows, before = saved_tables(model, _saved_shapes(adapters)), num_embeddings(model)
    num_tokens = next(iter(rows.values()), before)
    if num_tokens == before:
        return
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    tables = tables_of(model)
    held = {id(weight_of(tables[path])) for path in rows}
    for path, table in tables.items():
        if id(weight_of(table)) not in held:
            raise ConfigError(
                f"{adapters}: they were trained with {num_tokens:,} tokens, the base model has {before:,}, and they do "
                f"not hold {path}. Resize and save the base model, and name it in {ADAPTERS}."
            )


@contextmanager
def named_errors(name: str, what: str = "a causal language model") -> Iterator[None]:
    """What transformers raises for a model that is missing, damaged or of an unknown kind, as one clean message."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged folder makes transformers raise
        text = " ".join(str(error).split()) or type(error).__name__
        if len(text) > MAX_REASON:
            text = f"{text[:MAX_REASON]}..."
        is_here = path_of(name).exists() or name == DEMO_MODEL
        absent = "" if is_here else "no such folder, and "
        offline = " (HF_HUB_OFFLINE is set)" if not is_here and os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise ConfigError(f"{name}: {absent}cannot be loaded as {what}{offline}: {text}") from error
