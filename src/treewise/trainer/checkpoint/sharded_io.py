"""Sharded checkpoints: every rank writes its shards, by PyTorch's distributed checkpoint (DCP) as safetensors.

DCP's usual format stores its index in a pickle. This one stores it in the headers of the safetensors files, so nothing
is unpickled; any number of ranks, one included, reads what any other number wrote.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from treewise.errors import CheckpointError


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], group: object = None) -> None:
    """Writes tensors, sharded (`DTensor`) or the same on all ranks; every rank calls this.

    group: of all ranks, for the collective operations; None: the default one. A thread needs one of its own.

    Raises:
        CheckpointError: a rank could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _errors_named() as is_single:
        save(dict(tensors), storage_writer=writer, no_dist=is_single, process_group=group)


def load_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Reads into the given tensors, in place, from files of shards or whole ones; every rank calls this.

    Raises:
        CheckpointError: a tensor is missing from the checkpoint, also in part, or has another shape or dtype.
    """
    refuse_gaps(folder, tensors)
    with _errors_named() as is_single:
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=is_single)


def refuse_gaps(folder: Path, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Raises `CheckpointError` unless the files hold each tensor whole (DCP leaves as it is what no file holds), in its
    shape and dtype, by their headers. The names of all that they hold.
    """
    try:
        saved: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.name}: missing or damaged ({error}).") from error
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(f"{folder.name}: {name} is missing.")
        found, dtype = saved[name], saved[name].properties.dtype
        chunks = {(tuple(each.offsets), tuple(each.sizes)) for each in found.chunks}
        num_held = sum(math.prod(sizes) for _, sizes in chunks)
        if tuple(found.size) != tuple(tensor.shape) or dtype != tensor.dtype or num_held != tensor.numel():
            raise CheckpointError(
                f"{folder.name}: {name} is {num_held} numbers of {list(found.size)} {dtype}, where {tensor.numel()} of "
                f"{list(tensor.shape)} {tensor.dtype} belong; a file is missing or is another run's."
            )
    return set(saved)


@contextmanager
def _errors_named() -> Iterator[bool]:
    """Around DCP, which warns in a run of one process, that may read shards as well; gives whether it is one.

    Raises:
        CheckpointError: DCP's errors, with the rank that had them.
    """
    is_single = not distributed.is_initialized()
    try:
        with warnings.catch_warnings() if is_single else nullcontext():  # filters belong to all threads of a process
            if is_single:
                warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield is_single
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"rank {rank}: {failure}") from error
    except (RuntimeError, ValueError) as error:  # the planner's errors without a process group
        if not is_single or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(error)) from error
