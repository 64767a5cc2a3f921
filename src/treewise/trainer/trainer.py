"""`TreeTrainer`: transformers' loop, with the engine in place of forward and backward.

What is overridden, and why: the loaders (a step is a planned set of trees), `get_batch_samples` (one denominator for
the whole optimizer step), `training_step` and `evaluation_loop` (the engine computes), `log` (throughput),
`_save_checkpoint` and `train` (a checkpoint is complete or none, and belongs to this run). Optimizer, schedule,
clipping, callbacks, trackers, LoRA and the format of checkpoints are transformers' own.

Data-parallel ranks each compute their trees and add their gradients up once per optimizer step. The model is wrapped
by DistributedDataParallel, which hands rank 0's parameters to all; its gradient hooks sleep, because the engine calls
the decoder and not the wrapper.
"""

import math
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from treewise.budget import AUTO
from treewise.engine import StepOutput, TreeEngine
from treewise.errors import CheckpointError, ConfigError, NonFiniteError
from treewise.forest import Forest
from treewise.objectives import SFT, SeparableObjective
from treewise.trainer import checkpoint as seals
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.batches import DataFacts, TreeLoader, TreeSampler, survey
from treewise.trainer.describe import describe, make_sampler, steps_per_epoch


class TreeTrainer(Trainer):
    """Trains a causal language model on trees; gradients equal those of flat training.

    Parameters:
        model: any transformers causal language model that `TreeEngine` takes, PEFT-wrapped or not.
        train_dataset: anything with a length and indices whose items are `Forest`, one `Trajectory`, a list of them,
            or training trees (what `load_trees` returns).
        eval_dataset: the same, or a mapping of names to such.
        objective: a separable loss, in place of the one that `args` names.

    Raises:
        ConfigError: settings that contradict one another, or an empty data set.
        UnsupportedModelError: the model cannot follow a tree.
    """

    def __init__(
        self,
        model: Any = None,
        args: TreeTrainingArguments | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        objective: SeparableObjective | None = None,
        processing_class: Any = None,
        model_init: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        args = TreeTrainingArguments() if args is None else args
        if not isinstance(args, TreeTrainingArguments):
            raise ConfigError(f"args is a {type(args).__name__}; give tw.TreeTrainingArguments.")
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise ConfigError(
                    f"{name} is a {type(dataset).__name__}, which has no length and indices; give a list."
                )
            if dataset is not None and len(dataset) == 0:
                raise ConfigError(f"{name} is empty.")
        self.objective: SeparableObjective = objective or args.objective()
        self._engine: TreeEngine | None = None
        self._throughput = _Throughput()
        self._facts: DataFacts | None = None
        self._sources: list[str] = []
        self._resumed_step = 0
        self._resumed_budget: int | None = None
        use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            callbacks=[self._throughput, *(callbacks or [])],
            optimizers=optimizers,
        )
        if use_cache is not None:
            self.model.config.use_cache = use_cache  # transformers turns it off, also in what is saved
        _ = self.engine

    @property
    def engine(self) -> TreeEngine:
        """The engine of the present model."""
        if self._engine is None or self._engine.model is not self.model:
            setting = self._resumed_budget if self.args.max_tokens == AUTO else None
            self._engine = TreeEngine(
                self.model,
                setting or self.args.max_tokens,
                self.args.attention,
                reserve_bytes=self._optimizer_bytes(),
            )
        return self._engine

    def _optimizer_bytes(self) -> int:
        """What an Adam will take for two moments of every trained parameter, where no optimizer has run yet."""
        if getattr(self.optimizer, "state", None):
            return 0
        trained = (each for each in self.model.parameters() if each.requires_grad)
        return 2 * sum(each.numel() * each.element_size() for each in trained)

    # -- which trees ------------------------------------------------------------------------------------------------

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
        batches = list(islice(epoch_iterator, num_batches))
        return batches, self._denominator([forest for batch in batches for forest in batch], self.objective)

    def _denominator(self, forests: list[Forest], objective: SeparableObjective) -> float:
        if isinstance(objective, SFT) and objective.constant is not None:
            return objective.constant
        (total,) = self._sum_over_ranks(math.fsum(objective.denominator(forest) for forest in forests))
        return total

    # -- computing --------------------------------------------------------------------------------------------------

    def training_step(
        self, model: torch.nn.Module, inputs: list[Forest], num_items_in_batch: float | None = None
    ) -> torch.Tensor:
        """Forward and backward of one batch; its share of the step's loss, times the ranks that will be averaged."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        loss = 0.0
        if inputs:
            denominator = (
                self._denominator(inputs, self.objective) if num_items_in_batch is None else num_items_in_batch
            )
            with self.accelerator.autocast():
                out = self.engine.step(inputs, self.objective, denominator=denominator)
            self._throughput.add(out)
            loss = out.loss
        self._sources = _sources(inputs)
        if self.args.world_size > 1 and self.accelerator.sync_gradients:
            self._sum_gradients()
        return torch.tensor(loss * self.args.world_size, device=self.args.device)

    def _sum_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                torch.distributed.all_reduce(parameter.grad)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The last look at the gradients before the optimizer takes them."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not math.isfinite(float(norm)):
            trees = f" Last batch: {', '.join(self._sources)}." if self._sources else ""
            raise NonFiniteError(
                f"the gradient of step {self.state.global_step + 1} is not finite; it was not applied."
                f"{trees} Lower learning_rate, or look at these records."
            )
        return norm

    def evaluation_loop(
        self,
        dataloader: TreeLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss over all trees of the loader: one mean, however they are cut into batches and ranks."""
        objective = self.objective
        if isinstance(objective, SFT) and objective.normalization == "constant":
            objective = SFT(objective.weighting)  # a constant fits the size of a step, not of an evaluation set
        self.model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        loss = denominator = 0.0
        for forests in dataloader:
            if forests:
                with self.accelerator.autocast():
                    loss += self.engine.evaluate(forests, objective, denominator=1.0).loss
                denominator += math.fsum(objective.denominator(forest) for forest in forests)
            self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss, denominator = self._sum_over_ranks(loss, denominator)
        metrics = {f"{metric_key_prefix}_loss": loss / denominator}
        return EvalLoopOutput(None, None, metrics, dataloader.sampler_of_trees.num_trees)

    def floating_point_ops(self, inputs: list[Forest]) -> float:
        """6 per parameter and tree token: forward and backward of the linear layers."""
        return 6.0 * sum(forest.num_tokens for forest in inputs) * self._num_parameters()

    def _num_parameters(self) -> int:
        return int(sum(parameter.numel() for parameter in self.model.parameters()))

    def _track_num_input_tokens(self, inputs: list[Forest]) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            (seen,) = self._sum_over_ranks(float(sum(forest.num_flat_tokens for forest in inputs)))
            self.state.num_input_tokens_seen += int(seen)

    def _sum_over_ranks(self, *values: float) -> list[float]:
        if self.args.world_size == 1:
            return list(values)
        device = self.args.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = torch.tensor(values, dtype=dtype, device=device)
        torch.distributed.all_reduce(total)
        return list(map(float, total.tolist()))

    # -- run, log, save ---------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Trains. With `resume_from_checkpoint` (a path, or True for the newest complete one) goes on bit-exactly.

        Raises:
            CheckpointError: no such checkpoint, an incomplete or damaged one, or one of a run on other data.
        """
        if self.train_dataset is None:
            raise ConfigError("training needs a train_dataset.")
        self._resumed_step = 0
        resume_from = self._find_checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
        if self.is_world_process_zero():
            sys.stdout.write(describe(self.args, self.train_dataset, self.data_facts) + "\n")
            sys.stdout.flush()
        return super().train(resume_from, trial, ignore_keys_for_eval)

    def _find_checkpoint(self, wanted: str | bool) -> str:
        if wanted is True:
            found, passed_over = seals.newest(self.args.output_dir)
            if found is None:
                because = f" ({passed_over[0]})" if passed_over else ""
                raise CheckpointError(f"{self.args.output_dir}: no complete checkpoint to resume from{because}.")
        else:
            found = Path(str(wanted))
        seal = seals.read_seal(found)
        seals.check_same_run(found, seal, self._run_facts())
        self._resumed_step = int(seal["step"])
        if self.args.max_tokens == AUTO and seal.get("max_tokens"):
            # The same cuts as before, whatever is free now: another budget rounds differently.
            self._resumed_budget, self._engine = int(seal["max_tokens"]), None
        return str(found)

    def _run_facts(self) -> dict[str, Any]:
        return {"data": self.data_facts.fingerprint, "num_trees": self.data_facts.num_trees, **self.args.order_facts()}

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """transformers writes; the seal comes last, and only then are older checkpoints removed."""
        run_dir = self._get_output_dir(trial)
        folder = Path(run_dir) / f"checkpoint-{self.state.global_step}"
        limit = self.args.save_total_limit
        if self.args.should_save:
            seals.break_seal(folder)
        self.accelerator.wait_for_everyone()
        self.args.save_total_limit = None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            facts = {"step": self.state.global_step, "max_tokens": self.engine.max_tokens, **self._run_facts()}
            seals.write_seal(folder, facts)
            seals.prune(run_dir, limit, self.state.best_model_checkpoint)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds throughput to the training logs; otherwise transformers' own."""
        if "loss" in logs:
            tree_tokens, flat_tokens = self._sum_over_ranks(*self._throughput.tokens)
            logs |= self._throughput.take(tree_tokens, flat_tokens)
        super().log(logs, start_time)


