"""Advantages by hand, and the same however rollouts are cut into rows; test_tree_credit loops over rollouts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise import Trajectory
from treewise.advantages import (
    group_normalized,
    inter_intra,
    leave_one_out,
    mean_centered,
    node_value,
    per_turn,
    segment_values,
    sibling_relative,
    spread_over_turns,
    tree_path_mean,
    treerl,
    turns_of,
    value_steps,
    with_rollout_weights,
)
from treewise.errors import ConfigError, DataError
from treewise.testing.strategies import MAX_SEED, token_lists

METHODS = {
    "group": group_normalized,
    "batch": lambda items: group_normalized(items, scale="batch"),
    "mean": mean_centered,
    "one_out": leave_one_out,
    "siblings": sibling_relative,
    "siblings scaled": lambda items: sibling_relative(items, scale="siblings"),
    "turns": lambda items: per_turn(items, discount=0.9),
    "turns scaled": lambda items: per_turn(items, discount=0.5, baseline="group", scale=True),
}
ON_TREES = {
    "path mean": tree_path_mean,
    "path mean by size": lambda items: tree_path_mean(items, average="size"),
    "path mean whitened": lambda items: tree_path_mean(items, scale="batch"),
    "inter intra": inter_intra,
    "treerl": treerl,
    "treerl local": lambda items: treerl(items, use_global=False, damp=False),
    "value steps": value_steps,
    "value steps scaled": lambda items: value_steps(items, mask_above=None, scale="siblings"),
    "node value": node_value,
    "node value by entropy": lambda items: node_value(items, weights="entropy"),
}
BOTH = {**METHODS, **ON_TREES}
FUNCTIONS = {
    **{"siblings": "sibling_relative", "turns": "per_turn", "mean": "mean_centered", "one_out": "leave_one_out"},
    **{"path": "tree_path_mean", "inter": "inter_intra", "treerl": "treerl", "value": "value_steps"},
    **{"group": "group_normalized", "batch": "group_normalized", "node": "node_value"},
}


def rollout(ids, reward, group="a", **options) -> Trajectory:
    options.setdefault("sampler_logprobs", [-1.0] * len(ids))
    return Trajectory(ids, reward=reward, group=group, **options)


def advantage_of(item: Trajectory) -> float:
    """The one advantage of all trained tokens."""
    (value,) = set(item.advantages[item.loss_weights > 0].tolist())
    return value


@st.composite
def rollout_lists(draw: st.DrawFn) -> list[Trajectory]:
    """Whole rollouts with rewards from a small set (so that groups without variance occur) and random weights."""
    rng = np.random.default_rng(draw(st.integers(0, MAX_SEED)))
    items, logprobs = [], {}
    for number, ids in enumerate(draw(token_lists(max_sequences=7, max_new_tokens=10))):
        weights = rng.choice([0.0, 1.0, 1.0, 2.0], len(ids))
        weights[0], weights[-1] = 0.0, 1.0
        reward, group = float(rng.choice([0.0, 0.5, 1.0])), f"g{number % 2}"
        own = [logprobs.setdefault((group, *ids[: at + 1]), -rng.exponential()) for at in range(len(ids))]
        items.append(rollout(ids, reward, group, loss_weights=weights, rollout=f"r{number}", old_logprobs=own))
    return items


def cut(items: list[Trajectory], rng: np.random.Generator) -> tuple[list[Trajectory], list[int]]:
    """Every rollout as several rows, cut between turns; each trained token in exactly one row. Also whose each is."""
    rows, owner = [], []
    for number, item in enumerate(items):
        turns = turns_of(item)
        last = [index for index in range(len(turns)) if index + 1 == len(turns) or rng.random() < 0.5]
        first = 0
        for index in last:
            end = turns[index][1]
            weights = np.zeros(end)
            weights[turns[first][0] :] = item.loss_weights[turns[first][0] : end]
            reward = item.reward if index + 1 == len(turns) or rng.random() < 0.5 else None
            given = {name: getattr(item, name) for name in ("token_ids", "old_logprobs", "sampler_logprobs")}
            streams = {name: None if values is None else values[:end] for name, values in given.items()}
            rows.append(replace(item, loss_weights=weights, reward=reward, **streams))
            owner.append(number)
            first = index + 1
    return rows, owner


# -- groups -----------------------------------------------------------------------------------------------------------


def test_batch_scale_divides_by_the_deviation_of_all_rollouts() -> None:
    items = [rollout([1, 2], 0.0), rollout([1, 3], 1.0), rollout([1, 2], 4.0, "b"), rollout([1, 3], 6.0, "b")]
    for epsilon in (0.0, 0.5):
        found, _ = group_normalized(items, scale="batch", epsilon=epsilon)
        expected = np.array([-0.5, 0.5, -1, 1]) / (np.std([0, 1, 4, 6], ddof=1) + epsilon)
        assert [advantage_of(item) for item in found] == pytest.approx(expected)
    pair, _ = group_normalized(items[2:], scale="batch", epsilon=0.0)
    assert [advantage_of(item) for item in pair] == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert advantage_of(group_normalized(items[:1], scale="batch", epsilon=0.0)[0][0]) == 0


def test_the_report_names_groups_that_teach_nothing() -> None:
    items = [
        *(rollout([1, 2 + n], 0.1, "equal") for n in range(3)),
        rollout([1, 2], 1.0, "single"),
        rollout([1, 2], 1.0, "good"),
        rollout([1, 3], 0.0, "good"),
    ]
    found, report = group_normalized(items)
    assert report.zero_variance_groups == ("equal",)
    assert report.groups_of_one == ("single",)
    assert (report.num_trajectories, report.num_rollouts, report.num_groups) == (6, 6, 3)
    assert report.num_silent_rollouts == 4
    assert [advantage_of(item) for item in found[:4]] == [0, 0, 0, 0]  # exactly, though 0.1 + 0.1 + 0.1 is not 0.3
    assert str(report) == (
        "group_normalized(scale='group'): 6 rollouts in 6 trajectories, 3 groups, mean reward 0.3833.\n"
        "of advantage 0 throughout: 4 rollouts.\n"
        "1 group of equal rewards, from which nothing is learned: equal.\n"
        "1 group of one rollout, which is compared with nothing: single."
    )
    for count, names in ((8, "0, 1, 2, 3, 4, 5, 6, 7."), (9, "0, 1, 2, 3, 4, 5, 6, 7 and 1 more.")):
        _, report = per_turn([Trajectory([1, 2], group=n) for n in range(count)], [[1.0]] * count)
        lines = str(report).splitlines()
        assert lines[0].endswith(f": {count} rollouts in {count} trajectories, {count} groups.")
        assert lines[2] == f"{count} groups of one rollout, which is compared with nothing: {names}"
        assert lines[3:] == list(report.notes)


@pytest.mark.parametrize(("name", "method"), BOTH.items(), ids=BOTH.keys())
@given(items=rollout_lists())
def test_groups_are_credited_by_themselves_and_named(name: str, method, items: list[Trajectory]) -> None:
    """Two groups together get what each gets alone, and every rollout its weight."""
    together, report = method(items)
    assert report.method.startswith(FUNCTIONS[name.split()[0]])
    assert [item.rollout_weight for item in together] == [item.weight for item in items]
    alone = {g: iter(method([item for item in items if item.group == g])[0]) for g in {each.group for each in items}}
    if name not in ("batch", "path mean whitened"):
        for item in together:
            np.testing.assert_array_equal(item.advantages, next(alone[item.group]).advantages)


# -- rows of one rollout ----------------------------------------------------------------------------------------------


@pytest.mark.representatives(
    "group", "siblings scaled", "turns", "path mean whitened", "treerl local", "inter intra", "node value"
)
@given(items=rollout_lists(), seed=st.integers(0, MAX_SEED))
@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH.keys())
def test_cutting_rollouts_into_rows_changes_nothing(method, items: list[Trajectory], seed: int) -> None:
    rows, owner = cut(items, np.random.default_rng(seed))
    whole, report = method(items)
    parts, report_of_rows = method(rows)
    for row, number in zip(parts, owner, strict=True):
        trained = row.loss_weights > 0
        expected = whole[number].advantages[: len(row)]
        np.testing.assert_allclose(row.advantages[trained], expected[trained], rtol=1e-6, atol=1e-6)
        assert row.rollout_weight == pytest.approx(whole[number].rollout_weight)
    assert report_of_rows.num_rollouts == report.num_rollouts
    assert report_of_rows.num_silent_rollouts == report.num_silent_rollouts
    assert report_of_rows.zero_variance_groups == report.zero_variance_groups


def test_equal_rollout_ids_of_different_groups_are_different_rollouts() -> None:
    items = [rollout([1, 2], float(n), f"g{n // 2}", rollout=n % 2) for n in range(4)]
    _, report = mean_centered(items)
    assert (report.num_rollouts, report.num_groups) == (4, 2)


def test_rollout_weights() -> None:
    items = [rollout([1, 2, 3], 0.0, rollout=1), rollout([1, 2], 0.0, rollout=1), rollout([1, 5], 0.0)]
    assert [item.rollout_weight for item in with_rollout_weights(items)] == [3, 3, 1]


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH.keys())
def test_refusals(method) -> None:
    good = rollout([1, 2], 1.0, rollout=7)
    with pytest.raises(DataError, match="at least one trajectory"):
        method([])
    with pytest.raises(DataError, match=r"rows.jsonl:3: no group"):
        method([good, Trajectory([1, 2], reward=1.0, source="rows.jsonl:3")])
    with pytest.raises(DataError, match=r"rows.jsonl:4: no reward"):
        method([good, Trajectory([1, 2], group="a", source="rows.jsonl:4")])
    with pytest.raises(DataError, match=r"rollout 7 of group 'a' has reward 0.5 here and 1 in another row"):
        method([good, rollout([1, 3], 0.5, rollout=7)])


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (group_normalized, {"scale": "std"}, "scale='std'"),
        (group_normalized, {"epsilon": -1}, "epsilon=-1 must not be negative"),
        (sibling_relative, {"scale": "group"}, "scale='group'"),
        (per_turn, {"baseline": "mean"}, "baseline='mean'"),
        (per_turn, {"discount": 1.5}, "discount=1.5"),
        (per_turn, {"baseline": "none", "scale": True}, "scale=True"),
        (tree_path_mean, {"average": "leaf"}, "average='leaf' is unknown; choose one of equal, size"),
        (tree_path_mean, {"scale": "group"}, "scale='group' is unknown; choose one of none, batch"),
        (inter_intra, {"epsilon": -1}, "epsilon=-1 must not be negative"),
        (value_steps, {"mask_above": 1.5}, "mask_above=1.5 must lie in 0..1"),
        (value_steps, {"mask_above": 0.0}, "mask_above=0.0 must lie in 0..1"),
        (node_value, {"weights": "size"}, "weights='size' is unknown; choose one of equal, entropy"),
    ],
)
def test_unknown_settings(method, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method([rollout([1, 2], 1.0)], **settings)


# -- siblings ---------------------------------------------------------------------------------------------------------


def forked() -> list[Trajectory]:
    """[1 2] forks into 3.. (forking again into 4, 5, 6) and 7; rewards 1, 0, 0 below 3, and 1 at 7."""
    paths, rewards = ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 7, 8]), (1.0, 0.0, 0.0, 1.0)
    return [rollout(path, reward) for path, reward in zip(paths, rewards, strict=True)]


def test_siblings_by_hand() -> None:
    third = 1 / 3
    found, report = sibling_relative(forked())
    expected = [[0, 0, third - 0.5, 1 - third], [0, 0, third - 0.5, -third], [0, 0, third - 0.5, -third]]
    np.testing.assert_allclose([item.advantages for item in found], [*expected, [0, 0, 0.5, 0.5]], atol=1e-7)
    assert report.notes == ("2 forks at which rollouts part; 0 of them with children of equal value.",)
    deviation = np.std([1, 0, 0, 1], ddof=1)
    for options, epsilon in (({}, 1e-4), ({"epsilon": 0.0}, 0.0), ({"epsilon": 0.5}, 0.5)):
        scaled, _ = sibling_relative(forked(), scale="siblings", **options)
        np.testing.assert_allclose(scaled[3].advantages[2:], [0.5 / (deviation + epsilon)] * 2, rtol=1e-6)
    # Token 3 was drawn once, with three rollouts: they weigh as much as the one below 7.
    drawn = [replace(item, draws=[-1, -1, item.token_ids[2] == 7, n]) for n, item in enumerate(forked(), start=2)]
    weights = np.array([1, 1, 1, 3]) / 6
    mean = weights @ [1, 0, 0, 1]
    deviation = np.sqrt(weights @ (np.array([1, 0, 0, 1]) - mean) ** 2 / (1 - weights @ weights))
    scaled, _ = sibling_relative(drawn, scale="siblings", epsilon=0.0)
    np.testing.assert_allclose(scaled[3].advantages[2:], [(1 - mean) / deviation] * 2, rtol=1e-6)
    pair, report = sibling_relative([*forked()[:2], *(replace(each, group="b") for each in forked())], scale="siblings")
    np.testing.assert_allclose(pair[0].advantages[3], 0.5 / (0.5**0.5 + 1e-4), rtol=1e-6)
    assert report.notes == ("3 forks at which rollouts part; 0 of them with children of equal value.",)
    _, report = sibling_relative([rollout([1, n], 1.0, g) for g in "ab" for n in (2, 3)])
    assert report.notes == ("2 forks at which rollouts part; 2 of them with children of equal value.",)


def test_segment_values_by_hand() -> None:
    third = 1 / 3
    np.testing.assert_allclose(segment_values(forked())[0], [0.5, 0.5, third, 1])


def test_a_rollout_that_ends_at_a_fork_is_a_child() -> None:
    items = [rollout([1, 2], 0.0), rollout([1, 2, 3], 1.0), rollout([1, 2, 3], 1.0), rollout([1, 2, 4], 1.0)]
    np.testing.assert_allclose(sibling_relative(items)[0][1].advantages, [0, 0, 0.25])


def test_groups_are_trees_of_their_own_and_roots_are_compared() -> None:
    items = [rollout([1, 2], 1.0), rollout([5, 6], 0.0), rollout([1, 9], 7.0, "b"), rollout([1, 9], 7.0, "b")]
    found, report = sibling_relative(items)
    assert [item.advantages.tolist() for item in found] == [[0.5, 0.5], [-0.5, -0.5], [0, 0], [0, 0]]
    assert report.zero_variance_groups == ("b",)


# -- turns ------------------------------------------------------------------------------------------------------------


def test_turns_are_runs_of_trained_tokens() -> None:
    item = Trajectory([1, 2, 3, 4, 5, 6], [0, 1, 1, 0, 0.5, 2])
    assert turns_of(item) == [(1, 3), (4, 6)]
    assert spread_over_turns(item, [3.0, -1.0]).tolist() == [0, 3, 3, 0, -1, -1]
    with pytest.raises(DataError, match=r"^trajectory: 1 values for 2 turns"):
        spread_over_turns(item, [1.0])
    with pytest.raises(DataError, match=r"^a.jsonl:3: 1 values for 2 turns"):
        spread_over_turns(replace(item, source="a.jsonl:3"), [1.0])


def test_returns_by_turn() -> None:
    weights = [0, 1, 0, 1, 0, 1]
    items = [
        rollout([1, 2, 3, 4, 5, 6], 4.0, loss_weights=weights),
        rollout([1, 2, 3, 4], 0.0, loss_weights=weights[:4]),
    ]
    rewards = [[1.0, 0.0, 0.0], [0.0, 2.0]]
    alone, _ = per_turn(items, rewards, discount=0.5, baseline="none")  # 4 counts with the last turn
    assert alone[0].advantages.tolist() == [0, 1 + 0.5 * 2, 0, 2, 0, 4]
    assert alone[1].advantages.tolist() == [0, 1, 0, 2]
    by_turn, report = per_turn(items, rewards, discount=0.5)
    assert by_turn[0].advantages.tolist() == [0, 0.5, 0, 0, 0, 0]  # the third turn is alone
    assert by_turn[1].advantages.tolist() == [0, -0.5, 0, 0]
    assert report.notes == ("5 turns; of them compared with no other and 0: 1.",)
    by_group, _ = per_turn(items, rewards, discount=0.5, baseline="group", scale=True, epsilon=0.0)
    deviation = np.std([2, 2, 4, 1, 2], ddof=1)
    np.testing.assert_allclose(by_group[0].advantages[5], (4 - 2.2) / deviation, rtol=1e-6)
    for baseline, members in (("group", [2, 2, 4, 1, 2]), ("turn", [2, 1])):
        for options, epsilon in (({}, 1e-4), ({"epsilon": 0.5}, 0.5)):
            scaled, _ = per_turn(items, rewards, discount=0.5, baseline=baseline, scale=True, **options)
            expected = (2 - np.mean(members)) / (np.std(members, ddof=1) + epsilon)
            np.testing.assert_allclose(scaled[0].advantages[1], expected, rtol=1e-6)
    outcome, report = per_turn(items, discount=0.5, baseline="none")
    assert outcome[0].advantages.tolist() == [0, 1, 0, 2, 0, 4]
    assert report.notes == ("5 turns; of them compared with no other and 0: 0.",)
    last, _ = per_turn(items, discount=0.0, baseline="none")
    assert last[0].advantages.tolist() == [0, 0, 0, 0, 0, 4]
    with pytest.raises(DataError, match=r"^trajectory 0: turn rewards .* for 3 turns"):
        per_turn(items, [[1.0], [0.0, 2.0]])
    with pytest.raises(DataError, match=r"^a.jsonl:3: turn rewards .* for 3 turns"):
        per_turn([replace(items[0], source="a.jsonl:3"), items[1]], [[1.0], [0.0, 2.0]])
    with pytest.raises(DataError, match="1 lists of turn rewards for 2 trajectories"):
        per_turn(items, [[1.0, 0.0, 0.0]])


def test_rewards_of_tokens_are_those_of_their_turns() -> None:
    weights = [0, 1, 1, 0, 0.5, 2]
    item = rollout([1, 2, 3, 4, 5, 6], 4.0, loss_weights=weights, token_rewards=[0, 1, 2, 0, 0, -1])
    other = rollout([1, 2, 3], 0.0, loss_weights=[0, 1, 1])
    found, _ = per_turn([item, other], discount=0.5, baseline="none")
    assert found[0].advantages.tolist() == [0, 3 + 0.5 * 3, 3 + 0.5 * 3, 0, 3, 3]
    assert found[1].advantages.tolist() == [0, 0, 0]
    given, _ = per_turn([item, other], [[0.0, 0.0], [0.0]], discount=0.5, baseline="none")
    assert given[0].advantages.tolist() == [0, 2, 2, 0, 4, 4]
    with pytest.raises(DataError, match=r"^a.jsonl:3: token_rewards at tokens that are not trained"):
        per_turn([replace(item, token_rewards=[0, 0, 0, 1, 0, 0], source="a.jsonl:3"), other])


def test_rows_of_one_rollout_have_its_turns_one_after_the_other() -> None:
    """Three rows of a turn each, with another rollout's row in between."""
    rows = [
        rollout([1, 2, 3, 4, 5, 6][:end], None, rollout=1, loss_weights=[0.0] * (end - 1) + [1]) for end in (2, 4, 6)
    ]
    rows.insert(1, rollout([1, 9], 0.0, rollout=2))
    found, _ = per_turn(rows, [[1.0], [0.0], [10.0], [100.0]], discount=0.5, baseline="none")
    assert [item.advantages[-1] for item in found] == [1 + 0.5 * 10 + 0.25 * 100, 0, 10 + 0.5 * 100, 100]


def test_turn_rewards_stand_in_for_an_outcome() -> None:
    items = [Trajectory([1, 2], group="a"), Trajectory([1, 3], group="a")]
    found, report = per_turn(items, [[1.0], [0.0]])
    assert [advantage_of(item) for item in found] == [0.5, -0.5]
    assert "mean reward" not in str(report)
