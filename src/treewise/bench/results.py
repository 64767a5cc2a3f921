"""Results as JSON named by hardware, and one row of them as a terminal table, for `rich` to print."""

import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from treewise.base.columns import Columns
from treewise.base.durable import write_atomically
from treewise.base.own_files import read_own, sealed, unsealed
from treewise.bench.varlen import HOPPER, NEWER
from treewise.errors import ConfigError


class Seconds(TypedDict):
    """Of a contestant's steps."""

    median: float
    min: float
    max: float


class Kernel(TypedDict, total=False):
    """seconds: of each kernel of attention that was timed."""

    name: str
    seconds: dict[str, float]


class Result(TypedDict, total=False):
    """What a row holds of a contestant. skipped: why it did not run."""

    skipped: str
    note: str
    seconds: Seconds
    kernel: Kernel
    flat_tokens_per_second: float
    computed_tokens_per_second: float
    computed_tokens: int
    peak_bytes: int | None
    gradient_error: float | None
    key_rows_per_token: float | None
    mfu: float | None
    bound_of_tree: float
    host_seconds: float


OURS = ("tree", "held", "recomputed")


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
    """The CPU's model, as Linux names it, and the widest instructions that torch may take (`ATEN_CPU_CAPABILITY`)."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def file_of(path: Path, name: str = "bench") -> Path:
    """The file that a path means: itself, or `<name>-<hardware>.json` in a folder.

    Raises:
        ConfigError: a file that is no `.json`.
    """
    if path.suffix != ".json" and path.is_file():
        raise ConfigError(f"{path} is a file; name one that ends in .json, or a folder.")
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
    write_atomically(path, sealed(results, indent=2) + "\n")
    return path


def load(path: Path, name: str = "bench") -> dict[str, Any]:
    """A record that `save` wrote.

    Raises:
        ConfigError: no such file, or one of another form.
    """
    return read_own(file_of(path, name), _read, "no results of treewise bench")


def _read(data: bytes) -> dict[str, Any]:
    results = unsealed(data, indent=2, may_lack=True)
    if results["benchmark"] != "treewise bench" or not all(isinstance(row, dict) for row in results["rows"]):
        raise ValueError("other keys")
    return results


def is_ours(name: str) -> bool:
    """Whether a contestant is one of treewise's."""
    return name.partition("@")[0].removesuffix("-ckpt") in OURS


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


# -- as a terminal table ----------------------------------------------------------------------------------------------

LEGEND = """\
flat: every trajectory a row of its own; merged: those not contained in another; -ckpt: with gradient checkpointing
flat tokens/s: tokens that flat training would compute, per second; over X: times as fast as X
efficiency: speed-up over flat / FLOP bound (1: all FLOPs that sharing saves are time saved); none over FlashAttention 2
on Hopper and newer cards, which have faster kernels
MFU: model FLOPs used per second, over what products of the model's width reach here (recomputation does not count)
gradient error: relative, against the reference; computed: forwards of tokens, recomputed ones included
of tree (bound): speed under a budget / speed of tree, and what the FLOPs of recomputed tokens leave of it
key rows/token: keys that attention reads per token; host s: seconds in which the CPU prepares
"""
BASELINES = ("flat", "flat-ckpt", "merged", "merged-ckpt")


def row_view(row: dict[str, Any]) -> RenderableType:
    """The contestants of one workload, or why it was skipped."""
    if "skipped" in row:
        return Text(f"{', '.join(row[each] for each in ('model', 'workload') if each in row)}: {row['skipped']}\n")
    first, second = baselines_of(row)
    over = [f"over {name}" for name in (first, second) if name]
    names = ["contestant", "seconds", "flat tokens/s", *over, "efficiency", "MFU", "computed tokens/s"]
    names += ["of tree (bound)", "peak MiB", "gradient error", "computed", "key rows/token", "host s"]
    rows: list[list[str]] = []
    notes: list[str] = []
    for name, result in _results_of(row).items():
        if "skipped" in result:
            what, colon, why = result["skipped"].partition(": ")
            rows.append([name, escape(what)])
            notes += [f"{name}: {why}"] if colon else []
        else:
            rows.append([name, *_cells(row, name, result, first, second)])
        notes += [f"{name}: {each}" for each in (attention_of(result), result.get("note")) if each]
    table = Columns(_title(row), names, rows)
    return Group(table, Text("\n".join([*notes, ""]))) if notes else table


