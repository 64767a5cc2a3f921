"""verl's trainers with relatives kept on one rank: `treewise_<mode>` of `trainer.v1.trainer_mode`.

The modes are verl's: `sync`, `colocate_async` and `separate_async`. verl's v1 trainer deals the rows of a step to
ranks by their lengths, which scatters the answers to a prompt. Here groups stay whole and ranks take equal predicted
time on trees (`rows_by_rank`); the rest of the trainer is verl's.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from treewise.errors import ConfigError
from treewise.integrations.verl_batches import rows_by_rank, verl_workload

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("treewise")

LINE = "treewise.integrations.verl"


def register() -> None:
    """Registers the modes with verl; once in a process."""
    from verl.trainer.ppo.v1 import trainer_base

    for mode in ("sync", "colocate_async", "separate_async"):
        name = f"treewise_{mode}"
        if name not in trainer_base.TRAINER_REGISTRY:
            trainer_base.register_trainer(name)(_with_relatives(trainer_base.get_trainer_cls(mode), mode))


def _with_relatives(trainer_class: Any, mode: str) -> Any:
    """A subclass of one of verl's trainers."""

    class RelativesTrainer(trainer_class):
        def __init__(self, config: Any) -> None:
            strategy: str = config.actor_rollout_ref.actor.strategy
            if strategy not in ("fsdp", "fsdp2"):
                raise ConfigError(
                    f"trainer.v1.trainer_mode=treewise_{mode} deals rows to the ranks of verl's FSDP engines, and "
                    f"actor_rollout_ref.actor.strategy is {strategy}: set it to fsdp2 or fsdp, or the mode to {mode}."
                )
            config.trainer.v1.trainer_mode = mode  # verl reads its settings, and chooses a replay buffer, by this name
            if config.actor_rollout_ref.model.external_lib is None:
                config.actor_rollout_ref.model.external_lib = LINE
            if config.actor_rollout_ref.actor.shuffle:
                logger.warning(
                    "actor_rollout_ref.actor.shuffle=True mixes the rows of each rank before it cuts mini-batches, "
                    "which takes groups apart; set it to False."
                )
            super().__init__(config)

        def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            """verl pads the batch and orders it by lengths; then groups go to ranks."""
            batch = super()._balance_batch(batch, metrics, *args, **kwargs)
            metrics |= order_by_rank(batch, self.actor_rollout_wg.world_size, self._num_mini_batches(len(batch)))
            return batch

        def _num_mini_batches(self, num_rows: int) -> int:
            """Of one epoch of the actor's update; 1 where the critic alone is warmed up."""
            rollouts: int = self.config.actor_rollout_ref.rollout.n
            size: int = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * rollouts
            return 1 if num_rows % size else num_rows // size

    RelativesTrainer.__name__ = RelativesTrainer.__qualname__ = f"Tree{trainer_class.__name__}"
    return RelativesTrainer


class MetaBatch(Protocol):
    """verl's `KVBatchMeta`."""

    keys: Sequence[str]
    tags: Sequence[Mapping[str, Any]]
    partition_id: str

    def reorder(self, indices: list[int], /) -> object: ...


def order_by_rank(batch: MetaBatch, num_ranks: int, num_mini_batches: int) -> dict[str, float]:
    """Orders a batch of verl's, which it deals to ranks in runs of one length; metrics of the result.

    batch: a `KVBatchMeta`, whose token ids are in the transfer queue. Its keys are `{prompt}_{session}_{output}`.
    """
    import transfer_queue

    token_ids: torch.Tensor = transfer_queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"]
    )["input_ids"]
    groups = [
        key if tag.get("is_padding") else key.rsplit("_", 2)[0] for key, tag in zip(batch.keys, batch.tags, strict=True)
    ]
    placed = rows_by_rank(
        [each.numpy() for each in token_ids.unbind()], groups, num_ranks, verl_workload, num_mini_batches
    )
    lengths: list[int] = [tag["seq_len"] for tag in batch.tags]
    loads = [sum(lengths[index] for index in rows) for rows in placed.rows]
    batch.reorder([index for rows in placed.rows for index in rows])
    return {
        "global_seqlen/balanced_min": min(loads),
        "global_seqlen/balanced_max": max(loads),
        "treewise/imbalance": placed.imbalance,
        "treewise/cut_groups": placed.num_cut,
    }
