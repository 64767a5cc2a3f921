"""Losses on routers: a tree's equal those of flat training with all trajectories as one batch, at any budget."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import replayed_rows
from tests.capability import SUPPORTED, sample_trajectories
from treewise import SFT, Forest, TreeEngine
from treewise.engine.flat import FlatLoss
from treewise.errors import UnsupportedModelError
from treewise.integrations.batches.router_reader import router_loss_of, router_loss_reader
from treewise.nn.router_loss import RouterLoss, RouterLossRule
from treewise.nn.support_table import CapabilityTable
from treewise.objectives import GSPO
from treewise.testing.families import causal_families, tiny_model
from treewise.testing.oracle import FlatGradients, gradient_error, gradients_of, wide_copy
from treewise.testing.strategies import forests_and_budgets

COEFFICIENT = 0.7  # large, so that a mistake shows beside the loss of the tokens
TOLERANCE = 1e-5
TABLE = CapabilityTable.load()
# DeepSeek's kin balance by a bias; these hold a coefficient in their configuration and use it for nothing.
UNUSED = {"deepseek_v2", "deepseek_v4", "hunyuan_v1_moe", "kolibri1", "llama4_text", "mimo_v2_flash"}
# Its softmax is float32 in a float64 model, where float64's least number is -inf: rows of padding that see nothing, as
# beyond a window, are NaN in the reference.
WIDER = {"granitemoe_swa": {"sliding_window": 32}}


def has_router_loss(family: str) -> bool:
    row = TABLE.find(family)
    if row is None or row.status != SUPPORTED or family in UNUSED:
        return False
    fields = CONFIG_MAPPING[family]  # imports it
    return dataclasses.is_dataclass(fields) and "router_aux_loss_coef" in {
        each.name for each in dataclasses.fields(fields)
    }


FAMILIES = [family for family in causal_families() if has_router_loss(family)]


def padded(trajectories):
    """[N, longest] token ids, mask and loss weights."""
    ids = [torch.from_numpy(item.token_ids.astype(np.int64)) for item in trajectories]
    weights = [torch.from_numpy(np.asarray(item.loss_weights, dtype=np.float32)) for item in trajectories]
    return tuple(pad_sequence(each, True) for each in (ids, list(map(torch.ones_like, ids)), weights))


def flat(model, trajectories):
    """Loss, load-balancing loss, expert counts and gradients of one padded batch through the model's own forward."""
    model.zero_grad()
    ids, mask, weights = padded(trajectories)
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    logprobs = torch.log_softmax(out.logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    loss = -(logprobs * weights[:, 1:]).sum() / weights.sum() + COEFFICIENT * out.aux_loss
    loss.backward()
    gradients = FlatGradients(gradients_of(model), lambda: flat(wide_copy(model), trajectories)[4])
    return float(loss.detach()), float(out.aux_loss.detach()), out.router_logits, mask, gradients


@pytest.mark.representatives("mixtral", "gpt_oss")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("default")
def test_tree_equals_one_flat_batch(family):
    model = tiny_model(family, router_aux_loss_coef=COEFFICIENT, output_router_logits=True, **WIDER.get(family, {}))
    trajectories = sample_trajectories()
    flat_loss, flat_aux, _, _, flat_gradients = flat(model, trajectories)
    forest = Forest.from_trajectories(trajectories)
    for max_tokens in (None, 7):
        model.zero_grad()
        out = TreeEngine(model, max_tokens).step(forest)
        assert out.loss == pytest.approx(flat_loss, rel=TOLERANCE)
        assert out.routing.aux_loss == pytest.approx(flat_aux, rel=TOLERANCE)
        assert gradient_error(gradients_of(model), flat_gradients) < flat_gradients.tolerance, max_tokens


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_any_loss_and_evaluation_hold_the_router_loss(max_tokens):
    model = tiny_model("qwen3_moe", router_aux_loss_coef=COEFFICIENT)
    trajectories = sample_trajectories()
    flat_loss, _, _, _, flat_gradients = flat(model, trajectories)
    total = sum(float(item.loss_weights.sum()) for item in trajectories)
    engine = TreeEngine(model, max_tokens, router_aux_loss=True)
    forest = Forest.from_trajectories(trajectories)
    assert engine.evaluate(forest).loss == pytest.approx(flat_loss, rel=TOLERANCE)

    def weighted(logprobs):
        pairs = zip(logprobs, trajectories, strict=True)
        return -sum((each * torch.tensor(item.loss_weights[1:])).sum() for each, item in pairs) / total

    model.zero_grad()
    out = engine.step(forest, weighted)
    assert out.loss == pytest.approx(flat_loss, rel=TOLERANCE)
    assert gradient_error(gradients_of(model), flat_gradients) < flat_gradients.tolerance


@pytest.mark.parametrize("max_tokens", [None, 7])
def test_the_loss_on_routers_alone_is_differentiable(max_tokens):
    model = tiny_model("olmoe")
    trajectories = sample_trajectories()
    engine = TreeEngine(model, max_tokens)
    plan = engine.plan(Forest.from_trajectories(trajectories))
    router_loss = RouterLoss(RouterLossRule(2, 1.0), plan.forest.multiplicity)
    loss = router_loss_of(router_loss, engine.values(plan, [router_loss_reader(router_loss, plan)])[0])
    _, flat_aux, _, _, _ = flat(model, trajectories)
    assert float(loss.detach()) == pytest.approx(flat_aux, rel=TOLERANCE)
    model.zero_grad()
    (3.0 * loss).backward()
    found = gradients_of(model)
    model.zero_grad()
    ids, mask, _ = padded(trajectories)
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    (3.0 * out.aux_loss).backward()
    assert gradient_error(found, gradients_of(model)) < TOLERANCE


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_expert_load_and_z_loss_equal_flat(max_tokens):
    model = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.0)
    trajectories = sample_trajectories()
    _, _, router_logits, mask, _ = flat(model, trajectories)
    rows = mask.reshape(-1).bool()
    kept = [logits.detach()[rows] for logits in router_logits]
    z_loss = torch.cat([torch.logsumexp(logits, -1).square() for logits in kept]).mean()
    load = np.stack([np.bincount(each.topk(2).indices.reshape(-1), minlength=4) / (2 * len(each)) for each in kept])
    out = TreeEngine(model, max_tokens, router_z_coefficient=0.1).step(Forest.from_trajectories(trajectories))
    np.testing.assert_allclose(out.routing.expert_load, load, atol=1e-12)
    assert out.routing.z_loss == pytest.approx(float(z_loss), rel=TOLERANCE)


