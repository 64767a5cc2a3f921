"""Arrays of integers inside JSON, as servers and trainers write them: experts of all tokens are too many for lists.

An object of `data` (base64 of the values, row by row, low byte first), `shape` and `dtype`, with `start`, the rows that
were left away before (prime-rl, SkyRL); or the base64 of a `.npy` file (vLLM). What treewise writes is such an object.
"""

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from treewise.data.io.field_checks import shown
from treewise.errors import DataError

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
MISSING = -1  # in the rows before `start`


def decoded(value: object, name: str, location: str) -> object:
    """The array that a value holds in one of these ways; any other value as it is.

    Raises:
        DataError: text that is no base64 of a `.npy` file, another dtype, or data of another length than its shape.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):  # JSON, in a column of text
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{location}: {name} is not valid JSON: {error}") from None
    if isinstance(value, str | bytes):
        return _of_file(value, name, location)
    return _of_object(value, name, location) if isinstance(value, Mapping) else value


def encoded(array: np.ndarray) -> dict[str, Any]:
    """An array of integers as plain JSON values, in the smallest dtype of 8 or 16 bits that holds them."""
    is_small = array.size == 0 or (array.min() >= -128 and array.max() <= 127)
    values = np.ascontiguousarray(array, dtype="<i1" if is_small else "<i2")
    data = base64.b64encode(values.tobytes()).decode("ascii")
    return {"data": data, "shape": list(values.shape), "dtype": "int8" if is_small else "int16"}


def _of_object(value: Mapping[str, Any], name: str, location: str) -> np.ndarray:
    data, shape, dtype, start = (value.get(key) for key in ("data", "shape", "dtype", "start"))
    sizes: Any = [shape] if not isinstance(shape, list | tuple | np.ndarray) else list(shape)
    if dtype not in DTYPES or not all(
        isinstance(size, int | np.integer) and size >= 0 for size in [*sizes, start or 0]
    ):
        raise DataError(
            f"{location}: {name} must be data, shape and dtype ({', '.join(DTYPES)}), found {shown(dict(value))}."
        )
    raw = _bytes(data, name, location)
    kind = np.dtype(dtype).newbyteorder("<")
    if len(raw) != math.prod(sizes) * kind.itemsize:
        raise DataError(f"{location}: {name} holds {len(raw):,} bytes for {dtype} of shape {list(map(int, sizes))}.")
    array = np.frombuffer(raw, dtype=kind).reshape(sizes)
    if not start:
        return array
    before = np.full((int(start), *array.shape[1:]), MISSING, dtype=np.int64)
    return np.concatenate([before, array])


def _of_file(value: str | bytes, name: str, location: str) -> np.ndarray:
    raw = _bytes(value, name, location) if isinstance(value, str) else value
    try:
        array: np.ndarray = np.load(io.BytesIO(raw), allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("several arrays")
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise DataError(f"{location}: {name} is no .npy file in base64 ({shown(str(error))}).") from None
    return array


def _bytes(data: object, name: str, location: str) -> bytes:
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data if isinstance(data, str) else b"", validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"{location}: {name} is not base64, found {shown(data)}.") from None
