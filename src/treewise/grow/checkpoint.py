"""Checkpoints of transformers, one tensor at a time: no more than a shard of the output is in memory.

Only safetensors are read. The output is written beside its place and renamed at the end, so it is whole or not there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from treewise.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 2 * 1024**3
# Beside the weights: what belongs to the tokenizer and to generation.
COMPANIONS = ("token*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*", "generation_config*")


class SmallCheckpoint:
    """The tensors of a checkpoint folder, by name.

    Raises:
        ConfigError: no safetensors, a shard that is missing, or one that is damaged (each named).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        for file in self._files():
            with _readable(file) as tensors:
                self._file_of |= dict.fromkeys(tensors.keys(), file)

    def _files(self) -> list[Path]:
        if (self.folder / INDEX).is_file():
            weight_map = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = sorted({self.folder / Path(name).name for name in weight_map.values()})
        else:
            files = [self.folder / SINGLE]
        for file in files:
            if not file.is_file():
                raise ConfigError(f"{file}: no such file; growing reads safetensors (save_pretrained writes them).")
        return files

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, without reading any."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._file_of.values())):
            with _readable(file) as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        return shapes

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        with _readable(self._file_of[name]) as tensors:
            return tensors.get_tensor(name)

    def sha256(self) -> str:
        """SHA-256 over the bytes of all weight files, in the order of their names."""
        digest = hashlib.sha256()
        for file in sorted(set(self._file_of.values())):
            with file.open("rb") as content:
                while chunk := content.read(1 << 22):
                    digest.update(chunk)
        return digest.hexdigest()


@contextmanager
def _readable(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ConfigError(f"{file}: not a whole safetensors file: {error}") from error


def write_checkpoint(
    output: Path, tensors: Iterator[tuple[str, torch.Tensor]], config: Any, source: Path, facts: dict[str, Any]
) -> None:
    """Writes a checkpoint folder: weights in shards, `config.json`, the tokenizer of `source`, and `grow.json`.

    Raises:
        ConfigError: the folder is there already.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    if output.exists():
        raise ConfigError(f"{output} is there already; name a folder that is not.")
    aside = output.with_name(f".{output.name}.partial-{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        _write_shards(aside, tensors)
        config.save_pretrained(aside)
        for pattern in COMPANIONS:
            for file in source.glob(pattern):
                shutil.copy2(file, aside / file.name)
        (aside / "grow.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        aside.rename(output)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    shard: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    num_bytes = total = 0

    def flush() -> None:
        save_file(shard, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and num_bytes + size > SHARD_BYTES:
            flush()
            num_bytes = 0
        shard[name] = tensor.contiguous()
        num_bytes, total = num_bytes + size, total + size
    flush()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{index}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")
