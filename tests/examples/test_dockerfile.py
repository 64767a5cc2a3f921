"""`Dockerfile.cuda` as far as it can be checked without Docker: its instructions, and that they fit the project."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from treewise.report.analysis.misfits import LEAST_DRIVER

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile.cuda").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions() -> list[tuple[str, str]]:
    """Names and arguments, lines that go on joined."""
    lines = re.sub(r"\\\n\s*", "", "\n".join(line for line in TEXT.splitlines() if not line.startswith("#")))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines.splitlines() if line)]


def test_its_instructions_are_those_of_docker() -> None:
    names = [name for name, _ in instructions()]
    assert names[:2] == ["ARG", "FROM"]
    assert set(names) == {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"}


def test_its_torch_is_the_oldest_that_is_admitted() -> None:
    base = instructions()[0][1].removeprefix("BASE=")
    match = re.fullmatch(r"pytorch/pytorch:([\d.]+)-cuda([\d.]+)-cudnn\d+-devel", base)
    assert match is not None
    torch = next(each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "torch")
    least = min(Version(each.version) for each in torch.specifier if each.operator == ">=")
    assert Version(match[1]).release[:2] == least.release[:2]
    driver = ".".join(map(str, LEAST_DRIVER[int(match[2].partition(".")[0])]))
    assert f"CUDA {match[2]} runs on drivers from\n# {driver} on" in TEXT


def test_what_it_installs_and_copies_is_there() -> None:
    [run] = [rest for name, rest in instructions() if name == "RUN"]
    extras = re.search(r"'\.\[([\w,]+)\]'", run)
    assert extras is not None
    assert set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "--constraint /tmp/constraints.txt" in run
    assert "--resolution ${RESOLUTION}" in run  # our lowest set (tests/first_day), as its torch is
    assert ("ARG", "RESOLUTION=lowest-direct") in instructions()
    copied = [word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]]
    assert not [word for word in copied if not (ROOT / word).exists()]
    built_from = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "src"}
    assert built_from <= set(copied)
