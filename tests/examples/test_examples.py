"""The examples are listed, the walk-through runs as it stands, and configurations hold known keys."""

import re
import runpy
from pathlib import Path

import pytest

from treewise.cli.commands import rl
from treewise.cli.config import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [*EXAMPLES.glob("*.py"), *(EXAMPLES / "configs").iterdir(), *(EXAMPLES / "data").iterdir()]
    assert not [path.name for path in files if f"{path.relative_to(EXAMPLES).as_posix()}" not in page]


def test_the_walkthrough_runs_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(EXAMPLES / "walkthrough.py"))
    assert names["report"].passed
    assert names["losses"][-1] < names["losses"][0] - 0.5
    assert names["forest"].share_ratio > 8
    assert names["page"].is_file()
    assert "share ratio" in capsys.readouterr().out


def test_the_walkthrough_begins_every_cell_with_a_marker() -> None:
    text = (EXAMPLES / "walkthrough.py").read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n")
    assert len(re.findall(r"^# %%$", text, re.MULTILINE)) == len(re.findall(r"^# %% \[markdown\]$", text, re.MULTILINE))


@pytest.mark.parametrize("path", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_configurations_hold_known_keys(path: Path) -> None:
    is_rl = path.name == "rl.yaml"
    config = read_config(path, [], rl.KEYS, rl.aliases()) if is_rl else read_config(path)
    assert config.training["output_dir"]
