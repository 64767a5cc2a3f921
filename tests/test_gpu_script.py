"""`make gpu` where there is no GPU: stages that fail, hang, lack a package or come too late, and what each leaves."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_stages
from benchmarks.gpu import STAGES, Machine, Run, Stage, TestResults

HERE = "import json, pathlib, sys; out = pathlib.Path(sys.argv[1])\n"


def python(code: str) -> tuple[str, ...]:
    return "{python}", "-c", HERE + code.replace("{", "{{").replace("}", "}}"), "{out}"


@pytest.fixture
def machine() -> Machine:
    facts = {"python": "3.12.3", "torch": "2.11.0+cu130", "card": "NVIDIA H100 80GB HBM3"}
    return Machine(sys.executable, "nvidia-h100-80gb-hbm3", facts, ("trl",), (), 4)


def run_of(machine: Machine, folder: Path, seconds: float = 1e6) -> Run:
    return Run(machine, "cuda", folder / machine.card, time.monotonic() + seconds)


def test_a_stage_that_fails_or_cannot_run_stops_none_that_follow(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = (
        Stage("fails", "ends with an error", python("print('reason'); sys.exit(3)"), 1, 100, ()),
        Stage("lacks", "needs what is not there", python(""), 1, 100, ("torch", "trl")),
        Stage("gone", "a command that is not there", ("/nowhere/python",), 1, 100, ()),
        Stage(
            "works",
            "writes",
            python("out.write_text(json.dumps({'a': 7}))"),
            1,
            100,
            (),
            lambda each: [f"a {each['a']}"],
        ),
        Stage("odd", "writes something else", python("out.write_text('[')"), 1, 100, (), lambda each: each["a"]),
        Stage("late", "needs more than is left", python(""), 10**7, 10**8, ()),
    )
    monkeypatch.setattr(gpu, "STAGES", table)
    run = run_of(machine, tmp_path)
    run.all(list(table))
    assert {each["stage"]: each["status"] for each in run.done} == {
        **{
            "fails": "failed",
            "lacks": "skipped",
            "gone": "failed",
            "works": "passed",
            "odd": "passed",
            "late": "skipped",
        },
    }
    why = {each["stage"]: each["why"] for each in run.done}
    assert why["fails"] == "exit code 3"
    assert why["lacks"] == "trl is not installed (WHEELS=)"
    assert why["gone"].startswith("FileNotFoundError")
    assert "s are left, and it needs 10000000" in why["late"]
    assert "   reason" in capsys.readouterr().out
    assert "   reason" in (run.folder / "log.txt").read_text()
    saved = json.loads((run.folder / "run.json").read_text())
    assert [each["stage"] for each in saved["stages"]] == [each.name for each in table]
    page = (run.folder / "summary.md").read_text()
    assert "on NVIDIA H100 80GB HBM3" in page
    assert "| lacks | skipped | 0 | trl is not installed (WHEELS=) |" in page
    assert "\na 7\n" in page
    assert "odd.json cannot be read: JSONDecodeError" in page


def test_a_stage_is_ended_at_its_limit_with_all_that_it_started(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had is there. The limit is over as soon as it has something."""
    code = """
import signal, subprocess
waits = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", waits])
out.write_text(json.dumps({"pid": child.pid}))
signal.pause()
"""
    stage = Stage("hangs", "never ends", python(code), 0, 100, ())
    monkeypatch.setattr(gpu, "STAGES", (stage,))
    monkeypatch.setattr(gpu, "SECONDS_TO_END", 0.1)
    wait = gpu.subprocess.Popen.wait
    out = tmp_path / machine.card / "hangs.json"

    def over(self, timeout=None):
        if timeout is not None and timeout > 1:
            while not out.exists() or not out.read_text():
                pass
            raise gpu.subprocess.TimeoutExpired(self.args, timeout)
        return wait(self, timeout)

    monkeypatch.setattr(gpu.subprocess.Popen, "wait", over)
    run = run_of(machine, tmp_path)
    run.all([stage])
    (record,) = run.done
    assert record["status"] == "cut short"
    assert record["why"] == "after 100 s; what it had is saved"
    pid = json.loads(out.read_text())["pid"]
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_signal_ends_the_stage_and_leaves_out_the_rest(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    table = (Stage("one", "", python(code), 1, 100, ()), Stage("two", "", python(""), 1, 100, ()))
    monkeypatch.setattr(gpu, "STAGES", table)
    run = run_of(machine, tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with gpu.ending_by_signal():
        run.all(list(table))
    assert [(each["status"], each["why"]) for each in run.done] == [
        ("cut short", "the run was ended"),
        ("skipped", "the run was ended"),
    ]
    assert signal.getsignal(signal.SIGTERM) is before


LINES = """
[gw0] [  3%] PASSED tests/test_cuda_first.py::test_kernels_for_the_heads_of_published_models[tiny-float32]
tests/test_cuda_first.py::test_autocast[None]
[gw1] [  6%] FAILED tests/test_cuda_first.py::test_autocast[None]
tests/test_cuda_first.py::test_scores_and_losses_of_any_kind PASSED      [ 50%]
tests/test_cuda_first.py::test_a_trainer_of_trl SKIPPED (could not import 'trl') [ 99%]
ERROR tests/test_cuda_first.py::test_adapters[kept-200] - RuntimeError: CUDA error
FAILED tests/test_cuda_first.py::test_autocast[None] - AssertionError: assert 0.2 < 0.05
SKIPPED [1] tests/test_cuda_first.py:384: could not import 'trl'
=========================== short test summary info ============================
"""


def test_outcomes_are_read_as_they_come(tmp_path: Path) -> None:
    results = TestResults(tmp_path / "tests.json")
    for line in LINES.splitlines():
        results.read(line)
    found = json.loads((tmp_path / "tests.json").read_text())
    assert found["counts"] == {"error": 1, "failed": 1, "passed": 2, "skipped": 1}
    assert list(gpu.of_tests(found)) == [
        "1 error, 1 failed, 2 passed, 1 skipped",
        "* failed: `test_autocast[None]` AssertionError: assert 0.2 < 0.05",
        "* error: `test_adapters[kept-200]` RuntimeError: CUDA error",
    ]


def test_the_page_shows_kernels_of_attention() -> None:
    right, seconds = {"": {"passed": True}}, {"tau2": {"forward": 0.002, "both": 0.0071}}
    whole = {"right": right, "backwards": {"times": 500, "changed": 3, "beyond": 0}, "seconds": seconds, "speed": 1.31}
    found = {
        "kernels": {"flash": {"sizes": {"128": whole | {"lengths": {"graphs": 0}}}}, "cudnn": {"skipped": "too old"}}
    }
    assert list(gpu.of_attention(found))[2:] == [
        "| flash, 128 | 1 of 1 | 0 of 500 | 0 | tau2 2.00 7.10 | 1.31 |",
        "| cudnn: too old | | | | | |",
    ]


def test_the_table_is_whole() -> None:
    assert len({each.name for each in STAGES}) == len(STAGES)
    for stage in STAGES:
        assert 0 < stage.least <= stage.most <= 600
        if "benchmarks/gpu_stages.py" in stage.command:
            assert stage.name in gpu_stages.STAGES
    assert sum(stage.least for stage in STAGES[:3]) <= 4 * 60  # what `MINUTES=4` is for
    names = {name for stage in STAGES for name in stage.needs}
    assert not names & {"beartype", "datasets", "jaxtyping"}


def test_without_xdist_tests_run_one_after_the_other(machine: Machine, tmp_path: Path) -> None:
    (stage,) = [each for each in STAGES if each.name == "tests"]
    run = run_of(machine, tmp_path)
    assert run._words(stage, tmp_path / "out", 100)[-4:-2] == ["-n", "4"]
    run.machine = Machine(machine.python, machine.card, machine.facts, ("xdist",), (), 4)
    assert "-n" not in run._words(stage, tmp_path / "out", 100)


def test_the_first_python_with_what_the_device_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = {"python": "3.12", "torch": "2.11.0", "cuda": "13.0", "has_gpu": True, "card": "NVIDIA H200"}
    known = {
        "own": "ModuleNotFoundError: No module named 'torch'",
        sys.executable: facts | {"torch": "2.13.0+cpu", "has_gpu": False, "card": None, "missing": []},
        "python3": facts | {"missing": ["annotated_types", "trl"]},
    }
    monkeypatch.setenv("PYTHON", "own")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)

    def probe(python: str, _: tuple[str, ...]) -> dict | str:
        found = known.get(python, "gone")
        return found if isinstance(found, str) else json.loads(json.dumps(found))

    monkeypatch.setattr(gpu, "probe", probe)
    found = gpu.find_machine("cuda", None)
    assert (found.python, found.card, found.missing) == ("python3", "nvidia-h200", ("trl",))
    assert found.paths[-1] == str(tmp_path / "build" / "gpu" / "stand_ins")  # of annotated_types
    assert gpu.find_machine("cpu", None).python == sys.executable
    known["python3"] = "gone"
    said = gpu.find_machine("cuda", None)
    assert "own: ModuleNotFoundError" in said
    assert "torch 2.13.0+cpu finds no GPU" in said


def test_the_stand_in_has_what_treewise_asks_of_the_package() -> None:
    made: dict = {}
    exec(gpu.STAND_INS["annotated_types"], made)
    assert (made["Ge"](3).ge, made["Lt"](4).lt) == (3, 4)
    assert made["Le"](1) == made["Le"](1)
    used = {
        name.strip()
        for path in (Path(gpu.ROOT) / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("from annotated_types import ")
        for name in line.partition("import")[2].split(",")
    }
    assert used <= set(made)


def test_wheels_are_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "beartype-0.1-py3-none-any.whl", "w") as archive:
        archive.writestr("beartype/__init__.py", "")
        archive.writestr("beside/deeper.py", "ANSWER = 42")
        archive.writestr(
            "beartype.pth", "import sys; sys.path.insert(0, __import__('beartype').__path__[0] + '/../beside')"
        )
    assert (gpu.unpack(tmp_path, tmp_path / "site") / "beartype" / "__init__.py").exists()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert subprocess.run([sys.executable, "-c", "from deeper import ANSWER"], env=environment).returncode == 0
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="no wheel"):
        gpu.unpack(tmp_path / "empty", tmp_path / "site")


