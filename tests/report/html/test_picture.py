"""What a page draws is the forest: arrays survive packing, and runs say of every token what the forest says."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.image_models import png
from treewise.planning.planner import plan
from treewise.report.analysis.token_text import TokenText
from treewise.report.html import picture as pictures
from treewise.report.html.picture import (
    ABSENT,
    Thumbnails,
    Vocabulary,
    micro_batch_runs,
    packed,
    picture,
    picture_size,
    segment_table,
)
from treewise.testing.strategies import forests, forests_and_budgets
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

KINDS = {"u2": np.uint16, "u4": np.uint32, "i4": np.int32, "f4": np.float32}


def unpacked(value: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(value["data"]), dtype=KINDS[value["kind"]])


def spread(runs: dict[str, dict[str, str]], size: int) -> np.ndarray:
    """[T] the value of every token."""
    starts, values = unpacked(runs["starts"]), unpacked(runs["values"])
    assert starts[0] == 0
    return np.repeat(values, np.diff(starts, append=size))


@given(forest=forests())
def test_the_arrays_are_the_forest(forest: Forest) -> None:
    vocabulary = Vocabulary(TokenText())
    drawn = picture("t", forest, vocabulary, Thumbnails(), [])
    size = forest.num_tokens
    np.testing.assert_array_equal(unpacked(drawn["start"]), forest.segments.start)
    np.testing.assert_array_equal(unpacked(drawn["parent"]), forest.segments.parent)
    np.testing.assert_array_equal(unpacked(drawn["end_segment"]), forest.segments.end_segment)
    np.testing.assert_array_equal(unpacked(drawn["multiplicity"]), forest.segment_multiplicity)
    ids = unpacked(vocabulary.to_dict()["ids"])
    np.testing.assert_array_equal(ids[unpacked(drawn["tokens"])], forest.token_ids)
    np.testing.assert_allclose(spread(drawn["streams"]["weight"], size), forest.token_weights(), rtol=1e-6)


@given(forest=forests(max_forests=1))
def test_advantages_are_means_over_the_trajectories_that_train_a_token(forest: Forest) -> None:
    drawn = picture("t", forest, Vocabulary(TokenText()), Thumbnails(), [])
    values: list[list[float]] = [[] for _ in range(forest.num_tokens)]
    for path, item in zip(forest.paths, forest.trajectories, strict=True):
        for position, weight, advantage in zip(path, item.loss_weights, item.advantages, strict=True):
            if weight > 0:
                values[position].append(advantage)
    expected = [np.mean(each) if each else np.nan for each in values]
    found = spread(drawn["streams"]["advantage"], forest.num_tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@given(forest=forests(max_forests=1))
def test_rewards_are_means_over_the_trajectories_through_a_segment(forest: Forest) -> None:
    items = [
        Trajectory(item.token_ids, reward=float(number), source=str(number))
        for number, item in enumerate(forest.trajectories)
    ]
    again = Forest.from_trajectories(items)
    drawn = picture("t", again, Vocabulary(TokenText()), Thumbnails(), [])
    found = spread(drawn["streams"]["reward"], again.num_tokens)
    through: list[list[int]] = [[] for _ in range(again.num_tokens)]
    for number, path in enumerate(again.paths):
        for position in path:
            through[position].append(number)
    np.testing.assert_allclose(found, [np.mean(each) for each in through], rtol=1e-6)


@given(case=forests_and_budgets(), size=st.integers(1, 40), is_whole=st.booleans())
def test_micro_batches_of_side_by_side_trees(case: tuple[Forest, int], size: int, is_whole: bool) -> None:
    first, budget = case
    second = Forest.from_trajectories([Trajectory([9, 8, 7, *range(size)])])
    budget = None if is_whole else budget
    made = plan([first, second], budget)
    bounds = [0, first.num_tokens, first.num_tokens + second.num_tokens]
    runs = micro_batch_runs(made, bounds)
    expected = np.full(made.forest.num_tokens, -1)
    for number, batch in enumerate(made.micro_batches):
        expected[batch.positions()] = number
    for (starts, numbers), low, high in zip(runs, bounds[:-1], bounds[1:], strict=True):
        assert starts[0] == 0
        found = np.repeat(numbers, np.diff(starts, append=high - low))
        np.testing.assert_array_equal(found, expected[low:high])


@given(forest=forests())
def test_the_table_of_segments_adds_up(forest: Forest) -> None:
    columns = segment_table("t", forest)["segments"]
    assert sum(columns["num_tokens"]) == forest.num_tokens
    assert sum(columns["num_trained_tokens"]) == np.count_nonzero(forest.token_weights())
    assert len({len(column) for column in columns.values()}) == 1


def test_the_vocabulary_of_a_page_holds_each_token_once(tokenizer) -> None:
    vocabulary = Vocabulary(TokenText(tokenizer))
    ids = tokenizer("the cat and the dog", add_special_tokens=False)["input_ids"]
    first, second = vocabulary.indices(np.array(ids)), vocabulary.indices(np.array(ids[::-1]))
    np.testing.assert_array_equal(first, second[::-1])
    table = vocabulary.to_dict()
    assert len(unpacked(table["ids"])) == len(set(ids))
    pieces = np.split(np.frombuffer(base64.b64decode(table["bytes"]), np.uint8), np.cumsum(unpacked(table["lengths"])))
    assert b"".join(pieces[number].tobytes() for number in first).decode() == "the cat and the dog"


def test_a_tree_without_room_for_tokens_has_none() -> None:
    forest = Forest.from_trajectories([Trajectory(range(10))])
    drawn = picture("t", forest, Vocabulary(TokenText()), Thumbnails(), [], with_tokens=False)
    assert len(unpacked(drawn["tokens"])) == 0
    assert picture_size(forest, 1) > 4 * forest.num_tokens


def test_packing_is_little_endian() -> None:
    assert base64.b64decode(packed([1, 256], "u2")["data"]) == b"\x01\x00\x00\x01"


def test_each_image_has_one_small_copy():
    page = Thumbnails()
    spans = [ImageSpan(png(seed, 600, 300), 0, 4) for seed in (1, 2, 1)]
    assert [page.index(each) for each in spans] == [0, 1, 0]
    head, _, data = page.addresses[0].partition(",")
    small = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (head, small.format, small.size) == ("data:image/jpeg;base64", "JPEG", (240, 120))


def test_what_has_no_room_or_cannot_be_read_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path):
    page, path = Thumbnails(), tmp_path / "a.png"
    path.write_bytes(png(3))
    gone = ImageSpan(path, 0, 4)
    path.unlink()
    assert page.index(gone) == ABSENT
    assert page.index(ImageSpan(png(1), 0, 4)) == 0
    monkeypatch.setattr(pictures, "MAX_CHARS", page.num_chars)
    assert page.index(ImageSpan(png(2), 0, 4)) == ABSENT
    assert len(page.addresses) == 1
