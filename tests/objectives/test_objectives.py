"""Every objective against plain flat formulas on padded rows: loss and whole gradient, at every budget."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treewise as tw
from tests.flat_objectives import loss_of_rows, run_padded
from treewise import Forest, Trajectory, TreeEngine
from treewise.objectives import Distillation, Objective, PolicyGradient
from treewise.testing.families import tiny_model
from treewise.testing.oracle import LEAST_ROUNDING, TIMES_FLAT, gradients_of, wide_copy
from treewise.testing.strategies import MAX_SEED, trajectories

MODEL = tiny_model("llama", num_hidden_layers=2)
EXACT = tiny_model("llama", num_hidden_layers=2, dtype=torch.float64)
WIDE = wide_copy(MODEL)

# Every option at least once, in company that could hide it least.
POLICY = {
    "reinforce": tw.REINFORCE(),
    "reinforce truncated": tw.REINFORCE(sampler_correction="truncate", sampler_max=1.1, sampler_min=0.9),
    "reinforce masked": tw.REINFORCE(sampler_correction="mask", sampler_max=1.3, sampler_min=0.8),
    "ppo": tw.PPO(),
    "ppo dual, entropy": tw.PPO(clip_high=0.3, dual_clip=1.5, entropy_coefficient=0.1),
    "ppo sequence weights": tw.PPO(sampler_correction="truncate", sampler_level="sequence"),
    "ppo unbounded": PolicyGradient(clip_low=None, clip_high=None, beta=0.3, kl="k1"),
    "grpo": tw.GRPO(beta=0.2),
    "grpo k2, once": tw.GRPO(beta=0.2, kl="k2", weighting="once"),
    "grpo per rollout": tw.GRPO(weighting="per_rollout", entropy_coefficient=0.05),
    "dr_grpo": tw.DrGRPO(max_length=17),
    "dapo": tw.DAPO(sampler_correction="mask", sampler_level="sequence", sampler_max=1.4, sampler_min=0.7),
    "gspo": tw.GSPO(clip_low=0.05, clip_high=0.1),
    "gspo with all": tw.GSPO(
        clip_low=0.2, clip_high=0.2, beta=0.1, entropy_coefficient=0.1, sampler_correction="truncate", weighting="once"
    ),
    "cispo": tw.CISPO(max_ratio=1.1),
    "turns": tw.GRPO(ratio_level="turn", clip_low=0.05, clip_high=0.1),
    "turns, cispo": tw.CISPO(
        ratio_level="turn", max_ratio=1.05, weighting="per_rollout", sampler_correction="truncate"
    ),
    "turns with all": tw.DAPO(ratio_level="turn", dual_clip=1.5, beta=0.1, entropy_coefficient=0.1, weighting="once"),
}
DISTILLATION = {
    "ignore": Distillation(tail="ignore"),
    "bucket": Distillation(tail="bucket", normalization="rollout_mean"),
    "renormalize": Distillation(tail="renormalize", weighting="once"),
    "cross_entropy": Distillation(tail="bucket", divergence="cross_entropy", normalization="rollout_sum"),
}


@st.composite
def rollout_rows(draw: st.DrawFn, model=MODEL, with_old: bool = True, **sizes) -> list[Trajectory]:
    """Rows with rollout ids (some shared), and log-probs near the model's own, so that some ratios are clipped."""
    items = draw(trajectories(vocab_size=5, **sizes))
    rng = np.random.default_rng(draw(st.integers(0, MAX_SEED)))
    with torch.no_grad():
        near = run_padded(model, items).logprobs.numpy()
    result = []
    for row, item in enumerate(items):
        drawn = {
            name: near[row, : len(item)] + rng.normal(0, 0.25, len(item))
            for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
        }
        rollout = [None, 1, 2][rng.integers(3)]
        result.append(replace(item, **drawn | ({} if with_old else {"old_logprobs": None}), rollout=rollout))
    return result


def with_teacher(items: list[Trajectory], rng: np.random.Generator) -> list[Trajectory]:
    """A teacher with one to three candidates, another one for every trajectory, even at tokens that they share."""
    result = []
    for item in items:
        width = int(rng.integers(1, 4))
        ids = np.stack([rng.choice(64, width, replace=False) for _ in item.token_ids])
        logprobs = np.log(rng.dirichlet(np.ones(width + 1), len(item))[:, :width])
        if width > 1:
            logprobs[rng.random(len(item)) < 0.2, -1] = -np.inf
        result.append(replace(item, teacher_ids=ids, teacher_logprobs=logprobs))
    return result


