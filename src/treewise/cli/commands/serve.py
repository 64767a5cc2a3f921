"""`treewise serve --model M`: the Tinker API on trees, on this machine."""

import argparse
from contextlib import ExitStack

from treewise.cli.declared_flags import add_flags, settings_of
from treewise.cli.waiting import telling
from treewise.errors import require_packages
from treewise.serve.settings import ServeSettings

NEEDED = ("tinker", "starlette", "uvicorn", "orjson", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `ServeSettings`."""
    add_flags(parser, ServeSettings)
    parser.epilog = "What clients can do with it: docs/serve.md."


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; returns the exit code."""
    settings = settings_of(args, ServeSettings, "serve")
    require_packages("treewise serve", NEEDED)
    with ExitStack() as told:
        told.enter_context(telling("serve"))
        from treewise.nn.platform.memory import keep_few_kernels  # slow to import
        from treewise.serve.app import serve

        keep_few_kernels()
        serve(settings, when_loaded=told.close)
    return 0
