"""The images of a forest: one pass of the vision tower for each distinct one, however many micro-batches see it.

With one micro-batch the features are part of its graph, if the budget has room for both. Else they are kept like a
gateway: the tower runs first; every micro-batch adds gradients into the rows that it read, in float32; the tower's
backward starts from these gradients at the end. Where the budget has room for the tower's graph beside every
micro-batch it is kept until then; where not, the tower runs first without a graph and at the end again, in batches
under the budget. A tower and projector without trained parameters run once.

Letters: P placeholder tokens of the forest, R feature rows of its distinct images, M model width.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.errors import ConfigError, DataError, UnsupportedModelError
from treewise.nn.attention import TreeMask
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.flops import FlopModel
from treewise.nn.guest import Guest, RunningMicroBatch
from treewise.nn.model_flops import flop_model
from treewise.nn.platform.tensors import to_device
from treewise.nn.vision.tower import (
    IN_WINDOWS,
    Features,
    PixelInputs,
    pixel_inputs,
    row_arguments,
    tree_positions,
    vision_model,
)
from treewise.nn.wrapped import base_model
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

NEEDS_PROCESSOR = "the trajectories hold images, for which the model's processor (AutoProcessor) is needed: {}."
PixelsOf = Callable[[ImageSpan], PixelInputs]


class ForestVision(Guest):
    """The features of a forest's images, on its placeholder tokens, which join the walks over it.

    Parameters:
        pixels_of: maps an image to the tensors that the model's processor makes of it; asked several times.
        is_in_graph: the features are computed in the graph of the forest's only micro-batch.
        keeps_graph: a walk that trains keeps the tower's graph until its end.
        max_rows: the most feature rows that one pass of the tower computes, but for an image that has more; None: all.

    Raises:
        DataError: placeholders without an image, or an image with other numbers of placeholders in two places.
        UnsupportedModelError: a model whose images cannot be shared.
    """

    brings_images = True

    def __init__(
        self,
        lm: DecoderAndHead,
        forest: Forest,
        pixels_of: PixelsOf,
        *,
        is_in_graph: bool = True,
        keeps_graph: bool = True,
        max_rows: int | None = None,
    ) -> None:
        self.vision = vision_model(lm)
        self.is_in_graph, self._keeps_graph = is_in_graph, keeps_graph
        self._sources, self._source_pixels, self._max_rows = forest.images.sources, pixels_of, max_rows
        self._positions, self._rows, self._num_rows = _placeholders(forest, self.vision.image_token)
        self._bounds = np.concatenate([[0], np.cumsum(self._num_rows)])
        self._rows_before = None  # [T], where images attend both ways
        if self.vision.both_ways:
            self._rows_before = _rows_before(forest, self._positions)
        self._decoder = lm.decoder
        self._index_of = {(each.digest, each.end - each.start): index for index, each in enumerate(self._sources)}
        self._position_ids = tree_positions(  # [A, T], or None where they are depths
            self.vision.module, self.vision.image_token, forest, lambda each: self._pixels_of(self._index(each))
        )
        self._kept: Features | None = None  # leaves, to which micro-batches add gradients
        self._graph: Features | None = None  # what the leaves are copies of, with the tower's graph

    def enter(self, run: RunningMicroBatch) -> None:
        """The part of the model that a micro-batch runs, and its arguments, where these are not as without images."""
        positions = run.layout.positions
        rows = self._rows[np.isin(self._positions, positions, assume_unique=True)]
        arguments: dict[str, Any] = {}
        if self._position_ids is not None:
            own = self._position_ids[:, positions]
            arguments["position_ids"] = to_device(own, self.vision.module.device, torch.long)[:, None]
        if len(rows) == 0:
            run.inside = (self._decoder, arguments) if arguments else None
            return
        if self.is_in_graph:
            features = self._all_features()
        else:
            if self._kept is None:  # without a graph, in float32 or wider, computed once
                with torch.no_grad():
                    self._kept = self._leaves(self._all_features())
            features = self._kept
        index = to_device(rows, features[0].device)
        seen = tuple(feature.index_select(0, index) for feature in features)
        if not self.is_in_graph:
            seen = tuple(each.to(self.vision.module.dtype) for each in seen)
        run.inside = self.vision.module, {**arguments, **self.vision.arguments(seen)}

    def join(self, run: RunningMicroBatch) -> None:
        """The mask of a micro-batch, and whether it holds features of a tower that is trained."""
        positions = run.layout.positions
        if self._rows_before is not None:
            only_windows = self.vision.both_ways == IN_WINDOWS
            run.mask = TreeMask.from_layout(run.layout, self._rows_before[positions], only_windows=only_windows)
        is_seen = self.vision.is_trained and np.isin(positions, self._positions, assume_unique=True).any()
        run.sees_trained_image = bool(is_seen)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Computes the features with a graph before, where a walk that trains keeps it; the tower's backward after."""
        if self._keeps_graph and self._kept is None and self.vision.is_trained and not self.is_in_graph:
            with torch.enable_grad():
                self._graph = self._all_features()
            self._kept = self._leaves(self._graph)
        yield
        self._backward()

    def _backward(self) -> None:
        """From the gradients that micro-batches added to the kept features."""
        kept, graph = self._kept, self._graph
        self._graph = None
        if kept is None or all(each.grad is None for each in kept):
            return
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in kept]
        for each in kept:
            each.grad = None
        if graph is not None:
            _backward(graph, grads)
            return
        for first, last in self._batches():
            part = slice(self._bounds[first], self._bounds[last])
            with torch.enable_grad():
                features = self._encode(first, last)
            _backward(features, [grad[part] for grad in grads])

    def _leaves(self, features: Features) -> Features:
        wide = [feature.detach().to(torch.promote_types(feature.dtype, torch.float32)) for feature in features]
        return tuple(each.requires_grad_(self.vision.is_trained) for each in wide)

    def _all_features(self) -> Features:
        parts = [self._encode(first, last) for first, last in self._batches()]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def _encode(self, first: int, last: int) -> Features:
        """Features of the images `first` to `last`."""
        pixels = [self._pixels_of(index) for index in range(first, last)]
        names = [source.name for source in self._sources[first:last]]
        return self.vision.encode(pixels, self._num_rows[first:last].tolist(), names)

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Ranges of images for one pass of the tower each: equal in shape, and of at most the budget's rows."""
        first = 0
        for last in range(1, len(self._sources) + 1):
            is_over = last < len(self._sources) and (
                (self._max_rows is not None and self._bounds[last + 1] - self._bounds[first] > self._max_rows)
                or _shapes(self._pixels_of(last)) != _shapes(self._pixels_of(first))
            )
            if is_over or last == len(self._sources):
                yield first, last
                first = last

    def _index(self, image: ImageSpan) -> int:
        return self._index_of[image.digest, image.end - image.start]

    def _pixels_of(self, index: int) -> PixelInputs:
        return self._source_pixels(self._sources[index])


