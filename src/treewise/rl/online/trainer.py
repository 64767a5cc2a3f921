"""`OnlineTrainer`, the loop: collect rollouts, credit them, train on them, save; a process that dies loses nothing.

An iteration is a deterministic function of the state before it: random streams are named by the seed, the iteration and
the tree. Completions and rewards are in a journal as soon as they are known, and a checkpoint holds all state between
two iterations. So a run that is killed anywhere goes on from its last checkpoint through what the journals hold, to
the weights that an undisturbed one has (bit for bit where kernels are deterministic, as on a CPU).

With `max_staleness` a thread collects the next iterations meanwhile (`ahead.py`), from a state of its own: what it has
observed up to an iteration becomes the run's when that iteration has trained.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from treewise.base.progress import busy_with
from treewise.distributed import ranks
from treewise.distributed.mesh import copy_first
from treewise.distributed.signals import StepAbandoned, stop_of_all
from treewise.engine.engine import TreeEngine
from treewise.engine.prepared import StepOutput
from treewise.errors import CheckpointError, ConfigError, StoppedError
from treewise.nn.gradients import clear_gradients
from treewise.objectives import Objective, PolicyGradient, logprob_gap
from treewise.rl.curriculum import TaskSampler
from treewise.rl.curriculum.signals import angles_of
from treewise.rl.online import records
from treewise.rl.online.ahead import Ahead, start_ahead, working
from treewise.rl.online.collecting import Collected, Collector, Sampled, token_progress
from treewise.rl.online.continuing import Rounds
from treewise.rl.online.curriculum import begin_curriculum
from treewise.rl.online.journal import (
    JOURNAL,
    Journal,
    LoopState,
    facts_of_updates,
    forget_foreign,
    journal_file,
    journals,
)
from treewise.rl.online.report import PrintedLine, account_of, figures, staleness_of, warnings_of
from treewise.rl.online.settings import OnlineSettings, checked_objective
from treewise.rl.samplers import Sampler, TransformersSampler
from treewise.rl.samplers.copied_weights import samplers_of
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import Calls, ChatTokens, RewardRunner
from treewise.rl.tasks.protocol import Task
from treewise.rl.update import Update, method_of, own_update
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.trainer.batches import collate
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.run_context import entered_run, stopped_error
from treewise.tree.trajectory import Trajectory

logger = logging.getLogger("treewise")

_BATCHES, _EVALUATION = 3, 4  # name random streams, beside those of curricula and of trees


class OnlineTrainer(TreeTrainer):
    """Improves a policy on a task: each iteration samples rollout trees, rewards and credits them, and trains on them.

    Parameters:
        model: a transformers causal language model, PEFT-wrapped or not.
        task: what is practised (`treewise.rl.tasks`).
        tokenizer: of the model.
        settings: of the loop.
        args: of training. Epochs, batch sizes and strategies for logging, evaluation and saving have no meaning here:
            `settings` holds theirs.
        objective: a loss, or its name; a name has `weighting="per_rollout"`. Rewards become advantages as
            `settings.advantages` says, else as the objective was published with (`usual_advantages`).
        sampler: None for the model itself, in this process (`TransformersSampler`). With `max_staleness` one that holds
            weights of its own, or None for a copy of the model's.
        reference: the model that a KL term is measured against; with adapters None is the model without them.
        callbacks: of transformers: trackers, or your own; `on_log` gets the figures of each iteration, after which
            `control.should_training_stop` ends the run: saved, and to be resumed.

    Attributes:
        state: transformers' own; a step of it is an iteration. loop: what the loop adds to it.

    Raises:
        ConfigError: settings that contradict one another; no room for the copy of the weights that is sampled from.
        UnsupportedModelError: the model cannot follow a tree.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        settings: OnlineSettings | None = None,
        args: TreeTrainingArguments | None = None,
        *,
        objective: Objective | str = "grpo",
        sampler: Sampler | None = None,
        reference: nn.Module | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.task, self.settings = task, settings or OnlineSettings()
        if not hasattr(task, "num_items"):
            raise ConfigError(f"task is a {type(task).__name__}; give one of treewise.rl.tasks, such as RowsTask.")
        args = TreeTrainingArguments() if args is None else args
        objective = checked_objective(objective, self.settings, args, reference, model)
        method_of(objective, self.settings.advantages)
        self.reference = reference
        super().__init__(model, args, objective=objective, processing_class=tokenizer, callbacks=list(callbacks))
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        if args.process_index == 0:
            self.add_callback(PrintedLine(sys.stdout.write))
        self.folder = Path(args.output_dir)
        given: Sampler = TransformersSampler(self.model) if sampler is None else sampler
        self.sampler, own, whole = samplers_of(
            given, self.model, is_ahead=self.settings.max_staleness > 0, is_parted=args.is_parted
        )
        self.rewards = RewardRunner(
            Calls(self.settings.reward_timeout, self.settings.reward_workers, self.settings.episodes_at_once),
            self.settings.on_reward_error,
            self.folder / ("reward_log.jsonl" if ranks.own() == 0 else f"reward_log-rank-{ranks.own()}.jsonl"),
        )
        self.rollouts = Collector(
            task=task,
            chat=ChatTokens(tokenizer, self.settings.chat_template),
            settings=self.settings,
            sampler=own,
            rewards=self.rewards,
            temperature=args.temperature,
            model=self.model,
            whole=whole,
        )
        self._ahead: Ahead | None = None
        self._journals: dict[int, Journal] = {}
        self._ended = time.perf_counter()  # the last iteration
        self.items = TaskSampler(self.settings.chosen_curriculum(), self.rollouts.num_items(), args.seed)
        self.loop = LoopState(SuccessBook(self.settings.settings_of_book()))
        self._num_begun = 0  # optimizer steps; parameters may have changed with the first

    @property
    def log_history(self) -> list[dict[str, float]]:
        """The figures of each iteration so far, and the evaluation before the first as iteration 0."""
        return self.state.log_history

    # -- the run ------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> dict[str, float]:  # type: ignore[override]
        """Runs all iterations that are left and saves the model; the figures of the last one.

        Parameters:
            resume_from_checkpoint: True goes on from the newest checkpoint and the journals after it (from the start
                where there is none); a path from that checkpoint; None starts anew.

        Raises:
            ConfigError: the folder holds a run, and no resuming was asked for.
            CheckpointError: a checkpoint that is damaged, or of another run.
            StoppedError: a signal ended the run, which can be resumed.
        """
        logs: dict[str, float] = {}
        with ExitStack() as stack:
            folders = (JOURNAL, records.ROLLOUTS, records.EVALUATIONS, records.DRAWS)
            stack.enter_context(entered_run(self.args, self._signals, *folders))
            stack.callback(self.sampler.close)
            stack.callback(self.rewards.close)
            stack.callback(lambda: self._ahead and self._ahead.close())
            self._begin(resume_from_checkpoint)
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            for iteration in range(self.loop.iteration, self.settings.iterations):
                logs = self._iteration_or_stop(iteration)
                is_last = iteration + 1 == self.settings.iterations or self.control.should_training_stop
                has_to_stop = not is_last and stop_of_all(self._signals)
                if has_to_stop or is_last or self.settings.is_due(iteration, "save_every"):
                    if self._ahead is not None and not is_last:
                        with suppress(StepAbandoned), self._signals.computing():
                            self._ahead.wait_for(iteration + 1)  # so the journal holds all that older weights sampled
                    self._save_loop()
                if has_to_stop:
                    raise self._stopped()
                if is_last:
                    break
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            with working(self._ahead):
                self.save_model()
            if self.args.should_save:
                self.state.save_to_json(str(self.folder / contents.STATE))
        return logs

    def _iteration_or_stop(self, iteration: int) -> dict[str, float]:
        """An iteration, which a signal abandons in a lone process; several finish theirs. The run is then saved as it
        was before, unless an optimizer step was taken: then the journals since the checkpoint before hold what was
        sampled.
        """
        before = deepcopy(self.items.state_dict()), self.rewards.failures.copy(), self._num_begun
        try:
            with self._signals.computing():
                num_tokens = begin_curriculum(self) if iteration == 0 else None
                if num_tokens is not None:
                    self.loop.num_sampled += num_tokens
                    self._log({"check_tokens": float(num_tokens)})
                return self._iteration(iteration)
        except StepAbandoned:
            clear_gradients(self.model.parameters())
            items, failures, num_begun = before
            if self._ahead is None:
                self.rewards.failures = failures
                self.items.load_state_dict(items)
            if (self.loop.iteration, self._num_begun) == (iteration, num_begun):
                self._save_loop()
            raise self._stopped() from None

    def _iteration(self, iteration: int) -> dict[str, float]:
        """Collects rollouts, credits them, trains on them; its figures, which it logs."""
        settings, number, tokenizer = self.settings, iteration + 1, self.rollouts.chat.tokenizer
        rounds = self.rollouts.rounds(self.loop, self.journal(number), self.loop.iteration)
        if iteration == 0 and settings.eval_every:
            found, held_out = self._evaluation(0, rounds)
            self._log({"iteration": 0.0, **found})
            self._ended = time.perf_counter()
            self._show("held out, before the first update", held_out)
        # Collect.
        sampled = self._sampled(iteration, rounds)
        collected, trees = sampled.collected, sampled.collected.trees
        rows = [each.tree.trajectories(source=f"iteration {number}, {each.tree.group}") for each in trees]
        if self.args.should_save:
            records.write_rollouts(self.folder, number, rows, tokenizer)
        # Credit, train.
        with working(self._ahead, version=number):
            update = self._credited([rows[kept] for kept in collected.kept])
            account = account_of(trees, rows, update, number)
            trained = {"optimizer_steps": 0.0} if update is None else self._train_on(update, iteration)
        num_updates = self.loop.num_updates + int(trained["optimizer_steps"])
        if sampled.state is None:
            self.observe(self.loop, collected)
        self.loop = sampled.state or self.loop
        self.loop.num_updates, self.state.global_step = num_updates, self.loop.iteration
        # Log.
        logs = {"iteration": float(number)} | figures(
            trees, account, self.loop.book, sampled.rounds.seconds, settings.success_at
        )
        logs |= trained | collected.figures()
        logs |= {name: float(np.mean(values)) for name, values in sampled.tally.metrics.items()}
        if self._ahead is not None:
            logs |= {"staleness": staleness_of(update, iteration), "seconds_waiting": self._ahead.seconds_waited}
            self._ahead.seconds_waited = 0.0
        logs["seconds_iteration"], self._ended = time.perf_counter() - self._ended, time.perf_counter()
        logs["learning_rate"] = float(self.lr_scheduler.get_last_lr()[0])
        held_out = []
        if settings.is_due(iteration, "eval_every"):
            found, held_out = self._evaluation(number, rounds)
            logs |= found
        self._log(logs)
        if settings.show_every and (iteration == 0 or settings.is_due(iteration, "show_every")):
            self._show("sampled", records.best_and_worst(rows, tokenizer))
        self._show("held out", held_out)
        if self.args.should_log:
            gap, limit = logs.get("logprob_gap", 1.0), settings.logprob_gap_limit
            for line in warnings_of(trees, account, update, self.loss_objective, gap, limit):
                logger.warning("iteration %d: %s", number, line)
        self._journals.pop(number)
        return logs

    def journal(self, iteration: int) -> Journal:
        """Of an iteration, one for all that writes into it; 0: of what comes before the first."""
        if iteration not in self._journals:
            self._journals[iteration] = Journal(journal_file(self.folder, iteration), self._facts_of_updates())
        return self._journals[iteration]

    # -- its parts ----------------------------------------------------------------------------------------------------

    def _sampled(self, iteration: int, rounds: Rounds) -> Sampled:
        """The rollouts of an iteration: collected now, or by the thread that collects ahead.

        Raises:
            TaskError: more rewards failed than may.
        """
        if self.settings.max_staleness:
            if self._ahead is None:
                self._ahead = start_ahead(self, iteration)
            return self._ahead.take(iteration)
        self.rewards.begin(self.state)
        budget, hidden = self.rollouts.budget(self.loop), bool(self.args.disable_tqdm)
        with token_progress(f"iteration {iteration + 1}", budget, hidden=hidden) as advance:
            advancing = replace(rounds, progress=advance)
            collected = self.rollouts.collect(self.items, self.loop, self.args.seed, iteration, advancing)
        if self.items.curriculum.measures_angles:
            prompts = [each.tree.prompt_ids for each in collected.trees]
            collected.angles = angles_of(self.engine, prompts, self.items.memory["num_shared"]).total.tolist()
        return Sampled(collected, self.rewards.tally, rounds)

    def _credited(self, rows: Sequence[list[Trajectory]]) -> Update | None:
        """The rows with advantages and the log-probs that the objective needs; None where nothing is left to train."""
        settings = self.settings
        with self.runner.scoring():
            update = own_update(
                [own for own in rows if own],
                self.loss_objective,
                self.engine,
                num_updates=settings.updates_per_iteration,
                old_logprobs=settings.old_logprobs,
                reference=self.reference_engine,
                method=settings.advantages,
                settings=settings.advantages_settings,
                drop_flat_groups=settings.drop_flat_groups,
            )
        return update if update.trees else None

    def _train_on(self, update: Update, iteration: int) -> dict[str, float]:
        """The optimizer steps of an iteration, and what is logged of them. Of several processes each trains its part of
        a step.

        Raises:
            NonFiniteError: a loss or gradient that is not finite, as the arguments say.
        """
        logs = dict[str, float]()
        if not isinstance(self.loss_objective, PolicyGradient):  # which measures it in its first step
            with self.runner.scoring():
                logs["logprob_gap"] = logprob_gap(self.engine.scored([row for own in update.trees for row in own]))
        self.train_dataset = update.trees  # with the first of which processes measure a budget
        started, runner = time.perf_counter(), self.runner
        outs, norms = list[StepOutput | None](), list[float]()
        merges = self.args.merge_across_trees and getattr(self.loss_objective, "weighting", "once") != "once"
        for batch in self.settings.batches(len(update.trees), (self.args.seed, iteration, _BATCHES)):
            step = self.loop.num_updates + len(norms) + 1
            trees = [update.trees[index] for index in batch]
            own = trees if self._placer is not None else trees[self.args.data_index :: self.args.data_size]
            clear_gradients(self.model.parameters())
            prepared = self._prepare(collate(own, merges))
            runner.begin_step([prepared], step)
            outs.append(runner.train_batch(prepared))
            norms.append(runner.end_step())
            self._num_begun += 1
            self.optimizer.step()
            self.lr_scheduler.step()
        clear_gradients(self.model.parameters())
        done = [out for out in outs if out is not None]
        tree_tokens, flat_tokens = sum(out.num_tree_tokens for out in done), sum(out.num_flat_tokens for out in done)
        sums = runner.sum_over_batches(math.fsum(out.loss for out in done), tree_tokens, flat_tokens)
        logs |= {
            "optimizer_steps": float(len(norms)),
            "loss": sums[0] / len(norms),
            "grad_norm": math.fsum(norms) / len(norms),
            **runner.means.take(runner.sum_over_batches, is_alone=runner.ranks is None),
            "share_ratio": sums[2] / max(1, sums[1]),
            "seconds_update": time.perf_counter() - started,
        }
        if self._ahead is None:
            self.rollouts.hand_over()
        return logs

    def observe(self, loop: LoopState, collected: Collected) -> None:
        """Takes what an iteration sampled into a state."""
        outcomes = collected.outcomes(loop.book, self.settings.success_at)
        if self.args.should_save:
            records.write_draws(self.folder, loop.iteration + 1, self.settings.curriculum, collected, outcomes)
        self.items.observe(outcomes)
        collected.count_in(loop, self.settings.tokens_per_iteration)

    def _evaluation(self, iteration: int, rounds: Rounds) -> tuple[dict[str, float], list[records.Sample]]:
        """Figures of the held-out items, and the first of their samples, which are written."""
        self.rewards.begin(self.state)
        rounds = replace(rounds, version=iteration)
        has_own = self._ahead is not None and self.rollouts.sampler is self.sampler  # not the model at hand
        newest = self._ahead.newest() if self._ahead is not None and has_own else nullcontext()
        with busy_with(f"evaluation after iteration {iteration}"), newest:
            found, samples = self.rollouts.evaluation(rounds, self.args.seed + _EVALUATION)
        if samples and self.args.should_save:
            records.write_evaluation(self.folder, iteration, samples)
        return found, samples[: records.NUM_SHOWN]

    @cached_property
    def reference_engine(self) -> TreeEngine | None:
        """Of the model that a KL term is measured against, where one was given."""
        if self.reference is None:
            return None
        args = self.args
        return TreeEngine(self.reference.to(args.device), args.max_tokens, args.attention, temperature=args.temperature)

    # -- what people see ----------------------------------------------------------------------------------------------

    def _log(self, logs: dict[str, float]) -> None:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, dict(logs))

    def _show(self, title: str, samples: Sequence[records.Sample]) -> None:
        if samples and self.settings.show_every and self.args.process_index == 0:
            sys.stdout.write(records.lines_of(title, samples))

    # -- begin, save, stop --------------------------------------------------------------------------------------------

    def _begin(self, wanted: str | bool | None) -> None:
        """Optimizer, schedule and state of a new run, or of the one that is resumed."""
        copy_first(self.model, self.args.device)
        self.train_dataset = [self.rollouts.example()]  # what sharding is checked and a budget is measured with
        self.create_optimizer_and_scheduler(self.settings.iterations * self.settings.updates_per_iteration)
        found = None
        if wanted:
            found = self._checkpoints.find(wanted, may_begin=True)
        elif ranks.on_first_rank(lambda: bool(store.checkpoints(self.folder) or journals(self.folder))):
            raise ConfigError(f"{self.folder} holds an online run: --resume or --overwrite it, or choose another.")
        if found is not None:
            self.runner.resume_budget(found.max_tokens)
            self.state = TrainerState.load_from_json(str(found.folder / contents.STATE))
            own = self.state.stateful_callbacks.pop(LoopState.__name__, None)
            if not isinstance(own, dict):
                raise CheckpointError(f"{found.folder}: not a checkpoint of an online run.")
            self._load_from_checkpoint(str(found.folder))
            self._load_optimizer_and_scheduler(str(found.folder))
            self._load_rng_state(str(found.folder))
            self.loop = LoopState.from_json(own)
            self.rewards.failures.update(self.loop.failures)
            self.items.load_state_dict(self.loop.curriculum)
        ranks.on_first_rank(lambda: forget_foreign(self.folder, self.loop.iteration, self._facts_of_updates()))
        self.rollouts.hand_over()  # a server may hold those of another run
        self.state.max_steps = self.settings.iterations

    def _save_loop(self) -> None:
        """One checkpoint with all state; journals of the iterations before it are no longer needed."""
        if self.loop.iteration == self._checkpoints.last_step:
            return
        if self._ahead is None:
            self.loop.failures = dict(self.rewards.failures)
            self.loop.curriculum = self.items.state_dict()
        with working(self._ahead):
            self._save_checkpoint(self.model, None)
        if self.args.should_save and self._checkpoints.last_step == self.loop.iteration:
            for path in journals(self.folder, self.loop.iteration):
                path.unlink()

    def _exporters(self) -> list[ExportableState]:
        return [self.loop]

    def _run_facts(self) -> dict[str, Any]:
        return {
            "model": self._fingerprint,
            "task": self.task.name,
            "seed": self.args.seed,
            "online_settings": json.dumps(self.settings.sampling_facts(), sort_keys=True, default=str),
        }

    def _facts_of_updates(self) -> str:
        num_updates = self.settings.iterations * self.settings.updates_per_iteration
        return facts_of_updates(self.args, num_updates, self.loss_objective, self._run_facts())

    def _stopped(self) -> StoppedError:
        checkpoints = store.checkpoints(self.folder)
        where = f"saved in {checkpoints[-1]} and the journal" if checkpoints else "the journal holds what was sampled"
        return stopped_error(self._signals, f"stopped after iteration {self.loop.iteration}; {where}.")
