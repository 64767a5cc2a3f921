"""The moving Gaussian over ranks by its formulas, and its control."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.rl.curriculum.test_rules import outcome, view
from treewise.errors import ConfigError, DataError
from treewise.rl.curriculum import Pool, TaskSampler, curriculum_named
from treewise.rl.curriculum.gain import (
    GainSettings,
    by_angle,
    by_shuffled_rank,
    gain_after,
    gaussian_weights,
    moved_mean,
    ranks_by_angle,
    shuffled_ranks,
)
from treewise.rl.success_book import SuccessBook

SCORES = [0.1, 0.9, 0.5, 0.7]


def test_the_highest_angle_has_rank_zero_and_nan_is_refused():
    assert ranks_by_angle(SCORES).tolist() == [3, 0, 2, 1]
    assert ranks_by_angle([1.0, 1.0]).tolist() == [0, 1]
    with pytest.raises(DataError, match="item 1: its angle concentration is nan"):
        ranks_by_angle([0.5, float("nan"), 0.2])


@pytest.mark.parametrize("mean", [0.0, 1.3])
def test_draws_have_the_probabilities_of_the_gaussian(mean):
    settings = GainSettings(width=0.25)
    memory = {"scores": SCORES, "mean": mean, "num_shared": 1}
    drawn = [by_angle(view(memory=memory, iteration=number), 1, settings).indices[0] for number in range(1200)]
    expected = np.exp(-0.5 * ((np.array([3, 0, 2, 1]) - mean) / 1.0) ** 2)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 1200, expected / expected.sum(), atol=0.045)


def test_weights_far_from_the_mean_do_not_vanish():
    weights = gaussian_weights(np.arange(1000), 1e6, 1.0)
    assert np.isfinite(weights).all()
    assert weights.argmax() == 999
    assert weights[999] == 1


def test_the_mean_moves_by_the_formula():
    settings = GainSettings(step=0.1, alpha=2.0, beta=0.5)
    expected = 3 + 0.1 * 50 * np.tanh(2 * (0.8 - 0.5)) + 0.1 * 50 * np.tanh(2 * 0.4)
    assert moved_mean(3, 0.8, 0.4, settings, 50) == pytest.approx(expected)
    assert moved_mean(0, 0.0, 0.0, settings, 50) == 0  # not below the first
    assert moved_mean(49, 1.0, 1.0, settings, 50) == 49
    memory = {"scores": [0.0] * 50, "mean": 3.0}
    outcomes = [
        replace(outcome(0), success=success, angle=angle) for success, angle in ((0.6, 0.3), (1.0, 0.5), (None, None))
    ]
    assert gain_after(memory, outcomes, 3, settings)["mean"] == pytest.approx(expected)
    assert gain_after(memory, [outcome(0)], 0, settings) == memory  # nothing was rewarded


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
