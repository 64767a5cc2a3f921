"""`TreeTrainer`: transformers' loop, with the engine in place of forward and backward.

It holds hooks of transformers alone, each of a few lines. The work is done by objects that it owns: `StepRunner` (a
step: begun, trained, ended), `PreparedSteps` (which trees this rank trains, planned a step ahead), `CheckpointManager`
and `Throughput`. Optimizer, schedule, callbacks, trackers, LoRA and the format
of saved models are transformers' own.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DynamoBackend
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from typing_extensions import override

from treewise.base import features
from treewise.base.progress import busy_with
from treewise.distributed import ranks
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError
from treewise.nn.device import without_accelerates_fsdp
from treewise.nn.gradients import clear_gradients
from treewise.nn.platform.releases import clips_by_accelerator
from treewise.nn.wrapped import is_peft
from treewise.objectives import Objective
from treewise.objectives.rollouts import counts_rollouts
from treewise.objectives.sft import fixed_denominator
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.batches import (
    PreparedBatch,
    PreparedSteps,
    TreeLoader,
    TreeSampler,
    joined_batches,
    make_sampler,
)
from treewise.trainer.checkpoint import contents
from treewise.trainer.checkpoint.manager import CheckpointManager, ResumePoint
from treewise.trainer.checkpoint.store import read_manifest
from treewise.trainer.inputs import as_trees, check_given, check_mesh, check_preferences, loaded
from treewise.trainer.metrics import Throughput
from treewise.trainer.run_context import entered_run, stopped_error
from treewise.trainer.run_summary import num_optimizer_steps, print_summary, steps_per_epoch
from treewise.trainer.signals import StepAbandoned, StepEnd, StopSignals
from treewise.trainer.step import StepRunner, optimizer_bytes
from treewise.trainer.survey import DataFacts, survey
from treewise.tree.forest import Forest, forest_of

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer

    from treewise.trainer.saved_model import Reader

logger = logging.getLogger("treewise")


class TreeTrainer(Trainer):
    """Trains a causal language model on trees; gradients equal those of flat training.

    Parameters:
        model: any transformers causal language model that `TreeEngine` takes, PEFT-wrapped or not; or its name: a
            folder (also one of adapters), a Hub name or a `.gguf` file, loaded in float32 with its tokenizer.
        train_dataset: anything with a length and indices whose items are `Forest`, one `Trajectory`, a list of them,
            or training trees (what `load_trees` returns); or records, in anything that `load_trees` reads (paths,
            `datasets`, data frames, mappings), which are then loaded with `processing_class` as the tokenizer
            (the model's processor, if they hold images).
        eval_dataset: the same, or a mapping of names to such.
        processing_class: tokenizer or processor, or its name; by default the one that is saved with a model that was
            given, or whose records were given, by name.
        peft_config: new adapters (`peft.LoraConfig`, or a mapping of its settings); they alone are trained.
        render: how records are rendered (`RenderOptions`, or a mapping of its fields).
        objective: a loss (`tw.GRPO()`, ...), in place of the one that `args` names. Its metrics are logged.
        first_tree: loads the tree that sharding is checked and budgets are measured with, the same on every rank; by
            default the first of `train_dataset`, without which nothing is trained by `train`.
        reference: of `tw.DPO`, `tw.IPO` and `tw.KTO`, a model or its name. It scores the rows that lack `ref_logprobs`,
            once, before the first step; None: the trained model does, as it starts.

    Attributes:
        model_files: of the run's folder, the names of the files that were saved as the model.
        uploaded: the commit of the model at the end, with `push_to_hub`; None before.
        readers: who reads saved models back besides transformers and PEFT (`saved_model.Reader`).

    Raises:
        ConfigError: settings that contradict one another, an empty data set, or parameters trained beside adapters,
            which no file would hold.
        UnsupportedModelError: the model cannot follow a tree.
    """

    args: TreeTrainingArguments
    model: Any  # None after a trial of hyperparameter_search
    control: TrainerControl
    optimizer: "AcceleratedOptimizer"
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    model_files: Sequence[str] = ()
    uploaded: Any = None
    readers: "Sequence[Reader]" = ()

    def __init__(
        self,
        model: nn.Module | str | Path | None = None,
        args: TreeTrainingArguments | None = None,
        *,
        train_dataset: object = None,
        eval_dataset: object = None,
        objective: Objective | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None = None,
        peft_config: object = None,
        render: object = None,
        reference: PreTrainedModel | str | Path | None = None,
        first_tree: Callable[[], Forest] | None = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        **unknown: object,
    ) -> None:
        args = TreeTrainingArguments() if args is None else args
        if not isinstance(args, TreeTrainingArguments):
            raise ConfigError(f"args is a {type(args).__name__}; give tw.TreeTrainingArguments.")
        check_given(model, model_init, train_dataset, objective, unknown)
        model, processing_class = loaded(model, processing_class, train_dataset, peft_config, args.seed)
        train_dataset = as_trees("train_dataset", train_dataset, processing_class, render)
        eval_dataset = as_trees("eval_dataset", eval_dataset, processing_class, render)
        # transformers writes the result of a trial of hyperparameter_search into `objective`.
        self._own_objective, self._given_first_tree = objective, first_tree
        self._reference = (
            features.load_model.load_weights(str(reference)) if isinstance(reference, str | Path) else reference
        )
        loss = objective or args.sft_objective()
        check_preferences(train_dataset, loss)
        train_dataset, eval_dataset = (_with_whole_rollouts(each, loss) for each in (train_dataset, eval_dataset))
        if getattr(loss, "needs_whole_groups", False):
            args.balance_ranks = False  # trees stay whole on a rank, and so do the pairs in them
        self._signals = StopSignals(may_abandon=args.world_size == 1)
        self._throughput, self._norm = Throughput(), 0.0  # of the gradient of the present step
        check_mesh(model, args)
        self._data_size = args.data_size
        use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        with without_accelerates_fsdp():
            super().__init__(
                model=model,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                model_init=model_init,
                callbacks=[StepEnd(self._signals, self._throughput.end_step), *(callbacks or [])],
                optimizers=optimizers,
            )
        # accelerate would compile the model as a whole, which no tree runs through; `StepRunner` compiles its layers.
        self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
        if use_cache is not None:
            self.model.config.use_cache = use_cache  # transformers turns it off, also in what is saved
        if is_peft(self.model):
            features.saved_weights.refuse_unsaved(self.model)
            features.adapters.warn_of_parted_tables(self.model)
        self.placer: Any = None  # ranks take trees in turn
        if args.places_trees:
            self.placer = features.many_ranks.make_placer(args, self.model, self.loss_objective)
        self._steps = PreparedSteps(self._prepare, args, self._epoch_from)
        self._fingerprint = contents.fingerprint(self.model)
        self._checkpoints = CheckpointManager(args, self._run_facts, self.verify_saved)
        self._resumed: ResumePoint | None = None
        self._runner = self._new_runner()

    # -- objects ------------------------------------------------------------------------------------------------------

    @property
    def runner(self) -> StepRunner:
        """The runner of the present model, which `model_init` makes anew for each training."""
        if self._runner.model is not self.model:
            self._runner = self._new_runner()
        return self._runner

    def _new_runner(self) -> StepRunner:
        runner = StepRunner(
            self.model,
            self.loss_objective,
            self.args,
            self._first_tree,
            autocast=self.accelerator.autocast,
            reserve_bytes=optimizer_bytes(self.model, self.optimizer, self.args.optimizer_name),
            processor=self.processing_class,
        )
        runner.resume_budget(self._resumed.max_tokens if self._resumed else None)
        return runner

    def _first_tree(self) -> Forest:
        given = self._given_first_tree
        return forest_of(self.train_dataset[0]) if given is None else given()

    @property
    def engine(self) -> TreeEngine:
        """The engine of the present model."""
        return self.runner.engine

    @property
    def loss_objective(self) -> Objective:
        """The loss of this run: the one that was given, or the one that `args` name."""
        return self._own_objective or self.args.sft_objective()

    @cached_property
    def data_facts(self) -> DataFacts:
        """Sizes and fingerprint of the training data, from one pass over it."""
        return survey(self.train_dataset)

    # -- data ---------------------------------------------------------------------------------------------------------

    def _score_references(self) -> None:
        """Scores the data of a preference objective by its reference, before the first step."""
        if not getattr(self.loss_objective, "is_on_preferences", False):
            return
        own = (self.loss_objective, self.model, self._reference, self.args, self.processing_class)
        for name in ("train_dataset", "eval_dataset"):
            setattr(self, name, features.references.with_references(getattr(self, name), *own))

    @override
    def get_train_dataloader(self) -> TreeLoader:
        num_trees = len(self.train_dataset)
        sampler = make_sampler(self.args, num_trees)
        # transformers sets the epoch before each one, but earlier versions not in one that is resumed in its middle.
        sampler.set_epoch((self._resumed.step if self._resumed else 0) // steps_per_epoch(self.args, num_trees))
        return TreeLoader(self.args, self.train_dataset, sampler, self.loss_objective)

    @override
    def get_eval_dataloader(self, eval_dataset: str | Sequence[object] | None = None) -> TreeLoader:
        self._score_references()
        dataset = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        dataset, args = self.eval_dataset if dataset is None else dataset, self.args
        if dataset is None:
            raise ConfigError("evaluation needs an eval_dataset.")
        dataset = _with_whole_rollouts(dataset, self.loss_objective)
        own = (len(dataset), args.per_device_eval_batch_size, None, args.data_index, args.data_size)
        return TreeLoader(args, dataset, TreeSampler(*own), self.loss_objective)

    get_test_dataloader = get_eval_dataloader

    @override
    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Forest]], num_batches: int, device: torch.device
    ) -> tuple[list[PreparedBatch], float]:
        """The batches of one optimizer step, and what its sum of token losses is divided by, on all ranks."""
        step = self.state.global_step
        with self._throughput.waiting_for_batches():
            batches = self._steps.next_step(epoch_iterator, step)
        if not batches:  # asked for beyond the epoch, as loops before 5.3 do in one that is resumed in its middle
            return batches, 0.0
        with self._signals.computing():
            return batches, self.runner.begin_step(batches, step + 1)

    def _prepare(self, batches: list[list[Forest]]) -> list[PreparedBatch]:
        """This rank's part of the batches of a step, with all that the host computes for it."""
        joined = joined_batches(batches, self.args, self.loss_objective)
        parts = joined if self.placer is None else [self.placer.own_part(batch) for batch in joined]
        return [self.runner.prepare(own, self._throughput.flops_of(self.model, own)) for own in parts]

    def _epoch_from(self, step: int) -> Iterator[list[Forest]] | None:
        """The epoch that begins with a step; None where the run ends before."""
        loader = self.callback_handler.train_dataloader  # that of a subclass may be of another class
        return loader.begin_next_epoch() if step < self.state.max_steps and isinstance(loader, TreeLoader) else None

    @override
    def floating_point_ops(self, inputs: PreparedBatch) -> float:
        return self._throughput.add_flops(self.model, inputs)

    @override
    def _track_num_input_tokens(self, inputs: PreparedBatch) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            (seen,) = self.runner.sum_over_batches(float(sum(forest.num_flat_tokens for forest in inputs.forests)))
            self.state.num_input_tokens_seen += int(seen)

    # -- model --------------------------------------------------------------------------------------------------------

    @override
    def create_optimizer(self, *args: object, **kwargs: object) -> torch.optim.Optimizer:
        """Shards the model first, if asked for: the optimizer is made of the shards."""
        self.runner.spread(self.args.shard_settings())
        return super().create_optimizer(*args, **kwargs)

    @override
    def _wrap_model(
        self, model: torch.nn.Module, training: bool = True, dataloader: TreeLoader | None = None
    ) -> torch.nn.Module:
        spread = self.runner.ranks
        if spread is None or not spread.is_spread:
            return super()._wrap_model(model, training, dataloader)
        sharded_model = features.fsdp.ShardedModel
        return model if isinstance(model, sharded_model) else sharded_model(model)

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def training_step(
        self, model: torch.nn.Module, inputs: PreparedBatch, num_items_in_batch: float | None = None
    ) -> torch.Tensor:
        """Forward and backward of one batch; its part of the step's loss, times the batches that will be averaged."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        with self._signals.computing():
            out = self.runner.train_batch(inputs)
        if out is not None:
            self._throughput.add(out)
        if self.accelerator.sync_gradients:
            self._norm = self.runner.end_step()
        return torch.tensor(0.0 if out is None else out.loss * self._data_size, device=self.accelerator.device)

    @override
    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | None = None) -> float:
        """The norm of the gradient, which is clipped by then (`StepRunner.end_step`)."""
        return self._norm

    _clip_grad_norm = _get_grad_norm

    @override
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if clips_by_accelerator():
            self.accelerator.clip_grad_norm_ = lambda *_, **__: self._norm

    @override
    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: object, *args: object, **kwargs: object
    ) -> None:
        super()._maybe_log_save_evaluate(tr_loss, self._norm, *args, **kwargs)

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.runner.means.take(self.runner.sum_over_batches, is_alone=self.runner.ranks is None)
            logs |= self._throughput.take(*self.runner.sum_over_batches(*self._throughput.tokens))
        super().log(logs, start_time)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @busy_with("evaluation")
    @override
    def evaluation_loop(
        self,
        dataloader: TreeLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The loss over all trees of the loader: one mean, however they are cut into batches and ranks."""
        objective: Any = self.loss_objective
        if fixed_denominator(objective) is not None:  # a constant fits the size of a step, not of an evaluation set
            objective = replace(objective, normalization="token_mean", constant=None)
        self.model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        objective = self.runner.with_baseline(objective, (forests or None for forests in dataloader))
        loss = denominator = 0.0
        for forests in dataloader:
            with self._signals.computing():
                own_loss, own_denominator = self.runner.evaluate_batch(forests, objective)
            loss, denominator = loss + own_loss, denominator + own_denominator
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss, denominator = self.runner.sum_over_batches(loss, denominator)
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": loss / denominator}, dataloader.num_trees)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        optimizer, scheduler, exporters = self.optimizer, self.lr_scheduler, self._exporters()
        run = contents.RunState(
            self.args, self.model, optimizer, scheduler, self.state, exporters, self.processing_class
        )
        with busy_with("saving a checkpoint"):
            self._checkpoints.save(run, Path(self._get_output_dir(trial)), self.engine.max_tokens)

    def _exporters(self) -> list[Any]:
        """Whose state a checkpoint holds, beside transformers' own of the loop."""
        return [*self.callback_handler.callbacks, self.control]

    def _run_facts(self) -> dict[str, Any]:
        """What a run that is resumed must agree on."""
        data = {"data": self.data_facts.fingerprint, "num_trees": self.data_facts.num_trees}
        dates = {contents.TEMPLATE_DATES: ", ".join(self.data_facts.dates)} if self.data_facts.dates else {}
        return {**dates, **data, "model": self._fingerprint, **self.args.order_facts()}

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        names = contents.save_model(folder, self.model, self.processing_class, self.args)
        if folder == Path(self.args.output_dir):
            self.model_files = names

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model, and with `push_to_hub` uploads it; an upload that fails is a warning."""
        with busy_with("saving the model"):
            super().save_model(output_dir, _internal_call=True)
            self.verify_saved(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.uploaded = features.hub.upload_at_the_end(self)

    def verify_saved(self, folder: Path) -> None:
        """Holds a saved model against the one in memory (`saved_model.py`), where `verify_saves` asks for it."""
        if not (self.args.verify_saves and features.is_there("verified_saves")):
            return
        others, engine = self.runner.ranks, self.runner.engine
        needs_others = others is not None and (others.is_spread or others.context is not None)
        if not needs_others:  # an engine of its own: a budget that was measured on this tree would stay
            engine = TreeEngine(self.model, None, self.args.attention, temperature=self.args.temperature, check=False)
        with self.runner.scoring(), self.accelerator.autocast() if needs_others else nullcontext():
            rows = self._first_tree().trajectories if self.train_dataset is not None or self._given_first_tree else []
            saved = features.verified_saves.SavedFolder(folder, readers=self.readers)
            logger.info("%s", features.verified_saves.verify_saved(saved, self.model, rows, engine))

    @override
    def push_to_hub(self, commit_message: str | None = None, **card: object) -> Any:
        """Saves and uploads the model; the commit. card: of `create_model_card`."""
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model(_internal_call=True)
        self.uploaded = features.hub.upload(self, commit_message or "End of training", **card)
        return self.uploaded

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        features.saved_weights.load_weights(self.model, Path(resume_from_checkpoint))

    @override
    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        ranks.on_first_rank(lambda: read_manifest(best))
        features.saved_weights.load_weights(self.model, best)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            features.resume.load_states(Path(checkpoint), self.model, self.optimizer, self.lr_scheduler)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            features.resume.load_random_state(Path(checkpoint))

    @override
    def _init_training_state(self, max_steps: int, *args: object, **kwargs: object) -> object:
        logging.getLogger("transformers.trainer_utils").disabled = True  # would warn where intervals differ
        try:
            return super()._init_training_state(max_steps, *args, **kwargs)
        finally:
            logging.getLogger("transformers.trainer_utils").disabled = False

    # -- a run --------------------------------------------------------------------------------------------------------

    @override
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains. With `resume_from_checkpoint` (a path, or True for the newest complete one) goes on bit-exactly.

        Raises:
            CheckpointError: no such checkpoint, an incomplete or damaged one, or one of a run on other data.
            LostRankError: another process of the run is gone, or does not answer.
            StoppedError: a signal ended the run, after it was saved.
        """
        if self.train_dataset is None:
            raise ConfigError("training needs a train_dataset.")
        if self.model is None:  # after a trial of hyperparameter_search
            self.model = self.call_model_init(trial)
        self._score_references()
        with entered_run(self.args, self._signals):
            with suppress(StepAbandoned):  # before a step
                self._signals.start()
                self._resumed = self._checkpoints.find(resume_from_checkpoint)
                self.runner.resume_budget(self._resumed.max_tokens if self._resumed else None)
                if self.args.ranks_per_batch * self.args.ep_size > 1 and self.data_facts.num_images:
                    self.engine.images.refuse()
                if self.is_world_process_zero():
                    resumed = self._resumed.folder if self._resumed else None
                    own = (self.args, self.train_dataset, self.data_facts, self.loss_objective)
                    print_summary(*own, self.model.config, resumed)
                if self._resumed and self._resumed.step >= num_optimizer_steps(self.args, len(self.train_dataset)):
                    end = self._resumed.folder  # its last weights, or the best ones, and its log
                    self._load_from_checkpoint(str(end))
                    self.state = TrainerState.load_from_json(str(end / contents.STATE))
                    if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
                        self._load_best_model()
                    logger.warning("%s is the end of the run: no step is left to train", end)
                    return TrainOutput(self.state.global_step, float("nan"), {})
                dtype = torch.bfloat16 if self.args.bf16 else next(self.model.parameters()).dtype
                width = getattr(self.model.config.get_text_config(), "hidden_size", None)
                self._throughput.begin_run(self.args.device, dtype, width)
                with self._steps.ended():
                    try:
                        result = super().train(self._resumed and str(self._resumed.folder), trial, ignore_keys_for_eval)
                    except StepAbandoned:
                        clear_gradients(self.model.parameters())
                        if self.state.global_step > self._checkpoints.last_step:
                            self._save_checkpoint(self.model_wrapped, trial)
                    else:
                        if self._signals.received is None or self.state.global_step >= self.state.max_steps:
                            return result
            step = self._checkpoints.last_step
            saved = f"saved in {Path(self.args.output_dir) / f'checkpoint-{step}'}" if step else "nothing to save yet"
            raise stopped_error(self._signals, f"stopped after step {max(self.state.global_step, step)}; {saved}.")


def _with_whole_rollouts(dataset: Any, objective: Objective) -> Any:
    """The data set, with all rows of a rollout in one item where the loss counts rollouts."""
    return features.whole_rollouts.with_whole_rollouts(dataset, objective) if counts_rollouts(objective) else dataset
