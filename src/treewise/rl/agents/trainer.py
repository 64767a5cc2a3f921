"""`AgentTrainer`: the online loop with an `AgentCollector` in place of rollouts that the run writes itself."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treewise.base.progress import busy_with
from treewise.errors import ConfigError, DataError
from treewise.objectives import PolicyGradient
from treewise.rl.agents.collecting import AgentCollector
from treewise.rl.agents.settings import AgentSettings
from treewise.rl.agents.tasks import AgentTask
from treewise.rl.checks import gap_warning
from treewise.rl.curriculum import Outcome
from treewise.rl.online import OnlineSettings, OnlineTrainer, records
from treewise.rl.online.collecting import token_progress
from treewise.rl.online.collector import Group, GroupRequest, Moment
from treewise.rl.online.growing import check_failures
from treewise.rl.online.report import few_recorded
from treewise.rl.tasks.rewards import RewardTally
from treewise.rl.update import Update

logger = logging.getLogger("treewise")
_TREES, _EVALUATION = 2, 4  # name random streams, as in the loop


class AgentTrainer(OnlineTrainer):
    """Improves a policy on what an agent does with it.

    Parameters: as of `OnlineTrainer`, and
        agent, agent_settings: see `AgentCollector`.

    Raises:
        ConfigError: as `OnlineTrainer` and `AgentCollector`; `max_staleness`, or a curriculum that measures prompts.
    """

    def __init__(
        self,
        model: Any,
        task: AgentTask,
        tokenizer: Any,
        settings: OnlineSettings | None = None,
        args: Any = None,
        *,
        agent: str,
        agent_settings: AgentSettings | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, task, tokenizer, settings, args, **more)
        settings = self.settings
        if settings.max_staleness:
            raise ConfigError("max_staleness is not served with an agent yet: episodes and training take turns.")
        if settings.chosen_curriculum().measures_angles:
            raise ConfigError(f"curriculum {settings.curriculum!r} measures prompts, which an agent's tasks have not.")
        self.agent, self.agent_settings = agent, agent_settings or AgentSettings()
        self.collector = AgentCollector(
            *(agent, tokenizer, model, task, settings, self.agent_settings),
            temperature=self.args.temperature,
            folder=Path(self.args.output_dir),
        )

    def train(self, resume_from_checkpoint: str | bool | None = None) -> dict[str, float]:  # type: ignore[override]
        """See `OnlineTrainer.train`."""
        try:
            return super().train(resume_from_checkpoint)
        finally:
            self.collector.close()

    def _iteration(self, iteration: int) -> dict[str, float]:
        """Runs episodes, credits them, trains on them; its figures, which it logs."""
        settings, number, tokenizer = self.settings, iteration + 1, self.rollouts.chat.tokenizer
        if iteration == 0 and settings.eval_every:
            found, held_out = self._evaluated(0)
            self._log({"iteration": 0.0, **found})
            self._ended = time.perf_counter()
            self._show("held out, before the first update", held_out)
        groups, indices, tally, seconds, warnings = self._collected(iteration)
        rows = [each.rows for each in groups]
        if self.args.should_save:
            records.write_rollouts(self.folder, number, rows, tokenizer)
        update = self._credited(rows)
        account = account_of(groups, update, number)
        logs = {"iteration": float(number), **figures(groups, account, seconds, settings.success_at)}
        trained = {"optimizer_steps": 0.0} if update is None else self._train_on(update, iteration)
        self.loop.num_updates += int(trained["optimizer_steps"])
        self._observed(groups, indices)
        self.state.global_step = self.loop.iteration
        logs |= trained | {name: float(np.mean(values)) for name, values in tally.metrics.items()}
        logs["seconds_iteration"], self._ended = time.perf_counter() - self._ended, time.perf_counter()
        logs["learning_rate"] = float(self.lr_scheduler.get_last_lr()[0])
        held_out = []
        if settings.is_due(iteration, "eval_every"):
            found, held_out = self._evaluated(number)
            logs |= found
        self._log(logs)
        if settings.show_every and (iteration == 0 or settings.is_due(iteration, "show_every")):
            self._show("sampled", records.best_and_worst(rows, tokenizer))
        self._show("held out", held_out)
        if self.args.should_log:
            for line in [*warnings, *self._warnings(groups, account, update, logs.get("logprob_gap", 1.0))]:
                logger.warning("iteration %d: %s", number, line)
        self._journals.pop(number)
        return logs

    # -- its parts ----------------------------------------------------------------------------------------------------

    def _moment(self, iteration: int, where: str, progress: Any = None) -> Moment:
        journal = self.journal(iteration)
        return Moment(where, self.loop, journal, self.sampler, self.loop.iteration, self.state, progress)

    def _collected(self, iteration: int) -> tuple[list[Group], list[int], RewardTally, dict[str, float], list[str]]:
        """All groups of an iteration, the items that they are of, and what was found beside."""
        settings, items = self.settings, self.items
        count, budget = settings.trees_per_iteration, self.rollouts.budget(self.loop)
        groups, kept, kept_indices = list[Group](), list[Group](), list[int]()
        tally, seconds, warnings = RewardTally(), {"sampling": 0.0}, list[str]()
        indices = items.draw(count)
        with token_progress(f"iteration {iteration + 1}", budget, hidden=bool(self.args.disable_tqdm)) as advance:
            while indices:
                wanted = [
                    GroupRequest(
                        number=len(groups) + place,
                        item=self.task.item("train", index),
                        key=self.rollouts.book_key(index),
                        budget=budget // count,
                        seed=(self.args.seed, iteration, _TREES, len(groups) + place),
                    )
                    for place, index in enumerate(indices)
                ]
                found = self.collector.collect(
                    wanted, self._moment(iteration + 1, f"iteration {iteration + 1}", advance)
                )
                groups += found.groups
                tally.add(found.tally)
                warnings += found.warnings
                seconds = {name: spent + found.seconds[name] for name, spent in seconds.items()}
                for index, group in zip(indices, found.groups, strict=True):
                    if items.is_kept(self._outcome(index, group)):
                        kept.append(group)
                    kept_indices.append(index)
                missing = count - len(kept)
                indices = items.refill(missing) if missing > 0 else []
        check_failures(tally, settings.max_failed, f"iteration {iteration + 1}", self.journal(iteration + 1))
        return groups, kept_indices, tally, seconds, warnings

    def _outcome(self, index: int, group: Group) -> Outcome:
        rewards = tuple(float(reward) for reward in group.rewards if reward is not None)
        predicted = self.loop.book.success(group.request.key)
        return Outcome(
            index=index, predicted=predicted, rewards=rewards, success=group.success, trials=group.trials
        )

    def _observed(self, groups: Sequence[Group], indices: Sequence[int]) -> None:
        """Takes what came of an iteration into the state."""
        loop = self.loop
        self.items.observe([self._outcome(index, group) for index, group in zip(indices, groups, strict=True)])
        for group in groups:
            if group.success is not None:
                loop.book.observe(group.request.key, group.success * group.trials, group.trials)
            loop.num_rollouts += len(group.lengths)
            loop.rollout_tokens += sum(group.lengths)
        sampled = sum(group.num_sampled for group in groups)
        loop.num_sampled += sampled
        if self.agent_settings.episodes is None:
            loop.overshoot += sampled - self.settings.tokens_per_iteration
        loop.iteration += 1

    def _evaluated(self, iteration: int) -> tuple[dict[str, float], list[records.Sample]]:
        """Figures of the held-out tasks, and the first of what was sampled."""
        settings, total = self.settings, self.task.num_items("held_out")
        count = settings.eval_items if total is None else min(settings.eval_items, total)
        if not count:
            return {}, []
        items = [self.task.item("held_out", index) for index in range(count)]
        with busy_with(f"evaluation after iteration {iteration}"):
            moment = self._moment(iteration, "evaluation")
            found, tally = self.collector.evaluate(items, moment, self.args.seed + _EVALUATION)
        check_failures(tally, settings.max_failed, "evaluation", moment.journal)
        samples = [records.Sample(each.key, each.prompt, each.completion, each.reward) for each in found]
        rewards = np.array([each.reward for each in found if each.reward is not None])
        logs = {
            "eval_pass@1": float(np.mean(rewards >= settings.success_at)) if len(rewards) else float("nan"),
            "eval_reward": float(np.mean(rewards)) if len(rewards) else float("nan"),
            "eval_length": float(np.mean([each.num_tokens for each in found])),
            "eval_failed": float(tally.num_failed),
        }
        if self.args.should_save:
            records.write_evaluation(self.folder, iteration, samples)
        return logs, samples[: records.NUM_SHOWN]

    def _warnings(
        self, groups: Sequence[Group], account: dict[str, int], update: Update | None, gap: float
    ) -> list[str]:
        del groups
        found = [few_recorded(account)]
        objective = self.loss_objective
        if isinstance(objective, PolicyGradient):
            is_learning = update is not None and any(np.any(row.advantages) for own in update.trees for row in own)
            found.append(None if is_learning else "no episode has an advantage, so nothing was learned.")
        if getattr(objective, "sampler_correction", None) is None:
            found.append(gap_warning(gap, self.settings.logprob_gap_limit))
        return [line for line in found if line is not None]

    def _run_facts(self) -> dict[str, Any]:
        return {**super()._run_facts(), "agent": self.agent, "agent_settings": str(self.agent_settings.facts())}


def account_of(groups: Sequence[Group], update: Update | None, iteration: int) -> dict[str, int]:
    """Where every token went that the sampler made for calls that are trained.

    Raises:
        DataError: a token that is missing or counted twice.
    """
    in_update = set() if update is None else {own[0].group for own in update.trees}
    weighed = {each.request.key: _num_weighed(each.rows) for each in groups}
    recorded = sum(weighed.values())
    sampled = sum(each.num_sampled for each in groups)
    failed, unfinished = (sum(getattr(each, name) for each in groups) for name in ("num_failed", "num_unfinished"))
    if sampled != recorded + failed + unfinished:
        raise DataError(
            f"iteration {iteration}: {sampled} sampled tokens are not the {recorded} recorded, {failed} failed and "
            f"{unfinished} unfinished ones."
        )
    trained = 0 if update is None else sum(_num_weighed(own) for own in update.trees)
    left_out = sum(count for key, count in weighed.items() if key not in in_update)
    if recorded != trained + left_out:
        raise DataError(
            f"iteration {iteration}: {recorded} recorded tokens, but {trained} trained, {left_out} left out."
        )
    names = ("sampled", "candidate", "recorded", "trained", "failed", "unfinished", "left_out")
    return dict(zip(names, (sampled, 0, recorded, trained, failed, unfinished, left_out), strict=True))


def _num_weighed(rows: Sequence[Any]) -> int:
    return sum(int((row.loss_weights > 0).sum()) for row in rows)


def figures(
    groups: Sequence[Group], account: dict[str, int], seconds: dict[str, float], success_at: float
) -> dict[str, float]:
    """What is logged of an iteration's episodes: means over episodes, counts of all."""
    rewards = [reward for group in groups for reward in group.rewards]
    known = np.array([reward for reward in rewards if reward is not None])
    values = {
        "num_rollouts": float(len(rewards)),
        "failed_rollouts": float(len(rewards) - len(known)),
        "rollout_length": float(np.mean([length for group in groups for length in group.lengths])),
        **{f"{name}_tokens": float(count) for name, count in account.items()},
        **{f"seconds_{name}": spent for name, spent in seconds.items()},
        "sampled_tokens_per_second": account["sampled"] / max(seconds["sampling"], 1e-9),
    }
    for name in dict.fromkeys(name for group in groups for name in group.counts):
        values[name] = float(sum(group.counts.get(name, 0) for group in groups))
    for name in dict.fromkeys(name for group in groups for name in group.means):
        values[name] = float(np.mean([value for group in groups for value in group.means.get(name, ())]))
    if len(known):
        values |= {"reward": float(known.mean()), "success": float((known >= success_at).mean())}
    return values
