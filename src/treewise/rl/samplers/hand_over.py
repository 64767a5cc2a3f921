"""Hands the weights of the model in training to who samples, in two parts: they are taken, and they are given."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from treewise.distributed import ranks
from treewise.rl.samplers.protocol import Sampler
from treewise.rl.samplers.transformers_sampler import TransformersSampler

if TYPE_CHECKING:
    from treewise.rl.samplers.copied_weights import WholeCopy


def begin_hand_over(sampler: Sampler, model: nn.Module, whole: "WholeCopy | None" = None) -> Callable[[], None]:
    """Takes the model's weights, which may change then; what is returned gives them to the sampler of each process;
    servers get those of the first. whole: gathers them first, for a server, where no process has them whole.
    """
    if type(sampler) is TransformersSampler and sampler.model is model:
        return lambda: None  # it samples from these weights themselves
    if whole is not None:
        whole.take(model)
    given: Any = model if whole is None else whole.model  # None of a process that has no part of a server's weights
    begin_update = getattr(sampler, "begin_update", None)
    if begin_update is None:
        sampler.update(given)
    end_update = None if begin_update is None else begin_update(given)

    def finish() -> None:
        if end_update is not None:
            end_update()
        ranks.on_first_rank(lambda: None)  # the others wait until a server has them

    return finish
