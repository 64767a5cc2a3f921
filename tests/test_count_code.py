"""`benchmarks/count_code.py`: what it counts of a step and of an online iteration, and what it leaves out."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import count_code
from benchmarks.count_code import Passed, run, run_online


def names(passed: Passed) -> dict[str, set[str]]:
    """The functions of each file."""
    found: dict[str, set[str]] = {}
    for file, _, name in passed.functions:
        found.setdefault(Path(file).relative_to(count_code.PACKAGE).as_posix(), set()).add(name)
    return found


def test_of_an_online_iteration_everything_is_counted_from_its_rollouts_to_its_log(tmp_path: Path) -> None:
    found = names(run_online(tmp_path, 8192))
    assert "OnlineTrainer._iteration" in found["rl/online/loop.py"]
    assert "TransformersSampler.sample_in_parts" in found["rl/samplers/transformers_sampler.py"]
    assert "guarded" in found["rl/tasks/calls.py"]  # in a thread that calls the reward function
    assert "credited" in found["rl/update.py"]
    assert "StepRunner.train_batch" in found["trainer/step.py"]
    assert "Journal.record" in found["rl/online/journal.py"]
    assert "trainer/checkpoint/manager.py" not in found  # saved after the last iteration alone
    assert "OnlineTrainer._evaluation" not in found["rl/online/loop.py"]


def test_of_a_step_the_loop_is_not_counted(tmp_path: Path) -> None:
    found = names(run(tmp_path, 8192))
    assert "StepRunner.train_batch" in found["trainer/step.py"]
    assert not [file for file in found if file.startswith("rl/")]


def test_functions_moves_and_lines_are_those_of_the_counted_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def first():\n    return [second(n) for n in (1, 2)]\n\n\ndef second(n):\n    return n\n"
    for room in "a", "b":
        Path(tmp_path, room).mkdir()
        Path(tmp_path, room, "code.py").write_text(source)
    monkeypatch.setattr(count_code, "PACKAGE", tmp_path)
    in_a, in_b = dict[str, Any](), dict[str, Any]()
    for room, space in (("a", in_a), ("b", in_b)):
        exec(compile(source, str(tmp_path / room / "code.py"), "exec"), space)
    in_a["second"] = in_b["second"]

    def counted(*_: object) -> Passed:
        passed = Passed()
        passed.begin()
        in_a["first"]()
        passed.end()
        in_b["first"]()
        return passed

    monkeypatch.setattr(count_code, "run", counted)
    monkeypatch.setattr(sys, "argv", ["count_code", "--json", str(tmp_path / "found.json")])
    count_code.main()
    capsys.readouterr()
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["files"], found["lines_of_files"]) == (2, 12)
    assert (found["functions"], found["lines_of_functions"]) == (2, 4)
    assert found["moves"] == 1
