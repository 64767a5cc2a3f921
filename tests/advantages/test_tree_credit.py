"""Credit on trees: trees counted by hand, and each rule against one that compares prefixes, rollout by rollout."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.advantages.test_advantages import ON_TREES, forked, rollout, rollout_lists
from tests.crossings.plain_credit import CREDIT, advantages_of
from treewise import Trajectory
from treewise.advantages import inter_intra, node_value, segment_values, tree_path_mean, treerl, value_steps
from treewise.advantages.group_tree import group_trees
from treewise.advantages.rollout_table import read_rollouts
from treewise.errors import DataError
from treewise.rl.branching import PROMPT, RolloutNode, RolloutTree
from treewise.rl.node_values import node_values
from treewise.rl.update import ADVANTAGES
from treewise.testing.strategies import MAX_SEED


def advantages(result) -> list[list[float]]:
    return [item.advantages.tolist() for item in result.trajectories]


@st.composite
def drawn_trees(draw: st.DrawFn) -> list[Trajectory]:
    """The rows of a tree that grew from few tokens, so that draws repeat one another, with their draws."""
    rng = np.random.default_rng(draw(st.integers(0, MAX_SEED)))
    tree = RolloutTree([9], group="a")
    for _ in range(int(rng.integers(2, 9))):
        points = [(PROMPT, 0), *((n, at) for n, node in enumerate(tree.nodes) for at in range(1, len(node)))]
        parent, position = points[rng.integers(len(points))]
        ids = [*rng.integers(0, 2, rng.integers(1, 4)), 9]
        index = tree.add(RolloutNode(ids, -rng.exponential(size=len(ids)), parent, position, finish="stop"))
        tree.judge(index, float(rng.choice([0.0, 0.5, 1.0])))
    return [replace(each, old_logprobs=each.sampler_logprobs) for each in tree.trajectories()]


# -- what holds for all -----------------------------------------------------------------------------------------------


@pytest.mark.representatives("tree_path_mean", "inter_intra", "value_steps")
@given(items=rollout_lists(), reward=st.sampled_from([0.1, 0.7]))
@pytest.mark.parametrize("method", [each for name, each in ON_TREES.items() if name != "path mean whitened"])
def test_equal_rewards_give_exactly_nothing(method, items: list[Trajectory], reward: float) -> None:
    found, report = method([replace(item, reward=reward) for item in items])
    assert not any(item.advantages.any() for item in found)
    assert report.num_silent_rollouts == len(items)


def test_what_the_rows_lack() -> None:
    bare = [replace(item, sampler_logprobs=None) for item in forked()]
    with pytest.raises(DataError, match="trajectory 0: the probability mask needs old_logprobs or sampler_logprobs"):
        value_steps(bare)
    with pytest.raises(DataError, match="weights='entropy' needs old_logprobs"):
        node_value(bare, weights="entropy")
    with pytest.raises(DataError, match="1 tree for 4 trajectories"):
        inter_intra(bare, ["t"])


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_path_mean_by_hand() -> None:
    """Against the mean of all, 1/2, and of those below 3, 1/3."""
    first, second, other = (0.5 + 2 / 3) / 2, (-0.5 - 1 / 3) / 2, 0.5
    np.testing.assert_allclose(advantages(tree_path_mean(forked())), [[x] * 4 for x in (first, second, second, other)])
    by_size = (4 * 0.5 + 3 * 2 / 3) / 7
    np.testing.assert_allclose(advantages(tree_path_mean(forked(), average="size"))[0], by_size, rtol=1e-6)
    values = np.array([first, second, second, other])
    for epsilon in (0.0, 0.5):
        white = (values - values.mean()) / (values.std() + epsilon)
        found = [row[0] for row in advantages(tree_path_mean(forked(), scale="batch", epsilon=epsilon))]
        np.testing.assert_allclose(found, white, rtol=1e-6)
    equal = [replace(item, reward=0.5) for item in forked()]
    assert not np.any(advantages(tree_path_mean(equal, scale="batch", epsilon=0.0)))


def test_inter_intra_by_hand() -> None:
    """Between: mean 1/2, deviation 1/sqrt(3). Within the tree of 3: mean 1/3, the same deviation."""
    found = [row[0] for row in advantages(inter_intra(forked(), epsilon=0.0))]
    root = np.sqrt(3)
    np.testing.assert_allclose(found, [root / 2 + 2 * root / 3, -root / 2 - root / 3, -root / 2 - root / 3, root / 2])
    # A rollout that ends where others part is a tree of its own, in every group.
    ids = ([1, 2], [1, 2, 3], [1, 2, 4])
    ends = [
        rollout(each, r, g)
        for g, last in (("a", 1.0), ("b", 0.0))
        for each, r in zip(ids, (last, 0.0, 1.0), strict=True)
    ]
    alone = [(r - np.mean(rs)) / np.std(rs, ddof=1) for rs in ([1, 0, 1], [0, 0, 1]) for r in rs]
    np.testing.assert_allclose([row[0] for row in advantages(inter_intra(ends, epsilon=0.0))], alone, rtol=1e-6)
    # Two trees that begin with the same token are one to the rule, unless it is told.
    items = [rollout([1, 2, token], reward) for token, reward in ((3, 1.0), (4, 0.0), (5, 1.0))]
    assert "3 trees" in inter_intra(items).report.notes[0]
    told = advantages(inter_intra(items, ["x", "x", "y"], epsilon=0.0))
    between = (1 - 2 / 3) / np.std([1, 0, 1], ddof=1)
    within = 0.5 / np.std([1, 0], ddof=1)
    np.testing.assert_allclose([told[0][0], told[2][0]], [between + within, between], rtol=1e-6)


def test_treerl_by_hand() -> None:
    """V: root 1/2, segment 3 1/3, leaves 1, 0, 0 and 1."""
    three = 2 * (1 / 3 - 1 / 2) / np.sqrt(3)
    rows = advantages(treerl(forked()))
    np.testing.assert_allclose(rows[0], [0, 0, three, 1 / 2 + 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(rows[1], [0, 0, three, -1 / 2 - 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(rows[3], [0, 0, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(
        advantages(treerl(forked(), use_local=False, damp=False))[0], [0, 0, -1 / 6, 1 / 2], rtol=1e-6
    )


def test_value_steps_by_hand() -> None:
    """V over four draws: segment 3 1/3, root 1/2; a token of probability 0.95 is masked."""
    items = forked()
    items[0] = replace(items[0], sampler_logprobs=[0, -1, -1, np.log(0.95)])
    items[3] = replace(items[3], sampler_logprobs=[0, -1, np.log(0.89), np.log(0.91)])
    mean = 1 / 2
    rows = advantages(value_steps(items))
    np.testing.assert_allclose(rows[0], [0, 0, 1 / 3 - mean, 0], rtol=1e-6)
    np.testing.assert_allclose(rows[1], [0, 0, 1 / 3 - mean, -1 / 3], rtol=1e-6)
    np.testing.assert_allclose(rows[3], [0, 0, 1 - mean, 0], rtol=1e-6)
    assert value_steps(items).report.notes[1] == "2 of 12 trained tokens are masked."
    np.testing.assert_allclose(advantages(value_steps(items, mask_above=None))[0][3], 2 / 3, rtol=1e-6)
    assert value_steps(items, mask_above=None).report.notes[0].startswith("2 forks")
    # The log-probs of before the update count where there are any; a sure token is masked at 1, too.
    items[0] = replace(items[0], old_logprobs=[0, -1, -1, 0], sampler_logprobs=[-1] * 4)
    assert advantages(value_steps(items, mask_above=1.0))[0] == pytest.approx([0, 0, 1 / 3 - mean, 0])
    for options, epsilon in (({}, 1e-8), ({"epsilon": 0.5}, 0.5)):
        scaled = advantages(value_steps(items, mask_above=None, scale="siblings", **options))
        assert scaled[3][2] == pytest.approx(0.5 / (np.std([1, 0, 0, 1], ddof=1) + epsilon))


def test_node_value_by_hand() -> None:
    """Rewards 1, 0, 0, 1 are 1, -1, -1, 1 in deviations: segment 3 is -1/3, the prompt 0; with 3 drawn once, 1/3."""
    rows = advantages(node_value(forked(), epsilon=0.0))
    np.testing.assert_allclose(rows, [[0, 0, -1 / 3, x] for x in (1, -1, -1)] + [[0, 0, 1, 1]], rtol=1e-6)
    drawn = [replace(item, draws=[-1, -1, item.token_ids[2] == 7, n]) for n, item in enumerate(forked(), start=2)]
    third = 1 / 3
    rows = advantages(node_value(drawn, epsilon=0.0))
    np.testing.assert_allclose(
        rows, [[third, third, -third, x] for x in (1, -1, -1)] + [[third, third, 1, 1]], rtol=1e-6
    )
    items = forked()
    items[0] = replace(items[0], sampler_logprobs=[0, -1, -1, -3])  # surprise 3 against 1 and 1
    heavy = np.exp([3.0, 1, 1]) @ [1, -1, -1] / np.exp([3.0, 1, 1]).sum()
    np.testing.assert_allclose(advantages(node_value(items, weights="entropy", epsilon=0.0))[1][2], heavy, rtol=1e-6)


def test_a_rollout_whose_rows_part_counts_once() -> None:
    """Its rows are in two children of the prompt, half a draw each, beside a child of another rollout."""
    items = [
        rollout([1, 2, 5, 6], 1.0, rollout=1, draws=[-1, -1, 1, 1]),
        rollout([1, 2, 7], 1.0, rollout=1, draws=[-1, -1, 1]),
        rollout([1, 2, 8], 0.0, rollout=2, draws=[-1, -1, 2]),
    ]
    (tree,) = group_trees(read_rollouts(items))
    np.testing.assert_array_equal(tree.num_draws, [1, 0.5, 0.5, 1])
    np.testing.assert_allclose(tree.means(tree.rewards), [0.5, 1, 1, 0, 0.5])


def test_entropy_is_of_what_a_draw_wrote_until_its_rollouts_part() -> None:
    """Trained tokens of all rows of one rollout, by the log-probs of before the update."""
    sampler = {"rollout": 1, "sampler_logprobs": [-9.0] * 5}
    items = [
        rollout([1, 2, 3, 4, 6], 1.0, **sampler, old_logprobs=[0, -9, -1, -3, -4], loss_weights=[0, 0, 1, 1, 1]),
        rollout([1, 2, 3, 5, 7], 1.0, **sampler, old_logprobs=[0, -9, -1, -2, -50], loss_weights=[0, 0, 1, 1, 0]),
        rollout([1, 2, 9], 0.0, rollout=2, loss_weights=[0, 0, 1]),
    ]
    heavy = np.exp([(1 + 3 + 4 + 2) / 4, 1]) @ [1, -1] / np.exp([(1 + 3 + 4 + 2) / 4, 1]).sum()
    for rows in (items, items[::-1]):
        np.testing.assert_allclose(advantages(node_value(rows, weights="entropy", epsilon=0.0))[0][1], heavy, rtol=1e-6)


# -- against comparisons of prefixes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*CREDIT, "batch"}))
@given(items=st.one_of(rollout_lists(), drawn_trees()))
def test_every_token_is_credited_as_prefixes_say(name: str, items: list[Trajectory]) -> None:
    """The plain credit that crossings hold online runs against; of rows without draws it knows no trees."""
    assume(name != "inter_intra" or items[0].draws is not None)
    for found, expected in zip(ADVANTAGES[name](items).trajectories, advantages_of(items, name), strict=True):
        trained = found.loss_weights > 0
        np.testing.assert_allclose(found.advantages[trained], expected[trained], atol=1e-5)


# -- values against what they estimate --------------------------------------------------------------------------------


def grown_from(rng: np.random.Generator, width: int, depth: int) -> tuple[RolloutTree, float]:
    """SPO's tree: `width` draws from each state, down to `depth` tokens; of tokens 0 to 2, of which 0 has probability
    0.8 and ends half of its rollouts there. The reward is the share of 1s. Also SPO's value of the root.
    """
    tree = RolloutTree([9], group="a")

    def below(parent: int, cut: int, ids: list[int]) -> float:
        values = []
        for _ in range(width):
            token = int(rng.choice(3, p=[0.8, 0.15, 0.05]))
            has_ended = len(ids) + 1 == depth or (token == 0 and rng.random() < 0.5)
            own = [*ids, token]
            node = RolloutNode([token], [-1.0], parent, cut, finish="stop" if has_ended else None)
            index = tree.add(node)
            if has_ended:
                values.append(own.count(1) / len(own))
                tree.judge(index, values[-1])
            else:
                values.append(below(index, 1, own))
        return float(np.mean(values))

    return tree, below(PROMPT, 0, [])


def test_values_are_those_of_spo_on_its_trees() -> None:
    """Draws of the same tokens included, which is most of them; and the mean of the estimates is the exact value."""
    exact = 0.0
    states = [((), 1.0)]
    while states:
        ids, p = states.pop()
        for token, q in enumerate((0.8, 0.15, 0.05)):
            own, ending = (*ids, token), 1.0 if len(ids) == 2 else 0.5 * (token == 0)
            exact += p * q * ending * own.count(1) / 3 if len(own) == 3 else p * q * ending * own.count(1) / len(own)
            if ending < 1:
                states.append((own, p * q * (1 - ending)))
    found, distinct = [], []
    for seed in range(400):
        tree, root = grown_from(np.random.default_rng(seed), width=3, depth=3)
        rows = tree.trajectories()
        value = segment_values(rows)[0][0]
        assert value == pytest.approx(root, abs=1e-12)
        assert node_values(tree)[0].value == pytest.approx(root, abs=1e-12)
        found.append(value)
        distinct.append(np.mean([row.reward for row in {tuple(row.token_ids): row for row in rows}.values()]))
    standard_error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - exact) < 4 * standard_error
    assert abs(np.mean(distinct) - exact) > 10 * standard_error  # what counting each text once would give


# -- rows of one rollout ----------------------------------------------------------------------------------------------


def test_rows_of_one_rollout_that_part_are_not_compared() -> None:
    """Rollout 1 forks into two rows by itself below [1 2 3]; both keep what [3] got against rollout 2's [9]."""
    items = [
        rollout([1, 2, 3, 4], 1.0, rollout=1),
        rollout([1, 2, 3, 5], 1.0, rollout=1),
        rollout([1, 2, 9], 0.0, rollout=2),
    ]
    assert advantages(tree_path_mean(items)) == [[0.5] * 4, [0.5] * 4, [-0.5] * 3]
    assert advantages(treerl(items)) == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, -1]]
    assert advantages(value_steps(items, mask_above=None)) == [[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], [0, 0, -0.5]]
    np.testing.assert_allclose(advantages(node_value(items, epsilon=0.0))[1], [0, 0, 1, 1])
    assert advantages(inter_intra(items))[0] == advantages(inter_intra(items))[1]


def test_equal_groups_count_once() -> None:
    """Rollouts 1 and 2 both have rows below 3 and below 4: one group of two, with two places in the tree."""
    items = [rollout([1, 2, token, n], float(n == 1), rollout=n) for token in (3, 4) for n in (1, 2)]
    items.append(rollout([1, 2, 9], 0.0, rollout=3))
    first = (1 - 1 / 3 + 1 - 1 / 2) / 2
    second = (-1 / 3 - 1 / 2) / 2
    found = [row[0] for row in advantages(tree_path_mean(items))]
    np.testing.assert_allclose(found, [first, second, first, second, -1 / 3], rtol=1e-6)
