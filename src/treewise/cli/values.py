"""Files and flags to values: YAML as keys with their lines, and text as the types that keys declare."""

import enum
import math
import re
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import yaml

from treewise.data.io.files import read_text
from treewise.errors import ConfigError, did_you_mean, parts_of

MAX_VALUES = 100_000  # of a configuration, each alias counted as what it stands for
_MAX_DIGITS = 1000  # of an integer; Python reads a few thousand at most
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9_]+.*")  # eight to one reader, ten to another
_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "nothing",
}


class Doubtful(str):
    """A word without quotes that YAML 1.1 reads as something else than it says: `no`, `010`, `1:30`."""

    read_as: object = None


class _Loader(yaml.SafeLoader):
    """Values as YAML 1.2 has them; what 1.1 reads otherwise is `Doubtful`, and dates stay text."""


def _plain_value(loader: _Loader, node: yaml.ScalarNode) -> object:
    tag, text = node.tag.rpartition(":")[2], str(node.value)
    if tag == "timestamp":
        return text
    value = getattr(yaml.SafeLoader, f"construct_yaml_{tag}")(loader, node)
    is_same = text.lower() in ("true", "false") if tag == "bool" else ":" not in text
    if is_same and not (tag == "int" and _LEADING_ZERO.fullmatch(text)):
        return value
    word = Doubtful(text)
    word.read_as = value
    return word


for _tag in ("bool", "int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _plain_value)


def refuse_doubtful(key: str, value: object) -> None:
    """Raises `ConfigError` for what YAML 1.1 reads otherwise, within a value whose parts have no type."""
    if isinstance(value, Doubtful):
        raise ConfigError(f"{key} is {_doubt(value)}")
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        refuse_doubtful(f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]", item)


def _doubt(value: Doubtful) -> str:
    way = "true or false" if isinstance(value.read_as, bool) else "the number in digits"
    read = str(value.read_as).lower()
    return f"{str(value)!r}, which YAML 1.1 reads as {read}; write {way}, or quote it if it is meant as text."


def read_file(path: Path, required: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Values by key, each with its location (`run.yaml:3`). `required`: keys that the error of an empty file names.

    Raises:
        ConfigError: a file that is missing, empty, not YAML or no mapping; a key that is given twice, at any depth.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz", ".parquet", ".arrow")):
        raise ConfigError(f"{path} holds data, not a configuration; give it as --data {path}.")
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"{path}: the configuration cannot be read ({error.strerror}).") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{path}: empty; a configuration names at least {', '.join(required)}.")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: a configuration is a mapping, `key: value` line by line.")
        _check_size(node, str(path))
        _check_keys(node, path)
        return {
            key.value: (loader.construct_object(value, deep=True), f"{path}:{key.start_mark.line + 1}")
            for key, value in node.value
        }
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = _one_line(getattr(error, "problem", None) or error)
        raise ConfigError(f"{path}{line}: not valid YAML ({reason}).") from None
    except (RecursionError, ValueError) as error:  # nested without end; an integer or a date that cannot be
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not valid YAML ({_one_line(error)}).") from None


def read_value(text: str) -> object:
    """A value of a flag, as YAML reads it.

    Raises:
        yaml.YAMLError: it is not YAML.
        ConfigError: its aliases stand for more values than a configuration holds.
    """
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _check_size(node, "a flag's value")
    return loader.construct_document(node)


def read_mapping(flag: str, text: str) -> dict[str, Any]:
    """A flag's mapping, written in YAML. Raises `ConfigError` for anything else."""
    try:
        value = read_value(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # nested without end; an integer that cannot be
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{flag} {text!r} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} {text!r} is not a mapping; write '{{name: value}}'.")
    refuse_doubtful(flag, value)
    return value


