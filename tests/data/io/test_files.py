import gzip
import json
import os
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.data import load_trees
from treewise.data.io.files import BLOCK_BYTES, find_files, read_text
from treewise.data.sources import read_records
from treewise.errors import DataError

ROW = {"token_ids": [1, 2, 3]}
LINE = json.dumps(ROW).encode()


def places(path):
    return [raw.location.rpartition(":")[2] for raw in read_records(path)]


def refuse(path, *words, **options):
    with pytest.raises(DataError) as caught:
        load_trees(path, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_blank_lines_bom_and_crlf_keep_physical_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE + b"\r\n\r\n  \n" + LINE + b"\r\n" + LINE)
    assert places(path) == ["1", "4", "5"]
    assert len(load_trees(path)) == 3


def test_files_with_marks_that_were_put_behind_one_another_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" + LINE + b"\n") * 2 + b"\xef\xbb\xbf\n" + LINE)
    assert places(path) == ["1", "2", "4"]
    assert len(load_trees(path)) == 3


def test_a_file_that_is_given_twice_is_read_once(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE)
    assert find_files([path, tmp_path, str(tmp_path / "*.jsonl")]) == [path]


def test_a_folder_yields_its_data_files_in_order_without_side_files(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "tools.json", "notes.txt", ".hidden.jsonl"):
        (tmp_path / name).write_bytes(gzip.compress(LINE, mtime=0) if name.endswith("gz") else LINE)
    assert [path.name for path in find_files(tmp_path)] == ["a.jsonl.gz", "b.jsonl"]


