"""`treewise serve --model M`: the Tinker API on trees, on this machine."""

import argparse
import dataclasses
import importlib.util
import types
import typing
from typing import Any, Literal

from typing_extensions import Doc

from treewise.errors import ConfigError, pip_install
from treewise.serve.settings import ServeSettings

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
        else:
            plain = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
            options["type"] = next(item for item in plain if item is not types.NoneType)
        parser.add_argument(f"--{each.name}", **options)
    parser.epilog = "What clients can do with it: docs/serve.md."


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; returns the exit code."""
    settings = ServeSettings(**{each.name: getattr(args, each.name) for each in dataclasses.fields(ServeSettings)})
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"treewise serve needs {', '.join(missing)}: {pip_install(*missing)}.")
    from treewise.serve.app import serve  # slow to import

    serve(settings)
    return 0
