"""Dr. GRPO: advantages without the division by the deviation, and one constant length for every rollout."""

import torch
from toy import mean_reward, rollouts, small_model

import treewise as tw

MAX_NEW_TOKENS = 10  # the most that the sampler may write


def main(num_steps: int = 20) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    objective = tw.DrGRPO(max_length=MAX_NEW_TOKENS)
    for step in range(num_steps):
        items, report = tw.advantages.mean_centered(rollouts(model, seed=step))
        out = engine.step(tw.Forest.from_trajectories(items), objective)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: reward {report.mean_reward:.3f}, loss {out.loss:+.4f}")
    return mean_reward(items)


if __name__ == "__main__":
    main()
