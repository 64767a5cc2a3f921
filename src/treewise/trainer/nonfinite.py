"""A loss or gradient that is not finite never reaches the optimizer; its trees are named and written to a file."""

import base64
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from treewise.base.durable import own_file
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")

_LABELS = ("group", "rollout", "reward", "rollout_weight", "source")  # of a row, beside its streams


def sources(forests: Iterable[Forest], limit: int = 5) -> list[str]:
    """The first few sources of the trajectories of some trees."""
    named = (trajectory.source for forest in forests for trajectory in forest.trajectories if trajectory.source)
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
                f"data:;base64,{base64.b64encode(image.source).decode()}"
                if isinstance(image.source, bytes)
                else str(Path(image.source).absolute())
                for image in trajectory.images
            ]
        labels = {name: getattr(trajectory, name) for name in _LABELS}
        for name, value in labels.items():
            if value is not None and value != "":
                row[name] = value if isinstance(value, str | int | float) else str(value)
        yield row
