"""`treewise record --model M --output ROWS`: an endpoint for agents whose calls become rows."""

import argparse

from treewise.cli.declared_flags import add_flags, settings_of
from treewise.errors import require_packages
from treewise.rl.agents.record_settings import RecordSettings

NEEDED = ("starlette", "uvicorn", "httpx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `RecordSettings`."""
    add_flags(parser, RecordSettings)
    parser.epilog = "How agents use it: docs/endpoint.md."


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; returns the exit code."""
    settings = settings_of(args, RecordSettings, "record")
    require_packages("treewise record", NEEDED)
    from treewise.nn.platform.memory import keep_few_kernels  # slow to import
    from treewise.rl.agents.record import record

    keep_few_kernels()
    record(settings, lambda line: print(line, flush=True))
    return 0
