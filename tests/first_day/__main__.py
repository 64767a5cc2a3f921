"""What a user's first day runs, on every set of versions that pyproject.toml admits: `make versions`, or
`python -m tests.first_day lowest torch-2.12`. Each set is an environment of its own, resolved and installed by uv
(`pip install uv`), and kept until pyproject.toml or the set changes.

A set whose Python or torch is not to be had is named and left out.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests import environments
from tests.environments import (
    CPU_TORCH,
    ROOT,
    WHEELS,
    NotToBeHadError,
    installed,
    plain_environment,
    plain_torch,
    run,
    say,
    torch_source,
    uv,
    write_table,
)

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "versions.md"
MARK = "<!-- table: python -m tests.first_day --table -->"
PLAIN = ("completion", "datasets", "gguf", "images", "lora")
EXTRAS = (*PLAIN, "rl", "serve", "test", "trl")
PYTEST = ("hypothesis>=6.136", "pytest>=8.2,<9.2", "pytest-xdist>=3.6")  # where the extra `test` is left out
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


@dataclass(frozen=True)
class Versions:
    """One environment. resolution: of uv. pins: beside pyproject.toml. extras: of treewise; None: only `pins`.

    host: a trainer that treewise is installed beside: of SHARED the environment has the versions that uv finds for
    both together, on host_python. Nothing else of the trainer is installed. tests: what pytest runs in it.
    """

    resolution: str = "highest"
    python: str = "3.11"
    pins: tuple[str, ...] = ()
    extras: tuple[str, ...] | None = EXTRAS
    host: tuple[str, ...] = ()
    host_python: str = "3.12"
    tests: tuple[str, ...] = ("tests/first_day/test_first_day.py", "-n", "2")


# What treewise and a trainer both ask for, and both call.
SHARED = ("transformers", "tokenizers", "huggingface-hub", "accelerate", "peft", "trl", "datasets", "safetensors")
# Each with what it is trained with: verl's extras pin its TRL; LLaMA-Factory's own trainers need transformers 5.2.
HOSTS = {
    "art": ("openpipe-art[backend]==0.5.23",),
    "llamafactory": ("llamafactory==0.9.5", "transformers==5.2.0"),
    "verl": ("verl[cpu]==0.9.1", "trl==0.27.0"),
    "openrlhf": ("openrlhf==0.11.2",),
    "skyrl": ("skyrl[skyrl-train]==0.4.0",),
    "unsloth": ("unsloth[huggingface]==2026.10.9",),
    "automodel": ("nemo-automodel==0.7.0",),
    "swift": ("ms-swift==4.6.0",),
    "axolotl": ("axolotl==0.21.0",),
}
SETS = {
    "lowest": Versions("lowest-direct"),
    "lowest-but-torch": Versions("lowest-direct", pins=(CPU_TORCH,)),
    "lowest-plain": Versions(  # lower still: others' trainers and servers ask for newer ones
        "lowest-direct",
        pins=(CPU_TORCH, *PYTEST),
        extras=PLAIN,
        tests=("tests/first_day/test_first_day.py", "tests/data/images/test_reading.py", "-n", "2"),
    ),
    "lowest-python-3.12": Versions("lowest-direct", "3.12"),
    "lowest-python-3.13": Versions("lowest-direct", "3.13"),
    "newest": Versions(),
    "newest-python-3.13": Versions(python="3.13"),
    **{f"transformers-{each}": Versions(pins=(f"transformers=={each}.*",)) for each in ("5.9", "5.17", "5.20")},
    **{f"torch-2.{each}": Versions(pins=(f"torch==2.{each}.*",)) for each in range(11, 15)},
    **{name: Versions(pins=(CPU_TORCH, *PYTEST), extras=PLAIN, host=host) for name, host in HOSTS.items()},
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
        write_table(PAGE, MARK, table())
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
        "versions": installed(python, SHOWN),
    }


# -- environments -----------------------------------------------------------------------------------------------------


def environment(folder: Path, chosen: Versions) -> Path:
    """The Python of an environment with the versions of a set, and treewise as it is now, as a wheel.

    Raises:
        NotToBeHadError: no such Python, or no such release.
    """

    def resolve(python: Path, listed: Path) -> None:
        asked = listed.with_name("asked.txt")
        asked.write_text("\n".join((*plain_torch(chosen.pins, chosen.python), *beside_host(folder, chosen))))
        sources = [asked, *([] if chosen.extras is None else [ROOT / "pyproject.toml"])]
        extras = [flag for each in chosen.extras or () for flag in ("--extra", each)]
        wheels = [flag for each in WHEELS for flag in ("--only-binary", each)]
        kinds = ["--resolution", chosen.resolution, "--python", python, "--no-header", "--no-annotate", *wheels]
        uv("pip", "compile", "--quiet", *kinds, *torch_source(), *extras, *sources, "--output-file", listed)

    made_of = hashlib.sha256(json.dumps([asdict(chosen), (ROOT / "pyproject.toml").read_text()]).encode()).hexdigest()
    return environments.environment(folder, chosen.python, made_of, resolve)


def beside_host(folder: Path, chosen: Versions) -> list[str]:
    """Versions of SHARED with which a trainer and treewise can be installed together; torch may be any that we admit.

    Raises:
        NotToBeHadError: there are none.
    """
    if not chosen.host:
        return []
    asked, any_torch, listed = (folder / name for name in ("host.txt", "torch.txt", "with-host.txt"))
    asked.write_text("\n".join(chosen.host))
    any_torch.write_text(CPU_TORCH)
    extras = [flag for each in ("datasets", "lora") for flag in ("--extra", each)]
    kinds = ["--python-version", chosen.host_python, "--overrides", any_torch, "--no-header", "--no-annotate"]
    uv("pip", "compile", "--quiet", *kinds, *extras, asked, ROOT / "pyproject.toml", "--output-file", listed)
    lines = listed.read_text().splitlines()
    return [each for each in lines if each.partition("==")[0] in SHARED]


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


if __name__ == "__main__":
    raise SystemExit(main())
