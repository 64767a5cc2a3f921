"""Values of configurations as the types that keys declare: numbers and booleans may be written as text."""

import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml

from treewise.cli.yaml_file import read_value
from treewise.errors import ConfigError, did_you_mean

_MAX_DIGITS = 1000  # of an integer; Python reads a few thousand at most
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "nothing",
}


def coerce(key: str, value: Any, annotation: Any) -> Any:
    """The value as the annotated type: numbers and booleans may be written as text, as flags are and `1e-5` in YAML.

    Raises:
        ConfigError: it is not of that type; names both.
    """
    kinds = kinds_of(annotation)
    if isinstance(value, str):
        value = _from_text(value, kinds)
    if value is False and str in kinds and bool not in kinds and key.endswith("_strategy"):
        value = "no"  # YAML 1.1 reads a bare `no` as false
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        value = int(value)
    if isinstance(value, str) and list in kinds and str not in kinds:
        value = [part.strip() for part in value.split(",")]
    if _fits(value, kinds):
        _check_choice(key, value, annotation)
        return _checked_items(key, value, annotation) if isinstance(value, list) else value
    wanted = " or ".join(dict.fromkeys(_NAMES[kind] for kind in _NAMES if kind in kinds))
    actual = f"{value!r} ({_NAMES.get(type(value), type(value).__name__)})"
    hint = " Quote it if it is meant as text." if isinstance(value, bool) and str in kinds else ""
    raise ConfigError(f"{key} must be {wanted}, found {actual}.{hint}")


def kinds_of(annotation: Any) -> set[Any]:
    """The plain types of an annotation; what has no plain type may also be given as text."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(kinds_of(each) for each in typing.get_args(annotation)))
    if origin is typing.Literal:
        return {type(each) for each in typing.get_args(annotation)}
    if annotation is Any:
        return set(_NAMES)
    kind = origin or annotation
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return {str}
        if (kind not in (str,) and issubclass(kind, Mapping)) or dataclasses.is_dataclass(kind):
            return {dict}
        if kind in _NAMES:
            return {kind}
    return {str}


def _checked_items(key: str, values: list[Any], annotation: Any) -> list[Any]:
    for kind in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(kind) is list:
            (item,) = typing.get_args(kind)
            return [coerce(f"{key}[{index}]", value, item) for index, value in enumerate(values)]
    return values


def _check_choice(key: str, value: Any, annotation: Any) -> None:
    """Raises where transformers has a fixed list of names and this is not one of them."""
    kinds = (annotation, *typing.get_args(annotation))
    names = [str(each.value) for kind in kinds if isinstance(kind, enum.EnumType) for each in list[Any](kind)]
    if names and isinstance(value, str) and value not in names:
        raise ConfigError(f"{key} is {value!r}; choose one of {', '.join(names)}.{did_you_mean(value, names)}")


def _fits(value: Any, kinds: set[Any]) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return type(value) in kinds or (type(value) is int and float in kinds)


def _from_text(text: str, kinds: set[Any]) -> Any:
    """The text as a value of the first of these types that it can be parsed as, else the text itself."""
    word = text.strip().lower()
    if bool in kinds and word in (*_TRUE, *_FALSE):
        return word in _TRUE
    if type(None) in kinds and str not in kinds and word in ("none", "null", "~", ""):
        return None
    if int in kinds and len(word) < _MAX_DIGITS and re.fullmatch(r"[+-]?[0-9][0-9_]*", word):
        return int(word)
    if {int, float} & kinds:
        try:
            return float(word)
        except ValueError:
            pass
    if (list in kinds and word.startswith("[")) or (dict in kinds and word.startswith("{")):
        try:
            return read_value(text)
        except yaml.YAMLError:
            return text
    return text


def scalar(value: Any) -> Any:
    """A flag of a key without a declared type: what YAML reads, and `1e-5` as the number it is."""
    if not isinstance(value, str):
        return value
    try:
        read = read_value(value)
    except yaml.YAMLError:
        return value
    return _from_text(read, {float}) if isinstance(read, str) else read
