"""The agent of box_agent.py rewritten as an environment, beside which `make agent-demo` was measured.

treewise rl --tasks examples/box_environment.py:boxes --tasks_settings.rows tasks.jsonl --model ./my-model ...
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treewise.rl.tasks import EnvironmentTask

MAX_TURNS = 4
INSTRUCTIONS = "Use the tools, then answer with one word."


class Boxes:
    """People have boxes, and in each lies something."""

    def reset(self, boxes: dict[str, str], things: dict[str, str], answer: str) -> None:
        """Starts with a row."""
        self._boxes, self._things, self._answer, self._last = boxes, things, answer, ""

    def box_of(self, person: str) -> str:
        """The number of a person's box.

        Args:
            person: The person's name.
        """
        return self._boxes.get(person, "nobody")

    def look_in(self, box: str) -> str:
        """What lies in a box.

        Args:
            box: The number of the box.
        """
        return self._things.get(box, "nothing")

    def take_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """The conversation, of which the last message is the answer."""
        self._last = str(messages[-1].get("content") or "")

    def get_reward(self) -> float:
        """1 for the right word."""
        return float(self._last.strip() == self._answer)


def boxes(rows: str, held_out: float = 0.1) -> EnvironmentTask:
    """The task. rows: a file of rows, as the agent's."""
    found = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    for row in found:
        question = {"role": "user", "content": row["question"]}
        row["prompt"] = [{"role": "system", "content": INSTRUCTIONS}, question]
    return EnvironmentTask(Boxes, Path(rows).stem, found, max_turns=MAX_TURNS, held_out=held_out)
