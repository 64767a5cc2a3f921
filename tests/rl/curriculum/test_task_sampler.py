"""A sampler draws by its state alone; the book that guides it is calibrated on simulated tasks."""

import json

import numpy as np
import pytest

from tests.rl.curriculum.test_rules import outcome
from treewise.errors import ConfigError, DataError
from treewise.rl.curriculum import CURRICULA, Pool, TaskSampler, curriculum_named
from treewise.rl.success_book import BookSettings, SuccessBook

RATES = np.linspace(0.0, 1.0, 12)


def new_sampler(name, size=12, seed=0, **settings):
    return TaskSampler(curriculum_named(name, **settings), Pool(size, "task {}".format), seed)


def practised(sampler, book, count=3, rollouts=6):
    """One iteration on tasks of fixed success rates; the items of all its waves."""
    rng = np.random.default_rng([sampler.iteration, 99])
    indices, outcomes, kept = sampler.draw(count, book), [], 0
    drawn = list(indices)
    while indices:
        wave = [outcome(index, *(rng.random(rollouts) < RATES[index])) for index in indices]
        outcomes += wave
        kept += sum(map(sampler.is_kept, wave))
        indices = sampler.refill(count - kept, book) if kept < count else []
        drawn += indices
    sampler.observe(outcomes)
    for each in outcomes:
        book.observe(sampler.pool.key_of(each.index), each.num_successes, each.trials)
    return drawn


@pytest.mark.parametrize("name", [name for name in CURRICULA if not name.startswith("gain")])
def test_a_sampler_from_a_saved_state_draws_what_the_first_would_have(name):
    sampler, book = new_sampler(name), SuccessBook()
    for _ in range(4):
        practised(sampler, book)
    text = json.dumps([sampler.state_dict(), book.state_dict()], allow_nan=False)
    expected = [practised(sampler, book) for _ in range(4)]
    state, of_book = json.loads(text)
    again = new_sampler(name)
    again.load_state_dict(state)
    other = SuccessBook.from_state(of_book)
    assert [practised(again, other) for _ in range(4)] == expected
    assert again.state_dict() == sampler.state_dict()
    assert all(len(set(each)) == len(each) for each in expected)


def test_the_seed_names_the_draws():
    books = [SuccessBook() for _ in range(3)]
    runs = [
        [practised(sampler, book) for _ in range(4)]
        for sampler, book in zip([new_sampler("learnability", seed=seed) for seed in (0, 0, 1)], books, strict=True)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("thompson", [False, True])
def test_a_guided_sampler_finds_the_middle(thompson):
    """Tasks of fixed rates: most draws are of uncertain ones, and the book is calibrated on what was drawn."""
    sampler, book = new_sampler("learnability", thompson=thompson), SuccessBook(BookSettings(decay=1.0))
    drawn = np.bincount([index for _ in range(150) for index in practised(sampler, book)], minlength=12)
    uncertain = (RATES > 0.2) & (RATES < 0.8)
    assert drawn[uncertain].mean() > 2 * drawn[~uncertain].mean()
    found = book.calibration()
    full = found.trials > 150
    np.testing.assert_allclose(found.predicted[full], found.observed[full], atol=0.1)
    assert full.sum() >= 3


def test_dynamic_refills_at_most_so_often():
    sampler, book = new_sampler("dynamic", refills=2), SuccessBook()
    first = sampler.draw(2, book)
    assert len(sampler.refill(2, book)) == len(sampler.refill(2, book)) == 2
    assert sampler.refill(2, book) == []
    assert sampler.position == 6
    assert not sampler.is_kept(outcome(0, 1, 1))
    assert sampler.is_kept(outcome(0, 1, 0))
    assert new_sampler("uniform").refill(3, book) == []
    assert len(set(first)) == 2


def test_wrong_pools_and_states():
    with pytest.raises(ConfigError, match=r"'learnability' ranks the items of a pool.* num_items"):
        new_sampler("learnability", size=None)
    sampler = new_sampler("uniform")
    state = sampler.state_dict()
    for wrong, message in (
        ({"format": 9}, "format 9"),
        ({"curriculum": "learnability"}, "'learnability', not of 'uniform'"),
        ({"position": None}, "not the state of a curriculum"),
    ):
        with pytest.raises(DataError, match=message):
            sampler.load_state_dict({**state, **wrong})
