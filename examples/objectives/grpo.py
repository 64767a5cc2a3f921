"""GRPO: several clipped updates on one batch of rollouts, with a KL penalty to a reference model.

`engine.scored` fills streams by one pass through the trees: the policy's log-probs before the updates, and those of a
frozen reference. With a PEFT model, score the reference within `with model.disable_adapter():` instead of a second one.
"""

import torch
from toy import mean_reward, rollouts, small_model

import treewise as tw


def main(num_steps: int = 10, num_updates: int = 2) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    reference = tw.TreeEngine(small_model().eval(), max_tokens=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    objective = tw.GRPO(clip_low=0.2, beta=0.01, measure_entropy=True)
    for step in range(num_steps):
        items, report = tw.advantages.group_normalized(rollouts(model, seed=step))
        items = engine.scored(items, stream="old_logprobs")
        items = reference.scored(items, stream="ref_logprobs")
        forest = tw.Forest.from_trajectories(items)
        for _ in range(num_updates):
            out = engine.step(forest, objective)
            optimizer.step()
            optimizer.zero_grad()
        values = ", ".join(f"{name} {value:.4f}" for name, value in out.metrics.items())
        print(f"step {step}: reward {report.mean_reward:.3f}, share ratio {forest.share_ratio:.2f}, {values}")
    return mean_reward(items)


if __name__ == "__main__":
    main()
