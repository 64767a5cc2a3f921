"""Copies, out-of-memory errors and autocast."""

import numpy as np
import pytest
import torch

from treewise.nn.platform.tensors import Autocast, is_out_of_memory, to_device

CPU = torch.device("cpu")


def test_arrays_keep_their_dtype_unless_another_is_given() -> None:
    assert to_device(np.arange(3, dtype=np.int32), CPU).dtype == torch.int32
    assert to_device(np.arange(3, dtype=np.int32), CPU, torch.long).tolist() == [0, 1, 2]


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


def test_autocast_is_kept_for_later() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = Autocast.now("cpu")
    one = torch.ones(2, 2)
    with kept.again():
        assert (one @ one).dtype == torch.bfloat16
    assert (one @ one).dtype == torch.float32


def test_an_array_that_cannot_be_written_to_is_copied():
    array = np.arange(3)
    array.flags.writeable = False
    tensor = to_device(array, torch.device("cpu"))  # torch warns where it shares such memory
    tensor[0] = 7
    assert array.tolist() == [0, 1, 2]
