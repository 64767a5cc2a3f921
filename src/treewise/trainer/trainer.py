"""`TreeTrainer`: transformers' loop, with the engine in place of forward and backward.

What is overridden, and why: the loaders (a step is a planned set of trees), `get_batch_samples` (one denominator for
the whole optimizer step), `training_step` and `evaluation_loop` (the engine computes), `log` (throughput),
`_save_checkpoint` and `train` (a checkpoint is complete or none, and belongs to this run). Optimizer, schedule,
clipping, callbacks, trackers, LoRA and the format of checkpoints are transformers' own.

Data-parallel ranks each compute their trees and add their gradients up once per optimizer step. The model is wrapped
by DistributedDataParallel, which hands rank 0's parameters to all; its gradient hooks sleep, because the engine calls
the decoder and not the wrapper.
"""

import logging
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from treewise.budget import AUTO
from treewise.engine import TreeEngine
from treewise.errors import CheckpointError, ConfigError, DataError, StoppedError
from treewise.flops import flop_model
from treewise.forest import Forest
from treewise.objectives import SFT, Objective
from treewise.trainer import checkpoint as seals
from treewise.trainer import ranks, saving, states
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.batches import DataFacts, TreeLoader, TreeSampler, forest_of, survey
from treewise.trainer.describe import describe, make_sampler, num_optimizer_steps, steps_per_epoch
from treewise.trainer.faults import Faults, drop_gradients, sources, unsound
from treewise.trainer.lock import RunLock
from treewise.trainer.means import MetricMeans
from treewise.trainer.placement import Placing, prior_of
from treewise.trainer.sharding import Ends, ShardedModel, ShardSettings, gradient_norm, shard, whole_state
from treewise.trainer.stop import StepAbandoned, StopSignals
from treewise.trainer.throughput import Throughput
from treewise.trainer.watch import RankWatch

logger = logging.getLogger("treewise")