class EngineImages:
    """The images of an engine's forests: what they cost, and their tensors, once for all walks over the latest forest.

    processor: the model's, or None. divided_by: what divides a batch among ranks, `mesh` or `context`; None: nothing.
    """

    def __init__(self, model: nn.Module, processor: object, divided_by: str | None) -> None:
        self._model, self._processor, self._divided_by = model, processor, divided_by
        self._flops: FlopModel | None = None
        self._latest: tuple[weakref.ref[Forest], PixelsOf] | None = None

    def can_plan(self, forest: Forest) -> bool:
        """Whether `costs_of` reads nothing of the model any more."""
        return self._flops is not None or not len(forest.images)

    def costs_of(self, forest: Forest) -> FlopModel | None:
        """The costs of the model, for plans of a forest with images; None without."""
        if not len(forest.images):
            return None
        if self._flops is None:
            self._flops = flop_model(self._model)
        return self._flops

    def guests(self, lm: DecoderAndHead, plan: Plan, pixels_of: PixelsOf | None = None) -> list[Guest]:
        """The images of a plan's forest, for walks with the present weights; none if it has none.

        pixels_of: maps an image to its tensors; None: the processor makes them.
        """
        costs, forest = self.costs_of(plan.forest), plan.forest
        if costs is None:
            return []
        self.refuse()
        if pixels_of is None:
            if self._latest is None or self._latest[0]() is not forest:
                made = cached_by_digest(processed_by(self._processor, "TreeEngine(model, processor=...)"))
                self._latest = weakref.ref(forest), made
            pixels_of = self._latest[1]
        fits, max_rows = costs.keeps_images(plan), None
        if plan.max_tokens is not None:
            max_rows = int(plan.max_tokens / max(costs.tokens_per_row, 1.0))
        is_in_graph = plan.is_whole and fits
        return [ForestVision(lm, forest, pixels_of, is_in_graph=is_in_graph, keeps_graph=fits, max_rows=max_rows)]

    def refuse(self) -> None:
        """Raises `UnsupportedModelError` where images cannot be computed by the ranks of the engine."""
        if self._divided_by == "mesh":
            raise UnsupportedModelError("images are not supported yet with tp_size or ep_size; use copies or sharded.")
        if self._divided_by == "context":
            raise UnsupportedModelError(
                "images are not supported with context_size, which divides tokens among ranks, but not a vision tower: "
                "leave it out and give max_tokens a number."
            )


