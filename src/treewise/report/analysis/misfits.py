"""In one line why a GPU that is here cannot be used: a wheel for CPUs, a driver too old for it, a card beyond it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from treewise.nn.platform.card import capabilities

# The oldest driver of Linux for each major release of CUDA, whose minor ones it then runs, too (CUDA's release notes,
# "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility").
LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
INDEX = "https://download.pytorch.org/whl"
DEVICE = Path("/dev/nvidia0")
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Installed:
    """What decides. cuda: that torch was built for (`12.8`), None of a build for CPUs or ROCm. driver: of NVIDIA's,
    None without. capabilities: of the cards that torch finds; architectures: that its kernels were built for (`sm_90`,
    `compute_90`)."""

    torch: str
    cuda: str | None
    is_rocm: bool
    has_device: bool
    driver: tuple[int, ...] | None
    capabilities: Sequence[tuple[int, int]]
    architectures: Sequence[str]


def misfit(found: Installed) -> str | None:
    """What does not fit, and what to do; None where all does, or where no NVIDIA device is here."""
    if not found.has_device or found.is_rocm:
        return None
    release = found.torch.partition("+")[0]
    if found.cuda is None:
        return (
            f"torch {found.torch} is a build for CPUs, and a device of NVIDIA's is here: pip install "
            f"--force-reinstall torch=={release} --index-url {INDEX}/cu128"
        )
    major = int(found.cuda.partition(".")[0])
    least = LEAST_DRIVER.get(major)
    if found.driver is not None and least is not None and found.driver[:2] < least:
        older = max((each for each, driver in LEAST_DRIVER.items() if driver <= found.driver[:2]), default=None)
        wheel = "" if older is None or older < 12 else f", or torch=={release} from {INDEX}/cu126 or cu128"
        return (
            f"torch {found.torch} needs driver {least[0]}.{least[1]} or later for CUDA {found.cuda}, and "
            f"{'.'.join(map(str, found.driver))} is installed: update the driver{wheel}"
        )
    for capability in found.capabilities:
        if not _runs(capability, found.architectures):
            return (
                f"torch {found.torch} has no kernels for compute capability {capability[0]}.{capability[1]} (it has "
                f"{', '.join(found.architectures)}): take a wheel of another CUDA ({INDEX}), or another release"
            )
    return None


def _runs(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Binary code runs on its major capability from its minor one on, PTX (`compute_`) on every later card."""
    if not architectures:
        return True
    for each in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", each)
        if match is None:
            continue
        kind, own = match[1], (int(match[2]), int(match[3]))
        if own <= capability if kind == "compute" else own[0] == capability[0] and own[1] <= capability[1]:
            return True
    return False


def installed() -> Installed:
    """Of this machine. Asks files of the driver, not `nvidia-smi`, which containers may lack."""
    found = capabilities()
    return Installed(
        torch.__version__,
        torch.version.cuda,
        torch.version.hip is not None,
        bool(found) or DEVICE.exists() or DRIVER.exists(),
        driver_of(DRIVER.read_text()) if DRIVER.exists() else None,
        found,
        torch.cuda.get_arch_list() if found else (),
    )


def driver_of(text: str) -> tuple[int, ...] | None:
    """The version in `/proc/driver/nvidia/version`: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15 ...`."""
    match = re.search(r"\b(\d{3,})\.(\d+)(?:\.(\d+))?\b", text)
    return None if match is None else tuple(int(each) for each in match.groups() if each is not None)
