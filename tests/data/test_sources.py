"""The same records give the same trees, from whatever source they come."""

import json

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from treewise.data import load_trees
from treewise.errors import DataError

RECORDS = [
    {"token_ids": [1, 2, 3 + index], "loss_weights": [0, 0, 1], "group": f"g{index % 3}", "reward": float(index)}
    for index in range(8)
] + [{"token_ids": [1, 2, 3, 4], "loss_weights": [0, 1, 0, 1], "group": "g0"}]


@pytest.fixture(autouse=True)
def no_bars():
    datasets.disable_progress_bars()


def described(trees):
    return [
        (tree.name, [(item.token_ids.tolist(), item.loss_weights.tolist(), item.reward) for item in tree.trajectories])
        for tree in trees
    ]


def saved(folder):
    data = datasets.Dataset.from_list(RECORDS)
    data.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(str(folder / "splits"))
    return folder


SOURCES = {
    "list": lambda folder: RECORDS,
    "tensors": lambda folder: [{**record, "token_ids": torch.tensor(record["token_ids"])} for record in RECORDS],
    "iterator": lambda folder: iter(RECORDS),
    "Dataset": lambda folder: datasets.Dataset.from_list(RECORDS),
    "IterableDataset": lambda folder: datasets.Dataset.from_list(RECORDS).to_iterable_dataset(),
    "transform": lambda folder: datasets.Dataset.from_list(RECORDS).with_transform(lambda batch: batch),
    "selection": lambda folder: datasets.Dataset.from_list([RECORDS[-2], *RECORDS]).select(range(1, 10)),
    "DatasetDict": lambda folder: datasets.DatasetDict(only=datasets.Dataset.from_list(RECORDS)),
    "DataFrame": lambda folder: pd.DataFrame(RECORDS),
    "Table": lambda folder: pa.Table.from_pylist(RECORDS),
    "save_to_disk": lambda folder: str(saved(folder) / "saved"),
    "split": lambda folder: f"{saved(folder)}/splits[train]",
    "arrow": lambda folder: next((saved(folder) / "saved").glob("*.arrow")),
    "several": lambda folder: [RECORDS[:3], datasets.Dataset.from_list(RECORDS[3:8]), pd.DataFrame(RECORDS[8:])],
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_trees(name, tmp_path):
    assert described(load_trees(SOURCES[name](tmp_path))) == described(load_trees(RECORDS))


def test_a_mapped_data_set_stays_mapped(tmp_path):
    data = datasets.load_from_disk(str(saved(tmp_path) / "saved"))
    before = pa.total_allocated_bytes()
    assert data.cache_files  # backed by files
    load_trees(data)
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_messages_of_arrow_lose_their_padding(tokenizer):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.", "weight": 1.0}]
    records = [{"messages": turns}]
    assert (
        described(load_trees(datasets.Dataset.from_list(records), tokenizer))[0][1]
        == (described(load_trees(records, tokenizer))[0][1])
    )


# -- columns of JSON, which `datasets` makes of fields that hold values of several kinds -------------------------------

needs_json = pytest.mark.skipif(not hasattr(datasets, "Json"), reason="a later version of datasets has the type Json")


def user(content):
    return {"role": "user", "content": content}


def assistant(content, *arguments):
    calls = [{"type": "function", "function": {"name": "day", "arguments": each}} for each in arguments]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def tool(properties):
    return {"type": "function", "function": {"name": "day", "parameters": {"type": "object", "properties": properties}}}


ASKED = [user("Which day?")]
MIXED = {
    "content": [
        {"messages": [*ASKED, assistant('It is "Friday".')]},
        {"messages": [user([{"type": "text", "text": "And tomorrow?"}]), assistant("Saturday.")]},
    ],
    "content that reads as JSON": [
        {"messages": [user("7"), assistant("42")]},
        {"messages": [user("a list"), assistant("[1, 2]")]},
        {"messages": [user([{"type": "text", "text": "nothing"}]), assistant("null")]},
    ],
    "arguments": [
        {"messages": [*ASKED, assistant("", {"offset": 1})]},
        {"messages": [*ASKED, assistant("", {"offset": "one", "parts": [1, 2]})]},
        {"messages": [*ASKED, assistant("", {"offset": None, "nested": {"parts": [{"is": None}]}})]},
        {"messages": [*ASKED, assistant("", '{"offset":  2}')]},
    ],
    "tool results": [
        {"messages": [*ASKED, assistant("", {"offset": 1}), {"role": "tool", "content": '{"day": 5}'}, assistant("5")]},
        {"messages": [*ASKED, assistant("", {"offset": 1}), {"role": "tool", "content": "[]"}, assistant("None.")]},
        {"messages": [user([{"type": "text", "text": "Hi"}]), assistant("Hello.")]},
    ],
    "pairs": [
        {"prompt": "2+2=", "completion": "4", "reward": 1},
        {"prompt": [user("2+2?")], "completion": [assistant("4")], "reward": 0.5},
        {"prompt": "As JSON:", "completion": '{"sum": [4]}', "reward": 0},
    ],
    "preferences": [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": [user("2+2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
    ],
    "tools": [
        {"tools": [tool({"city": {"type": "string"}})], "messages": [*ASKED, assistant("Friday.")]},
        {
            "tools": [tool({"offset": {"type": ["integer", "null"], "default": 0, "enum": [0, "one"]}})],
            "messages": [*ASKED, assistant("Monday.")],
        },
    ],
    "groups": [
        {"token_ids": [1, 2, 3], "old_logprobs": [None, -0.5, -0.25], "loss_weights": [0, 1, 1], "group": "a"},
        {"token_ids": [1, 2, 4], "old_logprobs": [None, -0.5, -0.5], "loss_weights": [0, 1, 1], "group": 1},
    ],
}


def json_doors(records, folder):
    """The same records through every door; each is opened when it is asked for."""
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))

    def loaded(**settings):
        return datasets.load_dataset(
            "json", data_files=str(file), split="train", cache_dir=str(folder / "datasets"), **settings
        )

    data = loaded()
    yield "list", records
    yield "jsonl", file
    yield "Dataset", data
    yield "DatasetDict", datasets.DatasetDict(train=data)
    yield "select", data.select(range(len(data)))
    yield "filter", data.filter(lambda record: True)
    yield "map", data.map(lambda record: record)
    yield "torch", data.with_format("torch")
    yield "stream", loaded(streaming=True)
    yield "stream of Arrow", loaded(streaming=True).with_format("arrow")
    yield "shuffled stream", loaded(streaming=True).take(len(records))
    yield "to_iterable_dataset", data.to_iterable_dataset()
    yield "from_list", datasets.Dataset.from_list(records, features=data.features)
    data.to_parquet(str(folder / "records.parquet"))
    yield "to_parquet", folder / "records.parquet"
    table = pq.read_table(folder / "records.parquet")
    yield "table", table
    yield "table without metadata", table.replace_schema_metadata(None)
    pq.write_table(table, folder / "plain.parquet", store_schema=False)
    yield "JSON columns of Parquet", folder / "plain.parquet"
    yield "Arrow types in pandas", pd.read_parquet(folder / "records.parquet", dtype_backend="pyarrow")
    data.save_to_disk(str(folder / "saved"))
    yield "save_to_disk", str(folder / "saved")
    yield "arrow", next((folder / "saved").glob("*.arrow"))


