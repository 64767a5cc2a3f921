"""Credit on the tree: rollouts that branch are compared where they part, not only as wholes.

Each prompt is continued in two stages: a few beginnings, then several ends of each. A token is credited with the value
of its branch minus the value of the fork that it comes from.
"""

from dataclasses import replace

import numpy as np
import torch
from toy import PROMPT_LENGTH, mean_reward, reward_of, rollouts, small_model

import treewise as tw


@torch.no_grad()
def branched(model: torch.nn.Module, seed: int, num_ends: int = 3, beginning: int = 4) -> list[tw.Trajectory]:
    """Rollouts that share their prompt, and in small groups also their first tokens."""
    items = []
    for start in rollouts(model, seed, num_prompts=1, num_samples=3):
        prefix = torch.from_numpy(start.token_ids[: PROMPT_LENGTH + beginning]).long()[None]
        options = {"do_sample": True, "num_return_sequences": num_ends, "max_new_tokens": 6}
        ends = model.generate(prefix, attention_mask=torch.ones_like(prefix), **options).numpy()
        for ids in ends:
            weights = (np.arange(len(ids)) >= PROMPT_LENGTH).astype(float)
            reward = reward_of(ids[PROMPT_LENGTH:])
            items.append(tw.Trajectory(ids, weights, reward=reward, group=start.group, rollout=len(items)))
    return items


def main(num_steps: int = 20) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(num_steps):
        local, report = tw.advantages.sibling_relative(branched(model, step))
        whole, _ = tw.advantages.mean_centered(local)
        # TreeRL (arXiv 2506.11902) adds both: where the branch went, and where the rollout ended.
        items = [replace(a, advantages=a.advantages + b.advantages) for a, b in zip(local, whole, strict=True)]
        out = engine.step(tw.Forest.from_trajectories(items), tw.DAPO(weighting="once"))
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: reward {report.mean_reward:.3f}, loss {out.loss:+.4f}, {report.notes[0]}")
    return mean_reward(items)


if __name__ == "__main__":
    main()
