"""What `make clients` compares by, and that the page shows what was run."""

import json

import pytest
import torch

from tests.clients.__main__ import CLIENTS, PAGE, RESULTS, Trained, compared, table
from tests.environments import RecipeError, update_error

STEP = [1.0, 10.0, 8.0, 4.0, 4.0, 0.5]  # number, loss, flat, tree and computed tokens, seconds
ALONE = [1.0, 10.0, 8.0, 8.0, 8.0, 0.9]
UPDATE = {"a": torch.tensor([3.0, 4.0])}


def test_the_page_shows_what_was_run():
    results = json.loads(RESULTS.read_text())
    assert list(results) == list(CLIENTS)
    for name, found in results.items():
        assert found["recipes"].keys() == CLIENTS[name].recipes.keys()
        for recipe, each in found["recipes"].items():
            assert each["outcome"] == ("equal" if CLIENTS[name].recipes[recipe] else "sampled"), (name, recipe)
    assert table() in PAGE.read_text(), "python -m tests.clients --table"


def runs(step, update=UPDATE, num_sampled=0):
    return [Trained([step], update)], num_sampled


def test_equal_runs():
    found = compared(runs(STEP), runs(ALONE), 1)
    assert (found["outcome"], found["share ratio"], found["losses"], found["weights"]) == ("equal", 2.0, 0.0, 0.0)
    assert compared(([], 7), ([], 7), 0)["outcome"] == "sampled"


@pytest.mark.parametrize(
    ("shared", "key", "error"),
    [
        (runs([1.0, 10.8, 8.0, 4.0, 4.0, 0.5]), "losses", 0.1),
        (runs(STEP, {"a": torch.tensor([3.0, 4.5])}), "weights", 0.1),
    ],
    ids=["losses", "weights"],
)
def test_runs_that_differ(shared, key, error):
    found = compared(shared, runs(ALONE), 1)
    assert found["outcome"] == "DIFFERENT"
    assert found[key] == pytest.approx(error)


@pytest.mark.parametrize(
    ("shared", "alone", "says"),
    [
        (runs(STEP, num_sampled=3), runs(ALONE), "3 tokens were sampled"),
        (([], 0), ([], 0), "steps were made"),
        (runs(STEP), runs(STEP), "not computed alone"),
        (runs(ALONE), runs(ALONE), "nothing was shared"),
        (runs(STEP, {"a": torch.zeros(2)}), runs(ALONE, {"a": torch.zeros(2)}), "no weight changed"),
    ],
    ids=["samples", "steps", "alone", "shared", "weights"],
)
def test_runs_that_prove_nothing(shared, alone, says):
    with pytest.raises(RecipeError, match=says):
        compared(shared, alone, 1)


def test_differences_of_updates():
    flat = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert update_error({"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([4.4])}, flat) == pytest.approx(0.1)
