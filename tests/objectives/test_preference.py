"""Preference losses: equal to flat formulas and to TRL's own, loss and every gradient, whole and at budgets."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.image_models import png
from treewise import Forest, Trajectory, TreeEngine
from treewise.errors import ConfigError, DataError
from treewise.objectives import DPO, IPO, KTO, with_mismatched
from treewise.testing import tiny_model
from treewise.testing.oracle import flat_logprobs, flat_loss, gradient_error, gradients_of
from treewise.tree.images import ImageSpan

MODEL = tiny_model("llama", num_hidden_layers=2)
BUDGETS = (None, 25, 9)
PROMPT = 6


def pairs(num_pairs=3, seed=0):
    """Pairs of completions of two prompts that begin alike, with log-probs of a reference."""
    rng = np.random.default_rng(seed)
    system = rng.integers(3, 64, 3)
    prompts = [np.concatenate([system, rng.integers(3, 64, PROMPT - 3)]) for _ in range(2)]
    items = []
    for pair in range(num_pairs):
        for reward in (1.0, 0.0):
            length = int(rng.integers(2, 9))
            ids = np.concatenate([prompts[pair % 2], rng.integers(3, 64, length)])
            reference = -4 + rng.normal(0, 1, len(ids))
            weights = np.arange(len(ids)) >= PROMPT
            items.append(
                Trajectory(ids, weights, ref_logprobs=reference, group=pair, reward=reward, rollout=f"{pair} {reward}")
            )
    return items


def stepped(step):
    """The loss of a step, and the gradients that it leaves."""
    MODEL.zero_grad()
    return step(), gradients_of(MODEL)


def scores(items, logprobs, mean=False):
    parts = []
    for item, values in zip(items, logprobs, strict=True):
        mask = torch.tensor(item.loss_weights[1:] > 0)
        part = (values - torch.tensor(item.ref_logprobs[1:]))[mask]
        parts.append(part.mean() if mean else part.sum())
    return torch.stack(parts)


def formula(items, objective):
    """The loss, written for a list of flat log-probs."""

    def loss(logprobs):
        if isinstance(objective, KTO):
            score = scores(items, logprobs)
            is_labelled = torch.tensor([item.reward is not None for item in items])
            zero = torch.zeros(())
            baseline = zero if objective.baseline == "zero" else score[~is_labelled].mean().detach().clamp(min=0)
            good = torch.tensor([item.reward == 1 for item in items])
            desirable = objective.desirable_weight * (1 - torch.sigmoid(objective.beta * (score - baseline)))
            undesirable = objective.undesirable_weight * (1 - torch.sigmoid(objective.beta * (baseline - score)))
            return torch.where(good, desirable, undesirable)[is_labelled].mean()
        score = scores(items, logprobs, mean=objective.loss == "ipo")
        difference = score[0::2] - score[1::2]
        if objective.loss == "ipo":
            return ((difference - 1 / (2 * objective.beta)) ** 2).mean()
        if objective.loss == "hinge":
            return torch.relu(1 - objective.beta * difference).mean()
        smooth = objective.label_smoothing
        chosen, turned = logsigmoid(objective.beta * difference), logsigmoid(-objective.beta * difference)
        return -((1 - smooth) * chosen + smooth * turned).mean()

    return loss


OBJECTIVES = {
    "dpo": DPO(beta=0.3),
    "conservative": DPO(beta=0.3, label_smoothing=0.1),
    "hinge": DPO(loss="hinge", beta=0.2),
    "ipo": IPO(beta=0.5),
    "kto": KTO(beta=0.3, undesirable_weight=1.5),
    "kto zero": KTO(beta=0.3, baseline="zero"),
}


def items_for(objective):
    items = pairs()
    if not (isinstance(objective, KTO) and objective.baseline == "mismatched"):
        return items
    (tree,) = with_mismatched([items])
    rng = np.random.default_rng(7)
    return [replace(item, ref_logprobs=-5 + rng.normal(0, 1, len(item))) for item in tree]


@pytest.mark.representatives("dpo-9", "conservative-25", "hinge-None", "ipo-9", "kto-25", "kto zero-9")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_equals_the_formula_on_flat_logprobs(name, budget):
    objective = OBJECTIVES[name]
    items = items_for(objective)
    forest = Forest.from_trajectories(items)
    assert forest.share_ratio > 1.2
    engine = TreeEngine(MODEL, budget)
    ours, gradients = stepped(lambda: engine.step(forest, objective).loss)
    theirs, flat = flat_loss(MODEL, items, formula(items, objective))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert gradient_error(gradients, flat) < flat.tolerance
    assert engine.evaluate(forest, objective).loss == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize("is_below_zero", [False, True])
def test_what_kto_reports(is_below_zero):
    """Over labelled rollouts, in which mismatched ones are not counted."""
    objective = OBJECTIVES["kto"]
    items = [replace(item, ref_logprobs=item.ref_logprobs + 9.0 * is_below_zero) for item in items_for(objective)]
    metrics = TreeEngine(MODEL).step(Forest.from_trajectories(items), objective).metrics
    score = scores(items, [flat_logprobs(MODEL, item).detach() for item in items])
    label = torch.tensor([0 if item.reward is None else 2 * item.reward - 1 for item in items])
    reward, baseline = (objective.beta * label * score)[label != 0].mean(), score[label == 0].mean().clamp(min=0)
    assert metrics["signed_reward"] == pytest.approx(float(reward), rel=1e-4)
    assert metrics["baseline"] == pytest.approx(float(baseline), rel=1e-4)
    assert (baseline == 0) == is_below_zero


def test_a_mismatched_row_is_a_prompt_with_the_completion_before_it():
    items = [Trajectory([3, 4, *ids], [0, 0, *np.ones(len(ids))], reward=1.0) for ids in ([5, 6], [7], [8, 9, 10])]
    ((*labelled, first, second, third),) = with_mismatched([items])
    assert labelled == items
    assert [each.token_ids.tolist() for each in (first, second, third)] == [[3, 4, 8, 9, 10], [3, 4, 5, 6], [3, 4, 7]]
    assert first.loss_weights.tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(DataError, match="at least two different completions"):
        with_mismatched([items[:1] * 2])
    seeing = replace(
        items[1], token_ids=[3, 4, 5, 7, 60, 8], loss_weights=[0, 0, 0, 1, 0, 1], images=(ImageSpan(png(1), 4, 5),)
    )
    ((_, _, moved, _),) = with_mismatched([[items[0], seeing]])
    assert [(each.start, each.end) for each in moved.images] == [(3, 4)]
    assert moved.token_ids.tolist() == [3, 4, 7, 60, 8]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_the_loss_is_trls(loss):
    """TRL's formulas run on our log-probs, through `_compute_loss` with a stand-in for trainer and model."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer")
    items = pairs()
    objective = DPO(loss=loss, beta=0.3)
    order = [*items[0::2], *items[1::2]]  # TRL's batch: chosen, then rejected
    forest = Forest.from_trajectories(order)
    engine = TreeEngine(MODEL)

    def theirs(logprobs):
        padded = torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
        return trl_loss(trainer, order, padded, loss, objective.beta)

    ours, gradients = stepped(lambda: engine.step(forest, objective).loss)
    value, flat = flat_loss(MODEL, order, theirs)
    assert ours == pytest.approx(value, rel=1e-5)
    assert gradient_error(gradients, flat) < flat.tolerance


