"""The one place that asks torch for a compute capability."""

import platform
import re
from pathlib import Path

import pytest
import torch

import treewise
from treewise.nn.platform.card import capability_of, card_name

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gfx1030(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of AMD, whose numbers are those of one of NVIDIA's."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Radeon RX 6800")


def test_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert capability_of(CUDA) == (9, 0)
    assert card_name(CUDA) == "NVIDIA H200 (compute capability 9.0)"


@pytest.mark.usefixtures("gfx1030")
def test_other_chips_have_none() -> None:
    assert capability_of(CUDA) is None
    assert card_name(CUDA) == "AMD Radeon RX 6800"
    assert capability_of(CPU) is None
    assert card_name(CPU) == platform.machine()


def test_nobody_else_asks() -> None:
    asks = re.compile(r"cuda\.get_device_(capability|properties)\(")
    sources = Path(treewise.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if asks.search(path.read_text(encoding="utf-8"))] == ["card.py"]
