"""Each rule of a draw against its formula, computed plainly."""

import itertools
import math

import numpy as np
import pytest

from treewise import ConfigError
from treewise.rl.curriculum import CURRICULA, Outcome, curriculum_named
from treewise.rl.curriculum.learnability import by_learnability
from treewise.rl.curriculum.mopps import MoppsSettings, nearest_to_target
from treewise.rl.curriculum.protocol import View, drawn_by_weight
from treewise.rl.curriculum.speed import has_both_outcomes
from treewise.rl.curriculum.uniform import in_passes
from treewise.rl.curriculum.vcrl import VcrlSettings, bank_after, from_bank, is_varied, normalised_variance

COUNTS = np.array([[1.0, 99.0], [99.0, 1.0], [50.0, 50.0], [20.0, 80.0]])


def view(size=4, iteration=0, **changes):
    given = {"position": 0, "seed": 3, "counts": lambda: COUNTS}
    return View(size=size, iteration=iteration, **{**given, **changes})


def outcome(index, *rewards, predicted=0.5):
    successes = sum(reward >= 0.5 for reward in rewards)
    return Outcome(
        index=index,
        predicted=predicted,
        rewards=tuple(map(float, rewards)),
        success=successes / len(rewards) if rewards else None,
        trials=len(rewards),
        num_successes=successes,
    )


def test_uniform_draws_every_item_once_per_pass():
    position, drawn = 0, []
    for _ in range(6):
        chosen = in_passes(view(6, position=position), 3)
        position = chosen.position
        drawn += chosen.indices
    passes = [drawn[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(each) == list(range(6)) for each in passes)
    assert passes[0] != passes[1] != passes[2]


def test_uniform_takes_no_item_twice_in_an_iteration():
    for position in range(5):
        chosen = in_passes(view(5, position=position), 4).indices
        assert len(set(chosen)) == 4
        more = in_passes(view(5, position=position, taken=frozenset(chosen)), 4).indices
        assert sorted([*chosen, *more]) == list(range(5))  # one was left
    assert in_passes(view(None, position=7), 3).indices == [7, 8, 9]


def test_learnability_draws_in_proportion_to_p_times_one_minus_p():
    drawn = [by_learnability(view(iteration=number), 1).indices[0] for number in range(1200)]
    means = COUNTS[:, 0] / COUNTS.sum(1)
    expected = means * (1 - means) / (means * (1 - means)).sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 1200, expected, atol=0.045)
    assert sorted(by_learnability(view(), 9).indices) == [0, 1, 2, 3]


def test_pairs_without_replacement_have_their_probabilities():
    weights = np.array([3.0, 2.0, 1.0, 0.0])
    drawn = [tuple(drawn_by_weight(view(iteration=number), 2, weights).indices) for number in range(1200)]
    for first, second in itertools.permutations(range(3), 2):
        expected = weights[first] / 6 * weights[second] / (6 - weights[first])
        assert drawn.count((first, second)) / 1200 == pytest.approx(expected, abs=0.045)
    assert drawn_by_weight(view(), 4, weights).indices[3] == 3  # of weight 0: last


def test_mopps_takes_what_a_draw_from_the_posteriors_puts_nearest_to_the_target():
    for number in range(20):
        at = view(iteration=number)
        rates = at.rng.beta(COUNTS[:, 0], COUNTS[:, 1])
        brute = min(itertools.combinations(range(4), 2), key=lambda pair: sum(abs(rates[i] - 0.3) for i in pair))
        assert sorted(nearest_to_target(at, 2, MoppsSettings(target=0.3)).indices) == sorted(brute)
    free = nearest_to_target(view(taken=frozenset([2])), 4, MoppsSettings())
    assert sorted(free.indices) == [0, 1, 3]
    assert len(nearest_to_target(view(), 3, MoppsSettings(candidates=1)).indices) == 3


def test_variance_of_a_group_by_its_definition():
    for size in range(2, 9):
        variances = [np.var([1.0] * k + [0.0] * (size - k), ddof=1) for k in range(size + 1)]
        for k in range(size + 1):
            assert normalised_variance(k, size) == pytest.approx(variances[k] / max(variances))
    assert normalised_variance(1, 1) == 0


def test_the_bank_keeps_what_varied_and_gives_the_highest_first():
    settings = VcrlSettings(threshold=0.9, momentum=0.5, bank_size=2)
    memory = bank_after({}, [outcome(0, 1, 0), outcome(1, 1, 1), outcome(2, 1, 0, 0)], 2, settings)
    assert memory == {"bank": {"0": 1.0, "2": 1.0}}
    memory = bank_after({"bank": {"0": 0.5, "2": 1.0, "5": 0.9}}, [outcome(0, 1, 0), outcome(2, 1, 1)], 2, settings)
    assert memory == {"bank": {"0": 0.75, "5": 0.9}}
    assert from_bank(view(9, memory=memory), 3, settings).indices == [5, 0]
    assert from_bank(view(9, memory=memory, taken=frozenset([5])), 3, settings).indices == [0]
    assert not is_varied(outcome(0), settings)


def test_screening_goes_on_with_both_outcomes_alone():
    assert [has_both_outcomes(outcome(0, *rewards), None) for rewards in ((1, 1), (0, 0), (1, 0), ())] == [
        *(False, False, True, False)
    ]


def test_names_and_settings():
    assert curriculum_named("mopps", target=0.4).settings.target == 0.4
    assert {name for name in CURRICULA if CURRICULA[name].needs_pool} >= {"learnability", "mopps"}
    for name, settings, message in (
        ("mops", {}, "Did you mean 'mopps'"),
        ("mopps", {"tarjet": 1.0}, "tarjet"),
        ("mopps", {"target": math.inf}, "target=inf must lie"),
        ("dynamic", {"refills": -1}, "refills=-1"),
        ("speed", {"rollouts": 1}, "rollouts=1 must be at least 2"),
        ("vcrl", {"threshold": 0.0}, "threshold=0.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            curriculum_named(name, **settings)
