"""Which trees a step trains, and the fingerprint of the data."""

import numpy as np
import pytest

from treewise.data.io.options import LoadReport
from treewise.errors import ConfigError, DataError
from treewise.objectives import DPO, SFT
from treewise.trainer.batches import TreeSampler, collate
from treewise.trainer.inputs import check_preferences
from treewise.trainer.survey import survey
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def test_merging_across_trees_computes_a_common_prompt_once(trees):
    (merged,) = collate(trees, merges=True)
    apart = collate(trees, merges=False)
    assert merged.num_flat_tokens == sum(forest.num_flat_tokens for forest in apart)
    assert sum(forest.num_tokens for forest in apart) - merged.num_tokens >= 6 * (len(trees) - 1)


def test_preferences_are_refused_under_sft_with_their_number():
    class Trees:
        report = LoadReport(num_records=2, num_preferences=1)

    with pytest.raises(ConfigError, match=r"^1 of 2 records: preference pairs or labelled completions; SFT would"):
        check_preferences(Trees(), SFT())
    check_preferences(Trees(), DPO())


def test_every_kind_of_item_is_a_tree(trees):
    forest = Forest.from_trajectories(trees[1])

    class Tree:
        trajectories = None

        def forest(self):
            return forest

    assert [each.num_trajectories for each in collate([trees[0][0], trees[0], Tree(), forest], merges=False)] == [
        1,
        len(trees[0]),
        len(trees[1]),
        len(trees[1]),
    ]
    with pytest.raises(DataError, match="found a dict"):
        collate([{"input_ids": [1]}], merges=False)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_batches_of_all_ranks_are_every_tree_once_per_epoch(num_ranks):
    samplers = [TreeSampler(11, 2, seed=5, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    orders = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = list(zip(*samplers, strict=True))
        order = [tree for step in batches for batch in step for tree in batch]
        assert sorted(order) == list(range(11))
        orders.append(order)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_batches", [1, 4, 6, 11])
def test_an_epoch_is_cut_into_exactly_so_many_batches(num_ranks, num_batches):
    samplers = [TreeSampler(11, 1, 5, rank, num_ranks, num_batches) for rank in range(num_ranks)]
    batches = [[tree for part in parts for tree in part] for parts in zip(*samplers, strict=True)]
    assert len(batches) == len(samplers[0]) == num_batches
    assert {len(batch) for batch in batches} <= {11 // num_batches, -(-11 // num_batches)}
    assert sorted(tree for batch in batches for tree in batch) == list(range(11))


def test_more_steps_than_trees_are_an_error(make_trainer, trees):
    with pytest.raises(ConfigError, match="steps_per_epoch=9: give 1 to 7, the number of trees"):
        make_trainer(trees, steps_per_epoch=9).train()


def test_the_order_depends_on_seed_and_epoch_alone():
    first, again = (TreeSampler(100, 4, seed=1) for _ in range(2))
    np.random.random(3)  # noqa: NPY002 - moves the global generator on
    assert list(first) == list(again) != list(TreeSampler(100, 4, seed=2))


def test_an_empty_data_set_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="train_dataset is empty"):
        make_trainer([])


BASE = {
    "token_ids": [1, 2, 3],
    "loss_weights": [0, 1, 1],
    "old_logprobs": [0, -1, -2],
    "ref_logprobs": [0, -1, -3],
    "teacher_ids": [[1], [2], [3]],
    "teacher_logprobs": [[0], [-1], [-2]],
    "rollout": "r",
    "group": "g",
    "rollout_weight": 2.0,
}
CHANGES = {
    "teacher_ids": [[1], [2], [4]],
    "teacher_logprobs": [[0], [-1], [-2.5]],
    "rollout": "s",
    "group": "h",
    "rollout_weight": 3.0,
}


def fingerprint(*items):
    return survey([list(items)]).fingerprint


@pytest.mark.parametrize("name", CHANGES)
def test_the_fingerprint_of_a_list_depends_on_teachers_and_rollouts(name):
    first = Trajectory(**BASE)
    assert fingerprint(first, Trajectory(**BASE)) == fingerprint(first, Trajectory(**BASE, source="b.jsonl:1"))
    assert fingerprint(first, Trajectory(**BASE)) != fingerprint(first, Trajectory(**{**BASE, name: CHANGES[name]}))


def test_the_fingerprint_of_a_list_depends_on_the_names_of_streams():
    swapped = {**BASE, "old_logprobs": BASE["ref_logprobs"], "ref_logprobs": BASE["old_logprobs"]}
    assert fingerprint(Trajectory(**BASE)) != fingerprint(Trajectory(**swapped))


def test_the_fingerprint_depends_on_the_shape_of_a_tree():
    apart = Forest.from_nodes([-1, 0, 0], [[1], [2, 3], [2, 4]])
    merged = Forest.from_trajectories(apart.trajectories)
    assert apart.num_tokens == merged.num_tokens + 1
    assert survey([apart]).fingerprint != survey([merged]).fingerprint