class TreeTrainer(Trainer):
    """Trains a causal language model on trees; gradients equal those of flat training.

    Parameters:
        model: any transformers causal language model that `TreeEngine` takes, PEFT-wrapped or not.
        train_dataset: anything with a length and indices whose items are `Forest`, one `Trajectory`, a list of them,
            or training trees (what `load_trees` returns).
        eval_dataset: the same, or a mapping of names to such.
        objective: a loss (`tw.GRPO()`, ...), in place of the one that `args` names. Its metrics are logged.

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
        objective: Objective | None = None,
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
        self.objective: Objective = objective or args.objective()
        self._engine: TreeEngine | None = None
        self._throughput = Throughput()
        self._means = MetricMeans()
        self._facts: DataFacts | None = None
        self._faults = Faults(args.nonfinite, args.max_skipped_steps, args.spike_factor, self._aside(args))
        self._signals = StopSignals(may_abandon=args.world_size == 1)
        self._forests: list[Forest] = []  # of the step at hand, on this rank
        self._is_loss_finite = True
        self._saved_step = 0
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
            callbacks=[self._throughput, _StopAtStepEnd(self), *(callbacks or [])],
            optimizers=optimizers,
        )
        if use_cache is not None:
            self.model.config.use_cache = use_cache  # transformers turns it off, also in what is saved
        self._shard_settings = args.shard_settings()
        self._ends: Ends | None = None
        self._placing: Placing | None = None
        self._placed: tuple[Any, Iterator[list[Forest]]] | None = None  # an epoch's batches, and this rank's shares
        self._model_facts = saving.fingerprint(self.model) if self.model is not None else ""
        _ = self.engine
        if args.places_trees:
            budget = args.max_tokens if isinstance(args.max_tokens, int) else None
            weighting = getattr(self.objective, "weighting", "per_trajectory")
            self._placing = Placing(prior_of(flop_model(self.model)), budget, weighting)

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
                reserve_bytes=self._optimizer_bytes(),
                check=self._ends is None,  # a model that is sharded was probed before
            )
            if self._ends is not None:
                self._engine.keep_pace(ranks.gather_texts)
        return self._engine

    # -- sharding ---------------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer of the shards, where parameters are to be sharded: this is the last moment before it."""
        if self._shard_settings is not None and self._ends is None:
            self._shard(self._shard_settings)
        return super().create_optimizer(*args, **kwargs)

    def _shard(self, settings: ShardSettings) -> None:
        first = forest_of(self.train_dataset[0])
        self.engine.check(first)  # on the whole model
        dtype = torch.bfloat16 if self.args.bf16 else None
        self._ends = shard(self.model, self.engine.parts, self.args.device, settings, dtype)
        self._engine = None
        with self._together(trains=False), self.accelerator.autocast():
            self.engine.plan(first)  # measures the budget, where it is to be measured: all ranks at once

    @contextmanager
    def _together(self, trains: bool) -> Iterator[None]:
        """Around the walks of one batch: all ranks enter and leave, and run the same forwards and backwards."""
        if self._ends is None:
            yield
            return
        with self._ends.whole(trains):
            yield
            self.engine.finish_pace()

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self._ends is None:
            return super()._wrap_model(model, training, dataloader)
        return model if isinstance(model, ShardedModel) else ShardedModel(model)

    def _optimizer_bytes(self) -> int:
        """What an Adam will take for two moments of every trained parameter, where no optimizer has run yet."""
        if getattr(self.optimizer, "state", None):
            return 0
        trained = (each for each in self.model.parameters() if each.requires_grad)
        return 2 * sum(each.numel() * each.element_size() for each in trained)

    # -- which trees ------------------------------------------------------------------------------------------------

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
        if self._placing is None:
            return epoch_iterator
        if self._placed is None or self._placed[0] is not epoch_iterator:
            batches_per_step = self.args.gradient_accumulation_steps
            shares = self._placing.shares(epoch_iterator, self.state.global_step, batches_per_step)
            self._placed = epoch_iterator, shares
        return self._placed[1]

    def _denominator(self, forests: list[Forest], objective: Objective) -> float:
        if isinstance(objective, SFT) and objective.constant is not None:
            return objective.constant
        (total,) = self._sum_over_ranks(math.fsum(objective.denominator(forest) for forest in forests))
        if not total > 0:
            raise DataError(
                f"step {self.state.global_step + 1} has no trained token; leave these trees out: "
                f"{', '.join(sources(forests)) or 'unnamed'}."
            )
        return total

    # -- computing --------------------------------------------------------------------------------------------------

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
        trained = [forest for forest in inputs if self.objective.denominator(forest) > 0]
        loss = 0.0
        with self._together(trains=True):
            if trained:
                with self.accelerator.autocast(), self._measured(trained):
                    out = self.engine.step(trained, self.objective, denominator=denominator)
                self._throughput.add(out)
                self._means.add(out)
                loss = out.loss
        return loss

    def _measured(self, forests: list[Forest]) -> AbstractContextManager[None]:
        """Measures a step for the prices of placements; not of shards, whose passes wait for other ranks."""
        if self._placing is None or self._ends is not None or self._placing.is_fitted:
            return nullcontext()
        return self._placing.measured([self.engine.plan(forests)])

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
            drop_gradients(self.model.parameters())
        return norm

    def _clip_grad_norm(self, model: torch.nn.Module, max_norm: float | None = None) -> Any:
        if self._ends is None:
            return super()._clip_grad_norm(model)
        return gradient_norm(list(model.parameters()), self.args.max_grad_norm if max_norm is None else max_norm)

    def _suspects(self) -> list[str]:
        """Trajectories of the step whose log-probs are not finite, each computed alone."""
        with torch.no_grad(), self.accelerator.autocast():
            return [name for forest in self._forests for name in unsound(forest, self.engine.logprobs)]

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
            with self._together(trains=False), self.accelerator.autocast(), self._signals.computing():
                if forests:
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
        return ranks.sum_over(self.args.device, *values)

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
        self._resumed_step = self._saved_step = 0
        with ExitStack() as stack:
            ranks.on_first_rank(lambda: self._enter_folder(stack))
            stack.enter_context(RankWatch())
            self._signals = stack.enter_context(StopSignals(may_abandon=self.args.world_size == 1))
            resume_from = self._find_checkpoint(resume_from_checkpoint) if resume_from_checkpoint else None
            if self.is_world_process_zero():
                said = f"resuming from {resume_from}\n" if resume_from else ""
                sys.stdout.write(said + describe(self.args, self.train_dataset, self.data_facts) + "\n")
                sys.stdout.flush()
                self._warn_of_length()
            if resume_from and self._resumed_step >= num_optimizer_steps(self.args, len(self.train_dataset)):
                return self._already_trained(resume_from)
            try:
                result = super().train(resume_from, trial, ignore_keys_for_eval)
            except StepAbandoned:
                drop_gradients(self.model.parameters())
                if self.state.global_step > max(self._saved_step, self._resumed_step):
                    self._save_checkpoint(self.model_wrapped, trial)
            else:
                if self._signals.received is None or self.state.global_step >= self.state.max_steps:
                    return result
            raise self._stopped()

    def _enter_folder(self, stack: ExitStack) -> None:
        """Takes the run's folder, and clears what a killed run left in it."""
        stack.enter_context(RunLock(self.args.output_dir))
        for line in seals.recover(self.args.output_dir):
            logger.warning("%s", line)

    def _stopped(self) -> StoppedError:
        number = self._signals.received or 2
        step = max(self._saved_step, self._resumed_step)
        where = f"; saved in {Path(self.args.output_dir) / f'checkpoint-{step}'}" if step else "; nothing to save yet"
        error = StoppedError(f"{signal.Signals(number).name}: stopped after step {self.state.global_step}{where}.")
        error.exit_code = 128 + number
        return error

    def _already_trained(self, checkpoint: str) -> TrainOutput:
        """A run that had no step left: its last weights and its log, and no step more."""
        self._load_from_checkpoint(checkpoint)
        self.state = TrainerState.load_from_json(str(Path(checkpoint) / saving.STATE))
        logger.warning("%s is the end of the run: no step is left to train", checkpoint)
        return TrainOutput(self.state.global_step, float("nan"), {})

    def _find_checkpoint(self, wanted: str | bool) -> str:
        """The path of the checkpoint to resume from: rank 0 reads and judges it for all."""
        found, seal = ranks.on_first_rank(lambda: self._judged_checkpoint(wanted))
        self._resumed_step = int(seal["step"])
        if self.args.max_tokens == AUTO and seal.get("max_tokens"):
            # The same cuts as before, whatever is free now: another budget rounds differently.
            self._resumed_budget, self._engine = int(seal["max_tokens"]), None
        if self._placing is not None and seal.get("prices"):
            self._placing.restore(seal["prices"])
        return found

    def _judged_checkpoint(self, wanted: str | bool) -> tuple[str, dict[str, Any]]:
        if wanted is True:
            found, passed_over = seals.newest(self.args.output_dir)
            for reason in passed_over:
                sys.stderr.write(f"passed over: {reason}\n")
            if found is None:
                because = f" ({passed_over[0]})" if passed_over else ""
                raise CheckpointError(f"{self.args.output_dir}: no complete checkpoint to resume from{because}.")
        else:
            found = Path(str(wanted))
        seal = seals.read_seal(found)
        seals.check_same_run(found, seal, self._run_facts())
        return str(found), seal

    def _run_facts(self) -> dict[str, Any]:
        facts = {"data": self.data_facts.fingerprint, "num_trees": self.data_facts.num_trees}
        return {**facts, "model": self._model_facts, **self.args.order_facts()}

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Written aside, sealed, published; only then are older checkpoints removed."""
        run_dir = Path(self._get_output_dir(trial))
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        best = self.state.best_global_step
        if best and (best == self.state.global_step or (run_dir / f"checkpoint-{best}").is_dir()):
            self.state.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        facts = {"step": self.state.global_step, "max_tokens": self.engine.max_tokens, **self._run_facts()}
        if self._placing is not None:
            if self._ends is None:
                self._placing.fit(self.state.global_step)
            facts |= {"prices": self._placing.facts(), "num_ranks": ranks.count()}
        try:
            checkpoint = saving.save(self, run_dir, facts)
        except CheckpointError as error:
            if self.args.on_save_failure == "stop":
                raise
            logger.error("%s The run goes on without it.", error)
            return
        self._saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            seals.prune(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The model as `from_pretrained` reads it, gathered where it is sharded; the settings as JSON, where
        transformers would pickle them.
        """
        if self._ends is not None and state_dict is None:
            state_dict = whole_state(self.model)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.model.save_pretrained(folder, state_dict=state_dict)
            self._save_beside(folder)

    def _save_beside(self, folder: Path) -> None:
        """Tokenizer and settings."""
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        saving.write_arguments(folder, self.args)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Adapters are loaded as transformers loads them; weights by `saving.load_weights`, which leaves none out."""
        folder = Path(resume_from_checkpoint)
        if hasattr(self.model, "peft_config") and not (folder / saving.SHARDS).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            saving.load_weights(self.model, folder)

    def _load_best_model(self) -> None:
        if self._ends is None:
            super()._load_best_model()
        else:
            saving.load_weights(self.model, Path(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            saving.load_states(self, Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            states.load_random_state(Path(checkpoint), ranks.own())

    @staticmethod
    def _aside(args: TreeTrainingArguments) -> Path:
        """Where trees of steps that are not finite go."""
        rank = f".rank{args.process_index}" if args.world_size > 1 else ""
        return Path(args.output_dir) / f"nonfinite{rank}.jsonl"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds throughput to the training logs; otherwise transformers' own."""
        if "loss" in logs:
            logs |= self._means.take(self._sum_over_ranks)
            tree_tokens, flat_tokens = self._sum_over_ranks(*self._throughput.tokens)
            logs |= self._throughput.take(tree_tokens, flat_tokens)
        super().log(logs, start_time)


class _StopAtStepEnd(TrainerCallback):
    """Ends and saves the run after the step in which any rank was sent a signal."""

    def __init__(self, trainer: TreeTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signals = self._trainer._signals
        numbers = ranks.on_every_rank(lambda: signals.received)
        received = next((number for number in numbers if number is not None), None)
        if received is not None:
            signals.received = received
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
