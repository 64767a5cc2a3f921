"""What a run sampled, with its text: rollouts of each iteration as token rows in the run's folder, which `treewise
inspect` and `load_trees` open, held-out samples of each evaluation, and a few of both in the terminal.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treewise.data.io.printable import printable
from treewise.trainer.checkpoint.manifest import write_atomically
from treewise.tree.trajectory import Trajectory

FOLDER, EVALUATIONS = "rollouts", "evaluations"
NUM_SHOWN = 3  # held-out samples in the terminal
MAX_SHOWN = 400  # characters of a prompt's end and of a completion in the terminal


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout as text. key: of its item; reward: None where it failed."""

    key: str
    prompt: str
    completion: str
    reward: float | None


def rollouts_file(run_dir: Path, iteration: int) -> Path:
    """The rows of an iteration; the first is 1."""
    return run_dir / FOLDER / f"iteration-{iteration:05d}.jsonl"


def write_rollouts(run_dir: Path, iteration: int, rows: Sequence[Sequence[Trajectory]], tokenizer: Any) -> None:
    """Writes all rows of an iteration, or none of them."""
    _write(rollouts_file(run_dir, iteration), [each for own in rows for each in _records(own, iteration, tokenizer)])


def write_evaluation(run_dir: Path, iteration: int, samples: Sequence[Sample]) -> None:
    """Writes the held-out samples of an evaluation; iteration 0 is before the first update."""
    _write(run_dir / EVALUATIONS / f"iteration-{iteration:05d}.jsonl", [asdict(each) for each in samples])


def _write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(each) + "\n" for each in records))


def _records(rows: Sequence[Trajectory], iteration: int, tokenizer: Any) -> Iterator[dict[str, Any]]:
    for row in rows:
        assert row.sampler_logprobs is not None
        assert row.draws is not None
        weights = np.asarray(row.loss_weights)
        pairs = zip(row.sampler_logprobs.tolist(), weights.tolist(), strict=True)
        sample = sample_of(row, tokenizer)
        yield {
            "token_ids": row.token_ids.tolist(),
            "loss_weights": weights.tolist(),
            "sampler_logprobs": [value if weight else None for value, weight in pairs],
            "draws": row.draws.astype(int).tolist(),
            "reward": row.reward,
            "group": row.group,
            "rollout": row.rollout,
            "iteration": iteration,
            # Not `prompt` and `completion`, which loading compares with the ids: sampled ids often differ from what
            # their text would be tokenised to.
            "prompt_text": sample.prompt,
            "completion_text": sample.completion,
        }


def sample_of(row: Trajectory, tokenizer: Any) -> Sample:
    """A row as text: the prompt ends before the first trained token."""
    ids, first = row.token_ids.tolist(), int(np.argmax(np.asarray(row.loss_weights) > 0))
    return Sample(str(row.group), tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:]), row.reward)


def best_and_worst(trees: Sequence[Sequence[Trajectory]], tokenizer: Any) -> list[Sample]:
    """Of the first tree with unequal rewards (else of the first tree) a best and a worst rollout."""
    rewarded = [[row for row in rows if row.reward is not None] for rows in trees]
    spans = [sorted(rows, key=lambda row: float(row.reward or 0.0), reverse=True) for rows in rewarded if rows]
    unequal = [rows for rows in spans if rows[0].reward != rows[-1].reward]
    chosen = [unequal[0][0], unequal[0][-1]] if unequal else [rows[0] for rows in spans[:1]]
    return [sample_of(row, tokenizer) for row in chosen]


def lines_of(title: str, samples: Sequence[Sample]) -> str:
    """Samples for a terminal, control characters escaped: the end of each prompt once, below it what was sampled."""
    lines, above = [f"  {title}"], ""
    for each in samples:
        if each.prompt != above:
            lines.append(f"    {'…' if len(each.prompt) > MAX_SHOWN else ''}{printable(each.prompt[-MAX_SHOWN:])}")
            above = each.prompt
        reward = "none" if each.reward is None else f"{each.reward:.3g}"
        more = "…" if len(each.completion) > MAX_SHOWN else ""
        lines.append(f"      reward {reward:>5}  {printable(each.completion[:MAX_SHOWN])}{more}")
    return "\n".join(lines) + "\n"
