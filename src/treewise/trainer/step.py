"""An optimizer step, as `TreeTrainer` and the online loop take it: begun, its batches trained, ended.

    denominator = runner.begin_step(batches, step)
    outs = [runner.train_batch(batch) for batch in batches]
    norm = runner.end_step()            # gradients are summed over ranks, clipped, and finite or cleared

Data-parallel ranks each compute their trees and add their gradients up once per optimizer step. The model is wrapped
by DistributedDataParallel, which copies rank 0's parameters to all ranks. DDP's gradient hooks never fire, because the
engine calls the decoder directly; gradients are all-reduced here instead. Sharded parameters are gathered around the
walks of a batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from treewise.distributed import ranks
from treewise.distributed.ends import Ends
from treewise.distributed.fsdp import ShardSettings, gradient_norm, reshard, shard
from treewise.distributed.mesh import context_group, mesh_of, sum_gradients
from treewise.engine.budget import AUTO
from treewise.engine.engine import TreeEngine
from treewise.engine.prepared import PreparedForest
from treewise.engine.scoring import StepOutput
from treewise.errors import DataError, OutOfMemoryError, begin_work
from treewise.nn.compilation import DEFAULT_BACKEND, compile_layers
from treewise.nn.device import is_out_of_memory
from treewise.nn.gradients import clear_gradients, refuse_hooks
from treewise.nn.router_loss import RouterCounts
from treewise.objectives import KTO, Objective
from treewise.objectives.normalization import fixed_denominator
from treewise.objectives.preference import MismatchedScores
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.metrics import MetricMeans
from treewise.trainer.nonfinite import NonFiniteGuard, nonfinite_trajectories, sources
from treewise.trainer.prepared_batches import PreparedBatch
from treewise.tree.forest import Forest

T = TypeVar("T")


class StepRunner:
    """Trains and evaluates batches of trees with one model. Every rank calls each method.

    Parameters:
        args: attention, temperature, precision, device and budget of the run.
        first_tree: loads the tree that budgets are measured with, the same on every rank.
        autocast: the context of forwards.
        reserve_bytes: memory that the optimizer is still going to take.
        processor: the model's processor, for trees with images.

    Attributes:
        guard: decides whether the optimizer may apply a gradient.
        means: of the objective's metrics over the batches that were trained since they were taken.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        args: TreeTrainingArguments,
        first_tree: Callable[[], Forest],
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reserve_bytes: int = 0,
        processor: ProcessorMixin | PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.model, self.objective, self.args = model, objective, args
        self._first_tree, self._autocast = first_tree, autocast
        self._max_tokens = args.max_tokens
        self._reserve_bytes, self._processor = reserve_bytes, processor
        self._ends: Ends | None = None  # of a sharded model
        rows_file = f"nonfinite.rank{args.process_index}.jsonl" if args.world_size > 1 else "nonfinite.jsonl"
        limits = (args.nonfinite, args.max_skipped_steps, args.spike_factor)
        self.guard = NonFiniteGuard(*limits, Path(args.output_dir) / rows_file)
        self.means = MetricMeans()
        # Of the present optimizer step.
        self._step, self._denominator, self._is_finite = 0, 1.0, True
        self._step_objective = objective
        self._forests: list[Forest] = []
        self._router_counts: RouterCounts | None = None
        self.mesh = mesh_of(model)
        self.context = context_group(args.context_size, args.device.type)
        self._is_in_lockstep = False
        self.engine = self._new_engine()
        if args.torch_compile:
            compile_layers(self.engine.lm, args.torch_compile_backend or DEFAULT_BACKEND, args.torch_compile_mode)

    @property
    def is_sharded(self) -> bool:
        return self._ends is not None

    def _new_engine(self) -> TreeEngine:
        engine = TreeEngine(
            self.model,
            self._max_tokens,
            self.args.attention,
            temperature=self.args.temperature,
            offload=self.args.offload,
            router_z_coefficient=self.args.router_z_coefficient,
            reserve_bytes=self._reserve_bytes,
            check=not self._is_in_lockstep,  # was probed on all ranks at once
            processor=self._processor,
            context=self.context,
        )
        if self._is_in_lockstep:
            engine.enable_lockstep(ranks.gather_texts)
        return engine

    def resume_budget(self, max_tokens: int | None) -> None:
        """Uses the budget of the run that is resumed in place of a measurement: another one would round differently."""
        if max_tokens and self.args.max_tokens == AUTO:
            self._max_tokens = max_tokens
            self.engine = self._new_engine()

    # -- ranks --------------------------------------------------------------------------------------------------------

    def shard(self, settings: ShardSettings) -> None:
        """Shards the model over all ranks, and measures the budget if it is to be measured."""
        first = self._first_tree()
        self._enter_lockstep(first)  # with the whole model
        dtype = torch.bfloat16 if self.args.bf16 else None
        self._ends = shard(self.model, self.engine.lm, self.args.device, settings, dtype)
        self.engine = self._new_engine()
        with self._batch(trains=False), self._autocast():
            self.engine.plan(first)
        self._take_least_budget()

    def prepare_mesh(self) -> None:
        """Before the first batch of a model whose experts are spread over ranks with batches of their own."""
        if self.mesh is not None and self.mesh.needs_lockstep and not self._is_in_lockstep:
            self._enter_lockstep(self._first_tree())
            self.engine = self._new_engine()

    def _enter_lockstep(self, first: Forest) -> None:
        """Checks the model on all ranks at once; from now on they run the same passes."""
        self.engine.check(first)
        self._is_in_lockstep = True

    @property
    def is_spread(self) -> bool:
        """Whether no process has the whole model, so that gradients and norms are those of parts."""
        return self.is_sharded or self.mesh is not None

    def sum_over_batches(self, *values: float) -> list[float]:
        """The sum of each value over the ranks; those that compute one batch together count once."""
        return ranks.sum_over(self.args.device, *(value if self._is_first_of_batch else 0.0 for value in values))

    @property
    def _is_first_of_batch(self) -> bool:
        """Whether this rank speaks for those that compute its batch."""
        if self.context is not None:
            return self.context.index == 0
        return self.mesh is None or self.mesh.is_first_of_batch

    def sum_gradients(self) -> None:
        """Adds the gradients of all ranks up; sharded ones were added up in their backward."""
        if ranks.count() == 1 or self.is_sharded:
            return
        if self.mesh is not None:
            self.mesh.sum_gradients(self.model.parameters())
            return
        sum_gradients(self.model.parameters())

    # -- a step -------------------------------------------------------------------------------------------------------

    def prepare(self, forests: Sequence[Forest], flops: tuple[float, float] | None = None) -> PreparedBatch:
        """A batch with what its step computes on the host; in a thread, if need be, while another step runs.

        flops: of the batch (`Throughput.flops_of`).

        Raises:
            DataError: a stream that the objective needs is missing.
            PlanError: see `treewise.plan`.
        """
        denominators = [self.objective.denominator(forest) for forest in forests]
        trained = [forest for forest, own in zip(forests, denominators, strict=True) if own > 0]
        ready = self.engine.prepare(trained, self.objective) if trained else None
        return PreparedBatch(tuple(forests), tuple(denominators), ready, flops)

    def begin_step(self, batches: Sequence[PreparedBatch], step: int) -> float:
        """Begins step number `step`, of which `batches` are this rank's: what its sum of token losses is divided by on
        all ranks, how often routers choose each expert over all its batches and ranks, for their load-balancing loss,
        and the baseline of KTO, are known before the first backward.

        Raises:
            DataError: the step has no trained token.
        """
        self._step, self._is_finite = step, True
        begin_work(f"step {step:,}", sum(each.ready.joined.num_tokens for each in batches if each.ready is not None))
        self._forests = [forest for batch in batches for forest in batch.forests]
        fixed = fixed_denominator(self.objective)
        if fixed is None:
            (fixed,) = self.sum_over_batches(math.fsum(each for batch in batches for each in batch.denominators))
            if not fixed > 0:
                names = ", ".join(sources(self._forests)) or "unnamed"
                raise DataError(f"step {self._step} has no trained token; leave these trees out: {names}.")
        self._denominator = fixed
        objective, self._step_objective, self._router_counts = self.objective, self.objective, None
        if len(batches) == 1 and ranks.count() == 1:  # whose own walks count, and find the baseline
            return self._denominator
        if self.engine.router_loss_rule is not None:
            own = self._of_each(batches, self.engine.count_experts)
            own = own if self._is_first_of_batch else []
            parts = [part for each in ranks.on_every_rank(lambda: own) for part in each]
            self._router_counts = reduce(add, parts) if parts else None
        if isinstance(objective, KTO) and objective.baseline == "mismatched":
            outs = self._of_each(batches, lambda ready: self.engine.evaluate(ready, MismatchedScores()))
            sums = (sum(out.metrics[name] * out.weight for out in outs) for name in ("score", "count"))
            total, count = self.sum_over_batches(*sums)
            self._step_objective = replace(objective, baseline=max(0.0, total / count))
        return self._denominator

    def _of_each(self, batches: Sequence[PreparedBatch], measure: Callable[[PreparedForest], T]) -> list[T]:
        """What is measured of each batch with trained tokens, without a graph."""
        self._measure_budget()
        found = []
        for batch in batches:
            with self._batch(trains=False), self._autocast():
                if batch.ready is not None:
                    found.append(measure(batch.ready))
        return found

    def train_batch(self, batch: PreparedBatch) -> StepOutput | None:
        """Forward and backward of this rank's part of a batch of the step; None if it has no trained token.

        Raises:
            OutOfMemoryError: sharded parameters, and a rank has too little memory for its budget.
            ConfigError: a hook on accumulated gradients, and the step has several batches or processes.
        """
        if ranks.count() > 1 or self.args.gradient_accumulation_steps > 1:
            refuse_hooks(
                self.model,
                "which is whole only when all batches and processes of a step are added up. Use one process and "
                "gradient_accumulation_steps=1, or an optimizer that is not layer-wise.",
            )
        self.model.train()
        self._measure_budget()
        with self._batch(trains=True):
            if batch.ready is None:
                return None
            with self._autocast():
                out = self.engine.step(
                    batch.ready, self._step_objective, denominator=self._denominator, router_counts=self._router_counts
                )
        self._is_finite &= math.isfinite(out.loss)
        self.means.add(out)
        return out

    def end_step(self) -> float:
        """After the batches of a step: sums its gradients over ranks, and clips them to `max_grad_norm`. Returns their
        norm before that. Gradients that may not be applied (`nonfinite: skip`) are cleared.

        Raises:
            NonFiniteError: a loss or gradient that is not finite, as the arguments say.
        """
        self.sum_gradients()
        parameters, most = list(self.model.parameters()), self.args.max_grad_norm
        if self.is_spread:
            norm = gradient_norm(parameters, most, self.args.device)
        else:
            norm = float(nn.utils.clip_grad_norm_(parameters, most or math.inf))
        (num_nonfinite,) = self.sum_over_batches(float(not (self._is_finite and math.isfinite(norm))))
        named = self.nonfinite_trajectories(self._forests) if num_nonfinite else []
        if not self.guard.check_step(self._step, norm, self._forests, is_finite=not num_nonfinite, nonfinite=named):
            clear_gradients(parameters)
        return norm

    # -- budgets ------------------------------------------------------------------------------------------------------

    def _measure_budget(self) -> None:
        """All ranks measure at the same time; one process alone measures with its first batch."""
        if ranks.count() > 1 and not self.engine.budget.is_measured:
            with self._autocast():
                self.engine.plan(self._first_tree())
            self._take_least_budget()

    def _take_least_budget(self) -> None:
        """Sets a measured budget to the least of all ranks, so that a checkpoint holds one number and a resumed run
        cuts its trees in the same places.
        """
        budgets = ranks.on_every_rank(lambda: self.engine.max_tokens)
        self.engine.budget.tokens = min((each for each in budgets if each is not None), default=None)

    def evaluate_batch(self, forests: Sequence[Forest], objective: Objective) -> float:
        """The sum of the token losses of this rank's part of a batch."""
        with self._batch(trains=False), self._autocast():
            return self.engine.evaluate(forests, objective, denominator=1.0).loss if forests else 0.0

    def scoring(self) -> AbstractContextManager[None]:
        """Around forwards of this rank's choice, without a graph; every rank enters and leaves it."""
        return self._batch(trains=False)

    def nonfinite_trajectories(self, forests: Sequence[Forest]) -> list[str]:
        """Sources of trajectories whose log-probs are not finite; empty with several ranks, which would have to agree
        on what to compute.
        """
        if ranks.count() > 1 or self.is_sharded:
            return []
        with torch.no_grad(), self._autocast():
            return [name for forest in forests for name in nonfinite_trajectories(forest, self.engine.logprobs)]

    @contextmanager
    def _batch(self, *, trains: bool) -> Iterator[None]:
        """Around the walks of one batch. Sharded: all ranks enter and leave, and run the same passes."""
        if not self._is_in_lockstep:
            yield
            return
        try:
            with nullcontext() if self._ends is None else self._ends.whole(trains):
                yield
                self.engine.drain()
            if self.is_sharded and not trains:
                reshard(self.model)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"rank {ranks.own()} ran out of memory in step {self._step} with max_tokens={self.engine.max_tokens}. "
                "Where parameters are sharded a step cannot run again, because the other ranks are in the middle "
                "of it: lower max_tokens (the gradients stay the same), then go on with --resume. "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from error


def optimizer_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Memory that an Adam is still going to take: two moments of every trained parameter; 0 once it has run."""
    if getattr(optimizer, "state", None):
        return 0
    trained = (each for each in model.parameters() if each.requires_grad)
    return 2 * sum(each.numel() * each.element_size() for each in trained)
