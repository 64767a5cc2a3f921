"""REINFORCE with a leave-one-out baseline (RLOO): `-A log p`, summed over each rollout.

One update per batch of rollouts, so the data are the policy's own and no ratio is needed.
"""

import torch
from toy import mean_reward, rollouts, small_model

import treewise as tw


def main(num_steps: int = 20) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(num_steps):
        items, _ = tw.advantages.leave_one_out(rollouts(model, seed=step))
        out = engine.step(tw.Forest.from_trajectories(items), tw.REINFORCE())
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: reward {mean_reward(items):.3f}, loss {out.loss:+.4f}")
    return mean_reward(items)


if __name__ == "__main__":
    main()
