"""The configuration of a run: a YAML file, flags that win over it, and every key checked before anything is loaded.

Keys are flat, but for mappings (`lora`, `chat_template_kwargs`); flags write their parts with a dot.
"""

import dataclasses
import enum
import hashlib
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from treewise.cli.aliases import ALIASES, EARLIER, names_of, train_on_of_roles
from treewise.cli.keys import ELSEWHERE, OWN, RunKeys, key_names, schema
from treewise.cli.values import coerce, kinds_of, read_file, refuse_doubtful, scalar
from treewise.data import RenderOptions
from treewise.errors import ConfigError, beyond_limits, did_you_mean, parts_of, pip_install
from treewise.nn.adapters import adapter_folder, lora_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treewise.objectives import Objective
    from treewise.trainer import TreeTrainingArguments

Values = dict[str, Any]

REQUIRED = ("model", "data", "output_dir")
_UNWRITTEN = ("hub_token", "accelerator_config")  # into the resolved configuration: a secret, an object
# Keys of LoRA that trees cannot follow.
_LORA_REFUSED = {
    "alora_invocation_tokens": "where its adapters begin depends on a sequence, and shared tokens belong to several",
    "runtime_config": "it holds settings of inference",
    "inference_mode": "a run trains its adapters",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunKeys):
    """A checked configuration. `training` and `lora` are keyword arguments; defaults of training are not filled in."""

    render: RenderOptions
    training: Values
    more: Values = field(default_factory=dict)  # keys of one command alone
    unwritten: tuple[str, ...] = ()  # keys that mean something else in this command
    renamed: tuple[tuple[str, str], ...] = ()  # aliases that were given, with the keys that they stand for


def read_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    required: Sequence[str] = REQUIRED,
    elsewhere: Mapping[str, str] | None = None,
) -> RunConfig:
    """The configuration in a file, with flags (`--key value`, `--lora.r 8`) over it.

    Parameters:
        path: None where flags give everything.
        overrides: the flags.
        more: further keys of the command, with their types.
        aliases: further names of keys of the command, beside `treewise.cli.aliases`; a dot in the long name leads into
            a mapping.
        required: keys that must be given.
        elsewhere: keys of training that have no meaning in this command, each with what to do instead.

    Raises:
        ConfigError: a file that is missing, empty or not YAML; a key that is unknown (the nearest one is named), given
            twice, missing, or of the wrong type.
    """
    checked, renamed = read_keys(path, overrides, more, aliases, required, elsewhere)
    missing = [key for key in required if checked.get(key) is None]
    if missing and path is None:
        short = {name: alias for alias, name in (aliases or {}).items()}
        raise ConfigError(f"give {', '.join(f'--{short.get(key, key)}' for key in missing)}.")
    if missing:
        raise ConfigError(f"{path}: no {missing[0]}; add it to the file, or give --{missing[0]}.")
    unwritten = tuple(name for name in aliases or () if name in schema(more))
    config = _config(checked, more or {}, unwritten=unwritten, renamed=tuple(dict.fromkeys(renamed)))
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, key) and config.lora is None and adapter_folder(config.model) is None:
            raise ConfigError(
                f"{key}: quantised weights cannot be trained themselves; add adapters, as in lora: "
                "{r: 16, target_modules: all-linear}."
            )
    if config.load_in_4bit and config.load_in_8bit:
        raise ConfigError("load_in_4bit and load_in_8bit are both given; choose one.")
    return config


