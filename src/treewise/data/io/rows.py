"""Rows: trajectories and declared nodes in the compact form that workers hand over and the cache stores.

Calls of one record share almost all of their prompts, so a row stores only what differs from the row before it in the
same record (`shared` tokens are taken from there); weights of rendered rows are a few spans. Trajectories are built
from rows when a tree is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import STREAMS, Trajectory


@dataclass(slots=True)
class Row:
    """One trajectory, or one declared node where `parent` is given.

    `token_ids` are the tokens after the first `shared` tokens of the row before. `streams` hold the values of the whole
    trajectory, those with k candidates per token flat. Without `loss_weights` among them, `spans` ([start, end, start,
    end, ...]) are the trained tokens, each span with its weight in `span_weights`. `images` are those of the whole
    trajectory.
    """

    token_ids: np.ndarray
    shared: int = 0
    spans: list[int] = field(default_factory=list)
    span_weights: list[float] = field(default_factory=list)
    streams: dict[str, np.ndarray] = field(default_factory=dict)
    group: Any = None
    reward: float | None = None
    rollout: Any = None
    source: str = ""
    parent: int | None = None
    is_end: bool | None = None
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the whole trajectory."""
        return self.shared + len(self.token_ids)


@dataclass(slots=True)
class RecordResult:
    """The result of one record: rows of a tree, a node of a tree given line by line, or an error."""

    location: str
    rows: list[Row] = field(default_factory=list)
    key: str | None = None  # records with equal keys form one training tree
    name: str = ""
    is_declared: bool = False
    node: tuple[str, dict[str, Any]] | None = None  # (tree, node): one node per line
    warnings: list[str] = field(default_factory=list)
    unused_keys: list[str] = field(default_factory=list)
    rollout: Any = None  # as the record gives it
    is_grouped_by_prompt: bool = False  # no group was given, so equal prompts make one
    is_preference: bool = False  # holds completions that are not to be imitated
    is_compared: bool = False  # has both token ids and text
    drift: list[str] = field(default_factory=list)  # where these differ
    error: str | None = None
    is_partial_tail: bool = False
    raw: str | None = None  # the record as text, kept where it is bad


def row_from_trajectory(trajectory: Trajectory) -> Row:
    """A row that holds all streams of a validated trajectory."""
    return Row(
        token_ids=trajectory.token_ids,
        streams={name: value.reshape(-1) for name, value in trajectory.streams.items()},
        group=trajectory.group,
        reward=trajectory.reward,
        rollout=trajectory.rollout,
        source=trajectory.source,
        images=trajectory.images,
    )


def trajectories_from_rows(rows: Sequence[Row]) -> list[Trajectory]:
    """Trajectories of rows in order; each `shared` prefix comes from the row before."""
    result: list[Trajectory] = []
    for row in rows:
        ids = np.concatenate([result[-1].token_ids[: row.shared], row.token_ids]) if row.shared else row.token_ids
        streams: dict[str, Any] = {"loss_weights": span_weights(row, len(ids))} if row.spans else {}
        for name, values in row.streams.items():
            streams[name] = values.reshape(len(ids), -1) if STREAMS[name].has_candidates else values
        result.append(
            Trajectory(
                token_ids=ids,
                **streams,
                group=row.group,
                reward=row.reward,
                rollout=row.rollout,
                source=row.source,
                images=row.images,
            )
        )
    return result


def span_weights(row: Row, length: int) -> np.ndarray:
    """[length] float32, loss weights from the trained spans of a row."""
    weights = np.zeros(length, dtype=np.float32)
    for start, end, weight in zip(row.spans[::2], row.spans[1::2], row.span_weights, strict=True):
        weights[start:end] = weight
    return weights
