"""CISPO with a correction for the sampler: large ratios weigh less, and no token loses its gradient.

The engine that samples (vLLM, SGLang, ...) rounds differently from the one that trains. Its log-probs go into
`sampler_logprobs`; `logprob_gap` says how far the two are apart, and truncated importance sampling corrects for it.
"""

from dataclasses import replace

import numpy as np
import torch
from toy import mean_reward, rollouts, small_model

import treewise as tw


def main(num_steps: int = 10, num_updates: int = 2) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    objective = tw.CISPO(max_ratio=5.0, sampler_correction="truncate", sampler_max=2.0)
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        items, report = tw.advantages.group_normalized(rollouts(model, seed=step))
        rounded = [item.sampler_logprobs + rng.normal(0, 0.02, len(item)) for item in items]  # another engine's kernels
        items = [replace(item, sampler_logprobs=values) for item, values in zip(items, rounded, strict=True)]
        items = engine.scored(items, stream="old_logprobs")
        gap = tw.logprob_gap(items)
        forest = tw.Forest.from_trajectories(items)
        for _ in range(num_updates):
            out = engine.step(forest, objective)
            optimizer.step()
            optimizer.zero_grad()
        weight = out.metrics["sampler_weight"]
        print(f"step {step}: reward {report.mean_reward:.3f}, gap {gap:.4f}, mean sampler weight {weight:.4f}")
    return mean_reward(items)


if __name__ == "__main__":
    main()
