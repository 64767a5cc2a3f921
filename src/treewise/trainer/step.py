"""An optimizer step, as `TreeTrainer` and the online loop take it: begun, its batches trained, ended.

    denominator = runner.begin_step(batches, step)
    outs = [runner.train_batch(batch) for batch in batches]
    norm = runner.end_step()            # gradients are summed over ranks, clipped, and finite or cleared

What several processes, or sharded parameters, add to it stands in `trainer.many_ranks`; one process has none of it.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from treewise.base import features
from treewise.base.progress import busy_with, listeners
from treewise.distributed import ranks
from treewise.distributed.parts import mesh_of
from treewise.engine.engine import TreeEngine
from treewise.engine.prepared import AUTO, PreparedForest, StepOutput
from treewise.errors import ConfigError, DataError, NonFiniteError, bytes_as_text, num
from treewise.nn.flops import state_bytes
from treewise.nn.gradients import clear_gradients, end_sum_in_float32, have_hooks, sum_in_float32
from treewise.objectives.protocol import Objective
from treewise.objectives.rollouts import step_forest
from treewise.objectives.sft import fixed_denominator
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.batches import PreparedBatch
from treewise.trainer.metrics import MetricMeans
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.trainer.many_ranks import ManyRanks

logger = logging.getLogger("treewise")

T = TypeVar("T")

_HISTORY = 50  # norms whose median a spike is compared with
_FEWEST_NORMS = 10


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
        ranks: the other processes of the run (`ManyRanks`); None of a lone one that has the whole model.
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
        self._resumed_tokens: int | None = None  # what the run that is resumed had measured
        self._reserve_bytes, self._processor = reserve_bytes, processor
        rows_file = f"nonfinite.rank{args.process_index}.jsonl" if args.world_size > 1 else "nonfinite.jsonl"
        limits = (args.nonfinite, args.max_skipped_steps, args.spike_factor)
        self.guard = NonFiniteGuard(*limits, Path(args.output_dir) / rows_file)
        self.means = MetricMeans()
        # Of the present optimizer step.
        self._step, self._denominator, self._is_finite = 0, 1.0, True
        self._step_objective = objective
        self._forests: list[Forest] = []
        self._router_counts: Any = None
        self._telling = ExitStack()  # how far it is, until it ends
        self._is_untried = args.compiles_by_itself  # of compiled layers
        self._is_chosen = args.recomputation is False  # whether layers are computed again in the backward
        if args.float32_gradients:
            _refuse_shards(args, model)
            sum_in_float32(model.parameters())  # counted where a budget is measured
            sums = [
                parameter
                for parameter in model.parameters()
                if parameter.requires_grad and parameter.grad_dtype != parameter.dtype
            ]
            more = sum(each.numel() * (torch.float32.itemsize - each.element_size()) for each in sums)
            logger.info("float32_gradients: %s more, of %s", bytes_as_text(more), num(len(sums), "parameter"))
        self.ranks: ManyRanks | None = None
        if args.world_size > 1 or args.sharded or mesh_of(model) is not None:
            self.ranks = features.many_ranks.ManyRanks(model, args)
        self._is_alone = self.ranks is None or ranks.count() == 1
        self.engine = self._new_engine()
        if args.torch_compile or args.use_liger_kernel or self._is_untried:
            features.fused_layers.fuse_layers(model, self.engine.lm, args)

    def _new_engine(self) -> TreeEngine:
        is_in_lockstep = self.ranks is not None and self.ranks.is_in_lockstep
        engine = TreeEngine(
            self.model,
            self.args.max_tokens,
            self.args.attention,
            temperature=self.args.temperature,
            offload=self.args.offload,
            router_z_coefficient=self.args.router_z_coefficient,
            router_loss_choices=self.args.router_loss_choices,
            reserve_bytes=self._reserve_bytes,
            check=not is_in_lockstep,  # was probed on all ranks at once
            processor=self._processor,
            context=None if self.ranks is None else self.ranks.context,
        )
        if self._resumed_tokens is not None:
            engine.budget.take(self._resumed_tokens)
        if is_in_lockstep:
            engine.enable_lockstep(ranks.gather_texts)
        return engine

    def resume_budget(self, max_tokens: int | None) -> None:
        """Uses the budget of the run that is resumed in place of a measurement: another one would round differently."""
        if max_tokens and self.args.max_tokens == AUTO:
            self._resumed_tokens = max_tokens
            self.engine = self._new_engine()

    # -- before the first step --------------------------------------------------------------------------------------

    def spread(self, settings: Any) -> None:
        """Before the optimizer is made: shards the model over all ranks, if asked for (`ShardSettings`), and measures
        the budget if it is to be measured; ranks that exchange the tokens of experts run the same passes from now on.
        """
        if self._is_untried:
            self._try_compiled()
        if self.ranks is None:
            return
        if settings is not None and not self.ranks.is_sharded:
            first = self._first_tree()
            self.ranks.enter_lockstep(self.engine, first)  # with the whole model
            self.ranks.shard(self.engine, settings)
            self.engine = self._new_engine()
            with self._batch(trains=False), self._autocast():
                self.engine.plan(first)
            self.ranks.take_least_budget(self.engine)
        if self.ranks.needs_lockstep:
            self.ranks.enter_lockstep(self.engine, self._first_tree())
            self.engine = self._new_engine()

    def measure_budget(self, first_tree: Callable[[], Forest] | None = None) -> None:
        """All ranks measure at the same time; one process alone measures with its first batch. first_tree: what they
        measure with, the same on all; None: that of the run.
        """
        if self.ranks is not None and not self._is_alone and not self.engine.budget.is_measured:
            with self._autocast():
                self.engine.plan((first_tree or self._first_tree)())
            self.ranks.take_least_budget(self.engine)

    def _try_compiled(self) -> None:
        """Before the first step, runs what nobody asked to compile (`fused_layers.try_compiled`)."""
        self._is_untried = False
        with self._autocast():
            features.fused_layers.try_compiled(self.engine, self._first_tree())

    def _choose_recomputation(self, ready: PreparedForest | None) -> None:
        """Before the first batch that has trained tokens: switches layers that are computed again in the backward on,
        as the settings say. One process looks at its first batch, several at the tree that budgets are measured with.
        """
        if self._is_alone and ready is None:
            return
        self._is_chosen = True
        first = self._first_tree if ready is None or not self._is_alone else lambda: ready.joined
        with self._autocast():
            features.recomputation.recompute_as_set(
                self.engine, first, self.objective, self.args, reserve_bytes=self._reserve_bytes
            )
        is_measured = self.engine.budget.setting == AUTO and self.engine.budget.is_measured
        if self.ranks is not None and not self._is_alone and is_measured:
            self.ranks.take_least_budget(self.engine)

    # -- a step -------------------------------------------------------------------------------------------------------

    def prepare(self, forests: Sequence[Forest], flops: tuple[float, float] | None = None) -> PreparedBatch:
        """A batch with what its step computes on the host; in a thread, if need be, while another step runs.

        flops: of the batch (`Throughput.flops_of`).

        Raises:
            DataError: a stream that the objective needs is missing.
            PlanError: see `treewise.plan`.
        """
        if not forests:
            return PreparedBatch((), 0.0, None, flops)
        joined = step_forest(forests, self.objective)
        denominator = self.objective.denominator(joined)
        ready = self.engine.prepare(joined, self.objective) if denominator > 0 else None
        return PreparedBatch(tuple(forests), denominator, ready, flops)

    def begin_step(self, batches: Sequence[PreparedBatch], step: int) -> float:
        """Begins step number `step`, of which `batches` are this rank's: what its sum of token losses is divided by on
        all ranks, how often routers choose each expert over all its batches and ranks, for their load-balancing loss,
        and the baseline of KTO, are known before the first backward. So is what a first step decides for the run:
        whether layers are compiled and computed again, and the budget.

        Raises:
            DataError: the step has no trained token.
            ConfigError: a hook on accumulated gradients, and the step has several batches or processes.
        """
        is_in_parts = self.args.gradient_accumulation_steps > 1 or not self._is_alone
        if is_in_parts and have_hooks(self.model.parameters()):
            features.gradient_hooks.refuse_hooks(
                self.model,
                "which is whole only when all batches and processes of a step are added up. Use one process and "
                "gradient_accumulation_steps=1, or an optimizer that is not layer-wise.",
            )
        self.model.train()
        if self._is_untried:
            self._try_compiled()
        if not self._is_chosen:
            self._choose_recomputation(next((batch.ready for batch in batches if batch.ready is not None), None))
        self.measure_budget()
        if self.args.float32_gradients:
            sum_in_float32(self.model.parameters())
        self._step, self._is_finite = step, True
        if listeners:
            num_tokens = sum(batch.ready.joined.num_tokens for batch in batches if batch.ready is not None)
            self._telling.close()  # of a step that was left
            self._telling.enter_context(busy_with(f"step {step:,}", num_tokens))
        self._forests = [forest for batch in batches for forest in batch.forests]
        fixed = fixed_denominator(self.objective)
        if fixed is None:
            (fixed,) = self.sum_over_batches(math.fsum(batch.denominator for batch in batches))
            if not fixed > 0:
                names = ", ".join(features.nonfinite.sources(self._forests)) or "unnamed"
                raise DataError(f"step {self._step} has no trained token; leave these trees out: {names}.")
        self._denominator = fixed
        self._step_objective, self._router_counts = self.objective, None
        if self._is_alone and sum(batch.ready is not None for batch in batches) == 1:
            return self._denominator  # the batch's own walks count, and find the baseline
        if self.engine.router_loss_rule is not None:
            parts = self._of_each((batch.ready for batch in batches), self.engine.count_experts)
            parts = parts if self.ranks is None else self.ranks.all_of_batches(parts)
            self._router_counts = reduce(add, parts) if parts else None
        self._step_objective = self.with_baseline(self.objective, (batch.ready for batch in batches))
        return self._denominator

    def train_batch(self, batch: PreparedBatch) -> StepOutput | None:
        """Forward and backward of this rank's part of a batch of the step; None if it has no trained token.

        Raises:
            OutOfMemoryError: sharded parameters, and a rank has too little memory for its budget.
        """
        self.model.train()  # whatever a callback did since the step began
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
        parameters, most = list(self.model.parameters()), self.args.max_grad_norm
        if self.ranks is not None:
            self.ranks.sum_gradients()
        if self.ranks is not None and self.ranks.is_spread:
            norm = self.ranks.clip_gradients(most)
        else:
            norm = float(nn.utils.clip_grad_norm_(parameters, most or math.inf))
        (num_nonfinite,) = self.sum_over_batches(float(not (self._is_finite and math.isfinite(norm))))
        named = self.nonfinite_trajectories(self._forests) if num_nonfinite else []
        if not self.guard.check_step(self._step, norm, self._forests, is_finite=not num_nonfinite, nonfinite=named):
            clear_gradients(parameters)
        if self.args.float32_gradients:
            end_sum_in_float32(parameters)
        self._telling.close()
        return norm

    # -- without a graph ----------------------------------------------------------------------------------------------

    def evaluate_batch(self, forests: Sequence[Forest], objective: Objective) -> tuple[float, float]:
        """The sum of the token losses of this rank's part of a batch, and what the objective divides it by."""
        with self._batch(trains=False), self._autocast():
            if not forests:
                return 0.0, 0.0
            joined = step_forest(forests, objective)
            return self.engine.evaluate(joined, objective, denominator=1.0).loss, objective.denominator(joined)

    def scoring(self) -> AbstractContextManager[None]:
        """Around forwards of this rank's choice, without a graph; every rank enters and leaves it."""
        return self._batch(trains=False)

    def nonfinite_trajectories(self, forests: Sequence[Forest]) -> list[str]:
        """Sources of trajectories whose log-probs are not finite; empty with several ranks, which would have to agree
        on what to compute.
        """
        if not self._is_alone or (self.ranks is not None and self.ranks.is_sharded):
            return []
        with torch.no_grad(), self._autocast():
            of_forest = features.nonfinite.nonfinite_trajectories
            return [name for forest in forests for name in of_forest(forest, self.engine.logprobs)]

    def with_baseline(self, objective: Any, batches: Iterable[Any]) -> Any:
        """The objective; of KTO that with the mean score of all mismatched completions of these batches and all ranks,
        which a part of them would give otherwise. batches: of this rank, as `TreeEngine.evaluate` takes them, or None.
        """
        if getattr(objective, "baseline", None) != "mismatched":
            return objective
        scores = features.preference.MismatchedScores()
        outs = self._of_each(batches, lambda each: self.engine.evaluate(each, scores))
        sums = (sum(out.metrics[name] * out.weight for out in outs) for name in ("score", "count"))
        total, count = self.sum_over_batches(*sums)
        return replace(objective, baseline=max(0.0, total / count))

    def _of_each(self, batches: Iterable[Any], measure: Callable[[Any], T]) -> list[T]:
        """What is measured of each batch with trained tokens, without a graph. batches: some may be None."""
        found = []
        for batch in batches:
            with self._batch(trains=False), self._autocast():
                if batch is not None:
                    found.append(measure(batch))
        return found

    def sum_over_batches(self, *values: float) -> list[float]:
        """The sum of each value over the ranks; those that compute one batch together count once."""
        return list(values) if self.ranks is None else self.ranks.sum_over_batches(*values)

    def _batch(self, *, trains: bool) -> AbstractContextManager[None]:
        """Around the walks of one batch; of one process nothing."""
        return nullcontext() if self.ranks is None else self.ranks.batch(self.engine, self._step, trains=trains)


