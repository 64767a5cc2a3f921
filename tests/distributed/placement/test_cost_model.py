"""Costs: the work of a plan token by token; costs recovered from measured steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.distributed.placement import CostModel, Work, fit, work_of
from treewise.distributed.placement.cost_model import PAIR_FORWARD_FRACTION, bounded_least_squares
from treewise.errors import ConfigError
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.planner import BACKWARD, FORWARD, plan
from treewise.testing.strategies import forests_and_budgets

PRIOR = CostModel.from_flops(flops_per_token=6e8, flops_per_pair=1e5)


@given(forests_and_budgets(), st.sampled_from(("auto", "never", "always")))
def test_work_is_that_of_every_step_of_the_schedule(forest_and_budget, hold):
    made = plan(*forest_and_budget, hold=hold)
    tokens = pairs = launches = 0.0
    for step in made.schedule:
        depth = made.forest.depth[made.micro_batches[step.micro_batch].positions()]
        if step.action != BACKWARD:
            launches += 1
            tokens += len(depth) * (FORWARD_FRACTION if step.action == FORWARD else 1)
            pairs += (depth + 1).sum() * (PAIR_FORWARD_FRACTION if step.action == FORWARD else 1)
    found = work_of(made)
    assert found.tokens == pytest.approx(tokens)
    assert found.pairs == pytest.approx(pairs)
    assert found.micro_batches == launches


def steps(rng, num_steps):
    return [
        Work(float(tokens), float(tokens * rng.uniform(100, 4000)), float(rng.integers(1, 30)))
        for tokens in rng.integers(500, 60_000, num_steps)
    ]


def test_costs_are_recovered():
    rng = np.random.default_rng(0)
    true = CostModel(2e-5, 3e-9, 4e-3)
    works = steps(rng, 40)
    found = fit(PRIOR, works, [true.seconds(work) for work in works])
    for held_out in steps(rng, 20):
        assert found.seconds(held_out) == pytest.approx(true.seconds(held_out), rel=0.02)


def test_three_slow_steps_among_twenty_change_little():
    rng = np.random.default_rng(1)
    true = CostModel(2e-5, 3e-9, 4e-3)
    works = steps(rng, 20)
    seconds = [true.seconds(work) for work in works]
    for index in (3, 8, 13):
        seconds[index] *= 20
    found = fit(PRIOR, works, seconds)
    errors = [found.seconds(work) / true.seconds(work) - 1 for work in steps(rng, 20)]
    assert np.abs(errors).max() < 0.02


def test_steps_that_are_all_alike_only_set_the_scale():
    work = Work(1000.0, 200_000.0, 2.0)
    found = fit(PRIOR, [work] * 10, [3.0] * 10)
    assert found.seconds(work) == pytest.approx(3.0, rel=1e-6)
    assert found.seconds_per_pair / found.seconds_per_token == pytest.approx(
        PRIOR.seconds_per_pair / PRIOR.seconds_per_token, rel=1e-6
    )


def test_no_price_is_ever_negative():
    rng = np.random.default_rng(2)
    for _ in range(20):
        works = steps(rng, 5)
        found = fit(PRIOR, works, rng.uniform(0.1, 10, 5).tolist())
        assert min(found.seconds_per_token, found.seconds_per_pair, found.seconds_per_micro_batch) >= 0


def test_without_a_measurement_the_prior_holds():
    works = [*[Work(10.0, 10.0, 1.0)] * 4, Work(0.0, 0.0, 0.0)]
    assert fit(PRIOR, works, [0.0, -1.0, float("nan"), float("inf"), 1.0]) == fit(PRIOR, [], []) == PRIOR


@pytest.mark.parametrize("seed", range(10))
def test_least_squares_against_a_grid(seed):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(8, 2)), rng.normal(size=8)
    found = bounded_least_squares(left, right, 0.25)
    assert (found >= 0.25).all()
    error = np.square(left @ found - right).sum()
    for x in itertools.product(np.linspace(0.25, 3, 40), repeat=2):
        assert error <= np.square(left @ np.array(x) - right).sum() + 1e-12


@pytest.mark.parametrize("costs", [(-1.0, 1.0, 1.0), (1.0, float("nan"), 0.0), (1.0, 1.0, float("inf"))])
def test_invalid_costs_are_errors(costs):
    with pytest.raises(ConfigError, match="finite and not negative"):
        CostModel(*costs)
