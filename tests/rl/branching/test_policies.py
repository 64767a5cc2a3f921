"""Branching policies: each rule against one written from its source, on grown trees; budgets and names for all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.growing_trees import ToySampler, facts, grow
from treewise.errors import ConfigError, DataError
from treewise.experimental.lcr import LcrBranching, change_rates
from treewise.rl.branching import BRANCHINGS, PROMPT, Branch, RolloutNode, RolloutTree, Signals, branching_named
from treewise.rl.branching.protocol import points_of
from treewise.testing.strategies import MAX_SEED

seeds = st.integers(0, MAX_SEED)


def policy(name: str, **options):
    if name == "segments":
        options = {"segment_tokens": 3, "width": 4, "first": 2, **options}
    return branching_named(name, **options)


def prefix(tree: RolloutTree, node: int, position: int) -> tuple[int, ...]:
    return tuple(tree.prefix_ids(node, position))


# -- all policies -----------------------------------------------------------------------------------------------------


@given(seed=seeds, budget=st.integers(1, 150))
@pytest.mark.parametrize("name", BRANCHINGS)
def test_budgets_count_generated_tokens(name: str, seed: int, budget: int) -> None:
    """Rounds go on until the budget is spent; once lengths are known, the last round passes it by little."""
    tree, rounds = grow(policy(name), budget, ToySampler(seed), np.random.default_rng(seed))
    spent = tree.num_sampled_tokens
    assert spent >= budget
    assert sum(branch.count for requests in rounds for branch in requests) == len(tree)
    before_last = spent - sum(node.num_sampled for node in tree.nodes[-sum(branch.count for branch in rounds[-1]) :])
    assert before_last < budget


@pytest.mark.parametrize("name", BRANCHINGS)
def test_a_spent_budget_asks_for_nothing(name: str) -> None:
    tree = RolloutTree([1])
    assert policy(name).next_requests(tree, Signals(), 0, np.random.default_rng(0)) == []
    assert policy(name).next_requests(tree, Signals(), -5, np.random.default_rng(0)) == []


@given(seed=seeds)
@pytest.mark.parametrize("name", BRANCHINGS)
def test_policies_are_pure(name: str, seed: int) -> None:
    """The same tree and generator give the same requests, and the tree is left alone."""
    tree, _ = grow(policy(name), 50, ToySampler(seed), np.random.default_rng(seed))
    before = facts(tree)
    asked = [policy(name).next_requests(tree, Signals(), 100, np.random.default_rng(seed)) for _ in range(2)]
    assert asked[0] == asked[1]
    assert asked[0]
    assert facts(tree) == before


@given(seed=seeds, variations=st.integers(1, 6))
@pytest.mark.parametrize("name", ["random", "entropy", "turns", "lcr"])
def test_at_most_v_variations(name: str, seed: int, variations: int) -> None:
    tree, _ = grow(policy(name, variations=variations), 120, ToySampler(seed), np.random.default_rng(seed))
    assert max(len(tree.below(root)) for root in tree.roots) <= variations


@given(seed=seeds, roots=st.integers(1, 4))
@pytest.mark.parametrize("name", ["random", "entropy", "turns", "lcr"])
def test_one_variation_is_none_bit_for_bit(name: str, seed: int, roots: int) -> None:
    rngs = [np.random.default_rng(seed) for _ in range(2)]
    alone, rounds_alone = grow(policy("none", roots=roots), 90, ToySampler(seed), rngs[0])
    varied, rounds = grow(policy(name, variations=1, roots=roots), 90, ToySampler(seed), rngs[1])
    assert rounds == rounds_alone
    assert facts(varied) == facts(alone)
    assert rngs[0].bit_generator.state == rngs[1].bit_generator.state


def test_the_last_round_keeps_what_the_budget_holds() -> None:
    tree = RolloutTree([1])
    tree.add(RolloutNode([2] * 10, [0] * 10, finish="stop"))
    asked = [policy("none", roots=8).next_requests(tree, Signals(), left, None)[0].count for left in (100, 39, 10, 1)]
    assert asked == [8, 3, 1, 1]
    first = policy("none", roots=8).next_requests(RolloutTree([1]), Signals(expected_tokens=30.0), 100, None)
    assert first == [Branch(count=3)]


def test_unknown_names_and_settings() -> None:
    for call, message in (
        (lambda: branching_named("lcrr"), "unknown branching 'lcrr'. Did you mean 'lcr'?"),
        (lambda: branching_named("lcr", treshold=0.4), "unknown setting 'treshold' of branching 'lcr'. Did you mean"),
        (lambda: branching_named("lcr", variations="10"), r"variations='10' must be an integer"),
        (lambda: branching_named("lcr", variations=True), r"variations=True must be an integer"),
        (lambda: branching_named("lcr", threshold=1.5), "threshold=1.5 must be 0 or positive and at most 1"),
        (lambda: branching_named("lcr", points="words"), "points='words' is unknown; choose one of tokens, turns"),
        (lambda: branching_named("none", roots=0), "roots=0 must be at least 1"),
        (lambda: branching_named("turns", order="best"), "order='best' is unknown"),
        (lambda: branching_named("entropy", definition="gini"), "definition='gini' is unknown"),
        (lambda: branching_named("segments", width=0), "width=0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
            call()


# -- points -----------------------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_points_name_every_place_once(seed: int) -> None:
    """Every generated token that has one before it, and every end of a turn that another follows."""
    tree, _ = grow(policy("random"), 80, ToySampler(seed), np.random.default_rng(seed))
    for root in tree.roots:
        tokens = points_of(tree, root, "tokens")
        places = [(each.node, each.position) for each in tokens]
        assert len(set(places)) == len(places)
        expected = {(n, at) for n in tree.below(root) for at in range(1, len(tree[n])) if tree[n].is_sampled[at]}
        assert set(places) == expected
        for node, position, depth in tokens:
            assert depth == sum(token != 99 for token in prefix(tree, node, position)[3:])
        for node, position, depth in points_of(tree, root, "turns"):
            assert prefix(tree, node, position)[-1] == 99
            assert depth == prefix(tree, node, position).count(99)


# -- lcr --------------------------------------------------------------------------------------------------------------


@given(seed=seeds, strength=st.sampled_from([0.0, 2.0, 10.0]), kind=st.sampled_from(["tokens", "turns"]))
def test_change_rates_against_prefix_search(seed: int, strength: float, kind: str) -> None:
    rng = np.random.default_rng(seed)
    tree, _ = grow(policy("random", variations=8), 120, ToySampler(seed), rng)
    for leaf in tree.leaves:
        if rng.random() < 0.2:
            tree.judge(leaf, error="x")
    settings = LcrBranching(strength=strength, points=kind)
    for root in tree.roots:
        points = points_of(tree, root, kind)
        known = {(each.node, each.position): float(rng.random()) for each in points if rng.random() < 0.5}
        signals = Signals(success=float(rng.random()), node_success=known)
        for point, rate in zip(points, change_rates(tree, points, signals, settings), strict=True):
            # A rollout is below a point where it passes the very tokens before it: by node, as texts may repeat.
            outcomes = []
            for leaf in tree.leaves:
                passes = {(n, at) for n, end in tree.path_parts(leaf) for at in range(1, end + 1)}
                if (point.node, point.position) in passes and tree[leaf].reward is not None:
                    outcomes.append(tree[leaf].reward >= 0.5)
            pairs = list(zip(outcomes[::2], outcomes[1::2], strict=False))
            changes = sum(one != other for one, other in pairs)
            v = known.get((point.node, point.position), signals.success)
            prior = 2 * v * (1 - v)
            total = strength + len(pairs)
            assert rate == pytest.approx(prior if not total else (strength * prior + changes) / total)


@given(seed=seeds)
def test_no_branch_where_nothing_exceeds_the_threshold(seed: int) -> None:
    """v = 0.6 gives exactly the threshold, 0.48, which does not exceed it; v = 0.9 less; v = 0.5 more."""
    for success, branches in ((0.6, False), (0.9, False), (0.0, False), (0.5, True)):
        _, rounds = grow(
            policy("lcr", points="turns"),
            60,
            ToySampler(seed, constant=1.0),
            np.random.default_rng(seed),
            Signals(success),
        )
        assert any(branch.node != PROMPT for requests in rounds for branch in requests) == branches


def test_positions_are_weighted_by_depth() -> None:
    tree = RolloutTree([1])
    tree.add(RolloutNode(range(5), [0] * 5, finish="stop"))
    counts = np.zeros(5)
    for seed in range(2000):
        (branch,) = policy("lcr").next_requests(tree, Signals(), 99, np.random.default_rng(seed))
        counts[branch.position] += 1
    np.testing.assert_allclose(counts / 2000, np.arange(5) / 10, atol=0.04)
    counts[:] = 0
    for seed in range(2000):
        (branch,) = policy("lcr", weight_by_depth=False).next_requests(tree, Signals(), 99, np.random.default_rng(seed))
        counts[branch.position] += 1
    np.testing.assert_allclose(counts / 2000, [0, 0.25, 0.25, 0.25, 0.25], atol=0.04)


def test_a_repeated_action_moves_the_branch_to_an_earlier_point() -> None:
    """Turn points 1 and 2 of one rollout; only 2 is drawn (weights 1 and 2, at a seed that draws it)."""
    tree = RolloutTree([1])
    tree.add(RolloutNode([5, 6, 7], [0] * 3, turn_ends=[1, 2, 3], finish="stop"))
    seed = next(
        seed
        for seed in range(99)
        if policy("lcr", points="turns").next_requests(tree, Signals(), 9, np.random.default_rng(seed))[0].position == 2
    )
    tree.add(RolloutNode([7], [0], parent=0, cut=2, finish="stop"))  # the same turn again
    ask = policy("lcr", points="turns")
    assert ask.next_requests(tree, Signals(), 9, np.random.default_rng(seed)) == [Branch(0, 1)]
    tree.add(RolloutNode([6, 8], [0, 0], parent=0, cut=1, turn_ends=[1, 2], finish="stop"))
    # Both points have repeated; what is left is the point of the new node: depth 2, and no action has repeated there.
    found = {
        (branch.node, branch.position)
        for seed in range(50)
        for branch in ask.next_requests(tree, Signals(), 9, np.random.default_rng(seed))
    }
    assert found == {(2, 1), (PROMPT, 0)}


def test_actions_are_drawn_from_recorded_candidates() -> None:
    """Of two candidates at position 1 one is explored; position 2 has one alone, which is: it backtracks."""
    tree = RolloutTree([1])
    ids, inf = [[5, 9], [6, 8], [7, 9]], -np.inf
    tree.add(
        RolloutNode([5, 6, 7], [0] * 3, top_ids=ids, top_logprobs=[[0, inf], [-0.7, -0.7], [0, inf]], finish="stop")
    )
    asked = [policy("lcr").next_requests(tree, Signals(), 99, np.random.default_rng(seed)) for seed in range(40)]
    assert {branch for requests in asked for branch in requests} == {
        Branch(0, 1, first_token=8, first_logprob=0.0),
        Branch(),
    }
    tree.add(RolloutNode([8], [-0.7], parent=0, cut=1, finish="stop"))  # nothing unexplored is left
    asked = [policy("lcr").next_requests(tree, Signals(), 99, np.random.default_rng(seed)) for seed in range(40)]
    assert {branch for requests in asked for branch in requests} == {Branch()}


@given(seed=seeds)
def test_drawn_actions_are_new_at_their_point(seed: int) -> None:
    tree, _ = grow(policy("lcr"), 150, ToySampler(seed, with_top=True), np.random.default_rng(seed))
    for index, node in enumerate(tree.nodes):
        if node.parent == PROMPT:
            continue
        siblings = [
            tree[other] for other in tree.children(node.parent) if other < index and tree[other].cut == node.cut
        ]
        explored = {int(tree[node.parent].token_ids[node.cut]), *(int(each.token_ids[0]) for each in siblings)}
        assert int(node.token_ids[0]) not in explored


def test_a_drawn_action_has_the_log_prob_of_the_draw_that_was_made() -> None:
    """Candidates of 0.5, 0.3 and 0.1, the first taken: the others come 3 to 1, and are recorded so."""
    tree, inf = RolloutTree([1]), -np.inf
    tops = np.log([[0.5, 0.3, 0.1]] * 2)
    ids = [[5, 6, 7]] * 2
    tree.add(RolloutNode([5, 5], [-1, -1], top_ids=ids, top_logprobs=tops, finish="stop"))
    counts = {6: 0, 7: 0}
    for seed in range(4000):
        (branch,) = policy("lcr").next_requests(tree, Signals(), 99, np.random.default_rng(seed))
        if branch.first_token is not None:
            counts[branch.first_token] += 1
            assert branch.first_logprob == pytest.approx(np.log({6: 0.75, 7: 0.25}[branch.first_token]))
    assert counts[7] / sum(counts.values()) == pytest.approx(0.25, abs=5 * 0.5 / np.sqrt(sum(counts.values())))
    tree = RolloutTree([1])  # what top-k or top-p left out is no candidate
    tree.add(RolloutNode([5, 5], [-1, -1], top_ids=ids, top_logprobs=[[0, inf, inf]] * 2, finish="stop"))
    assert policy("lcr").next_requests(tree, Signals(), 99, np.random.default_rng(0)) == [Branch()]


# -- the others -------------------------------------------------------------------------------------------------------


def test_random_points_are_uniform() -> None:
    tree = RolloutTree([1])
    tree.add(RolloutNode(range(5), [0] * 5, finish="stop"))
    tree.add(RolloutNode(range(3), [0] * 3, parent=0, cut=2, finish="stop"))
    counts = {}
    for seed in range(3000):
        (branch,) = policy("random").next_requests(tree, Signals(), 99, np.random.default_rng(seed))
        counts[branch.node, branch.position] = counts.get((branch.node, branch.position), 0) + 1
    assert sorted(counts) == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2)]
    np.testing.assert_allclose(np.array(list(counts.values())) / 3000, 1 / 6, atol=0.03)


def test_entropy_by_hand() -> None:
    tree = RolloutTree([1])
    tree.add(RolloutNode(range(4), [-1, -9, -2, -3], entropies=[9, 0.1, 0.3, 0.2], finish="stop"))
    ask = lambda **options: policy("entropy", **options).next_requests(tree, Signals(), 99, None)  # noqa: E731
    assert ask(per_round=2) == [Branch(0, 2), Branch(0, 3)]  # a root's first token is no branch point
    assert ask(per_round=2, definition="surprisal") == [Branch(0, 1), Branch(0, 3)]
    assert ask(per_round=3, repeats=2) == [Branch(0, 2, 2), Branch(0, 3, 1)]
    tree.add(RolloutNode([8], [0], entropies=[0], parent=0, cut=2, finish="stop"))
    assert ask() == [Branch(0, 3)]
    tree.add(RolloutNode([7, 8], [-1, -1], finish="stop"))
    with pytest.raises(DataError, match="node 2 has no entropies"):
        ask()


def test_turns_by_hand() -> None:
    tree = RolloutTree([1])
    options = {"is_sampled": [1, 1, 0, 1, 0, 1], "turn_ends": [3, 5, 6], "finish": "stop"}
    tree.add(RolloutNode([2, 3, 99, 4, 99, 5], [-1, -3, 0, -2.01, 0, -9], **options))
    ask = lambda **given: policy("turns", order="uncertain", **given).next_requests(tree, Signals(), 99, None)  # noqa: E731
    assert ask(per_round=1) == [Branch(0, 5)]  # means 2 and 2.01
    assert ask(per_round=3) == [Branch(0, 5), Branch(0, 3)]
    tree.add(RolloutNode([6], [-1.0], parent=0, cut=5, finish="stop"))
    assert ask(per_round=1) == [Branch(0, 3)]  # 2 against 2.01 - 0.05
    assert ask(per_round=1, penalty=0.0) == [Branch(0, 5)]
    found = {
        branch.position
        for seed in range(30)
        for branch in policy("turns", per_round=1).next_requests(tree, Signals(), 99, np.random.default_rng(seed))
    }
    assert found == {3, 5}


def test_segments_by_hand() -> None:
    tree, ask = RolloutTree([1]), policy("segments", segment_tokens=2, width=5, first=2)
    rng = np.random.default_rng(0)
    assert ask.next_requests(tree, Signals(), 99, rng) == [Branch(PROMPT, 0, 2, max_tokens=2)]
    for _ in range(2):
        tree.add(RolloutNode([2, 3], [0, 0]))
    # Five places, two paths: 3 and 2, but no more than two continue one segment.
    assert ask.next_requests(tree, Signals(), 99, rng) == [Branch(n, 2, 2, max_tokens=2) for n in (0, 1)]
    for parent in (0, 0, 1):
        tree.add(RolloutNode([4], [0], parent=parent, cut=2, finish="stop"))
    tree.add(RolloutNode([4, 5], [0, 0], parent=1, cut=2))
    assert ask.next_requests(tree, Signals(), 99, rng) == [Branch(5, 2, 2, max_tokens=2)]  # places for two
    tree.add(RolloutNode([6], [0], parent=5, cut=2, finish="stop"))
    (branch,) = ask.next_requests(tree, Signals(), 99, rng)  # one place is left: back to a segment
    assert (branch.count, branch.max_tokens, tree[branch.node].has_ended) == (1, 2, False)
    assert branch.position == len(tree[branch.node])
    tree.add(RolloutNode([7], [0], parent=branch.node, cut=2, finish="stop"))
    assert ask.next_requests(tree, Signals(), 99, rng) == [Branch(PROMPT, 0, 2, max_tokens=2)]  # the next tree


@given(seed=seeds)
def test_segments_fill_their_width(seed: int) -> None:
    """Every tree that is complete has as many rollouts as it may; all segments continue their parent's end."""
    tree, _ = grow(policy("segments"), 200, ToySampler(seed), np.random.default_rng(seed))
    roots = list(tree.roots)
    sizes = [
        sum(tree[n].has_ended for root in roots[at : at + 2] for n in tree.below(root))
        for at in range(0, len(roots), 2)
    ]
    assert sizes[:-1] == [4] * (len(sizes) - 1)
    for node in tree.nodes:
        assert len(node) <= 3
        assert node.parent == PROMPT or node.cut == len(tree[node.parent])
