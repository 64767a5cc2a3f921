"""The tasks of an agent: rows of a file, each of which an episode is given as it stands."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treewise.errors import ConfigError, DataError
from treewise.rl.tasks import TaskItem
from treewise.rl.tasks.protocol import RewardRequest, Split, check_held_out, row_of_split, rows_of_split
from treewise.rl.tasks.reward_functions import RewardFunction, RewardFunctions


@dataclass(slots=True)
class AgentTask:
    """Rows, whatever their columns are.

    Parameters:
        rows: an episode is given one of them.
        reward_functions, reward_weights: in place of the agent's own reward, over the calls of an episode
            (`request_of`).
        held_out: the share of rows, taken from the end, that is never practised.

    Raises:
        ConfigError: a share that cannot be, or reward functions that cannot be loaded.
        DataError: there is no row to practise.
    """

    rows: Sequence[Mapping[str, Any]]
    reward_functions: Sequence[str | RewardFunction] = ()
    reward_weights: Sequence[float] | None = None
    held_out: float = 0.1
    name: str = "tasks"
    functions: RewardFunctions | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.reward_functions or self.reward_weights:
            self.functions = RewardFunctions.of(self.reward_functions, self.reward_weights, self.name)
        check_held_out(self.name, self.held_out)
        if not self.num_items("train"):
            raise DataError(f"{self.name}: no row of {len(self.rows)} is left to practise (held_out={self.held_out}).")

    def num_items(self, split: Split) -> int:
        """Rows of a split."""
        return len(rows_of_split(len(self.rows), self.held_out, split))

    def item(self, split: Split, index: int) -> TaskItem:
        """A row, and as its prompt the same as text; an index beyond the rows begins again."""
        number = row_of_split(self.name, len(self.rows), self.held_out, split, index)
        row = dict(self.rows[number])
        return TaskItem(f"{self.name}/row {number}", json.dumps(row, ensure_ascii=False, default=str), row)

    def rewards(self, requests: Sequence[RewardRequest]) -> Sequence[float | None]:
        """Weighted sums of the reward functions, without what guards a run.

        Raises:
            ConfigError: there are none: the agent rewards itself.
        """
        if self.functions is None:
            raise ConfigError(f"{self.name}: the tasks of an agent are rewarded by it; give --agent.")
        return self.functions.rewards(requests)


def request_of(item: TaskItem, calls: Sequence[Mapping[str, Any]], reward: float | None) -> RewardRequest:
    """What reward functions get of an episode: as prompt the messages of its first call, as completion the reply to its
    last, the columns of its row, `calls` (of each `call`, `model`, `messages` and `replies`), and the agent's own
    `agent_reward`, where it gave one.
    """
    prompt: tuple[Any, ...] = tuple(calls[0]["messages"]) if calls else ()
    replies = calls[-1]["replies"] if calls else []
    message = replies[-1] if replies else {"role": "assistant", "content": ""}
    extra = {**item.extra, "calls": list(calls), "agent_reward": reward}
    return RewardRequest(TaskItem(item.key, prompt, extra), str(message.get("content") or ""), message=message)
