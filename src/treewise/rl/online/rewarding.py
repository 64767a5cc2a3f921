"""Rewards of rollouts that ended; a rollout whose reward failed is set aside, with the reason on its node."""

from collections.abc import Sequence
from typing import Any

from treewise.rl.branching import RolloutTree
from treewise.rl.online.conversations import Conversation
from treewise.rl.online.journal import Journal
from treewise.rl.tasks import RewardFailure, RewardRunner, TaskItem

Ended = tuple[RolloutTree, int, TaskItem, Conversation]


def judge(ended: Sequence[Ended], runner: RewardRunner, journal: Journal) -> None:
    """Gives each ended rollout (tree, node, item, conversation) its reward or its error.

    Raises:
        TaskError: a reward failed, and the runner raises.
    """
    if not ended:
        return
    before = runner.failures.copy()
    outcomes = rewards_of([(item, conversation) for _, _, item, conversation in ended], runner, journal)
    is_replayed = runner.failures == before
    for (tree, index, _, _), outcome in zip(ended, outcomes, strict=True):
        if isinstance(outcome, RewardFailure):
            tree.judge(index, error=str(outcome))
            if is_replayed:
                runner.failures[outcome.kind] += 1
        else:
            tree.judge(index, reward=outcome)


def rewards_of(
    rollouts: Sequence[tuple[TaskItem, Conversation]], runner: RewardRunner, journal: Journal
) -> list[float | RewardFailure]:
    """A reward or a failure for each rollout, in their order; recorded ones are not computed again."""

    def compute() -> Any:
        outcomes = [conversation.reward(runner) for _, conversation in rollouts]
        return [[each.key, each.kind, each.message] if isinstance(each, RewardFailure) else each for each in outcomes]

    question = [[item.key, conversation.token_ids] for item, conversation in rollouts]
    answers = journal.once("reward", question, compute)
    return [RewardFailure(*each) if isinstance(each, list) else float(each) for each in answers]
