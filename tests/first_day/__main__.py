"""What a user's first day runs, on every set of versions that pyproject.toml admits: `make versions`, or
`python -m tests.first_day lowest torch-2.12`. Each set is an environment of its own, resolved and installed by uv
(`pip install uv`), and kept until pyproject.toml or the set changes.

torch comes as a CPU build where PyTorch's index or `PIP_FIND_LINKS` has one; else from PyPI, whose builds for Linux are
CUDA's, take some GB and run on a CPU as well. A set whose Python or torch is not to be had is named and left out.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "versions.md"
MARK = "<!-- table: python -m tests.first_day --table -->"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = ("completion", "datasets", "gguf", "images", "lora", "rl", "serve", "test", "trl")
# Compiled packages: of their lowest versions those that have a wheel for the Python.
WHEELS = (
    "greenlet",
    "numpy",
    "orjson",
    "pandas",
    "pillow",
    "psutil",
    "pyarrow",
    "pyyaml",
    "pyzmq",
    "safetensors",
    "torch",
)
SHOWN = ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "numpy", "pyarrow", "tinker", "pytest")
# What a machine has that is lent for an hour, with PyTorch's own image: no test extra, and plugins of others.
IMAGE = (
    "accelerate",
    "annotated-types",
    "hypothesis",
    "jaxtyping",
    "jinja2",
    "lazy-loader",
    "pandas",
    "peft",
    "pillow",
)
IMAGE += (
    "psutil",
    "pyarrow",
    "pytest",
    "pytest-benchmark<5.3",
    "pytest-cov",
    "pytest-timeout",
    "pytest-xdist",
    "pyyaml",
    "rich",
)


class NotToBeHadError(Exception):
    """A set that cannot be made here."""


@dataclass(frozen=True)
class Versions:
    """One environment. resolution: of uv. pins: beside pyproject.toml. extras: of treewise; None: only `pins`.

    tests: what pytest runs in it.
    """

    resolution: str = "highest"
    python: str = "3.11"
    pins: tuple[str, ...] = ()
    extras: tuple[str, ...] | None = EXTRAS
    tests: tuple[str, ...] = ("tests/first_day/test_first_day.py", "-n", "2")


# The release that `make` installs: a CPU build of 200 MB, where the lowest comes with CUDA's libraries in 5 GB.
CPU_TORCH = "torch==2.13.*"
SETS = {
    "lowest": Versions("lowest-direct"),
    "lowest-but-torch": Versions("lowest-direct", pins=(CPU_TORCH,)),
    "lowest-plain": Versions(  # lower still: others' trainers and servers ask for newer ones
        "lowest-direct",
        pins=(CPU_TORCH, "hypothesis>=6.136", "pytest>=8.2", "pytest-xdist>=3.6"),
        extras=("completion", "datasets", "gguf", "images", "lora"),
        tests=("tests/first_day/test_first_day.py", "tests/data/images/test_reading.py", "-n", "2"),
    ),
    "lowest-python-3.12": Versions("lowest-direct", "3.12"),
    "lowest-python-3.13": Versions("lowest-direct", "3.13"),
    "newest": Versions(),
    "newest-python-3.13": Versions(python="3.13"),
    **{f"transformers-{each}": Versions(pins=(f"transformers=={each}.*",)) for each in ("5.17", "5.20")},
    **{f"torch-2.{each}": Versions(pins=(f"torch==2.{each}.*",)) for each in range(11, 15)},
    "image": Versions(
        python="3.12",
        pins=("torch==2.11.*", "transformers==5.17.*", *IMAGE),
        extras=None,
        tests=("tests/first_day/test_first_day.py", "tests/tree", "tests/test_cuda_first.py", "-n", "2"),
    ),
}


def main() -> int:
    """Returns 1 where a set failed, or one that was named could not be made."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_day", description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"all where none is named: {', '.join(SETS)}")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="of the environments")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="arguments of pytest in place of the first day's")
    parser.add_argument("--keep", action="store_true", help="leave environments there (5 GB each with CUDA's torch)")
    parser.add_argument("--table", action="store_true", help="run nothing; write the table of docs/versions.md")
    given = parser.parse_args()
    if unknown := sorted(set(given.sets) - SETS.keys()):
        parser.error(f"no set {', '.join(unknown)}; there are {', '.join(SETS)}")
    if given.table:
        write_page()
        return 0
    results = {}
    for name in given.sets or SETS:
        results[name] = run_set(name, given.folder, given.tests)
        if not given.keep:
            shutil.rmtree(given.folder / name, ignore_errors=True)
        if given.tests is None:
            save(name, results[name])
    for name, found in results.items():
        say(f"{name}: {found['outcome']}")
    return int(any(found["failed"] or (given.sets and not found["versions"]) for found in results.values()))


