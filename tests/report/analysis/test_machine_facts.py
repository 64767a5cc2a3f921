"""What doctor finds: kernels that do not compile, and what no test has run on."""

import pytest
import torch

from treewise.nn.attention import flex
from treewise.nn.attention.kernel_cases import CASES
from treewise.report.analysis import machine_facts


def test_a_kernel_that_does_not_compile_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no triton")

    monkeypatch.setattr(machine_facts, "CASES", {"one block": CASES["one block"]})
    monkeypatch.setattr(machine_facts, "flex_attention_tree", broken)
    facts = machine_facts.check_gpu(torch.device("cpu"), 60)
    assert facts["issue"].endswith("one block: RuntimeError: no triton")


def test_what_no_test_has_run_on_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not {"system", "torch"} & set(machine_facts.untested(torch.device("cpu")))
    monkeypatch.setattr(machine_facts.platform, "system", lambda: "Windows")
    monkeypatch.setattr(torch, "__version__", "2.15.0+rocm7.1")
    monkeypatch.setattr(machine_facts, "card", lambda _: flex.Card(None, 65_536))
    said = machine_facts.untested(torch.device("cuda"))
    assert said["system"].startswith("Windows: tests run on Linux")
    assert said["torch"].startswith("2.15.0+rocm7.1: tests run with torch >=2.11")
    assert said["gpu"].startswith("ROCm: tests run on no GPU")
    monkeypatch.setattr(machine_facts, "card", lambda _: flex.Card((7, 5), 65_536))
    assert machine_facts.untested(torch.device("cuda"))["gpu"].startswith("compute capability 7.5: ")