class _Throughput(TrainerCallback):
    """Tokens and seconds since the last log; evaluation and saving are not counted."""

    def __init__(self) -> None:
        self._tree_tokens = self._flat_tokens = 0
        self._seconds = self._started = 0.0

    @property
    def tokens(self) -> tuple[float, float]:
        return float(self._tree_tokens), float(self._flat_tokens)

    def start(self) -> None:
        self._started = time.perf_counter()

    def add(self, out: StepOutput) -> None:
        self._tree_tokens += out.num_tree_tokens
        self._flat_tokens += out.num_flat_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self, tree_tokens: float, flat_tokens: float) -> dict[str, float]:
        """The log entries for these tokens of all ranks; starts anew."""
        seconds = max(self._seconds, 1e-9)
        self._tree_tokens = self._flat_tokens = 0
        self._seconds = 0.0
        return {
            "tokens_per_second_flat": round(flat_tokens / seconds, 1),
            "tokens_per_second_tree": round(tree_tokens / seconds, 1),
            "share_ratio": round(flat_tokens / max(1.0, tree_tokens), 4),
            "tree_tokens": tree_tokens,
        }


def _sources(forests: list[Forest], limit: int = 5) -> list[str]:
    """Where the trees of a batch came from, the first few."""
    found: dict[str, None] = {}
    for forest in forests:
        for trajectory in forest.trajectories or ():
            if trajectory.source:
                found.setdefault(trajectory.source)
            if len(found) == limit:
                return list(found)
    return list(found)
