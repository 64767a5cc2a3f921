"""`verify` passes on a right engine, and fails on every wrong one that we can think of."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.engine.test_carried import PROJECTOR, TOWER, seeing_case, train_only
from tests.needs import IMAGES
from tests.nn.vision.test_forest_images import HISTORIES
from treewise import objectives
from treewise.base import progress
from treewise.engine import TreeEngine, checks, step, values
from treewise.engine.flat_terms import flat_weights
from treewise.errors import ConfigError, DataError, VerificationError
from treewise.nn.attention import cascade, gateway
from treewise.nn.attention.gateway import Gateway
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.router_loss import RouterLoss
from treewise.objectives import NORMALIZATIONS, SFT, Terms
from treewise.planning.plans import Layout, Plan, lay_out
from treewise.testing import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory
from treewise.verification.compare import verify


def tiny_llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return tiny_model(dtype=dtype, vocab_size=97, num_hidden_layers=2, initializer_range=0.3)


def branching() -> list[Trajectory]:
    """A trunk with forks at two depths, a duplicate, a contained prefix, and a tree of its own."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 97, 12)
    items = [Trajectory(np.concatenate([trunk[: 7 + 2 * (i % 3)], rng.integers(0, 97, 5 + i)])) for i in range(4)]
    weights = [0, 0.5, *([1.0] * 10)]
    return [*items, Trajectory(trunk, loss_weights=weights), Trajectory(trunk), Trajectory(rng.integers(0, 97, 6))]


@pytest.mark.representatives("None-dtype2", "10-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_tokens", [None, 10])
def test_a_right_engine_passes(dtype: torch.dtype, max_tokens: int | None) -> None:
    report = verify(tiny_llama(dtype), branching(), max_tokens)
    assert report.passed, report.describe()
    assert (report.num_micro_batches > 1) == (max_tokens is not None)


@pytest.mark.representatives("trajectory_mean-once", "rollout_sum-per_trajectory")
@pytest.mark.parametrize("weighting", ["per_trajectory", "once"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_every_form_of_sft_passes(weighting: str, normalization: str) -> None:
    constant = 7.0 if normalization in ("rollout_sum", "constant") else None
    # In float64: float32 alone is up to 2e-5 from it here, tree and flat alike, by processor (weights of 0.3).
    report = verify(tiny_llama(torch.float64), branching(), objective=SFT(weighting, normalization, constant))
    assert report.passed, report.describe()


def test_siblings_that_see_one_another_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(*args: object) -> Layout:
        layout = lay_out(*args)
        return replace(layout, hi=np.full_like(layout.hi, layout.num_tokens))

    monkeypatch.setattr(checks, "probe", lambda *args, **kwargs: None)  # it would notice first
    monkeypatch.setattr(step, "lay_out", leaky)
    report = verify(tiny_llama(), branching())
    assert {line.split()[0] for line in report.failures} == {
        "loss",
        "max_logprob",
        "gradient",
        "values",
        "worst_parameter",
    }


def test_positions_of_the_layout_instead_of_depths_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def misplaced(*args: object) -> Layout:
        layout = lay_out(*args)
        return replace(layout, depth=np.arange(layout.num_tokens, dtype=np.int32))

    monkeypatch.setattr(checks, "probe", lambda *args, **kwargs: None)  # it would notice first
    monkeypatch.setattr(step, "lay_out", misplaced)
    assert not verify(tiny_llama(), branching()).passed


def test_lost_gateway_gradients_fail_though_the_loss_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "probe", lambda *args, **kwargs: None)
    monkeypatch.setattr(Gateway, "add_gradients", lambda *args: None)
    report = verify(tiny_llama(), branching(), max_tokens=10)
    assert report.loss_error < 1e-6
    assert any(line.startswith("gradient") for line in report.failures)
    several = verify(tiny_llama(), branching())  # whole, which is right, at half of the largest tree, and at less
    half, small = several.at_budgets
    assert half.num_micro_batches > 1
    assert (half.is_cut, small.is_cut) == (False, True)
    assert several.failures == tuple(
        f"{line} under max_tokens {part.max_tokens}" for part in (half, small) for line in part.failures
    )
    with pytest.raises(VerificationError, match=f"under max_tokens {half.max_tokens}"):
        several.raise_if_failed()


def test_lost_gateway_gradients_fail_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "probe", lambda *args, **kwargs: None)
    monkeypatch.setattr(Gateway, "add_gradients", lambda *args: None)
    assert not verify(tiny_llama(torch.bfloat16), branching(), max_tokens=10).passed


