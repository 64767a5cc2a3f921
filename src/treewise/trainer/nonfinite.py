"""A loss or gradient that is not finite never reaches the optimizer; its trees are named and written aside."""

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treewise.errors import NonFiniteError
from treewise.tree.forest import Forest
from treewise.tree.trajectory import STREAMS

logger = logging.getLogger("treewise")

POLICIES = ("stop", "skip")
_HISTORY = 50  # norms that a spike is compared with


class Faults:
    """Judges each step before the optimizer takes it.

    policy: `stop`, or `skip` the update. max_skipped: updates skipped in a row, after which the run stops all the
    same. spike_factor: a gradient norm beyond this many medians of the last ones is said; 0 for never. path: where
    trees of faulty steps are written.
    """

    def __init__(self, policy: str, max_skipped: int, spike_factor: float, path: Path) -> None:
        self.policy, self.max_skipped, self.spike_factor, self.path = policy, max_skipped, spike_factor, path
        self.num_skipped = 0
        self._in_a_row = 0
        self._norms: deque[float] = deque(maxlen=_HISTORY)

    def judge(self, step: int, norm: float, is_finite: bool, forests: Sequence[Forest], suspects: list[str]) -> bool:
        """Whether the optimizer may take step number `step`.

        norm: of the whole gradient. is_finite: of loss and gradient, on all ranks. forests: the trees of this rank.
        suspects: sources whose own loss is not finite, where that is known.

        Raises:
            NonFiniteError: under the policy `stop`, or after too many updates skipped in a row.
        """
        if is_finite:
            self._in_a_row = 0
            self._look_for_spike(step, norm, forests)
            return True
        write_aside(self.path, forests, {"step": step})
        what = "gradient" if not math.isfinite(norm) else "loss"
        named = suspects or sources(forests)
        trees = f" {'Not finite by themselves' if suspects else 'Its trees'}: {', '.join(named)}." if named else ""
        said = f"the {what} of step {step} is not finite; it was not applied.{trees} Written to {self.path}."
        self.num_skipped += 1
        self._in_a_row += 1
        if self.policy == "skip" and self._in_a_row <= self.max_skipped:
            logger.warning("%s", said)
            return False
        many = f" {self.max_skipped} steps in a row were skipped before." if self.policy == "skip" else ""
        raise NonFiniteError(f"{said}{many} Lower learning_rate, or look at these records.")

    def _look_for_spike(self, step: int, norm: float, forests: Sequence[Forest]) -> None:
        if self.spike_factor and len(self._norms) >= 10:
            median = statistics.median(self._norms)
            if norm > self.spike_factor * median > 0:
                trees = ", ".join(sources(forests)) or "unnamed trees"
                logger.warning("step %d: gradient norm %.3g, the median before is %.3g: %s", step, norm, median, trees)
        self._norms.append(norm)


def sources(forests: Iterable[Forest], limit: int = 5) -> list[str]:
    """Where the trees of a step came from, the first few."""
    found: dict[str, None] = {}
    for forest in forests:
        for trajectory in forest.trajectories or ():
            if trajectory.source:
                found.setdefault(trajectory.source)
            if len(found) == limit:
                return list(found)
    return list(found)


def unsound(forest: Forest, logprobs_of: Callable[[Forest], list[torch.Tensor]]) -> list[str]:
    """Sources of the trajectories whose own log-probs are not finite, each computed alone: in a batch, one NaN may
    reach others through masked kernels, where it is multiplied by zero.
    """
    return [
        trajectory.source or f"trajectory {number}"
        for number, trajectory in enumerate(forest.trajectories or ())
        if not bool(torch.isfinite(logprobs_of(Forest.from_trajectories([trajectory]))[0]).all())
    ]


def write_aside(path: Path, forests: Iterable[Forest], facts: dict[str, Any]) -> None:
    """Appends the trajectories as rows of token ids, which `treewise inspect` and `treewise verify` read. A disk that
    refuses is said, and stops nothing.
    """
    try:
        with path.open("a", encoding="utf-8") as stream:
            for row in _rows(forests):
                stream.write(json.dumps({**row, **facts}) + "\n")
    except OSError as error:
        logger.warning("%s: the trees could not be written (%s)", path, error.strerror)


def _rows(forests: Iterable[Forest]) -> Iterable[dict[str, Any]]:
    for forest in forests:
        if forest.trajectories is None:
            for number in range(forest.num_trajectories):
                path = forest.paths[number]
                streams = {name: values[path].tolist() for name, values in forest.tree_streams.items()}
                yield {"token_ids": forest.token_ids[path].tolist(), **streams}
            continue
        for each in forest.trajectories:
            found = {name: getattr(each, name) for name in ("token_ids", *STREAMS)}
            row = {name: np.asarray(value).tolist() for name, value in found.items() if value is not None}
            named = {"group": each.group, "rollout": each.rollout, "reward": each.reward, "source": each.source or None}
            yield row | {name: _scalar(value) for name, value in named.items() if value is not None}


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else str(value)
