"""Rows of several samples: each is trained as it would be alone, whatever says where it begins."""

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.data import load_trees
from treewise.errors import DataError


def trained(data):
    """The trajectories as sets of values, in any order, which packing changes."""
    rows = [item for tree in load_trees(data) for item in tree.trajectories]
    return sorted(
        (
            item.token_ids.tolist(),
            item.loss_weights.tolist(),
            [] if item.advantages is None else item.advantages.tolist(),
        )
        for item in rows
    )


def restarting(lengths):
    return [position for length in lengths for position in range(length)]


def numbered(lengths):
    return [number for number, length in enumerate(lengths, 1) for _ in range(length)]


SIGNS = {
    "seq_lengths": lambda lengths: {"seq_lengths": lengths},
    "cu_seqlens": lambda lengths: {"cu_seqlens": [0, *np.cumsum(lengths).tolist()]},
    "position_ids": lambda lengths: {"position_ids": restarting(lengths)},
    "attention_mask": lambda lengths: {"attention_mask": numbered(lengths)},
    "segment_ids": lambda lengths: {"segment_ids": numbered(lengths), "attention_mask": [1] * sum(lengths)},
    "seq_idx": lambda lengths: {"seq_idx": [number - 1 for number in numbered(lengths)]},
    "two": lambda lengths: {"seq_lengths": lengths, "position_ids": restarting(lengths)},
}
MASKS = {
    "none": lambda ids: {},
    "labels": lambda ids: {"labels": [-100 if token % 3 == 0 else token for token in ids]},
    "completion_mask": lambda ids: {"completion_mask": [int(token % 3 > 0) for token in ids]},
    "loss_weights": lambda ids: {"loss_weights": [token % 3 / 2 for token in ids]},
    "streams": lambda ids: {"advantages": [token / 4 for token in ids]},
}


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("mask", MASKS)
@given(samples=st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=6), min_size=2, max_size=4))
def test_each_sample_is_what_it_is_alone(sign, mask, samples):
    samples = [[*ids, 1, 2] for ids in samples]  # each has a trained token
    row = {"input_ids": [token for ids in samples for token in ids], **SIGNS[sign]([len(ids) for ids in samples])}
    row |= MASKS[mask](row["input_ids"])
    name = "token_ids" if mask in ("loss_weights", "streams") else "input_ids"
    alone = [{name: ids, **MASKS[mask](ids)} for ids in samples]
    for record in alone if mask == "loss_weights" else ():
        record["loss_weights"][0] = 0
    assert trained([row]) == trained(alone)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
@pytest.mark.parametrize("through", ["Dataset", "stream", "file"])
def test_what_trl_packs(strategy, through, tmp_path):
    pack_dataset = pytest.importorskip("trl").pack_dataset
    datasets.disable_progress_bars()
    ids = [[1, 2, 3, 4], [6, 7], [8, 9, 10], [11, 12, 13], [14, 15], [16, 17, 18, 19, 20]]
    rows = [{"input_ids": each, "labels": [-100, *each[1:]]} for each in ids]
    packed = pack_dataset(datasets.Dataset.from_list(rows), 8, strategy)
    assert len(packed) < len(rows)
    packed.to_parquet(str(tmp_path / "packed.parquet"))
    doors = {
        "Dataset": packed,
        "stream": packed.to_iterable_dataset(),
        "file": tmp_path / "packed.parquet",
    }
    assert trained(doors[through]) == trained(rows)


def test_what_trl_splits_stays_split():
    pack_dataset = pytest.importorskip("trl").pack_dataset
    datasets.disable_progress_bars()
    rows = [{"input_ids": list(range(1, 8))}, {"input_ids": [9, 10]}]
    packed = pack_dataset(datasets.Dataset.from_list(rows), 4, "bfd_split")
    assert [ids for ids, *_ in trained(packed)] == [[1, 2, 3, 4], [5, 6, 7], [9, 10]]


def test_padding_belongs_to_no_sample():
    expected = [([1, 2, 3], [0, 1, 1], []), ([4, 5], [0, 1], [])]
    ids = [1, 2, 3, 4, 5, 0, 0]
    assert trained([{"input_ids": ids, "attention_mask": [1, 1, 1, 2, 2, 0, 0]}]) == expected
    zeros = {"attention_mask": [1, 1, 1, 1, 1, 0, 0]}
    assert trained([{"input_ids": ids, **zeros, "position_ids": [0, 1, 2, 0, 1, 0, 0]}]) == expected
    assert trained([{"input_ids": ids, **zeros, "position_ids": [0, 1, 2, 0, 1, 1, 1]}]) == expected
    assert trained([{"input_ids": ids, **zeros, "seq_lengths": [3, 2]}]) == expected
    assert trained([{"input_ids": ids, **zeros, "seq_lengths": [3, 4]}]) == expected
    within = {"input_ids": [1, 2, 3, 0, 4, 5, 0], "attention_mask": [1, 1, 1, 0, 1, 1, 0], "seq_lengths": [4, 3]}
    assert trained([within]) == expected


def test_samples_are_named_counted_and_grouped():
    row = {"input_ids": [1, 2, 3, 1, 2, 4, 5, 6], "labels": [-100, -100, 3, -100, -100, 4, -100, -100]}
    trees = load_trees([{**row, "seq_lengths": [3, 3, 2]}, {"input_ids": [7, 8], "seq_lengths": [2]}])
    sources = [[item.source for item in tree.trajectories] for tree in trees]
    assert sources == [["records:0#0", "records:0#1"], ["records:1"]]
    assert trees.report.num_records == 2
    assert trees.report.warnings == ["samples of packed rows hold no trained token and are left out (1 time)"]


BAD = {
    "too few": ({"seq_lengths": [3]}, "seq_lengths adds up to 3 tokens, and the row has 5 input_ids"),
    "too many": ({"seq_lengths": [3, 3]}, "seq_lengths adds up to 6 tokens"),
    "no lengths": ({"seq_lengths": [2.5, 2.5]}, "seq_lengths must be a flat list of integers"),
    "negative": ({"seq_lengths": [6, -1]}, "negative length"),
    "sums": ({"cu_seqlens": [1, 5]}, "cu_seqlens begins with 1"),
    "positions": ({"position_ids": [0, 1, 2, 5, 6]}, r"position_ids\[3\] is 5 behind 2"),
    "numbers": ({"attention_mask": [1, 1, 2, 2, 1]}, "attention_mask holds sample 1 in two places"),
    "ragged": ({"attention_mask": [1, 1, 1, 1, [1]]}, "attention_mask is not a flat sequence of numbers"),
    "text": ({"position_ids": [0, 1, 2, 3, "4"]}, "position_ids do not rise by 1"),
    "two signs": (
        {"seq_lengths": [2, 3], "position_ids": [0, 1, 2, 0, 1]},
        r"seq_lengths cuts the row into samples of \[2, 3\] tokens, position_ids into \[3, 2\]",
    ),
    "labels": ({"seq_lengths": [2, 3], "labels": [1, 2]}, "2 labels for 5 input_ids"),
    "rollout": ({"seq_lengths": [2, 3], "rollout": "a"}, "2 samples in one row with a rollout"),
    "untrained": (
        {"seq_lengths": [2, 3], "labels": [-100] * 5},
        "none of the 2 samples of this row has a trained token",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_cut_is_an_error(name):
    record, words = BAD[name]
    with pytest.raises(DataError, match=f"^records:0: .*{words}"):
        load_trees([{"input_ids": [1, 2, 3, 4, 5], **record}])
