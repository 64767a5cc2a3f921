"""What doctor finds of a machine that no test has run on."""

import pytest
import torch

from treewise.nn.attention import flex
from treewise.report.analysis import machine_facts


def test_what_no_test_has_run_on_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not {"system", "torch"} & set(machine_facts.untested(torch.device("cpu")))
    monkeypatch.setattr(machine_facts.platform, "system", lambda: "Windows")
    monkeypatch.setattr(torch, "__version__", "2.15.0+rocm7.1")
    monkeypatch.setattr(machine_facts, "card", lambda _: flex.Card(None, 65_536))
    said = machine_facts.untested(torch.device("cuda"))
    assert said["system"].startswith("Windows: tests run on Linux")
    assert said["torch"].startswith("2.15.0+rocm7.1: tests run with torch >=2.11")
    assert said["gpu"].startswith("ROCm: kernels ran on NVIDIA's 9.0, and were compiled, without a GPU, for 8.0, ")
    monkeypatch.setattr(machine_facts, "card", lambda _: flex.Card((7, 5), 65_536))
    assert machine_facts.untested(torch.device("cuda"))["gpu"].startswith("compute capability 7.5: ")
    monkeypatch.setattr(machine_facts, "card", lambda _: flex.Card((9, 0), 65_536))
    assert "gpu" not in machine_facts.untested(torch.device("cuda"))
