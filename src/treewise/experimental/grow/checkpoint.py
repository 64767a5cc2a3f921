"""Checkpoints of transformers: one tensor of the source, and of the output one shard at a time in memory.

Only safetensors are read. The output is written beside its place and renamed at the end, so it is whole or not there.
"""

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from treewise.base.durable import flush_file, flush_folder
from treewise.base.weight_files import INDEX, check_saved, shard_names, write_checksums
from treewise.errors import ConfigError

logger = logging.getLogger("treewise")

SINGLE = "model.safetensors"
SHARD_BYTES = 2 * 1024**3
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Beside the weights: what belongs to the tokenizer and to generation.
COMPANIONS = ("token*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*", "generation_config*")


class SmallCheckpoint:
    """The tensors of a checkpoint folder, by name.

    kinds: shape and element type of every tensor, by name; none is read for them.

    Raises:
        ConfigError: no safetensors, a shard that is missing or damaged, or elements that are no floating-point numbers
            of 16 bits or more (quantised weights); each is named.
    """

    def __init__(self, folder: Path) -> None:
        check_saved(folder)
        files = [folder / name for name in shard_names(folder)] or [folder / SINGLE]
        self.folder, self.files = folder, files
        self.kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            if not file.is_file():
                raise ConfigError(f"{file}: no such file; growing reads safetensors (save_pretrained writes them).")
            with _readable(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    view = tensors.get_slice(name)
                    dtype = str(view.get_dtype())
                    if dtype not in ITEM_BYTES:
                        raise ConfigError(f"{file}: {name} is {dtype}; growing reads {', '.join(ITEM_BYTES)}.")
                    self.kinds[name], self._file_of[name] = (tuple(view.get_shape()), dtype), file

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        return {name: shape for name, (shape, _) in self.kinds.items()}

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(map(math.prod, self.shapes.values()))

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its name, as it is stored."""
        with _readable(self._file_of[name]) as tensors:
            return tensors.get_tensor(name)

    def sha256(self) -> str:
        """SHA-256 over the bytes of all weight files, in the order of their names."""
        digest = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as content:
                while chunk := content.read(1 << 22):
                    digest.update(chunk)
        return digest.hexdigest()


class _Slice(Protocol):
    """A tensor that is not read."""

    def get_dtype(self) -> object: ...
    def get_shape(self) -> list[int]: ...


class Tensors(Protocol):
    """What is read of an open file of safetensors."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


@contextmanager
def _readable(file: Path) -> Iterator[Tensors]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ConfigError(f"{file}: not a whole safetensors file: {error}") from error


@contextmanager
def new_checkpoint(output: Path) -> Iterator[Path]:
    """A folder beside `output` that gets its name when the block ends well, and is removed otherwise.

    What a killed process has left beside `output` is removed first.

    Raises:
        OSError: the disk is full or not writable; nothing is left behind.
    """
    for left in output.parent.glob(f".{output.name}.growing-*"):
        if not psutil.pid_exists(int(left.name.rpartition("-")[2])):
            logger.warning("%s: left over by a process that was killed; removed", left)
            shutil.rmtree(left)
    aside = output.with_name(f".{output.name}.growing-{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        yield aside
        write_checksums(aside)
        for file in aside.iterdir():
            flush_file(file)
        aside.rename(output)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    flush_folder(output.parent)


def copy_companions(source: Path, folder: Path) -> None:
    """Copies what belongs to the tokenizer and to generation."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copy2(file, folder / file.name)


@dataclass(frozen=True, slots=True)
class GrownTensor:
    """A tensor that is made when it is written: name, element type as in safetensors, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_tensors(folder: Path, tensors: Sequence[GrownTensor]) -> None:
    """Writes weights as transformers reads them, in shards of at most `SHARD_BYTES`, or of one tensor."""
    split = split_state_dict_into_shards_factory(
        {tensor.name: tensor for tensor in tensors},
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    made_by = {tensor.name: tensor.make for tensor in tensors}
    for file, names in split.filename_to_tensors.items():
        save_file({name: made_by[name]() for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")
