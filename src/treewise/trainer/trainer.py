"""`TreeTrainer`: transformers' loop, with the engine in place of forward and backward.

What is overridden, and why: in `feeding` the loaders (a step is a planned set of trees) and `get_batch_samples` (one
denominator for the whole optimizer step), in `computing` `training_step` and `evaluation_loop` (the engine computes),
in `keeping` `_save_checkpoint` (a checkpoint is complete or none, and belongs to this run), here `train` (one run per
folder, signals) and `log` (throughput). Optimizer, schedule, clipping, callbacks, trackers, LoRA and the format of
checkpoints are transformers' own.
"""

import logging
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from treewise.distributed import ranks
from treewise.distributed.launcher import ended_with_launcher
from treewise.distributed.online_placement import OnlinePlacer, measures_costs, prior_of
from treewise.distributed.signals import StepAbandoned, StopSignals
from treewise.distributed.watchdog import RankWatch
from treewise.errors import ConfigError, StoppedError
from treewise.nn.flops import flop_model
from treewise.nn.gradients import clear_gradients
from treewise.objectives import Objective
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import contents
from treewise.trainer.checkpoint import store as seals
from treewise.trainer.checkpoint.manager import KeepingTrainer
from treewise.trainer.metrics import MetricMeans
from treewise.trainer.nonfinite import Faults
from treewise.trainer.run_lock import RunLock
from treewise.trainer.run_summary import describe, num_optimizer_steps
from treewise.trainer.throughput import Throughput

logger = logging.getLogger("treewise")


class TreeTrainer(KeepingTrainer):
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
        self.objective = objective or args.objective()
        self._engine = None
        self._throughput = Throughput()
        self._means = MetricMeans()
        self._facts = None
        self._faults = Faults(args.nonfinite, args.max_skipped_steps, args.spike_factor, self._aside(args))
        self._signals = StopSignals(may_abandon=args.world_size == 1)
        self._forests = []
        self._is_loss_finite = True
        self._saved_step = 0
        self._resumed_step = 0
        self._resumed_budget = None
        use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            callbacks=[self._throughput, _StepEnd(self), *(callbacks or [])],
            optimizers=optimizers,
        )
        if use_cache is not None:
            self.model.config.use_cache = use_cache  # transformers turns it off, also in what is saved
        self._shard_settings = args.shard_settings()
        self._ends = None
        self._placer = None
        self._placed = None
        self._model_facts = contents.fingerprint(self.model) if self.model is not None else ""
        _ = self.engine
        if args.places_trees:
            budget = args.max_tokens if isinstance(args.max_tokens, int) else None
            weighting = getattr(self.objective, "weighting", "per_trajectory")
            self._placer = OnlinePlacer(
                prior_of(flop_model(self.model)),
                budget,
                weighting,
                fits=measures_costs(args.balance_costs, args.device, args.full_determinism),
                in_lockstep=self._shard_settings is not None,
            )

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Trains. With `resume_from_checkpoint` (a path, or True for the newest complete one) goes on bit-exactly.

        Raises:
            CheckpointError: no such checkpoint, an incomplete or damaged one, or one of a run on other data.
            LostRankError: another process of the run is gone, or does not answer.
        """
        if self.train_dataset is None:
            raise ConfigError("training needs a train_dataset.")
        self._resumed_step = self._saved_step = 0
        with ExitStack() as stack:
            ranks.on_first_rank(lambda: self._enter_folder(stack))
            watch = stack.enter_context(RankWatch())
            stack.enter_context(watch.explaining(self.args.ddp_timeout))
            self._signals = stack.enter_context(StopSignals(may_abandon=self.args.world_size == 1))
            stack.enter_context(ended_with_launcher(self._signals))
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
                clear_gradients(self.model.parameters())
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
        self.state = TrainerState.load_from_json(str(Path(checkpoint) / contents.STATE))
        logger.warning("%s is the end of the run: no step is left to train", checkpoint)
        return TrainOutput(self.state.global_step, float("nan"), {})

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


class _StepEnd(TrainerCallback):
    """What all ranks do together after each step: fit the costs of placements, look for a signal to any of them."""

    def __init__(self, trainer: TreeTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer._placer is not None:
            self._trainer._placer.on_step_end(state.global_step)
        signals = self._trainer._signals
        numbers = ranks.on_every_rank(lambda: signals.received)
        received = next((number for number in numbers if number is not None), None)
        if received is not None:
            signals.received = received
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
