"""`treewise doctor --gpu`, with the CPU in the place of a GPU: FlexAttention's uncompiled operator."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from treewise.bench import gpu_facts, hardware
from treewise.bench.calibration import measure
from treewise.bench.calibration.rates import load
from treewise.cli.commands import doctor
from treewise.cli.main import main
from treewise.nn.attention.kernel_cases import CASES

NAMES = ("one block", "broken")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_facts, "CASES", {name: CASES[name] for name in NAMES})


@pytest.mark.exhaustive
def test_the_command_passes_where_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu", "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["gpu"]
    assert facts["passed"]
    assert facts["issue"] is None
    assert list(facts["kernels"]) == list(NAMES)
    lines = "\n".join(doctor.as_lines(facts))
    assert "one block" in lines


@pytest.mark.exhaustive
def test_wrong_kernels_give_a_sentence_for_an_issue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = gpu_facts.flex_attention_tree
    monkeypatch.setattr(gpu_facts, "flex_attention_tree", lambda *args: 1.01 * own(*args))
    assert main(["doctor", "--gpu", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "a check FAILED" in out
    assert f"for an issue: treewise 0.1.0, torch {torch.__version__}, transformers" in out
    assert "one block: out " in out.split("for an issue: ")[1]


def test_cases_beyond_the_time_are_named_and_have_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu", "--device", "cpu", "--max_seconds", "1e-9"]) == 1
    out = capsys.readouterr().out
    assert "not run, for lack of time (--max_seconds): one block, broken" in out
    assert out.endswith("not all checks RAN\n")


def test_what_ran_before_sigterm_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It came within the second case."""
    check, asked = gpu_facts.check_case, []

    def check_case(device: torch.device, name: str):
        asked.append(name)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return check(device, name)

    monkeypatch.setattr(gpu_facts, "check_case", check_case)
    assert main(["doctor", "--gpu", "--device", "cpu"]) == 128 + signal.SIGTERM
    captured = capsys.readouterr()
    assert "one block                          as it should be" in captured.out
    assert "not run, for it was ended before: broken" in captured.out
    assert captured.out.endswith("not all checks RAN\n")
    assert "ended by SIGTERM" in captured.err
    asked.clear()
    assert main(["doctor", "--gpu", "--device", "cpu", "--json"]) == 128 + signal.SIGTERM
    assert json.loads(capsys.readouterr().out)["gpu"]["not run"] == ["broken"]


def test_without_a_gpu_the_command_says_how_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--gpu"]) == 2
    assert "finds no GPU here; --device cpu runs the checks on the CPU" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from treewise.rl.samplers import server_check

    finding = server_check.ServerFinding
    found = {
        "http://dead": [finding("answers", passed=False, text="no answer")],
        "http://odd": [
            finding("answers", passed=True, text="vLLM"),
            finding("seeds", passed=False, text="not honoured"),
        ],
    }
    monkeypatch.setattr(server_check, "check_server", lambda url, model: found[url])
    assert main(["doctor", "--sampler", "http://odd"]) == 1  # it answers, and something would be wrong
    assert main(["doctor", "--sampler", *found]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: http://dead does not answer as a server that samples")
    assert captured.out.count("not honoured") == 2


def test_a_calibration_is_stored_by_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One case of each part: no time is left for more."""
    monkeypatch.setattr(measure, "USUAL", {"cpu": (torch.float32, "qwen3-tiny", "tiny")})
    monkeypatch.setattr(measure, "calibrate", partial(measure.calibrate, seconds=0.0))
    assert main(["doctor", "--device", "cpu", "--calibrate", str(tmp_path / "new")]) == 0
    [path] = (tmp_path / "new").iterdir()
    assert path.name == f"calibration-{hardware()}.json"
    assert load(path).about["domain"]["shape"] == "qwen3-tiny"
    out = capsys.readouterr().out
    assert f"written to {path}" in out
    assert "us of the host in a step" in out
