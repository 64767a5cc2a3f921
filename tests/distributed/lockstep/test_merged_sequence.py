"""Common sequences: every rank's own steps in order, a graph for every backward, and next to no step too many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.distributed.lockstep.merged_sequence import align
from treewise.distributed.lockstep.merged_sequence import common_sequence as weighted_sequence
from treewise.errors import PlanError
from treewise.planning.planner import plan
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, TRAIN
from treewise.testing.strategies import forests_and_budgets
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

PLANS = st.tuples(forests_and_budgets(), st.sampled_from(("auto", "never", "always"))).map(
    lambda drawn: plan(*drawn[0], hold=drawn[1])
)
LETTERS = {FORWARD: "F", HOLD: "H", TRAIN: "T", BACKWARD: "B"}
ACTIONS = {"F": FORWARD, "H": HOLD, "T": TRAIN, "B": BACKWARD}
COMMON = {FORWARD: "F", HOLD: "F", TRAIN: "T", BACKWARD: "B"}


def common_sequence(sequences, weights=None):
    """By default all passes weigh the same."""
    return weighted_sequence(sequences, weights or [[1] * len(own) for own in sequences])


def passes_of(made):
    return "" if made is None else "".join(LETTERS[step.action] for step in made.schedule)


@st.composite
def any_sequences(draw):
    """Holds and backwards pair up, nested or not, among any other steps."""
    letters, num_held = [], 0
    for _ in range(draw(st.integers(0, 8))):
        letter = draw(st.sampled_from("FHTB" if num_held else "FHT"))
        num_held += (letter == "H") - (letter == "B")
        letters.append(letter)
    return "".join(letters) + "B" * num_held


def check(sequences, weights=None):
    """Everything that holds for any common sequence. Returns it."""
    common = common_sequence(sequences, weights)
    for own in sequences:
        slots = align(own, common)
        assert "".join(COMMON[slot.action] for slot in slots) == common  # the same collective operations on all ranks
        steps = [slot.own_step for slot in slots if slot.own_step is not None]
        assert steps == list(range(len(own)))
        num_kept = num_held = 0  # graphs of empty and of own holds
        for slot in slots:
            change = (slot.action == HOLD) - (slot.action == BACKWARD)
            if slot.own_step is None:
                num_kept += change
            else:
                assert slot.action == ACTIONS[own[slot.own_step]]
                num_held += change
            assert num_kept >= 0
        assert num_kept == num_held == 0
    assert max(map(len, sequences), default=0) <= len(common)
    # An empty forward for each held graph at worst, beside all ranks one after the other.
    assert len(common) <= sum(len(own) + own.count("B") for own in set(sequences))
    return common


@given(st.lists(any_sequences(), max_size=6), st.randoms())
def test_any_sequences_have_a_common_one(sequences, random):
    check(sequences)
    check(sequences, [[random.randint(1, 9) for _ in own] for own in sequences])


@given(st.lists(st.one_of(st.none(), PLANS), min_size=1, max_size=5))
def test_plans_run_side_by_side(plans):
    sequences = [passes_of(each) for each in plans]
    check(sequences)
    for each, own in zip(plans, sequences, strict=True):
        if each is not None:
            assert [ACTIONS[letter] for letter in own] == [step.action for step in each.schedule]


def shortest_common(sequences):
    """Length of the shortest supersequence, by breadth-first search; without the graphs that backwards need."""
    all_letters = [own.replace("H", "F") for own in sequences]
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
    sequences = [passes_of(each) for each in plans]
    if np.prod([len(each) for each in sequences]) < 5_000:
        assert len(common_sequence(sequences)) <= 1.2 * shortest_common(sequences) + 2


def test_usual_steps_cost_next_to_nothing():
    assert common_sequence(["TTTT", "TTT", ""]) == "TTTT"
    assert len(common_sequence(["FTTT", "TTTT", "TTTTT"])) == 6
    assert len(common_sequence(["HTTTB", "TTTT"])) == 6
    assert common_sequence(["FTT", "FTT", "FFTTTTT"]) == "FFTTTTT"
    assert len(common_sequence(["TTTTTFTTT", "FTTTTTFTT", "TTTTTTTTT"])) == 11
    assert common_sequence([]) == common_sequence(["", ""]) == ""


def test_heavy_passes_meet():
    # Three turns either way; which letter comes twice is what the weights decide.
    assert common_sequence(["FT", "TF"], [(1, 9), (9, 1)]) == "FTF"
    assert common_sequence(["FT", "TF"], [(9, 1), (1, 9)]) == "TFT"


def test_a_rank_that_spent_its_forward_gets_another_for_the_backward_of_the_others():
    # The second rank's only forward runs beside the first rank's, so it has no graph when the first runs its backward.
    assert sorted(check(["HB", "FT"])) == ["B", "F", "F", "T"]


@pytest.mark.parametrize("budget", [128, 256, 512, 4096])
def test_many_ranks_with_recomputed_and_held_trunks(budget):
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(32):
        trees = []
        for head in rng.integers(10, 300, 3).tolist():
            tails = enumerate(rng.integers(20, 120, 6).tolist())
            rows = [Trajectory([*range(head), 1000 + number, *range(length)]) for number, length in tails]
            trees.append(Forest.from_trajectories(rows))
        sequences.append(passes_of(plan(trees, budget)))
    common = check(sequences)
    kinds = ("F", "H"), ("T",), ("B",)
    counts = [max(sum(map(own.count, letters)) for own in sequences) for letters in kinds]
    assert len(common) <= 1.4 * sum(counts)


def test_wrong_sequences_are_refused():
    with pytest.raises(PlanError, match="1 passes of this rank are not in"):
        align("TT", "TF")
    with pytest.raises(PlanError, match="does not contain this rank's"):
        align("T", "TB")
