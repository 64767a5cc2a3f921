"""Prefixes merge by token and by what is seen; no fork and no cut is inside of an image."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.errors import DataError
from treewise.planning import plan
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory, update_with_content

LENGTHS = {b"a": 3, b"b": 3, b"c": 5}  # placeholder tokens of each image


def trajectory(parts) -> Trajectory:
    """parts: text tokens (integers) and images (bytes)."""
    ids, spans = [1], []
    for part in parts:
        if isinstance(part, bytes):
            spans.append(ImageSpan(part, len(ids), len(ids) + LENGTHS[part]))
            ids += [9] * LENGTHS[part]
        else:
            ids.append(part)
    return Trajectory([*ids, 2], images=tuple(spans))


histories = st.lists(
    st.lists(st.one_of(st.sampled_from([3, 4]), st.sampled_from(sorted(LENGTHS))), max_size=5).map(trajectory),
    min_size=1,
    max_size=6,
)


def seen_prefixes(item: Trajectory) -> list[tuple]:
    """For each token the path to it, with the image and the offset of placeholders."""
    what = [(int(token), "", 0) for token in item.token_ids]
    for image in item.images:
        for offset in range(image.end - image.start):
            what[image.start + offset] = (9, image.digest, offset)
    return [tuple(what[: position + 1]) for position in range(len(what))]


@given(histories)
def test_tokens_are_shared_exactly_where_path_and_images_are_equal(items):
    forest = Forest.from_trajectories(items)
    position_of = {}
    for item, path in zip(items, forest.paths, strict=True):
        for prefix, position in zip(seen_prefixes(item), path.tolist(), strict=True):
            assert position_of.setdefault(prefix, position) == position
    assert len(position_of) == forest.num_tokens
    images = forest.images
    for start, end, index in zip(images.start, images.end, images.index, strict=True):
        assert (np.diff(forest.segment_of_token[start:end]) == 0).all()  # no fork and no end inside
        assert end - start == LENGTHS[images.sources[index].source]
    assert len({each.digest for each in images.sources}) == len(images.sources)
    assert images.covers(forest.num_tokens).sum() == (images.end - images.start).sum()


@given(histories, st.integers(5, 40), st.sampled_from(["auto", "never", "always"]))
def test_no_cut_is_inside_of_an_image(items, budget, hold):
    forest = Forest.from_trajectories(items)
    cut = plan(forest, budget, hold=hold)
    assert all(batch.num_tokens <= budget for batch in cut.micro_batches)
    owner = np.full(forest.num_tokens, -1)
    for index, batch in enumerate(cut.micro_batches):
        assert (owner[batch.positions()] == -1).all()
        owner[batch.positions()] = index
    assert (owner >= 0).all()
    for start, end in zip(forest.images.start, forest.images.end, strict=True):
        assert len(set(owner[start:end])) == 1
    assert max(live for _, live in cut.timeline) <= budget


def test_an_image_counts_in_the_content_and_has_no_weight():
    digests = []
    for image in (b"a", b"b"):
        digest = hashlib.sha256()
        update_with_content(digest, [trajectory([image])])
        digests.append(digest.digest())
    assert digests[0] != digests[1]
    assert trajectory([3, b"a"]).loss_weights.tolist() == [0, 1, 0, 0, 0, 1]


def test_a_file_is_read_when_needed_and_must_not_change(tmp_path):
    path = tmp_path / "shot.png"
    path.write_bytes(b"first")
    span = ImageSpan(path, 0, 2)
    assert span.read() == b"first"
    path.write_bytes(b"other")
    with pytest.raises(DataError, match=r"shot.png: the image changed"):
        span.read()
    with pytest.raises(DataError, match="cannot be read"):
        ImageSpan(str(tmp_path / "none.png"), 0, 2)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([ImageSpan(b"a", 0, 2), ImageSpan(b"b", 1, 3)], "overlaps the image before it"),
        ([ImageSpan(b"a", 2, 5)], "exceeds the trajectory's 4 tokens"),
        (["shot.png"], "must be a list of tw.ImageSpan, found str"),
    ],
)
def test_spans_that_do_not_fit(images, message):
    with pytest.raises(DataError, match=message):
        Trajectory([1, 2, 3, 4], images=images)
    with pytest.raises(DataError, match="not a span"):
        ImageSpan(b"a", 3, 3)
