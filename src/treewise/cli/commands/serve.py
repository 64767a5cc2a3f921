"""`treewise serve --model M`: the Tinker API on trees, on this machine."""

import argparse
import importlib.util

from treewise.cli.declared_flags import add_flags, settings_of
from treewise.errors import ConfigError, pip_install
from treewise.serve.settings import ServeSettings

NEEDED = ("tinker", "starlette", "uvicorn", "orjson", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `ServeSettings`."""
    add_flags(parser, ServeSettings)
    parser.epilog = "What clients can do with it: docs/serve.md."


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; returns the exit code."""
    settings = settings_of(args, ServeSettings, "serve")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"treewise serve needs {', '.join(missing)}: {pip_install(*missing)}.")
    from treewise.nn.device import keep_few_kernels  # slow to import
    from treewise.serve.app import serve

    keep_few_kernels()
    serve(settings)
    return 0
