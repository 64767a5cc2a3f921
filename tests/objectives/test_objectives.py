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
from treewise.testing.oracle import gradients_of
from treewise.testing.strategies import MAX_SEED, trajectories

EXACT = tiny_model("llama", num_hidden_layers=2, dtype=torch.float64)
HOLDS = ("never", "always")

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
def rollout_rows(draw: st.DrawFn, with_old: bool = True, **sizes) -> list[Trajectory]:
    """Rows with rollout ids (some shared), and log-probs near the model's own, so that some ratios are clipped."""
    items = draw(trajectories(vocab_size=5, **sizes))
    rng = np.random.default_rng(draw(st.integers(0, MAX_SEED)))
    with torch.no_grad():
        near = run_padded(EXACT, items).logprobs.numpy()
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
        return max(0.1, sum(float(each.square().sum()) for each in gradient.values()) ** 0.5)
    return sum(float((other[name] - each).square().sum()) for name, each in gradient.items()) ** 0.5


ALL = {
    "sft": tw.SFT("once", "rollout_mean"),
    "by row": tw.SFT(normalization="trajectory_mean"),
    **POLICY,
    **DISTILLATION,
}
TOLERANCE = 2e-7  # transformers computes norms in float32 even in float64 models, so their noise (3e-8) is the floor


@pytest.mark.representatives(
    "sft",
    "by row",
    "reinforce truncated",
    "reinforce masked",
    "ppo dual, entropy",
    "grpo k2, once",
    "gspo with all",
    "cispo",
    "turns with all",
    "renormalize",
    "cross_entropy",
)
@settings(max_examples=4)
@given(data=st.data(), seed=st.integers(0, MAX_SEED))
@pytest.mark.parametrize("objective", ALL.values(), ids=ALL.keys())
def test_loss_and_gradient_are_those_of_the_formula(data: st.DataObject, objective: Objective, seed: int) -> None:
    """In float64; what float32 and others add is drawn by the crossings."""
    items = data.draw(rollout_rows(with_old=data.draw(st.booleans()), max_sequences=6))
    items = with_teacher(items, np.random.default_rng(seed))
    loss, gradient = flat(EXACT, items, objective)
    for max_tokens, hold in ((None, "auto"), (data.draw(st.integers(1, 16)), data.draw(st.sampled_from(HOLDS)))):
        EXACT.zero_grad()
        engine = TreeEngine(EXACT, max_tokens, hold=hold, check=False)
        out = engine.step(Forest.from_trajectories(items), objective)
        error, norm = norm_of(gradient, gradients_of(EXACT)), norm_of(gradient)
        assert error <= TOLERANCE * norm, (error, norm)
        assert out.loss == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