def test_records_of_a_json_list_are_read_as_lines_are(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf[{"token_ids": [1, 2]},\n {"token_ids": [1], "token_ids": [2]}]')
    refuse(path, "a.json:2: the key 'token_ids' is given twice")
    text = '[{"token_ids": [1, 2], "group": "é"},\n {"token_ids": [1, 2], "group": "\\ud800"}]'
    path.write_bytes(text.encode())
    refuse(path, f"a.json:2: lone surrogate \\ud800 at byte {text.encode().index(b'ud800') - 1} of the file")


def test_a_json_list_names_the_physical_line_of_each_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n{"token_ids": [1, 2]},\n\n{"token_ids":\n [1, 3]}, {"token_ids": [1]}\n]\n')
    assert places(path) == ["2", "4", "5"]
    refuse(path, "a.json:5", "one token only")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"train": [{"token_ids": [1, 2]}]}',
            ("one list", """begins with '{"train": [""", "save the list alone", ".jsonl"),
        ),
        ('[{"token_ids": [1, 2]}, 3]', ("a.json:1", "object", "found 3")),
        ('[{"token_ids": [1, 2]}\n{"token_ids": [1, 2]}]', ("a.json:2:1", "Expecting")),
        ('[{"token_ids": [1, 2]}', ("a.json:1:23", "not valid JSON")),
        ('[{"token_ids": [1, 2]}] x', ("after the end of the list",)),
        ("[" * 100_000, ("cannot be read", "RecursionError")),
    ],
)
def test_bad_json_lists_are_refused(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_text(text)
    refuse(path, *words)


def test_numbers_and_text_come_from_parquet_with_null_padding_stripped(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "Hi", "weight": None},
        {"role": "assistant", "content": "Yes", "weight": 2.0},
    ]
    as_structs = pa.table({"messages": [messages, messages], "reward": [1.0, None]})
    pq.write_table(as_structs, tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": [json.dumps(messages)] * 2, "reward": [1.0, None]}), tmp_path / "b.parquet")
    first, second = load_trees(tmp_path / "a.parquet", tokenizer), load_trees(tmp_path / "b.parquet", tokenizer)
    assert first.fingerprint == second.fingerprint
    assert first[0].trajectories[0].loss_weights.max() == 2
    assert [tree.trajectories[0].reward for tree in first] == [1.0, None]


def test_parquet_rows_are_named(tmp_path):
    table = pa.table({"token_ids": [[1, 2, 3], [4, 5]], "old_logprobs": [[0.0, -1.0, -2.0], [0.0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    refuse(tmp_path / "a.parquet", "a.parquet:row 2", "1 old_logprobs for 2 tokens")


def test_a_cut_last_line_is_named_and_may_be_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"\n" + LINE[:-3])
    refuse(path, "a.jsonl:2", "incomplete final line", "allow_partial_tail")
    dataset = load_trees(path, allow_partial_tail=True)
    assert len(dataset) == 1
    assert dataset.report.dropped[0][0] == f"{path}:2"
    path.write_bytes(LINE + b'\n{"a": "\xc3')  # inside a letter
    refuse(path, "incomplete final line")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", LINE + b'\n{"token_ids": [1, 2}\n', ("a.jsonl:2:20", "not valid JSON", "Expecting ','")),
        ("a.jsonl", LINE.decode().encode("utf-16-le"), ("a.jsonl:1:2", "UTF-16", "save it as UTF-8")),
        ("a.jsonl", b"PK\x03\x04" + bytes(20), ("a.jsonl:1:1", "not valid JSON", "no text")),
        ("a.jsonl", b'{\n"token_ids": [1, 2]\n}\n', ("a.jsonl:1:2", "one line: jq -c . FILE")),
        ("a.jsonl", b"[\n" + LINE + b"\n]\n", ("a.jsonl:1:2", "one list NEW.json")),
        ("a.jsonl", LINE + b"\n[1, 2]\n", ("a.jsonl:2", "object", "list")),
        ("a.jsonl", LINE + b'\n{"a": "\xff"}\n', ("a.jsonl:2", "UTF-8", f"byte {len(LINE) + 8}")),
        ("a.jsonl", b'{"group": "\\ud800", "token_ids": [1, 2]}\n', ("a.jsonl:1", "lone surrogate", "byte 11")),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000 + b"\n", ("a.jsonl:1", "deep")),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}\n", ("a.jsonl:1", "cannot be read")),
        ("a.jsonl", b"", ("no record",)),
        ("a.json", b"", ("a.json: no record; the file is empty",)),
        ("a.parquet", b"", ("a.parquet: no record; the file is empty",)),
        ("a.jsonl", gzip.compress(LINE, mtime=0), ("gzip data", ".gz")),
        ("a.jsonl", b"PAR1", ("Parquet",)),
        ("a.jsonl.gz", LINE, ("not a gzip file",)),
        ("a.jsonl.gz", gzip.compress(LINE * 100, mtime=0)[:-12], ("cut short",)),
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0)[:-8] + b"\0" * 8, ("damaged gzip",)),
        ("a.parquet", LINE, ("not a Parquet file",)),
        ("a.parquet", b"PAR1" + b"\0" * 50, ("damaged Parquet",)),
        ("a.csv", LINE, ("unknown kind", ".jsonl", "one JSON object a line")),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data)
    refuse(path, name, *words) if data else refuse(path, *words)


def test_missing_paths_are_refused(tmp_path):
    refuse(tmp_path / "none.jsonl", "no such file")
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    refuse(tmp_path / "link.jsonl", "no such file", "a symbolic link to gone.jsonl, which leads nowhere")
    refuse("s3://bucket/a.jsonl", "no such file", "download it first")
    refuse(tmp_path / "*.jsonl", "matches no")
    refuse(tmp_path, "holds no")
    refuse([], "no data paths")


def test_control_characters_of_a_record_never_reach_the_message(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "\x1b[31mroot" + "x" * 1000, "content": ""}]}) + "\n")
    with pytest.raises(DataError) as caught:
        load_trees(path, tokenizer)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8),
    st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"]),
)
def test_flipped_bytes_give_data_or_a_data_error(tmp_path_factory, flips, name):
    data = _file_bytes(name)
    for position, value in flips:
        data[position % len(data)] = value
    path = tmp_path_factory.mktemp("flip") / name
    path.write_bytes(bytes(data))
    try:
        dataset = load_trees(path)
        [tree.forest() for tree in dataset]
    except DataError as error:
        assert str(path) in str(error) or "no record" in str(error)  # noqa: PT017


