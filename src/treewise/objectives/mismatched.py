"""Completions behind prompts that they do not belong to, of which KTO's baseline is the mean score."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treewise.errors import DataError
from treewise.tree.trajectory import Trajectory


def with_mismatched(trees: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """Each tree with, for each of its labelled trajectories, the completion of the one before in the data behind its
    prompt: no reward, a rollout of its own. The prompt is shared, so only completions are computed more.

    A prompt is what stands before the first trained token. The first trajectory takes the last one's completion.

    Raises:
        DataError: fewer than two completions.
    """
    labelled = [item for tree in trees for item in tree if item.reward is not None]
    completions = {(tuple(ids), tuple(weights)) for _, ids, weights in map(_parts, labelled)}
    if len(completions) < 2:
        raise DataError("KTO's baseline needs at least two different completions; set baseline='zero'.")
    before = dict(zip(map(id, labelled), [labelled[-1], *labelled[:-1]], strict=True))
    result = []
    for tree in trees:
        rows = list(tree)
        for number, item in enumerate(tree):
            if item.reward is not None:
                rows.append(_mismatched(item, before[id(item)], number))
        result.append(rows)
    return result


def _parts(item: Trajectory) -> tuple[np.ndarray, list[int], list[float]]:
    """A trajectory's prompt, and its completion with weights."""
    start = int(np.flatnonzero(item.loss_weights)[0])
    return item.token_ids[:start], item.token_ids[start:].tolist(), item.loss_weights[start:].tolist()


def _mismatched(item: Trajectory, other: Trajectory, number: int) -> Trajectory:
    prompt, _, _ = _parts(item)
    begin, ids, weights = _parts(other)
    moved = len(prompt) - len(begin)
    images = [image for image in item.images if image.end <= len(prompt)]
    images += [
        replace(image, start=image.start + moved, end=image.end + moved)
        for image in other.images
        if image.start >= len(begin)
    ]
    return Trajectory(
        np.concatenate([prompt, ids]).astype(np.int32),
        np.concatenate([np.zeros(len(prompt)), weights]),
        group=item.group,
        images=tuple(images),
        rollout=f"mismatched {number} of {item.rollout!r}",
        source=f"{item.source or 'trajectory'} with the completion of {other.source or 'another'}",
    )