class NonFiniteGuard:
    """Decides before each update whether the optimizer may apply the gradient.

    policy: `stop`, or `skip` the update. max_skipped: consecutive skipped updates after which the run stops under
    `skip`, too. spike_factor: a warning is logged when the gradient norm exceeds this many medians of the last 50
    steps; 0: off. path: where the trees of a step that is not finite are written.
    """

    def __init__(self, policy: str, max_skipped: int, spike_factor: float, path: Path) -> None:
        self.policy, self.max_skipped, self.spike_factor, self.path = policy, max_skipped, spike_factor, path
        self.num_skipped = self._num_consecutive = 0
        self._norms: deque[float] = deque(maxlen=_HISTORY)

    def check_step(
        self, step: int, norm: float, forests: Sequence[Forest], *, is_finite: bool, nonfinite: Sequence[str] = ()
    ) -> bool:
        """Whether the optimizer may apply step number `step`.

        norm: of the whole gradient. forests: of the step, on this rank. is_finite: whether loss and gradient are, on
        all ranks. nonfinite: sources of the trajectories whose own log-probs are not finite, where that is known.

        Raises:
            NonFiniteError: under the policy `stop`, or after too many consecutive skipped updates.
        """
        if is_finite:
            self._num_consecutive = 0
            median = statistics.median(self._norms) if len(self._norms) >= _FEWEST_NORMS else 0.0
            if self.spike_factor and norm > self.spike_factor * median > 0:
                trees = ", ".join(features.nonfinite.sources(forests)) or "unnamed trees"
                logger.warning("step %d: gradient norm %.3g, the median before is %.3g: %s", step, norm, median, trees)
            self._norms.append(norm)
            return True
        files = features.nonfinite
        files.write_rows(self.path, forests, {"step": step})
        what = "gradient" if not math.isfinite(norm) else "loss"
        named = list(nonfinite) or files.sources(forests)
        trees = f" {'Not finite by themselves' if nonfinite else 'Its trees'}: {', '.join(named)}." if named else ""
        message = f"the {what} of step {step} is not finite; it was not applied.{trees} Written to {self.path}."
        self.num_skipped += 1
        self._num_consecutive += 1
        if self.policy == "skip" and self._num_consecutive <= self.max_skipped:
            logger.warning("%s", message)
            return False
        many = f" Skipped in a row before: {num(self.max_skipped, 'step')}." if self.policy == "skip" else ""
        raise NonFiniteError(f"{message}{many} Lower learning_rate, or look at these records.")


def optimizer_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str | None = None) -> int:
    """Memory that an optimizer of a name (`optim`) is still going to take, of an unknown one an Adam's; 0 once it has
    run."""
    if getattr(optimizer, "state", None):
        return 0
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return round(sum(tensor.numel() * state_bytes(name, tensor.element_size()) for tensor in trained))


def _refuse_shards(args: TreeTrainingArguments, model: nn.Module) -> None:
    if args.sharded or mesh_of(model) is not None:
        raise ConfigError(
            "float32_gradients=True, and parameters are divided over processes (sharded, tp_size, ep_size), whose "
            "gradients torch adds up; leave it out, or load the weights in float32 with bf16=True."
        )
