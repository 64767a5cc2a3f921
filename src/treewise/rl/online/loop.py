"""`OnlineTrainer`, the loop: collect rollouts, credit them, train on them, save; a process that dies loses nothing.

An iteration is a deterministic function of the state before it: random streams are named by the seed, the iteration and
the group. Completions and rewards are in a journal as soon as they are known, and a checkpoint holds all state between
two iterations. So a run that is killed anywhere goes on from its last checkpoint through what the journals hold, to
the weights that an undisturbed one has (bit for bit where kernels are deterministic, as on a CPU).

Who samples is a `Collector` (`collector.py`): `TreeCollector` (`trees.py`), where no other is given. With
`max_staleness` a thread collects the next iterations meanwhile (`ahead.py`), from a state of its own: what it has
observed up to an iteration becomes the run's when that iteration has trained.
"""

import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy, deepcopy
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, TrainerCallback, TrainerState

from treewise.base import features
from treewise.base.progress import busy_with
from treewise.distributed import groups, ranks
from treewise.engine.engine import TreeEngine
from treewise.engine.prepared import StepOutput
from treewise.errors import ConfigError, StoppedError
from treewise.nn.gradients import clear_gradients
from treewise.objectives import Objective, PolicyGradient, logprob_gap
from treewise.rl.curriculum import TaskSampler
from treewise.rl.online import journal, records, report
from treewise.rl.online.collector import Collector, Group, Moment
from treewise.rl.online.drawn import Drawn, budget_of, check_failures, draw_groups, num_practised, requests_of
from treewise.rl.online.first_tree import first_tree
from treewise.rl.online.journal import JOURNAL, Journal, LoopState, journal_file, journals
from treewise.rl.online.report import PrintedLine, sampling_progress
from treewise.rl.online.settings import OnlineSettings, online_objective
from treewise.rl.online.trees import tree_collector
from treewise.rl.samplers import Sampler, TransformersSampler
from treewise.rl.samplers.hand_over import begin_hand_over
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks.protocol import Task
from treewise.rl.update import Update, method_of, own_update
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.trainer.batches import collate
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.manager import CheckpointManager
from treewise.trainer.run_context import entered_run, stopped_error
from treewise.trainer.signals import StepAbandoned, StopSignals, stop_of_all
from treewise.tree.forest import forest_of
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.rl.online.ahead import Ahead
    from treewise.rl.samplers.copied_weights import WholeCopy

logger = logging.getLogger("treewise")

