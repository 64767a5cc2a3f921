"""Files of `torch.save`, opened without running anything that is in them."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from treewise.data.io.forms import Record
from treewise.errors import DataError, bytes_as_text

MAX_REPEATED = 16  # times that the bytes of a file may be named by what it holds, where samples share their prompts


def read_torch_file(path: Path) -> list[Record]:
    """The records of a file of `torch.save`, tensors as lists: one mapping, or a list of them. Nothing in it is run.

    Raises:
        DataError: the file is damaged, names more values than it holds, or holds Python objects, which are never
            unpickled.
    """
    try:
        _check_archive(path)
        value = torch.load(path, map_location="cpu", weights_only=True)
        records = _Lists(path).of(value)
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
        what = lines[0].split(" was not an allowed")[0] if lines else "Python objects"
        raise DataError(
            f"{path}: holds more than tensors, numbers, text, lists and mappings ({what}), and such files can run any "
            "code when they are opened. Where you trust it, open it where it was made and save plain values: "
            "torch.save of mappings of tensors and lists, or one JSON object per line."
        ) from None
    except Exception as error:  # whatever a damaged file makes the unpickler raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: no file of torch.save, or a damaged one ({first}).") from None
    records = [records] if isinstance(records, dict) else records
    if isinstance(records, list) and records and all(isinstance(record, dict) for record in records):
        return records
    raise DataError(f"{path}: must hold a mapping or a list of mappings, found {type(value).__name__}.")


def _check_archive(path: Path) -> None:
    """Raises `DataError` for an archive whose parts are larger than the file: `torch.save` compresses none."""
    if not zipfile.is_zipfile(path):
        return  # of older releases; what is none, torch says
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist())
    if size > path.stat().st_size:
        raise DataError(
            f"{path}: {bytes_as_text(path.stat().st_size)} that claim to hold {bytes_as_text(size)}; torch.save "
            "compresses nothing. Save it again."
        )


class _Lists:
    """Tensors as lists, of as many values in all as the file can hold: one may be named again and again."""

    def __init__(self, path: Path) -> None:
        self._path, self._left = path, MAX_REPEATED * path.stat().st_size

    def of(self, value: object) -> Any:
        """The value with lists for tensors and tuples."""
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                return [self.of(part) for part in value.unbind()]
            if value.layout != torch.strided or value.is_meta:
                raise DataError(f"{self._path}: holds a sparse tensor, or one without data; save dense ones.")
            self._take(value.numel())
            return value.tolist()
        if isinstance(value, dict | list | tuple):
            self._take(len(value))
        if isinstance(value, dict):
            return {str(name): self.of(item) for name, item in value.items()}
        return [self.of(item) for item in value] if isinstance(value, list | tuple) else value

    def _take(self, num_values: int) -> None:
        self._left -= num_values
        if self._left < 0:
            raise DataError(
                f"{self._path}: names more values than its {bytes_as_text(self._path.stat().st_size)} hold "
                "(views that repeat a value, or lists within one another); save plain tensors."
            )
