"""Results as JSON named by hardware."""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from treewise.errors import ConfigError

OURS = ("tree", "held", "recomputed")
COMPILED = "-compiled"  # ends the name of a contestant with compiled layers


def record(rows: list[dict[str, Any]], command: Sequence[str]) -> dict[str, Any]:
    """Rows, each with its command and commit, and what is needed to read them later: hardware, versions."""
    return {
        "benchmark": "treewise bench",
        "hardware": hardware(),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rows": [{**row, "command": " ".join(command), "commit": commit()} for row in rows],
    }


def hardware() -> str:
    """A short name: the GPU, or the CPU's architecture and the number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"cpu-{platform.machine()}-{torch.get_num_threads()}-threads"


def processor() -> str:
    """The CPU's model, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def file_of(path: Path, name: str = "bench") -> Path:
    """The file that a path means: itself, or `<name>-<hardware>.json` in a folder."""
    return path if path.suffix == ".json" else path / f"{name}-{hardware()}.json"


def save(path: Path, results: dict[str, Any], name: str = "bench") -> Path:
    """Writes a record to `file_of(path, name)` and returns that.

    A file that is there already keeps its rows of other cases, so that several commands may fill one file.
    """
    path = file_of(path, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        new = {case_of(row) for row in results["rows"]}
        old_rows = [row for row in load(path)["rows"] if case_of(row) not in new]
        results = {**results, "rows": [*old_rows, *results["rows"]]}
    path.write_text(json.dumps(results, indent=2) + "\n")
    return path


def load(path: Path, name: str = "bench") -> dict[str, Any]:
    """A record that `save` wrote.

    Raises:
        ConfigError: no such file, or one of another form.
    """
    path = file_of(path, name)
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no results of treewise bench: {error}") from error
    if not isinstance(results, dict) or results.get("benchmark") != "treewise bench":
        raise ConfigError(f"{path}: no results of treewise bench.")
    return results


def is_ours(name: str) -> bool:
    """Whether a contestant is one of treewise's."""
    return name.partition("@")[0].removesuffix("-ckpt").removesuffix(COMPILED) in OURS


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is of; a later one of the same case replaces it."""
    return row.get("model"), row.get("workload"), row.get("dtype"), row.get("flat_tokens"), row.get("tree_tokens")


@cache
def commit() -> str:
    """Short hash of the commit of this checkout; empty for an installed package."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


def command_line() -> list[str]:
    """The command that runs now."""
    return ["treewise", *sys.argv[1:]]