def flat(model, items: list[Trajectory], objective: Objective) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = loss_of_rows(run_padded(model, items), items, objective)
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def norm_of(gradient: dict[str, torch.Tensor], other: dict[str, torch.Tensor] | None = None) -> float:
    """Of a gradient, or of its difference from another one.

    Where terms cancel (a teacher's only candidate, renormalised), rounding is that of the terms, whose gradients are
    of order 1: so small gradients are held to what 0.1 would be.
    """
    if other is None:
        return max(0.1, sum(float(each.double().square().sum()) for each in gradient.values()) ** 0.5)
    return sum(float((other[name].double() - each.double()).square().sum()) for name, each in gradient.items()) ** 0.5


def rounding(items: list[Trajectory], objective: Objective, found: tuple[float, dict[str, torch.Tensor]]) -> float:
    """The tolerance that flat float32's own distance from float64 gives.

    A weight of a whole sequence is exp of a sum of log-probs between -4 and -8, each rounded by up to 2^-22, which all
    of a gradient may be off by.
    """
    loss, gradient = flat(WIDE, items, objective)
    off = norm_of(gradient, found[1]) / norm_of(gradient), abs(found[0] - loss) / max(1.0, abs(loss))
    levels = {getattr(objective, name, None) for name in ("ratio_level", "sampler_level")}
    of_sequence = max(map(len, items)) * 2.0**-22 if "sequence" in levels else 0.0
    return max(of_sequence, TIMES_FLAT * max(LEAST_ROUNDING, *off))


def check(model, items, objective, max_tokens, tolerance: float, hold: str = "auto", expected=None) -> None:
    loss, gradient = expected or flat(model, items, objective)
    model.zero_grad()
    engine = TreeEngine(model, max_tokens, hold=hold, check=False)
    out = engine.step(Forest.from_trajectories(items), objective)
    error, norm = norm_of(gradient, gradients_of(model)), norm_of(gradient)
    assert error <= tolerance * norm, (error, norm)
    assert out.loss == pytest.approx(loss, rel=tolerance, abs=tolerance)


@pytest.mark.representatives("reinforce masked", "gspo with all")
@settings(max_examples=7)
@given(data=st.data())
@pytest.mark.parametrize("objective", POLICY.values(), ids=POLICY.keys())
def test_policy_gradients(data: st.DataObject, objective: PolicyGradient) -> None:
    items = data.draw(rollout_rows(with_old=data.draw(st.booleans()), max_sequences=6))
    expected = flat(MODEL, items, objective)
    tolerance = rounding(items, objective, expected)
    check(MODEL, items, objective, None, tolerance, expected=expected)
    hold = data.draw(st.sampled_from(["never", "always"]))
    check(MODEL, items, objective, data.draw(st.integers(1, 16)), tolerance, hold, expected)


@pytest.mark.representatives("bucket", "renormalize")
@settings(max_examples=6)
@given(data=st.data(), items=trajectories(vocab_size=5, max_sequences=5), seed=st.integers(0, MAX_SEED))
@pytest.mark.parametrize("objective", DISTILLATION.values(), ids=DISTILLATION.keys())
def test_distillation(data: st.DataObject, objective: Distillation, items: list[Trajectory], seed: int) -> None:
    items = with_teacher(items, np.random.default_rng(seed))
    expected = flat(MODEL, items, objective)
    tolerance = rounding(items, objective, expected)
    check(MODEL, items, objective, None, tolerance, expected=expected)
    hold = data.draw(st.sampled_from(["never", "always"]))
    check(MODEL, items, objective, data.draw(st.integers(1, 16)), tolerance, hold, expected)


FLOAT64 = {
    "sft": tw.SFT("once", "rollout_mean"),
    "by row": tw.SFT(normalization="trajectory_mean"),
    **POLICY,
    **DISTILLATION,
}


@pytest.mark.representatives(
    "sft",
    "by row",
    "reinforce truncated",
    "ppo dual, entropy",
    "grpo k2, once",
    "gspo with all",
    "cispo",
    "turns with all",
    "renormalize",
    "cross_entropy",
)
@settings(max_examples=2)
@given(items=rollout_rows(EXACT, max_sequences=5), seed=st.integers(0, MAX_SEED))
@pytest.mark.parametrize("objective", FLOAT64.values(), ids=FLOAT64.keys())
def test_float64(objective: Objective, items: list[Trajectory], seed: int) -> None:
    """transformers computes norms in float32 even in float64 models, so their noise (3e-8) is the floor."""
    items = with_teacher(items, np.random.default_rng(seed))
    expected = flat(EXACT, items, objective)
    for max_tokens in (None, 7):
        check(EXACT, items, objective, max_tokens, 2e-7, expected=expected)