def trl_loss(trainer, items, logprobs, loss, beta):
    """TRL's own method, with the given per-token log-probs ([N, L - 1]) in place of a model's."""
    width = max(len(item) for item in items)
    ids, mask, attention, reference = (np.zeros((len(items), width)) for _ in range(4))
    for row, item in enumerate(items):
        n = len(item)
        ids[row, :n], mask[row, :n], attention[row, :n] = item.token_ids, item.loss_weights, 1
        reference[row, :n] = item.ref_logprobs * item.loss_weights
    completion = torch.tensor(mask[:, 1:], dtype=torch.float32)

    class Model(torch.nn.Module):
        def forward(self, **_):
            zeros = torch.zeros_like(logprobs)
            return SimpleNamespace(log_probs=logprobs * completion, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)

    model = Model()
    half = len(items) // 2
    totals = torch.tensor(reference.sum(1), dtype=torch.float32)
    accelerator = SimpleNamespace(
        device="cpu",
        gather_for_metrics=lambda value: value,
        gather=lambda value: value,
        unwrap_model=lambda value: value,
    )
    settings = {
        "model": model, "ref_model": model, "accelerator": accelerator, "beta": beta, "loss_types": [loss],
        "loss_weights": [1.0], "label_smoothing": 0.0, "ld_alpha": None, "use_weighting": False,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "precompute_ref_logps": True,
        "aux_loss_enabled": False, "_tp_size": 1, "_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0,
        "reference_free": False, "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
    }  # fmt: skip
    inputs = {
        "input_ids": torch.tensor(ids, dtype=torch.long),
        "attention_mask": torch.tensor(attention, dtype=torch.long),
        "completion_mask": torch.tensor(mask, dtype=torch.long),
        "ref_chosen_logps": totals[:half],
        "ref_rejected_logps": totals[half:],
    }
    return trainer.DPOTrainer._compute_loss(SimpleNamespace(**settings), model, inputs, return_outputs=False)


