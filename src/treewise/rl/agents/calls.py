"""The calls of each episode, with their text: a file beside the rollouts of an iteration, for people and the page."""

import json
from collections.abc import Sequence
from pathlib import Path

from treewise.rl.agents.episodes import Episode
from treewise.rl.agents.rows import EpisodeRecord

CALLS = "calls"  # folder


def calls_of(episode: Episode) -> list[dict[str, object]]:
    """The calls as a tree: where each went on from, what was written there, and what came."""
    decode = episode.chat.decode
    return [
        {
            "call": call.id,
            "from": None if call.start is None else call.start.call.number,
            "model": call.asked.model,
            "is_trained": call.is_trained,
            "prompt_tokens": call.num_prompt,
            "new_tokens": len(call.new_ids),
            "again_tokens": call.num_again,
            "tokens": [choice.num_sampled for choice in call.choices],
            "finish": [choice.finish for choice in call.choices],
            "rewards": [choice.reward for choice in call.choices],
            "fork": call.reason,
            "text": decode(call.new_ids),
            "replies": [decode(choice.turn.token_ids) for choice in call.choices],
        }
        for call in episode.recording.calls
    ]


def write_calls(run: Path, iteration: int, records: Sequence[tuple[str, EpisodeRecord]], *, is_first: bool) -> None:
    """Writes a line for each episode. records: of the episodes, each with its task; is_first: they begin the file,
    and others of the iteration may follow.
    """
    path = run / CALLS / f"iteration-{iteration:05d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "task": task,
            "reward": record["reward"],
            "kind": record["kind"],
            "failure": record["failure"],
            "calls": record["calls"],
        }
        for task, record in records
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with path.open("w" if is_first else "a", encoding="utf-8") as file:
        file.write(text)
