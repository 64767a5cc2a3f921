"""Rewards of rollouts that ended; a rollout whose reward failed is set aside, with the reason on its node."""

from collections.abc import Sequence
from typing import Any

from treewise.errors import TaskError
from treewise.rl.branching import RolloutTree
from treewise.rl.online.conversations import Conversation, SingleTurn
from treewise.rl.online.journal import Journal
from treewise.rl.tasks import RewardFailure, RewardRunner, TaskItem
from treewise.rl.tasks.rewards import RewardTally

Ended = tuple[RolloutTree, int, TaskItem, Conversation]


def judge(ended: Sequence[Ended], runner: RewardRunner, journal: Journal) -> None:
    """Gives each ended rollout (tree, node, item, conversation) its reward or its error.

    Raises:
        TaskError: a reward failed, and the runner raises.
    """
    outcomes = rewards_of([(item, conversation) for _, _, item, conversation in ended], runner, journal)
    for (tree, index, _, _), outcome in zip(ended, outcomes, strict=True):
        if isinstance(outcome, RewardFailure):
            tree.judge(index, error=str(outcome))
        else:
            tree.judge(index, reward=outcome)


def rewards_of(
    rollouts: Sequence[tuple[TaskItem, Conversation]], runner: RewardRunner, journal: Journal
) -> list[float | RewardFailure]:
    """A reward or a failure for each rollout, in their order; recorded ones are not computed again."""
    if not rollouts:
        return []

    def compute() -> Any:
        conversations: list[Any] = [conversation for _, conversation in rollouts]
        metrics: dict[str, list[float]] = {}
        outcomes: list[float | RewardFailure]
        if isinstance(conversations[0], SingleTurn):
            requests = [each.request() for each in conversations]
            outcomes, logged = runner.rewards(conversations[0].task, requests)
            metrics = logged.metrics
        else:
            outcomes = runner.of_episodes([each.episode for each in conversations])
        values = [[each.key, each.kind, each.message] if isinstance(each, RewardFailure) else each for each in outcomes]
        return {"rewards": values, "metrics": metrics}

    question = [[item.key, conversation.token_ids] for item, conversation in rollouts]
    answer = journal.once("reward", question, compute)
    outcomes = [RewardFailure(*each) if isinstance(each, list) else float(each) for each in answer["rewards"]]
    if any(isinstance(each, RewardFailure) for each in outcomes):
        journal.mark()
    runner.count(outcomes, answer["metrics"])
    return outcomes


def check_failures(tally: RewardTally, max_failed: float, where: str, journal: Journal) -> None:
    """Ends a run of which too many rewards fail; the failed ones are not recorded, so `--resume` computes them again.

    Raises:
        TaskError: more than `max_failed` of the rollouts have no reward.
    """
    try:
        tally.check(max_failed, where)
    except TaskError:
        journal.forget_from_mark()
        raise
