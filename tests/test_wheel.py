"""What is shipped: the wheel holds the whole package and works, the sdist holds what its readers need."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("test_wheel")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="needs hatchling: pip install 'treewise[test]'")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def sources() -> set[str]:
    """Every file of the package, relative to its parent folder."""
    package = ROOT / "src" / "treewise"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(package.parent).as_posix() for path in files}


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == sources()
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.exhaustive
def test_the_wheel_works(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, str(ROOT / "tests" / "wheel_smoke.py"), str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_sdist_holds_what_builds_tests_and_explains(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    wanted = {"LICENSE", "README.md", "DESIGN.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "mkdocs.yml"}
    wanted |= {"pyproject.toml", "tests/conftest.py", "examples/demo.py", "examples/LICENSES.txt"}
    wanted |= {"examples/data/searches.jsonl.gz", "benchmarks/common.py", "docs/figures/overview.svg"}
    assert (wanted | pages | {f"src/{name}" for name in sources()}) <= names
    assert not [name for name in names if name.startswith((".", "build/", "runs/")) and name != ".gitignore"]