def processed_by(processor: object, where: str) -> PixelsOf:
    """Images as the model's processor (or its image processor) makes tensors of them. where: it is given.

    Raises:
        ConfigError: no processor.
    """
    if processor is None:
        raise ConfigError(NEEDS_PROCESSOR.format(where))
    return lambda image: pixel_inputs(processor, [opened(image)])


def cached_by_digest(pixels_of: PixelsOf) -> PixelsOf:
    """The same, which computes the tensors of each image once."""
    made: dict[str, PixelInputs] = {}

    def cached(image: ImageSpan) -> PixelInputs:
        if image.digest not in made:
            made[image.digest] = pixels_of(image)
        return made[image.digest]

    return cached


def flat_images(
    model: nn.Module, processor: object, item: Trajectory, token_ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What a flat row of a trajectory gives to the model's own forward for its images; nothing where it has none.

    token_ids: [n] int64, its tokens on the model's device. Raises `ConfigError` without a processor.
    """
    if not item.images:
        return {}
    if processor is None:
        raise ConfigError(NEEDS_PROCESSOR.format("verify(model, trajectories, processor=...)"))
    base = base_model(model)
    return row_arguments(base, processor, [opened(image) for image in item.images], token_ids)


def opened(image: ImageSpan) -> Any:
    """The image as a PIL image in RGB. Raises `DataError`."""
    from treewise.data.images import decoded

    return decoded(image.read(), image.name)


def _backward(features: Features, grads: Sequence[torch.Tensor]) -> None:
    """grads: of each of the features, in any precision. What is trained of a tower need not reach its features: LLaVA
    takes those of the layer before the last.
    """
    pairs = [(each, grad.to(each.dtype)) for each, grad in zip(features, grads, strict=True) if each.requires_grad]
    if pairs:
        torch.autograd.backward([each for each, _ in pairs], [grad for _, grad in pairs])


def _shapes(pixels: PixelInputs) -> list[tuple[str, tuple[int, ...]]]:
    """What images of one batch have in common: all but the first axis."""
    return [(name, tuple(value.shape[1:])) for name, value in pixels.items()]


def _rows_before(forest: Forest, positions: np.ndarray) -> np.ndarray:
    """[T] int64, how many placeholders of its image come right before each tree token; 0 for text.

    positions: [P] int64 of placeholders, ascending.
    """
    first = np.ones(len(positions), dtype=bool)
    first[1:] = (np.diff(positions) != 1) | np.isin(positions[1:], forest.images.start)
    touches = np.flatnonzero(first & np.isin(forest.parent[positions], positions))
    if len(touches):
        at = int(positions[touches[0]])
        raise DataError(
            f"two images touch at tree position {at} (depth {forest.depth[at]}): the model would take them for one. "
            "Put a token between them, as its processor does."
        )
    begin = np.maximum.accumulate(np.where(first, np.arange(len(positions)), 0))
    rows_before = np.zeros(forest.num_tokens, dtype=np.int64)
    rows_before[positions] = np.arange(len(positions)) - begin
    return rows_before


def _placeholders(forest: Forest, token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[P] int64 tree positions of placeholders, ascending; [P] int64, the feature row of each; [images] int64, rows of
    each distinct image.
    """
    images = forest.images
    positions = np.flatnonzero(forest.token_ids == token)
    span = np.searchsorted(images.start, positions, side="right") - 1
    is_outside = (span < 0) | (positions >= images.end[span])
    if is_outside.any():
        at = int(positions[np.argmax(is_outside)])
        raise DataError(
            f"tree position {at} (depth {forest.depth[at]}) holds token {token}, which stands for an image, outside of "
            "the images of its trajectory."
        )
    count = np.bincount(span, minlength=len(images))
    num_rows = np.zeros(len(images.sources), dtype=np.int64)
    num_rows[images.index] = count
    if (num_rows[images.index] != count).any() or (count == 0).any():
        wrong = int(np.argmax((num_rows[images.index] != count) | (count == 0)))
        name = images.sources[images.index[wrong]].name
        raise DataError(
            f"{name}: {count[wrong]} placeholder tokens ({token}) at tree position {images.start[wrong]}, where "
            f"its other places have {num_rows[images.index[wrong]]}; an image has the same number, at "
            "least 1, everywhere."
        )
    first = np.concatenate([[0], np.cumsum(num_rows)])[images.index]
    within = np.arange(len(positions)) - (np.cumsum(count) - count)[span]
    return positions, first[span] + within, num_rows
