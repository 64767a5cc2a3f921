"""The GPU of a device, as kernels, tiles and messages are chosen by it."""

import functools
import platform
from typing import NamedTuple

import torch

Capability = tuple[int, int]


class Card(NamedTuple):
    """What tiles depend on. capability: as of `capability_of`. shared_bytes: shared memory that one block may have."""

    capability: Capability | None
    shared_bytes: int


def capability_of(device: torch.device) -> Capability | None:
    """The compute capability of one of NVIDIA's GPUs; None of a CPU, and on ROCm, whose numbers are those of other
    chips (gfx10 reports (10, x), as NVIDIA's sm_100 does).
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


def capabilities() -> list[tuple[int, int]]:
    """Of all GPUs that torch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_capability(index) for index in range(count)]


@functools.cache
def card(device: torch.device) -> Card:
    """The GPU of a device."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Card(capability_of(device), shared)


def card_name(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3 (compute capability 9.0)`, or the processor's architecture."""
    if device.type != "cuda":
        return platform.machine()
    name, capability = torch.cuda.get_device_name(device), capability_of(device)
    return name if capability is None else f"{name} (compute capability {capability[0]}.{capability[1]})"
