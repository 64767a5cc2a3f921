"""Plans, walked step by step: what is computed, what is alive when read, what fits; and how many micro-batches."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.plain_trees import is_above
from tests.planning.test_bin_packing import fewest_bins
from tests.planning.test_partition import FULL_TRUNK
from treewise.errors import PlanError
from treewise.planning.partition import FORWARD_FRACTION, TOKENS_PER_LAUNCH
from treewise.planning.planner import plan
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, TRAIN
from treewise.testing.strategies import forests, forests_and_budgets, random_tree
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

HOLDS = ("auto", "never", "always")


def walk(made, budget):
    """Runs the schedule on paper. Returns how often each token was computed with and without a graph."""
    forest = made.forest
    members = [batch.positions() for batch in made.micro_batches]
    owner = np.full(forest.num_tokens, -1)
    for number, tokens in enumerate(members):
        assert 0 < len(tokens) == made.micro_batches[number].num_tokens <= budget
        assert (owner[tokens] == -1).all()  # in one micro-batch only
        owner[tokens] = number
    assert (owner >= 0).all()
    seen = is_above(forest.parent)
    reads = [set(owner[seen[tokens].any(axis=0)].tolist()) - {number} for number, tokens in enumerate(members)]
    feeds = [{other for other in range(len(members)) if number in reads[other]} for number in range(len(members))]
    with_graph, without = np.zeros(forest.num_tokens, int), np.zeros(forest.num_tokens, int)
    alive, held, done = set(), set(), set()  # gateways, held graphs, micro-batches whose backward has run
    for step, (num_gateway_tokens, num_live_tokens) in zip(made.schedule, made.timeline, strict=True):
        number = step.micro_batch
        batch, tokens = made.micro_batches[number], members[number]
        assert batch.is_open == bool(feeds[number])
        assert reads[number] == set(made.ancestors[number])
        assert reads[number] <= alive
        running = 0 if step.action == BACKWARD else len(tokens)
        assert running + sum(len(members[other]) for other in held) == num_live_tokens <= budget
        match step.action:
            case "forward":
                assert batch.is_open
                assert not batch.is_held
                without[tokens] += 1
            case "hold":
                assert batch.is_held
                with_graph[tokens] += 1
            case "train":
                with_graph[tokens] += 1
            case "backward":
                assert number in held
        if step.action in (FORWARD, HOLD):
            alive.add(number)
        assert sum(len(members[other]) for other in alive) == num_gateway_tokens
        if step.action == HOLD:
            held.add(number)
        if step.action in (TRAIN, BACKWARD):
            assert feeds[number] <= done  # all gradients of its gateway have come back
            done.add(number)
            alive.discard(number)
            held.discard(number)
    assert not alive
    assert not held
    assert len(done) == len(members)
    return with_graph, without


def check(made, budget, hold):
    """Everything that holds for any plan."""
    forest = made.forest
    with_graph, without = walk(made, budget)
    is_open = is_above(forest.parent).sum(axis=0) > budget
    in_held = np.zeros(forest.num_tokens, dtype=bool)
    for batch in made.micro_batches:
        in_held[batch.positions()] = batch.is_held
    assert (with_graph == 1).all()
    np.testing.assert_array_equal(without, is_open & ~in_held)
    assert not (in_held & ~is_open).any()
    assert made.num_open_tokens == is_open.sum()
    assert made.num_held_tokens == in_held.sum()
    assert made.num_recomputed_tokens == without.sum()
    assert made.num_computed_tokens == (with_graph + without).sum()
    assert made.peak_gateway_tokens == max(alive for alive, _ in made.timeline)
    if hold == "never":
        assert made.num_held_tokens == 0


def piece_sizes(forest, budget):
    size = is_above(forest.parent).sum(axis=0)
    above = np.where(forest.parent < 0, budget + 1, size[forest.parent])
    return size[(size <= budget) & (above > budget)].tolist()


@example((FULL_TRUNK, 8), "never")
@example((FULL_TRUNK, 11), "always")
@given(forests_and_budgets(), st.sampled_from(HOLDS))
def test_any_plan_holds_what_it_promises(forest_and_budget, hold):
    forest, budget = forest_and_budget
    check(plan(forest, budget, hold=hold), budget, hold)


@given(forests())
def test_a_forest_that_fits_is_one_pass_with_nothing_extra(forest):
    for budget in (None, forest.num_tokens, forest.num_tokens + 1):
        made = plan(forest, budget)
        assert made.is_whole
        assert made.micro_batches[0].positions().tolist() == list(range(forest.num_tokens))
        assert [(step.action, step.micro_batch) for step in made.schedule] == [(TRAIN, 0)]
        assert made.num_open_tokens == made.num_held_tokens == made.peak_gateway_tokens == 0
        assert made.num_computed_tokens == forest.num_tokens


def test_one_token_less_than_the_forest_is_not_one_pass():
    forest = Forest.from_trajectories([Trajectory([1, 2, 3]), Trajectory([1, 2, 4])])
    assert not plan(forest, forest.num_tokens - 1).is_whole


@given(forests_and_budgets(max_sequences=5))
def test_closed_micro_batches_are_within_one_of_the_fewest(forest_and_budget):
    forest, budget = forest_and_budget
    sizes = piece_sizes(forest, budget)
    made = plan(forest, budget, hold="never")
    lower_bound = -(-sum(sizes) // budget)
    if made.num_closed_micro_batches > lower_bound + 1:
        assert len(sizes) > 12 or made.num_closed_micro_batches <= fewest_bins(sizes, budget) + 1


@pytest.mark.slow
def test_packing_in_order_costs_next_to_nothing():
    rng = np.random.default_rng(5)
    for _ in range(20):
        forest = random_tree(rng, 150, 5)
        sizes, budget = piece_sizes(forest, 4), 4
        made = plan(forest, budget, hold="never")
        # All pieces have 1 to 4 tokens, so filling up by hand is optimal: 4; 3 with 1; 2 with 2; 2 with 1 and 1.
        count = Counter(sizes)
        ones = max(0, count[1] - count[3] - 2 * (count[2] % 2))
        fewest = count[4] + count[3] + -(-count[2] // 2) + -(-ones // 4)
        assert made.num_closed_micro_batches <= fewest + 1


@pytest.mark.slow
def test_gateways_stay_near_one_path_on_a_large_tree():
    rng = np.random.default_rng(0)
    parents = [-1] + [int(max(0, node - 1 - rng.integers(0, 200))) for node in range(1, 20_000)]
    forest = Forest.from_nodes(parents, [[1] * int(rng.integers(2, 9)) for _ in parents], merge_siblings=False)
    budget = 64
    made = plan(forest, budget, hold="never")
    size = forest.subtree_end - np.arange(forest.num_tokens)
    longest_open_path = int(forest.depth[size > budget].max()) + 1
    assert made.peak_gateway_tokens <= 2 * longest_open_path + 4 * budget
    lower_bound = -(-sum(batch.num_tokens for batch in made.micro_batches if not batch.is_open) // budget)
    assert made.num_closed_micro_batches <= 1.1 * lower_bound


@given(forests_and_budgets(), st.sampled_from(HOLDS))
def test_plans_are_deterministic(forest_and_budget, hold):
    forest, budget = forest_and_budget
    again = Forest.from_trajectories(forest.trajectories) if forest.num_trees == 1 else forest
    one, two = plan(forest, budget, hold=hold), plan(again, budget, hold=hold)
    assert one.schedule == two.schedule
    for left, right in zip(one.micro_batches, two.micro_batches, strict=True):
        np.testing.assert_array_equal(left.ranges, right.ranges)
        assert dataclasses.astuple(left)[1:] == dataclasses.astuple(right)[1:]


def grpo(prompt, samples, length):
    return Forest.from_trajectories(
        [Trajectory([*range(1, prompt + 1), 10_000 + number, *range(length - 1)]) for number in range(samples)]
    )


@pytest.mark.parametrize("budget", [4096, 2048, 1024])
def test_a_prompt_with_many_samples_is_held(budget):
    forest = grpo(prompt=400, samples=16, length=300)
    made = plan(forest, budget)
    assert made.num_held_tokens == 400
    assert made.num_computed_tokens == forest.num_tokens


def test_many_prompts_with_samples_are_all_held():
    made = plan([grpo(40, 8, 30)] * 5, 105)
    assert made.num_held_tokens == 5 * 40
    check(made, 105, "auto")


@given(forests_and_budgets())
def test_the_cost_of_a_plan_is_that_of_its_passes(forest_and_budget):
    forest, budget = forest_and_budget
    made = plan(forest, budget)
    passes = [step.action for step in made.schedule]
    with_graph = TOKENS_PER_LAUNCH * (passes.count(TRAIN) + passes.count(HOLD)) + forest.num_tokens
    without = FORWARD_FRACTION * (TOKENS_PER_LAUNCH * passes.count(FORWARD) + made.num_recomputed_tokens)
    assert made.relative_cost == pytest.approx(with_graph + without)


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["auto", "never"])
def test_one_long_path_is_cut_into_pieces(hold):
    length, budget = 1003, 100
    made = plan(Forest.from_trajectories([Trajectory(range(length))]), budget, hold=hold)
    # The last 100 tokens are closed; the 903 above them take ten micro-batches, each one the next one's gateway.
    assert made.num_micro_batches == 11
    assert made.num_closed_micro_batches == 1
    assert [batch.num_tokens for batch in made.micro_batches] == [100] * 9 + [3, 100]
    assert made.num_open_tokens == 903
    assert next(step.micro_batch for step in made.schedule if step.action == TRAIN) == 10
    assert made.peak_gateway_tokens == 903
    check(made, budget, hold)


def test_a_path_of_a_million_tokens():
    made = plan(Forest.from_trajectories([Trajectory(np.arange(1_000_000))]), 4096)
    assert made.num_micro_batches == 245
    assert made.num_computed_tokens == 2_000_000 - 4096 - made.num_held_tokens


def test_ancestors_of_a_long_path_are_one_span():
    made = plan(Forest.from_trajectories([Trajectory(np.arange(100_000))]), 10, hold="never")
    assert made.num_micro_batches == 10_000
    assert made.ancestors.spans(9_999) == [(0, 9_999)]
    assert made.ancestors[-1][-3:] == (9_996, 9_997, 9_998)
    assert made.ancestors[2:4] == [(0, 1), (0, 1, 2)]
    assert len(made.ancestors) == 10_000


@pytest.mark.slow
def test_a_comb_of_100_000_forks():
    depth = 100_000
    parents = np.array([-1, *range(depth - 1), *range(depth)])
    forest = Forest.from_nodes(
        parents, [np.array([1, 1]), *np.ones((2 * depth - 1, 1), dtype=int)], merge_siblings=False
    )
    made = plan(forest, 1000)
    assert made.num_open_tokens == depth + 1 - 500
    assert sum(batch.num_tokens for batch in made.micro_batches) == forest.num_tokens
    assert max(batch.num_tokens for batch in made.micro_batches) <= 1000


def test_several_forests_are_planned_as_one():
    one, two = grpo(5, 3, 4), grpo(3, 2, 9)
    made = plan([one, two], 12)
    assert made.forest.num_trajectories == 5
    check(made, 12, "auto")


def test_a_micro_batch_may_hold_subtrees_of_several_trees():
    made = plan([grpo(2, 3, 2)] * 4, 16)
    assert made.num_micro_batches == 2
    assert made.num_open_tokens == 0


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0, "max_tokens is 0; a micro-batch holds at least 1 token"),
        (-5, "max_tokens is -5"),
        (2.0, "max_tokens must be an integer or None, found 2.0"),
        ("8", "max_tokens must be an integer or None, found '8'"),
        (True, "max_tokens must be an integer or None, found True"),
        (float("nan"), "max_tokens must be an integer"),
    ],
)
def test_bad_budgets_are_refused(budget, message):
    with pytest.raises(PlanError, match=message):
        plan(grpo(2, 2, 2), budget)


def test_an_unknown_hold_is_refused():
    with pytest.raises(PlanError, match="hold='sometimes' is unknown"):
        plan(grpo(2, 2, 2), 3, hold="sometimes")


def test_numpy_budgets_are_integers_too():
    assert plan(grpo(4, 2, 2), np.int32(3)).max_tokens == 3


def test_a_description_says_the_sizes():
    made = plan(grpo(400, 16, 300), 1024)
    text = made.describe(gateway_bytes_per_token=2**20)
    assert text.startswith("budget             1,024 tokens\n")
    assert "tree tokens        5,200 (11,200 flat, share ratio 2.15)" in text
    assert "micro-batches      9 (8 closed, 1 open)" in text
    assert "held tokens        400" in text
    assert "recomputed tokens  0" in text
    assert "computed / tree    1.000" in text
    assert text.endswith("gateways           400 tokens at the peak, 400.00 MiB")
    assert plan(grpo(2, 2, 2)).describe().startswith("budget             none (one micro-batch)\n")


def test_the_repr_is_one_short_line() -> None:
    forest = Forest.from_trajectories([Trajectory([1, 2, 3, 4]), Trajectory([1, 2, 5])])
    assert repr(plan(forest, None)).startswith("Plan(1 micro-batch, budget none, 5 tokens computed, Forest(1 tree, ")
    assert repr(plan(forest, 3)).startswith("Plan(2 micro-batches, budget 3, 7 tokens computed, Forest(1 tree, ")
