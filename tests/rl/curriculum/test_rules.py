"""Each rule of a draw against its formula, computed plainly."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from treewise.errors import ConfigError, DataError
from treewise.rl.curriculum import CURRICULA, Outcome, Pool, TaskSampler, curriculum_named
from treewise.rl.curriculum.rules import (
    GainSettings,
    LearnabilitySettings,
    View,
    by_angle,
    by_learnability,
    by_shuffled_rank,
    drawn_by_weight,
    gain_after,
    in_passes,
    ranks_by_angle,
    shuffled_ranks,
)
from treewise.rl.success_book import SuccessBook

SCORES = [0.1, 0.9, 0.5, 0.7]
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


def test_the_highest_angle_has_rank_zero_and_nan_is_refused():
    assert ranks_by_angle(SCORES).tolist() == [3, 0, 2, 1]
    assert ranks_by_angle([1.0, 1.0]).tolist() == [0, 1]
    with pytest.raises(DataError, match="item 1: its angle concentration is nan"):
        ranks_by_angle([0.5, float("nan"), 0.2])


def test_the_mean_moves_by_the_formula():
    settings = GainSettings(step=0.1, alpha=2.0, beta=0.5)

    def moved(mean, *pairs):
        memory = {"scores": [0.0] * 50, "mean": mean}
        outcomes = [replace(outcome(0), success=success, angle=angle) for success, angle in pairs]
        return gain_after(memory, outcomes, settings)["mean"]

    expected = 3 + 0.1 * 50 * np.tanh(2 * (0.8 - 0.5)) + 0.1 * 50 * np.tanh(2 * 0.4)
    assert moved(3.0, (0.6, 0.3), (1.0, 0.5), (None, None)) == pytest.approx(expected)
    assert moved(0.0, (0.0, 0.0)) == 0  # not below the first
    assert moved(49.0, (1.0, 1.0)) == 49
    assert moved(3.0, (None, 0.3)) == 3  # nothing was rewarded


def test_the_draw_and_its_control():
    settings = GainSettings(width=0.25)
    memory = {"scores": SCORES, "mean": 0.5, "num_shared": 1}
    weights = np.exp(-0.5 * (np.array([3, 0, 2, 1]) - 0.5) ** 2)
    drawn = [by_angle(view(memory=memory, iteration=number), 1, settings).indices[0] for number in range(1200)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 1200, weights / weights.sum(), atol=0.045)
    ranks = shuffled_ranks(4, 3)
    assert sorted(ranks) == [0, 1, 2, 3]
    first = int(np.flatnonzero(ranks == 0)[0])
    narrow = GainSettings(width=0.01)
    assert by_shuffled_rank(view(memory={**memory, "mean": 0.0}), 1, narrow).indices == [first]
    assert by_angle(view(memory={**memory, "mean": 0.0}), 1, narrow).indices == [1]
    assert len(by_angle(view(memory=memory), 4, narrow).indices) == 4  # the others underflow and come last


def test_state_and_missing_angles():
    sampler = TaskSampler(curriculum_named("gain-shuffled"), Pool(4, str), 0)
    book = SuccessBook()
    with pytest.raises(ConfigError, match="of all 4 items, found none"):
        TaskSampler(curriculum_named("gain"), Pool(4, str), 0).draw(1, book)
    with pytest.raises(DataError, match="item 0"):
        sampler.begin([float("inf")] * 4, 1)
    sampler.begin(SCORES, 2)
    sampler.draw(2, book)
    again = TaskSampler(curriculum_named("gain_shuffled"), Pool(4, str), 0)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert again.draw(3, book) == sampler.draw(3, book)
