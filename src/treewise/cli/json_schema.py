"""A JSON schema of the configuration of a run, from the same table of keys that checks it."""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from treewise.cli.aliases import SAMPLED_ROLES, names_of
from treewise.cli.config import schema
from treewise.cli.key_help import field_types, help_of
from treewise.data.io.options import ON_DRIFT, THINKING, TRAIN_ON

NUMBER = r"^[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"  # YAML 1.1 reads 1e-5 as text
_CHOICES = {"thinking": THINKING, "train_on": TRAIN_ON, "on_drift": ON_DRIFT, "on_bad_record": ("error", "quarantine")}
_PLAIN = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}


def json_schema(
    title: str, more: Mapping[str, Any] | None = None, aliases: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The schema (draft 2020-12) of one command's configuration. more, aliases: as `read_config` takes them."""
    known = schema(more)
    properties = {key: {"description": help_of(key), **_typed(key, kind)} for key, kind in known.items()}
    lora = field_types()
    properties["lora"] = {"description": help_of("lora"), "anyOf": [_lora(lora), {"type": "null"}]}
    for alias, name in names_of(known, aliases).items():
        outer, _, inner = name.partition(".")
        typed = _typed(inner, lora.get(inner, Any)) if outer == "lora" else {} if inner else _typed(name, known[name])
        properties.setdefault(alias, {"description": f"the same as {name}", **typed})
    properties["roles_to_train"] = {  # axolotl's, whose values are not those of train_on
        "description": "who is trained: the model alone",
        "items": {"enum": list(SAMPLED_ROLES)},
        "type": "array",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _lora(fields: Mapping[str, Any]) -> dict[str, Any]:
    if not fields:
        return {"type": "object"}
    properties = {name: _typed(name, kind) for name, kind in fields.items()}
    properties["lora_dropout"] = {"const": 0, "description": "a shared token is computed once: dropout is refused"}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _typed(key: str, annotation: Any) -> dict[str, Any]:
    if key in _CHOICES:
        return {"enum": list(_CHOICES[key])}
    options = _options(annotation)
    if any(option.get("type") == "number" for option in options):
        options.append({"type": "string", "pattern": NUMBER})
    unique = [option for index, option in enumerate(options) if option not in options[:index]]
    unique.sort(key=json.dumps)  # Python keeps no order of `a | b`
    if {} in unique:
        return {}
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _options(annotation: Any) -> list[dict[str, Any]]:
    """Schemas of the types that an annotation allows."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [option for each in typing.get_args(annotation) for option in _options(each)]
    if origin is typing.Literal:
        return [{"enum": list(typing.get_args(annotation))}]
    kind = origin or annotation
    if kind in _PLAIN:
        return [dict(_PLAIN[kind])]
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return [{"enum": [each.value for each in kind]}, *([{"type": "boolean"}] if _has_no(kind) else [])]
        if issubclass(kind, Mapping) or dataclasses.is_dataclass(kind):
            return [{"type": "object"}]
        if issubclass(kind, list | tuple | set):
            items = [option for each in typing.get_args(annotation) for option in _options(each)]
            items.sort(key=json.dumps)
            return [{"type": "array", **({"items": {"anyOf": items}} if items else {})}]
    return [{}]


def _has_no(kind: Any) -> bool:
    """Whether `no` is a choice, which YAML 1.1 reads as false."""
    return "no" in [each.value for each in kind]
