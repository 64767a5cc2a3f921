"""Common sequences: every rank's own steps in order, a graph for every backward, and next to no step too many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import forests_and_budgets
from treewise.balance.schedules import equal_schedules, merged, passes_of, slots_of
from treewise.errors import PlanError
from treewise.forest import Forest
from treewise.planner import BACKWARD, FORWARD, HOLD, TRAIN, plan
from treewise.trajectory import Trajectory

PLANS = st.tuples(forests_and_budgets(), st.sampled_from(("auto", "never", "always"))).map(
    lambda drawn: plan(*drawn[0], hold=drawn[1])
)
ACTIONS = {"A": TRAIN, "F": FORWARD, "H": HOLD, "T": TRAIN, "B": BACKWARD}
COMMON = {FORWARD: "F", HOLD: "F", TRAIN: "T", BACKWARD: "B"}


@st.composite
def any_passes(draw):
    """Holds and backwards pair up, nested or not, among any other steps."""
    letters, num_held = [], 0
    for _ in range(draw(st.integers(0, 8))):
        letter = draw(st.sampled_from("AFHTB" if num_held else "AFHT"))
        num_held += (letter == "H") - (letter == "B")
        letters.append(letter)
    return "".join(letters) + "B" * num_held


def check(all_passes):
    """Everything that holds for any common sequence. Returns it."""
    common = merged(all_passes)
    for own in all_passes:
        slots = slots_of(own, common)
        assert "".join(COMMON[slot.action] for slot in slots) == common  # the same collective operations on all ranks
        steps = [slot.own_step for slot in slots if slot.own_step is not None]
        assert sorted(steps) == list(range(len(own)))
        assert [step for step in steps if own[step] != "A"] == [step for step in range(len(own)) if own[step] != "A"]
        num_kept = num_held = 0  # graphs of empty and of own holds
        for slot in slots:
            change = (slot.action == HOLD) - (slot.action == BACKWARD)
            if slot.own_step is None:
                num_kept += change
            else:
                assert slot.action == ACTIONS[own[slot.own_step]]
                assert own[slot.own_step] != "A" or num_held == 0  # beside a held graph it would break the budget
                num_held += change
            assert num_kept >= 0
        assert num_kept == num_held == 0
    assert max(map(len, all_passes), default=0) <= len(common)
    # An empty forward for each held graph at worst, beside all ranks one after the other.
    assert len(common) <= sum(len(own) + own.count("B") for own in set(all_passes))
    return common


@given(st.lists(any_passes(), max_size=6))
def test_any_passes_have_a_common_sequence(all_passes):
    check(all_passes)


@given(st.lists(st.one_of(st.none(), PLANS), min_size=1, max_size=5))
def test_plans_run_side_by_side(plans):
    all_passes = [passes_of(each) for each in plans]
    common = check(all_passes)
    assert equal_schedules(plans) == [slots_of(own, common) for own in all_passes]
    for each, own in zip(plans, all_passes, strict=True):
        if each is not None:
            assert [ACTIONS[letter] for letter in own] == [step.action for step in each.schedule]


def shortest_common(all_passes):
    """Length of the shortest supersequence, by breadth-first search; without the graphs that backwards need."""
    all_letters = [own.replace("A", "T").replace("H", "F") for own in all_passes]
    front, steps = {tuple(0 for _ in all_letters)}, 0
    end = tuple(map(len, all_letters))
    while end not in front:
        front = {
            tuple(
                place + (place < len(own) and own[place] == letter)
                for place, own in zip(places, all_letters, strict=True)
            )
            for places in front
            for letter in "FTB"
        }
        steps += 1
    return steps


@given(st.lists(PLANS, min_size=2, max_size=3))
def test_common_sequences_of_plans_are_near_the_shortest(plans):
    all_passes = [passes_of(each) for each in plans]
    if np.prod([len(each) for each in all_passes]) < 5_000:
        assert len(merged(all_passes)) <= 1.2 * shortest_common(all_passes) + 2


def test_usual_steps_cost_next_to_nothing():
    assert merged(["AAAA", "AAA", ""]) == "TTTT"
    assert merged(["FTTT", "AAAA", "AAAAA"]) in ("FTTTTT", "TTFTTT")
    assert len(merged(["HTTTB", "AAAA"])) == 6
    assert merged(["FTT", "FTT", "FFTTTTT"]) == "FFTTTTT"
    assert merged(["AAFFTT", "FFTTAA"]) == merged(["AAFFTT"])  # what may run anywhere makes room
    assert merged([]) == merged(["", ""]) == ""


def test_a_rank_that_spent_its_forward_gets_another_for_the_backward_of_the_others():
    # The second rank's only forward runs beside the first rank's, so it has no graph when the first runs its backward.
    assert sorted(check(["HB", "FT"])) == ["B", "F", "F", "T"]


def test_what_may_run_anywhere_does_not_run_beside_a_held_graph():
    slots = slots_of("AHTB", "FTTBT")
    assert [slot.own_step for slot in slots] == [1, 2, None, 3, 0]


@pytest.mark.parametrize("budget", [128, 256, 512, 4096])
def test_many_ranks_with_recomputed_and_held_trunks(budget):
    rng = np.random.default_rng(0)
    all_passes = []
    for _ in range(32):
        trees = []
        for head in rng.integers(10, 300, 3).tolist():
            tails = enumerate(rng.integers(20, 120, 6).tolist())
            rows = [Trajectory([*range(head), 1000 + number, *range(length)]) for number, length in tails]
            trees.append(Forest.from_trajectories(rows))
        all_passes.append(passes_of(plan(trees, budget)))
    common = check(all_passes)
    kinds = ("F", "H"), ("A", "T"), ("B",)
    counts = [max(sum(map(own.count, letters)) for own in all_passes) for letters in kinds]
    assert len(common) <= 1.4 * sum(counts)


def test_a_visit_is_a_forward_per_micro_batch():
    made = plan(Forest.from_trajectories([Trajectory(range(100))]), 30)
    own = passes_of(made, backward=False)
    assert own == "F" * made.num_micro_batches == "FFFF"
    assert merged([own, ""]) == "FFFF"
    assert {(slot.action, slot.own_step) for slot in slots_of("", "FFFF")} == {(FORWARD, None)}


def test_wrong_sequences_are_refused():
    with pytest.raises(PlanError, match="sequence 1 holds 'X'; its letters are A, F, H, T, B"):
        merged(["T", "X"])
    with pytest.raises(PlanError, match="runs a backward of nothing held"):
        merged(["TB"])
    with pytest.raises(PlanError, match="holds 1 graphs that it never runs backward"):
        merged(["HT"])
    with pytest.raises(PlanError, match="1 steps of this rank have no place"):
        slots_of("TT", "TF")
    with pytest.raises(PlanError, match="was not made from this rank's"):
        slots_of("T", "TB")
