"""Rows of a batch as a forest with edges, against what a reader of the rows would say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.integrations.batches.batch_forest import IGNORED, NotShareable, RowRules, Rows, rows_to_forest


@st.composite
def batches(draw):
    """Rows over three tokens, so that prefixes are shared; padding left or right; labels that may be anything."""
    side = draw(st.sampled_from(["left", "right"]))
    sequences = draw(st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=7), min_size=1, max_size=5))
    width = max(len(tokens) for tokens in sequences) + draw(st.integers(0, 2))
    ids, mask, labels = (np.zeros((len(sequences), width), dtype=np.int64) for _ in range(3))
    labels[:] = IGNORED
    for row, tokens in enumerate(sequences):
        start = width - len(tokens) if side == "left" else 0
        ids[row, start : start + len(tokens)] = tokens
        mask[row, start : start + len(tokens)] = 1
        for place in range(start, start + len(tokens)):
            labels[row, place] = draw(st.sampled_from([IGNORED, IGNORED, 1, 2, 7]))
    return ids, mask, labels


def edges_of(rows: Rows) -> list[tuple[tuple[int, ...], int]]:
    """For each scored label the tokens that it is predicted from, and the label."""
    forest = rows.forest
    found = []
    for edge in rows.edge:
        path, position = [], int(rows.source[edge])
        while position >= 0:
            path.append(int(forest.token_ids[position]))
            position = int(forest.parent[position])
        found.append((tuple(reversed(path)), int(rows.label[edge])))
    return found


@given(batches())
def test_every_label_is_predicted_from_its_own_prefix_once(batch):
    ids, mask, labels = batch
    rows = rows_to_forest(ids, labels, mask)
    places = np.argwhere(labels != IGNORED)
    if len(places) == 0:
        assert rows is None
        return
    expected = []
    for row, column in places:
        prefix = ids[row, : column + 1][mask[row, : column + 1] == 1]
        expected.append((tuple(prefix.tolist()), int(labels[row, column])))
    assert edges_of(rows) == expected
    assert rows.cell.tolist() == [row * labels.shape[1] + column for row, column in places]
    assert len(rows.source) == len(set(expected))
    assert (np.diff(rows.source) >= 0).all()
    assert rows.num_real == mask.sum()
    prefixes = {tokens[: end + 1] for tokens, _ in expected for end in range(len(tokens))}
    # Nothing beyond what a label depends on is computed, but for the second token that a trajectory must have.
    assert len(prefixes) <= rows.forest.num_tokens <= len(prefixes) + len(places)


def test_sequences_packed_into_one_row_share_their_prefixes():
    ids = np.array([[5, 6, 7, 5, 6, 8, 9]])
    positions = np.array([[0, 1, 2, 0, 1, 2, 3]])
    labels = np.array([[IGNORED, 7, IGNORED, IGNORED, 8, 9]])
    rows = rows_to_forest(ids, labels, position_ids=positions)
    assert edges_of(rows) == [((5, 6), 7), ((5, 6), 8), ((5, 6, 8), 9)]
    assert rows.forest.num_tokens == 3


def test_equal_labels_after_equal_prefixes_are_one_edge():
    rows = rows_to_forest(np.array([[5, 6, 7], [5, 6, 9]]), np.array([[6, 7], [6, 7]]))
    assert len(rows.source) == 2
    assert rows.edge.tolist() == [0, 1, 0, 1]


def test_left_padding_moves_nothing():
    labels = np.array([[IGNORED, 6], [6, IGNORED]])
    rows = rows_to_forest(np.array([[0, 5, 6], [5, 6, 0]]), labels, np.array([[0, 1, 1], [1, 1, 0]]))
    assert edges_of(rows) == [((5,), 6), ((5,), 6)]
    assert rows.forest.share_ratio == 2


IDS, LABELS, ONES = np.array([[5, 6, 7, 8]]), np.array([[6, 7, 8]]), np.ones((1, 4), dtype=np.int64)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("padding stands between", {"attention_mask": np.array([[1, 0, 1, 1]])}),
        ("predicted by a padding token", {"attention_mask": np.array([[0, 1, 1, 1]])}),
        ("start anew or jump", {"attention_mask": ONES, "position_ids": np.array([[0, 1, 0, 1]])}),
        ("one token only", {"position_ids": np.array([[0, 0, 1, 2]])}),
        (
            "absolute positions",
            {"position_ids": np.array([[2, 3, 4, 5]]), "rules": RowRules(is_relative=lambda: False)},
        ),
        ("neither a token", {"labels": np.array([[6, -1, 8]])}),
    ],
)
def test_what_is_not_shareable(message, arguments):
    with pytest.raises(NotShareable, match=message):
        rows_to_forest(**{"token_ids": IDS, "labels": LABELS, **arguments})
