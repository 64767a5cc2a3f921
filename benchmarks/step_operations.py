"""What a step asks of a device, operation by operation, recorded without running it.

The step runs on tensors without data (`count_gpu.py`). Of each operation stands what its time depends on: the sizes of
a product, the bytes that another reads and writes, the pairs that attention computes and how long its segments are. So
a commit that adds a copy or a launch anywhere in a step adds it here, and `predict_gpu.py` says what it costs.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from count_gpu import Counting, Counts, counted
from torch import Tensor, nn

from treewise.bench import flat
from treewise.bench.calibration.measure import attention_size, flat_size
from treewise.bench.calibration.rates import Operation
from treewise.bench.varlen import ChosenKernel
from treewise.engine.step import StepLoss, Walk
from treewise.engine.step_memory import Results, without_data
from treewise.nn.attention import cascade, flex
from treewise.nn.attention.gateway import extend
from treewise.nn.attention.mask import TreeMask
from treewise.nn.model import split_model
from treewise.objectives import SFT
from treewise.planning.plans import Plan
from treewise.tree.trajectory import Trajectory

PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1, "baddbmm_": 1, "_grouped_mm": 0}  # first factor
REDUCED = {"sum", "mean", "logsumexp", "amax", "_log_softmax", "_softmax", "cumsum", "var_mean", "linalg_vector_norm"}
BY_INDEX = {"index_select", "gather", "index", "embedding", "scatter", "index_put_", "index_add_", "cat"}
BY_INDEX |= {"embedding_dense_backward", "scatter_add_", "_index_put_impl_", "index_add"}


class Recording(Counting):
    """Inside, operations on tensors without data are recorded, in their order."""

    _results_of_all = Results()  # shapes of what operations return do not change from step to step

    def __init__(self) -> None:
        super().__init__(Counts(0, 0))
        self._results = self._results_of_all
        self.operations: list[Operation] = []

    def launched(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        super().launched(name, given, made)
        if name in PRODUCTS:
            left, right = given[PRODUCTS[name]], given[PRODUCTS[name] + 1]
            rows, inner = left.shape[-2:]
            times = left.shape[0] if left.dim() == 3 else 1
            self.operations.append(Operation("product", (times, rows, right.shape[-1], inner)))
            return
        moved = sum(_bytes(each) for each in (*given, *made))
        kind = "reduced" if name in REDUCED else "strided" if name in BY_INDEX or _is_strided(given) else "pointwise"
        self.operations.append(Operation(kind, (moved,)))

    def copied(self, num_bytes: int) -> None:
        super().copied(num_bytes)
        self.operations.append(Operation("copy", (num_bytes,)))

    def attended(self, kind: str, query: Tensor, pairs: float, run: float) -> None:
        """A call of attention, of [1, H, T, D] queries."""
        self.operations.append(Operation(kind, (pairs * query.shape[1], run, query.shape[3])))


def _bytes(tensor: Tensor) -> int:
    """What is read of it: an expanded axis is read once."""
    own = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(np.prod(own, dtype=np.int64)) * tensor.itemsize


def _is_strided(given: Sequence[Tensor]) -> bool:
    """Whether the largest tensor that is read lies in another order than it is written in."""
    largest = max(given, key=_bytes, default=None)
    return largest is not None and not largest.is_contiguous()


class Attended(torch.autograd.Function):
    """Shapes of attention and of its gradients, both recorded. kinds: of the operations."""

    @staticmethod
    def forward(
        ctx: Any, recording: Recording, size: tuple[float, float], kind: str, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.recorded = recording, size, kind
        ctx.save_for_backward(query, key, value)
        recording.attended(kind, query, *size)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        return torch.empty_like(query)[..., : value.shape[3]], lse

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        recording, size, kind = ctx.recorded
        recording.attended(f"{kind}_backward", ctx.saved_tensors[0], *size)
        return None, None, None, *(torch.empty_like(each) for each in ctx.saved_tensors)


@contextmanager
def recorded(attention: str) -> Iterator[Recording]:
    """Inside, tensors without data stand for those of a device, and steps are recorded."""
    recording = Recording()
    masks: list[TreeMask] = []

    def sizes() -> tuple[float, float]:
        with recording.paused():
            return attention_size(attention, masks[-1])

    def behind(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, *more: Any, **named: Any) -> Tensor:
        masks.append(mask)
        return tree_of_flex(query, key, value, mask, *more, **named)

    def kernel(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return Attended.apply(recording, sizes(), "attention", query, key, value)

    def whole(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, _: Any, __: Any, reads: Any, call: Any) -> Any:
        masks.append(mask)
        return Attended.apply(recording, sizes(), "attention", query, *extend(key, value, reads, call))[0]

    tree_of_flex = flex.flex_attention_tree
    with ExitStack() as around:
        around.enter_context(counted(recording.counts, recording))
        around.enter_context(mock.patch.object(flex, "flex_attention_tree", behind))
        around.enter_context(mock.patch.object(flex, "_uncompiled", kernel))
        around.enter_context(mock.patch.object(cascade, "attend", whole))
        yield recording


def of_tree(model: nn.Module, parts: Plan, attention: str = "flex") -> list[Operation]:
    """Operations of a step of SFT by a plan. model: with or without data."""
    with recorded(attention) as recording:
        loss = StepLoss(parts.forest, SFT(), None)
        walk = Walk(split_model(without_data(model)), parts, attention, ())
        walk.train(loss.of_micro_batch)
        loss.output(walk)
    return recording.operations


def of_flat(model: nn.Module, items: Sequence[Trajectory], max_row_tokens: int) -> list[Operation]:
    """Operations of a step of packed flat rows, as `treewise bench` trains them."""
    with recorded("flex") as recording:
        lm = split_model(without_data(model))
        with mock.patch.object(flat, "fastest_for", return_value=ChosenKernel("torch varlen")):
            contestant = flat.FlatRows(lm, items, max_row_tokens=max_row_tokens, packs=True)
        sizes = iter([flat_size(np.diff(row.bounds)) for row in contestant.rows])
        size = (0.0, 0.0)

        def hidden(row: Any, original: Any = contestant._hidden) -> Tensor:
            nonlocal size
            size = next(sizes)
            return original(row)

        def attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
            heads = (each.transpose(0, 1)[None] for each in (query, key, value))
            return Attended.apply(recording, size, "flat_attention", *heads)[0][0].transpose(0, 1)

        with (
            mock.patch.object(flat, "varlen_attention", attend),
            mock.patch.object(flat.FlatRows, "_hidden", lambda _, row: hidden(row)),
        ):
            contestant.step()
    return recording.operations