def read_keys(
    path: str | Path | None,
    overrides: Sequence[str],
    more: Mapping[str, Any] | None,
    aliases: Mapping[str, str] | None,
    required: Sequence[str] = (),
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[Values, list[tuple[str, str]]]:
    """The keys that are given with their checked values, and the aliases among them; as `read_config`, whose other
    checks take a whole configuration.
    """
    in_file = {} if path is None else read_file(Path(path), required)
    known = key_names(more or ())  # an unknown key is named before their types are imported
    names, refused = names_of(known, aliases), {**ELSEWHERE, **(elsewhere or {})}
    renamed: list[tuple[str, str]] = []
    given: list[tuple[str, Any, str]] = []
    flags = {key: (value, f"--{key}") for key, value in parse_flags(overrides).items()}
    for source in (in_file, flags):  # flags win
        seen: dict[str, str] = {}
        for key, (value, location) in source.items():
            name = names.get(key, key)
            if key in names and key in ALIASES:
                renamed.append((key, name))
            if key == "roles_to_train":
                value = train_on_of_roles(value, location)
            if name in seen:
                raise ConfigError(f"{location}: {key} and {seen[name]} are the same key.")
            seen[name] = key
            if name in refused:
                raise ConfigError(f"{location}: {name} is not a key of this run; {refused[name]}.")
            if name.partition(".")[0] not in known:
                raise _unknown(name, [*known, *names], location)
            given.append((name, value, location))
    types, values = schema(more) if given else {}, dict[str, tuple[Any, str]]()
    for key, value, location in given:
        _put(values, key, value, location, types)
    return {key: _checked(key, value, types, location) for key, (value, location) in values.items()}, renamed


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b` (a list), and `--key` alone (true). Values stay text.

    Raises:
        ConfigError: a word that belongs to no key, or a key given twice.
    """
    flags: dict[str, Any] = {}
    location = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            location = name.replace("-", "_")
            if location in flags:
                raise ConfigError(f"--{location} is given twice.")
            flags[location] = [value] if equals else []
        elif location is None:
            raise ConfigError(f"unexpected {word!r}: give one CONFIG.yaml first, then flags (--key value).")
        else:
            flags[location].append(word)
    return {key: value[0] if len(value) == 1 else value or _ALONE for key, value in flags.items()}


class _Alone(str):
    """The value of a flag that was given none: true, where the key may be that."""


_ALONE = _Alone("true")


_SEAL = "# SHA-256 of all below this line: "


def resolved_text(config: RunConfig, arguments: "TreeTrainingArguments") -> str:
    """The configuration with all defaults, as YAML that `treewise train` reads back, below a checksum."""
    known = schema()
    values: Values = {name: getattr(config, name) for name in OWN} | config.more
    render = {item.name: _plain(getattr(config.render, item.name)) for item in dataclasses.fields(config.render)}
    values |= {name: value for name, value in render.items() if name not in config.more}
    old_names = {old for new, old in EARLIER.items() if new in known}
    for item in dataclasses.fields(arguments):
        if item.name in known and item.name not in {*_UNWRITTEN, *old_names, *config.unwritten}:
            values[item.name] = _plain(getattr(arguments, item.name))
    set_values = {key: value for key, value in values.items() if value is not None}
    text = yaml.safe_dump(set_values, sort_keys=False, allow_unicode=True)
    return with_checksum(text)


def with_checksum(text: str) -> str:
    """The text of a resolved configuration below its checksum."""
    return f"{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def resolved_values(data: bytes) -> Values:
    """The keys of a resolved configuration. Raises `ValueError`, or what YAML raises, where it was not written so."""
    text = data.decode()
    head, _, rest = text.partition("\n")
    if head != _SEAL + hashlib.sha256(rest.encode()).hexdigest():
        raise ValueError("its checksum differs")
    values = yaml.safe_load(text)
    if not isinstance(values, dict) or "model" not in values:
        raise ValueError("it holds no settings of a run")
    return values


def differences(old: Values, new: Values) -> list[str]:
    """What changed between two resolved configurations: `learning_rate: 1e-05 -> 2e-05`."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key, 'default')} -> {new.get(key, 'default')}" for key in keys]


def _plain(value: object) -> Any:
    """A setting as YAML can hold it; None where it cannot."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool) else None


# -- files and keys ---------------------------------------------------------------------------------------------------


def _put(values: dict[str, tuple[Any, str]], key: str, value: object, location: str, known: Mapping[str, Any]) -> None:
    """Sets one value in place of an earlier one; a key with a dot goes into a mapping."""
    outer, dot, inner = key.partition(".")
    if not dot:
        values[key] = (value, location)
        return
    if dict not in kinds_of(known.get(outer, str)):
        raise _unknown(key, [name for name in known if dict in kinds_of(known[name])], location)
    mapping = values.get(outer, (None, location))[0]
    if isinstance(mapping, str):
        mapping = coerce(outer, mapping, dict)
    if mapping is not None and not isinstance(mapping, dict):
        raise ConfigError(f"{location}: {outer} is {mapping!r}, which cannot have the key {inner!r}; give a mapping.")
    values[outer] = ({**(mapping or {}), inner: value if isinstance(value, _Alone) else scalar(value)}, location)


def _checked(key: str, value: object, known: Mapping[str, Any], location: str) -> Any:
    if isinstance(value, _Alone) and bool not in kinds_of(known[key]):
        raise ConfigError(f"{location} needs a value.")
    try:
        checked = coerce(key, value, known[key])
        if checked is None:
            return None
        for _, limits in parts_of(OWN.get(key, str)):  # other keys are checked by the classes that declare them
            if wanted := beyond_limits(checked, limits):
                raise ConfigError(f"{key} is {checked!r}; it must be {wanted}.")
        if key == "lora":
            return _checked_lora(checked)
        refuse_doubtful(key, checked)
        if isinstance(checked, dict):  # a part that stands alone is true
            return {name: isinstance(setting, _Alone) or setting for name, setting in checked.items()}
        return checked
    except ConfigError as error:
        raise ConfigError(f"{location}: {error}") from None


def _checked_lora(values: Values) -> Values:
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError(f"lora needs the peft package: {pip_install('peft')}") from None
    hints = typing.get_type_hints(LoraConfig)
    names = [item.name for item in dataclasses.fields(LoraConfig)]
    for key, value in values.items():
        if key not in names:
            raise _unknown(f"lora.{key}", [f"lora.{name}" for name in names])
        if isinstance(value, _Alone) and bool not in kinds_of(hints[key]):
            raise ConfigError(f"lora.{key} needs a value.")
    checked = {key: coerce(f"lora.{key}", value, hints[key]) for key, value in values.items()}
    if checked.get("lora_dropout"):
        raise ConfigError(
            f"lora.lora_dropout is {checked['lora_dropout']:g}; a shared token is computed once, so its branches "
            "cannot draw different dropout masks. Set it to 0, or leave it out."
        )
    for key, reason in _LORA_REFUSED.items():
        if checked.get(key) not in (None, False, {}, []):
            raise ConfigError(f"lora.{key} cannot be used: {reason}.")
    if checked.get("task_type") not in (None, "CAUSAL_LM"):
        raise ConfigError(f"lora.task_type is {checked['task_type']!r}; leave it out: it is CAUSAL_LM.")
    for key in ("r", "lora_alpha"):
        if checked.get(key) is not None and checked[key] <= 0:
            raise ConfigError(f"lora.{key} is {checked[key]}; it must be positive.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lora_config(checked)
    except (ValueError, TypeError, ImportError) as error:  # settings that peft does not take together
        raise ConfigError(f"lora: {' '.join(str(error).split())}") from error
    return checked


def _unknown(key: str, known: Sequence[str], location: str = "") -> ConfigError:
    hint = did_you_mean(key, known, "See docs/keys.md for all keys.")
    return ConfigError(f"{location + ': ' if location else ''}unknown key {key!r}.{hint}")


def _config(values: Values, more: Mapping[str, Any], **told: Any) -> RunConfig:
    own = {"data": None} | {name: values.pop(name) for name in OWN if values.get(name) is not None}
    others = {name: values.pop(name) for name in more if name in values}
    render = {name: values.pop(name) for name in RenderOptions.__dataclass_fields__ if name in values}
    if render.get("chat_template_kwargs", ...) is None:
        del render["chat_template_kwargs"]
    has_evaluation = {"eval_data", "eval_split"} & set(own)
    if len(has_evaluation) == 2:
        raise ConfigError("eval_split and eval_data are both given; choose one.")
    training = {name: value for name, value in values.items() if name not in OWN}
    if has_evaluation:
        training.setdefault("eval_strategy", "epoch")
    elif training.get("eval_strategy", "no") != "no":
        raise ConfigError(
            f"eval_strategy is {training['eval_strategy']!r}, but there is no eval_data and no eval_split."
        )
    return RunConfig(render=RenderOptions(**render), training=training, more=others, **told, **own)


# -- the objective and the reference that a configuration names, with settings that may be text ------------------------


def typed_settings(objective: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a named objective, as the types of its annotations.

    Raises:
        ConfigError: a value of another type; names the setting.
    """
    from treewise.objectives.registry import OBJECTIVES, setting_types

    types = setting_types(objective) if objective in OBJECTIVES else {}
    by_name = {str(key): value for key, value in settings.items()}  # YAML reads the key of `3: x` as a number
    return {key: coerce(key, value, types.get(key, Any)) for key, value in by_name.items()}


def preference_objective(config: RunConfig) -> "Objective | None":
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


def reference_of(config: RunConfig) -> "PreTrainedModel | None":
    """The model that `reference` names; None without one: the trained model as it starts."""
    from treewise.models.load_model import load_weights

    name = config.more.get("reference")
    return None if name is None else load_weights(name, None, config.dtype)
