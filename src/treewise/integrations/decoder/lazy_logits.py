"""Logits of a batch that are computed when they are read: of the rows that a loss needs, or of all.

A causal language model projects every row it was given, and its loss then reads those with a label. Where the rows are
a tree's, that is known before: `of_cells` projects them alone, each tree row once. Whoever reads the logits otherwise
gets the tensor that the model would have made; every operation on it does so, in Python or in torch.

Letters: B rows of the batch, L tokens of a row, M model width, V vocabulary, P cells with a label.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from treewise.integrations.decoder.outputs import GatheredRows
from treewise.nn.platform.tensors import to_device

Change = Callable[[torch.Tensor], torch.Tensor]

# Operations on single numbers: done row by row of the tree, before rows are repeated.
_ELEMENTWISE = {"__mul__", "__rmul__", "__truediv__", "__neg__", "mul", "div", "neg", "float", "double", "tanh", "to"}
_FUNCTIONS = {torch.tanh: "tanh", torch.mul: "mul", torch.div: "div", torch.neg: "neg"}


class LazyLogits:
    """[B, L, V] logits, not yet computed.

    tree: [rows, M], hidden rows of a tree. places: [B, L] int64, the row of each cell. project: the head.
    changes: what the model does to each number of its logits. when_read: called when all logits are computed.
    """

    when_read: Callable[[], None] | None = None

    def __init__(
        self,
        tree: torch.Tensor,
        places: np.ndarray,
        project: Callable[[torch.Tensor], torch.Tensor],
        changes: Sequence[Change] = (),
    ) -> None:
        self._tree, self._places, self._project, self._changes = tree, places, project, tuple(changes)
        self._tensor: torch.Tensor | None = None
        with torch.no_grad():
            sample = self._changed(project(tree[:0]))
        self.dtype, self.device = sample.dtype, sample.device
        self.shape = torch.Size((*places.shape, sample.shape[-1]))
        self.ndim, self.requires_grad, self.is_cuda = len(self.shape), True, sample.is_cuda

    @torch.compiler.disable
    def of_cells(self, cells: np.ndarray) -> torch.Tensor:
        """[P, V] logits of cells of the flattened batch ([P] int64)."""
        distinct, index = np.unique(self._places.reshape(-1)[cells], return_inverse=True)
        is_all = len(distinct) == len(self._tree)
        rows = self._tree if is_all else self._tree.index_select(0, to_device(distinct, self.device))
        logits = self._changed(self._project(rows))
        return GatheredRows.apply(logits, to_device(index.reshape(-1), self.device))

    @torch.compiler.disable
    def tensor(self) -> torch.Tensor:
        """All logits."""
        if self._tensor is None:
            if self.when_read is not None:
                self.when_read()
            self._tensor = self.of_cells(np.arange(self._places.size)).view(self.shape)
        return self._tensor

    def _changed(self, logits: torch.Tensor) -> torch.Tensor:
        for change in self._changes:
            logits = change(logits)
        return logits

    def then(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """An operation on single numbers."""
        is_plain = all(isinstance(each, int | float | torch.dtype) for each in (*args, *kwargs.values()))
        if self._tensor is not None or name not in _ELEMENTWISE or not is_plain:
            return getattr(self.tensor(), name)(*args, **kwargs)
        change: Change = lambda logits: getattr(logits, name)(*args, **kwargs)  # noqa: E731
        return LazyLogits(self._tree, self._places, self._project, (*self._changes, change))

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _FUNCTIONS and isinstance(args[0], cls) and not kwargs:
            return args[0].then(_FUNCTIONS[function], *args[1:])
        return function(*_computed(args), **_computed(kwargs or {}))

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    def numel(self) -> int:
        """As of a tensor."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _ELEMENTWISE:
            return lambda *args, **kwargs: self.then(name, *args, **kwargs)
        return getattr(self.tensor(), name)

    def __repr__(self) -> str:
        return f"LazyLogits({list(self.shape)}, {self.dtype})"


def _computed(value: Any) -> Any:
    """The same with tensors in place of lazy logits."""
    if isinstance(value, LazyLogits):
        return value.tensor()
    if isinstance(value, list | tuple):
        return type(value)(_computed(each) for each in value)
    if isinstance(value, dict):
        return {name: _computed(each) for name, each in value.items()}
    return value


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: LazyLogits, *args: Any) -> Any:
        return self.then(name, *_computed(args))

    operate.__name__ = name
    return operate


_OPERATORS = (
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__"),
    *("__matmul__", "__rmatmul__", "__pow__", "__abs__", "__getitem__", "__setitem__", "__iter__", "__contains__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__imul__", "__itruediv__", "__iadd__", "__isub__"),
    *("__float__", "__int__", "__bool__", "__array__"),
)
for _name in _OPERATORS:
    setattr(LazyLogits, _name, _operator(_name))
LazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
