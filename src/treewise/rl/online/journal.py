"""What survives a kill: `LoopState`, of every checkpoint, and the journal of the iteration after it.

The journal is a log of expensive results, on disk as soon as they are known, so that none is computed twice.
An iteration is a deterministic program around a few expensive results: completions of a sampler, rewards, evaluations.
The journal stores these results, each by the name of its request with a hash of it, in whatever order they came. A run
that is resumed executes the program again and reads the results, bit for bit; what was not recorded is computed.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from treewise.base import features
from treewise.base.durable import own_file
from treewise.base.own_files import damage, disk_error, is_no_room, read_own, sealed, unsealed
from treewise.distributed import ranks
from treewise.errors import CheckpointError, duration, num
from treewise.rl.samplers import Completion, SampleRequest
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks.rewards import Outcome, RewardFailure
from treewise.trainer.arguments import TreeTrainingArguments

logger = logging.getLogger("treewise")

JOURNAL = "journal"  # the folder
ROOM_SECONDS, SECONDS_BETWEEN_TRIES = 600.0, 1.0  # that answers wait for room on the disk
_OF_UPDATES = (  # arguments of training that decide by how much an update changes the weights
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("router_z_coefficient", "router_loss_choices", "float32_gradients", "temperature", "nonfinite", "bf16", "fp16"),
)

_NUMBERS = ("iteration", "num_updates", "overshoot", "num_rollouts", "rollout_tokens", "num_sampled")
_ARRAYS = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "entropies": np.float32,
    "top_ids": np.int32,
    "top_logprobs": np.float32,
}


@dataclass(slots=True)
class LoopState(ExportableState):
    """What a run is between two iterations, beside weights, optimizer and schedule; a part of `trainer_state.json`.

    iteration: how many are done. overshoot: generated tokens beyond the budgets so far. num_rollouts, rollout_tokens:
    of all iterations, for the expected length. failures: rewards that failed, by kind. curriculum: the state of the
    sampler of items.
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
        """As plain JSON values; `from_json` takes them."""
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

    @classmethod
    def of_checkpoint(cls, state: TrainerState, folder: Path) -> "LoopState":
        """Takes the state of the loop out of transformers' own.

        Raises:
            CheckpointError: of another kind of run.
        """
        own = vars(state)["stateful_callbacks"].pop(cls.__name__, None)  # a dictionary, annotated as a list
        if not isinstance(own, dict):
            raise CheckpointError(f"{folder}: not a checkpoint of an online run.")
        return cls.from_json(own)


# -- the journal ------------------------------------------------------------------------------------------------------


def journal_file(run_dir: Path, iteration: int) -> Path:
    """The journal of an iteration; the first is 1. Each of several processes has one, of the trees that it grows."""
    part = f"-rank-{ranks.own()}-of-{ranks.count()}" if ranks.count() > 1 else ""
    return run_dir / JOURNAL / f"iteration-{iteration:05d}{part}.jsonl"


def journals(run_dir: Path, last: int | None = None) -> list[Path]:
    """The journals of all processes; those up to iteration `last`."""
    found = sorted((run_dir / JOURNAL).glob("iteration-*.jsonl"))
    return [path for path in found if last is None or int(path.stem.split("-")[1]) <= last]


def facts_of_updates(args: TreeTrainingArguments, num_updates: int, objective: object, others: Any) -> str:
    """Names what decides the weights that a run ends each iteration with, beside its rollouts and what rounds.

    num_updates: of the whole run, for its schedule. others: what identifies the run, as plain values.
    """
    own = {name: str(getattr(args, name, None)) for name in _OF_UPDATES}
    loss = repr(objective) if is_dataclass(objective) else type(objective).__qualname__
    return hashlib.sha256(json.dumps([own, num_updates, loss, others], sort_keys=True).encode()).hexdigest()[:16]


def forget_foreign(run_dir: Path, version: int, facts: str) -> None:
    """Cuts every journal before what a policy after `version` sampled in a run of other facts: this run will not have
    that policy. Says how many completions and rewards are dropped.
    """
    num_dropped = 0
    for path in journals(run_dir):
        size = 0
        for _, end, entry in _lines(path):
            versions = [answer["version"] or 0 for answer in entry["answers"] if isinstance(answer, dict)]
            if entry.get("facts") != facts and max(versions, default=0) > version:
                num_dropped += sum(len(entry["names"]) for start, _, entry in _lines(path) if start >= size)
                os.truncate(path, size)
                break
            size = end
    if num_dropped:
        logger.warning(
            "settings of updates changed since the journal was written: %s of policies after iteration %d, which this "
            "run will not have, are dropped and computed again",
            *(num(num_dropped, "recorded answer"), version),
        )


