"""Each rule of a draw against its formula, computed plainly."""

import itertools
import math

import numpy as np
import pytest

from treewise.errors import ConfigError
from treewise.rl.curriculum import CURRICULA, Outcome, curriculum_named
from treewise.rl.curriculum.learnability import LearnabilitySettings, by_learnability
from treewise.rl.curriculum.protocol import View, drawn_by_weight
from treewise.rl.curriculum.uniform import in_passes

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
    drawn = [by_learnability(view(iteration=number), 1, LearnabilitySettings()).indices[0] for number in range(1200)]
    means = COUNTS[:, 0] / COUNTS.sum(1)
    expected = means * (1 - means) / (means * (1 - means)).sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 1200, expected, atol=0.045)
    assert sorted(by_learnability(view(), 9, LearnabilitySettings()).indices) == [0, 1, 2, 3]


def test_pairs_without_replacement_have_their_probabilities():
    weights = np.array([3.0, 2.0, 1.0, 0.0])
    drawn = [tuple(drawn_by_weight(view(iteration=number), 2, weights).indices) for number in range(1200)]
    for first, second in itertools.permutations(range(3), 2):
        expected = weights[first] / 6 * weights[second] / (6 - weights[first])
        assert drawn.count((first, second)) / 1200 == pytest.approx(expected, abs=0.045)
    assert drawn_by_weight(view(), 4, weights).indices[3] == 3  # of weight 0: last


def test_thompson_draws_rates_from_the_posteriors():
    """An item of which little is known comes more often than its mean would have it."""
    counts = np.array([[0.5, 4.5], [100.0, 900.0]])  # both 0.1 in the mean
    rng = np.random.default_rng(0)
    rates = rng.beta(*np.moveaxis(np.broadcast_to(counts, (200_000, 2, 2)), -1, 0))
    weights = rates * (1 - rates)
    expected = (weights / weights.sum(1, keepdims=True)).mean(0)
    settings = LearnabilitySettings(thompson=True)
    at = [view(2, iteration=number, counts=lambda: counts) for number in range(1500)]
    drawn = np.bincount([by_learnability(each, 1, settings).indices[0] for each in at], minlength=2) / 1500
    np.testing.assert_allclose(drawn, expected, atol=0.045)
    assert abs(expected[0] - 0.5) > 0.1


def test_names_and_settings():
    assert curriculum_named("learnability", thompson=True).settings.thompson
    assert {name for name in CURRICULA if CURRICULA[name].needs_pool} == {"learnability", "gain", "gain_shuffled"}
    for name, settings, message in (
        ("dynamik", {}, "Did you mean 'dynamic'"),
        ("learnability", {"thomson": True}, "thomson"),
        ("gain", {"width": math.inf}, "width=inf must be"),
        ("dynamic", {"refills": -1}, "refills=-1"),
        ("mopps", {"target": 0.4}, "'mopps' is gone; use learnability, with curriculum_settings.thompson=true"),
        ("vcrl", {}, "'vcrl' is gone; use dynamic"),
        ("speed", {}, "'speed' is gone; use dynamic"),
        ("gain-x-learnability", {}, "is gone; use gain or learnability"),
    ):
        with pytest.raises(ConfigError, match=message):
            curriculum_named(name, **settings)