def test_shared_tokens_that_count_once_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    step = TreeEngine.step
    monkeypatch.setattr(TreeEngine, "step", lambda self, forest, _: step(self, forest, SFT(weighting="once")))
    assert not verify(tiny_llama(), branching()).passed


def test_one_wrong_small_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    step = TreeEngine.step

    def spoil(self: TreeEngine, *args: object) -> object:
        out = step(self, *args)
        model.model.layers[1].post_attention_layernorm.weight.grad *= 1.01
        return out

    monkeypatch.setattr(TreeEngine, "step", spoil)
    report = verify(model, branching())
    assert report.worst_parameter.name == "model.layers.1.post_attention_layernorm.weight"
    assert any("post_attention_layernorm" in line for line in report.failures)
    with pytest.raises(VerificationError, match=r"layers\.1\.post_attention_layernorm"):
        report.raise_if_failed()


def test_not_a_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    step = TreeEngine.step

    def spoil(self: TreeEngine, *args: object) -> object:
        out = step(self, *args)
        model.lm_head.weight.grad[0, 0] = torch.nan
        return out

    monkeypatch.setattr(TreeEngine, "step", spoil)
    report = verify(model, branching())
    assert report.worst_parameter.name == "lm_head.weight"
    assert not report.passed


def test_the_model_is_left_as_it_was_found() -> None:
    model = tiny_llama().train()
    model.model.layers[0].eval()
    gradient = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = gradient
    state = torch.get_rng_state()
    verify(model, branching())
    assert model.lm_head.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert model.model.norm.weight.grad is None
    assert model.training
    assert not model.model.layers[0].training
    assert torch.equal(torch.get_rng_state(), state)


def test_the_report_is_json_and_text() -> None:
    report = verify(tiny_llama(), branching(), max_tokens=20)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["passed"] is True
    assert values["parameters"][0]["name"] == values["worst_parameter"] == report.worst_parameter.name
    assert report.worst_parameter.name in report.describe()


def test_a_tolerance_replaces_the_float32_copy() -> None:
    report = verify(tiny_llama(torch.bfloat16), branching(), tolerance=0.5)
    assert report.reference == "flat training"
    assert report.limits["gradient"] == 0.5
    with pytest.raises(ConfigError, match="tolerance"):
        verify(tiny_llama(), branching(), tolerance=0.0)


def test_flat_weights_by_hand() -> None:
    items = [Trajectory([1, 2, 3], [0, 1, 1]), Trajectory([1, 2, 4], [0, 1, 2]), Trajectory([1, 2, 5], [0, 0, 1])]
    once = flat_weights(items, SFT(weighting="once"))
    assert [weight.tolist() for weight in once] == [[0, 0.1, 0.2], [0, 0.1, 0.4], [0, 0, 0.2]]
    mean = flat_weights(items, SFT(normalization="trajectory_mean"))
    np.testing.assert_allclose(np.concatenate(mean), np.array([0, 1 / 2, 1 / 2, 0, 1 / 3, 2 / 3, 0, 0, 1]) / 3)
    rows = [Trajectory([1, 2, 3], rollout=1), Trajectory([1, 2, 4], rollout=1), Trajectory([1, 2, 5], rollout=2)]
    by_rollout = flat_weights(rows, SFT(normalization="rollout_mean", weighting="per_rollout"))
    np.testing.assert_allclose(by_rollout, np.array([[0, 0.5, 1], [0, 0.5, 1], [0, 1.5, 1.5]]) / 6)


