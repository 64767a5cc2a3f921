"""PPO with a critic: a value head on the hidden states, generalised advantage estimation, and a value loss.

`engine.hidden_states` gives each trajectory's hidden states, computed once per shared token, differentiable at any
budget. The state before token `j + 1` is row `j`: it has seen tokens 0 to `j`.
"""

from dataclasses import replace

import numpy as np
import torch
from toy import mean_reward, rollouts, small_model

import treewise as tw

DISCOUNT, LAMBDA, VALUE_COEFFICIENT = 1.0, 0.95, 0.5


def values_of(engine: tw.TreeEngine, head: torch.nn.Linear, forest: tw.Forest) -> list[torch.Tensor]:
    """Per trajectory, [length - 1]: the value of the state before each token but the first."""
    return [head(hidden[:-1])[:, 0] for hidden in engine.hidden_states(forest)]


def estimate(item: tw.Trajectory, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Advantages ([length]) and returns ([length - 1]) of the trained tokens, by GAE (arXiv 1506.02438, eq. 16)."""
    trained = np.flatnonzero(item.loss_weights)
    advantages, following, running = np.zeros(len(item)), 0.0, 0.0
    for number, token in enumerate(reversed(trained)):  # the reward comes with the last token
        reward = item.reward if number == 0 else 0.0
        delta = reward + DISCOUNT * following - values[token - 1]
        running = delta + DISCOUNT * LAMBDA * running
        advantages[token], following = running, values[token - 1]
    return advantages, advantages[1:] + values


def main(num_steps: int = 10, num_updates: int = 2) -> float:
    model = small_model()
    engine = tw.TreeEngine(model, max_tokens=64)
    head = torch.nn.Linear(model.config.hidden_size, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=2e-3)
    objective = tw.PPO(clip_low=0.2, entropy_coefficient=0.001)
    for step in range(num_steps):
        items = engine.scored(rollouts(model, seed=step))
        with torch.no_grad():
            before = [each.numpy() for each in values_of(engine, head, tw.Forest.from_trajectories(items))]
        estimates = [estimate(item, values) for item, values in zip(items, before, strict=True)]
        items = [replace(item, advantages=each[0]) for item, each in zip(items, estimates, strict=True)]
        returns = torch.from_numpy(np.concatenate([each[1] for each in estimates])).float()
        is_trained = torch.from_numpy(np.concatenate([item.loss_weights[1:] > 0 for item in items]))
        forest = tw.Forest.from_trajectories(items)
        for _ in range(num_updates):
            out = engine.step(forest, objective)
            errors = torch.cat(values_of(engine, head, forest)) - returns
            value_loss = errors[is_trained].square().mean()
            (VALUE_COEFFICIENT * value_loss).backward()
            value_error = value_loss.item()
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: reward {mean_reward(items):.3f}, loss {out.loss:+.4f}, value loss {value_error:.4f}")
    return mean_reward(items)


if __name__ == "__main__":
    main()
