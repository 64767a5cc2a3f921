"""The rows of a probe: the user's own tokens as a small tree, longer than short windows, with an image or without."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treewise.nn.decoder import DecoderAndHead
from treewise.nn.model_checks import length_limit, num_positions
from treewise.nn.wrapped import base_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# Tokens of the longest row; more where a window or chunk of the configuration ends within so many tokens.
_LENGTH, _LONGEST_WINDOW = 40, 128
_WINDOWS = ("window", "chunk", "floor_scale")  # in the names of what changes with the distance


@dataclass(frozen=True, slots=True)
class ProbedRows:
    """items: the trunk with its longest branch first. own: tokens of each beyond its fork. budget: cuts the trunk.
    texts: the tokens of each but its images."""

    items: list[Trajectory]
    own: tuple[int, ...]
    budget: int
    texts: list[np.ndarray]

    @property
    def text(self) -> np.ndarray:
        """A few tokens, without an image."""
        return self.texts[0][:20]


def text_ids(forest: Forest) -> np.ndarray:
    """[t] int32, the tokens of a forest that stand for no image."""
    ids: np.ndarray = forest.token_ids[~forest.images.covers(forest.num_tokens)]
    return ids


def probed_rows(lm: DecoderAndHead, forest: Forest, *, with_image: bool) -> ProbedRows:
    """A trunk with a fork near its end and two near its start; an image on the trunk and again on one branch.

    At the budget two trunks are open, of which the lower is short enough to be held, and two branches share a
    micro-batch.
    """
    length = _length(lm)
    fork = max(length - 16, length * 3 // 5)
    branch = max(1, (length - fork) // 2)
    draw = _Tokens(lm, forest, 2 * length, with_image=with_image)
    trunk, image = draw.take(fork), draw.image
    tail, *others = (draw.take(count) for count in (length - fork, branch, branch, branch))
    forks = (fork, max(1, fork // 4), max(1, fork // 8))
    taken: dict[int, list[int]] = {fork: [int(tail[0])]}
    for at, ids in zip(forks, others, strict=True):
        siblings = taken.setdefault(at, [int(trunk[at])] if at < fork else [])
        ids[0] = draw.other(int(ids[0]), siblings)
        siblings.append(int(ids[0]))
    parts = [(trunk, tail), *((trunk[:at], ids) for at, ids in zip(forks, others, strict=True))]
    texts = [np.concatenate(part) for part in parts]
    above = 0 if image is None else len(image[0])
    items, sizes = [], []
    for index, (before, own) in enumerate(parts):
        ids, spans = texts[index], []
        if image is not None:
            again = [len(before) + above + 1] if index == 2 else []
            for start in (min(2, fork), *again):
                ids = np.insert(ids, start, image[0])
                spans.append(replace(image[1], start=start + image[1].start, end=start + image[1].end))
        weights = np.linspace(0.5, 1.5, len(ids) + index)[index:]  # so that no two errors cancel
        weights[[0, *(place for span in spans for place in range(span.start, span.end))]] = 0
        items.append(Trajectory(ids, loss_weights=weights, images=tuple(spans)))
        sizes.append(len(own) + (above if index == 2 else 0))
    return ProbedRows(items, tuple(sizes), max(1, fork - 4 + above), texts)


def _length(lm: DecoderAndHead) -> int:
    """Tokens of the longest row: beyond every window and chunk that is short, within what the positions allow."""
    configs = [base_model(lm.model).config, lm.decoder.config]
    numbers = {name: value for config in configs for name, value in vars(config).items() if type(value) is int}
    windows = [n for name, n in numbers.items() if n <= _LONGEST_WINDOW and any(word in name for word in _WINDOWS)]
    limits = [*(length_limit(lm.decoder) or ())[:1], num_positions(lm.decoder.config)]
    length = max([_LENGTH, *(window + 8 for window in windows)])
    return max(4, min([length, *(limit for limit in limits if limit is not None)]))


class _Tokens:
    """The user's tokens in their order; drawn anew from them where they are too few, or from all where too alike."""

    def __init__(self, lm: DecoderAndHead, forest: Forest, count: int, *, with_image: bool) -> None:
        special = {n for name, n in vars(base_model(lm.model).config).items() if name.endswith(("_id", "_index"))}
        self._special = {each for each in special if isinstance(each, int)}
        self._limit = min(lm.num_embeddings, lm.num_logits)
        self.image = _smallest_image(forest) if with_image else None
        text = text_ids(forest)
        if self.image is not None:
            text = text[~np.isin(text, self.image[0])]
        rng = np.random.default_rng(0)
        if len(np.unique(text)) < 8:
            every = np.setdiff1d(np.arange(self._limit), list(self._special))
            text = rng.choice(every if len(every) else np.arange(self._limit), count)
        elif len(text) < count:
            text = np.concatenate([text, rng.choice(text, count - len(text))])
        self._ids, self._taken = text, 0

    def take(self, count: int) -> np.ndarray:
        """[count] the next tokens."""
        self._taken += count
        return self._ids[self._taken - count : self._taken].copy()

    def other(self, token: int, siblings: Sequence[int]) -> int:
        """The token, or the next one of the vocabulary that none of these is and that stands for nothing special."""
        near = ((token + step) % self._limit for step in range(self._limit))
        return next((each for each in near if each not in self._special and each not in siblings), token)


def _smallest_image(forest: Forest) -> tuple[np.ndarray, Any]:
    """The tokens of a forest's smallest image with one before and after it, and its span among them."""
    images = forest.images
    place = int(np.argmin(images.end - images.start))
    first, last = int(images.start[place]), int(images.end[place])
    before = slice(first - 1 if forest.parent[first] == first - 1 and first > 0 else first, first)
    after = slice(last, last + (last < forest.num_tokens and forest.parent[last] == last - 1))
    around = [each for each in (before, after) if not images.covers(forest.num_tokens)[each].any()]
    before, after = (each if each in around else slice(0, 0) for each in (before, after))
    ids = forest.token_ids
    start = len(ids[before])
    span = replace(images.sources[images.index[place]], start=start, end=start + last - first)
    return np.concatenate([ids[before], ids[first:last], ids[after]]), span
