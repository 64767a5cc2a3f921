"""Costs: the work of a plan token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.distributed.placement import CostModel, work_of
from treewise.distributed.placement.cost_model import PAIR_FORWARD_FRACTION
from treewise.errors import ConfigError
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.planner import plan
from treewise.planning.plans import BACKWARD, FORWARD
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


@pytest.mark.parametrize("costs", [(-1.0, 1.0, 1.0), (1.0, float("nan"), 0.0), (1.0, 1.0, float("inf"))])
def test_invalid_costs_are_errors(costs):
    with pytest.raises(ConfigError, match="finite and not negative"):
        CostModel(*costs)
