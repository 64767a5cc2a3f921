"""The first part of `TreeTrainer`: which trees a step trains, and what its sum of losses is divided by.

The loaders give planned sets of trees, and `get_batch_samples` one denominator for the whole optimizer step.
"""

import logging
import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from transformers import Trainer

from treewise.distributed import ranks
from treewise.distributed.online_placement import OnlinePlacer
from treewise.errors import ConfigError, DataError
from treewise.objectives import Objective
from treewise.objectives.normalization import fixed_denominator
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.data_loader import DataFacts, TreeLoader, TreeSampler, survey
from treewise.trainer.nonfinite import sources
from treewise.trainer.run_summary import make_sampler, steps_per_epoch
from treewise.trainer.throughput import Throughput
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")


class FeedingTrainer(Trainer):
    """Loaders of trees, a rank's share of each step, denominators and counts of tokens."""

    args: TreeTrainingArguments
    objective: Objective
    _throughput: Throughput
    _facts: DataFacts | None
    _placer: OnlinePlacer | None
    _placed: tuple[Any, Iterator[list[Forest]]] | None  # an epoch's batches, and this rank's shares
    _forests: list[Forest]  # of the step at hand, on this rank
    _is_loss_finite: bool  # of the step at hand, so far
    _resumed_step: int

    def _warn_of_length(self) -> None:
        """A path beyond the positions that a model was made for is trained whole, and said."""
        facts, limit = self.data_facts, getattr(self.model.config, "max_position_embeddings", None)
        if limit and facts.num_longest_tokens > limit:
            logger.warning(
                "%s has %d tokens, the model was made for %d (max_position_embeddings); nothing is cut",
                facts.longest_source or "the longest trajectory",
                facts.num_longest_tokens,
                limit,
            )

    @property
    def data_facts(self) -> DataFacts:
        """Sizes and fingerprint of the training data, from one pass over it."""
        if self._facts is None:
            self._facts = survey(self.train_dataset)
        return self._facts

    def get_train_dataloader(self) -> TreeLoader:
        if self.train_dataset is None:
            raise ConfigError("training needs a train_dataset.")
        sampler = make_sampler(self.args, len(self.train_dataset))
        # Before each epoch transformers sets it, but earlier versions not in an epoch that is resumed in its middle.
        sampler.set_epoch(self._resumed_step // steps_per_epoch(self.args, len(self.train_dataset)))
        return self._loader(self.train_dataset, sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> TreeLoader:
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluation needs an eval_dataset.")
        size = self.args.per_device_eval_batch_size
        sampler = TreeSampler(len(dataset), size, None, self.args.process_index, self.args.world_size)
        return self._loader(dataset, sampler)

    get_test_dataloader = get_eval_dataloader

    def _loader(self, dataset: Any, sampler: TreeSampler) -> TreeLoader:
        workers = self.args.dataloader_num_workers
        options: dict[str, Any] = {"num_workers": workers}
        if workers:
            options["prefetch_factor"] = self.args.dataloader_prefetch_factor
            options["multiprocessing_context"] = self.args.dataloader_multiprocessing_context
        return TreeLoader(dataset, sampler, self.args.merges_trees, **options)

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Forest]], num_batches: int, device: torch.device
    ) -> tuple[list[list[Forest]], float]:
        """The batches of one optimizer step, and what its sum of token losses is divided by, on all ranks."""
        self._throughput.start()
        batches = list(islice(self._shares(epoch_iterator), num_batches))
        self._forests, self._is_loss_finite = [forest for batch in batches for forest in batch], True
        return batches, self._denominator(self._forests, self.objective)

    def _shares(self, epoch_iterator: Iterator[list[Forest]]) -> Iterator[list[Forest]]:
        if self._placer is None:
            return epoch_iterator
        if self._placed is None or self._placed[0] is not epoch_iterator:
            batches_per_step = self.args.gradient_accumulation_steps
            shares = self._placer.rank_parts(epoch_iterator, self.state.global_step, batches_per_step)
            self._placed = epoch_iterator, shares
        return self._placed[1]

    def _denominator(self, forests: list[Forest], objective: Objective) -> float:
        fixed = fixed_denominator(objective)
        if fixed is not None:
            return fixed
        (total,) = self._sum_over_ranks(math.fsum(objective.denominator(forest) for forest in forests))
        if not total > 0:
            raise DataError(
                f"step {self.state.global_step + 1} has no trained token; leave these trees out: "
                f"{', '.join(sources(forests)) or 'unnamed'}."
            )
        return total

    def floating_point_ops(self, inputs: list[Forest]) -> float:
        """What the trees need, forward and backward; see `treewise.nn.flops`."""
        return self._throughput.add_flops(self.model, inputs)

    def _track_num_input_tokens(self, inputs: list[Forest]) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            (seen,) = self._sum_over_ranks(float(sum(forest.num_flat_tokens for forest in inputs)))
            self.state.num_input_tokens_seen += int(seen)

    def _sum_over_ranks(self, *values: float) -> list[float]:
        return ranks.sum_over(self.args.device, *values)
