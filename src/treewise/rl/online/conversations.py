"""One rollout of a task as the loop sees it: token ids that grow, turns that end, and copies from any earlier token."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from treewise.data.render.messages import clean_conversation
from treewise.errors import DataError
from treewise.rl.tasks import Calls, ChatTokens, EnvironmentTask, Episode, TaskItem, start_episode
from treewise.rl.tasks.protocol import RewardRequest, SingleTurnTask, Task


class Conversation(Protocol):
    """A rollout while it grows."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt and all that followed: what the sampler continues."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds sampled tokens of the present turn."""

    def end_turn(self, finish: str) -> tuple[list[int], str | None]:
        """Ends the turn; the observation that follows it, and why the rollout ended (None where it goes on)."""

    def branch(self, num_tokens: int) -> "Conversation":
        """An independent conversation of the first `num_tokens` tokens.

        Raises:
            TaskError: the environment cannot be brought back there.
        """


@dataclass(slots=True)
class SingleTurn:
    """One prompt, one completion."""

    task: SingleTurnTask
    item: TaskItem
    chat: ChatTokens
    num_prompt_tokens: int
    token_ids: list[int]

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids += [int(token) for token in token_ids]

    def end_turn(self, finish: str) -> tuple[list[int], str | None]:
        return [], finish

    def branch(self, num_tokens: int) -> "SingleTurn":
        return SingleTurn(self.task, self.item, self.chat, self.num_prompt_tokens, self.token_ids[:num_tokens])

    def request(self) -> RewardRequest:
        """What its reward is computed from."""
        prompt_ids, ids = self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens :]
        text = self.chat.tokenizer.decode(ids, skip_special_tokens=True)
        message = None if isinstance(self.item.prompt, str) else self.chat.message(ids, prompt_ids)
        return RewardRequest(self.item, text, tuple(ids), message)


@dataclass(slots=True)
class Turns:
    """An episode with an environment, and the tokens of the turn that has not ended."""

    episode: Episode
    pending: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [*self.episode.token_ids, *self.pending]

    def extend(self, token_ids: Sequence[int]) -> None:
        self.pending += [int(token) for token in token_ids]

    def end_turn(self, finish: str) -> tuple[list[int], str | None]:
        before = len(self.episode.token_ids) + len(self.pending)
        self.episode.step(self.pending, finish)
        self.pending = []
        return self.episode.token_ids[before:], self.episode.end_reason

    def branch(self, num_tokens: int) -> "Turns":
        is_pending = num_tokens >= len(self.episode.token_ids) and self.episode.end_reason is None
        starts = self.episode.turn_starts
        turn = self.episode.num_turns if is_pending else bisect_right(starts, num_tokens) - 1
        copy = self.episode.branch(turn)
        return Turns(copy, self.token_ids[len(copy.token_ids) : num_tokens])


def start(task: Task, item: TaskItem, chat: ChatTokens, calls: Calls) -> SingleTurn | Turns:
    """A conversation that stands behind the prompt."""
    if isinstance(task, EnvironmentTask):
        return Turns(start_episode(task, item, chat, calls))
    prompt = item.prompt
    if isinstance(prompt, str):
        ids = list(chat.text_ids(prompt))
    else:
        talk = chat.template.prepare(clean_conversation(list(prompt), item.key, "prompt"), item.key)
        ids = list(chat.prompt_ids(talk.messages, None, item.key))
    if not ids:
        raise DataError(f"{item.key}: the prompt has no tokens.")
    return SingleTurn(task, item, chat, len(ids), ids)  # type: ignore[arg-type]
