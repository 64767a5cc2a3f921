"""Environments of their own, resolved and installed by uv (`pip install uv`): for sets of versions, hosts and clients.

torch comes as a CPU build where PyTorch's index or `PIP_FIND_LINKS` has one; else from PyPI, whose builds for Linux are
CUDA's, take some GB and run on a CPU as well.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
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
# The release that `make` installs: a CPU build of 200 MB, where the lowest comes with CUDA's libraries in 5 GB.
CPU_TORCH = "torch==2.13.*"


class NotToBeHadError(Exception):
    """A set that cannot be made here."""


class RecipeError(Exception):
    """A recipe that failed, or did other things than it was asked for."""


def plain_torch(pins: Sequence[str], python: str) -> list[str]:
    """The pins, that of torch by the name of a CPU build that lies on the disk: uv's lowest would be CUDA's."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split() if "--find-links" in torch_source() else ()
    tag = f"cp{python.replace('.', '')}"
    there = {wheel.name.split("-")[1] for each in folders for wheel in Path(each).glob(f"torch-*+cpu-{tag}-*.whl")}
    named = {f"torch=={each.rpartition('.')[0]}.*": f"torch=={each}" for each in sorted(there)}
    return [named.get(each, each) for each in pins]


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


def environment(
    folder: Path, python: str, made_of: str, resolve: Callable[[Path, Path], None], *, with_treewise: bool = True
) -> Path:
    """The Python of an environment that is kept until what it is made of changes, with treewise as it is now.

    python: a release. resolve: writes all that is to be installed into the second path, for the Python of the first.
    with_treewise: False for clients, which treewise serves from elsewhere.

    Raises:
        NotToBeHadError: no such Python, or no such release of a package.
    """
    stamp, own, listed = folder / "made-of", folder / "bin" / "python", folder / "requirements.txt"
    if not stamp.is_file() or stamp.read_text() != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        uv("venv", "--quiet", "--python", python_of(python), folder)
        resolve(own, listed)
        # With all that they need: asked again, uv would want what `--override` put aside.
        uv("pip", "install", "--quiet", "--python", own, "--no-deps", *torch_source(), "--requirements", listed)
        stamp.write_text(made_of)
    if with_treewise:
        uv("pip", "install", "--quiet", "--python", own, "--no-deps", "--reinstall-package", "treewise", ROOT)
    return own


def pins_resolved(asked: Sequence[str], instead: Sequence[str], *more: object) -> Callable[[Path, Path], None]:
    """The `resolve` of an environment: what is asked for, with pins in place of others. more: further arguments of uv,
    and files."""

    def resolve(python: Path, listed: Path) -> None:
        wanted, overrides = listed.with_name("asked.txt"), listed.with_name("instead.txt")
        wanted.write_text("\n".join(asked))
        overrides.write_text("\n".join(instead))
        kinds = ["--python", python, "--no-header", "--no-annotate", "--override", overrides]
        uv("pip", "compile", "--quiet", *kinds, *torch_source(), wanted, *more, "-o", listed)

    return resolve


def write_table(page: Path, mark: str, table: str) -> None:
    """Puts a table in place of the one that follows a mark on a page."""
    before, begins, after = page.read_text().partition(f"{mark}\n\n")
    page.write_text(before + begins + table + "\n" + after[after.index("\n\n") + 1 :])


QUIET: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "check": False}


def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, **{"text": True, "check": False, **options})


def plain_environment() -> dict[str, str]:
    """Without paths of this process's packages."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def installed(python: Path, names: Sequence[str]) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, platform\n"
        f"found = {{'python': platform.python_version()}}\nfor name in {json.dumps([*names])}:\n"
        "    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    found: dict[str, str] = json.loads(run([str(python), "-c", code], **QUIET).stdout)
    return found


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def command(
    what: str,
    about: str | None,
    known: Sequence[str],
    write: Callable[[], None],
    run_one: Callable[[str, argparse.Namespace], bool],
    **flags: dict[str, Any],
) -> int:
    """The command of a table of environments: `python -m tests.hosts axolotl --keep`. Returns 1 where one failed.

    what: plural, of what has an environment. write: the table of a page. run_one: runs one by its name and the flags.
    flags: further ones, with what argparse is told of them.
    """
    one = what.removesuffix("s")
    parser = argparse.ArgumentParser(prog=f"python -m tests.{what}", description=about)
    parser.add_argument(what, nargs="*", metavar=one.upper(), help=f"all where none is named: {', '.join(known)}")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / what, help="of the environments")
    parser.add_argument("--recipes", default="", help=f"of each {one} those whose name contains this")
    parser.add_argument("--keep", action="store_true", help="leave environments there")
    parser.add_argument("--table", action="store_true", help="run nothing; write the table of the page")
    for name, told in flags.items():
        parser.add_argument(f"--{name}", **told)
    given = parser.parse_args()
    named = getattr(given, what)
    if unknown := sorted(set(named) - set(known)):
        parser.error(f"no {one} {', '.join(unknown)}; there are {', '.join(known)}")
    if given.table:
        write()
        return 0
    is_right = True
    for name in named or known:
        is_right &= run_one(name, given)
        if not given.keep:
            shutil.rmtree(given.folder / name / "environment", ignore_errors=True)
    return 0 if is_right else 1


# -- recipes of hosts and clients -------------------------------------------------------------------------------------


def run_recipe(command: list[str], folder: Path, own: Mapping[str, str] | None = None, log: Path | None = None) -> None:
    """Runs a command without network, on one core. own: of its environment. log: gets what it prints.

    Raises:
        RecipeError: it failed.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    quiet |= {"CUDA_VISIBLE_DEVICES": "", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}
    env = plain_environment() | quiet | {"PYTHONPATH": str(ROOT)} | dict(own or {})
    done = run(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if log is not None:
        log.write_text(done.stdout)
    if done.returncode:
        raise RecipeError(done.stdout[-6000:])


def update_error(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Norm of the difference of all updates over the norm of the expected ones. Tensors by name."""
    difference = sum(float((found[name] - each).square().sum()) for name, each in expected.items())
    norm = sum(float(each.square().sum()) for each in expected.values())
    if not norm:
        raise RecipeError("no weight changed")
    return float((difference / norm) ** 0.5)


def save_recipe(
    file: Path, order: Iterable[str], name: str, versions: dict[str, str], recipe: str, found: dict[str, Any]
) -> None:
    """Keeps what a recipe gave among the results of others. order: of names in the file."""
    results = json.loads(file.read_text()) if file.is_file() else {}
    kept = results.setdefault(name, {"versions": {}, "recipes": {}})
    kept["versions"], kept["recipes"][recipe] = versions, found | {"date": time.strftime("%Y-%m-%d")}
    file.write_text(json.dumps({each: results[each] for each in order if each in results}, indent=1) + "\n")
