"""Files of `torch.save`, opened without running anything that is in them."""

import pickle
from pathlib import Path
from typing import Any

import torch

from treewise.data.io.forms import Record
from treewise.errors import DataError


def read_torch_file(path: Path) -> list[Record]:
    """The records of a file of `torch.save`, tensors as lists: one mapping, or a list of them. Nothing in it is run.

    Raises:
        DataError: the file is damaged, or holds Python objects, which are never unpickled.
    """

    def plain(value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return [part.tolist() for part in value.unbind()] if value.is_nested else value.tolist()
        if isinstance(value, dict):
            return {str(name): plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
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
    records = plain(value)
    records = [records] if isinstance(records, dict) else records
    if isinstance(records, list) and records and all(isinstance(record, dict) for record in records):
        return records
    raise DataError(f"{path}: must hold a mapping or a list of mappings, found {type(value).__name__}.")
