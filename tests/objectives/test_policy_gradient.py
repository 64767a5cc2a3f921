"""The loss of one token, by hand. Of whole rollouts, with gradients: test_objectives.py."""

import math

import pytest
import torch

from treewise.objectives import PPO


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.8),  # at least 1 - clip_low
        (1.2, 1.0, -1.2),
        (1.5, 1.0, -1.3),  # at most 1 + clip_high
        (1.5, -1.0, 1.5),
        (3.0, -1.0, 2.0),  # at most dual_clip
        (3.0, 1.0, -1.3),
    ],
)
def test_bounds_of_the_ratio(ratio: float, advantage: float, expected: float) -> None:
    objective = PPO(clip_low=0.2, clip_high=0.3, dual_clip=2.0)
    old = torch.tensor([-1.0])
    found = objective._surrogate(old + math.log(ratio), torch.tensor([advantage]), {"old_logprobs": old})
    assert found.item() == pytest.approx(expected)