def test_the_page_shows_committed_results() -> None:
    file = gpu.ROOT / "benchmarks" / "results" / "bench-nvidia-h100-80gb-hbm3.json"
    lines = list(gpu.of_bench(json.loads(file.read_text())))
    assert "| qwen3-1.7b, tau2, torch varlen | tree | 1.014 | 8.51 | 1.03 |  | 65.9 | 3.5 |" in lines


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in gpu_stages.STAGES if name not in ("layers", "trl")])
def test_every_stage_runs_on_a_cpu_with_tiny_shapes(name: str, tmp_path: Path) -> None:
    """As `make gpu GPU_ARGS="--device cpu"` runs it, but in this process; its page shows a row of all that it has."""
    out = tmp_path / f"{name}.json"
    args = argparse.Namespace(device="cpu", size="tiny", seconds=200.0, out=out)
    assert gpu_stages.STAGES[name](args) == 0
    (stage,) = [each for each in STAGES if each.name == name]
    lines = gpu.summarised(stage, out)
    assert lines
    assert not any("cannot be read" in line or "failed" in line for line in lines), lines
    found = json.loads(out.read_text())
    if stage.summary is gpu.of_bench:
        for row in found["rows"]:
            contestants = row["contestants"]
            assert {"flat", "tree", "tree@20"} <= set(contestants)
            assert all(each["seconds"]["median"] > 0 for each in contestants.values()), contestants
            assert contestants["flat"]["kernel"] == {"name": "sdpa", "seconds": {}}


