"""The tasks of an agent: rows of a file, each of which an episode is given as it stands."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treewise.errors import ConfigError, DataError
from treewise.rl.tasks import TaskItem
from treewise.rl.tasks.protocol import Split, check_held_out, rows_of_split


@dataclass(slots=True)
class AgentTask:
    """Rows, whatever their columns are.

    Parameters:
        rows: an episode is given one of them.
        held_out: the share of rows, taken from the end, that is never practised.

    Raises:
        ConfigError: a share that cannot be.
        DataError: there is no row to practise.
    """

    rows: Sequence[Mapping[str, Any]]
    held_out: float = 0.1
    name: str = "tasks"

    def __post_init__(self) -> None:
        check_held_out(self.name, self.held_out)
        if not self.num_items("train"):
            raise DataError(f"{self.name}: no row of {len(self.rows)} is left to practise (held_out={self.held_out}).")

    def num_items(self, split: Split) -> int:
        """Rows of a split."""
        return len(rows_of_split(len(self.rows), self.held_out, split))

    def item(self, split: Split, index: int) -> TaskItem:
        """A row, and as its prompt the same as text; an index beyond the rows begins again."""
        rows = rows_of_split(len(self.rows), self.held_out, split)
        if not rows:
            raise DataError(f"{self.name}: no {split} rows of {len(self.rows)} with held_out={self.held_out}.")
        number = rows[index % len(rows)]
        row = dict(self.rows[number])
        return TaskItem(f"{self.name}/row {number}", json.dumps(row, ensure_ascii=False, default=str), row)

    def rewards(self, _requests: Sequence[object]) -> Sequence[float | None]:
        """Episodes are rewarded by their agent, or by reward functions over their calls.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.name}: the tasks of an agent are rewarded by it; give --agent.")
