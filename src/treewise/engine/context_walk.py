"""A walk of several ranks over one plan: each computes a part of the tokens of every micro-batch."""

from dataclasses import dataclass
from typing import Any

import torch

from treewise.distributed.context import ContextGroup
from treewise.errors import UnsupportedModelError
from treewise.nn import recurrent
from treewise.nn.attention.context_parallel import ContextExchange
from treewise.nn.flops import FlopModel
from treewise.nn.model import DecoderAndHead, base_model
from treewise.nn.model_flops import flop_model
from treewise.planning.context_parts import ContextPart, context_part, part_bounds
from treewise.planning.layout import Layout


@dataclass(frozen=True, slots=True)
class ContextWalk:
    """Which part this rank computes. flops: of the model, by which parts are made equal."""

    ranks: ContextGroup
    flops: FlopModel

    @classmethod
    def of(cls, lm: DecoderAndHead, ranks: ContextGroup) -> "ContextWalk":
        """Raises `UnsupportedModelError` for layers whose states would cross from rank to rank."""
        base: Any = base_model(lm.model)
        kinds = recurrent.kinds_of(lm.decoder)
        if kinds:
            path, kind = next(iter(kinds.items()))
            raise UnsupportedModelError(
                f"{type(base).__name__} has recurrent layers ({path}: {kind}), whose states do not cross from rank to "
                f"rank; leave context_size={ranks.size} out and give max_tokens a number."
            )
        return cls(ranks, flop_model(base))

    def part(self, layout: Layout) -> ContextPart:
        """This rank's part of a micro-batch."""
        bounds = part_bounds(self.flops.of_tokens(layout.depth), self.ranks.size)
        return context_part(layout, bounds, self.ranks.index)

    def exchange(self, part: ContextPart, device: torch.device) -> ContextExchange:
        """What its attention layers exchange in one forward."""
        return ContextExchange(self.ranks.group, part.bounds, part.rows, self.ranks.index, device)
