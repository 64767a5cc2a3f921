"""A tree as compact arrays for the page: segments, the streams that colour them, their tokens, and the trajectories.

A stream along a segment is stored as runs: where a value begins, and the value. Arrays are little-endian and
base64; token ids are numbers into one vocabulary for the whole page, whose bytes are stored once.

Letters: T tree tokens, S segments, N trajectories, R runs.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from treewise.data.images import decoded
from treewise.errors import ConfigError, DataError
from treewise.planning.plans import Plan
from treewise.report.analysis.facts import sources_of
from treewise.report.analysis.token_text import TokenText
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan

MAX_LISTED_TRAJECTORIES = 5000
MAX_WIDTH, MAX_HEIGHT = 240, 160  # pixels of a thumbnail
MAX_CHARS = 4_000_000  # of all thumbnails of a page
ABSENT = -1


@dataclass(slots=True)
class Vocabulary:
    """The tokens that a page shows, numbered in order of appearance."""

    text: TokenText
    _index: dict[int, int] = field(default_factory=dict)

    def indices(self, token_ids: np.ndarray) -> np.ndarray:
        """[T] int64, the page's indices of some tokens ([T] int32); new tokens get the next index."""
        unique, inverse = np.unique(token_ids, return_inverse=True)
        own = [self._index.setdefault(token, len(self._index)) for token in unique.tolist()]
        return np.array(own, dtype=np.int64)[inverse]

    def to_dict(self) -> dict[str, Any]:
        """ids: of the tokens. bytes: all of them in a row. lengths: bytes of each."""
        pieces = self.text.token_bytes(list(self._index))
        return {
            "has_text": self.text.has_text,
            "ids": packed(list(self._index), "u4"),
            "lengths": packed([len(piece) for piece in pieces], "u2"),
            "bytes": base64.b64encode(b"".join(pieces)).decode(),
        }


def packed(values: Sequence[int] | Sequence[float] | np.ndarray, kind: str) -> dict[str, str]:
    """Values as base64 of a little-endian array of `kind` (`u2`, `u4`, `i4`, `f4`)."""
    array = np.asarray(values).astype("<" + kind)
    return {"kind": kind, "data": base64.b64encode(array.tobytes()).decode()}


def picture_size(forest: Forest, num_budgets: int) -> int:
    """About how many characters of base64 a tree takes, tokens included."""
    return (4 * forest.num_tokens + (24 + 8 * num_budgets) * len(forest.segments.start)) * 4 // 3


def picture(
    name: str,
    forest: Forest,
    vocabulary: Vocabulary,
    thumbnails: "Thumbnails",
    micro_batches: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    with_tokens: bool = True,
) -> dict[str, Any]:
    """A tree for the page. `micro_batches` are runs (`micro_batch_runs`), one pair per budget shown."""
    segments = forest.segments
    rewards = _segment_rewards(forest)
    streams = {"weight": _runs(forest.token_weights())}
    advantages = _advantages(forest)
    if advantages is not None:
        streams["advantage"] = _runs(advantages)
    if rewards is not None:
        streams["reward"] = (segments.start, rewards)
    wide = len(forest.token_ids) and with_tokens
    numbers = vocabulary.indices(forest.token_ids) if wide else np.zeros(0, dtype=np.int64)
    return {
        "name": name,
        "num_tokens": forest.num_tokens,
        "start": packed(segments.start, "u4"),
        "parent": packed(segments.parent, "i4"),
        "multiplicity": packed(forest.segment_multiplicity, "u4"),
        "streams": {key: _packed_runs(*value, "f4") for key, value in streams.items()},
        "micro_batches": [_packed_runs(*runs, "u4") for runs in micro_batches],
        "tokens": packed(numbers, "u2" if not len(numbers) or numbers.max() < 2**16 else "u4"),
        "images": _images(forest, thumbnails),
        "end_segment": packed(segments.end_segment, "u4"),
        "trajectories": _trajectories(name, forest),
    }


def segment_table(name: str, forest: Forest) -> dict[str, Any]:
    """The same segments for the JSON twin: one list per column."""
    segments = forest.segments
    trained = np.add.reduceat(forest.is_trained.astype(np.int64), segments.start)
    return {
        "name": name,
        "num_tokens": forest.num_tokens,
        "segments": {
            "start": segments.start.tolist(),
            "num_tokens": segments.lengths.tolist(),
            "parent": segments.parent.tolist(),
            "depth": segments.depth.tolist(),
            "multiplicity": forest.segment_multiplicity.tolist(),
            "num_trained_tokens": trained.tolist(),
        },
        "end_segment": segments.end_segment.tolist(),
    }


