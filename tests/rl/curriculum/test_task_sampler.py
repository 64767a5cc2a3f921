"""Each curriculum's draws against its formula, computed plainly; a sampler draws by its state alone."""

import itertools
import json
import math

import numpy as np
import pytest

from treewise.errors import ConfigError, DataError
from treewise.rl.curriculum import CURRICULA, PractisedItem, TaskSampler, curriculum_named
from treewise.rl.curriculum.task_sampler import ranks_by_angle, shuffled_ranks

RATES = np.linspace(0.0, 1.0, 12)
SCORES = [0.1, 0.9, 0.5, 0.7]


def new_sampler(name, size=12, seed=0, **settings):
    return TaskSampler(curriculum_named(name, **settings), size, seed)


def outcome(index, *rewards):
    success = sum(reward >= 0.5 for reward in rewards) / len(rewards) if rewards else None
    return PractisedItem(
        index=index, predicted=0.5, rewards=tuple(map(float, rewards)), success=success, trials=len(rewards)
    )


def drawn_first(sampler, count, num):
    """The draws of so many iterations, each from the same memory."""
    found = []
    for sampler.iteration in range(num):
        found.append(tuple(sampler.draw(count)))
    return found


def shares(drawn, size=4):
    return np.bincount([each[0] for each in drawn], minlength=size) / len(drawn)


def practised(sampler, count=3, rollouts=6):
    """One iteration on tasks of fixed success rates; the items of all its waves."""
    rng = np.random.default_rng([sampler.iteration, 99])
    outcomes, kept = [], 0
    for wave in itertools.count():
        indices = sampler.draw(count - kept, wave) if kept < count else []
        own = [outcome(index, *(rng.random(rollouts) < RATES[index])) for index in indices]
        outcomes += own
        kept += sum(sampler.is_kept(item.rewards) for item in own)
        if not indices:
            break
    sampler.observe(outcomes)
    return [item.index for item in outcomes]


