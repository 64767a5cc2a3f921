"""What rows say of rollouts: groups by prompt, rollouts that stay together, streams, rewards of declared trees."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treewise.data import RenderOptions, load_trees
from treewise.errors import DataError
from treewise.tree.forest import Forest


def row(prompt, completion, **more):
    return {"token_ids": [*prompt, *completion], "loss_weights": [0] * len(prompt) + [1] * len(completion), **more}


def test_rows_without_a_group_are_grouped_by_their_prompt(write):
    rows = [row([1, 2], [3]), row([1, 9], [3]), row([1, 2], [4, 5]), row([1, 2, 3], [5])]
    dataset = load_trees(write(*rows))
    assert [[item.token_ids.tolist() for item in tree.trajectories] for tree in dataset] == [
        [[1, 2, 3], [1, 2, 4, 5]],
        [[1, 9, 3]],
        [[1, 2, 3, 5]],
    ]
    groups = [{item.group for item in tree.trajectories} for tree in dataset]
    assert all(len(each) == 1 for each in groups)
    assert len(set.union(*groups)) == 3
    assert dataset[0].name.endswith(".jsonl:1")
    assert dataset[0].forest().num_tokens == 5


@pytest.mark.parametrize("name", ["group", "task_id", "number"])
def test_a_whole_number_names_the_same_group_in_a_column_of_floats(write, tmp_path, name):
    rows = [row([1, 2], [3 + index], **{name: 1}, rollout=7) for index in range(2)]
    options = {"group_by": name} if name == "number" else {}
    table = pa.Table.from_pylist([{**each, name: 1.0, "rollout": 7.0} for each in rows])
    pq.write_table(table, tmp_path / "floats.parquet")
    paths = [write(*rows), tmp_path / "floats.parquet"]
    for data in (paths, table, [{**rows[0], name: 1.0}, rows[1]]):
        [tree] = load_trees(data, options=options)
        assert {(repr(item.group), repr(item.rollout)) for item in tree.trajectories} == {("1", "7")}


def test_rollouts_in_a_list_are_named_alike(write):
    seqs = [{"ids": [1, 2, 3 + index], "loss": [[2, 3]], "rollout": name} for index, name in enumerate((7, 7.0))]
    [tree] = load_trees(write({"group": "g", "seqs": seqs}))
    assert len(set(tree.forest().rollout_of_trajectory.tolist())) == 1
    for wrong in (True, [1]):
        with pytest.raises(DataError, match=r"seqs\[0\]: rollout must be text or a number"):
            load_trees(write({"group": "g", "seqs": [{**seqs[0], "rollout": wrong}]}))


def test_a_begin_token_alone_is_no_prompt(write):
    dataset = load_trees(write({"token_ids": [1, 2, 3]}, {"token_ids": [1, 4, 5]}, row([1], [6])))
    assert [len(tree.trajectories) for tree in dataset] == [1, 1, 1]
    assert [tree.trajectories[0].group for tree in dataset] == [None] * 3


def test_rows_of_one_rollout_stay_in_the_group_of_its_first_prompt(write):
    rows = [
        row([1, 2], [3], rollout="a"),
        row([1, 2], [4], rollout="b"),
        row([8, 9, 2], [5], rollout="a"),  # after a compaction
        row([8, 9, 2], [6]),
    ]
    first, other = load_trees(write(*rows))
    assert [item.rollout for item in first.trajectories] == ["a", "b", "a"]
    assert len({item.group for item in first.trajectories}) == 1
    assert first.forest().rollout_of_trajectory.tolist() == [0, 1, 0]
    assert other.trajectories[0].group != first.trajectories[0].group


def test_the_samplers_and_a_teachers_streams_arrive(write):
    teacher = {"teacher_ids": [[0, 0], [5, 6], [7, 8]], "teacher_logprobs": [[-1, -1], [-0.5, -2], [-1, -3]]}
    [tree] = load_trees(write(row([1], [2, 3], sampler_logprobs=[None, -1, -2], **teacher)))
    [item] = tree.trajectories
    assert item.sampler_logprobs.tolist() == [0, -1, -2]
    assert item.teacher_ids.tolist() == teacher["teacher_ids"]
    assert np.allclose(item.teacher_logprobs, teacher["teacher_logprobs"])
    assert item.old_logprobs is None


def test_text_beside_ids_is_compared_and_may_be_required_to_agree(write, tokenizer):
    ids = tokenizer("Name it. Strawberry", add_special_tokens=False)["input_ids"]
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("Name it.", " Stra", "wberry")]
    drifted = [token for part in parts for token in part]
    assert drifted != ids
    rows = [{"token_ids": ids, "text": "Name it. Strawberry"}]
    rows.append({"token_ids": drifted, "prompt": "Name it.", "completion": " Strawberry"})
    dataset = load_trees(path := write(*rows), tokenizer, cache_dir=path.parent / "cache")
    assert [tree.trajectories[0].token_ids.tolist() for tree in dataset] == [ids, drifted]
    for report in (dataset.report, load_trees(path, tokenizer, cache_dir=path.parent / "cache").report):
        assert (report.num_compared, report.num_drifted) == (2, 1)
        assert [warning for warning in report.warnings if "drift at token" in warning]
    with pytest.raises(DataError, match=r"jsonl:2: retokenisation drift.*on_drift: error"):
        load_trees(path, tokenizer, options=RenderOptions(on_drift="error"))


def test_messages_that_cannot_be_rendered_do_not_harm_the_ids(write, tokenizer):
    path = write(row([1, 2], [3], messages=[{"role": "poet", "content": "x"}]))
    dataset = load_trees(path, tokenizer)
    assert dataset[0].trajectories[0].token_ids.tolist() == [1, 2, 3]
    assert "role 'poet'" in dataset.report.warnings[0]
    assert "not compared" in dataset.report.warnings[0]
    assert dataset.report.num_compared == 0
    with pytest.raises(DataError, match="role 'poet'"):
        load_trees(path, tokenizer, options=RenderOptions(on_drift="error"))


def test_ends_of_a_declared_tree_have_rewards_and_rollouts(write):
    nodes = [
        {"token_ids": [1, 2], "loss_weights": 0},
        {"parent": 0, "token_ids": [3], "old_logprobs": [-1], "sampler_logprobs": -2, "reward": 0.5, "end": True},
        {"parent": 1, "token_ids": [4], "old_logprobs": [-1], "sampler_logprobs": -3, "rollout": "b"},
        {"parent": 0, "token_ids": [5], "old_logprobs": [-1], "sampler_logprobs": -4},
    ]
    [tree] = load_trees(write({"nodes": nodes, "group": "g", "reward": 1, "rollout": "a"}))
    items = tree.labelled_trajectories()
    found = {tuple(item.token_ids.tolist()): (item.group, item.reward, item.rollout) for item in items}
    assert found == {(1, 2, 3): ("g", 0.5, "a"), (1, 2, 3, 4): ("g", 1, "b"), (1, 2, 5): ("g", 1, "a")}
    assert items[1].sampler_logprobs.tolist() == [0, 0, -2, -3]
    assert Forest.from_trajectories(items).num_tokens == tree.forest().num_tokens
