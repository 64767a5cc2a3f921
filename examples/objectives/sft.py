"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.

By default a shared trained token counts once for every trajectory that trains it, exactly as flat training counts it;
`weighting="once"` counts it like any other.
"""

import torch
from toy import rollouts, small_model

import treewise as tw


def main(num_steps: int = 20) -> float:
    model, expert = small_model(), small_model(seed=1).eval()
    with torch.no_grad():
        expert.lm_head.weight *= 20
    engine = tw.TreeEngine(model, max_tokens=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(num_steps):
        forest = tw.Forest.from_trajectories(rollouts(expert, seed=step))
        out = engine.step(forest, tw.SFT(weighting="once"))
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {out.loss:.4f}, {out.num_tree_tokens} of {out.num_flat_tokens} tokens computed")
    return out.loss


if __name__ == "__main__":
    main()
