"""A rollout of several turns: a conversation in which an environment answers, and rewards itself."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.tasks import Calls, EnvironmentEpisode, RewardRunner, TaskItem
from treewise.rl.tasks.episode import start_episodes
from treewise.rl.tasks.protocol import TurnTask
from treewise.rl.tasks.reward_functions import Logged
from treewise.rl.tasks.rewards import Outcome


def started(task: TurnTask, items: Sequence[TaskItem], chat: ChatTokens, calls: Calls) -> list["ManyTurns"]:
    """A conversation for each item, whose environment was reset. Raises as `start_episodes`."""
    return [ManyTurns(episode) for episode in start_episodes(task, items, chat, calls)]


@dataclass(slots=True)
class ManyTurns:
    """A `Conversation` (`rollout.py`) of an episode, and the tokens of the turn that has not ended."""

    episode: EnvironmentEpisode
    pending: list[int] = field(default_factory=list)

    is_rewarded_alone: ClassVar[bool] = True

    @property
    def token_ids(self) -> list[int]:
        return [*self.episode.token_ids, *self.pending]

    @property
    def item(self) -> TaskItem:
        return self.episode.item

    @property
    def can_return(self) -> bool:
        return self.episode.method != "start"

    @property
    def opening(self) -> Callable[[], None]:
        return self.episode.open

    def extend(self, token_ids: Sequence[int]) -> None:
        self.pending += [int(token) for token in token_ids]

    def end_turn(self, finish: str) -> Callable[[], None]:
        work = self.episode.begin_turn(self.pending, finish)
        self.pending = []
        return work

    def answered(self, finish: str) -> tuple[list[int], str | None]:
        del finish
        before = len(self.episode.token_ids)
        self.episode.end_turn()
        return self.episode.token_ids[before:], self.episode.end_reason

    def branch(self, num_tokens: int) -> "ManyTurns":
        is_pending = num_tokens >= len(self.episode.token_ids) and self.episode.end_reason is None
        starts = self.episode.turn_starts
        turn = self.episode.num_turns if is_pending else bisect_right(starts, num_tokens) - 1
        copy = self.episode.begin_branch(turn)
        return ManyTurns(copy, self.token_ids[len(copy.token_ids) : num_tokens])

    def reward_call(
        self, others: Sequence["ManyTurns"], runner: RewardRunner
    ) -> Callable[[], tuple[list[Outcome], Logged]]:
        episodes = [each.episode for each in (self, *others)]
        return lambda: (runner.of_episodes(episodes), Logged())
