"""Arrays of integers in JSON: what they hold, and that no size which a file names asks for memory before it is held
against what is there.
"""

import base64
import io
import tracemalloc

import numpy as np
import pytest

from treewise.data import load_trees
from treewise.data.importers import import_rollouts
from treewise.data.io.encoded_arrays import decoded
from treewise.errors import DataError

ROWS = np.arange(12, dtype=np.int8).reshape(3, 2, 2)
HUGE = 10**30


def text(raw):
    return base64.b64encode(raw).decode()


def of(shape, dtype="int8", data=b"\0", **more):
    return {"data": text(data), "shape": shape, "dtype": dtype, **more}


def npy(array, version=None):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version)
    return stream.getvalue()


def header(shape, descr="'<i4'", version=1, length=None):
    """A `.npy` file of four bytes of data whose header names a shape."""
    words = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    size = len(words) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + size.to_bytes(2 if version == 1 else 4, "little") + words + b"\0" * 4


HOSTILE = {
    "start beyond the row": of([1, 2, 2], data=bytes(4), start=300_000_000),
    "start of one row more": of([3, 2, 2], data=bytes(12), start=1),
    "start without end": of([1, 2, 2], data=bytes(4), start=HUGE),
    "negative start": of([1, 2, 2], data=bytes(4), start=-1),
    "start that is no number": of([1, 2, 2], data=bytes(4), start=True),
    "a shape without end": of([HUGE, 2, 2]),
    "nothing of a shape without end": of([0, HUGE, HUGE], data=b""),
    "nothing of a large shape": of([0, 10**6, 10**6], data=b"", start=2),
    "a nothing behind": of([10**12, 0, 2], data=b""),
    "a thousand sizes": of([HUGE] * 1000),
    "a thousand ones": of([1] * 1000),
    "a size that is no number": of([1, "2", 2]),
    "more of a token than any model has": of([1, 200, 200], data=bytes(40_000), start=1),
    "a file of a shape without end": text(header(f"({HUGE}, 2, 2)")),
    "a file of a large shape": text(header("(1000000000000,)")),
    "a file of one large value": text(header("()", "'V1000000000'")),
    "a file of objects": text(header("(1,)", "'|O'")),
    "a file of floats": text(header("(1,)", "'<f4'")),
    "a file with a negative size": text(header("(-1, 2, 2)")),
    "a header without end": text(header("(1,)", version=2, length=2**32 - 1)),
    "a header of nested brackets": text(header("(" * 3000)),
    "a file of another version": text(header("(1,)", version=9)),
    "an archive": text(b"PK\x03\x04" + bytes(100)),
    "nested without end": "[" * 100_000,
}


@pytest.fixture
def peak():
    """Bytes that were held at most while a test ran."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_size_is_held_against_what_is_there_first(name, peak):
    with pytest.raises(DataError, match=r"here: routed_experts "):
        decoded(HOSTILE[name], "routed_experts", "here", num_rows=3)
    assert peak() < 3_000_000


@pytest.mark.parametrize("name", HOSTILE)
def test_every_reader_of_them_says_so(name, write):
    row = {"token_ids": [1, 2, 3], "routed_experts": HOSTILE[name]}
    with pytest.raises(DataError, match=r"data\.jsonl:1: routed_experts"):
        load_trees(write(row), num_workers=0)
    with pytest.raises(DataError, match=r"data\.jsonl:1: nodes\[0\]: routed_experts"):
        load_trees(write({"nodes": [{**row, "parent": None}]}), num_workers=0)
    dump = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "inference_logprobs": [0, -1, -1]}
    with pytest.raises(DataError, match=r"data\.jsonl:1: routed_experts"):
        list(import_rollouts(write({**dump, "routed_experts": HOSTILE[name]})))


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i2", "<u4", ">i8"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_files_of_every_kind_are_read(dtype, version, order):
    array = np.asarray(ROWS.astype(dtype), order=order)
    assert np.array_equal(decoded(text(npy(array, version)), "x", "y"), ROWS)
    assert np.array_equal(decoded(npy(array, version), "x", "y", num_rows=3), ROWS)


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_long_row_is_read_in_either_order(order):
    """The limit is of the values of a token, and a file in Fortran's order has the tokens last."""
    array = np.asarray(np.arange(5000 * 8, dtype=np.int32).reshape(5000, 4, 2), order=order)
    np.testing.assert_array_equal(decoded(text(npy(array)), "routed_experts", "a row"), array)


def test_rows_before_a_start_are_missing():
    found = decoded(of([1, 2, 2], "uint8", bytes([200, 1, 2, 3]), start=2), "x", "y", num_rows=3)
    assert found.tolist() == [[[-1, -1], [-1, -1]]] * 2 + [[[200, 1], [2, 3]]]
