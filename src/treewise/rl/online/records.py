"""The rollouts of each iteration as token rows in the run's folder, which `treewise inspect` and `load_trees` open."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treewise.trainer.checkpoint.manifest import write_atomically
from treewise.tree.trajectory import Trajectory

FOLDER = "rollouts"


def rollouts_file(run_dir: Path, iteration: int) -> Path:
    """The rows of an iteration; the first is 1."""
    return run_dir / FOLDER / f"iteration-{iteration:05d}.jsonl"


def write_rollouts(run_dir: Path, iteration: int, rows: Sequence[Sequence[Trajectory]]) -> None:
    """Writes all rows of an iteration, or none of them."""
    path = rollouts_file(run_dir, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for own in rows for row in _records(own, iteration)]
    write_atomically(path, "".join(line + "\n" for line in lines))


def _records(rows: Sequence[Trajectory], iteration: int) -> Iterator[dict[str, Any]]:
    for row in rows:
        assert row.sampler_logprobs is not None
        assert row.draws is not None
        weights = np.asarray(row.loss_weights)
        pairs = zip(row.sampler_logprobs.tolist(), weights.tolist(), strict=True)
        yield {
            "token_ids": row.token_ids.tolist(),
            "loss_weights": weights.tolist(),
            "sampler_logprobs": [value if weight else None for value, weight in pairs],
            "draws": row.draws.astype(int).tolist(),
            "reward": row.reward,
            "group": row.group,
            "rollout": row.rollout,
            "iteration": iteration,
        }
