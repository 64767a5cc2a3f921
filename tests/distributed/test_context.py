"""Context parallelism: ranks that share the tokens of each micro-batch, against one process.

All cases of one number of processes run in the same ones, forked from this one.
"""

from dataclasses import replace

import pytest
import torch

from tests.distributed.test_mesh import OBJECTIVES, Case, expected, fork_ranks, model_of, names, trajectories
from treewise import TreeEngine
from treewise.distributed import ranks
from treewise.distributed.context import check_context_size, context_group
from treewise.errors import ConfigError, DataError, UnsupportedModelError
from treewise.objectives import GSPO
from treewise.testing import gradients_of, tiny_model

TOLERANCE = 1e-6  # as in tests/distributed/test_mesh.py
SMALLEST = 1e-2
TWO = [
    Case("qwen3", budgets=(None, 12)),
    Case("qwen3_moe", objective="router", budgets=(12,)),
]
MORE = [
    *(Case(each, budgets=(None, 2, 12)) for each in ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")),
    *(Case(each, objective="policy") for each in ("llama", "qwen3", "gpt_oss")),
    Case("qwen3_moe", objective="router"),
    Case("llama", objective="sequence"),
    Case("qwen3", objective="distillation"),
]
FOUR = [replace(case, budgets=(None, 12)) for case in (*TWO, *MORE[:3])]
OBJECTIVES["sequence"] = GSPO()


def on_context(case, size):
    """What the ranks of a group compute together, by budget; groups of a run have trees of their own."""
    model, found = model_of(case).train(), {}
    group = context_group(size, "cpu")
    for budget in case.budgets:
        model.zero_grad()
        router = case.objective == "router"
        engine = TreeEngine(
            model, budget, router_aux_loss=router, router_z_coefficient=0.1 if router else 0.0, context=group
        )
        out = engine.step(trajectories(), OBJECTIVES[case.objective])
        group.sum_gradients(model.parameters())
        gradients = gradients_of(model)
        with torch.no_grad():
            logprobs = engine.logprobs(trajectories())
        found[budget] = {"loss": out.loss, "metrics": dict(out.metrics), "logprobs": logprobs, "gradients": gradients}
    return found


def run_on(num_ranks, cases, folder):
    def work():
        return {case.name: on_context(case, num_ranks) for case in cases} | {"refused": refused_on(num_ranks)}

    return fork_ranks(num_ranks, work, folder)


def refused_on(num_ranks):
    """What cannot be spread over tokens."""
    group, model = context_group(num_ranks, "cpu"), tiny_model("llama")
    with pytest.raises(DataError, match=rf"context_size={num_ranks}.* have different trees or budgets: number 1"):
        TreeEngine(model, 9 + ranks.own() % 2, context=group).step(trajectories())
    with pytest.raises(ConfigError, match=r"max_tokens='auto'.*context_size"):
        TreeEngine(model, "auto", context=group)
    with pytest.raises(UnsupportedModelError, match=rf"recurrent layers .*leave context_size={num_ranks} out"):
        TreeEngine(tiny_model("qwen3_next"), context=group)
    return True


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_on(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return run_on(2, MORE, tmp_path_factory.mktemp("more"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_on(4, FOUR, tmp_path_factory.mktemp("four"))


def check(found, case):
    loss, logprobs, gradients = expected(case)
    norm = sum(float(each.norm()) ** 2 for each in gradients.values()) ** 0.5
    for budget in case.budgets:
        for own in (each[case.name][budget] for each in found):
            assert own["loss"] == pytest.approx(loss, rel=TOLERANCE)
            for ours, theirs in zip(own["logprobs"], logprobs, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
            gaps = {name: float((own["gradients"][name] - each).norm()) for name, each in gradients.items()}
            assert sum(gap**2 for gap in gaps.values()) ** 0.5 <= TOLERANCE * norm, max(gaps, key=gaps.__getitem__)
            for name, gap in gaps.items():
                assert gap <= 2 * TOLERANCE * max(float(gradients[name].norm()), SMALLEST * norm), (name, budget)


@pytest.mark.parametrize("case", TWO, ids=names(TWO))
def test_two_processes_give_what_one_gives(two, case):
    check(two, case)


@pytest.mark.parametrize("case", MORE, ids=names(MORE))
def test_more_families_on_two_processes(more, case):
    check(more, case)


@pytest.mark.parametrize("case", FOUR, ids=names(FOUR))
def test_four_processes_give_what_one_gives(four, case):
    check(four, case)


@pytest.mark.parametrize(("sizes", "message"), [
    ((0, 4), "context_size=0; give 1 or more"),
    ((3, 4), "context_size=3 does not divide the 4 processes"),
    ((2, 4, 2), "context_size=2 cannot be combined with tp_size=2, ep_size=1: leave it out and lower max_tokens"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_errors(sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_context_size(*sizes)