def test_uniform_draws_every_item_once_per_pass_and_none_twice_in_an_iteration():
    sampler = new_sampler("uniform", 6)
    drawn = [index for _ in range(6) for index in sampler.draw(3)]
    passes = [drawn[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(each) == list(range(6)) for each in passes)
    assert passes[0] != passes[1] != passes[2]
    for position in range(5):
        sampler = new_sampler("dynamic", 5)
        sampler.position = position
        chosen = sampler.draw(4)
        assert len(set(chosen)) == 4
        assert sorted([*chosen, *sampler.draw(4, wave=1)]) == list(range(5))  # one was left
    endless = new_sampler("uniform", None)
    assert endless.draw(7) + endless.draw(3) == list(range(10))


def test_pairs_without_replacement_have_their_probabilities():
    sampler = new_sampler("gain", 4, width=0.25)
    sampler.begin([0.9, 0.7, 0.5, -1.0], 1)
    sampler.memory["mean"] = 0.5
    weights = np.exp(-0.5 * (np.arange(4) - 0.5) ** 2)
    drawn = drawn_first(sampler, 2, 1200)
    for first, second in itertools.permutations(range(4), 2):
        expected = weights[first] / weights.sum() * weights[second] / (weights.sum() - weights[first])
        assert drawn.count((first, second)) / 1200 == pytest.approx(expected, abs=0.045)
    assert sorted(sampler.draw(9)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dynamik", {}, "Did you mean 'dynamic'"),
        ("gain", {"kontrol": True}, "kontrol"),
        ("learnability", {}, "unknown curriculum 'learnability'"),
        ("gain", {"width": math.inf}, "width=inf must be"),
        ("dynamic", {"refills": -1}, "refills=-1"),
    ],
)
def test_names_and_settings(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        curriculum_named(name, **settings)


def test_the_highest_angle_has_rank_zero_and_nan_is_refused():
    assert ranks_by_angle(SCORES).tolist() == [3, 0, 2, 1]
    assert ranks_by_angle([1.0, 1.0]).tolist() == [0, 1]


def test_the_mean_moves_by_the_formula():
    def moved(mean, *pairs):
        sampler = new_sampler("gain", 50, step=0.1, alpha=2.0, beta=0.5)
        sampler.memory = {"scores": [0.0] * 50, "mean": mean}
        given = [PractisedItem(index=0, predicted=0.5, rewards=(), success=s, trials=1, angle=a) for s, a in pairs]
        sampler.observe(given)
        return sampler.memory["mean"]

    expected = 3 + 0.1 * 50 * np.tanh(2 * (0.8 - 0.5)) + 0.1 * 50 * np.tanh(2 * 0.4)
    assert moved(3.0, (0.6, 0.3), (1.0, 0.5), (None, None)) == pytest.approx(expected)
    assert moved(0.0, (0.0, 0.0)) == 0  # not below the first
    assert moved(49.0, (1.0, 1.0)) == 49
    assert moved(3.0, (None, 0.3)) == 3  # nothing was rewarded


def test_the_gaussian_and_its_control():
    weights = np.exp(-0.5 * (np.array([3, 0, 2, 1]) - 0.5) ** 2)
    samplers = {width: new_sampler("gain", 4, 3, width=width) for width in (0.25, 0.01)}
    for sampler in (control := new_sampler("gain", 4, 3, width=0.01, control=True), *samplers.values()):
        sampler.begin(SCORES, 1)
    samplers[0.25].memory["mean"] = 0.5
    drawn = drawn_first(samplers[0.25], 1, 1200)
    np.testing.assert_allclose(shares(drawn), weights / weights.sum(), atol=0.045)
    assert sorted(shuffled_ranks(4, 3)) == [0, 1, 2, 3]
    assert control.draw(1) == np.flatnonzero(shuffled_ranks(4, 3) == 0).tolist()
    assert samplers[0.01].draw(1) == [1]
    assert len(samplers[0.01].draw(4)) == 4  # the others underflow and come last


@pytest.mark.parametrize("name", CURRICULA)
def test_a_sampler_from_a_saved_state_draws_what_the_first_would_have(name):
    sampler = new_sampler(name)
    if name == "gain":
        sampler.begin(RATES.tolist(), 1)
    for _ in range(4):
        practised(sampler)
    text = json.dumps(sampler.state_dict(), allow_nan=False)
    expected = [practised(sampler) for _ in range(4)]
    again = new_sampler(name)
    again.load_state_dict(json.loads(text))
    assert [practised(again) for _ in range(4)] == expected
    assert again.state_dict() == sampler.state_dict()
    assert all(len(set(each)) == len(each) for each in expected)


def test_the_seed_names_the_draws():
    runs = [[practised(sampler) for _ in range(4)] for sampler in (new_sampler("uniform", seed=n) for n in (0, 0, 1))]
    assert runs[0] == runs[1] != runs[2]


def test_dynamic_refills_at_most_so_often():
    sampler = new_sampler("dynamic", refills=2)
    assert [len(sampler.draw(2, wave)) for wave in range(4)] == [2, 2, 2, 0]
    assert sampler.position == 6
    assert not sampler.is_kept((1.0, 1.0))
    assert sampler.is_kept((1.0, 0.0))
    assert new_sampler("uniform").draw(3, wave=1) == []


def test_wrong_pools_angles_and_states():
    with pytest.raises(ConfigError, match=r"'gain' ranks the items of a pool.* num_items"):
        new_sampler("gain", size=None)
    with pytest.raises(ConfigError, match="of all 4 items, found none"):
        new_sampler("gain", 4).draw(1)
    sampler = new_sampler("uniform")
    state = sampler.state_dict()
    for wrong, message in (
        ({"format": 9}, "format 9"),
        ({"position": None}, "not the state of a curriculum"),
    ):
        with pytest.raises(DataError, match=message):
            sampler.load_state_dict({**state, **wrong})