def test_the_stage_of_layers_saves_each_row_and_why_others_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_stages, "LAYERS", ("plain", "liger"))
    out = tmp_path / "layers.json"
    args = argparse.Namespace(device="cpu", size="tiny", seconds=100.0, out=out)
    assert gpu_stages.STAGES["layers"](args) == 0
    found = json.loads(out.read_text())
    plain, liger = found["layers"].values()
    assert set(plain) == {"ratio-6.5", "tau2"}
    assert all(each["launches"] > 0 and each["mfu"] > 0 for each in plain.values())
    assert "liger" in liger["skipped"]
    lines = list(gpu.of_layers(found))
    assert len(lines) == 2 + 3
    assert lines[2].startswith("| plain, ratio-6.5 |")
    assert lines[-1].startswith("| liger: ")


def test_layers_of_a_kind_that_fails_lose_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails for one of its lengths keeps the other; and the stage says so with its exit code."""
    steps_of, out = gpu_stages._steps_of, tmp_path / "layers.json"

    def steps(model: object, workload: str, *more: object) -> dict:
        if workload == "tau2" and not done:
            done.append(workload)
            raise RuntimeError("Triton Error [CUDA]: out of resource\nmore")
        return steps_of(model, workload, *more)

    done: list[str] = []
    monkeypatch.setattr(gpu_stages, "_steps_of", steps)
    monkeypatch.setattr(gpu_stages, "LAYERS", ("plain", "plain again"))
    monkeypatch.setattr(gpu_stages, "fuse", lambda *_: None)
    assert gpu_stages.STAGES["layers"](argparse.Namespace(device="cpu", size="tiny", seconds=100.0, out=out)) == 1
    found = json.loads(out.read_text())["layers"]
    assert set(found["plain"]) == {"ratio-6.5", "failed"}
    assert set(found["plain again"]) == {"ratio-6.5", "tau2"}
    assert "| plain: RuntimeError: Triton Error [CUDA]: out of resource | | | | | |" in gpu.of_layers({"layers": found})


def test_a_budget_is_profiled_where_the_whole_tree_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_step, out = gpu_stages.profile_step, tmp_path / "profile.json"

    def full(*given: object) -> object:
        if not json.loads(out.read_text() if out.exists() else "{}"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return profile_step(*given)

    monkeypatch.setattr(gpu_stages, "profile_step", full)
    assert gpu_stages.STAGES["profile"](argparse.Namespace(device="cpu", size="tiny", seconds=100.0, out=out)) == 1
    lines = list(gpu.of_profile(json.loads(out.read_text())))
    assert lines[0] == "whole: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
    assert lines[1].startswith("at 20: ")
