"""Turns of all ranks: the same passes everywhere, every step once, in a possible order, heavy ones side by side."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treewise.distributed.lockstep import Passes, forward_passes, training_passes, turns_of
from treewise.distributed.lockstep.turns import NO_PASSES
from treewise.distributed.placement import CostModel, assign_ranks, rank_part, work_of
from treewise.planning.planner import plan
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, TRAIN
from treewise.testing.strategies import forests_and_budgets
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

PLANS = st.tuples(forests_and_budgets(), st.sampled_from(("auto", "never", "always"))).map(
    lambda drawn: plan(*drawn[0], hold=drawn[1])
)
COLLECTIVE = {FORWARD: "F", HOLD: "F", TRAIN: "T", BACKWARD: "B"}


def all_turns(plans):
    """The turns of every rank, from the plans of all."""
    everybody = [training_passes(made) for made in plans]
    return [turns_of(own, everybody) for own in everybody]


def check_order(made, steps):
    """Gateways are there when they are read and complete when they are closed; no more is alive than the budget."""
    is_open, held, unread = set(), 0, {}
    for batch in made.micro_batches:
        for above in batch.parents:
            unread[above] = unread.get(above, 0) + 1
    for step in steps:
        number, batch = step.micro_batch, made.micro_batches[step.micro_batch]
        assert all(above in is_open for above in batch.parents)
        alive = held + (0 if step.action == BACKWARD else batch.num_tokens)
        assert made.max_tokens is None or alive <= made.max_tokens
        if step.action in (FORWARD, HOLD):
            is_open.add(number)
            held += batch.num_tokens * (step.action == HOLD)
            continue
        assert unread.get(number, 0) == 0
        held -= batch.num_tokens * (step.action == BACKWARD)
        is_open.discard(number)
        for above in batch.parents:
            unread[above] -= 1


@given(st.lists(st.one_of(st.none(), PLANS), min_size=1, max_size=5))
def test_turns_of_plans(plans):
    rows = all_turns(plans)
    assert len({"".join(COLLECTIVE[slot.action] for slot in row) for row in rows}) == 1
    for made, row in zip(plans, rows, strict=True):
        own = [slot.own_step for slot in row if slot.own_step is not None]
        assert sorted(own) == list(range(0 if made is None else len(made.schedule)))
        num_graphs = 0
        for slot in row:
            if slot.own_step is not None:
                assert slot.action == made.schedule[slot.own_step].action
            else:
                num_graphs += (slot.action == HOLD) - (slot.action == BACKWARD)
            assert num_graphs >= 0
        assert num_graphs == 0
        if made is not None:
            check_order(made, [made.schedule[step] for step in own])


@given(st.lists(st.one_of(st.none(), PLANS), min_size=1, max_size=5), st.randoms())
def test_every_rank_finds_the_same_turns_from_texts(plans, random):
    passes = [training_passes(made) for made in plans]
    told = [Passes.from_text(each.text) for each in passes]
    random.shuffle(told)
    for own, row in zip(passes, all_turns(plans), strict=True):
        assert turns_of(own, [own, *told]) == row


def seconds_in_step(rows, weights):
    """The sum over turns of the heaviest pass; weights: of each rank's steps."""
    return sum(
        max(0 if slot.own_step is None else own[slot.own_step] for slot, own in zip(turn, weights, strict=True))
        for turn in zip(*rows, strict=True)
    )


@given(st.lists(st.lists(st.integers(1, 99), max_size=6), min_size=1, max_size=5))
def test_without_trunks_no_order_is_better(weights):
    ordered = [tuple(sorted(own, reverse=True)) for own in weights]
    everybody = [Passes("", (), own, (), tuple(range(len(own)))) for own in ordered]
    rows = [turns_of(own, everybody) for own in everybody]
    longest = max(map(len, ordered))
    table = np.array([[*own, *[0] * (longest - len(own))] for own in ordered])
    assert seconds_in_step(rows, ordered) == table.max(axis=0, initial=0).sum()


