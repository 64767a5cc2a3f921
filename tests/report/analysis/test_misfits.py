"""Wheels, drivers and cards that do not fit one another, each in one line."""

from dataclasses import replace
from pathlib import Path

import pytest

from treewise.report.analysis import misfits
from treewise.report.analysis.misfits import Installed, driver_of, installed, misfit

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
FITTING = Installed("2.11.0+cu128", "12.8", False, True, (550, 54, 15), [(9, 0)], ARCHITECTURES)


def test_nothing_is_said_where_all_fits_or_no_device_is_here() -> None:
    assert misfit(FITTING) is None
    assert misfit(replace(FITTING, has_device=False, cuda=None)) is None
    assert misfit(replace(FITTING, is_rocm=True, cuda=None)) is None
    assert misfit(replace(FITTING, driver=None)) is None  # not known


def test_a_build_for_cpus_beside_a_device() -> None:
    line = misfit(replace(FITTING, torch="2.13.0+cpu", cuda=None, capabilities=[], architectures=()))
    assert line is not None
    assert line.startswith("torch 2.13.0+cpu is a build for CPUs, and a device of NVIDIA's is here: pip install")
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu128" in line


@pytest.mark.parametrize(
    ("cuda", "driver", "fits"),
    [
        ("12.8", (525, 60, 13), True),
        ("12.8", (525, 53), False),
        ("12.8", (470, 256, 2), False),
        ("13.0", (580, 65, 6), True),
        ("13.0", (570, 133, 20), False),
        ("14.0", (580, 65, 6), True),  # a release that is not known here
    ],
)
def test_drivers(cuda: str, driver: tuple[int, ...], fits: bool) -> None:
    line = misfit(replace(FITTING, cuda=cuda, driver=driver))
    assert (line is None) is fits
    if line is not None:
        assert f"for CUDA {cuda}, and {'.'.join(map(str, driver))} is installed: update the driver" in line
        assert ("or torch==2.11.0 from" in line) is (driver[0] >= 525 and cuda == "13.0")
        assert "\n" not in line


@pytest.mark.parametrize(
    ("capability", "fits"),
    [((7, 5), True), ((8, 9), True), ((7, 0), False), ((10, 3), True), ((11, 0), False), ((12, 1), True)],
)
def test_cards(capability: tuple[int, int], fits: bool) -> None:
    """A binary runs on later minor capabilities of its major one; PTX on all later cards."""
    line = misfit(replace(FITTING, capabilities=[(9, 0), capability]))
    assert (line is None) is fits
    if line is not None:
        assert f"no kernels for compute capability {capability[0]}.{capability[1]} (it has sm_75, " in line


def test_driver_of_its_file() -> None:
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.3\n"
    )
    assert driver_of(text) == (550, 54, 15)
    assert driver_of("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build") == (580, 65)
    assert driver_of("nothing") is None


def test_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(misfits.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(misfits, "DEVICE", tmp_path / "nvidia0")
    monkeypatch.setattr(misfits, "DRIVER", tmp_path / "version")
    assert not installed().has_device
    (tmp_path / "version").write_text("Kernel Module  550.54.15  Tue")
    found = installed()
    assert (found.has_device, found.driver) == (True, (550, 54, 15))
