"""Arrays of integers inside JSON, as servers and trainers write them: experts of all tokens are too many for lists.

An object of `data` (base64 of the values, row by row, low byte first), `shape` and `dtype`, with `start`, the rows that
were left away before (prime-rl, SkyRL); or the base64 of a `.npy` file (vLLM). What treewise writes is such an object.
"""

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from treewise.data.io.field_checks import shown
from treewise.errors import DataError

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
MISSING = -1  # in the rows before `start`
MAX_DIMENSIONS = 8
MAX_OF_TOKEN = 1 << 14  # layers times experts of one: of 94 layers with 8 experts each they are 752


def decoded(value: object, name: str, location: str, num_rows: int | None = None) -> object:
    """The array that a value holds in one of these ways; any other value as it is.

    num_rows: the tokens that there are, and so the most rows; None: as many as its data hold.

    Raises:
        DataError: text that is no base64 of a `.npy` file, another dtype, data of another length than its shape, more
            rows than there are tokens. No memory is asked for before sizes are compared with what is there.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):  # JSON, in a column of text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location}: {name} is not valid JSON: {shown(str(error))}") from None
    if isinstance(value, str | bytes):
        return _of_file(value, name, location)
    return _of_object(value, name, location, num_rows) if isinstance(value, Mapping) else value


def encoded(array: np.ndarray) -> dict[str, Any]:
    """An array of integers as plain JSON values, in the smallest dtype of 8 or 16 bits that holds them."""
    is_small = array.size == 0 or (array.min() >= -128 and array.max() <= 127)
    values = np.ascontiguousarray(array, dtype="<i1" if is_small else "<i2")
    data = base64.b64encode(values.tobytes()).decode("ascii")
    return {"data": data, "shape": list(values.shape), "dtype": "int8" if is_small else "int16"}


def _of_object(value: Mapping[str, Any], name: str, location: str, num_rows: int | None) -> np.ndarray:
    data, shape, dtype, start = (value.get(key) for key in ("data", "shape", "dtype", "start"))
    sizes: list[Any] = list(shape) if isinstance(shape, list | tuple | np.ndarray) else [shape]
    if dtype not in DTYPES or not all(map(_is_size, [*sizes, 0 if start is None else start])):
        raise DataError(
            f"{location}: {name} must be data, shape and dtype ({', '.join(DTYPES)}), found {shown(dict(value))}."
        )
    array = _array(_bytes(data, name, location), np.dtype(dtype), sizes, name, location)
    if not start:
        return array
    if start + len(array) > (len(array) if num_rows is None else num_rows):
        there = "no tokens" if num_rows is None else f"{num_rows:,} tokens"
        raise DataError(f"{location}: {name} has {len(array):,} rows from row {shown(start)} on, for {there}.")
    before = np.full((int(start), *array.shape[1:]), MISSING, dtype=np.result_type(array.dtype, np.int8))
    return np.concatenate([before, array])


def _is_size(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def _array(
    raw: bytes, kind: np.dtype, sizes: Sequence[int], name: str, location: str, order: Literal["C", "F"] = "C"
) -> np.ndarray:
    """The values of a buffer, whose size is that of the shape."""
    num_values, rest = divmod(len(raw), kind.itemsize)
    product = 1
    for size in sizes:
        product = min(product * int(size), num_values + 1)  # no number longer than the data
    if rest or product != num_values or len(sizes) > MAX_DIMENSIONS or 0 in sizes[1:]:
        raise DataError(f"{location}: {name} holds {len(raw):,} bytes for {kind.name} of shape {shown(list(sizes))}.")
    if math.prod(map(int, sizes[1:])) > MAX_OF_TOKEN:
        raise DataError(f"{location}: {name} of shape {shown(list(sizes))}: more than {MAX_OF_TOKEN:,} values a token.")
    return np.frombuffer(raw, dtype=kind.newbyteorder("<")).reshape([int(size) for size in sizes], order=order)


def _of_file(value: str | bytes, name: str, location: str) -> np.ndarray:
    raw = _bytes(value, name, location) if isinstance(value, str) else value
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"format {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, kind = read(stream)
    except Exception as error:  # whatever a damaged header makes NumPy raise
        raise DataError(f"{location}: {name} is no .npy file in base64 ({shown(str(error))}).") from None
    if kind.kind not in "iu" or not all(map(_is_size, shape)):
        raise DataError(f"{location}: {name} is a .npy file of {kind} and shape {shown(shape)}; integers are read.")
    native = kind.newbyteorder("<")
    data = raw[stream.tell() :]
    if kind != native:  # written on a machine that puts the high byte first
        data = np.frombuffer(data[: len(data) // kind.itemsize * kind.itemsize], dtype=kind).astype(native).tobytes()
    return _array(data, native, shape, name, location, order="F" if is_fortran else "C")


def _bytes(data: object, name: str, location: str) -> bytes:
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data if isinstance(data, str) else b"", validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"{location}: {name} is not base64, found {shown(data)}.") from None
