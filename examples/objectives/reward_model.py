"""A reward model: a head on the hidden state of the last token, trained on pairs (Bradley and Terry).

`loss = -log sigmoid(r(chosen) - r(rejected))`. Both rows of a pair share their prompt, which is computed once.
"""

import torch
from toy import rollouts, small_model

import treewise as tw


def main(num_steps: int = 20) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    head = torch.nn.Linear(model.config.hidden_size, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=2e-3)
    sampler = small_model(seed=1).eval()
    for step in range(num_steps):
        samples = rollouts(sampler, seed=step)
        pairs = [
            sorted(pair, key=lambda item: -item.reward)
            for pair in zip(samples[0::2], samples[1::2], strict=True)
            if pair[0].reward != pair[1].reward
        ]
        forest = tw.Forest.from_trajectories([item for pair in pairs for item in pair])
        last = torch.stack([hidden[-1] for hidden in engine.hidden_states(forest)])
        chosen, rejected = head(last).reshape(-1, 2).unbind(1)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accuracy = float((chosen > rejected).float().mean())
        print(f"step {step}: loss {loss.item():.4f}, accuracy {accuracy:.2f}, share ratio {forest.share_ratio:.2f}")
    return loss.item()


if __name__ == "__main__":
    main()