def with_streams(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Every stream, random, so that branches through one token disagree."""
    rng = np.random.default_rng(3)
    items = []
    for item in trajectories:
        length = len(item)
        teacher = np.log(rng.dirichlet(np.ones(3), length)[:, :2])
        items.append(
            replace(
                item,
                advantages=rng.normal(size=length),
                old_logprobs=-rng.exponential(size=length),
                ref_logprobs=-rng.exponential(size=length),
                sampler_logprobs=-rng.exponential(size=length),
                teacher_ids=np.stack([rng.permutation(97)[:2] for _ in range(length)]),
                teacher_logprobs=teacher,
            )
        )
    return items


# -- what a verification takes by itself ------------------------------------------------------------------------------


def larger() -> list[Trajectory]:
    """Two trees with forks at several depths, of more than 64 tokens."""
    rng = np.random.default_rng(1)
    trunk = rng.integers(0, 97, 24)
    items = [
        Trajectory(np.concatenate([trunk[: 24 - 5 * fork], rng.integers(0, 97, 8), rng.integers(0, 97, 6 + leaf)]))
        for fork in range(4)
        for leaf in range(2)
    ]
    other = rng.integers(0, 97, 9)
    return [*items, *(Trajectory(np.concatenate([other, rng.integers(0, 97, 7)])) for _ in range(2))]


def below_the_third_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Gateway.add_gradients

    def wrong(self, call, rows, key_grad, value_grad):  # type: ignore[no-untyped-def]
        factor = 1.02 if any(self is each for each in deep) else 1.0
        add(self, call, rows, factor * key_grad, factor * value_grad)

    forward, deep = step.Walk.forward, list[Gateway]()

    def noted(self: step.Walk, index: int, *, leaves_gateway: bool = False) -> MicroBatchOutput:
        deep.extend(
            run.gateway
            for above, run in self._running.items()
            if run.gateway is not None and len(self.plan.ancestors[above]) >= 3
        )
        return forward(self, index, leaves_gateway=leaves_gateway)

    monkeypatch.setattr(step.Walk, "forward", noted)
    monkeypatch.setattr(Gateway, "add_gradients", wrong)


def in_the_fifth_and_later_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Plan, index: int) -> Layout:
        layout = lay_out(plan, index)
        is_late = not plan.micro_batches[index].is_open and sum(not b.is_open for b in plan.micro_batches[:index]) >= 4
        return replace(layout, depth=layout.depth + 1) if is_late else layout

    monkeypatch.setattr(step, "lay_out", wrong)


def where_rows_of_a_gateway_have_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        if not isinstance(rows, slice):
            rows = rows[0] + torch.arange(len(rows))
        return gateway.take(tensor, rows)

    monkeypatch.setattr(cascade, "take", wrong)


def in_gradients_of_rows_with_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Gateway.add_gradients

    def wrong(self, call, rows, key_grad, value_grad):  # type: ignore[no-untyped-def]
        factor = 1.0 if isinstance(rows, slice) else 1.02
        add(self, call, rows, factor * key_grad, factor * value_grad)

    monkeypatch.setattr(Gateway, "add_gradients", wrong)


def beyond_row_64(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Plan, index: int) -> Layout:
        layout = lay_out(plan, index)
        return replace(layout, depth=layout.depth + (np.arange(layout.num_tokens) >= 64).astype(np.int32))

    monkeypatch.setattr(step, "lay_out", wrong)


def in_a_second_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Plan, index: int) -> Layout:
        layout, roots = lay_out(plan, index), np.flatnonzero(plan.forest.parent < 0)
        is_later = len(roots) > 1 and layout.num_tokens > roots[-1] and layout.positions >= roots[-1]
        return replace(layout, depth=layout.depth * (1 + np.asarray(is_later, dtype=np.int32)))

    monkeypatch.setattr(step, "lay_out", wrong)


def in_the_gradient_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gradients = values._loss_with_gradients

    def wrong(readers: Any, grads_of: Any) -> Any:
        more = [{name: None if grad is None else 1.05 * grad for name, grad in each.items()} for each in grads_of]
        return of_gradients(readers, more)

    monkeypatch.setattr(values, "_loss_with_gradients", wrong)


FAULTS = [
    below_the_third_gateway,
    in_the_fifth_and_later_pieces,
    where_rows_of_a_gateway_have_a_gap,
    in_gradients_of_rows_with_a_gap,
    beyond_row_64,
    in_a_second_tree,
    in_the_gradient_of_values,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.__name__)
def test_faults_that_act_in_few_places_are_found(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    report = verify(tiny_llama(), larger())  # the probe, which ran, sees none of them
    assert report.failures, report.describe()


def test_without_a_fault_all_of_it_is_compared_and_named() -> None:
    report = verify(tiny_llama(), larger())
    assert report.passed, report.describe()
    half, small = report.at_budgets
    assert (report.num_micro_batches, report.num_trees) == (1, 2)
    assert report.num_tree_tokens > 64
    assert half.max_tokens == (np.diff([*np.flatnonzero(_forest().parent < 0), _forest().num_tokens]).max()) // 2
    assert small.is_cut
    assert small.has_gap
    assert small.num_levels >= 4
    assert small.num_tree_tokens < report.num_tree_tokens
    text = report.describe()
    assert f"at {small.max_tokens}" in text
    assert "(cut)" in text


def _forest() -> Forest:
    return Forest.from_trajectories(larger())


@pytest.mark.representatives("0")
@pytest.mark.parametrize("index", [0, 1])
def test_a_wrong_gradient_of_a_loss_on_routers_is_found(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral", vocab_size=97, router_aux_loss_coef=0.7, output_router_logits=True)
    settings = {"router_z_coefficient": 0.1}
    report = verify(model, branching(), **settings)
    assert report.passed, report.describe()
    assert report.loss_flat - verify(model, branching(), router_aux_loss=False).loss_flat > 0.5
    terms = RouterLoss._terms

    def wrong(self: RouterLoss, sums: torch.Tensor) -> torch.Tensor:
        found = terms(self, sums)
        slope = torch.tensor([0.02 if each == index else 0.0 for each in range(2)])
        return found + slope * (found - found.detach())

    monkeypatch.setattr(RouterLoss, "_terms", wrong)
    failures = verify(model, branching(), **settings).failures
    assert any(line.startswith("gradient") for line in failures)
    assert not any(line.startswith(("loss", "values")) for line in failures)


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"offload": True}, {"autocast": torch.bfloat16}], ids=str)
def test_settings_of_the_run_hold_on_both_sides(settings) -> None:
    report = verify(tiny_llama(), larger(), **settings)
    assert report.passed, report.describe()
    assert (report.dtype == "bfloat16") == ("autocast" in settings)
    plain = verify(tiny_llama(), larger(), [None])
    assert (report.loss_flat == plain.loss_flat) == ("temperature" not in settings)


def test_whoever_listens_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    listener = SimpleNamespace(
        begins=lambda what, total: told.append((what,)),
        ends=lambda work: None,
        reaches=lambda *args: told.append(args),
    )
    monkeypatch.setattr(progress, "listeners", [listener])
    report = verify(tiny_llama(), larger())
    for done in (0, report.num_flat_tokens):
        assert ("flat training", done, report.num_flat_tokens, "token") in told
    begun = [each[0] for each in told if len(each) == 1 and "a few tokens" not in str(each[0])]
    half, small = report.at_budgets
    assert begun == [
        "flat training",
        "comparing trees, whole",
        f"comparing trees under max_tokens {half.max_tokens}",
        "flat training",
        f"comparing {small.num_trajectories} rows cut short under max_tokens {small.max_tokens}",
    ]


def test_trees_that_stay_apart_count_apart() -> None:
    items = branching()
    apart = Forest.concatenate([Forest.from_trajectories(items[:3]), Forest.from_trajectories(items[3:])])
    losses = []
    for rows in (items, apart):
        report = verify(tiny_llama(torch.float64), rows, objective=SFT(weighting="once"))
        assert report.passed, report.describe()
        losses.append(report.loss_flat)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def pairwise(logprobs: list[torch.Tensor]) -> torch.Tensor:
    sums = torch.stack([each.sum() for each in logprobs])
    return -torch.nn.functional.logsigmoid(0.1 * (sums[0] - sums[1:])).sum()


EVERYTHING = {"beta": 0.1, "entropy_coefficient": 0.2}
OBJECTIVES = [
    objectives.GRPO(**EVERYTHING, weighting="once"),
    objectives.GRPO(sampler_correction="mask", sampler_level="sequence", sampler_min=0.1),
    objectives.GSPO(**EVERYTHING, clip_low=0.5, clip_high=0.5),
    objectives.CISPO(weighting="per_rollout"),
    objectives.Distillation(weighting="once", normalization="rollout_mean"),
    objectives.Distillation(tail="ignore"),
    pairwise,
]


@pytest.mark.representatives("GSPO", "function")
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: type(each).__name__)
def test_other_objectives_pass(objective) -> None:
    for max_tokens in (None, 10):
        report = verify(tiny_llama(), with_streams(branching()), max_tokens, objective=objective)
        assert report.passed, report.describe()
        assert report.gradient_norm > 1e-3


@pytest.mark.parametrize("objective", [objectives.GRPO(), objectives.GSPO(clip_low=9, clip_high=9)])
def test_advantages_of_another_branch_fail(objective, monkeypatch: pytest.MonkeyPatch) -> None:
    def terms(forest: Forest) -> Terms:
        found = type(objective).terms(objective, forest)
        if forest.num_tokens == forest.num_flat_tokens:  # the flat side
            return found
        return replace(found, streams={**found.streams, "advantages": found.streams["advantages"][::-1].copy()})

    wrong = SimpleNamespace(**{name: getattr(objective, name) for name in dir(objective) if not name.startswith("__")})
    wrong.terms = terms
    assert not verify(tiny_llama(), with_streams(branching()), objective=wrong).passed


def test_a_loss_that_cancels_is_held_to_its_terms() -> None:
    items = [Trajectory([1, 2, 3, 4], advantages=1.0), Trajectory([1, 2, 5, 6], advantages=-1.0)]
    report = verify(tiny_llama(), items, objective=objectives.REINFORCE())
    assert report.passed, report.describe()
    report = verify(tiny_llama(), items, objective=objectives.GRPO())  # its ratios are 1: the loss is 0
    assert abs(report.loss_flat) < 1e-7
    assert report.passed, report.describe()


def test_a_token_beyond_the_vocabulary_is_named() -> None:
    with pytest.raises(DataError, match=r"token id 97 .* is beyond the model's 97 embeddings"):
        verify(tiny_llama(), [Trajectory([1, 2, 97])])


def test_an_objective_without_a_flat_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="give an objective"):
        verify(tiny_llama(), branching(), objective=7)
    overlapping = [replace(item, rollout=1) for item in with_streams(branching())]
    with pytest.raises(ConfigError, match="two rows of one rollout"):
        verify(tiny_llama(), overlapping, objective=objectives.GSPO())


@IMAGES
@pytest.mark.parametrize("part", [TOWER, PROJECTOR], ids=["tower", "projector"])
def test_a_part_that_text_does_not_reach_passes(part: str) -> None:
    """LLaVA's first stage: the shortest row has no image, so nothing that is trained is below its log-probs."""
    model, images, items, budget = seeing_case("llava")
    train_only(model, part)
    for objective in (None, lambda logprobs: torch.stack([each.logsumexp(0) for each in logprobs]).sum()):
        report = verify(model, items, budget, objective=objective, processor=images)
        assert report.passed, report.describe()
        assert report.gradient_norm > 1


@IMAGES
def test_rows_that_reach_nothing_that_is_trained_are_named() -> None:
    model, images, items, _ = seeing_case("llava", HISTORIES[-1:])
    with pytest.raises(ConfigError, match=r"^1 row: none reaches a parameter of LlavaForCond.* that is trained"):
        verify(train_only(model, TOWER), items, processor=images)