@pytest.mark.parametrize("max_tokens", [None, 5])
@pytest.mark.parametrize("choices", ["live", "replayed"])
def test_replayed_choices_are_counted_where_that_is_asked_for(max_tokens, choices):
    model = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter, std=0.5)
    rng = np.random.default_rng(3)
    items = replayed_rows.random_routes(replayed_rows.router_sizes(model), sample_trajectories(), rng)
    filled, logits, chosen = replayed_rows.filled(items), [], []
    with replayed_rows.replayed(model) as replayer:
        for item in filled:
            with replayer.row(item):
                out = model(input_ids=torch.from_numpy(item.token_ids).long()[None], output_router_logits=True)
            live = torch.cat([each.topk(2).indices for each in out.router_logits])
            recorded = torch.from_numpy(np.concatenate(list(item.routed_experts.swapaxes(0, 1)))).long()
            logits.append(torch.cat(out.router_logits))
            chosen.append(torch.where(recorded >= 0, recorded, live) if choices == "replayed" else live)
        counts = torch.cat(chosen).flatten().bincount(minlength=4)
        rows = torch.cat(logits)
        loss = 4 * (counts * rows.softmax(-1).sum(0)).sum() / len(rows) ** 2
        model.zero_grad()
        (0.1 * loss).backward()
    expected = gradients_of(model)
    model.zero_grad()
    engine = TreeEngine(model, max_tokens, check=False, router_loss_choices=choices)
    zero = SFT(normalization="constant", constant=1e30)
    out = engine.step(Forest.from_trajectories(items), zero)
    assert out.routing.aux_loss == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    assert gradient_error(gradients_of(model), expected) < TOLERANCE
    np.testing.assert_allclose(out.routing.expert_load.sum(0) / 3, counts.double() / counts.sum(), atol=1e-12)
    found = FlatLoss(filled, zero, routers=engine.router_loss_rule).run(model, torch.device("cpu"))
    assert found.loss == pytest.approx(0.1 * float(loss.detach()), rel=TOLERANCE)


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_a_loss_of_whole_rollouts_is_evaluated_with_its_router_losses(max_tokens):
    model = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    items = [
        dataclasses.replace(each, advantages=np.ones(len(each)), old_logprobs=np.full(len(each), -4.0), rollout=number)
        for number, each in enumerate(sample_trajectories())
    ]
    engine = TreeEngine(model, max_tokens)
    assert engine.evaluate(items, GSPO()).loss == pytest.approx(engine.step(items, GSPO()).loss, rel=TOLERANCE)


