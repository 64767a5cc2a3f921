"""Free memory on the CPU and on a pretended GPU, and what is kept."""

import platform
import subprocess
import sys

import pytest
import torch

from treewise.nn.platform import memory
from treewise.nn.platform.memory import free_bytes, keep_freed_memory

CPU = torch.device("cpu")


def test_a_container_limits_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_bytes(CPU) < 2**50
    monkeypatch.setattr(memory, "_cgroup_room", lambda: 1000)
    assert free_bytes(CPU) == 1000


V1 = {"memory/memory.limit_in_bytes": "4000", "memory/memory.usage_in_bytes": "3000"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "4000", "memory.current": "3000", "memory.stat": "anon 2500\ninactive_file 400"}, 1400),
        ({"memory.max": "4000", "memory.current": "5000", "memory.stat": "anon 5000"}, 0),
        ({**V1, "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 400"}, 1400),
    ],
)
def test_a_limit_is_read_from_both_kinds_of_cgroups(files, expected, tmp_path, monkeypatch) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    assert free_bytes(CPU) == expected


@pytest.mark.parametrize("text", ["max", None])
def test_without_a_limit_all_available_memory_is_free(text, tmp_path, monkeypatch) -> None:
    if text is not None:
        for name in ("memory.max", "memory.current", "memory.stat"):
            (tmp_path / name).write_text({"memory.max": "max", "memory.stat": "anon 5"}.get(name, "7"))
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    assert 2**20 < free_bytes(CPU) < 2**50


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


FAULTS = """
import mmap, resource, torch
from treewise.nn.platform.memory import keep_freed_memory

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
from treewise.nn.platform.memory import keep_few_kernels

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
    for name in memory._KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", KERNELS]
    all_kept, few = (int(subprocess.check_output([*command, each], text=True)) for each in ("all", "few"))
    assert 2 * few < all_kept  # 56 and 263 MiB on a Zen 4


def test_memory_of_other_systems_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
