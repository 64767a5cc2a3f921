"""Names mean what TRL's users expect: the same loss as TRL's own `GRPOTrainer`, given the same log-probs.

TRL's method is called with a stand-in for the trainer that holds its settings, so that TRL's formulas run, and nothing
else of it.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import treewise as tw
from tests.flat_objectives import run_padded
from treewise import Forest, Trajectory, TreeEngine
from treewise.objectives import PolicyGradient
from treewise.testing.families import tiny_model
from treewise.testing.oracle import gradient_error, gradients_of

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

PROMPT, COMPLETION, ROWS = 4, 7, 6
MODEL = tiny_model("llama", num_hidden_layers=2, dtype=torch.float64)


def completions() -> tuple[list[Trajectory], dict[str, torch.Tensor]]:
    """Completions of one prompt as trajectories, and as TRL's inputs."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 64, PROMPT)
    lengths = rng.integers(2, COMPLETION + 1, ROWS)
    ids, mask = np.zeros((ROWS, COMPLETION), dtype=np.int64), np.zeros((ROWS, COMPLETION), dtype=np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length], mask[row, :length] = rng.integers(3, 64, length), 1
    bare = [Trajectory(np.concatenate([prompt, ids[row, :length]])) for row, length in enumerate(lengths)]
    with torch.no_grad():
        near = np.zeros((ROWS, PROMPT + COMPLETION))
        padded = run_padded(MODEL, bare).logprobs.numpy()
        near[:, : padded.shape[1]] = padded
    streams = {
        name: (near + rng.normal(0, 0.3, near.shape)).astype(np.float32)
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
    }
    advantages = rng.normal(size=ROWS).astype(np.float32)
    items = [
        Trajectory(
            item.token_ids,
            np.arange(len(item)) >= PROMPT,
            advantages[row],
            **{name: stream[row, : len(item)] for name, stream in streams.items()},
        )
        for row, item in enumerate(bare)
    ]
    of_completion = {name: torch.from_numpy(stream[:, PROMPT:]) for name, stream in streams.items()}
    inputs = {
        "prompt_ids": torch.from_numpy(np.tile(prompt, (ROWS, 1))),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.from_numpy(ids),
        "completion_mask": torch.from_numpy(mask),
        "advantages": torch.from_numpy(advantages),
        "old_per_token_logps": of_completion["old_logprobs"],
        "ref_per_token_logps": of_completion["ref_logprobs"],
        "sampler": of_completion["sampler_logprobs"],
        "num_items_in_batch": torch.tensor(float(mask.sum())),
    }
    return items, inputs


def stand_in(items: list[Trajectory], **settings) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer, with TRL's defaults."""

    def logprobs_and_entropies(model, ids, *_, **__):
        found = run_padded(MODEL, items)
        width = PROMPT + COMPLETION - found.logprobs.shape[1]
        pad = torch.nn.functional.pad
        return pad(found.logprobs, (0, width))[:, PROMPT:], pad(found.entropy, (0, width))[:, PROMPT:], None

    identity = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True)
    values = {
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "importance_sampling_level": "token",
        "delta": None,
        "entropy_coef": 0.0,
        "use_vllm": False,
    } | settings
    args = SimpleNamespace(delta=values["delta"], use_bias_correction_kl=False, steps_per_generation=1)
    return SimpleNamespace(
        **values,
        args=args,
        model=MODEL,
        accelerator=identity,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=bool(values["entropy_coef"]),
        current_gradient_accumulation_steps=1,
        max_completion_length=COMPLETION,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=logprobs_and_entropies,
    )


CASES = {
    "grpo": ({}, tw.GRPO()),
    "grpo with KL": ({"beta": 0.2}, tw.GRPO(beta=0.2)),
    "delta": ({"delta": 1.5}, tw.GRPO(dual_clip=1.5)),
    "dr_grpo": ({"loss_type": "dr_grpo"}, tw.DrGRPO(max_length=COMPLETION)),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, tw.DAPO()),
    "dapo with entropy": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.1},
        tw.DAPO(entropy_coefficient=0.1),
    ),
    "bnpo is ppo": ({"loss_type": "bnpo"}, tw.PPO()),
    "gspo": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05},
        tw.GSPO(clip_low=0.05, clip_high=0.05),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, tw.CISPO(max_ratio=1.2)),
    "token_truncate": ({"use_vllm": True}, tw.GRPO(sampler_correction="truncate", sampler_max=1.2)),
    "token_mask": ({"use_vllm": True}, tw.GRPO(sampler_correction="mask", sampler_max=1.3, sampler_min=0.7)),
    "sequence_truncate": (
        {"use_vllm": True},
        tw.GRPO(sampler_correction="truncate", sampler_level="sequence", sampler_max=1.4),
    ),
    "sequence_mask": (
        {"use_vllm": True},
        tw.GRPO(sampler_correction="mask", sampler_level="sequence", sampler_max=1.5),
    ),
}


def sampler_ratio(inputs: dict[str, torch.Tensor], objective: PolicyGradient) -> torch.Tensor:
    """TRL's correction, which it computes when it generates, from the lines of `_generate_and_score_completions`."""
    difference = (inputs["old_per_token_logps"] - inputs["sampler"]) * inputs["completion_mask"]
    if objective.sampler_level == "sequence":
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if objective.sampler_correction == "truncate":
        return torch.clamp(ratio, min=objective.sampler_min, max=objective.sampler_max)
    low = float("-inf") if objective.sampler_min is None else objective.sampler_min
    return ratio.masked_fill((ratio < low) | (ratio > objective.sampler_max), 0.0)


@pytest.mark.parametrize("on_policy", [False, True], ids=["old", "on policy"])
@pytest.mark.parametrize(("settings", "objective"), CASES.values(), ids=CASES.keys())
def test_losses_are_those_of_trl(settings: dict, objective: PolicyGradient, on_policy: bool) -> None:
    items, inputs = completions()
    if settings.get("use_vllm"):
        if on_policy:
            pytest.skip("TRL always computes old log-probs beside vLLM")
        inputs["importance_sampling_ratio"] = sampler_ratio(inputs, objective)
    if on_policy:
        del inputs["old_per_token_logps"]
        items = [Trajectory(i.token_ids, i.loss_weights, i.advantages, ref_logprobs=i.ref_logprobs) for i in items]
    MODEL.zero_grad()
    loss = grpo_trainer.GRPOTrainer._compute_loss(stand_in(items, **settings), MODEL, inputs)
    loss.backward()
    expected = gradients_of(MODEL)
    MODEL.zero_grad()
    out = TreeEngine(MODEL, 8, check=False).step(Forest.from_trajectories(items), objective)
    assert out.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert gradient_error(gradients_of(MODEL), expected) < 1e-6