def micro_batch_runs(plan: Plan, bounds: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each tree of a plan's forest, which micro-batch its tokens belong to, as runs of its own positions.

    bounds: tree positions at which the trees begin, and the end of the last.
    """
    ranges = np.concatenate([batch.ranges for batch in plan.micro_batches])
    micro_batch = np.repeat(np.arange(plan.num_micro_batches), [len(batch.ranges) for batch in plan.micro_batches])
    order = np.argsort(ranges[:, 0], kind="stable")
    starts, micro_batch = ranges[order, 0], micro_batch[order]
    result = []
    for low, high in pairwise(bounds):
        first, last = np.searchsorted(starts, [low, high])
        begins, values = starts[first:last], micro_batch[first:last]
        if not len(begins) or begins[0] > low:  # a range that began in the tree before goes on here
            begins, values = np.append(low, begins), np.append(micro_batch[first - 1], values)
        result.append((begins - low, values))
    return result


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([R] where a value begins, [R] the values); NaN equals NaN."""
    changes = (values[1:] != values[:-1]) & ~(np.isnan(values[1:]) & np.isnan(values[:-1]))
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    return starts, values[starts]


def _packed_runs(starts: np.ndarray, values: np.ndarray, kind: str) -> dict[str, Any]:
    return {"starts": packed(starts, "u4"), "values": packed(values, kind)}


def _advantages(forest: Forest) -> np.ndarray | None:
    """[T] mean over the trajectories that train a token, NaN where none does; None without advantages."""
    if not forest.has_stream("advantages"):
        return None
    if forest.tree_streams:
        return np.where(forest.tree_streams["loss_weights"] > 0, forest.tree_streams["advantages"], np.nan)
    trained = forest.flat_weights() > 0
    index, size = forest.path_index, forest.num_tokens
    total = np.bincount(index, weights=np.where(trained, forest.flat_stream("advantages"), 0), minlength=size)
    count = np.bincount(index, weights=trained, minlength=size)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _segment_rewards(forest: Forest) -> np.ndarray | None:
    """[S] mean reward of the trajectories through each segment; None where a trajectory has none."""
    if any(item.reward is None for item in forest.trajectories):
        return None
    rewards = [item.reward for item in forest.trajectories]
    segments = forest.segments
    at_end = np.bincount(segments.end_segment, weights=np.array(rewards, dtype=float), minlength=len(segments.start))
    total = np.concatenate([[0.0], np.cumsum(at_end)])
    after = np.searchsorted(segments.start, segments.subtree_end)
    return (total[after] - total[:-1]) / forest.segment_multiplicity


def _images(forest: Forest, thumbnails: "Thumbnails") -> dict[str, Any]:
    """Where images are on the tree, and which thumbnail of the page each is (`ABSENT`: none)."""
    images = forest.images
    numbers = [thumbnails.index(source) for source in images.sources]
    return {
        "starts": packed(images.start, "u4"),
        "lengths": packed(images.end - images.start, "u4"),
        "thumbnails": packed([numbers[index] for index in images.index], "i4"),
    }


def _trajectories(name: str, forest: Forest) -> dict[str, Any]:
    """Names and rewards of the first trajectories; the page numbers the rest."""
    shown = sources_of(name, forest)[:MAX_LISTED_TRAJECTORIES]
    items = forest.trajectories[:MAX_LISTED_TRAJECTORIES]
    return {
        "places": shown,
        "rewards": [item.reward for item in items],
        "num_trained": [item.num_trained_tokens for item in items],
    }


# -- small copies of images, as data addresses in the page itself; together they are bounded ---------------------------


@dataclass(slots=True)
class Thumbnails:
    """The thumbnails of a page, in order of appearance, each distinct image once."""

    addresses: list[str] = field(default_factory=list)
    num_chars: int = 0
    _index: dict[str, int] = field(default_factory=dict)

    def index(self, image: ImageSpan) -> int:
        """The page's index of an image; `ABSENT` where it cannot be read any more, or the page has no room for it."""
        if image.digest not in self._index:
            self._index[image.digest] = self._add(image)
        return self._index[image.digest]

    def _add(self, image: ImageSpan) -> int:
        try:
            address = thumbnail(image)
        except (DataError, ConfigError):  # the page tells that it is absent
            return ABSENT
        if self.num_chars + len(address) > MAX_CHARS:
            return ABSENT
        self.num_chars += len(address)
        self.addresses.append(address)
        return len(self.addresses) - 1


def thumbnail(image: ImageSpan) -> str:
    """An image as the data address of a JPEG within `MAX_WIDTH` and `MAX_HEIGHT`.

    Raises:
        DataError: the image cannot be read.
        ConfigError: Pillow is not installed.
    """
    small = decoded(image.read(), image.name)
    small.thumbnail((MAX_WIDTH, MAX_HEIGHT))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