def attention_of(result: Result) -> str | None:
    """By which kernel a contestant's packed rows attend and what each that was timed takes; None where none was."""
    kernel = result.get("kernel", Kernel())
    if not kernel.get("seconds"):
        return None
    timed = ", ".join(f"{name} {1000 * seconds:.3g}" for name, seconds in kernel["seconds"].items())
    return f"attention by {kernel['name']}, the fastest of (milliseconds of a layer) {timed}"


def _results_of(row: dict[str, Any]) -> dict[str, Result]:
    results: dict[str, Result] = row["contestants"]
    return results


def baselines_of(row: dict[str, Any]) -> tuple[str | None, str | None]:
    """The flat and the merged contestant that ran, those without checkpointing first."""
    ran = [name for name in BASELINES if name in row["speed_up"]]
    flat = next((name for name in ran if name.startswith("flat")), None)
    return flat, next((name for name in ran if name.startswith("merged")), None)


def efficiency(row: dict[str, Any], name: str) -> float | None:
    """Speed-up over the first flat contestant that ran, over the FLOP bound; None where no kernel for the card was at
    hand for its rows, but one of older cards (`varlen.NEWER`)."""
    flat, _ = baselines_of(row)
    capability: tuple[int, int] | None = row.get("capability")
    has_newer = capability is not None and capability[0] >= HOPPER and row["dtype"] != "float32"
    timed = _results_of(row).get(flat or "", Result()).get("kernel", Kernel()).get("seconds", {}) if has_newer else {}
    if has_newer and not {row["varlen_kernel"], *timed} & set(NEWER):
        return None
    speed_up: dict[str, dict[str, float]] = row["speed_up"]
    ratio = None if flat is None else speed_up[flat].get(name)
    return None if ratio is None else ratio / float(row["flop_bound"])


def speed_of_tree(row: dict[str, Any], name: str) -> float | None:
    """Speed of a contestant under a budget over that of `tree`; None for others, or where that did not run."""
    tree, result = _results_of(row).get("tree", Result()), _results_of(row)[name]
    if not (name.partition("@")[1] and is_ours(name) and "seconds" in tree and "seconds" in result):
        return None
    return tree["seconds"]["median"] / result["seconds"]["median"]


def _cells(row: dict[str, Any], name: str, result: Result, first: str | None, second: str | None) -> list[str]:
    seconds = result["seconds"]
    speed_up: dict[str, dict[str, float]] = row["speed_up"]
    ratios = [speed_up[base].get(name) for base in (first, second) if base]
    of_bound, speed, bound = efficiency(row, name), speed_of_tree(row, name), result.get("bound_of_tree")
    mfu = result.get("mfu")
    peak, error, key_rows = result["peak_bytes"], result["gradient_error"], result["key_rows_per_token"]
    return [
        f"{seconds['median']:.3f} ({seconds['min']:.3f}-{seconds['max']:.3f})",
        f"{result['flat_tokens_per_second']:,.0f}",
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        "" if of_bound is None else f"{of_bound:.2f}",
        "" if mfu is None else f"{100 * mfu:.0f} %",
        f"{result['computed_tokens_per_second']:,.0f}" if "computed_tokens_per_second" in result else "",
        " ".join([*([] if speed is None else [f"{speed:.2f}"]), *([] if bound is None else [f"({bound:.2f})"])]),
        "" if peak is None else f"{peak / 2**20:,.0f}",
        "" if error is None else f"{error:.1e}",
        f"{result['computed_tokens']:,}",
        "" if key_rows is None else f"{key_rows:.1f}",
        f"{result['host_seconds']:.3f}",
    ]


def _title(row: dict[str, Any]) -> str:
    kernels = f"{row.get('layers', 'plain')} layers, flat rows by {row.get('varlen_kernel', 'sdpa')}"
    left_out: int = row.get("num_left_out", 0)
    count: int = row["num_trajectories"]
    part = f" ({count:,} of its {count + left_out:,} trajectories)" if left_out else ""
    return (
        f"{row['model']}, {row['workload']}{part}, {row['dtype']} on {row['device']}: {row['flat_tokens']:,} flat and "
        f"{row['tree_tokens']:,} tree tokens, ratios {row['share_ratio']:.2f} share and {row['leaf_ratio']:.2f} leaf, "
        f"FLOP bound {row['flop_bound']:.2f}, leaf FLOP bound {row['leaf_flop_bound']:.2f}; {kernels}"
    )
