"""Examples are listed, scripts import what there is, the walk-through runs, configurations hold known keys."""

import ast
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.notebook import NOTEBOOKS, as_notebook
from treewise.cli.commands import rl
from treewise.cli.config import read_config
from treewise.cli.keys import rl_aliases

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [
        *EXAMPLES.glob("*.py"),
        *EXAMPLES.glob("*.ipynb"),
        *(EXAMPLES / "configs").iterdir(),
        *(EXAMPLES / "data").iterdir(),
    ]
    assert not [path.name for path in files if f"{path.relative_to(EXAMPLES).as_posix()}" not in page]


def test_what_scripts_import_from_the_package_exists() -> None:
    missing = []
    for path in (*EXAMPLES.rglob("*.py"), *(EXAMPLES.parent / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("treewise"):
                module = importlib.import_module(str(node.module))
                names = [each.name for each in node.names if not hasattr(module, each.name)]
                missing += [f"{path}: {node.module}.{each}" for each in names if not find_spec(f"{node.module}.{each}")]
    assert not missing


CHECKS = """
assert report.passed
assert losses[-1] < losses[0] - 0.5
assert forest.share_ratio > 8
assert page.is_file()
"""
# In a process of its own: Jupyter's libraries warn, and start threads.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
notebook.cells.append(nbformat.v4.new_code_cell(sys.argv[2]))
nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": sys.argv[3]}}).execute()
print("".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ())))
"""


@pytest.mark.exhaustive
def test_the_notebook_of_the_walkthrough_runs_and_learns(tmp_path: Path) -> None:
    """Cell by cell in a Jupyter kernel; as the script that it is made from where there is no Jupyter."""
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        (tmp_path / "run.py").write_text((EXAMPLES / "walkthrough.py").read_text(encoding="utf-8") + CHECKS)
        (tmp_path / "data").symlink_to(EXAMPLES / "data")
        command = [sys.executable, "run.py"]
    else:
        notebook = str(EXAMPLES / "walkthrough.ipynb")
        (tmp_path / "examples").symlink_to(EXAMPLES)
        command = [sys.executable, "-c", EXECUTE, notebook, CHECKS, str(tmp_path)]
    folders = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | folders, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "share ratio" in done.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_made_of_its_script(name: str) -> None:
    script = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8") == as_notebook(script), (
        "python tests/examples/notebook.py writes it again"
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_script_begins_every_cell_with_a_marker(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n")
    assert len(re.findall(r"^# %%$", text, re.MULTILINE)) == len(re.findall(r"^# %% \[markdown\]$", text, re.MULTILINE))


@pytest.mark.parametrize("path", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_configurations_hold_known_keys(path: Path) -> None:
    is_rl = path.name == "rl.yaml"
    config = read_config(path, [], rl.KEYS, rl_aliases()) if is_rl else read_config(path)
    assert config.training["output_dir"]