class Journal:
    """The answers of one iteration. A line that was cut off by the end of the process is dropped, with all answers of
    the batch that it holds.

    Parameters:
        path: of the file, made with the first answer; None where nothing is resumed, so nothing is recorded.
        facts: of the run, by which later ones tell whether its policies are theirs (`forget_foreign`).
    """

    def __init__(self, path: Path | None, facts: str = "") -> None:
        self.path, self._facts = path, facts
        self.num_replayed = 0
        self._answers: dict[str, tuple[str, Any, int]] = {}  # by name: hash of the question, answer, offset of the line
        self._phase = 0
        self._size = 0
        self._last = 0  # offset of the line of the answer that was given last
        self._marked: int | None = None
        self._has_warned = False
        if path is not None and path.exists():
            self._read(path)

    def begin_phase(self) -> None:
        """Begins a part of the program in which every name stands for one request; phases come in a fixed order."""
        self._phase += 1

    def recall(self, kind: str, name: str, question: object) -> Any:
        """The recorded answer to a question of this phase; None where there is none, or one to another question."""
        found = self._answers.pop(f"{kind} {self._phase} {name}", None)
        if found is None:
            return None
        key, answer, offset = found
        if key != _hash(kind, question):
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: %s %s of phase %d is that of another request than this run makes (an environment or a setting "
                    "changed); it and all that follows from it are computed again",
                    *(self.path, kind, name, self._phase),
                )
            return None
        self.num_replayed += 1
        self._last = offset
        return answer

    def record(self, kind: str, answers: Sequence[tuple[str, object, object]]) -> None:
        """Writes answers, all or none: of each its name in this phase, the question, and the answer, plain JSON. Where
        the disk has no room, they wait for some.

        Raises:
            DiskError: there was none within `ROOM_SECONDS`; a run that is resumed makes these answers again.
        """
        if self.path is None:
            return
        names = [f"{kind} {self._phase} {name}" for name, _, _ in answers]
        keys = [_hash(kind, question) for _, question, _ in answers]
        entry = {"names": names, "keys": keys, "answers": [answer[2] for answer in answers], "facts": self._facts}
        line = sealed(entry).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append(self.path, line)
        self._last = self._size
        self._size += len(line)

    def _append(self, path: Path, line: bytes) -> None:
        end: float | None = None
        while True:
            try:
                with own_file(path, "r+b" if path.exists() else "w+b") as stream:
                    stream.truncate(self._size)
                    stream.seek(self._size)
                    stream.write(line)
                    stream.flush()
                    os.fsync(stream.fileno())
                return
            except OSError as error:
                if not is_no_room(error):
                    raise
                found = disk_error(path, error, len(line))
                if end is None:
                    logger.warning("%s The run waits for it, %s at most.", found, duration(ROOM_SECONDS))
                    end = time.monotonic() + ROOM_SECONDS
                elif time.monotonic() > end:
                    raise found from error
            time.sleep(SECONDS_BETWEEN_TRIES)

    def mark(self) -> None:
        """Marks the answer that was given last, unless one before it is marked."""
        self._marked = self._last if self._marked is None else min(self._marked, self._last)

    def forget_from_mark(self) -> None:
        """Drops the marked answer and all that were recorded after it, so that a resumed run computes them."""
        if self._marked is not None and self.path is not None and self.path.is_file():
            self._size = self._marked
            os.truncate(self.path, self._size)

    def _read(self, path: Path) -> None:
        for start, end, entry in _lines(path):
            for name, key, answer in zip(entry["names"], entry["keys"], entry["answers"], strict=True):
                self._answers[name] = (key, answer, start)
            self._size = end


def _lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The lines of a journal up to the first that is not what was written: where each begins and ends, and what it
    holds. A last line without an end was cut off by a kill; anything else is a warning.

    Raises:
        CheckpointError: the file cannot be read.
    """
    start = 0
    content = read_own(path, bytes, "remove it, and what it holds is sampled again", CheckpointError)
    for number, line in enumerate(content.split(b"\n"), start=1):
        end = start + len(line) + 1
        if end > len(content):  # without a line end
            return
        try:
            entry = unsealed(line)
        except (ValueError, RecursionError) as error:
            left = "it and what follows are computed again"
            logger.warning("%s:%d: damaged (%s): %s", path, number, damage(error), left)
            return
        yield start, end, entry
        start = end


def _hash(kind: str, question: object) -> str:
    return hashlib.sha256(json.dumps([kind, question], sort_keys=True).encode()).hexdigest()


def question_of(request: SampleRequest) -> list[Any]:
    """Everything that decides the answer to a request, but the weights."""
    return [getattr(request, name) for name in SampleRequest.__slots__ if name != "tree"]


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """Plain JSON values; float32 survives exactly."""
    values = {name: array.tolist() for name in _ARRAYS if (array := getattr(completion, name)) is not None}
    if completion.routed_experts is not None:
        values["routed_experts"] = features.encoded_arrays.encoded(completion.routed_experts)
    return {**values, "finish_reason": completion.finish_reason, "version": completion.version}


def completion_from_json(values: dict[str, Any]) -> Completion:
    """What `completion_to_json` was given."""
    arrays: dict[str, Any] = {name: np.array(values[name], dtype) for name, dtype in _ARRAYS.items() if name in values}
    if "routed_experts" in values:
        arrays["routed_experts"] = features.encoded_arrays.decoded(
            values["routed_experts"], "routed_experts", "a sampler's answer"
        )
    return Completion(**{**values, **arrays})


def outcome_to_json(outcome: Outcome) -> list[str] | float:
    """Plain JSON values: a reward, or in a list why there is none."""
    return [outcome.key, outcome.kind, outcome.message] if isinstance(outcome, RewardFailure) else outcome


def outcome_from_json(value: Any) -> Outcome:
    """What `outcome_to_json` was given."""
    return RewardFailure(*value) if isinstance(value, list) else float(value)