def _file_bytes(name: str) -> bytearray:
    rows = [{"token_ids": [1, 2, 3], "advantages": 0.5, "group": "g"}, {"seqs": [{"ids": [5, 6], "loss": [[1, 2]]}]}]
    if name == "a.json":
        return bytearray(json.dumps(rows).encode())
    if name == "a.parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"token_ids": [[1, 2, 3], [4, 5]], "group": ["a", "b"]}), sink)
        return bytearray(sink.getvalue().to_pybytes())
    text = "\n".join(map(json.dumps, rows)).encode() + b"\n"
    return bytearray(gzip.compress(text, mtime=0) if name.endswith("gz") else text)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_more_than_max_record_bytes_is_an_error_before_it_is_held(tmp_path, name):
    content = b'[{"a": "' + b"x" * 3_000_000 + b'"}]' if "jsonl" not in name else b'{"a": 1}\n' + b"x" * 3_000_000
    path = tmp_path / name
    path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=r"a\.jsonl?(\.gz)?(:2)?: the (line|file) holds more than 100 bytes .*max_record_"
        ):
            list(read_records(path, 100))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * BLOCK_BYTES < len(content)


def test_a_line_of_max_record_bytes_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\r\n{"a": 2}')
    assert [raw.payload for raw in read_records(path, 8)] == [b'{"a": 1}', b'{"a": 2}']
    assert [raw.location for raw in read_records(path, 8)] == [f"{path}:1", f"{path}:2"]


def test_pipes_and_devices_are_no_data_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "endless.jsonl"):
        with pytest.raises(DataError, match=f"{name}: not a regular file"):
            find_files(tmp_path / name)
    for several in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(DataError, match=r"holds no|matches no"):
            find_files(several)


def test_control_characters_of_paths_are_escaped(tmp_path):
    path = tmp_path / "a\x1b[31m\u202e.jsonl"
    path.write_text("{}\n")
    [raw] = read_records(path)
    assert raw.location == f"{tmp_path}/a\\x1b[31m\\u202e.jsonl:1"


def test_records_of_a_list_on_one_line_are_the_records_of_a_file_of_lines(tmp_path):
    """Rollouts and trees without a name are named by location: two records must not share one."""
    rows = [{"token_ids": [1, 2, token], "loss_weights": [0, 0, 1], "reward": token - 3.0} for token in (3, 4)]
    rows += [{"token_ids": [5, 6]}, {"token_ids": [7, 8]}]
    for name, text in (("a.jsonl", "\n".join(map(json.dumps, rows))), ("a.json", json.dumps(rows))):
        (tmp_path / name).write_text(text)
    lines, one_line = load_trees(tmp_path / "a.jsonl"), load_trees(tmp_path / "a.json")
    assert places(tmp_path / "a.json") == ["1", "1 record 2", "1 record 3", "1 record 4"]
    assert len(set(one_line.names)) == len(one_line) == 3
    assert len({item.rollout for item in one_line[0].labelled_trajectories()}) == 2
    assert one_line.fingerprint == lines.fingerprint


def test_the_text_of_a_file_comes_without_its_mark_and_never_from_a_pipe_or_a_device(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes("\ufeffa: \u2603".encode())
    assert read_text(path) == "a: \u2603"
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    os.mkfifo(tmp_path / "pipe.yaml")  # nobody writes: reading it would wait for ever
    for name, reason in (
        ("latin.yaml", "not UTF-8"),
        ("pipe.yaml", "a pipe or a device; write its content into a file first"),
        ("/dev/zero", "a pipe or a device"),
        ("none.yaml", "No such file"),
        ("a\0b", "null byte"),
        (".", "directory"),
    ):
        with pytest.raises(OSError, match=reason) as caught:
            read_text(tmp_path / name)
        assert reason in caught.value.strerror
