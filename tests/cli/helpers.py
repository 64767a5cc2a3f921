"""Calls a command as the dispatcher does, on rows and a model made here."""

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from treewise.testing import tiny_model


def call(command: str, *arguments: object) -> int:
    """The exit code of `treewise COMMAND ARGUMENTS`."""
    module = import_module(f"treewise.cli.commands.{command}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(argument) for argument in arguments]))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    tiny_model(
        seed=seed, vocab_size=97, num_hidden_layers=2, bos_token_id=None, eos_token_id=None, pad_token_id=None
    ).save_pretrained(folder)
    return folder
