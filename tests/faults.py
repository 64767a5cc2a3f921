"""`make faults`: which tests see a fault. Puts those of `faults.toml` into a copy, one after the other.

    python -m tests.faults [--only engine/step.py ...] [--seconds 60]

For each it runs the tests of the file that mirrors the changed one, and of others that imports lead to
(`tests/nearest.py`), until the process has computed for so many seconds or many have failed, and counts those that fail
and pass without it. The table goes to benchmarks/reports/faults.md.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.nearest import distances

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "reports" / "faults.md"
MAX_FILES = 8  # of tests, for a fault
MAX_FAILED = 10
SECONDS = "FAULT_SECONDS"  # names the variable with the limit of a run
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py\S*(?: .*?)??)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A text of a file of the library, and what takes its place."""

    file: str
    what: str
    before: str
    after: str

    def put_into(self, root: Path) -> None:
        path = root / "src" / "treewise" / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            sys.exit(f"{self.file} has this {text.count(self.before)} times, mend tests/faults.toml: {self.before!r}")
        path.write_text(text.replace(self.before, self.after))


def all_faults() -> list[Fault]:
    """Those of the table."""
    return [Fault(**each) for each in tomllib.loads((ROOT / "tests" / "faults.toml").read_text())["fault"]]


@contextmanager
def copied() -> Iterator[Path]:
    """The last commit in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "treewise"
        subprocess.run(("git", "worktree", "add", "--quiet", "--detach", copy, "HEAD"), cwd=ROOT, check=True)
        try:
            yield copy
        finally:
            subprocess.run(("git", "worktree", "remove", "--force", copy), cwd=ROOT, check=True)


def pytest_runtest_protocol() -> bool | None:
    """As a plugin: leaves tests out once the process has computed long enough."""
    return time.process_time() > float(os.environ.get(SECONDS, "inf")) or None  # True: this test is done


def failed_in(copy: Path, *arguments: str, seconds: float = math.inf) -> list[str]:
    """Names of tests that fail there."""
    program = (sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider")
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "COLUMNS": "1000", SECONDS: str(seconds)}
    done = subprocess.run((*program, *arguments), cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return FAILED.findall(done.stdout)


def files_of(fault: Fault) -> list[Path]:
    """Files of tests that may see it: the one that mirrors its file, then the nearest, of its own folder first."""
    changed = Path(fault.file)
    own = ROOT / "tests" / changed.parent
    found = distances([ROOT / "src" / "treewise" / changed])
    found.pop(ROOT / "tests" / "test_house.py")  # reads every file

    def order(path: Path) -> tuple[bool, int, bool, Path]:
        return path != own / f"test_{changed.name}", found[path], not path.is_relative_to(own), path

    return sorted(found, key=order)[:MAX_FILES]


def failed_with(fault: Fault, copy: Path, seconds: float) -> list[str]:
    """Tests that fail with a fault."""
    fault.put_into(copy)
    try:
        files = [str(path.relative_to(ROOT)) for path in files_of(fault)]
        limits = ("-p", "tests.faults", f"--maxfail={MAX_FAILED}", "-m", "not exhaustive")
        return failed_in(copy, *limits, *files, seconds=seconds)
    finally:
        subprocess.run(("git", "checkout", "--quiet", "."), cwd=copy, check=True)


def table(found: list[tuple[Fault, list[str]]], seconds: float) -> str:
    """The report."""
    num_seen = sum(bool(seen) for _, seen in found)
    lines = [
        "# Which tests see a fault",
        "",
        f"For whoever takes a test out: `make faults` puts {len(found)} faults in, one at a time, and runs the tests "
        f"of {MAX_FILES} files, the mirrored one and the nearest by imports, for {seconds:.0f} CPU seconds or until "
        f"{MAX_FAILED} have failed. {num_seen} are seen.",
        "",
        "| file | fault | tests that see it | the first |",
        "|---|---|---|---|",
    ]
    for fault, seen in found:
        first = f"`{seen[0].replace('|', '/')}`" if seen else "none"
        lines.append(f"| {fault.file} | {fault.what} | {len(seen)} | {first} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="files below src/treewise; nothing is written then")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    found: list[tuple[Fault, list[str]]] = []
    with copied() as copy:
        for fault in all_faults():
            if not given.only or fault.file in given.only:
                failed = failed_with(fault, copy, given.seconds)
                found.append((fault, failed))
                first = failed[0] if failed else "none"
                print(f"{len(failed):4} {fault.file}: {fault.what}: {first}", flush=True)
        all_failed = sorted({each for _, failed in found for each in failed})
        anyway = set(failed_in(copy, *all_failed)) if all_failed else set()
    found = [(fault, [each for each in failed if each not in anyway]) for fault, failed in found]
    if not given.only:
        REPORT.write_text(table(found, given.seconds))


if __name__ == "__main__":
    main()
