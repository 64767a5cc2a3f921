"""Flags of a command whose settings are one dataclass: a flag for each field, as it is declared there."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import Doc

from treewise.cli.config import parse_flags
from treewise.cli.values import coerce, refuse_doubtful, scalar
from treewise.errors import ConfigError, did_you_mean


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Adds a flag for each field of a dataclass, with its sentence (`Doc`); mappings take `--name.key value`, too."""
    hints = typing.get_type_hints(kind, include_extras=True)
    mappings = _mappings(kind)
    for field in dataclasses.fields(kind):
        own, *declared = typing.get_args(hints[field.name])
        (text,) = (item.documentation for item in declared if isinstance(item, Doc))
        options: dict[str, Any] = {"help": text}
        if field.default is dataclasses.MISSING:
            options["required"] = True
        else:
            options["default"] = field.default
            options["help"] += "" if field.default is None else f" ({field.default})"
        if typing.get_origin(own) is Literal:
            options["choices"] = typing.get_args(own)
        elif field.name in mappings:
            options["metavar"] = "{KEY: VALUE}"
        else:
            plain = typing.get_args(own) if isinstance(own, types.UnionType) else (own,)
            options["type"] = next(item for item in plain if item is not types.NoneType)
        parser.add_argument(f"--{field.name}", **options)
    parser.set_defaults(overrides=[])  # --sampler_settings.KEY VALUE


def settings_of(args: argparse.Namespace, kind: type, command: str) -> Any:
    """The settings that were given. Raises `ConfigError` for a flag that is unknown, or a value that is wrong."""
    fields, mappings = [field.name for field in dataclasses.fields(kind)], _mappings(kind)
    values = {name: getattr(args, name) for name in fields}
    for name in mappings:
        if values[name] is not None:
            values[name] = coerce(name, values[name], dict)
    for key, value in parse_flags(args.overrides).items():
        outer, _, inner = key.partition(".")
        if outer not in mappings or not inner:
            hint = did_you_mean(f"--{key}", [f"--{name}" for name in fields], f"See treewise {command} --help.")
            raise ConfigError(f"unknown argument '--{key}'.{hint}")
        values[outer] = {**(values[outer] or {}), inner: scalar(value)}
    for name in mappings:
        refuse_doubtful(f"--{name}", values[name])
    return kind(**values)


def _mappings(kind: type) -> Sequence[str]:
    hints = typing.get_type_hints(kind)
    return [
        name for name, hint in hints.items() if any(typing.get_origin(each) is dict for each in typing.get_args(hint))
    ]
