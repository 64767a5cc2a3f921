"""What an iteration reports: where every generated token went, its figures, and the line that is printed of them.

Tokens that the sampler made, and first tokens of branches that a policy drew from recorded candidates, are recorded
ones, or those of rollouts that failed or were never continued; recorded ones are trained but for the trees that were
left out. Both are checked at every iteration, from the rows that the engine is given.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from transformers import TrainerCallback, TrainerState, TrainingArguments

from treewise.errors import DataError, duration, num
from treewise.objectives import PolicyGradient
from treewise.rl.branching import PROMPT
from treewise.rl.checks import gap_warning
from treewise.rl.online.growing import GrowingTree
from treewise.rl.success_book import SuccessBook
from treewise.rl.update import Update
from treewise.tree.trajectory import Trajectory

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


def account_of(
    trees: Sequence[GrowingTree], rows: Sequence[list[Trajectory]], update: Update | None, iteration: int
) -> dict[str, int]:
    """Where every generated token went, by the names of the log, from the rows of the update themselves.

    sampled: as they came from the sampler. candidate: drawn from recorded candidates. recorded: in rows. trained: in
    the rows of the update. failed: below rollouts without a reward. unfinished: never continued to an end. left_out:
    recorded, in trees that the update leaves out.

    Raises:
        DataError: a token that is missing or counted twice, or rows that are not those of the trees.
    """
    in_update = {} if update is None else {own[0].group: own for own in update.trees}
    sampled, chosen = (sum(getattr(each, name) for each in trees) for name in ("num_sampled", "num_chosen"))
    totals = {"sampled": sampled, "candidate": chosen}
    totals |= dict.fromkeys(("recorded", "trained", "failed", "unfinished", "left_out"), 0)
    generated = 0
    for each, own in zip(trees, rows, strict=True):
        is_trained = each.tree.group in in_update
        account = each.tree.account(in_update.get(each.tree.group, own))
        generated += account["generated"]
        for name in ("recorded", "failed", "unfinished"):
            totals[name] += account[name]
        totals["trained" if is_trained else "left_out"] += account["trained" if is_trained else "recorded"]
    what = f"iteration {iteration}: "
    if sampled + chosen != generated:
        what += f"the sampler gave {sampled} tokens and {chosen} were drawn from candidates, but {generated} are in the"
        raise DataError(f"{what} trees.")
    if generated != totals["recorded"] + totals["failed"] + totals["unfinished"]:
        raise DataError(f"{what}{generated} generated tokens do not add up: {totals}.")
    if totals["recorded"] != totals["trained"] + totals["left_out"]:
        raise DataError(f"{what}the recorded tokens are not those of the update and those left out of it: {totals}.")
    return totals


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


def figures(
    trees: Sequence[GrowingTree],
    account: Mapping[str, int],
    book: SuccessBook,
    seconds: Mapping[str, float],
    success_at: float,
) -> dict[str, float]:
    """What is logged of the rollouts of an iteration; means over rollouts, token counts, seconds."""
    rewards = [each.tree[leaf].reward for each in trees for leaf in each.tree.rewarded_leaves]
    known = np.array([reward for reward in rewards if reward is not None])
    leaves = [(each.tree, leaf) for each in trees for leaf in each.tree.leaves]
    lengths = [tree.num_sampled_before(leaf, len(tree[leaf])) for tree, leaf in leaves]
    depths = [  # generated tokens before each branch that does not start at the prompt
        each.tree.num_sampled_before(node.parent, node.cut)
        for each in trees
        for node in each.tree.nodes
        if node.parent != PROMPT
    ]
    values: dict[str, float] = {
        "num_rollouts": float(len(leaves)),
        "failed_rollouts": float(len(leaves) - len(known)),
        "refused_branches": float(sum(each.num_refused for each in trees)),
        "rollout_length": float(np.mean(lengths)) if lengths else 0.0,
        "num_branches": float(len(depths)),
        **{f"{name}_tokens": float(count) for name, count in account.items()},
        **{f"seconds_{name}": spent for name, spent in seconds.items()},
        "sampled_tokens_per_second": account["sampled"] / max(seconds["sampling"], 1e-9),
    }
    if len(known):
        values |= {"reward": float(known.mean()), "success": float((known >= success_at).mean())}
    if depths:
        values["branch_depth"] = float(np.mean(depths))
    if book.brier == book.brier:
        values["book_brier"] = book.brier
    return values


def warnings_of(
    trees: Sequence[GrowingTree],
    account: Mapping[str, int],
    update: Update | None,
    objective: object,
    gap: float,
    gap_limit: float,
) -> list[str]:
    """Sentences on an iteration that should not pass unseen. gap: `logprob_gap`, which an objective may correct."""
    is_corrected = getattr(objective, "sampler_correction", None) is not None
    found = (
        *(nothing_learned(trees, update, objective), few_recorded(account)),
        None if is_corrected else gap_warning(gap, gap_limit),
    )
    return [line for line in found if line is not None]


def nothing_learned(trees: Sequence[GrowingTree], update: Update | None, objective: object) -> str | None:
    """That an iteration teaches nothing, and why: no rollout has an advantage. None where one has."""
    if not isinstance(objective, PolicyGradient):
        return None
    if update is not None and any(np.any(row.advantages) for own in update.trees for row in own):
        return None
    rewards = [each.tree[leaf].reward for each in trees for leaf in each.tree.rewarded_leaves]
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

    def on_train_begin(self, _args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self._began, self._first = time.monotonic(), state.global_step

    def on_log(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        *_: object,
        logs: dict[str, float] | None = None,
        **__: object,
    ) -> None:
        if logs and "iteration" in logs:
            done = state.global_step - self._first
            left = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step) if done else 0.0
            named = [each for each in _LINE if each[0] in logs and (logs[each[0]] or each[0] != "failed_rollouts")]
            shown = [text.format(logs[name]) if "{" in text else num(round(logs[name]), text) for name, text in named]
            shown += [f"ETA {duration(left)}"] * bool(left)
            self.write(f"iteration {logs['iteration']:.0f}/{state.max_steps}: {', '.join(shown)}\n")
