"""Copies, free memory, out-of-memory errors, the clock and autocast, on the CPU and on a pretended GPU."""

import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from treewise.errors import ConfigError
from treewise.nn import device
from treewise.nn.device import (
    Autocast,
    chosen_device,
    free_bytes,
    is_out_of_memory,
    keep_freed_memory,
    synchronized_clock,
    to_device,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [("foo", "is not a device"), ("meta", "runs on cpu and cuda"), ("cuda:7", "finds no GPU|there are")],
)
def test_a_device_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--device is '{name}'.*({message})"):
        chosen_device(name)
    assert chosen_device("cpu") == CPU


def test_arrays_keep_their_dtype_unless_another_is_given() -> None:
    assert to_device(np.arange(3, dtype=np.int32), CPU).dtype == torch.int32
    assert to_device(np.arange(3, dtype=np.int32), CPU, torch.long).tolist() == [0, 1, 2]


def test_a_container_limits_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_bytes(CPU) < 2**50
    monkeypatch.setattr(device, "_cgroup_room", lambda: 1000)
    assert free_bytes(CPU) == 1000


def test_unused_blocks_of_the_caching_allocator_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert free_bytes(torch.device("cuda", 0)) == 130


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),  # of pinned memory
        (RuntimeError("shape mismatch"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_errors_of_failed_allocations(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_clock_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert synchronized_clock(CPU) <= synchronized_clock(torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)]


def test_autocast_is_kept_for_later() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = Autocast.now("cpu")
    one = torch.ones(2, 2)
    with kept.again():
        assert (one @ one).dtype == torch.bfloat16
    assert (one @ one).dtype == torch.float32


FAULTS = """
import resource, torch
from treewise.nn.device import keep_freed_memory

def num_faults():
    for _ in range(4):  # where pieces of memory that were freed lie is settled after a few
        torch.ones(2**24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(num_faults(), keep_freed_memory(), num_faults())
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_kept_memory_is_not_faulted_in_again() -> None:
    run = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    returned, is_kept, kept = run.stdout.split()
    assert is_kept == "True"
    assert int(kept) < 20 < int(returned)  # huge pages: 32 of 2 MiB each time


def test_memory_of_other_systems_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()


def test_an_array_that_cannot_be_written_to_is_copied():
    array = np.arange(3)
    array.flags.writeable = False
    tensor = to_device(array, torch.device("cpu"))  # torch warns where it shares such memory
    tensor[0] = 7
    assert array.tolist() == [0, 1, 2]