@given(forests_and_budgets(), st.integers(0, 2**32 - 1))
def test_parts_count_and_weigh_like_the_whole(forest_and_budget, seed):
    forest, budget = forest_and_budget
    generator = torch.Generator().manual_seed(seed)
    logits = tuple(torch.randn(forest.num_tokens, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    rule = RouterLossRule(2, 0.3, 0.2)
    everywhere = np.arange(forest.num_tokens)
    whole = RouterLoss(rule, forest.multiplicity)
    expected = whole.part(logits, everywhere)
    cut_up = RouterLoss(rule, forest.multiplicity)
    cuts = [everywhere[start : start + budget] for start in range(0, forest.num_tokens, budget)]
    with torch.no_grad():
        for cut in cuts:
            assert not cut_up.is_counted
            cut_up.part(tuple(each[cut] for each in logits), cut)
    assert cut_up.is_counted
    torch.testing.assert_close(sum(cut_up.part(tuple(each[cut] for each in logits), cut) for cut in cuts), expected)
    torch.testing.assert_close(cut_up.total(), whole.total())
    np.testing.assert_array_equal(cut_up.report().expert_load, whole.report().expert_load)


def test_a_model_without_routers_is_refused():
    with pytest.raises(UnsupportedModelError, match="no loss on its routers"):
        TreeEngine(tiny_model("llama"), router_aux_loss=True)


@pytest.mark.parametrize("family", ["dots1", "mimo_v2_flash", "hunyuan_v1_moe"])
def test_models_whose_forward_adds_no_such_loss_are_refused(family):
    model = tiny_model(family)
    model.config.router_aux_loss_coef = 0.1
    with pytest.raises(UnsupportedModelError, match="no load-balancing loss of its own"):
        TreeEngine(model, router_aux_loss=True).step(Forest.from_trajectories(sample_trajectories()))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.representatives("mixtral-None", "mixtral-5")
@pytest.mark.parametrize(("family", "max_tokens"), [("mixtral", None), ("mixtral", 5), ("qwen3_next", 5)])
def test_reentrant_checkpoints_which_would_lose_its_gradients_are_refused(family, max_tokens):
    """transformers' own forward loses them silently; checkpoints that are not reentrant keep them."""
    model = tiny_model(family, router_aux_loss_coef=COEFFICIENT, output_router_logits=True).train()
    forest, engine = Forest.from_trajectories(sample_trajectories()), TreeEngine(model, max_tokens)
    engine.step(forest)
    gradients = gradients_of(model)
    for use_reentrant in (False, True):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with pytest.raises(UnsupportedModelError, match="use_reentrant=False") if use_reentrant else nullcontext():
            engine.step(forest)
            assert gradient_error(gradients_of(model), gradients) < TOLERANCE
    assert engine.evaluate(forest).loss > 0


def test_another_formula_is_refused():
    model = tiny_model("mixtral", output_router_logits=True)
    model.num_experts_per_tok = 1  # what it passes to its formula, while its routers choose two
    model.config.num_experts_per_tok = 2
    engine = TreeEngine(model)
    engine.router_loss_rule = RouterLossRule(2, 1.0)
    with pytest.raises(UnsupportedModelError, match="differs from Mixtral's"):
        engine.step(Forest.from_trajectories(sample_trajectories()))


def test_without_asking_there_is_no_router_loss():
    out = TreeEngine(tiny_model("mixtral")).step(Forest.from_trajectories(sample_trajectories()), SFT())
    assert out.routing is None
