"""A loss or gradient that is not finite never reaches the optimizer; its trees are named and written to a file."""

import base64
import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from treewise.errors import NonFiniteError, num
from treewise.trainer.checkpoint.store import own_file
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")

_HISTORY = 50  # norms whose median a spike is compared with
_FEWEST_NORMS = 10
_LABELS = ("group", "rollout", "reward", "rollout_weight", "source")  # of a row, beside its streams


class NonFiniteGuard:
    """Decides before each update whether the optimizer may apply the gradient.

    policy: `stop`, or `skip` the update. max_skipped: consecutive skipped updates after which the run stops under
    `skip`, too. spike_factor: a warning is logged when the gradient norm exceeds this many medians of the last 50
    steps; 0: off. path: where the trees of a step that is not finite are written.
    """

    def __init__(self, policy: str, max_skipped: int, spike_factor: float, path: Path) -> None:
        self.policy, self.max_skipped, self.spike_factor, self.path = policy, max_skipped, spike_factor, path
        self.num_skipped = self._num_consecutive = 0
        self._norms: deque[float] = deque(maxlen=_HISTORY)

    def check_step(
        self, step: int, norm: float, forests: Sequence[Forest], *, is_finite: bool, nonfinite: Sequence[str] = ()
    ) -> bool:
        """Whether the optimizer may apply step number `step`.

        norm: of the whole gradient. forests: of the step, on this rank. is_finite: whether loss and gradient are, on
        all ranks. nonfinite: sources of the trajectories whose own log-probs are not finite, where that is known.

        Raises:
            NonFiniteError: under the policy `stop`, or after too many consecutive skipped updates.
        """
        if is_finite:
            self._num_consecutive = 0
            median = statistics.median(self._norms) if len(self._norms) >= _FEWEST_NORMS else 0.0
            if self.spike_factor and norm > self.spike_factor * median > 0:
                trees = ", ".join(sources(forests)) or "unnamed trees"
                logger.warning("step %d: gradient norm %.3g, the median before is %.3g: %s", step, norm, median, trees)
            self._norms.append(norm)
            return True
        write_rows(self.path, forests, {"step": step})
        what = "gradient" if not math.isfinite(norm) else "loss"
        named = list(nonfinite) or sources(forests)
        trees = f" {'Not finite by themselves' if nonfinite else 'Its trees'}: {', '.join(named)}." if named else ""
        message = f"the {what} of step {step} is not finite; it was not applied.{trees} Written to {self.path}."
        self.num_skipped += 1
        self._num_consecutive += 1
        if self.policy == "skip" and self._num_consecutive <= self.max_skipped:
            logger.warning("%s", message)
            return False
        many = f" Skipped in a row before: {num(self.max_skipped, 'step')}." if self.policy == "skip" else ""
        raise NonFiniteError(f"{message}{many} Lower learning_rate, or look at these records.")


def sources(forests: Iterable[Forest], limit: int = 5) -> list[str]:
    """The first few sources of the trajectories of some trees."""
    named = (each.source for forest in forests for each in forest.trajectories if each.source)
    return list(dict.fromkeys(named))[:limit]


def nonfinite_trajectories(forest: Forest, logprobs_of: Callable[[Forest], list[torch.Tensor]]) -> list[str]:
    """Sources of the trajectories whose log-probs are not finite. Each is computed alone: within a batch a NaN may
    reach other trajectories through masked kernels, which multiply it by zero.
    """
    return [
        trajectory.source or f"trajectory {index}"
        for index, trajectory in enumerate(forest.trajectories)
        if not bool(torch.isfinite(logprobs_of(Forest.from_trajectories([trajectory]))[0]).all())
    ]


def write_rows(path: Path, forests: Iterable[Forest], facts: dict[str, Any]) -> None:
    """Appends the trajectories as rows of token ids, which `treewise inspect` and `treewise verify` read.

    facts: added to each row. A file that cannot be written is a warning.
    """
    try:
        with own_file(path, "a") as stream:
            for forest in forests:
                for row in _rows(forest):
                    stream.write(json.dumps({**row, **facts}) + "\n")
    except OSError as error:
        logger.warning("%s: the trees could not be written (%s)", path, error.strerror)


def _rows(forest: Forest) -> Iterator[dict[str, Any]]:
    for trajectory in forest.trajectories:
        streams = {"token_ids": trajectory.token_ids, **trajectory.streams}
        row: dict[str, Any] = {name: values.tolist() for name, values in streams.items()}
        if trajectory.images:  # paths, or bytes as data addresses
            row["images"] = [
                f"data:;base64,{base64.b64encode(each.source).decode()}"
                if isinstance(each.source, bytes)
                else str(Path(each.source).absolute())
                for each in trajectory.images
            ]
        labels = {name: getattr(trajectory, name) for name in _LABELS}
        for name, value in labels.items():
            if value is not None and value != "":
                row[name] = value if isinstance(value, str | int | float) else str(value)
        yield row