def run_set(name: str, folder: Path, tests: list[str] | None) -> dict[str, Any]:
    """Makes an environment and runs the tests in it."""
    chosen = SETS[name]
    say(f"== {name}: Python {chosen.python}, {chosen.resolution}{''.join(f', {each}' for each in chosen.pins[:2])}")
    try:
        python = environment(folder / name, chosen)
    except NotToBeHadError as error:
        return {"outcome": f"not run: {error}", "failed": False, "versions": {}}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(tests or chosen.tests)]
    done = run([str(each) for each in command], env=plain_environment(), stdout=subprocess.PIPE, cwd=ROOT)
    say(done.stdout)
    return {
        "outcome": re.sub(r"(, \d+ warnings?)? in [\d.]+s.*", "", done.stdout.strip().splitlines()[-1].strip("= ")),
        "failed": done.returncode != 0,
        "versions": installed(python),
    }


# -- environments -----------------------------------------------------------------------------------------------------


def environment(folder: Path, chosen: Versions) -> Path:
    """The Python of an environment with the versions of a set, and treewise as it is now, as a wheel.

    Raises:
        NotToBeHadError: no such Python, or no such release.
    """
    python, stamp = folder / "bin" / "python", folder / "made-of"
    made_of = hashlib.sha256(json.dumps([asdict(chosen), (ROOT / "pyproject.toml").read_text()]).encode()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        uv("venv", "--quiet", "--python", python_of(chosen.python), folder)
        asked = folder / "asked.txt"
        asked.write_text("\n".join(chosen.pins))
        sources, listed = [asked], folder / "requirements.txt"
        extras = [flag for each in chosen.extras or () for flag in ("--extra", each)]
        if chosen.extras is not None:
            sources.append(ROOT / "pyproject.toml")
        wheels = [flag for each in WHEELS for flag in ("--only-binary", each)]
        kinds = ["--resolution", chosen.resolution, "--python", python, "--no-header", "--no-annotate", *wheels]
        uv("pip", "compile", "--quiet", *kinds, *torch_source(), *extras, *sources, "--output-file", listed)
        uv("pip", "install", "--quiet", "--python", python, *torch_source(), "--requirements", listed)
        stamp.write_text(made_of)
    uv("pip", "install", "--quiet", "--python", python, "--no-deps", "--reinstall-package", "treewise", ROOT)
    return python


@cache
def python_of(release: str) -> str:
    """The interpreter of a release of Python: one on the path, or of pyenv."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for each in (f"python{release}", *sorted(home.glob(f"{release}.*/bin/python"))):
        done = (
            subprocess.run([each, "-c", "import sys; print(sys.version_info[:2])"], **QUIET)
            if shutil.which(each)
            else None
        )
        if done is not None and done.stdout.strip() == f"({release.replace('.', ', ')})":
            return str(each)
    raise NotToBeHadError(f"no Python {release} here")


@cache
def torch_source() -> tuple[str, ...]:
    """Arguments of uv: PyTorch's index of CPU builds where it can be reached, else wheels that lie on the disk."""
    asked = ["pip", "compile", "--quiet", "--torch-backend", "cpu", "--no-header", "-"]
    if run([sys.executable, "-m", "uv", *asked], input="torch", **QUIET).returncode == 0:
        return ("--torch-backend", "cpu")
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    return tuple(flag for each in links for flag in ("--find-links", each))


def uv(*arguments: object) -> None:
    """Runs uv. Raises `NotToBeHadError` with what it says."""
    done = run([sys.executable, "-m", "uv", *map(str, arguments)], env=plain_environment(), **QUIET)
    if done.returncode:
        raise NotToBeHadError(" ".join(done.stderr.split())[:400])


QUIET: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "check": False}


def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, **{"text": True, "check": False, **options})


def plain_environment() -> dict[str, str]:
    """Without paths of this process's packages."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def installed(python: Path) -> dict[str, str]:
    names = json.dumps(SHOWN)
    code = (
        "import importlib.metadata as m, json, platform\n"
        f"found = {{'python': platform.python_version()}}\nfor name in {names}:\n"
        "    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    found: dict[str, str] = json.loads(run([str(python), "-c", code], **QUIET).stdout)
    return found


# -- what was found ---------------------------------------------------------------------------------------------------


def save(name: str, found: dict[str, Any]) -> None:
    """Among the results of the other sets; one that could not be made changes nothing there."""
    if found["versions"]:
        results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        results[name] = {"outcome": found["outcome"], **found["versions"]}
        ordered = {each: results[each] for each in SETS if each in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


def table() -> str:
    """The results as lines of Markdown."""
    names = ("python", *SHOWN)
    lines = ["| set | " + " | ".join(names) + " | outcome |", "|---" * (len(names) + 2) + "|"]
    for name, found in json.loads(RESULTS.read_text()).items():
        cells = [found.get(each, "") for each in names]
        lines.append("| " + " | ".join([f"`{name}`", *cells, found["outcome"]]) + " |")
    return "\n".join(lines)


def write_page() -> None:
    before, mark, after = PAGE.read_text().partition(MARK + "\n\n")
    PAGE.write_text(before + mark + table() + "\n" + after[after.index("\n\n") + 1 :])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
