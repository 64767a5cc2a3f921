"""What a run is between two iterations, and its checkpoints: one folder with weights, optimizer, schedule, random
generators, the state of the loop and the book, written aside, verified and renamed.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from treewise.errors import CheckpointError
from treewise.rl.success_book import SuccessBook
from treewise.trainer import TreeTrainingArguments
from treewise.trainer.checkpoint import contents, store, weights
from treewise.trainer.checkpoint.changed_settings import check_settings
from treewise.trainer.checkpoint.manifest import check_same_run, read_manifest

NAME = "LoopState"  # of its part of trainer_state.json


@dataclass(slots=True)
class LoopState(ExportableState):
    """iteration: how many are done. overshoot: generated tokens beyond the budgets so far. num_rollouts,
    rollout_tokens: of all iterations, for the expected length. failures: rewards that failed, by kind. curriculum: the
    state of the sampler of items.
    """

    book: SuccessBook
    iteration: int = 0
    num_updates: int = 0
    overshoot: int = 0
    num_rollouts: int = 0
    rollout_tokens: int = 0
    num_sampled: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    curriculum: dict[str, Any] = field(default_factory=dict)

    @property
    def expected_tokens(self) -> float | None:
        """Generated tokens of a rollout; None before the first one."""
        return self.rollout_tokens / self.num_rollouts if self.num_rollouts else None

    def state(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, name) for name in _NUMBERS} | {
            "failures": dict(self.failures),
            "curriculum": self.curriculum,
            "book": self.book.state_dict(),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "LoopState":
        """What `state` gave."""
        numbers: dict[str, Any] = {name: int(values[name]) for name in _NUMBERS}
        book = SuccessBook.from_state(values["book"])
        return cls(book, failures=dict(values["failures"]), curriculum=dict(values["curriculum"]), **numbers)


_NUMBERS = ("iteration", "num_updates", "overshoot", "num_rollouts", "rollout_tokens", "num_sampled")


def find_checkpoint(
    run_dir: Path, wanted: str | bool, facts: dict[str, Any], args: TreeTrainingArguments
) -> tuple[Path, dict[str, Any]] | None:
    """A verified checkpoint of this run and its manifest; None where the newest is wanted and there is none. Prints
    the settings of training that changed.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, one of another run, or settings that cannot change.
    """
    if wanted is True:
        found, passed_over = store.newest(run_dir)
        for reason in passed_over:
            sys.stderr.write(f"passed over: {reason}\n")
        if found is None:
            return None
    else:
        found = Path(str(wanted))
    manifest = read_manifest(found)
    check_same_run(found, manifest, facts)
    for change in check_settings(found, contents.ARGUMENTS, args):
        sys.stderr.write(f"changed since {found.name}: {change}\n")
    return found, manifest


def load(folder: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> tuple[TrainerState, LoopState]:
    """Loads everything of a verified checkpoint.

    Raises:
        CheckpointError: a checkpoint of another kind of run, or of another model.
    """
    loop = TrainerState.load_from_json(str(folder / contents.STATE))
    own = loop.stateful_callbacks.pop(NAME, None)
    if not isinstance(own, dict):
        raise CheckpointError(f"{folder}: not a checkpoint of an online run.")
    weights.load_weights(model, folder)
    contents.load_states(folder, model, optimizer, scheduler)
    contents.load_random_state(folder)
    return loop, LoopState.from_json(own)


def facts_as_text(facts: dict[str, Any]) -> str:
    """Settings in one line, for a manifest."""
    return json.dumps(facts, sort_keys=True, default=str)
