"""Merging: sorted order, common prefixes and segments against a dictionary of prefixes."""

import numpy as np
import pytest
from hypothesis import given

from treewise.testing.strategies import token_lists
from treewise.tree import prefix_merge


def flat(sequences):
    return (
        np.concatenate([np.array(each, dtype=np.int32) for each in sequences]),
        np.concatenate([[0], np.cumsum([len(each) for each in sequences])]),
    )


def prefixes(sequences):
    """Every distinct non-empty prefix: the tokens of the merged trees."""
    return {tuple(each[:length]) for each in sequences for length in range(1, len(each) + 1)}


def segment_bounds(segments):
    return segments.start, np.append(segments.start[1:], segments.num_tokens)


@given(token_lists())
def test_a_segment_ends_exactly_at_forks_trajectory_ends_and_leaves(sequences):
    flat_ids, offsets = flat(sequences)
    segments = prefix_merge.merge_sequences(flat_ids, offsets)
    nodes = prefixes(sequences)
    children = dict.fromkeys(nodes, 0)
    for node in nodes:
        if len(node) > 1:
            children[node[:-1]] += 1
    expected = {node for node in nodes if children[node] != 1 or list(node) in sequences}
    lasts = [
        tuple(flat_ids[segments.token_source[prefix_merge.path_to(segments, number)]].tolist())
        for number in range(len(segments.start))
    ]
    assert len(lasts) == len(set(lasts))
    assert set(lasts) == expected


@given(token_lists())
def test_the_path_index_is_all_paths_one_after_the_other(sequences):
    flat_ids, offsets = flat(sequences)
    segments = prefix_merge.merge_sequences(flat_ids, offsets)
    index = prefix_merge.path_index(segments)
    assert flat_ids[segments.token_source[index]].tolist() == flat_ids.tolist()
    for number, end in enumerate(segments.end_segment.tolist()):
        assert index[offsets[number] : offsets[number + 1]].tolist() == prefix_merge.path_to(segments, end).tolist()


@given(token_lists())
def test_segments_are_in_depth_first_order_with_the_heaviest_child_first(sequences):
    segments = prefix_merge.merge_sequences(*flat(sequences))
    starts, ends = segment_bounds(segments)
    size = segments.subtree_end - starts
    children = {}
    for number, above in enumerate(segments.parent.tolist()):
        children.setdefault(above, []).append(number)
        if above >= 0:
            assert starts[above] < starts[number] < segments.subtree_end[above]
            assert segments.depth[number] == segments.depth[above] + ends[above] - starts[above]
    for above, below in children.items():
        if above >= 0:
            assert starts[below[0]] == ends[above]
            assert size[below[0]] == max(size[child] for child in below)
        follow = [*starts[below[1:]].tolist(), segments.subtree_end[above] if above >= 0 else segments.num_tokens]
        assert segments.subtree_end[below].tolist() == follow


@pytest.mark.parametrize("big", [2**31 - 1, 2**24, 256])
def test_large_ids_sort_as_numbers(big):
    sequences = [[big, 1], [1, big], [big, 0], [0, 0], [255, 3], [256, 3]]
    assert prefix_merge.merge_sequences(*flat(sequences)).num_tokens == len(prefixes(sequences))
