"""The choice of a device, its clock, and half precision that is slower."""

import pytest
import torch

from treewise import Trajectory, TreeEngine
from treewise.errors import ConfigError
from treewise.nn import device
from treewise.nn.device import chosen_device, synchronized_clock
from treewise.testing import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [("foo", "is not a device"), ("meta", "runs on cpu and cuda"), ("cuda:7", "finds no GPU|there are")],
)
def test_a_device_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--device is '{name}'.*({message})"):
        chosen_device(name)
    assert chosen_device("cpu") == CPU


def test_the_clock_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert synchronized_clock(CPU) <= synchronized_clock(torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)]


@pytest.mark.parametrize(("half", "words"), [(25.0, "4.0 times as long"), (150.0, "")])
def test_half_precision_that_is_slower_is_a_warning_once(half, words, monkeypatch, caplog):
    rates = {torch.bfloat16: half, torch.float32: 100.0}
    monkeypatch.setattr(device, "matmul_flops", lambda kind, dtype: rates[dtype])
    device.warn_of_slow_precision.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):  # as `bf16: true` has it
        for _ in range(2):
            TreeEngine(tiny_model(num_hidden_layers=1), check=False).step([Trajectory([1, 2, 3])])
    assert words in caplog.text
    assert len(caplog.records) == bool(words)
    device.warn_of_slow_precision.cache_clear()


def test_an_unknown_gpu_has_no_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unheard Of 9000")
    assert device.peak_flops(torch.device("cuda"), torch.bfloat16) is None
