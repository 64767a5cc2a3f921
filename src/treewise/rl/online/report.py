"""What an iteration reports: where every generated token went, its figures, and the line that is printed of them.

Tokens that the sampler made, and first tokens of branches that a policy drew from recorded candidates, are recorded
ones, or those of rollouts that failed or were never continued; recorded ones are trained but for the trees that were
left out. Both are checked at every iteration, from the rows that the engine is given.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from treewise.base.progress import busy_with, listeners, tell_progress
from treewise.engine.prepared import StepOutput
from treewise.errors import DataError, duration, num
from treewise.objectives import PolicyGradient
from treewise.rl.checks import gap_warning
from treewise.rl.online.collector import Group, HeldOut
from treewise.rl.success_book import SuccessBook
from treewise.rl.update import Update
from treewise.trainer.step import StepRunner
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.rl.online.drawn import Drawn

# What the line shows, in this order, with its format, or the noun of a count.
_LINE = (
    ("reward", "reward {:.3f}"),
    ("success", "success {:.3f}"),
    ("eval_pass@1", "held-out pass@1 {:.3f}"),
    ("eval_reward", "held-out reward {:.3f}"),
    ("sampled_tokens", "token"),
    ("num_rollouts", "rollout"),
    ("share_ratio", "share ratio {:.2f}"),
    ("logprob_gap", "logprob gap {:.4f}"),
    ("loss", "loss {:.4g}"),
    ("entropy", "entropy {:.3f}"),
    ("clip_fraction", "clipped {:.3f}"),
    ("seconds_sampling", "{:.1f} s sampling"),
    ("seconds_reward", "{:.1f} s rewards"),
    ("seconds_update", "{:.1f} s update"),
    ("staleness", "staleness {:.2f}"),
    ("failed_rollouts", "{:.0f} without reward"),
)


# -- the account of tokens --------------------------------------------------------------------------------------------


def account_of(groups: Sequence[Group], update: Update | None, iteration: int) -> dict[str, int]:
    """Where every generated token went, by the names of the log, from the rows of the update themselves.

    sampled: as they came from the sampler. candidate: drawn from recorded candidates. recorded: in rows. trained: in
    the rows of the update. failed: below rollouts without a reward. unfinished: never continued to an end. left_out:
    recorded, in groups that the update leaves out.

    Raises:
        DataError: a token that is missing or counted twice, or rows that are not those of the groups.
    """
    in_update = {} if update is None else {own[0].group: own for own in update.trees}
    given = {
        "sampled": "num_sampled",
        "candidate": "num_chosen",
        "failed": "num_failed",
        "unfinished": "num_unfinished",
    }
    totals = {name: sum(getattr(group, field) for group in groups) for name, field in given.items()}
    totals |= dict.fromkeys(("recorded", "trained", "left_out"), 0)
    for group in groups:
        num_recorded, own = num_trained(group.rows), in_update.get(group.rows[0].group) if group.rows else None
        totals["recorded"] += num_recorded
        if own is None:
            totals["left_out"] += num_recorded
            continue
        totals["trained"] += num_trained(own)
        for row, credited in zip_longest(group.rows, own):
            if row is None or credited is None or not np.array_equal(row.token_ids, credited.token_ids):
                source = (row or credited).source
                raise DataError(f"iteration {iteration}: {source}: a row of the update is not that of its group.")
    generated = totals["recorded"] + totals["failed"] + totals["unfinished"]
    if totals["sampled"] + totals["candidate"] != generated:
        raise DataError(
            f"iteration {iteration}: the sampler gave {totals['sampled']} tokens and {totals['candidate']} were drawn "
            f"from candidates, but {generated} are in rows, failed or unfinished: {totals}."
        )
    if totals["recorded"] != totals["trained"] + totals["left_out"]:
        what = "the recorded tokens are not those of the update and those left out of it"
        raise DataError(f"iteration {iteration}: {what}: {totals}.")
    return totals


def num_trained(rows: Sequence[Trajectory]) -> int:
    """Tokens with a weight, each once however many rows share it: two share the draws that made them."""
    alone, shared = 0, []
    for row in rows:
        places = np.flatnonzero(np.asarray(row.loss_weights) > 0)
        if row.draws is None:
            alone += len(places)
        else:
            shared.append(np.stack([np.asarray(row.draws)[places], places]))
    return alone + (np.unique(np.concatenate(shared, axis=1), axis=1).shape[1] if shared else 0)


def few_recorded(account: Mapping[str, int]) -> str | None:
    """A sentence where less than half of the generated tokens are in rows, so that figures are of few rollouts."""
    generated = account["sampled"] + account["candidate"]
    if 2 * account["recorded"] >= generated:
        return None
    return (
        f"{account['recorded']:,} of {generated:,} generated tokens are recorded ({account['failed']:,} of rollouts "
        f"without a reward, {account['unfinished']:,} of rollouts that did not end): the figures are of few rollouts. "
        "Raise tokens_per_iteration, lower max_new_tokens, or mend the rewards."
    )


# -- figures ----------------------------------------------------------------------------------------------------------


def figures(drawn: "Drawn", account: Mapping[str, int], book: SuccessBook, success_at: float) -> dict[str, float]:
    """What is logged of what an iteration drew: means over rollouts, token counts, seconds; groups that were drawn,
    trained and refilled, where not all are trained; what reward functions logged.
    """
    groups = drawn.groups
    known = np.array([reward for group in groups for reward in group.known_rewards])
    lengths = [length for group in groups for length in group.lengths]
    values: dict[str, float] = {
        "num_rollouts": float(len(lengths)),
        "failed_rollouts": float(len(lengths) - len(known)),
        "rollout_length": float(np.mean(lengths)) if lengths else 0.0,
        **{f"{name}_tokens": float(count) for name, count in account.items()},
        **{f"seconds_{name}": spent for name, spent in drawn.seconds.items()},
        "sampled_tokens_per_second": account["sampled"] / max(drawn.seconds["sampling"], 1e-9),
    }
    for name in dict.fromkeys(name for group in groups for name in group.counts):
        values[name] = float(sum(group.counts.get(name, 0) for group in groups))
    for name in dict.fromkeys(name for group in groups for name in group.means):
        if found := [value for group in groups for value in group.means.get(name, ())]:
            values[name] = float(np.mean(found))
    if len(known):
        values |= {"reward": float(known.mean()), "success": float((known >= success_at).mean())}
    if book.brier == book.brier:
        values["book_brier"] = book.brier
    if num_refilled := sum(wave > 0 for wave in drawn.waves):
        values["refilled_trees"] = float(num_refilled)
    if len(drawn.kept) < len(groups):
        values |= {"drawn_trees": float(len(groups)), "kept_trees": float(len(drawn.kept))}
    return values | {name: float(np.mean(logged)) for name, logged in drawn.tally.metrics.items()}


def update_figures(
    update: Update, outs: Sequence[StepOutput | None], norms: Sequence[float], runner: StepRunner
) -> dict[str, float]:
    """What is logged of an update and of its optimizer steps, over all processes. `replayed_gap`, `live_gap`: to the
    sampler, of the first tree with recorded experts, with these and with those of the live routers.
    """
    done = [out for out in outs if out is not None]
    tree_tokens, flat_tokens = sum(out.num_tree_tokens for out in done), sum(out.num_flat_tokens for out in done)
    sums = runner.sum_over_batches(math.fsum(out.loss for out in done), tree_tokens, flat_tokens)
    return {
        "optimizer_steps": float(len(norms)),
        "loss": sums[0] / len(norms),
        "grad_norm": math.fsum(norms) / len(norms),
        **runner.means.take(runner.sum_over_batches, is_alone=runner.ranks is None),
        "share_ratio": sums[2] / max(1, sums[1]),
        **({} if update.gaps is None else {"replayed_gap": update.gaps[0], "live_gap": update.gaps[1]}),
    }


def held_out_figures(held_out: Sequence[HeldOut], success_at: float) -> dict[str, float]:
    """`eval_pass@1`, `eval_reward` and `eval_length` (generated tokens), means over the held-out items whose reward is
    known, and `eval_failed`, the number of the others.
    """
    rewards = np.array([rollout.reward for rollout in held_out if rollout.reward is not None])
    return {
        "eval_pass@1": float(np.mean(rewards >= success_at)) if len(rewards) else float("nan"),
        "eval_reward": float(np.mean(rewards)) if len(rewards) else float("nan"),
        "eval_length": float(np.mean([rollout.num_tokens for rollout in held_out])),
        "eval_failed": float(sum(rollout.failure is not None for rollout in held_out)),
    }


def warnings_of_iteration(
    groups: Sequence[Group],
    account: Mapping[str, int],
    update: Update | None,
    objective: object,
    gap: float,
    gap_limit: float,
) -> list[str]:
    """Sentences on an iteration that should not pass unseen. gap: `logprob_gap`, which an objective may correct."""
    is_corrected = getattr(objective, "sampler_correction", None) is not None
    found = (
        *(nothing_learned(groups, update, objective), few_recorded(account)),
        None if is_corrected else gap_warning(gap, gap_limit),
    )
    return [line for line in found if line is not None]


def nothing_learned(groups: Sequence[Group], update: Update | None, objective: object) -> str | None:
    """That an iteration teaches nothing, and why: no rollout has an advantage. None where one has."""
    if not isinstance(objective, PolicyGradient):
        return None
    if update is not None and any(np.any(row.advantages) for own in update.trees for row in own):
        return None
    rewards = [reward for group in groups for reward in group.known_rewards]
    if not rewards:
        return "no rollout has a reward, so nothing was learned."
    if len(set(rewards)) == 1:
        return f"every reward ({num(len(rewards), 'rollout')}) is {rewards[0]:g}, so nothing was learned."
    return (
        f"no rollout has an advantage, as the {len(rewards)} rewards differ between trees and not within one, so "
        "nothing was learned."
    )


def staleness_of(update: Update | None, version: int) -> float:
    """The mean age, in iterations, of the policies that sampled the trained tokens. version: of the one that trains."""
    ages = []
    for row in () if update is None else (row for own in update.trees for row in own):
        if row.policy_versions is not None:
            ages.append(version - row.policy_versions[(row.loss_weights > 0) & (row.policy_versions >= 0)])
    return float(np.mean(np.concatenate(ages))) if ages else 0.0


# -- the line ---------------------------------------------------------------------------------------------------------


class PrintedLine(TrainerCallback):
    """Prints one line for each iteration, with an estimate of the time left."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self._began, self._first = 0.0, 0

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - names that transformers dictates
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        self._began, self._first = time.monotonic(), state.global_step

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, float] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        if logs and "iteration" in logs:
            done = state.global_step - self._first
            left = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step) if done else 0.0
            named = [entry for entry in _LINE if entry[0] in logs and (logs[entry[0]] or entry[0] != "failed_rollouts")]
            if not named:  # an evaluation without held-out tasks
                return
            shown = [text.format(logs[name]) if "{" in text else num(round(logs[name]), text) for name, text in named]
            shown += [f"ETA {duration(left)}"] * bool(left)
            self.write(f"iteration {logs['iteration']:.0f}/{state.max_steps}: {', '.join(shown)}\n")


@contextmanager
def sampling_progress(what: str, total: int, unit: str, *, hidden: bool) -> Iterator[Callable[[int], None] | None]:
    """How much is sampled: told to whoever listens, else a bar on terminals; yields what to call with each part. total:
    what parts add up to; unit: of what.
    """
    if listeners:
        sampled = 0

        def advance(count: int) -> None:
            nonlocal sampled
            sampled += count
            tell_progress("sampling", sampled, total, unit)

        with busy_with(what):
            tell_progress("sampling", 0, total, unit)
            yield advance
        return
    if hidden or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(f"{{task.completed:,.0f}} {unit}s"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"sampling, {what}", total=total)
        yield lambda count: progress.advance(bar, count)
