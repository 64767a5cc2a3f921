"""Sharded checkpoints: every rank writes what it holds, by PyTorch's distributed checkpoint (DCP) as safetensors.

DCP's usual form keeps its index in a pickle. This one keeps it in the headers of the safetensors files, so nothing is
unpickled; and any number of ranks, one included, reads what any other number wrote.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from treewise.errors import CheckpointError


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors, sharded (`DTensor`) or the same on all ranks; every rank calls this.

    Raises:
        CheckpointError: a rank could not write.
    """
    writer, is_alone = HuggingFaceStorageWriter(str(folder), save_distributed=True), not distributed.is_initialized()
    try:
        with _no_word_of_being_alone():
            save(dict(tensors), storage_writer=writer, no_dist=is_alone)
    except CheckpointException as error:
        raise CheckpointError(_reason(error)) from error


def load_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Reads into the given tensors, in place; every rank calls this.

    Raises:
        CheckpointError: a tensor that the checkpoint does not hold in this shape.
    """
    reader, is_alone = HuggingFaceStorageReader(str(folder)), not distributed.is_initialized()
    try:
        with _no_word_of_being_alone():
            load(dict(tensors), storage_reader=reader, no_dist=is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: {_reason(error)}") from error
    except (RuntimeError, ValueError) as error:  # what the planner says without a process group
        if not is_alone:
            raise
        raise CheckpointError(f"{folder}: {error}") from error


@contextmanager
def _no_word_of_being_alone() -> Iterator[None]:
    """One process may read shards; DCP warns that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _reason(error: CheckpointException) -> str:
    rank, (failure, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {failure}"