def test_rows_of_one_rollout_are_one_score():
    """A completion cut into two rows, of which the second holds the first's answer as context, or trains it again."""
    long, rejected = pairs(1)
    middle = PROMPT + 1
    first = replace_tokens(long, slice(0, middle))
    again = replace(long, rollout=first.rollout)  # trains the shared token, too
    whole = TreeEngine(MODEL).step(Forest.from_trajectories([long, rejected]), DPO()).loss
    for rows in ([first, again], [first, context(long, middle)]):
        assert TreeEngine(MODEL).step(Forest.from_trajectories([*rows, rejected]), DPO()).loss == pytest.approx(whole)


def replace_tokens(item, part):
    return Trajectory(
        item.token_ids[part],
        item.loss_weights[part],
        ref_logprobs=item.ref_logprobs[part],
        group=item.group,
        reward=item.reward,
        rollout=item.rollout,
    )


def context(item, end):
    return replace(item, loss_weights=item.loss_weights * (np.arange(len(item)) >= end))


def test_several_calls_add_up():
    forests = [Forest.from_trajectories(pairs()[i : i + 2]) for i in (0, 2, 4)]
    objective = DPO(beta=0.3)
    total = sum(objective.denominator(forest) for forest in forests)
    engine = TreeEngine(MODEL)
    whole, one = stepped(lambda: engine.step(Forest.concatenate(forests), objective).loss)
    parts, several = stepped(lambda: sum(engine.step(forest, objective, denominator=total).loss for forest in forests))
    assert parts == pytest.approx(whole, rel=1e-5)
    assert gradient_error(several, one) < 1e-5


def test_metrics_are_means_over_pairs():
    metrics = TreeEngine(MODEL).step(Forest.from_trajectories(pairs()), DPO()).metrics
    assert metrics["reward_margin"] == pytest.approx(metrics["rewards_chosen"] - metrics["rewards_rejected"], rel=1e-4)
    assert metrics["reward_accuracy"] in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)


def without(field):
    return [replace(item, **{field: None}) for item in pairs()]


BAD = {
    "no reward": (lambda: without("reward"), DPO(), "no reward"),
    "no reference": (lambda: without("ref_logprobs"), DPO(), "no ref_logprobs"),
    "no group": (lambda: without("group"), DPO(), "no group"),
    "no pair": (lambda: pairs()[::2], DPO(), "none is preferred"),
    "no mismatched": (pairs, KTO(), "with_mismatched"),
    "no label": (lambda: without("reward"), KTO(), "no rollout has a reward"),
}


@pytest.mark.parametrize("name", BAD)
def test_data_that_holds_no_preference_is_an_error(name):
    items, objective, words = BAD[name]
    with pytest.raises(DataError, match=words):
        TreeEngine(MODEL).step(Forest.from_trajectories(items()), objective)


@pytest.mark.parametrize(
    ("make", "settings"),
    [(DPO, {"loss": "ipoo"}), (DPO, {"beta": 0}), (DPO, {"label_smoothing": 0.5}), (KTO, {"baseline": "mean"}),
     (DPO, {"loss": "ipo", "label_smoothing": 0.1}), (KTO, {"desirable_weight": -1})],
)  # fmt: skip
def test_bad_settings_are_errors(make, settings):
    with pytest.raises(ConfigError):
        make(**settings)
