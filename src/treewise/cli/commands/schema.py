"""`treewise schema [train|rl]`: the JSON schema of a configuration, with which editors complete and check it."""

import argparse
import dataclasses
import enum
import json
import math
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from treewise.cli.aliases import SAMPLED_ROLES, names_of
from treewise.cli.keys import Keys, help_of, rl_aliases, schema
from treewise.errors import parts_of

NUMBER = r"^[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"  # YAML 1.1 reads 1e-5 as text
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "of",
        nargs="?",
        default="train",
        choices=("train", "rl"),
        metavar="COMMAND",
        help="the command that the configuration is for: train, or rl (train)",
    )
    parser.epilog = (
        "Save it, and name it in the first line of a configuration: # yaml-language-server: $schema=train.schema.json"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the schema; returns the exit code."""
    print(as_text(args.of))
    return 0


def as_text(of: str) -> str:
    """The schema of `treewise train` or `treewise rl`, as text."""
    from treewise.cli.commands import rl
    from treewise.cli.keys import TRAIN

    if of == "train":
        return json.dumps(json_schema("treewise train", TRAIN), indent=1)
    return json.dumps(json_schema("treewise rl", rl.all_keys(), rl_aliases()), indent=1)


def json_schema(title: str, more: Keys | None = None, aliases: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The schema (draft 2020-12) of one command's configuration. more, aliases: as `read_config` takes them."""
    known = schema(more)
    properties = {
        key: {"description": help_of(key, with_tasks="tasks" in known), **_typed(kind)} for key, kind in known.items()
    }
    lora: dict[str, Any] = {}  # none where peft is absent
    with suppress(ImportError):
        from peft import LoraConfig

        lora = typing.get_type_hints(LoraConfig)
    of_lora: dict[str, Any] = {"type": "object"}
    if lora:
        no_dropout = {"const": 0, "description": "a shared token is computed once: dropout is refused"}
        parts = {name: _typed(kind) for name, kind in lora.items()} | {"lora_dropout": no_dropout}
        of_lora |= {"properties": parts, "additionalProperties": False}
    properties["lora"] = {"description": help_of("lora"), "anyOf": [of_lora, {"type": "null"}]}
    for alias, name in names_of(known, aliases).items():
        outer, _, inner = name.partition(".")
        typed = _typed(lora.get(inner, Any)) if outer == "lora" else {} if inner else _typed(known[name])
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


def _typed(annotation: object) -> dict[str, Any]:
    options = _options(annotation)
    if any(option.get("type") == "number" for option in options):
        options.append({"type": "string", "pattern": NUMBER})
    unique = [option for index, option in enumerate(options) if option not in options[:index]]
    unique.sort(key=json.dumps)  # Python keeps no order of `a | b`
    if {} in unique:
        return {}
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _options(annotation: object) -> list[dict[str, Any]]:
    """Schemas of the types that an annotation allows."""
    found: list[dict[str, Any]] = []
    for part, declared in parts_of(annotation):
        kind = typing.get_origin(part) or part
        if kind is typing.Literal:
            found.append({"enum": list(typing.get_args(part))})
        elif kind in _PLAIN:
            limits = {
                _LIMITS[name]: getattr(each, name) for each in declared for name in _LIMITS if hasattr(each, name)
            }
            finite = {name: bound for name, bound in limits.items() if bound not in (math.inf, -math.inf)}
            found.append({"type": _PLAIN[kind], **(finite if kind in (int, float) else {})})
        elif isinstance(kind, enum.EnumType):
            names = [each.value for each in list[Any](kind)]
            found.append({"enum": names})
            if "no" in names:  # which YAML 1.1 reads as false
                found.append({"type": "boolean"})
        elif isinstance(kind, type) and (issubclass(kind, Mapping) or dataclasses.is_dataclass(kind)):
            found.append({"type": "object"})
        elif isinstance(kind, type) and issubclass(kind, list | tuple | set):
            items = [option for each in typing.get_args(part) for option in _options(each)]
            items.sort(key=json.dumps)
            found.append({"type": "array", **({"items": {"anyOf": items}} if items else {})})
        else:
            found.append({})
    return found