_TREES, _BATCHES, _EVALUATION, _CHECK = 2, 3, 4, 6  # name random streams, beside those of curricula


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
        sampler: None for the model itself, in this process (`TransformersSampler`). With `max_staleness` one that holds
            weights of its own, or None for a copy of the model's.
        reference: the model that a KL term is measured against; with adapters None is the model without them.
        collector: who samples; None for rollout trees (`TreeCollector`).
        callbacks: of transformers: trackers, or your own; `on_log` gets the figures of each iteration, after which
            `control.should_training_stop` ends the run: saved, and to be resumed.

    Attributes:
        trainer: the `TreeTrainer` whose optimizer, schedule, callbacks, trackers, saved models and uploads these are.
        state: transformers' own; a step of it is an iteration. loop: what the loop adds to it.
        eval_sampler: with the newest weights; `sampler` may be behind (`max_staleness`).

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
        collector: Collector | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.task, self.settings = task, settings or OnlineSettings()
        if not hasattr(task, "num_items"):
            raise ConfigError(f"task is a {type(task).__name__}; give one of treewise.rl.tasks, such as RowsTask.")
        self.args = args = TreeTrainingArguments() if args is None else args
        self.objective = objective = online_objective(objective, self.settings, args, reference, model)
        method_of(objective, self.settings.advantages, (), self.settings.advantages_settings)
        self.reference = reference
        self._first_tree = cache(lambda: first_tree(self.collector.prompt_ids(task.item("train", 0))))
        given: dict[str, Any] = {"objective": objective, "processing_class": tokenizer, "callbacks": [*callbacks]}
        self.trainer = TreeTrainer(model, args, first_tree=self._first_tree, **given)
        self.model, self.processing_class = self.trainer.model, tokenizer
        self.state, self.control = self.trainer.state, self.trainer.control
        self.runner = self.trainer.runner  # of the optimizer's steps
        for callback in (PrinterCallback, ProgressCallback):
            self.trainer.remove_callback(callback)
        if args.process_index == 0:
            self.add_callback(PrintedLine(sys.stdout.write))
        self.folder = Path(args.output_dir)
        self.sampler = self.eval_sampler = TransformersSampler(self.model) if sampler is None else sampler
        self._whole: WholeCopy | None = None
        if self.settings.max_staleness or args.is_parted:
            copies = features.copied_weights.samplers_of(self.sampler, self.model, is_parted=args.is_parted)
            self.sampler, self.eval_sampler, self._whole = copies
        self.collector = collector or tree_collector(task, tokenizer, self.settings, args, self.model)
        self._signals = StopSignals(may_abandon=args.world_size == 1)
        self._checkpoints = CheckpointManager(args, self._run_facts, self.trainer.verify_saved)
        self._fingerprint = contents.fingerprint(self.model)
        self._ahead: Ahead | None = None
        self._journals: dict[int, Journal] = {}
        self._ended = time.perf_counter()  # the last iteration
        self.items = TaskSampler(self.settings.chosen_curriculum(), num_practised(task, self.settings), args.seed)
        self._draw = partial(draw_groups, self.items, self.collector, task, self.settings)
        self.loop = LoopState(SuccessBook(self.settings.settings_of_book()))
        self._own_trees = slice(args.data_index, None, args.data_size)  # of a step's, where nobody places them
        self._num_begun = 0  # optimizer steps; parameters may have changed with the first

    @property
    def engine(self) -> TreeEngine:
        """The engine of the model."""
        return self.runner.engine

    @property
    def log_history(self) -> list[dict[str, float]]:
        """The figures of each iteration so far, and the evaluation before the first as iteration 0."""
        return self.state.log_history

    def add_callback(self, callback: TrainerCallback) -> None:
        """Adds a callback of transformers."""
        self.trainer.add_callback(callback)

    def save_model(self, output_dir: str | None = None) -> None:
        """As `TreeTrainer.save_model`."""
        self.trainer.save_model(output_dir)

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
        logs: dict[str, float] = {}
        with ExitStack() as stack:
            folders = (JOURNAL, records.ROLLOUTS, records.EVALUATIONS, records.DRAWS)
            stack.enter_context(entered_run(self.args, self._signals, *folders))
            stack.callback(self.sampler.close)
            stack.callback(self.collector.close)
            stack.callback(lambda: self._ahead and self._ahead.close())
            try:
                self._signals.start()
                self._begin(resume_from_checkpoint)
                if self._is_finished():
                    logger.warning("%s holds the end of the run: no iteration is left", self.folder)
                    return dict(self.log_history[-1])
                begin_hand_over(self.eval_sampler, self.model, self._whole)()  # a server may hold those of another run
                self._tell("on_train_begin")
            except StepAbandoned:
                raise self._stopped() from None
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
            self._tell("on_train_end")
            read_saved = getattr(self.eval_sampler, "read_saved", None)
            self.trainer.readers = [] if read_saved is None else [read_saved]
            with self._working():
                self.save_model()
            if self.args.should_save:
                self.state.save_to_json(str(self.folder / contents.STATE))
        return logs

    def _iteration_or_stop(self, iteration: int) -> dict[str, float]:
        """An iteration, which a signal abandons in a lone process; several finish theirs. The run is then saved as it
        was before, unless an optimizer step was taken: then the journals since the checkpoint before hold what was
        sampled.
        """
        before, num_begun = deepcopy(self.items.state_dict()), self._num_begun
        try:
            with self._signals.computing():
                if iteration == 0:
                    self._begin_curriculum()
                return self._iteration(iteration)
        except StepAbandoned:
            clear_gradients(self.model.parameters())
            if self._ahead is None:
                self.items.load_state_dict(before)
            if (self.loop.iteration, self._num_begun) == (iteration, num_begun):
                self._save_loop()
            raise self._stopped() from None

    def _iteration(self, iteration: int) -> dict[str, float]:
        """Collects rollouts, credits them, trains on them; its figures, which it logs."""
        settings, number, tokenizer = self.settings, iteration + 1, self.processing_class
        if iteration == 0 and settings.eval_every:
            found, held_out = self._evaluation(0)
            self._log({"iteration": 0.0, **found})
            self._ended = time.perf_counter()
            self._show("held out, before the first update", held_out)
        # Collect.
        if settings.max_staleness and self._ahead is None:
            self._ahead = self._start_ahead(iteration)
        drawn = self._collected_now(iteration) if self._ahead is None else self._ahead.take(iteration)
        groups, rows = drawn.groups, [group.rows for group in drawn.groups]
        if self.args.should_save:
            records.write_rollouts(self.folder, number, rows, tokenizer)
        # Credit, train.
        with self._working(version=number):
            update = self._credited([rows[kept] for kept in drawn.kept])
            account = report.account_of(groups, update, number)
            trained = {"optimizer_steps": 0.0} if update is None else self._train_on(update, iteration)
        num_updates = self.loop.num_updates + int(trained["optimizer_steps"])
        if drawn.state is None:
            self._observe(self.loop, drawn)
        self.loop = drawn.state or self.loop
        self.loop.num_updates, self.state.global_step = num_updates, self.loop.iteration
        # Log.
        logs = {"iteration": float(number)}
        logs |= report.figures(drawn, account, self.loop.book, settings.success_at) | trained
        if self._ahead is not None:
            logs |= {"staleness": report.staleness_of(update, iteration), "seconds_waiting": self._ahead.seconds_waited}
            self._ahead.seconds_waited = 0.0
        logs["seconds_iteration"], self._ended = time.perf_counter() - self._ended, time.perf_counter()
        logs["learning_rate"] = float(self.trainer.lr_scheduler.get_last_lr()[0])
        held_out = []
        if settings.is_due(iteration, "eval_every"):
            found, held_out = self._evaluation(number)
            logs |= found
        self._log(logs)
        if settings.show_every and (iteration == 0 or settings.is_due(iteration, "show_every")):
            self._show("sampled", records.best_and_worst(rows, tokenizer))
        self._show("held out", held_out)
        gap, limit = logs.get("logprob_gap", 1.0), settings.logprob_gap_limit
        warnings = report.warnings_of_iteration(groups, account, update, self.objective, gap, limit)
        for line in warnings if self.args.should_log else ():
            logger.warning("iteration %d: %s", number, line)
        self._journals.pop(number)
        return logs

    # -- collect ------------------------------------------------------------------------------------------------------

    def _collected_now(self, iteration: int) -> Drawn:
        """The rollouts of an iteration, collected by the policy that trains on them.

        Raises:
            TaskError: more rewards failed than may.
        """
        where, budget = f"iteration {iteration + 1}", budget_of(self.settings, self.loop)
        size, unit = self.collector.expected_size(self.settings.trees_per_iteration, budget, self.loop)
        with sampling_progress(where, size, unit, hidden=bool(self.args.disable_tqdm)) as advance:
            recorded = self._journal(iteration + 1)
            moment = Moment(where, self.loop, recorded, self.eval_sampler, iteration, self.state, advance)
            drawn = self._draw(moment, (self.args.seed, iteration, _TREES))
        if self.items.curriculum.measures_angles:
            prompts = [group.prompt_ids for group in drawn.groups]
            angles = features.angles.angles_of(self.engine, prompts, self.items.memory["num_shared"])
            drawn.angles = angles.total.tolist()
        return drawn

    def _start_ahead(self, first: int) -> "Ahead":
        """The thread that collects from an iteration on, with a state of its own."""
        loop = deepcopy(self.loop)

        def collect(iteration: int, version: int) -> Drawn:
            state = copy(self.state)
            state.global_step = iteration
            where, recorded = f"iteration {iteration + 1}", self._journal(iteration + 1)
            moment = Moment(where, loop, recorded, self.sampler, version, state, ahead.check)
            drawn = self._draw(moment, (self.args.seed, iteration, _TREES))
            self._observe(loop, drawn)
            loop.curriculum = deepcopy(self.items.state_dict())
            drawn.state = deepcopy(loop)
            return drawn

        ranks.go_through(groups.new_group())
        hand_over, last = partial(begin_hand_over, self.sampler, self.model, self._whole), self.settings.iterations
        ahead: Ahead = features.ahead.Ahead(
            collect, hand_over, first, last, self.settings.max_staleness, groups.new_group()
        )
        ahead.start()
        return ahead

    def _working(self, version: int | None = None) -> AbstractContextManager[None]:
        """Around work during which no thread that collects ahead takes the weights; version: theirs afterwards."""
        return nullcontext() if self._ahead is None else self._ahead.working(version)

    def _observe(self, loop: LoopState, drawn: Drawn) -> None:
        """Takes what an iteration sampled into a state."""
        outcomes = drawn.outcomes(loop.book)
        if self.args.should_save:
            records.write_draws(self.folder, loop.iteration + 1, self.settings.curriculum, drawn, outcomes)
        self.items.observe(outcomes)
        drawn.count_in(loop, self.settings.tokens_per_iteration)

    def _journal(self, iteration: int) -> Journal:
        """Of an iteration, one for all that writes into it; 0: of what comes before the first."""
        if iteration not in self._journals:
            self._journals[iteration] = Journal(journal_file(self.folder, iteration), self._facts_of_updates)
        return self._journals[iteration]

    # -- credit, train ------------------------------------------------------------------------------------------------

    def _credited(self, rows: Sequence[list[Trajectory]]) -> Update | None:
        """The rows with advantages and the log-probs that the objective needs; None where nothing is left to train."""
        settings = self.settings
        with self.runner.scoring():
            update = own_update(
                [own for own in rows if own],
                self.objective,
                self.engine,
                num_updates=settings.updates_per_iteration,
                old_logprobs=settings.old_logprobs,
                reference=self._reference_engine,
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
        logs, runner, trees = dict[str, float](), self.runner, update.trees
        if not isinstance(self.objective, PolicyGradient):  # which measures it in its first step
            with runner.scoring():
                logs["logprob_gap"] = logprob_gap(self.engine.scored([row for own in trees for row in own]))
        started, placer = time.perf_counter(), self.trainer.placer
        outs, norms = list[StepOutput | None](), list[float]()
        merges = self.args.merges_trees(self.objective)
        for batch in self.settings.batches(len(trees), (self.args.seed, iteration, _BATCHES)):
            of_step = [trees[index] for index in batch]
            forests = collate(of_step if placer is not None else of_step[self._own_trees], merges)
            clear_gradients(self.model.parameters())
            prepared = runner.prepare(forests if placer is None else placer.own_part(forests))
            runner.measure_budget(lambda: forest_of(trees[0]))
            runner.begin_step([prepared], self.loop.num_updates + len(norms) + 1)
            outs.append(runner.train_batch(prepared))
            norms.append(runner.end_step())
            self._num_begun += 1
            self.trainer.optimizer.step()
            self.trainer.lr_scheduler.step()
        clear_gradients(self.model.parameters())
        logs |= report.update_figures(update, outs, norms, runner) | {"seconds_update": time.perf_counter() - started}
        if self._ahead is None:
            begin_hand_over(self.eval_sampler, self.model, self._whole)()
        return logs

    @cached_property
    def _reference_engine(self) -> TreeEngine | None:
        """Of the model that a KL term is measured against, where one was given."""
        if self.reference is None:
            return None
        args = self.args
        return TreeEngine(self.reference.to(args.device), args.max_tokens, args.attention, temperature=args.temperature)

    # -- evaluation, the curriculum's self-check ----------------------------------------------------------------------

    def _evaluation(self, iteration: int) -> tuple[dict[str, float], list[records.Sample]]:
        """Figures of the held-out items, one rollout each, and the first of their samples, which are written. Empty
        where there are none.

        Raises:
            TaskError: more rewards failed than may.
        """
        settings, total = self.settings, self.task.num_items("held_out")
        count = settings.eval_items if total is None else min(settings.eval_items, total)
        if not count:
            return {}, []
        is_behind = self._ahead is not None and self.eval_sampler is self.sampler  # and not the model at hand
        newest = self._ahead.newest() if self._ahead is not None and is_behind else nullcontext()
        recorded = self._journal(max(iteration, 1))
        moment = Moment("evaluation", self.loop, recorded, self.eval_sampler, iteration, self.state)
        with busy_with(f"evaluation after iteration {iteration}"), newest:
            items = (self.task.item("held_out", index) for index in range(count))
            held_out, tally = self.collector.evaluate([*items], moment, self.args.seed + _EVALUATION)
            check_failures(tally, settings.max_failed, moment.where, recorded)
        samples = [records.Sample(held.key, held.prompt, held.completion, held.reward) for held in held_out]
        if self.args.should_save:
            records.write_evaluation(self.folder, iteration, samples)
        return report.held_out_figures(held_out, settings.success_at), samples[: records.NUM_SHOWN]

    def _begin_curriculum(self) -> None:
        """Before the first iteration, where the curriculum goes by angles: those of all items, and the self-check of
        them, whose groups the book observes.

        Raises:
            ConfigError: angles are useless here.
        """
        settings, items = self.settings, self.items
        if not items.curriculum.measures_angles:
            return
        train = (self.task.item("train", index) for index in range(items.size or 0))
        angles = features.angles
        angles.begin_angles(items, list(map(self.collector.prompt_ids, train)), self.engine)
        if not settings.check_items:
            return
        found, groups = self.check_items(settings.check_items, settings.check_rollouts)
        angles.told(found, items.curriculum, self.folder if self.args.should_save else None)
        for group in groups:
            self.loop.book.observe(group.request.key, group.success, group.trials)
        self.loop.num_sampled += found.num_tokens
        self._log({"check_tokens": float(found.num_tokens)})

    def check_items(self, num_items: int, num_rollouts: int) -> "tuple[features.angles.CheckReport, list[Group]]":
        """Samples rollouts of some items and compares their angles with the norms of their gradients.

        Raises:
            DataError: fewer than 3 items have two rewards.
        """
        angles, stream = features.angles, (self.args.seed, 0, _CHECK)
        chosen = angles.items_to_check(self.items, num_items, _CHECK)
        requests = requests_of(self.task, chosen, [1] * len(chosen), stream, num_rollouts=num_rollouts)
        moment = Moment("self-check", self.loop, self._journal(0), self.eval_sampler, 0, self.state)
        groups = self.collector.collect(requests, moment).groups

        def credited(rows: list[Trajectory]) -> list[Trajectory]:
            method, settings = self.settings.advantages, self.settings.advantages_settings
            reference, engine = self._reference_engine, self.engine
            return own_update(
                [rows], self.objective, engine, reference=reference, method=method, settings=settings
            ).trees[0]

        return angles.checked(groups, self.items, self.engine, self.objective, credited), groups

    # -- what people see ----------------------------------------------------------------------------------------------

    def _log(self, logs: dict[str, float]) -> None:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", dict(logs))

    def _tell(self, event: str, *what: object) -> None:
        """Tells callbacks of an event of transformers' own."""
        handler = self.trainer.callback_handler
        self.control = getattr(handler, event)(self.args, self.state, self.control, *what)

    def _show(self, title: str, samples: Sequence[records.Sample]) -> None:
        if samples and self.settings.show_every and self.args.process_index == 0:
            sys.stdout.write(records.lines_of(title, samples))

    # -- begin, save, stop --------------------------------------------------------------------------------------------

    def _begin(self, wanted: str | bool | None) -> None:
        """Optimizer, schedule and state of a new run, or of the one that is resumed."""
        trainer = self.trainer
        if self.args.world_size > 1:
            features.mesh.copy_first(self.model, self.args.device)
        self._first_tree()  # refuses what no rollout can begin with
        trainer.create_optimizer_and_scheduler(self.settings.iterations * self.settings.updates_per_iteration)
        found = None
        if wanted:
            found = self._checkpoints.find(wanted, may_begin=True)
        elif ranks.on_first_rank(lambda: bool(store.checkpoints(self.folder) or journals(self.folder))):
            raise ConfigError(f"{self.folder} holds an online run: --resume or --overwrite it, or choose another.")
        if found is not None:
            self.runner.resume_budget(found.max_tokens)
            trainer.state = self.state = TrainerState.load_from_json(str(found.folder / contents.STATE))
            self.loop = LoopState.of_checkpoint(self.state, found.folder)
            features.resume.load_run(found.folder, self.model, trainer.optimizer, trainer.lr_scheduler)
            self.items.load_state_dict(self.loop.curriculum)
        ranks.on_first_rank(lambda: journal.forget_foreign(self.folder, self.loop.iteration, self._facts_of_updates))
        self.state.max_steps = self.settings.iterations

    def _is_finished(self) -> bool:
        """Whether no iteration is left, and the folder holds the model after the last one. Else the run is open."""
        end = self.folder / contents.STATE  # is written when all else is saved
        if self.loop.iteration >= self.settings.iterations:
            return ranks.on_first_rank(end.exists)
        ranks.on_first_rank(lambda: end.unlink(missing_ok=True))
        return False

    def _save_loop(self) -> None:
        """One checkpoint with all state; journals of the iterations before it are no longer needed."""
        if self.loop.iteration == self._checkpoints.last_step:
            return
        if self._ahead is None:
            self.loop.curriculum = self.items.state_dict()
        optimizer, scheduler, tokenizer = self.trainer.optimizer, self.trainer.lr_scheduler, self.processing_class
        run = contents.RunState(self.args, self.model, optimizer, scheduler, self.state, [self.loop], tokenizer)
        with self._working(), busy_with("saving a checkpoint"):
            self._checkpoints.save(run, self.folder, self.engine.max_tokens)
        if self.args.should_save and self._checkpoints.last_step == self.loop.iteration:
            for path in journals(self.folder, self.loop.iteration):
                path.unlink()

    def _run_facts(self) -> dict[str, Any]:
        return {
            "model": self._fingerprint,
            "task": self.task.name,
            "seed": self.args.seed,
            "online_settings": json.dumps(self.settings.sampling_facts(), sort_keys=True, default=str),
            **self.collector.facts(),
        }

    @cached_property
    def _facts_of_updates(self) -> str:
        """Of the whole run, as `Journal` takes them."""
        num_updates = self.settings.iterations * self.settings.updates_per_iteration
        return journal.facts_of_updates(self.args, num_updates, self.objective, self._run_facts())

    def _stopped(self) -> StoppedError:
        checkpoints = store.checkpoints(self.folder)
        where = f"saved in {checkpoints[-1]} and the journal" if checkpoints else "the journal holds what was sampled"
        return stopped_error(self._signals, f"stopped after iteration {self.loop.iteration}; {where}.")
