"""A prepared forest: the same step, planned again where the settings changed meanwhile."""

import pytest

from tests.trainer.helpers import some_trees, tiny_model
from treewise.bench.workloads import make
from treewise.engine.engine import TreeEngine
from treewise.engine.prepared import PlanSettings, PreparedForest
from treewise.errors import DataError
from treewise.objectives import GRPO, SFT
from treewise.planning.fastest import fastest_plan
from treewise.planning.planner import plan
from treewise.testing.oracle import gradient_error, gradients_of
from treewise.tree.forest import Forest


@pytest.fixture
def forest():
    return Forest.concatenate([Forest.from_trajectories(tree) for tree in some_trees(3)])


def step_of(model, engine, forests, objective):
    model.zero_grad()
    loss = engine.step(forests, objective).loss
    return loss, gradients_of(model)


@pytest.mark.parametrize("changed", [{}, {"tokens": 9}, {"hold": "never"}], ids=["same", "budget", "hold"])
def test_a_step_on_a_prepared_forest_is_the_step(forest, changed):
    model, objective = tiny_model(), SFT()
    engine = TreeEngine(model, 24)
    expected = step_of(model, engine, forest, objective)
    ready = engine.prepare(forest, objective)
    assert engine.plan(ready) is ready.plan
    if "tokens" in changed:
        engine.budget.tokens = changed["tokens"]
    engine.hold = changed.get("hold", engine.hold)
    assert (engine.plan(ready) is ready.plan) == (not changed)
    assert engine.plan(ready).max_tokens == engine.max_tokens
    found = step_of(model, engine, ready, objective)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert gradient_error(found[1], expected[1]) < 1e-6


def test_terms_of_another_objective_are_not_used(forest):
    model = tiny_model()
    engine = TreeEngine(model, 24)
    ready = engine.prepare(forest, SFT())
    once = SFT("once")
    assert engine.step(ready, once).loss == pytest.approx(engine.step(forest, once).loss, rel=1e-6)


def test_what_an_objective_misses_is_an_error_of_the_preparation(forest):
    with pytest.raises(DataError, match="advantages"):
        TreeEngine(tiny_model(), 24).prepare(forest, GRPO())


def test_a_plan_of_smaller_pieces_gives_the_gradients_of_the_whole_tree():
    """Where a device waits for its host (`nn.launching`), which no CPU does."""
    tree = Forest.from_trajectories(list(make("ratio-6.5", "cpu", 60).trajectories))
    limit, least = tree.num_tokens // 3, tree.num_tokens
    plain, found = plan(tree, limit), fastest_plan(tree, limit, least_tokens=least)
    assert found.num_micro_batches < plain.num_micro_batches
    assert found.num_open_tokens > plain.num_open_tokens
    losses, gradients = [], []
    for most in (None, limit):
        model = tiny_model().double()
        engine = TreeEngine(model, most, check=False)
        settings = PlanSettings(most, is_measured=False, hold="auto")
        out = engine.step(PreparedForest(tree, settings, found) if most else tree)
        assert out.num_micro_batches == (found.num_micro_batches if most else 1)
        losses.append(out.loss)
        gradients.append(gradients_of(model))
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)
    assert gradient_error(*gradients) < 1e-12
