"""What the vision tower costs the ranks of a step: one pass for each distinct image of a rank's trees.

An image that several branches or trees see is computed once by a rank, and again by every other rank that has a place
of it. Costs of segments cannot express that: they hold each image at its first place in the step, which is exact where
all of its places are on one rank, and too little where they are on several. The rest is added for each placement, as
the cost of open tokens is (`part_costs`).

Letters: I places of images in a step, D distinct images, N trajectories, S segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import Segments


@dataclass(frozen=True, slots=True)
class ImageCosts:
    """The images of a step.

    segments: of the step. segment: [I] int64, where each place is, ascending. index: [I] int64, which image is there.
    seconds: [D] float64, of one pass of the tower, forward and backward.
    """

    segments: Segments
    segment: np.ndarray
    index: np.ndarray
    seconds: np.ndarray

    def at_first_places(self, is_computed_S: np.ndarray) -> np.ndarray:
        """[S] float64, seconds of the images of some segments ([S] bool), each at the first of its places there."""
        places = np.flatnonzero(is_computed_S[self.segment])
        image, first = np.unique(self.index[places], return_index=True)
        return np.bincount(self.segment[places[first]], self.seconds[image], len(is_computed_S))

    def at_first_places_of(self, is_chosen_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for the paths of some trajectories ([N] bool), and these segments ([S] bool)."""
        segments = self.segments
        ends = np.bincount(segments.end_segment[is_chosen_N], minlength=len(segments.start))
        before = np.concatenate([[0], np.cumsum(ends)])
        is_computed = before[np.searchsorted(segments.start, segments.subtree_end)] > before[:-1]
        return self.at_first_places(is_computed), is_computed


def images_of_step(
    shapes: Sequence[Forest | Segments],
    segments: Segments,
    image_tokens: Sequence[np.ndarray] | None,
    seconds_per_token: float,
) -> ImageCosts | None:
    """The images of some forests side by side; None without any. image_tokens: see `assign_ranks`."""
    if image_tokens is None or not any(map(len, image_tokens)):
        return None
    number: dict[tuple[str, int], int] = {}
    tokens: list[float] = []
    places, index = [], []
    first_token = 0
    for shape, costs in zip(shapes, image_tokens, strict=True):
        if isinstance(shape, Forest):
            images = shape.images
            names = [(each.digest, each.end - each.start) for each in images.sources]
            for start, source, cost in zip(images.start.tolist(), images.index.tolist(), costs.tolist(), strict=True):
                known = number.setdefault(names[source], len(number))
                if known == len(tokens):
                    tokens.append(cost)
                places.append(first_token + start)
                index.append(known)
        first_token += shape.num_tokens
    segment = np.searchsorted(segments.start, np.array(places), side="right") - 1
    return ImageCosts(segments, segment, np.array(index), seconds_per_token * np.array(tokens))
