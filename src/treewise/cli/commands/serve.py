"""`treewise serve --model M`: the Tinker API on trees, on this machine."""

import argparse
import dataclasses
import importlib.util
import types
import typing
from typing import Any, Literal

from typing_extensions import Doc

from treewise.cli.config import parse_flags
from treewise.cli.values import coerce, scalar
from treewise.errors import ConfigError, did_you_mean, pip_install
from treewise.serve.settings import ServeSettings

MAPPING = "sampler_settings"
NEEDED = ("tinker", "starlette", "uvicorn", "orjson", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `ServeSettings`, as it is declared there."""
    hints = typing.get_type_hints(ServeSettings, include_extras=True)
    for each in dataclasses.fields(ServeSettings):
        kind, *declared = typing.get_args(hints[each.name])
        (text,) = (item.documentation for item in declared if isinstance(item, Doc))
        options: dict[str, Any] = {"help": text}
        if each.default is dataclasses.MISSING:
            options["required"] = True
        else:
            options["default"] = each.default
            options["help"] += "" if each.default is None else f" ({each.default})"
        if typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        elif each.name == MAPPING:
            options["metavar"] = "{KEY: VALUE}"
        else:
            plain = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
            options["type"] = next(item for item in plain if item is not types.NoneType)
        parser.add_argument(f"--{each.name}", **options)
    parser.set_defaults(overrides=[])  # --sampler_settings.KEY VALUE
    parser.epilog = "What clients can do with it: docs/serve.md."


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; returns the exit code."""
    fields = [each.name for each in dataclasses.fields(ServeSettings)]
    values = {name: getattr(args, name) for name in fields}
    if values[MAPPING] is not None:
        values[MAPPING] = coerce(MAPPING, values[MAPPING], dict)
    for key, value in parse_flags(args.overrides).items():
        outer, _, inner = key.partition(".")
        if outer != MAPPING or not inner:
            hint = did_you_mean(f"--{key}", [f"--{name}" for name in fields], "See treewise serve --help.")
            raise ConfigError(f"unknown argument '--{key}'.{hint}")
        values[MAPPING] = {**(values[MAPPING] or {}), inner: scalar(value)}
    settings = ServeSettings(**values)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"treewise serve needs {', '.join(missing)}: {pip_install(*missing)}.")
    from treewise.nn.device import keep_few_kernels  # slow to import
    from treewise.serve.app import serve

    keep_few_kernels()
    serve(settings)
    return 0
