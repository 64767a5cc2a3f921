"""From the rows of a tree to the rows of a batch: what a decoder that computed a tree returns in place of its own.

Letters: B rows of the batch, L tokens of a row, T tokens of the tree, M model width, E experts of a layer.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import ModelOutput

from treewise.base.shapes import Context
from treewise.distributed import ranks
from treewise.errors import UnsupportedModelError

# Rows whose gradients are added up at a time, in float32.
_MAX_NUMBERS = 2**24


class GatheredRows(torch.autograd.Function):
    """Rows of a tensor, [n, ...], by an index of any shape; the gradients of a row that stands in several places add up
    in float32. No view: modules that are sharded by FSDP2 may return it."""

    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = rows.shape, rows.dtype
        return rows[index]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        index = ctx.saved_tensors[0].reshape(-1)
        grad = grad.reshape(len(index), *ctx.shape[1:])
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        size = max(1, _MAX_NUMBERS // max(1, grad[0].numel())) if len(grad) and grad.dtype != wide else len(grad)
        for start in range(0, len(grad), max(1, size)):
            total.index_add_(0, index[start : start + size], grad[start : start + size].to(wide))
        return total.to(ctx.dtype), None


def rows_and_padding(rows: torch.Tensor, *, is_trained: bool, is_together: bool = False) -> torch.Tensor:
    """[n + 1, ...], the last of which stands for padding. A backward raises `UnsupportedModelError` where a loss reads
    it; on all ranks, where it does on one of those that run their backwards together.

    is_trained: whether something of the model is, if only its head, so that rows without a gradient are watched, too.
    """
    anchor = torch.zeros((), device=rows.device, requires_grad=is_trained)
    padded: torch.Tensor = _RowsAndPadding.apply(rows, anchor, is_together)
    return padded


class _RowsAndPadding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, _: torch.Tensor, is_together: bool) -> torch.Tensor:
        ctx.is_together = is_together
        # A row as others are: at zeros entropies and squares of logits would have no gradient, and go unnoticed.
        return torch.cat([rows, rows[:1]])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        def check() -> None:
            if grad[-1].abs().max() > 0:
                raise UnsupportedModelError(
                    "the loss reads logits or hidden rows of padding, which share_prefixes does not compute. Score "
                    "real tokens alone; with left padding the first of a row is predicted by padding. Or leave such "
                    "batches to the model: `with sharing.paused():` around them."
                )

        if ctx.is_together:
            ranks.on_every_rank(check)
        else:
            check()
        return grad[:-1], None, None


class NotComputed:
    """Stands where a model's own forward would have returned more; whoever uses it gets an error that says so."""

    def __init__(self, what: str) -> None:
        self.__dict__["what"] = what

    def refuse(self) -> NoReturn:
        """Raises `UnsupportedModelError`."""
        raise UnsupportedModelError(
            f"{self.__dict__['what']}, which share_prefixes does not compute. Leave such batches to the model: "
            "sharing.remove(), or `with sharing.paused():` around them."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # copies and checks of types go on
        self.refuse()

    def __getitem__(self, _: object) -> NoReturn:
        self.refuse()

    def __add__(self, _: object) -> NoReturn:
        self.refuse()

    __mul__ = __radd__ = __rmul__ = __sub__ = __matmul__ = __len__ = __iter__ = __add__

    def __repr__(self) -> str:
        return f"NotComputed({self.__dict__['what']!r})"


def output_class(forward: Callable[..., object]) -> type[ModelOutput]:
    """What a decoder's forward says that it returns; transformers' widest class where it says nothing."""
    try:
        annotated = typing.get_type_hints(inspect.unwrap(forward)).get("return")
    except (NameError, TypeError):
        annotated = None
    for kind in (annotated, *typing.get_args(annotated)):
        if (
            inspect.isclass(kind)
            and issubclass(kind, ModelOutput)
            and "last_hidden_state" in getattr(kind, "__dataclass_fields__", ())
        ):
            return kind
    return MoeModelOutputWithPast


def decoder_output(
    kind: type[ModelOutput],
    hidden_BLM: torch.Tensor,
    arguments: dict[str, Any],
    num_layers: int,
    more: dict[str, Any],
) -> ModelOutput | tuple[Any, ...]:
    """The output of a decoder's call, with the hidden rows of the batch, [B, L, M].

    arguments: of the call, by name. num_layers: of the decoder. more: further fields, where the output has such.
    """
    fields: dict[str, Any] = {"last_hidden_state": hidden_BLM}
    if arguments.get("output_hidden_states"):
        below = NotComputed("the call read hidden rows of a layer below the last (output_hidden_states)")
        fields["hidden_states"] = (*[below] * num_layers, hidden_BLM)
    fields |= {name: value for name, value in more.items() if name in kind.__dataclass_fields__}
    output = kind(**fields)
    return output if arguments.get("return_dict", True) else output.to_tuple()
