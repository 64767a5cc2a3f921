"""Adapters (PEFT): new ones, and folders of saved ones, which stand for their base model with the adapters on it."""

import dataclasses
import importlib.util
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.errors import ConfigError, pip_install, read_own

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig
    from transformers import PreTrainedModel

ADAPTERS = "adapter_config.json"  # in a folder of adapters
DEMO_MODEL = "smollm2-demo"
MAX_REASON = 300  # characters of an error of transformers; some list every model


def adapted(
    model: "PreTrainedModel", lora: "Mapping[str, Any] | LoraConfig", base: str | None = None
) -> "PreTrainedModel":
    """The model with new adapters: settings of `peft.LoraConfig`, or such an object. base: the model's name, which is
    saved with them and by which it is found again.

    Raises:
        ConfigError: settings that peft does not take for this model, or a model that has adapters.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"adapters need the peft package: {pip_install('peft')}.")
    from peft import LoraConfig, get_peft_model

    if hasattr(model, "peft_config"):
        raise ConfigError(
            "lora: the model is a folder of adapters, which are trained further without lora; for new ones merge them "
            "into the weights first (peft's merge_and_unload, then save_pretrained)."
        )

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft about transformers
            settings = LoraConfig(**{"task_type": "CAUSAL_LM", **lora}) if isinstance(lora, Mapping) else lora
            model = get_peft_model(model, settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"lora: {' '.join(str(error).split())[:MAX_REASON]}") from error
    if base is not None:
        for each in model.peft_config.values():
            each.base_model_name_or_path = base
    return model


def adapter_folder(name: str) -> Path | None:
    """The folder of a name that holds adapters and no model of its own; None for every other name."""
    folder = Path(name).expanduser()
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
    if not Path(base).expanduser().exists() and beside.exists():  # a path from the folder itself
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
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if value is None and each.default is None:
            continue
        is_count = isinstance(value, int) and not isinstance(value, bool) and (each.name != "r" or value > 0)
        if each.type in (int, "int") and not is_count:
            kind = "a positive whole number" if each.name == "r" else "a whole number"
            raise ConfigError(f"{adapters / ADAPTERS}: {each.name} is {value!r:.60}; it must be {kind}.")
    config.inference_mode = False
    return config


def with_saved(model: "PreTrainedModel", adapters: Path) -> "PreTrainedModel":
    """The model with the adapters of a folder, trainable.

    Raises:
        ConfigError: peft is missing; adapters that are pickled, incomplete, or of another model.
    """
    config = adapter_config(adapters)
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    weights = adapters / "adapter_model.safetensors"
    if not weights.is_file():
        raise ConfigError(f"{adapters}: no {weights.name}; adapters are read from safetensors alone.")
    with named_errors(str(adapters), "adapters of its base model"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(model, str(adapters), is_trainable=True, config=config)
        with safe_open(weights, framework="pt") as stored:
            found = set(stored.keys())
    lacking = sorted(set(get_peft_model_state_dict(model, save_embedding_layers=False)) - found)
    if lacking:
        raise ConfigError(f"{weights}: {len(lacking):,} weights of the adapters are not there, the first {lacking[0]}.")
    known = set(get_peft_model_state_dict(model, save_embedding_layers=True))
    odd = sorted(name for name in found - known if "lora_" in name)
    if odd:  # a name in target_modules was changed, say
        raise ConfigError(f"{weights}: {len(odd):,} weights that {ADAPTERS} has no place for, the first {odd[0]}.")
    return model


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
        is_here = Path(name).expanduser().exists() or name == DEMO_MODEL
        absent = "" if is_here else "no such folder, and "
        offline = " (HF_HUB_OFFLINE is set)" if not is_here and os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise ConfigError(f"{name}: {absent}cannot be loaded as {what}{offline}: {text}") from error
