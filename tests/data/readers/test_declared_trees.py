import json

import numpy as np
import pytest

from treewise.data import RenderOptions, load_trees
from treewise.errors import DataError

ROOT = {"id": "r", "parent": None, "token_ids": [1, 2], "loss_weights": 0}
LEFT = {"id": "a", "parent": "r", "token_ids": [3, 4]}
RIGHT = {"id": "b", "parent": "r", "token_ids": [3, 5]}


def test_a_declared_tree_is_laid_out_as_given(write):
    tree = load_trees(write({"nodes": [ROOT, LEFT, RIGHT], "group": "t"}))[0]
    forest = tree.forest()
    assert tree.name == "t"
    assert tree.trajectories is None
    assert (forest.num_tokens, forest.num_flat_tokens) == (6, 8)


def test_one_node_per_line_is_the_same_tree(write):
    lines = [{"tree": "t", **node} for node in (ROOT, LEFT, RIGHT)]
    whole = load_trees(write({"nodes": [ROOT, LEFT, RIGHT], "group": "t"}, name="a.jsonl"))
    by_line = load_trees(write(*lines, name="b.jsonl"))
    assert by_line.report.num_trees == 1
    assert by_line[0].num_records == 3
    assert by_line.fingerprint != ""
    assert np.array_equal(by_line[0].forest().token_ids, whole[0].forest().token_ids)
    assert by_line.report.num_trajectories == 2


def test_trees_given_by_line_may_interleave_with_each_other(write):
    lines = [{"tree": t, **node} for node in (ROOT, LEFT, RIGHT) for t in ("x", "y")]
    assert [tree.name for tree in load_trees(write(*lines))] == ["x", "y"]


def test_equal_siblings_are_merged_or_kept(write):
    path = write({"nodes": [ROOT, LEFT, {**LEFT, "id": "c"}]})
    sizes = [load_trees(path, options=RenderOptions(merge_siblings=m))[0].forest().num_tokens for m in (True, False)]
    assert sizes == [4, 6]


def test_streams_are_given_by_node_or_by_token(write):
    left = {**LEFT, "advantages": 2, "old_logprobs": [-1, -2], "loss_weights": [0.5, 1]}
    right = {**RIGHT, "advantages": -1, "old_logprobs": -3}
    nodes = load_trees(write({"nodes": [ROOT, left, right]}))[0].nodes
    for name, expected in {
        "advantages": [[0, 0], [2, 2], [-1, -1]],
        "old_logprobs": [[0, 0], [-1, -2], [-3, -3]],
        "loss_weights": [[0, 0], [0.5, 1], [1, 1]],
    }.items():
        assert [streams[name].tolist() for streams in nodes["streams"]] == expected


def test_ids_default_to_the_index_of_the_node(write):
    nodes = [{"parent": None, "token_ids": [1, 2]}, {"parent": 0, "token_ids": [3]}, {"parent": 1, "token_ids": [4]}]
    assert load_trees(write({"nodes": nodes}))[0].nodes["parent"] == [-1, 0, 1]


def test_an_inner_node_may_end_a_trajectory(write):
    tree = load_trees(write({"nodes": [ROOT, {**LEFT, "end": True}, {"id": "c", "parent": "a", "token_ids": [6]}]}))[0]
    assert [len(path) for path in tree.forest().paths] == [4, 5]


def test_a_chain_of_20000_nodes_does_not_recurse(write):
    nodes = [{"parent": i - 1 if i else None, "token_ids": [i]} for i in range(20_000)]
    tree = load_trees(write({"nodes": nodes}))[0]
    assert tree.nodes["parent"][-1] == 19_998
    assert tree.forest().num_tokens == 20_000


