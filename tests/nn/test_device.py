"""Copies, free memory, out-of-memory errors, the clock and autocast, on the CPU and on a pretended GPU."""

import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from treewise import Trajectory, TreeEngine
from treewise.errors import ConfigError
from treewise.nn import device
from treewise.nn.device import (
    chosen_device,
    free_bytes,
    keep_freed_memory,
    part_of_torch,
    synchronized_clock,
    untested_torch_named,
    warn_of_untested_torch,
)
from treewise.nn.tensors import Autocast, is_out_of_memory, to_device
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


def test_arrays_keep_their_dtype_unless_another_is_given() -> None:
    assert to_device(np.arange(3, dtype=np.int32), CPU).dtype == torch.int32
    assert to_device(np.arange(3, dtype=np.int32), CPU, torch.long).tolist() == [0, 1, 2]


def test_a_container_limits_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_bytes(CPU) < 2**50
    monkeypatch.setattr(device, "_cgroup_room", lambda: 1000)
    assert free_bytes(CPU) == 1000


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 118), (0.1, 68), (0.03, 0)])
def test_unused_pieces_of_the_caching_allocator_are_free_and_fragments_are_not(
    fraction: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 reserved bytes 20 are in use, and 12 are the rest of pieces in use; of what is free on the GPU, as much as
    the process may still reserve."""
    stats = {"reserved_bytes.all.current": 50, "active_bytes.all.current": 20, "inactive_split_bytes.all.current": 12}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    assert free_bytes(torch.device("cuda", 0)) == expected


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
import mmap, resource, torch
from treewise.nn.device import keep_freed_memory

def num_faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def most_of_last(number):
    # glibc first holds some freed pieces of few bytes back (tcache), and the next tensor lies behind the last one.
    found = [num_faults(lambda: torch.ones(2**24)) for _ in range(number)]
    return max(found[-3:])

fresh = num_faults(lambda: mmap.mmap(-1, 2**26).write(bytes(2**26)))
print(fresh, most_of_last(6), keep_freed_memory(), most_of_last(40))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_kept_memory_is_not_faulted_in_again() -> None:
    run = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    fresh, returned, is_kept, kept = run.stdout.split()
    if int(fresh) < 20:
        pytest.skip("this system counts no page faults")  # or has pages of more than 2 MiB
    assert is_kept == "True"
    assert int(kept) < 10 < int(returned)  # huge pages: 32 of 2 MiB


KERNELS = """
import psutil, sys, torch
from treewise.nn.device import keep_few_kernels

if sys.argv[1] == "few":
    keep_few_kernels()
weight, rows = torch.ones(384, 384, dtype=torch.bfloat16), torch.ones(420, 384, dtype=torch.bfloat16)
for number in range(1, 421):
    rows[:number] @ weight
    if number == 20:
        before = psutil.Process().memory_info().rss
print((psutil.Process().memory_info().rss - before) // 2**20)
"""


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies no bfloat16 here")
def test_few_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 shapes; set once torch is imported, before the first product."""
    for name in device._KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", KERNELS]
    all_kept, few = (int(subprocess.check_output([*command, each], text=True)) for each in ("all", "few"))
    assert 2 * few < all_kept  # 56 and 263 MiB on a Zen 4


def test_memory_of_other_systems_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()


def test_an_array_that_cannot_be_written_to_is_copied():
    array = np.arange(3)
    array.flags.writeable = False
    tensor = to_device(array, torch.device("cpu"))  # torch warns where it shares such memory
    tensor[0] = 7
    assert array.tolist() == [0, 1, 2]


def test_a_part_that_a_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert part_of_torch("ops.aten.add.Tensor") is torch.ops.aten.add.Tensor
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    for path in ("ops.aten._no_such_kernel", "ops.aten.add.no_overload", "_no_such_module.name"):
        with pytest.raises(ConfigError, match=rf"torch 2\.15\.0\+cpu has no torch\.{path}, .* install torch >=2\.11"):
            part_of_torch(path)


@pytest.mark.parametrize(("version", "is_named"), [("2.13.1+cpu", False), ("2.11.0", False), ("2.15.0a0+git1", True)])
def test_errors_inside_of_a_torch_that_no_test_ran_with_name_it(
    version: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(TypeError, match="unexpected keyword") as found, untested_torch_named():
        raise TypeError("unexpected keyword")
    notes = [f"torch {version}: tests run with torch >=2.11,<2.14"] * is_named
    assert getattr(found.value, "__notes__", []) == notes
    warn_of_untested_torch.cache_clear()
    for _ in range(2):
        warn_of_untested_torch()
    assert [each.startswith(notes[0]) for each in caplog.messages] == [True] * is_named
    warn_of_untested_torch.cache_clear()


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