@needs_json
@pytest.mark.parametrize("name", MIXED)
def test_columns_of_json_hold_what_the_records_hold(name, tmp_path, tokenizer):
    options = {"chat_template": "chatml"}
    doors = dict(json_doors(MIXED[name], tmp_path))
    assert "Json" in str(doors["Dataset"].features)
    found = {
        door: [trees for _, trees in described(load_trees(data, tokenizer, options=options))]
        for door, data in doors.items()
    }
    assert found == dict.fromkeys(found, found["list"])


@needs_json
def test_the_text_of_a_json_column_is_trained_without_its_quotes(tokenizer):
    data = datasets.Dataset.from_list(MIXED["content"], on_mixed_types="use_json")
    (tree, _) = load_trees(data, tokenizer, options={"chat_template": "chatml"})
    assert tokenizer.decode(tree.trajectories[0].token_ids[-6:]).endswith('It is "Friday".<|im_end|>')


@needs_json
def test_what_a_filter_of_a_stream_has_read_as_json_is_an_error(tokenizer):
    data = datasets.Dataset.from_list(MIXED["pairs"], on_mixed_types="use_json").to_iterable_dataset()
    with pytest.raises(DataError, match=r"row 1: completion is 4: a column of type Json"):
        load_trees(data.filter(lambda record: True), tokenizer)
    texts = datasets.Dataset.from_list(MIXED["content"], on_mixed_types="use_json").to_iterable_dataset()
    options = {"chat_template": "chatml"}
    assert [trees for _, trees in described(load_trees(texts.filter(bool), tokenizer, options=options))] == [
        trees for _, trees in described(load_trees(MIXED["content"], tokenizer, options=options))
    ]


