"""Calls a command as the dispatcher does, on rows and a model made here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treewise.cli.parser import module_of, parse
from treewise.testing import tiny_model


def call(command: str, *arguments: object) -> int:
    """The exit code of `treewise COMMAND ARGUMENTS`."""
    args = parse(command, [command, *map(str, arguments)])
    return int(module_of(command).run(args))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_tiny_model(folder: Path, seed: int = 0, vocab_size: int = 97) -> Path:
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": 2}
    tiny_model(seed=seed, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes).save_pretrained(folder)
    return folder


def files_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """What each file below a folder holds, and when it was written."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
