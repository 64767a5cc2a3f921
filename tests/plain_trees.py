"""Facts of trees by walking up, token by token."""

import numpy as np


def image_rows(positions: np.ndarray, parent: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[T] int64: how many rows of its image come before each row of a micro-batch, with images at random.

    positions: [T] int64 tree positions. parent: [tree tokens]. Each run without forks and cuts has text and images.
    """
    forks = np.bincount(parent[parent >= 0], minlength=len(parent)) > 1
    rows_before = np.zeros(len(positions), dtype=np.int64)
    for row in range(1, len(positions)):
        above = positions[row] - 1
        is_below = positions[row - 1] == above == parent[positions[row]] and not forks[above]
        if is_below and rng.random() < 0.6:
            rows_before[row] = rows_before[row - 1] + 1
    return rows_before


def is_above(parent: np.ndarray) -> np.ndarray:
    """[T, T] bool, by walking up: row q marks every token on the path to q, and q itself."""
    seen = np.zeros((len(parent), len(parent)), dtype=bool)
    for row in range(len(parent)):
        at = row
        while at >= 0:
            seen[row, at] = True
            at = int(parent[at])
    return seen
