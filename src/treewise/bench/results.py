"""Results as JSON named by hardware, and the check of new ones against old ones by ratio.

Seconds differ from machine to machine and from day to day; ratios of contestants that took turns do so far less. So
treewise's speed is held against a baseline's beside the other contestants' speed, in the cases that both have.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from treewise.errors import ConfigError

# Speed may fall to this fraction of the baseline's, and a gradient error may grow by this factor.
MIN_SPEED = 0.9
MAX_ERROR_FACTOR = 3.0
SMALLEST_ERROR = 1e-6  # errors below are rounding, whatever their ratio
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
        new = {_case(row) for row in results["rows"]}
        old_rows = [row for row in load(path)["rows"] if _case(row) not in new]
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


def check(new: dict[str, Any], baseline: dict[str, Any], min_speed: float = MIN_SPEED) -> tuple[list[str], int]:
    """Regressions against a baseline, a line each, and how many of treewise's contestants were compared.

    Compared are the cases (model, workload, dtype) that both records have. Each of treewise's contestants must reach
    `min_speed` of the baseline's speed, after both runs are put on one scale: by how much faster or slower the other
    contestants were, in the geometric mean. Speeds are those of the fastest step, which other jobs on the machine
    disturb least. The gradient error may grow threefold; what ran must run again.
    """
    before = {_case(row): row for row in baseline["rows"]}
    worse: list[str] = []
    count = 0
    for row in new["rows"]:
        old, what = before.get(_case(row), {}), f"{row.get('model')}, {row.get('workload')}"
        if "contestants" not in old:
            continue
        if "contestants" not in row:
            worse.append(f"{what}: skipped now: {row.get('skipped')}")
            continue
        was, now = (
            {name: each["seconds"]["min"] for name, each in side["contestants"].items() if "seconds" in each}
            for side in (old, row)
        )
        others = [name for name in was if name in now and not is_ours(name)]
        for name in filter(is_ours, was):
            if name not in now:
                worse.append(f"{what}: {name} did not run")
            elif others:
                count += 1
                speed = was[name] / now[name] * geometric_mean([now[each] / was[each] for each in others])
                if speed < min_speed:
                    beside = ", ".join(others)
                    worse.append(f"{what}: {name} has {speed:.2f} of the baseline's speed beside {beside}")
        for name in filter(is_ours, old["contestants"]):
            error, after = (side["contestants"].get(name, {}).get("gradient_error") for side in (old, row))
            if error is None or after is None or after <= MAX_ERROR_FACTOR * max(error, SMALLEST_ERROR):
                continue
            worse.append(f"{what}: gradient error of {name} is {after:.1e}, the baseline's is {error:.1e}")
    return worse, count


def is_ours(name: str) -> bool:
    """Whether a contestant is one of treewise's."""
    return name.partition("@")[0].removesuffix("-ckpt").removesuffix(COMPILED) in OURS


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
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
