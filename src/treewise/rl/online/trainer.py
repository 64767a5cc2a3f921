"""`OnlineTrainer`: sample trees, reward, credit, train; again and again, and nothing is lost when the process dies.

An iteration is a deterministic function of the state before it: random streams are named by the seed, the iteration and
the tree. Completions and rewards are in a journal as soon as they are known, and a checkpoint holds all state between
two iterations. So a run that is killed anywhere goes on from its last checkpoint through what the journals hold, to
the weights that an undisturbed one has (bit for bit where kernels are deterministic, as on a CPU).
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from treewise.distributed import ranks
from treewise.distributed.signals import StepAbandoned, StopSignals
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, StoppedError
from treewise.nn.gradients import clear_gradients
from treewise.objectives import Objective, PolicyGradient, logprob_gap
from treewise.objectives.registry import objective_named
from treewise.rl.checks import gap_warning
from treewise.rl.curriculum import TaskSampler
from treewise.rl.curriculum.angles import angles_of
from treewise.rl.curriculum.self_check import CheckReport
from treewise.rl.online import state as states
from treewise.rl.online.crediting import account_of, credited_rows, rows_of
from treewise.rl.online.curriculum import CurriculumCheck
from treewise.rl.online.draw_log import write_draws
from treewise.rl.online.items import pool_of
from treewise.rl.online.journal import Journal, journal_file, journals
from treewise.rl.online.practice import Practised, practise
from treewise.rl.online.processes import hand_over, same_weights
from treewise.rl.online.progress import token_progress
from treewise.rl.online.records import NUM_SHOWN, Sample, best_and_worst, lines_of, write_evaluation, write_rollouts
from treewise.rl.online.report import PrintedLine, figures, nothing_learned
from treewise.rl.online.rewarding import check_failures
from treewise.rl.online.rollout_factory import RolloutFactory
from treewise.rl.online.sampling import Rounds
from treewise.rl.online.settings import OnlineSettings, refuse_settings
from treewise.rl.online.state import LoopState
from treewise.rl.online.update import Updater
from treewise.rl.rollout_batch import method_of
from treewise.rl.samplers import Sampler, TransformersSampler
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import Calls, ChatTokens, RewardRunner
from treewise.rl.tasks.protocol import Task
from treewise.rl.update import Update, scored
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.nonfinite import NonFiniteGuard
from treewise.trainer.run_context import entered_run, stop_of_all, stopped_error
from treewise.tree.trajectory import Trajectory

logger = logging.getLogger("treewise")

_TREES, _BATCHES, _EVALUATION, _CHECK = 2, 3, 4, 6  # name random streams, beside those of curricula
OBJECTIVE = {"weighting": "per_rollout", "measure_entropy": True}  # of an objective that is given by its name


class OnlineTrainer:
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
        sampler: None for the model itself, in this process (`TransformersSampler`).
        reference: the model that a KL term is measured against; with adapters None is the model without them.
        callbacks: of transformers: trackers, or your own; `on_log` gets the figures of each iteration.

    Raises:
        ConfigError: settings that contradict one another; sharded parameters.
        UnsupportedModelError: the model cannot follow a tree.
    """

    def __init__(
        self,
        model: Any,
        task: Task,
        tokenizer: Any,
        settings: OnlineSettings | None = None,
        args: TreeTrainingArguments | None = None,
        *,
        objective: Objective | str = "grpo",
        sampler: Sampler | None = None,
        reference: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.task, self.settings = task, settings or OnlineSettings()
        args = TreeTrainingArguments() if args is None else args
        if int(args.world_size) > 1 and (args.shard_settings() is not None or args.ranks_per_batch * args.ep_size > 1):
            raise ConfigError(
                "an online run samples from the model in training, whole on every process; leave fsdp, tp_size, "
                "ep_size and context_size out. Recorded rollouts train models sharded by fsdp: treewise rl --data."
            )
        refuse_settings(args)
        self.args = args
        self.objective = _named(objective) if isinstance(objective, str) else objective
        method_of(self.objective, self.settings.advantages)
        self.reference = reference
        _check_reference(self.objective, reference, model)
        self._trainer = TreeTrainer(
            model, args, objective=self.objective, processing_class=tokenizer, callbacks=list(callbacks)
        )
        for callback in (PrinterCallback, ProgressCallback):
            self._trainer.remove_callback(callback)
        if args.process_index == 0:
            self._trainer.add_callback(PrintedLine(sys.stdout.write))
        self.model = self._trainer.model
        self.folder = Path(args.output_dir)
        self.sampler: Sampler = TransformersSampler(self.model) if sampler is None else sampler
        self.rewards = RewardRunner(
            Calls(self.settings.reward_timeout, self.settings.reward_workers),
            self.settings.on_reward_error,  # type: ignore[arg-type]
            self.folder / ("reward_log.jsonl" if ranks.own() == 0 else f"reward_log-rank-{ranks.own()}.jsonl"),
        )
        self.rollouts = RolloutFactory(
            task=task,
            chat=ChatTokens(tokenizer, self.settings.chat_template),
            settings=self.settings,
            sampler=self.sampler,
            rewards=self.rewards,
            temperature=args.temperature,
            model=self.model,
            eval_seed=args.seed + _EVALUATION,
        )
        self.state = LoopState(SuccessBook(self.settings.settings_of_book()))
        self._last_saved = 0  # iteration of the newest checkpoint
        self.items = TaskSampler(self.settings.chosen_curriculum(), pool_of(task, self.settings), args.seed)

    @property
    def log_history(self) -> list[dict[str, float]]:
        """The figures of each iteration so far, and the evaluation before the first as iteration 0."""
        return self._trainer.state.log_history

    @property
    def engine(self) -> TreeEngine:
        """What computes the updates, at the budget of now."""
        return self._trainer.engine

    # -- the run ------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> dict[str, float]:
        """Runs all iterations that are left and saves the model; the figures of the last one.

        Parameters:
            resume_from_checkpoint: True goes on from the newest checkpoint and the journals after it (from the start
                where there is none); a path from that checkpoint; None starts anew.

        Raises:
            ConfigError: the folder holds a run, and no resuming was asked for.
            CheckpointError: a checkpoint that is damaged, or of another run.
            StoppedError: a signal ended the run, which can be resumed.
        """
        signals = StopSignals(may_abandon=ranks.count() == 1)
        with ExitStack() as stack:
            stack.enter_context(entered_run(self.args, signals))
            stack.callback(self.sampler.close)
            stack.callback(self.rewards.close)
            updater = self._begin(resume_from_checkpoint)
            trainer = self._trainer
            trainer.control = trainer.callback_handler.on_train_begin(self.args, trainer.state, trainer.control)
            logs = self._iterations(updater, signals)
            trainer.control = trainer.callback_handler.on_train_end(self.args, trainer.state, trainer.control)
            trainer.save_model()
            if self.args.should_save:
                trainer.state.save_to_json(str(self.folder / contents.STATE))
        return logs

    def _iterations(self, updater: Updater, signals: StopSignals) -> dict[str, float]:
        """All iterations that are left, each saved where it is due; the figures of the last one.

        A signal abandons the iteration of a lone process, and several finish theirs. Either way the run is saved as it
        is between two iterations, unless an optimizer step of the abandoned one was taken: then the journals since the
        checkpoint before hold what was sampled.
        """
        logs: dict[str, float] = {}
        for iteration in range(self.state.iteration, self.settings.iterations):
            before = deepcopy(self.items.state_dict()), self.rewards.failures.copy(), updater.num_begun
            try:
                with signals.computing():
                    if iteration == 0:
                        self._begin_curriculum()
                    logs = self._iteration(iteration, updater)
            except StepAbandoned:
                clear_gradients(self.model.parameters())
                items, self.rewards.failures, num_begun = before
                self.items.load_state_dict(items)
                if (self.state.iteration, updater.num_begun) == (iteration, num_begun):
                    self._save(updater)
                raise self._stopped(signals) from None
            is_last = iteration + 1 == self.settings.iterations
            has_to_stop = not is_last and stop_of_all(signals)
            if has_to_stop or self._is_due(iteration, self.settings.save_every):
                self._save(updater)
            if has_to_stop:
                raise self._stopped(signals)
        return logs

    def _stopped(self, signals: StopSignals) -> StoppedError:
        checkpoints = store.checkpoints(self.folder)
        where = f"saved in {checkpoints[-1]} and the journal" if checkpoints else "the journal holds what was sampled"
        return stopped_error(signals, f"stopped after iteration {self.state.iteration}; {where}.")

    def _begin(self, wanted: str | bool | None) -> Updater:
        trainer = self._trainer
        same_weights(self.model)
        num_updates = self.settings.iterations * self.settings.updates_per_iteration
        trainer.create_optimizer_and_scheduler(num_updates)
        guard = NonFiniteGuard(
            self.args.nonfinite, self.args.max_skipped_steps, self.args.spike_factor, self.folder / "nonfinite.jsonl"
        )
        trainer.state.max_steps = self.settings.iterations
        if wanted:
            self._resume(wanted)
        elif ranks.on_first_rank(lambda: bool(store.checkpoints(self.folder) or journals(self.folder))):
            raise ConfigError(f"{self.folder} holds an online run; resume it, or choose another folder.")
        return Updater(trainer.runner, trainer.optimizer, trainer.lr_scheduler, guard, self.args)

    def _resume(self, wanted: str | bool) -> None:
        trainer = self._trainer
        found = ranks.on_first_rank(lambda: states.find_checkpoint(self.folder, wanted, self._facts(), self.args))
        if found is None:
            return
        folder, manifest = found
        trainer.runner.resume_budget(manifest.get("max_tokens"))
        trainer.state, self.state = states.load(folder, self.model, trainer.optimizer, trainer.lr_scheduler)
        trainer.state.max_steps = self.settings.iterations
        self._last_saved = self.state.iteration
        self.rewards.failures.update(self.state.failures)
        self.items.load_state_dict(self.state.curriculum)
        hand_over(self.sampler, self.model)

    def _save(self, updater: Updater) -> None:
        """One checkpoint with all state; journals of the iterations before it are no longer needed."""
        if self.state.iteration == self._last_saved:
            return
        trainer = self._trainer
        self.state.failures = dict(self.rewards.failures)
        self.state.curriculum = self.items.state_dict()
        exporters = [self.state]
        run = contents.RunState(
            self.args,
            self.model,
            updater.optimizer,
            updater.scheduler,
            trainer.state,
            exporters,
            trainer.processing_class,
        )
        facts = {"step": self.state.iteration, "max_tokens": trainer.engine.max_tokens, **self._facts()}
        contents.save(run, self.folder, facts)
        self._last_saved = self.state.iteration
        if self.args.should_save:
            store.prune(self.folder, self.args.save_total_limit, None)
            for path in journals(self.folder, self.state.iteration):
                path.unlink()

    def _facts(self) -> dict[str, Any]:
        return {
            "model": contents.fingerprint(self.model),
            "task": self.task.name,
            "seed": self.args.seed,
            "online_settings": states.facts_as_text(self.settings.sampling_facts()),
        }

    def _is_due(self, iteration: int, every: int) -> bool:
        return every > 0 and ((iteration + 1) % every == 0 or iteration + 1 == self.settings.iterations)

    # -- the curriculum -----------------------------------------------------------------------------------------------

    def check_curriculum(self, num_items: int, num_rollouts: int) -> CheckReport:
        """The self-check on a sample of the items: which signal predicts what, under the model as it is.

        Raises:
            DataError: fewer than 3 items have rewards.
        """
        return self._curriculum_check().run(num_items, num_rollouts)[0]

    def _curriculum_check(self) -> CurriculumCheck:
        return CurriculumCheck(
            items=self.items,
            settings=self.settings,
            engine=self.engine,
            objective=self.objective,
            reference=self._reference_engine(),
            new_trees=partial(self.rollouts.new_trees, (self.args.seed, 0, _CHECK)),
            prompt_of=self.rollouts.prompt_of,
            rounds=self.rollouts.rounds(self.state, Journal(journal_file(self.folder, 0))),
            rng=np.random.default_rng([self.args.seed, _CHECK]),
        )

    def _begin_curriculum(self) -> None:
        checked = self._curriculum_check().begin(self.folder, is_writer=bool(self.args.should_save))
        if checked is None:
            return
        report, trees = checked
        for each in trees:
            self.state.book.observe_tree(each.key, each.tree)
        self.state.num_sampled += report.num_tokens
        self._log({"check_tokens": float(report.num_tokens)})

    # -- an iteration -------------------------------------------------------------------------------------------------

    def _iteration(self, iteration: int, updater: Updater) -> dict[str, float]:
        rounds = self.rollouts.rounds(self.state, Journal(journal_file(self.folder, iteration + 1)))
        self.rewards.begin(self._trainer.state)
        if iteration == 0 and self.settings.eval_every:
            found, before = self._evaluation(0, rounds)
            self._log({"iteration": 0.0, **found})
            self._show("held out, before the first update", before[:NUM_SHOWN])
        self.rewards.begin(self._trainer.state)
        practised = self._practise(iteration, rounds)
        check_failures(self.rewards.tally, self.settings.max_failed, f"iteration {iteration + 1}", rounds.journal)
        trees = practised.trees
        rows = rows_of(trees, iteration + 1)
        if self.args.should_save:
            write_rollouts(self.folder, iteration + 1, rows, self.rollouts.chat.tokenizer)
        update = self._credited([rows[kept] for kept in practised.kept])
        account = account_of(trees, rows, update, iteration + 1)
        nothing = nothing_learned(trees, update, self.objective)
        if nothing is not None and self.args.should_log:
            logger.warning("iteration %d: %s", iteration + 1, nothing)
        gap, report = {}, None
        if update is not None:
            update = scored(update, self.engine, batch_size=len(update.trees), reference=self._reference_engine())
            gap = self._measured_gap(update)
            report = updater.run(update.trees, self._batches(iteration, len(update.trees)), self.state.num_updates + 1)
            hand_over(self.sampler, self.model)
        self._observe(practised, 0 if report is None else report.num_steps)
        logs = {"iteration": float(iteration + 1)} | figures(
            trees, account, report, self.state.book, rounds.seconds, self.settings.success_at
        )
        logs |= practised.figures()
        held_out: list[Sample] = []
        logs |= {name: float(np.mean(values)) for name, values in self.rewards.tally.metrics.items()}
        logs |= {**gap, "learning_rate": float(updater.scheduler.get_last_lr()[0])}
        if self._is_due(iteration, self.settings.eval_every):
            found, held_out = self._evaluation(iteration + 1, rounds)
            logs |= found
        self._log(logs)
        if (iteration == 0 and self.settings.show_every) or self._is_due(iteration, self.settings.show_every):
            self._show("sampled", best_and_worst(rows, self.rollouts.chat.tokenizer))
        self._show("held out", held_out[:NUM_SHOWN])
        self._check_gap(logs)
        line = account.warning()
        if line is not None:
            logger.warning("iteration %d: %s", iteration + 1, line)
        return logs

    def _evaluation(self, iteration: int, rounds: Rounds) -> tuple[dict[str, float], list[Sample]]:
        """Figures of the held-out items, and their samples, which are written."""
        found, samples = self.rollouts.evaluation(rounds)
        if samples and self.args.should_save:
            write_evaluation(self.folder, iteration, samples)
        return found, samples

    def _show(self, title: str, samples: Sequence[Sample]) -> None:
        if samples and self.settings.show_every and self.args.process_index == 0:
            sys.stdout.write(lines_of(title, samples))

    @property
    def _budget(self) -> int:
        """Generated tokens of the next iteration, less what earlier ones took too many."""
        return max(self.settings.tokens_per_iteration - self.state.overshoot, self.settings.trees_per_iteration)

    def _practise(self, iteration: int, rounds: Rounds) -> Practised:
        """The trees of an iteration, as the curriculum asks for them."""
        settings = self.settings
        with token_progress(f"iteration {iteration + 1}", self._budget, hidden=bool(self.args.disable_tqdm)) as advance:
            practised = practise(
                self.items,
                settings.trees_per_iteration,
                self._budget,
                partial(self.rollouts.new_trees, (self.args.seed, iteration, _TREES)),
                replace(rounds, progress=advance),
                settings.success_at,
            )
        if self.items.curriculum.kind.measures_angles:
            prompts = [each.tree.prompt_ids for each in practised.trees]
            found = angles_of(self.engine, prompts, self.items.memory["num_shared"])
            practised.angles = found.total.tolist()
        return practised

    def _credited(self, rows: Sequence[list[Trajectory]]) -> Update | None:
        settings = self.settings
        return credited_rows(
            rows,
            self.objective,
            method=settings.advantages,
            settings=settings.advantages_settings,
            drop_flat_groups=settings.drop_flat_groups,
            num_updates=settings.updates_per_iteration,
            old_logprobs=settings.old_logprobs,
        )

    def _batches(self, iteration: int, num_trees: int) -> list[list[int]]:
        """The trees of each optimizer step: where fewer are left than `mini_batches`, each is a step."""
        batches: list[list[int]] = []
        for epoch in range(self.settings.update_epochs):
            rng = np.random.default_rng([self.args.seed, iteration, _BATCHES, epoch])
            order = rng.permutation(num_trees)
            parts = np.array_split(order, min(self.settings.mini_batches, num_trees))
            batches += [sorted(part.tolist()) for part in parts]
        return batches

    def _observe(self, practised: Practised, num_updates: int) -> None:
        """Takes a finished iteration into the state."""
        state, trees = self.state, practised.trees
        outcomes = practised.outcomes(state.book, self.settings.success_at)
        if self.args.should_save:
            write_draws(self.folder, state.iteration + 1, self.settings.curriculum, practised, outcomes)
        self.items.observe(outcomes, len(practised.kept))
        for each in trees:
            state.book.observe_tree(each.key, each.tree)
            lengths = [each.tree.num_sampled_before(leaf, len(each.tree[leaf])) for leaf in each.tree.leaves]
            state.num_rollouts += len(lengths)
            state.rollout_tokens += sum(lengths)
        sampled = sum(each.num_sampled for each in trees)
        state.num_sampled += sampled
        state.overshoot += sampled - practised.extra_budget - self.settings.tokens_per_iteration
        state.num_updates += num_updates
        state.iteration += 1
        self._trainer.state.global_step = state.iteration

    # -- log-probs ----------------------------------------------------------------------------------------------------

    def _reference_engine(self) -> Any:
        if self.reference is None:
            return None
        args = self.args
        model = self.reference.to(args.device)
        engine = TreeEngine(model, args.max_tokens, args.attention, temperature=args.temperature)
        return lambda: engine

    def _measured_gap(self, update: Update) -> dict[str, float]:
        """The gap between sampler and engine where the objective does not measure it in its first step."""
        if isinstance(self.objective, PolicyGradient):
            return {}
        engine = self.engine
        items = engine.scored([row for own in update.trees for row in own])
        return {"logprob_gap": logprob_gap(items)}

    def _check_gap(self, logs: dict[str, float]) -> None:
        is_corrected = getattr(self.objective, "sampler_correction", None) is not None
        line = gap_warning(logs.get("logprob_gap", 1.0), self.settings.logprob_gap_limit)
        if line is not None and not is_corrected:
            logger.warning("iteration %d: %s", int(logs["iteration"]), line)

    def _log(self, logs: dict[str, float]) -> None:
        trainer = self._trainer
        trainer.state.log_history.append({**logs, "step": trainer.state.global_step})
        trainer.control = trainer.callback_handler.on_log(self.args, trainer.state, trainer.control, dict(logs))


def _named(name: str) -> Objective:
    settings = OBJECTIVE if name not in ("sft", "distillation") else {"weighting": "per_rollout"}
    return objective_named(name, **settings)


def _check_reference(objective: Any, reference: Any, model: Any) -> None:
    needs = bool(getattr(objective, "beta", 0.0))
    if needs and reference is None and not hasattr(model, "peft_config"):
        raise ConfigError(
            f"beta={objective.beta} is a KL to a reference, and the policy itself moves at every iteration; give "
            "reference=<the model before the run>, or train adapters."
        )
    if reference is not None and not needs:
        raise ConfigError("reference is given, but the objective has no KL to it (beta); leave one of them out.")