BAD_TREES = [
    ([ROOT, {**LEFT, "parent": "x"}], ("nodes[1]", "'a'", "'x'", "does not exist")),
    ([ROOT, LEFT, {**RIGHT, "id": "a"}], ("nodes[2]", "'a'", "already given", "nodes[1]")),
    ([ROOT, {**LEFT, "parent": "a"}], ("nodes[1]", "own parent")),
    ([ROOT, {**LEFT, "parent": "b"}, {**RIGHT, "parent": "a"}], ("cycle", "'a' -> 'b' -> 'a'", "nodes[2]")),
    ([ROOT, {**LEFT, "parent": "b"}, RIGHT], ("nodes[1]", "before its parent", "nodes[2]", "parents first")),
    ([ROOT, {**ROOT, "id": "s"}], ("nodes[1]", "second root", "nodes[0]", "forest")),
    ([ROOT, {**LEFT, "token_ids": []}], ("nodes[1]", "empty")),
    ([ROOT, {**LEFT, "token_ids": [1.5]}], ("nodes[1]", "integers")),
    ([ROOT, {**LEFT, "token_ids": [-1]}], ("nodes[1]", "token id -1", "position 0")),
    ([ROOT, {"id": "a", "parent": "r"}], ("nodes[1]", "no token_ids")),
    ([ROOT, {**LEFT, "loss_weights": [1]}], ("nodes[1]", "1 loss_weights for 2 tokens")),
    ([ROOT, {**LEFT, "loss_weights": [1, -1]}], ("nodes[1]", "-1", "position 1", "negative")),
    ([ROOT, {**LEFT, "advantages": [1, float("nan")]}], ("nodes[1]", "advantages[1] is nan")),
    ([ROOT, {**LEFT, "advantages": 1}, RIGHT], ("nodes[2]", "advantages is missing")),
    ([ROOT, {**LEFT, "loss_weights": 0}], ("nodes[1]", "no trained token")),
    ([{**ROOT, "loss_weights": [1, 1]}, LEFT], ("nodes[0]", "first token")),
    ([ROOT, {**LEFT, "end": "yes"}], ("nodes[1]", "end must be")),
    ([ROOT, {**LEFT, "id": [1]}], ("nodes[1]", "string or an integer")),
    ([ROOT, 3], ("nodes[1]", "object")),
    ([], ("non-empty",)),
]


@pytest.mark.parametrize(("nodes", "words"), BAD_TREES)
def test_bad_trees_are_refused_with_both_nodes(write, nodes, words):
    path = write({"token_ids": [1, 2]}, {"nodes": nodes})
    with pytest.raises(DataError) as caught:
        load_trees(path)
    for word in (f"{path}:2", *words):
        assert word in str(caught.value), str(caught.value)


def test_nodes_by_line_are_refused_with_both_physical_lines(write):
    lines = [{"tree": 7, **node} for node in (ROOT, LEFT, {**RIGHT, "id": "a"})]
    path = write(json.dumps(lines[0]), "", json.dumps(lines[1]), json.dumps(lines[2]))
    with pytest.raises(DataError, match=r"jsonl:4: node id 'a' was already given at .*jsonl:3"):
        load_trees(path)


def test_nodes_that_hold_messages_are_rendered_along_their_paths(write, tokenizer):
    user = {"role": "user", "content": "Two ideas?"}
    nodes = [
        {"id": 0, "parent": None, "message": user},
        {"id": 1, "parent": 0, "message": {"role": "assistant", "content": "One."}},
        {"id": 2, "parent": 0, "message": {"role": "assistant", "content": "Two."}},
        {"id": 3, "parent": 1, "message": {"role": "user", "content": "More"}},
        {"id": 4, "parent": 3, "message": {"role": "assistant", "content": "Three."}},
    ]
    tree = load_trees(write({"nodes": nodes}), tokenizer, options=RenderOptions(chat_template="chatml"))[0]
    talks = [[user, nodes[i]["message"]] for i in (1, 2)]
    flat = load_trees(
        write(*({"messages": talk} for talk in talks), name="flat.jsonl"),
        tokenizer,
        options=RenderOptions(chat_template="chatml"),
    )
    assert len(tree.trajectories) == 3
    for found, expected in zip(tree.trajectories, flat, strict=False):
        assert np.array_equal(found.token_ids, expected.trajectories[0].token_ids)
    assert tree.forest().leaf_ratio > 1


def test_a_message_tree_without_an_answer_is_refused(write, tokenizer):
    path = write({"nodes": [{"parent": None, "message": {"role": "user", "content": "Hi"}}]})
    with pytest.raises(DataError, match="no node of the tree"):
        load_trees(path, tokenizer)
