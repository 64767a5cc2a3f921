"""The book of successes: posteriors by hand, its score against plain loops, state bit for bit."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.growing_trees import ToySampler, grow
from treewise.errors import ConfigError, DataError
from treewise.rl.branching import RolloutNode, RolloutTree, Signals, branching_named
from treewise.rl.node_values import node_values
from treewise.rl.success_book import BookSettings, SuccessBook
from treewise.testing.strategies import MAX_SEED


def filled(seed: int) -> SuccessBook:
    rng = np.random.default_rng(seed)
    book = SuccessBook(BookSettings(decay=0.9))
    for _ in range(rng.integers(1, 20)):
        book.observe(f"task {rng.integers(4)}", float(rng.random()), 4)
    return book


def test_posterior_by_hand() -> None:
    book = SuccessBook(BookSettings(decay=0.5, prior_successes=1.0, prior_failures=3.0))
    assert book.success("a") == 0.25
    book.observe("a", 3 / 4, 4)
    assert book.counts("a") == (1 + 3, 3 + 1)  # the prior does not decay
    book.observe("a", 0, 2)
    assert book.counts("a") == (0.5 * 4 + 0.5 * 1, 0.5 * 4 + 0.5 * 3 + 2)
    a, b = book.counts("a")
    samples = np.random.default_rng(0).beta(a, b, 200_000)
    assert book.success("a") == pytest.approx(samples.mean(), abs=2e-3)


@given(seed=st.integers(0, MAX_SEED))
def test_state_is_bit_exact(seed: int) -> None:
    book = filled(seed)
    text = json.dumps(book.state_dict(), allow_nan=False)
    again = SuccessBook.from_state(json.loads(text))
    assert json.dumps(again.state_dict(), allow_nan=False) == text
    for each in (book, again):
        each.observe("task 1", 1 / 4, 4)
    assert json.dumps(again.state_dict()) == json.dumps(book.state_dict())


def test_states_of_other_formats() -> None:
    state = filled(2).state_dict()
    for wrong, message in (
        ({"format": 9}, "format 9; this version reads 1"),
        ({"tasks": None}, "not the state of a success book"),
        ({"settings": {"node_strength": 4.0}}, "not the state of a success book"),
    ):
        with pytest.raises(DataError, match=message):
            SuccessBook.from_state({**state, **wrong})
    for options in ({"decay": 0.0}, {"prior_successes": np.nan}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
            BookSettings(**options)


@given(seed=st.integers(0, MAX_SEED))
def test_the_score_of_predictions_against_single_outcomes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    book, seen, tried = SuccessBook(), [], set()
    for _ in range(30):
        task, trials = f"{rng.integers(5)}", int(rng.integers(1, 5))
        successes = int(rng.integers(trials + 1))
        if task in tried:
            seen += [(book.success(task), outcome) for outcome in [1] * successes + [0] * (trials - successes)]
        tried.add(task)
        book.observe(task, successes / trials, trials)
    assert book.brier == pytest.approx(np.mean([(p - z) ** 2 for p, z in seen]) if seen else np.nan, nan_ok=True)


def test_a_tree_counts_by_children() -> None:
    """Root 0 with two branches after its first token, rewards 1, 0, 0; root 1 has reward 1."""
    tree = RolloutTree([1])
    for parent, cut, reward in ((-1, 0, 1.0), (0, 1, 0.0), (0, 1, 0.0), (-1, 0, 1.0)):
        index = tree.add(RolloutNode([5, 6], [0, 0], parent=parent, cut=cut, finish="stop"))
        tree.judge(index, reward)
    book = SuccessBook(BookSettings(decay=1.0))
    prompt = node_values(tree, book.settings.success_at)[0]
    book.observe("a", prompt.value, prompt.num_draws)
    book.observe("a", None, 0)  # no reward, no trial
    assert book.counts("a") == pytest.approx((1 + 4 / 3, 1 + 2 / 3))
    assert book.success("a") == pytest.approx((1 + 4 / 3) / 4)


def test_lcr_takes_the_books_word() -> None:
    book, rng = SuccessBook(), np.random.default_rng(0)
    ask = branching_named("lcr")
    tree, _ = grow(ask, 1, ToySampler(), rng, Signals(book.success("a")))
    assert ask.next_requests(tree, Signals(book.success("a")), 99, rng)[0].node == 0
    book.observe("a", 0.99, 100)
    assert ask.next_requests(tree, Signals(book.success("a")), 99, rng)[0].node == -1
