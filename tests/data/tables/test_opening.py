"""Arrow and Parquet files that are damaged, or that name more than they hold."""

import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treewise.data import load_trees
from treewise.data.sources import open_sources
from treewise.errors import DataError


def arrow(path, table, *, is_stream=False):
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def records(path):
    [source] = open_sources(path)
    return [record.payload for record in source.records()]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("values", [[[1, 2, 3], [1, 2, 4]], ["abc", "def"]])
def test_an_offset_beyond_its_column_is_an_error_and_nothing_is_read(values, is_stream, tmp_path):
    path = arrow(tmp_path / "rows.arrow", pa.table({"token_ids": values}), is_stream=is_stream)
    assert [row["token_ids"] for row in map(dict, records(path))][1] is not None
    raw, offsets = bytearray(path.read_bytes()), struct.pack("<3i", 0, 3, 6)
    at = raw.find(offsets)
    assert at > 0
    raw[at + 4 : at + 12] = struct.pack("<2i", 2**30, 2**31 - 1)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"rows\.arrow: damaged behind row 0 \(.*; write it again"):
        load_trees(path, num_workers=0)


def test_a_name_of_a_column_that_is_no_text_is_an_error(tmp_path):
    path = arrow(tmp_path / "rows.arrow", pa.table({"token_ids": [[1, 2, 3]]}))
    path.write_bytes(path.read_bytes().replace(b"token_ids", b"token_id\xff"))
    with pytest.raises(DataError, match=r"rows\.arrow: "):
        load_trees(path, num_workers=0)


def test_runs_that_stand_for_a_billion_rows_are_an_error(tmp_path):
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([10**9], pa.int64()), pa.array(["2+2=4"]))
    for column in (runs, pa.StructArray.from_arrays([runs.slice(0, 2)], ["a"])):
        path = arrow(tmp_path / "rows.arrow", pa.table([column], names=["text"]))
        with pytest.raises(DataError, match=r"rows\.arrow: column text.* is run-end encoded"):
            records(path)


def test_more_rows_than_a_file_has_bits_are_an_error(tmp_path):
    path = arrow(tmp_path / "rows.arrow", pa.table({"text": pa.nulls(100_000)}))
    with pytest.raises(DataError, match=r"rows\.arrow: 100,000 rows in \d+ bytes"):
        records(path)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_text_that_rows_share_is_held_once(is_nested, tmp_path):
    text, path = "a" * 2_000_000, tmp_path / "rows.parquet"
    rows = [{"messages": [{"role": "user", "content": text}]} if is_nested else {"text": text}] * 64
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", dictionary_pagesize_limit=10_000_000)
    assert path.stat().st_size < 10_000
    before, most = pa.total_allocated_bytes(), 0
    for record in open_sources(path)[0].records():
        assert record.payload == rows[0]
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 20_000_000


def test_all_kinds_of_columns_are_read_as_they_were_written(tmp_path):
    """Texts come as dictionaries of what rows share, whatever their type is."""
    rows = [
        {"a": "x", "b": b"\x00\xff", "c": [{"d": "y", "e": ["p", None, "q"]}], "f": {"g": None, "h": 1.5}},
        {"a": None, "b": None, "c": [], "f": {"g": "x", "h": None}},
        {"a": "", "b": b"", "c": None, "f": None},
    ]
    table = pa.Table.from_pylist(rows)
    large = table.set_column(0, "a", table.column("a").cast(pa.large_string()))
    named = table.set_column(0, "a", pa.array([{"k": "v"}, None, {"k": "w"}], pa.struct([("k", pa.string())])))
    for written in (table, large, named):
        pq.write_table(written, path := tmp_path / "rows.parquet")
        assert records(path) == written.to_pylist()
        assert records(arrow(tmp_path / "rows.arrow", written)) == written.to_pylist()
