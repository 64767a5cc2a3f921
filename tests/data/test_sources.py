"""The same records give the same trees, from whatever source they come."""

import json

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
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
