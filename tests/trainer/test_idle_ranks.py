"""Processes that have no work in a step, beside others that have: every kind of objective, sharded, as in one process.

Two-pass objectives hung on three processes and on four where a rank was idle: its empty passes gathered parameters in
their backward, and the walks of the others did not.
"""

import pytest
import torch

from tests.trainer.ranks import launch, outcome, train

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("trainer/test_idle_ranks")]

OBJECTIVES = {
    "sft": None,
    "token ratios": {},
    "cispo": {"surrogate": "cispo", "max_ratio": 5.0},
    "sequence ratios": {"ratio_level": "sequence"},
    "turn ratios": {"ratio_level": "turn"},
    "sequence corrections": {"sampler_correction": "truncate", "sampler_level": "sequence"},
}
BUDGETS = {"whole": None, "cut": 14}
CASES = [(objective, budget) for objective in OBJECTIVES for budget in BUDGETS]


def settings_of(objective, budget, num_ranks):
    """Two steps, of which the second has one tree; balanced ranks would share it."""
    return {
        "policy_gradient": OBJECTIVES[objective],
        "max_tokens": BUDGETS[budget],
        "num_trees": num_ranks + 1,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.5,
    }


@pytest.fixture(scope="module", params=[2, 3, 4])
def of_ranks(request, tmp_path_factory):
    """The number of processes, and the outcomes of the first of them."""
    several = {"sharded": True, "balance_ranks": False, "per_device_train_batch_size": 1}
    runs = {f"{kind} {cut}": {**settings_of(kind, cut, request.param), **several} for kind, cut in CASES}
    return request.param, launch(request.param, tmp_path_factory.mktemp("idle"), runs)[0]


@pytest.mark.parametrize(("objective", "budget"), CASES)
def test_idle_ranks_change_nothing(of_ranks, tmp_path, objective, budget):
    num_ranks, outcomes = of_ranks
    settings = {**settings_of(objective, budget, num_ranks), "per_device_train_batch_size": num_ranks}
    expected, found = outcome(train(tmp_path, **settings)), outcomes[f"{objective} {budget}"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name, value in expected["model"].items():
        assert torch.allclose(found["model"][name], value, rtol=0, atol=1e-6), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("objective", ["sft", "sequence ratios"])
def test_micro_batches_with_router_losses_alone_train_sharded(tmp_path, objective):
    """Where no token of a micro-batch is trained, its loss is that of the routers, which no layer's output feeds."""
    settings = {**settings_of(objective, "cut", 2), "model": {"family": "mixtral", "output_router_logits": True}}
    first, second = launch(2, tmp_path, {"run": {**settings, "sharded": True, "per_device_train_batch_size": 1}})
    assert all(0 < loss < 100 for loss in map(abs, first["run"]["losses"]))
    assert all(0 < norm < 100 for norm in first["run"]["norms"])
    for name, value in first["run"]["model"].items():
        assert torch.equal(value, second["run"]["model"][name])
