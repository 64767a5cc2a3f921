"""The whole mask of a micro-batch in two vectors, and what a layer adds to it.

Letters: T queries, G gateway keys, K = G + T keys (gateway keys first), H query heads, D head size.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import torch

from treewise.nn.device import to_device
from treewise.planning.layout import Layout

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


@dataclass(eq=False)
class TreeMask:
    """Query q sees key k exactly when `lo[k] <= q < hi[k]`.

    A key is seen from its own row on: `lo[k] = k`. Where images attend both ways (Gemma 3) an image's keys are seen
    from its first row on: `lo[k]` is that row. No fork and no cut is inside an image, so one interval is still enough.

    lo, hi, key_depth: [K] int32 NumPy, kept on the host for planning. `on(device)` gives the tensors. without_window:
    the mask of layers without a window, where it is another one (Gemma 4).
    """

    lo: np.ndarray
    hi: np.ndarray
    key_depth: np.ndarray
    num_queries: int
    without_window: "TreeMask | None" = None
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_layout(
        cls, layout: Layout, rows_before: np.ndarray | None = None, *, only_windows: bool = False
    ) -> "TreeMask":
        """The mask of a micro-batch.

        rows_before: [T] int64, how many rows before its own a key is seen already; 0 but for tokens of images that
        attend both ways. only_windows: they do so in layers with a window alone.
        """
        causal = cls(layout.lo, layout.hi, layout.key_depth, layout.num_tokens)
        if rows_before is not None and rows_before.any():
            lo = layout.lo.copy()
            lo[len(lo) - layout.num_tokens :] -= rows_before.astype(lo.dtype)
            return cls(lo, layout.hi, layout.key_depth, layout.num_tokens, causal if only_windows else None)
        return causal

    @property
    def num_keys(self) -> int:
        return len(self.lo)

    @property
    def num_gateway_keys(self) -> int:
        return len(self.lo) - self.num_queries

    def of_layer(self, rule: "LayerRule") -> "TreeMask":
        """The mask of a layer with this rule."""
        return self if self.without_window is None or rule.window is not None else self.without_window

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`lo`, `hi` and `key_depth` as [K] int32 tensors; the depths of the queries are the last T of `key_depth`."""
        return self.derived(_on_device, device)

    def derived(self, make: "Callable[[TreeMask, *_Arguments], _Result]", *arguments: *_Arguments) -> _Result:
        """`make(self, *arguments)`, computed once per micro-batch and shared by all layers; arguments are hashable."""
        key = (make, *arguments)
        if key not in self._derived:
            self._derived[key] = make(self, *arguments)
        return self._derived[key]


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What one layer asks of attention beyond the tree.

    window: keys at a distance of `window` tokens or more are hidden. chunk: keys of another chunk of `chunk` depths are
    hidden. softcap: scores become `softcap * tanh(scores / softcap)`. scaling: factor of the scores.
    """

    scaling: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.chunk is None and self.softcap is None


def _on_device(mask: TreeMask, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lo_K, hi_K, depth_K = to_device(np.stack((mask.lo, mask.hi, mask.key_depth)), device, torch.int32).unbind()
    return lo_K, hi_K, depth_K
