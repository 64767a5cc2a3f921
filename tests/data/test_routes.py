"""Recorded experts in records: read in each form that servers and trainers write, and merged as the options say."""

import base64
import io
import json

import numpy as np
import pytest

from treewise.data import load_trees
from treewise.data.io.encoded_arrays import decoded, encoded
from treewise.errors import DataError

TABLE = np.array([[[0, 5], [1, 2]], [[3, 4], [0, 7]], [[1, 2], [130, 6]]])


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


FORMS = {
    "lists": TABLE.tolist(),
    "text": json.dumps(TABLE.tolist()),
    "ours": encoded(TABLE),
    "uint8": {"data": base64.b64encode(TABLE.astype("<u1")).decode(), "shape": [3, 2, 2], "dtype": "uint8"},
    "npy": npy(TABLE.astype(np.uint8)),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_way_to_write_experts_reads_the_same(form, write):
    [tree] = load_trees(write({"token_ids": [1, 2, 3], "routed_experts": FORMS[form]}))
    assert np.array_equal(tree.trajectories[0].routed_experts, np.sort(TABLE, axis=-1))


def test_rows_that_were_left_away_before_a_start_are_not_recorded(write):
    later = {**encoded(TABLE[1:]), "start": 1}
    [tree] = load_trees(write({"token_ids": [1, 2, 3], "routed_experts": later}))
    assert tree.trajectories[0].routed_experts[:, 0].tolist() == [[-1, -1], [3, 4], [1, 2]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("AAAA", "is no .npy file in base64"),
        ("{", "is not valid JSON"),
        ({"data": "AAAA", "shape": [3], "dtype": "float32"}, "must be data, shape and dtype"),
        ({"data": "AAAA", "shape": [3, 2, 2], "dtype": "int8"}, r"holds 3 bytes for int8 of shape \[3, 2, 2\]"),
        ({"data": "?", "shape": [1], "dtype": "int8"}, "is not base64"),
        ([[[0, 1]], [[0, 0]], [[0, 1]]], r"routed_experts\[1\] layer 0: expert 0 twice"),
    ],
)
def test_what_holds_no_experts_is_named_with_its_line(value, message, write):
    with pytest.raises(DataError, match=rf"data.*:1: routed_experts.*{message}|data.*:1: {message}"):
        load_trees(write({"token_ids": [1, 2, 3], "routed_experts": value}))


def test_what_is_written_is_read_again():
    assert np.array_equal(decoded(encoded(TABLE), "x", "y"), TABLE)
    assert encoded(TABLE[:2])["dtype"] == "int8"


def test_nodes_may_hold_experts(write):
    nodes = [
        {"parent": None, "token_ids": [1, 2], "routed_experts": encoded(TABLE[:2])},
        {"parent": 0, "token_ids": [3], "routed_experts": TABLE[2:].tolist()},
        {"parent": 0, "token_ids": [4]},
    ]
    forest = load_trees(write({"nodes": nodes}))[0].forest()
    assert np.array_equal(forest.routed_experts[:3], np.sort(TABLE, axis=-1))
    assert (forest.routed_experts[3] == -1).all()


def test_data_options_choose_between_exact_routes_tokens_alone_and_none(write):
    rows = [
        {"token_ids": [1, 2, 3], "group": "g", "routed_experts": [[[0]], [[1]], [[1]]]},
        {"token_ids": [1, 2, 4], "group": "g", "routed_experts": [[[0]], [[2]], [[1]]]},
    ]
    path = write(*rows)
    forests = {
        name: load_trees(path, options={"routing_replay": name})[0].forest() for name in ("exact", "by_tokens", "off")
    }
    assert {name: each.num_tokens for name, each in forests.items()} == {"exact": 5, "by_tokens": 4, "off": 4}
    assert forests["exact"].has_routes
    assert not forests["off"].has_routes
    taken = [item.routed_experts[:, 0, 0].tolist() for item in forests["by_tokens"].trajectories]
    assert taken == [[0, 1, 1], [0, 1, 1]]
    assert np.array_equal(forests["exact"].trajectories[1].routed_experts[:, 0, 0], [0, 2, 1])
