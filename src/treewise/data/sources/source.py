"""A source: raw records of one origin, and what identifies it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treewise.data.io.files import DEFAULT_MAX_RECORD_BYTES, RawRecord, read_records
from treewise.data.io.printable import printable


@dataclass(frozen=True, slots=True)
class Source:
    """Records of one origin, read in order.

    Parameters:
        name: in messages; each record's location begins with it.
        records: opens the source and yields its records. A source that is an iterator can be opened once.
        data_file: the file whose folder holds what a `tools_ref` names; None: none.
        num_bytes: an estimate of its size, which decides about worker processes.
        identity: changes whenever the content does; None: unknown, so what is rendered is not cached. Of a file the
            cache hashes the bytes instead.
    """

    name: str
    records: Callable[[], Iterator[RawRecord]]
    data_file: Path | None = None
    num_bytes: int = 0
    identity: str | None = None

    @classmethod
    def of_file(cls, path: Path, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES) -> "Source":
        """A data file (`treewise.data.io.files.SUFFIXES`)."""
        return cls(printable(path), lambda: read_records(path, max_record_bytes), path, path.stat().st_size)


def plain(value: Any) -> Any:
    """Tensors, arrays and tuples as the arrays and lists that a record holds; nested ones, too."""
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value if value.ndim == 1 and value.dtype != object else plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value] if any(not isinstance(i, int | float | str) for i in value) else [*value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value
