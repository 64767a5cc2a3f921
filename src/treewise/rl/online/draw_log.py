"""What a run drew: one file per iteration, of which the report is made."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treewise.rl.curriculum import Outcome
from treewise.rl.curriculum.self_check import CheckReport
from treewise.rl.online.practice import Practised
from treewise.trainer.checkpoint.manifest import write_atomically

FOLDER = "curriculum"
CHECK = "check.json"


def draws_file(run_dir: Path, iteration: int) -> Path:
    """The draws of an iteration; the first is 1."""
    return run_dir / FOLDER / f"iteration-{iteration:05d}.json"


def write_draws(
    run_dir: Path, iteration: int, curriculum: str, practised: Practised, outcomes: Sequence[Outcome]
) -> None:
    """Writes which items an iteration drew, what the book predicted of them, and what came.

    predicted, observed: probabilities of success, before and in the trials of this iteration; observed is null where no
    rollout has a reward. is_kept: whether the tree may be trained.
    """
    kept = set(practised.kept)
    draws: list[dict[str, Any]] = [
        {
            "item": practised.trees[position].item.key,
            "index": each.index,
            "wave": practised.waves[position],
            "is_kept": position in kept,
            "predicted": each.predicted,
            "observed": each.success,
            "trials": each.trials,
            "reward": sum(each.rewards) / len(each.rewards) if each.rewards else None,
            "num_tokens": practised.trees[position].num_sampled,
        }
        for position, each in enumerate(outcomes)
    ]
    path = draws_file(run_dir, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"iteration": iteration, "curriculum": curriculum, "draws": draws}
    write_atomically(path, json.dumps(values) + "\n")


def write_check(run_dir: Path, curriculum: str, report: CheckReport) -> None:
    """Writes the result of a self-check."""
    path = run_dir / FOLDER / CHECK
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"curriculum": curriculum, **report.to_dict()}, indent=1) + "\n")