@needs_json
def test_nulls_within_json_outlive_a_transform(tokenizer):
    data = datasets.Dataset.from_list(MIXED["arguments"], on_mixed_types="use_json").with_transform(lambda batch: batch)
    options = {"chat_template": "chatml"}
    assert [trees for _, trees in described(load_trees(data, tokenizer, options=options))] == [
        trees for _, trees in described(load_trees(MIXED["arguments"], tokenizer, options=options))
    ]


@needs_json
def test_a_damaged_json_column_is_an_error_of_its_row(tokenizer, tmp_path):
    values = pa.array(['"Hi"', '"cut'], pa.string()).cast(pa.json_())
    table = pa.table({"prompt": pa.array(["a", "b"]), "completion": values})
    with pytest.raises(
        DataError, match=r"table:row 2: completion, a column of type Json, holds text that is not valid"
    ):
        load_trees(table, tokenizer)
    kept = load_trees(table, tokenizer, on_bad_record="quarantine", quarantine_path=tmp_path / "bad.jsonl")
    assert len(kept) == len(kept.report.dropped) == 1


BAD = {
    "no source": (3, "found int"),
    "one mapping": ({"token_ids": [1, 2]}, "found dict"),
    "splits": (
        datasets.DatasetDict(a=datasets.Dataset.from_list(RECORDS), b=datasets.Dataset.from_list(RECORDS)),
        "a, b",
    ),
    "hub syntax": ("hf:", "hf:org/name"),
    "offline": ("hf:nobody/nothing[train]", "cannot be reached"),
    "no mapping": ([{"token_ids": [1, 2]}, {"token_ids": [1, 2]}, 4], "found int"),
    "empty": (iter([]), "is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_source_is_an_error(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data, words = BAD[name]
    with pytest.raises(DataError, match=words):
        load_trees(data)


def test_a_missing_split_is_named(tmp_path):
    with pytest.raises(DataError, match="Did you mean 'train'"):
        load_trees(f"{saved(tmp_path)}/splits[trian]")


def test_dumps_of_other_stacks_are_read_without_import(tmp_path):
    from pathlib import Path

    samples = Path(__file__).parent / "importers" / "samples"
    trees = load_trees(samples / "verifiers.jsonl")
    assert len(trees)
    assert all(np.isfinite(item.loss_weights).all() for tree in trees for item in tree.trajectories)


def test_rows_beyond_memory_go_to_a_mapped_file(tmp_path, tokenizer, monkeypatch):
    from treewise.data.io import rows as stored

    whole = load_trees(RECORDS)
    monkeypatch.setattr(stored, "MAX_MEMORY_BYTES", 50)
    monkeypatch.setattr(stored, "FLUSH_BYTES", 20)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    for _ in range(2):  # rendered, then from the cache
        mapped = load_trees(path, tokenizer, cache_dir=tmp_path / "cache")
        assert described(mapped) == described(whole)
        assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".arrow"]
