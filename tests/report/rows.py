"""Trees of real text in which sharing is lost in each of the ways that a report names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u2028&amp;"
POLICY = (
    "You are an agent of an airline. You may book, change and cancel flights, and you must obtain the consent of the "
    "passenger before every change. Cancel no flight that was flown in part. Refunds take five to seven business days."
)
QUESTION = "I want to cancel my reservation EHGLP3, and have the price refunded to my gift card, please."
REASONING = "<think>The passenger wants a refund. Was a part of the trip flown? I must look it up first.</think>\n"
ANSWER = "Let me look at your reservation first, then I can tell you what is possible and what it would cost "
ANSWER += "you; a flight that has left, or that was flown in part, can no longer be cancelled by me or by anyone else."

Part = tuple[str, bool]  # text, trained


@dataclass(frozen=True)
class Named:
    name: str
    records: list[list[Part]]
    tokenizer: Any

    def forest(self) -> Forest:
        return Forest.from_trajectories(
            [_trajectory(self.tokenizer, parts, f"rows.jsonl:{self.name}-{i}") for i, parts in enumerate(self.records)]
        )


RECORDS: dict[str, list[list[Part]]] = {
    # Only a clock in the system prompt differs.
    "clock": [
        [(f"The time is {clock}. ", False), (POLICY, False), (QUESTION, False), (answer, True)]
        for clock, answer in (("14:05:31", ANSWER), ("09:44:02", "No refund is possible, as your flight has left."))
    ],
    # A template drops the reasoning from later context.
    "thinking": [
        [(POLICY + QUESTION, False), (REASONING + ANSWER, True)],
        [(POLICY + QUESTION, False), (ANSWER, False), ("<tool>flown: no</tool>", False), ("You get it back.", True)],
    ],
    # Two samples of one prompt.
    "samples": [
        [(POLICY + QUESTION, False), (text, True)] for text in ("Certainly. " + ANSWER, "Of course! " + ANSWER)
    ],
    "hostile<b>&": [[(HOSTILE + POLICY, False), (word + HOSTILE + ANSWER, True)] for word in ("Yes. ", "But no. ")],
}


def named_trees(tokenizer: Any) -> list[Named]:
    return [Named(name, records, tokenizer) for name, records in RECORDS.items()]


def write_rows(path: Path, tokenizer: Any) -> Path:
    """The same trees as token rows."""
    lines = []
    for name, records in RECORDS.items():
        for parts in records:
            item = _trajectory(tokenizer, parts, "")
            row = {"token_ids": item.token_ids.tolist(), "loss_weights": item.loss_weights.tolist(), "group": name}
            lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return path


def _trajectory(tokenizer: Any, parts: list[Part], source: str) -> Trajectory:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    weights = [np.full(len(each), float(trained)) for each, (_, trained) in zip(ids, parts, strict=True)]
    return Trajectory([token for each in ids for token in each], loss_weights=np.concatenate(weights), source=source)
