"""From the finished trees of an iteration to the trajectories of its update, and the account of every token.

Tokens that the sampler made, and first tokens of branches that a policy drew from recorded candidates, are recorded
ones, and those of rollouts that failed or were never continued; recorded ones are trained but for the trees that were
left out. Both are checked at every iteration, from the rows that the engine is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treewise.errors import DataError
from treewise.rl.online.sampling import GrowingTree
from treewise.rl.update import Update, credited, with_streams
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class IterationAccount:
    """Generated tokens of an iteration.

    sampled: as they came from the sampler. chosen: from recorded candidates. generated: both, as they are in the nodes
    of the trees. recorded: in rows. trained: in the rows of the update. failed: below rollouts without a reward.
    unfinished: never continued to an end. left_out: recorded, in trees that the update leaves out.
    """

    sampled: int
    chosen: int
    generated: int
    recorded: int
    trained: int
    failed: int
    unfinished: int
    left_out: int

    def warning(self) -> str | None:
        """A sentence where less than half of the generated tokens are in rows, so that figures are of few rollouts."""
        if 2 * self.recorded >= self.generated:
            return None
        return (
            f"{self.recorded:,} of {self.generated:,} generated tokens are recorded ({self.failed:,} of rollouts "
            f"without a reward, {self.unfinished:,} of rollouts that did not end): the figures are of few rollouts. "
            "Raise tokens_per_iteration, lower max_new_tokens, or mend the rewards."
        )

    def check(self, iteration: int) -> None:
        """Raises `DataError` where a token is missing or counted twice."""
        if self.sampled + self.chosen != self.generated:
            raise DataError(
                f"iteration {iteration}: the sampler gave {self.sampled} tokens and {self.chosen} were drawn from "
                f"candidates, but {self.generated} are in the trees."
            )
        if self.generated != self.recorded + self.failed + self.unfinished:
            raise DataError(
                f"iteration {iteration}: {self.generated} generated tokens, but {self.recorded} recorded, "
                f"{self.failed} of failed rollouts and {self.unfinished} unfinished."
            )
        if self.recorded != self.trained + self.left_out:
            raise DataError(
                f"iteration {iteration}: {self.recorded} recorded tokens, but {self.trained} in the update and "
                f"{self.left_out} left out of it."
            )


def rows_of(trees: Sequence[GrowingTree], iteration: int) -> list[list[Trajectory]]:
    """The rows of each tree, one per rewarded rollout."""
    return [each.tree.trajectories(source=f"iteration {iteration}, {each.tree.group}") for each in trees]


def credited_rows(
    rows: Sequence[list[Trajectory]],
    objective: Any,
    *,
    method: str | None,
    settings: Mapping[str, Any],
    drop_flat_groups: bool,
    num_updates: int,
    old_logprobs: str,
) -> Update | None:
    """The rows with advantages, and where their log-probs come from; None where nothing is left to train.

    Raises:
        ConfigError: an unknown method or setting.
    """
    kept = [own for own in rows if own]
    if not kept:
        return None
    update = credited(
        kept,
        objective,
        method=method,
        settings=settings,
        drop_flat_groups=drop_flat_groups,
        may_be_empty=True,
    )
    if not update.trees:
        return None
    return with_streams(update, objective, num_updates=num_updates, old_logprobs=old_logprobs)


def account_of(
    trees: Sequence[GrowingTree], rows: Sequence[list[Trajectory]], update: Update | None, iteration: int
) -> IterationAccount:
    """Counts where every generated token went, from the rows of the update themselves.

    Raises:
        DataError: a token that is missing or counted twice, or rows that are not those of the trees.
    """
    in_update = {} if update is None else {own[0].group: own for own in update.trees}
    totals = dict.fromkeys(("generated", "recorded", "trained", "failed", "unfinished", "left_out"), 0)
    for each, own in zip(trees, rows, strict=True):
        is_trained = each.tree.group in in_update
        account = each.tree.account(in_update.get(each.tree.group, own))
        for name in ("generated", "recorded", "failed", "unfinished"):
            totals[name] += getattr(account, name)
        totals["trained" if is_trained else "left_out"] += account.trained if is_trained else account.recorded
    from_sampler = sum(each.num_sampled for each in trees)
    result = IterationAccount(sampled=from_sampler, chosen=sum(each.num_chosen for each in trees), **totals)
    result.check(iteration)
    return result
