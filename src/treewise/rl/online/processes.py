"""What the processes of an online run have to agree on: the weights that all begin with, and a server."""

from typing import Any

import torch
from torch import distributed, nn

from treewise.distributed import ranks
from treewise.rl.samplers import Sampler, TransformersSampler


def same_weights(model: nn.Module) -> None:
    """Copies the first process's parameters and buffers to all."""
    if ranks.count() == 1:
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            distributed.broadcast(tensor.data, src=0)


def hand_over(sampler: Sampler, model: Any) -> None:
    """Gives new weights to the sampler: each process to its own; a server gets them from the first process alone."""
    if ranks.own() == 0 or isinstance(sampler, TransformersSampler):
        sampler.update(model)
    ranks.on_first_rank(lambda: None)  # the others wait until a server has them
