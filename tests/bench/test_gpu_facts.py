"""What doctor says of a GPU, and its kernels case by case: right, wrong, not compiling, ended."""

from time import perf_counter

import pytest
import torch

from treewise.bench import gpu_facts, varlen
from treewise.bench.gpu_facts import KernelChecks
from treewise.bench.side_by_side import Died
from treewise.nn.attention.kernel_cases import CASES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_facts, "CASES", {name: CASES[name] for name in ("one block", "broken")})


def in_time() -> float:
    return perf_counter() + 1e6


@pytest.mark.parametrize("message", ["no triton", ""])
def test_a_kernel_that_does_not_compile_is_shown(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(gpu_facts, "flex_attention_tree", broken)
    checks = KernelChecks()
    checks.run(CPU, in_time())
    assert f": one block: RuntimeError: {message}; broken: RuntimeError" in checks.facts(CPU)["issue"]


def test_processes_run_the_cases_and_those_that_end_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiles in itself."""
    asked = []

    def side_by_side(work, names, num_processes, deadline):
        asked.append((work.func, work.args, num_processes, gpu_facts.os.environ["TORCHINDUCTOR_COMPILE_THREADS"]))
        yield names[1], {"passed": True, "shown": "fine", "seconds": [5.0, 1.0]}
        yield names[0], Died(-11)

    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(gpu_facts, "side_by_side", side_by_side)
    checks, told = KernelChecks(), []
    checks.run(CPU, in_time(), 3, lambda name, each: told.append(name))
    assert asked == [(gpu_facts.check_case, (CPU,), 3, "1")]
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in gpu_facts.os.environ
    assert told == ["broken", "one block"]  # as they ended
    facts = checks.facts(CPU)
    assert (list(facts["kernels"]), facts["compile_seconds"], facts["passed"]) == (["one block", "broken"], 4.0, False)
    assert facts["issue"].endswith("one block: its process ended by itself, with code -11")


def test_what_was_found_before_an_interruption_is_there() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    checks = KernelChecks()
    with pytest.raises(KeyboardInterrupt):
        checks.run(CPU, in_time(), None, interrupt)
    facts = checks.facts(CPU)
    assert (list(facts["kernels"]), facts["not run"]) == (["one block"], ["broken"])
    assert (facts["passed"], facts["issue"]) == (False, None)


def test_card_driver_kernels_and_who_takes_which(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton": "3.6.0", "flash-attn-4": "4.0.0b36"}
    monkeypatch.setattr(gpu_facts, "installed_version", installed.get)
    monkeypatch.setattr(gpu_facts, "_driver", lambda: "580.159.04")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    varlen.kernels.cache_clear()
    facts = gpu_facts.gpu_facts(CUDA)
    varlen.kernels.cache_clear()
    assert facts["card"] == "NVIDIA H100 80GB HBM3 (compute capability 9.0)"
    assert (facts["driver"], facts["compiled kernels"]) == ("580.159.04", "/cache")
    assert facts["kernels"] == "triton 3.6.0, flash-attn-4 4.0.0b36"
    assert facts["not installed"].startswith("flash-attn, flash-attn-3, ")
    assert (
        facts["in bfloat16"]
        == "trees take flex, packed flat rows of the benchmarks the fastest of cudnn sdpa, torch varlen"
    )
    assert facts["in float32"] == "trees take flex, packed flat rows of the benchmarks sdpa"


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_facts._driver() == "unknown (nvidia-smi does not answer)"
