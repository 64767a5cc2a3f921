"""Placement in a training run: which rank trains which trajectories of each step.

Every rank sees all trees of a batch, computes the same placement (`treewise.distributed.placement`) from the FLOPs of
the model, and takes its part. A resumed run places as the undisturbed one, so it computes the same sums in the same
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treewise.distributed import ranks
from treewise.distributed.placement import CostModel, assign_ranks, rank_part
from treewise.nn.flops import FlopModel
from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.tree.forest import Forest


def costs_of_flops(flops: FlopModel) -> CostModel:
    """Estimated costs from the FLOPs of a model; an image costs what its tokens cost."""
    per_token = flops.linear + flops.linear_backward + flops.head + flops.head_backward
    pair_forward = sum(per_layer for _, per_layer in flops.pair_forward)
    return CostModel.from_flops(per_token, (1 + ATTENTION_BACKWARD) * pair_forward)


@dataclass(frozen=True, slots=True)
class OnlinePlacer:
    """Places the batches of a run.

    max_tokens: the budget that placements assume; the same on all ranks. weighting: the objective's. in_lockstep:
    whether ranks run their passes side by side (sharded parameters), so that all take the time of the slowest.
    ranks_per_batch: neighbouring ranks that compute one part together.
    """

    costs: CostModel
    max_tokens: int | None
    weighting: str
    in_lockstep: bool = False
    ranks_per_batch: int = 1

    def own_part(self, batch: Sequence[Forest]) -> list[Forest]:
        """This rank's part of a batch."""
        if not batch:
            return []
        placement = assign_ranks(
            batch,
            ranks.count() // self.ranks_per_batch,
            self.costs,
            max_tokens=self.max_tokens,
            in_lockstep=self.in_lockstep,
        )
        return rank_part(batch, placement, ranks.own() // self.ranks_per_batch, self.weighting)
