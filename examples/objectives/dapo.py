"""DAPO: a higher upper bound, one mean over all tokens of the step, and groups that teach nothing left out.

The token mean is that of the whole step also where the step is spread over several calls (or ranks): add up
`objective.denominator` first, and give the sum to each call.
"""

import torch
from toy import mean_reward, rollouts, small_model

import treewise as tw


def main(num_steps: int = 10) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    objective = tw.DAPO(clip_low=0.2, clip_high=0.28)
    for step in range(num_steps):
        items, report = tw.advantages.group_normalized(rollouts(model, seed=step))
        silent = {*report.zero_variance_groups, *report.groups_of_one}
        items = engine.scored([item for item in items if item.group not in silent])
        halves = [items[0::2], items[1::2]]  # two mini-batches: the second one is off policy
        for half in halves:
            groups = sorted({item.group for item in half})
            forests = [tw.Forest.from_trajectories([item for item in half if item.group == group]) for group in groups]
            total = sum(objective.denominator(forest) for forest in forests)
            outs = [engine.step(forest, objective, denominator=total) for forest in forests]
            optimizer.step()
            optimizer.zero_grad()
        clipped = sum(out.metrics["clip_fraction"] * out.weight for out in outs) / sum(out.weight for out in outs)
        print(f"step {step}: reward {report.mean_reward:.3f}, clipped {clipped:.1%}, left out {len(silent)} groups")
    return mean_reward(items)


if __name__ == "__main__":
    main()