def _check_size(root: yaml.Node, location: str) -> None:
    """Counts values with aliases written out, each node once: fifteen aliases of ten each stand for 10**15."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        sizes[id(node)] = MAX_VALUES  # an alias that leads back to itself stands for no end of values
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        total = 1 + (sum(map(size, parts)) if isinstance(node, yaml.CollectionNode) else 0)
        sizes[id(node)] = total
        return total

    if size(root) > MAX_VALUES:
        raise ConfigError(f"{location}: its aliases stand for more than {MAX_VALUES:,} values; write them out.")


def _check_keys(node: yaml.Node, path: Path, above: str = "") -> None:
    """Keys of mappings, at any depth, are words, each given once; PyYAML would take the last of equal ones silently."""
    first: dict[str, str] = {}
    for key_node, value_node in node.value if isinstance(node, yaml.MappingNode) else ():
        location = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{location}: a key must be a word, as in `key: value`.")
        key = f"{above}{key_node.value}"
        if key in first:
            raise ConfigError(f"{location}: {key} is given twice (first at {first[key]}).")
        first[key] = location
        if value_node is not node:  # an alias may lead back
            _check_keys(value_node, path, f"{key}.")


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:200]


# -- types ------------------------------------------------------------------------------------------------------------


def coerce(key: str, value: object, annotation: object) -> Any:
    """The value as the annotated type: numbers and booleans may be written as text, as flags are and `1e-5` in YAML.

    Raises:
        ConfigError: it is not of that type, or none of its choices; names both.
    """
    kinds = kinds_of(annotation)
    if key.endswith("_kwargs"):  # transformers declares these as text, too, and calls functions with them later
        kinds -= {str}
    if isinstance(value, Doubtful):
        is_word = isinstance(value.read_as, bool)
        if not is_word and not kinds & {str, list}:
            wanted = " or ".join(dict.fromkeys(_NAMES[kind] for kind in _NAMES if kind in kinds))
            raise ConfigError(f"{key} must be {wanted}, found {_doubt(value)}")
        value = value.read_as if is_word and value not in choices_of(annotation) else str(value)
    elif isinstance(value, str):
        value = _from_text(value, kinds)
    if value is False and str in kinds and bool not in kinds and key.endswith("_strategy"):
        value = "no"  # YAML 1.1 reads a bare `no` as false
    if type(value) is date and str in kinds:
        value = value.isoformat()  # YAML reads 2026-11-28 as a date
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        value = int(value)
    if isinstance(value, str) and list in kinds and str not in kinds:
        value = [part.strip() for part in value.split(",")]
    if _fits(value, kinds):
        names = choices_of(annotation)
        if names and isinstance(value, str) and value not in names:
            names += ["true", "false"] if bool in kinds else []
            raise ConfigError(f"{key} is {value!r}; choose one of {', '.join(names)}.{did_you_mean(value, names)}")
        items = [kind for kind, _ in parts_of(annotation) if typing.get_origin(kind) is list]
        if not isinstance(value, list) or not items:
            return value
        return [coerce(f"{key}[{index}]", each, *typing.get_args(items[0])) for index, each in enumerate(value)]
    wanted = " or ".join(dict.fromkeys(_NAMES[kind] for kind in _NAMES if kind in kinds))
    if isinstance(value, float) and not math.isfinite(value):
        wanted = wanted.replace("a number", "a finite number")
    actual = f"{value!r} ({_NAMES.get(type(value), type(value).__name__)})"
    hint = " Quote it if it is meant as text." if isinstance(value, bool) and str in kinds else ""
    raise ConfigError(f"{key} must be {wanted}, found {actual}.{hint}")


def kinds_of(annotation: object) -> set[Any]:
    """The plain types of an annotation; what has no plain type may also be given as text."""
    found: set[Any] = set()
    for part, _ in parts_of(annotation):
        kind = typing.get_origin(part) or part
        if kind is Literal:
            found |= {type(each) for each in typing.get_args(part)}
        elif kind is Any:
            found |= set(_NAMES)
        elif is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, Mapping)):
            found.add(dict)
        else:
            found.add(kind if kind in _NAMES else str)
    return found


def choices_of(annotation: object) -> list[str]:
    """The names that an annotation allows: of a `Literal`, or of an enumeration of transformers; none for any text."""
    kinds = [kind for kind, _ in parts_of(annotation)]
    names = [str(each.value) for kind in kinds if isinstance(kind, enum.EnumType) for each in list[Any](kind)]
    literals = [each for kind in kinds if typing.get_origin(kind) is Literal for each in typing.get_args(kind)]
    return names + [literal for literal in literals if isinstance(literal, str)]


def _fits(value: object, kinds: set[Any]) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return type(value) in kinds or (type(value) is int and float in kinds)


def _from_text(text: str, kinds: set[Any]) -> object:
    """The text as a value of the first of these types that it can be parsed as, else the text itself."""
    word = text.strip().lower()
    if bool in kinds and word in (*_TRUE, *_FALSE):
        return word in _TRUE
    if type(None) in kinds and str not in kinds and word in ("none", "null", "~", ""):
        return None
    if _LEADING_ZERO.fullmatch(word):
        return text
    if int in kinds and len(word) < _MAX_DIGITS and re.fullmatch(r"[+-]?[0-9][0-9_]*", word):
        return int(word)
    if {int, float} & kinds:
        with suppress(ValueError):
            return float(word)
    if (list in kinds and word.startswith("[")) or (dict in kinds and word.startswith("{")):
        with suppress(yaml.YAMLError):
            return read_value(text)
    return text


def scalar(value: object) -> object:
    """A flag of a key without a declared type: what YAML reads, and `1e-5` as the number it is."""
    if not isinstance(value, str):
        return value
    with suppress(yaml.YAMLError):
        read = read_value(value)
        return _from_text(read, {float}) if isinstance(read, str) else read
    return value
