"""GSPO: one importance ratio for a whole rollout, so the loss is not separable: a partitioned forest is walked twice.

A rollout that was cut into several rows (compaction, sub-agents) has one ratio as well: give its rows one `rollout` id
and train them in one call.
"""

import torch
from toy import mean_reward, rollouts, small_model

import treewise as tw


def main(num_steps: int = 10, num_updates: int = 2) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    objective = tw.GSPO(clip_low=0.05, clip_high=0.05)  # wider than the paper's bounds, for so small a model
    for step in range(num_steps):
        items, report = tw.advantages.group_normalized(rollouts(model, seed=step))
        forest = tw.Forest.from_trajectories(engine.scored(items))
        assert not objective.is_separable(forest)
        for _ in range(num_updates):
            out = engine.step(forest, objective)
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: reward {report.mean_reward:.3f}, clipped {out.metrics['clip_fraction']:.1%}")
    return mean_reward(items)


if __name__ == "__main__":
    main()
