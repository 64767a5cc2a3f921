"""The book of successes: posteriors by hand, its score against plain loops, state bit for bit."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.growing_trees import ToySampler, grow
from treewise.errors import ConfigError, DataError
from treewise.rl.branching import RolloutNode, RolloutTree, branching_named
from treewise.rl.success_book import BookSettings, SuccessBook
from treewise.testing.strategies import MAX_SEED


def filled(seed: int) -> SuccessBook:
    rng = np.random.default_rng(seed)
    book = SuccessBook(BookSettings(decay=0.9))
    for _ in range(rng.integers(1, 20)):
        book.observe(f"task {rng.integers(4)}", float(rng.random() * 4), 4)
        book.observe_node("task 1", rng.integers(0, 3, 2), float(rng.integers(3)), 2)
    return book


def node_success(book: SuccessBook, task: str, ids: list[int]) -> float:
    """The prediction at the end of a prompt of a token and the rest of these ids."""
    tree = RolloutTree(ids[:1])
    tree.add(RolloutNode([*ids[1:], 0, 0], [0] * (len(ids) + 1), finish="stop"))
    known = book.signals(task, tree, points="tokens")
    return known.node_success.get((0, len(ids) - 1), known.success)


def test_posterior_by_hand() -> None:
    book = SuccessBook(BookSettings(decay=0.5, prior_successes=1.0, prior_failures=3.0))
    assert book.success("a") == 0.25
    book.observe("a", 3, 4)
    assert book.counts("a") == (1 + 3, 3 + 1)  # the prior does not decay
    book.observe("a", 0, 2)
    assert book.counts("a") == (0.5 * 4 + 0.5 * 1, 0.5 * 4 + 0.5 * 3 + 2)
    a, b = book.counts("a")
    samples = np.random.default_rng(0).beta(a, b, 200_000)
    assert book.success("a") == pytest.approx(samples.mean(), abs=2e-3)


def test_branch_points_start_at_their_task() -> None:
    book = SuccessBook(BookSettings(decay=1.0, node_strength=4.0))
    book.observe("a", 6, 8)  # Beta(7, 3)
    assert node_success(book, "a", [1, 2]) == 0.7
    book.observe_node("a", [1, 2], 0, 2)
    assert node_success(book, "a", [1, 2]) == pytest.approx(0.7 * 4 / 6)
    assert node_success(book, "a", [1, 3]) == 0.7
    assert node_success(book, "b", [1, 2]) == 0.5


def test_points_that_were_not_observed_for_the_longest_go() -> None:
    book = SuccessBook(BookSettings(max_nodes=2))
    for last in (1, 2, 1, 3):
        book.observe_node("a", [0, last], 1, 1)
    assert [node_success(book, "a", [0, last]) > 0.5 for last in (1, 2, 3)] == [True, False, True]


@given(seed=st.integers(0, MAX_SEED))
def test_state_is_bit_exact(seed: int) -> None:
    book = filled(seed)
    text = json.dumps(book.state_dict(), allow_nan=False)
    again = SuccessBook.from_state(json.loads(text))
    assert json.dumps(again.state_dict(), allow_nan=False) == text
    for each in (book, again):
        each.observe("task 1", 1, 3)
        each.observe_node("task 1", [0, 1], 1, 3)
    assert json.dumps(again.state_dict()) == json.dumps(book.state_dict())


def test_states_of_other_versions() -> None:
    state = filled(2).state_dict()
    trials = state.pop("trials")
    earlier = {**state, "bins": [[trials - 1, 1], [0, 0], [0, 0]], "first": 3.0}
    assert SuccessBook.from_state(earlier).brier == filled(2).brier
    state["trials"] = trials
    for wrong, message in (
        ({"format": 9}, "format 9; this version reads 1"),
        ({"nodes": None}, "not the state of a success book"),
    ):
        with pytest.raises(DataError, match=message):
            SuccessBook.from_state({**state, **wrong})
    for options in ({"decay": 0.0}, {"prior_successes": np.nan}, {"node_strength": -1.0}, {"max_nodes": -1}):
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
        book.observe(task, successes, trials)
    assert book.brier == pytest.approx(np.mean([(p - z) ** 2 for p, z in seen]) if seen else np.nan, nan_ok=True)


def test_a_tree_counts_by_children() -> None:
    """Root 0 with two branches after its first token, rewards 1, 0, 0; root 1 has reward 1."""
    tree = RolloutTree([1])
    for parent, cut, reward in ((-1, 0, 1.0), (0, 1, 0.0), (0, 1, 0.0), (-1, 0, 1.0)):
        index = tree.add(RolloutNode([5, 6], [0, 0], parent=parent, cut=cut, finish="stop"))
        tree.judge(index, reward)
    book = SuccessBook(BookSettings(decay=1.0))
    book.observe_tree("a", tree)
    assert book.counts("a") == pytest.approx((1 + 4 / 3, 1 + 2 / 3))
    task = (1 + 4 / 3) / 4
    assert node_success(book, "a", [1, 5]) == pytest.approx((4 * task + 1) / 7)
    signals = book.signals("a", tree, points="tokens")
    assert (signals.success, list(signals.node_success)) == (pytest.approx(task), [(0, 1), (3, 1)])  # one prefix
    assert book.signals("a", tree).node_success == {}


def test_lcr_takes_the_books_word() -> None:
    book, rng = SuccessBook(), np.random.default_rng(0)
    ask = branching_named("lcr")
    tree, _ = grow(ask, 1, ToySampler(), rng, book.signals("a", RolloutTree([1])))
    assert ask.next_requests(tree, book.signals("a", tree), 99, rng)[0].node == 0
    book.observe("a", 99, 100)
    assert ask.next_requests(tree, book.signals("a", tree), 99, rng)[0].node == -1
