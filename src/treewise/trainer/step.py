"""The second part of `TreeTrainer`: the engine in place of forward and backward.

Data-parallel ranks each compute their trees and add their gradients up once per optimizer step. The model is wrapped
by DistributedDataParallel, which hands rank 0's parameters to all; its gradient hooks sleep, because the engine calls
the decoder and not the wrapper. Sharded parameters are put together around the walks of a batch.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers.trainer_utils import EvalLoopOutput

from treewise.distributed import ranks
from treewise.distributed.fsdp import Ends, ShardedModel, ShardSettings, gradient_norm, shard
from treewise.distributed.signals import StopSignals
from treewise.engine.budget import AUTO
from treewise.engine.engine import TreeEngine
from treewise.errors import OutOfMemoryError
from treewise.nn.device import is_out_of_memory
from treewise.nn.gradients import clear_gradients
from treewise.objectives.normalization import fixed_denominator
from treewise.trainer.data_loader import TreeLoader, forest_of
from treewise.trainer.feeding import FeedingTrainer
from treewise.trainer.metrics import MetricMeans
from treewise.trainer.nonfinite import Faults, unsound
from treewise.tree.forest import Forest


class ComputingTrainer(FeedingTrainer):
    """Steps, their gradients over all ranks, and evaluations."""

    _engine: TreeEngine | None
    _means: MetricMeans
    _faults: Faults
    _signals: StopSignals
    _shard_settings: ShardSettings | None
    _ends: Ends | None  # of a model that was sharded
    _resumed_budget: int | None

    @property
    def engine(self) -> TreeEngine:
        """The engine of the present model."""
        if self._engine is None or self._engine.model is not self.model:
            setting = self._resumed_budget if self.args.max_tokens == AUTO else None
            self._engine = TreeEngine(
                self.model,
                setting or self.args.max_tokens,
                self.args.attention,
                temperature=self.args.temperature,
                offload=self.args.offload,
                router_z_coefficient=self.args.router_z_coefficient,
                reserve_bytes=self._optimizer_bytes(),
                check=self._ends is None,  # a model that is sharded was probed before
            )
            if self._ends is not None:
                self._engine.enable_lockstep(ranks.gather_texts)
        return self._engine

    def _optimizer_bytes(self) -> int:
        """What an Adam will take for two moments of every trained parameter, where no optimizer has run yet."""
        if getattr(self.optimizer, "state", None):
            return 0
        trained = (each for each in self.model.parameters() if each.requires_grad)
        return 2 * sum(each.numel() * each.element_size() for each in trained)

    # -- sharding -----------------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer of the shards, where parameters are to be sharded: this is the last moment before it."""
        if self._shard_settings is not None and self._ends is None:
            self._shard(self._shard_settings)
        return super().create_optimizer(*args, **kwargs)

    def _shard(self, settings: ShardSettings) -> None:
        first = forest_of(self.train_dataset[0])
        self.engine.check(first)  # on the whole model
        dtype = torch.bfloat16 if self.args.bf16 else None
        self._ends = shard(self.model, self.engine.lm, self.args.device, settings, dtype)
        self._engine = None
        with self._together(trains=False), self.accelerator.autocast():
            self.engine.plan(first)  # measures the budget, where it is to be measured: all ranks at once
        self._take_least_budget()

    def _take_least_budget(self) -> None:
        """A measured budget is the least of all ranks, so that one number in a checkpoint makes a resumed run cut its
        trees as this one did.
        """
        budgets = ranks.on_every_rank(lambda: self.engine.max_tokens)
        self.engine.budget.tokens = min((each for each in budgets if each is not None), default=None)

    @contextmanager
    def _together(self, trains: bool, measured: Sequence[Forest] | None = None) -> Iterator[None]:
        """Around the walks of one batch: all ranks enter and leave, and run the same forwards and backwards.

        measured: this rank's trees, where the time they take is to be measured for the costs of placements.
        """
        if self._ends is None:
            with self._measuring(measured):
                yield
            return
        # Between two moments that all ranks share: all parameters gathered, all passes run.
        with self._memory_named(), self._ends.whole(trains), self._measuring(measured):
            yield
            self.engine.drain()

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self._ends is None:
            return super()._wrap_model(model, training, dataloader)
        return model if isinstance(model, ShardedModel) else ShardedModel(model)

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(
        self, model: torch.nn.Module, inputs: list[Forest], num_items_in_batch: float | None = None
    ) -> torch.Tensor:
        """Forward and backward of one batch; its share of the step's loss, times the ranks that will be averaged."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        with self._signals.computing():
            loss = self._compute(inputs, num_items_in_batch)
        self._is_loss_finite &= math.isfinite(loss)
        if self.args.world_size > 1 and self.accelerator.sync_gradients and self._ends is None:
            self._sum_gradients()
        return torch.tensor(loss * self.args.world_size, device=self.args.device)

    def _compute(self, inputs: list[Forest], denominator: float | None) -> float:
        if denominator is None:
            denominator = self._denominator(inputs, self.objective)
        if ranks.count() > 1 and not self.engine.budget.is_measured:  # one process measures with its first batch
            with self.accelerator.autocast():
                self.engine.plan(forest_of(self.train_dataset[0]))
            self._take_least_budget()
        trained = [forest for forest in inputs if self.objective.denominator(forest) > 0]
        loss = 0.0
        with self._together(trains=True, measured=trained):
            if trained:
                with self.accelerator.autocast():
                    out = self.engine.step(trained, self.objective, denominator=denominator)
                self._throughput.add(out)
                self._means.add(out)
                loss = out.loss
        return loss

    def _measuring(self, forests: Sequence[Forest] | None) -> AbstractContextManager[None]:
        """Measures a batch for the costs of placements, while they are to be fitted."""
        if forests is None or self._placer is None or not self._placer.is_measuring:
            return nullcontext()
        plan = self.engine.plan(forests) if forests else None
        return self._placer.measure(plan, self.args.device)

    @contextmanager
    def _memory_named(self) -> Iterator[None]:
        """Sharded parameters: a step that runs out of memory cannot run again, the others are in its middle."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            where = f"rank {ranks.own()} ran out of memory in step {self.state.global_step + 1}"
            raise OutOfMemoryError(
                f"{where} with max_tokens={self.engine.max_tokens}. "
                "Where parameters are sharded a step cannot run again, because the other ranks are in its middle: "
                "lower max_tokens (the gradients stay the same), then go on with --resume. "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from error

    def _sum_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The last look at the gradients before the optimizer takes them."""
        norm = grad_norm if self._ends is not None else super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None:
            norm = self._clip_grad_norm(model, max_norm=0.0)
        (num_faulty,) = self._sum_over_ranks(float(not (self._is_loss_finite and math.isfinite(float(norm)))))
        suspects = self._suspects() if num_faulty and self.args.world_size == 1 and self._ends is None else []
        step = self.state.global_step + 1
        if not self._faults.judge(step, float(norm), not num_faulty, self._forests, suspects):
            clear_gradients(self.model.parameters())
        return norm

    def _clip_grad_norm(self, model: torch.nn.Module, max_norm: float | None = None) -> Any:
        if self._ends is None:
            return super()._clip_grad_norm(model)
        max_norm = self.args.max_grad_norm if max_norm is None else max_norm
        return gradient_norm(list(model.parameters()), max_norm, self.args.device)

    def _suspects(self) -> list[str]:
        """Trajectories of the step whose log-probs are not finite, each computed alone."""
        with torch.no_grad(), self.accelerator.autocast():
            return [name for forest in self._forests for name in unsound(forest, self.engine.logprobs)]

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: TreeLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss over all trees of the loader: one mean, however they are cut into batches and ranks."""
        objective: Any = self.objective
        if fixed_denominator(objective) is not None:  # a constant fits the size of a step, not of an evaluation set
            objective = replace(objective, normalization="token_mean", constant=None)
        self.model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        loss = denominator = 0.0
        for forests in dataloader:
            with self._together(trains=False), self.accelerator.autocast(), self._signals.computing():
                if forests:
                    loss += self.engine.evaluate(forests, objective, denominator=1.0).loss
            denominator += math.fsum(objective.denominator(forest) for forest in forests)
            self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss, denominator = self._sum_over_ranks(loss, denominator)
        metrics = {f"{metric_key_prefix}_loss": loss / denominator}
        return EvalLoopOutput(None, None, metrics, dataloader.sampler_of_trees.num_trees)