def test_free_passes_run_beside_the_trunks_of_others():
    trunk = Passes("FFTTT", (3, 4, 8, 9, 5), (2,), (0, 1, 2, 3, 4), (5,))
    light = Passes("", (), (6, 5, 4, 3), (), (0, 1, 2, 3))
    rows = [turns_of(own, [trunk, light]) for own in (trunk, light)]
    assert [slot.own_step for slot in rows[0]] == [0, 1, 2, 3, 4, 5]
    assert [slot.own_step for slot in rows[1]] == [None, None, 1, 0, 2, 3]
    assert seconds_in_step(rows, [(3, 4, 8, 9, 5, 2), light.free]) == 3 + 4 + 8 + 9 + 5 + 3


def test_a_light_turn_stays_light_where_another_rank_needs_more_turns_anyway():
    trunk = Passes("FTT", (1, 60, 4), (44, 32), (0, 1, 2), (3, 4))
    light = Passes("", (), (51, 44, 43, 2), (), (0, 1, 2, 3))
    rows = [turns_of(own, [trunk, light]) for own in (trunk, light)]
    assert seconds_in_step(rows, [(1, 60, 4, 44, 32), light.free]) == 1 + 60 + 4 + 44 + 43


def test_no_free_pass_runs_while_a_graph_is_held():
    held = Passes("HTB", (9, 3, 3), (5, 4), (0, 1, 2), (3, 4))
    other = Passes("FTTT", (1, 1, 1, 1), (), (0, 1, 2, 3))
    row = turns_of(held, [held, other])
    inside = [slot.own_step for slot in row][[slot.own_step for slot in row].index(0) :]
    inside = inside[: inside.index(2)]
    assert not {3, 4} & set(inside)


def test_a_visit_is_a_forward_for_each_micro_batch():
    made = plan(Forest.from_trajectories([Trajectory(range(100))]), 30)
    assert forward_passes(made).letters == "FFFF"
    assert [slot.action for slot in turns_of(NO_PASSES, [NO_PASSES, forward_passes(made)])] == [FORWARD] * 4
    assert forward_passes(None) == NO_PASSES


def test_in_step_tokens_are_even_and_the_turns_take_less():
    """Samples of a long-tailed length: what attention makes slow on one rank must not leave it without light passes."""
    rng = np.random.default_rng(3)
    lengths = np.append(rng.lognormal(6, 0.8, 150).astype(int) + 2, [6000, 3500, 2500])
    samples = [Forest.from_trajectories([Trajectory(np.arange(length))]) for length in lengths]
    cost = CostModel(1.0, 1e-3, 64.0)
    took = {}
    for in_step in (False, True):
        found = assign_ranks(samples, 4, cost, max_tokens=2048, in_lockstep=in_step)
        plans = [plan(rank_part(samples, found, rank), 2048) for rank in range(4)]
        true = [cost.seconds(work_of(made)) for made in plans]
        np.testing.assert_allclose(found.seconds, true, rtol=0.02)
        tokens = np.array([made.forest.num_tokens for made in plans])
        took[in_step] = seconds_in_step(all_turns(plans), [step_seconds(made, cost) for made in plans])
    # Without the cost of attention the ranks differ by what is computed twice alone.
    assert tokens.max() < 1.1 * tokens.mean()
    assert took[True] < 0.97 * took[False]


def step_seconds(made, cost):
    found = []
    for step in made.schedule:
        depth = made.forest.depth[made.micro_batches[step.micro_batch].positions()]
        share = {FORWARD: 1 / 3, HOLD: 1 / 3, TRAIN: 1, BACKWARD: 2 / 3}[step.action]
        found.append(share * (cost.seconds_per_token * len(depth) + cost.seconds_per_pair * (depth + 1.0).sum()))
    return found
