"""What several processes add to a step: sums over their batches, gradients added up, sharded parameters, lockstep.

Data-parallel ranks each compute their trees and add their gradients up once per optimizer step. The model is wrapped
by DistributedDataParallel, which copies rank 0's parameters to all ranks. DDP's gradient hooks never fire, because the
engine calls the decoder directly; gradients are all-reduced here instead. Sharded parameters are gathered around the
walks of a batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from treewise.base import features
from treewise.distributed import ranks
from treewise.distributed.divided_tensors import sum_gradients
from treewise.distributed.ends import Ends
from treewise.distributed.fsdp import ShardSettings, gradient_norm, reshard, shard
from treewise.distributed.parts import mesh_of
from treewise.engine.engine import TreeEngine
from treewise.errors import OutOfMemoryError
from treewise.nn.model_flops import flop_model
from treewise.nn.platform.tensors import is_out_of_memory
from treewise.objectives.protocol import Objective
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.distributed.context import ContextGroup


class ManyRanks:
    """The processes of a run, as one of them sees it. Every rank calls each method."""

    def __init__(self, model: nn.Module, args: TreeTrainingArguments) -> None:
        self._model, self._args = model, args
        self._ends: Ends | None = None  # of a sharded model
        self.mesh = mesh_of(model)
        self.context: ContextGroup | None = None
        if args.context_size > 1:
            self.context = features.context.context_group(args.context_size, args.device.type)
        self.is_in_lockstep = False

    @property
    def is_sharded(self) -> bool:
        return self._ends is not None

    @property
    def is_spread(self) -> bool:
        """Whether no process has the whole model, so that gradients and norms are those of parts."""
        return self.is_sharded or self.mesh is not None

    @property
    def needs_lockstep(self) -> bool:
        """Whether ranks with batches of their own, over which experts are spread, still have to enter lockstep."""
        return self.mesh is not None and self.mesh.needs_lockstep and not self.is_in_lockstep

    @property
    def is_first_of_batch(self) -> bool:
        """Whether this rank speaks for those that compute its batch."""
        if self.context is not None:
            return self.context.index == 0
        return self.mesh is None or self.mesh.is_first_of_batch

    def sum_over_batches(self, *values: float) -> list[float]:
        """The sum of each value over the ranks; those that compute one batch together count once."""
        return ranks.sum_over(self._args.device, *(value if self.is_first_of_batch else 0.0 for value in values))

    def all_of_batches(self, own: list[Any]) -> list[Any]:
        """What every rank has of its batches, from one rank of those that compute one together."""
        own = own if self.is_first_of_batch else []
        return [part for each in ranks.on_every_rank(lambda: own) for part in each]

    def enter_lockstep(self, engine: TreeEngine, first: Forest) -> None:
        """Checks the model on all ranks at once; from now on they run the same passes."""
        engine.check(first)
        self.is_in_lockstep = True

    def shard(self, engine: TreeEngine, settings: ShardSettings) -> None:
        """Shards the model over all ranks, after they entered lockstep with the whole model."""
        dtype = torch.bfloat16 if self._args.bf16 else None
        self._ends = shard(self._model, engine.lm, self._args.device, settings, dtype)

    def sum_gradients(self) -> None:
        """Adds the gradients of all ranks up; sharded ones were added up in their backward."""
        if ranks.count() == 1 or self.is_sharded:
            return
        if self.mesh is not None:
            self.mesh.sum_gradients(self._model.parameters())
            return
        sum_gradients(self._model.parameters())

    def clip_gradients(self, most: float) -> float:
        """Clips gradients of which no process has the whole; returns their norm before that."""
        return gradient_norm(list(self._model.parameters()), most, self._args.device)

    def take_least_budget(self, engine: TreeEngine) -> None:
        """Sets a measured budget to the least of all ranks, so that a checkpoint holds one number and a resumed run
        cuts its trees in the same places.
        """
        budgets = ranks.on_every_rank(lambda: engine.max_tokens)
        engine.budget.tokens = min((budget for budget in budgets if budget is not None), default=None)

    @contextmanager
    def batch(self, engine: TreeEngine, step: int, *, trains: bool) -> Iterator[None]:
        """Around the walks of one batch of a step. Sharded: all ranks enter and leave, and run the same passes.

        Raises:
            OutOfMemoryError: a rank has too little memory for its budget.
        """
        if not self.is_in_lockstep:
            yield
            return
        try:
            with nullcontext() if self._ends is None else self._ends.whole(trains):
                yield
                engine.drain()
            if self.is_sharded and not trains:
                reshard(self._model)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"rank {ranks.own()} ran out of memory in step {step} with max_tokens={engine.max_tokens}. Where "
                "parameters are sharded a step cannot run again, because the other ranks are in the middle of it: "
                "lower max_tokens (the gradients stay the same), then go on with --resume. "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from error


def make_placer(args: TreeTrainingArguments, model: nn.Module, objective: Objective) -> Any:
    """Places trees on the ranks of a run by predicted time (`OnlinePlacer`)."""
    placement = features.online_placement
    return placement.OnlinePlacer(
        placement.costs_of_flops(flop_model(model)),
        args.max_tokens if isinstance(args.max_tokens, int) else None,
        getattr(objective, "weighting", "per_trajectory"),
        in_lockstep=args.shard_settings() is not None or args.ep_size > args.tp_size,
        ranks_per_batch=args.ranks_per_batch,
    )
