"""An order of the training trees other than by chance, as a curriculum gives it."""

from typing import Any, Protocol

import numpy as np


class TreeOrder(Protocol):
    """Orders the trees of each epoch. Every tree is trained exactly once in it."""

    @property
    def description(self) -> str:
        """Name and settings; a run is not resumed with another one."""

    def begin(self) -> None:
        """Measures what the order depends on, before the first step; nothing where it was restored."""

    def order(self, epoch: int) -> np.ndarray:
        """[trees] int64, a permutation."""

    def state(self) -> dict[str, Any]:
        """What was measured, as plain JSON values: part of every checkpoint."""

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""
