"""Cases on which an attention kernel is compared with the reference: output and gradients, beside an error budget.

The budget is four times the error of the reference in the same dtype, plus roundings of the largest value; both errors
are against the reference in float64. Cases with a deliberately wrong mask must exceed it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.reference import reference_attention
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

Attention = Callable[..., Tensor]
Errors = dict[str, tuple[float, float]]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One call of attention.

    shape: branches, shared tokens and own tokens of the tree. is_below: the micro-batch below a gateway rather than the
    whole tree. head_sizes: of keys and values. num_heads: of queries and keys. is_broken: the kernels get a wrong mask.
    """

    rule: LayerRule
    shape: tuple[int, int, int] = (3, 140, 50)
    is_below: bool = False
    head_sizes: tuple[int, int] = (64, 64)
    num_heads: tuple[int, int] = (2, 1)
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    is_broken: bool = False

    def mask(self) -> TreeMask:
        """The mask of the micro-batch."""
        num_branches, num_shared, num_own = self.shape
        shared, own = np.arange(num_shared), np.arange(num_own)
        branches = [Trajectory(np.concatenate([shared, 1000 * (index + 1) + own])) for index in range(num_branches)]
        parts = plan(Forest.from_trajectories(branches), num_own if self.is_below else None, hold="never")
        return TreeMask.from_layout(lay_out(parts, parts.num_micro_batches - 1 if self.is_below else 0))

    def inputs(self, mask: TreeMask, device: torch.device = CPU) -> list[Tensor]:
        """Queries, keys, values and sinks, from a fixed seed."""
        (heads, key_heads), (size, value_size) = self.num_heads, self.head_sizes
        shapes: list[tuple[int, ...]] = [(1, heads, mask.num_queries, size), (1, key_heads, mask.num_keys, size)]
        shapes += [(1, key_heads, mask.num_keys, value_size), *([(heads,)] if self.has_sinks else [])]
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        return [each.to(device, self.dtype).requires_grad_() for each in drawn]


_PLAIN, _ALL = LayerRule(scaling=0.2), LayerRule(0.3, window=150, chunk=300, softcap=0.9)
_BELOW = (3, 270, 150)
# Of queries and keys, and of values, for which tiles are chosen; and in which dtypes (benchmarks/reports/method.md).
HEAD_SIZES = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CASES = {
    "whole": Case(_PLAIN),
    "all": Case(_ALL, has_sinks=True),
    "gateway": Case(_PLAIN, shape=_BELOW, is_below=True),
    "broken": Case(_PLAIN, is_broken=True),
    "broken gateway": Case(_PLAIN, shape=_BELOW, is_below=True, is_broken=True),
    "one block": Case(_PLAIN, shape=(2, 20, 9)),
    "whole blocks": Case(_PLAIN, shape=(2, 128, 128)),
    "window": Case(replace(_PLAIN, window=90)),
    "chunk": Case(replace(_PLAIN, chunk=100)),
    "softcap": Case(replace(_PLAIN, softcap=1.3)),
    "sinks": Case(_PLAIN, has_sinks=True),
    "window and sinks below a gateway": Case(replace(_PLAIN, window=90), shape=_BELOW, is_below=True, has_sinks=True),
    "one head": Case(_PLAIN, num_heads=(1, 1)),
    "four heads of a group": Case(_PLAIN, num_heads=(4, 1)),
    "heads of 16": Case(_PLAIN, head_sizes=(16, 16)),
    **{
        f"heads of {sizes[0]}{'' if sizes[0] == sizes[1] else f' and {sizes[1]}'}, {name}": Case(
            _ALL, head_sizes=sizes, dtype=dtype, has_sinks=True
        )
        for sizes, (name, dtype) in itertools.product(reversed(HEAD_SIZES), DTYPES.items())
    },
}


def kernel_errors(attention: Attention, case: Case, device: torch.device = CPU) -> Errors:
    """Largest error and what is allowed, of the output (`out`) and of each gradient.

    attention: has the contract of `reference_attention`.
    """
    mask = case.mask()
    inputs = case.inputs(mask, device)
    shape = (*inputs[0].shape[:3], inputs[2].shape[3])
    cotangent = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    found = with_gradients(attention, inputs, _with_a_wrong_key(mask) if case.is_broken else mask, case.rule, cotangent)
    plain = with_gradients(reference_attention, inputs, mask, case.rule, cotangent)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    exact = with_gradients(reference_attention, wide, mask, case.rule, cotangent)
    terms = (exact[0] * cotangent).square().sum(dim=(0, 2, 3))  # of a sink: roundings of all rows add up
    sizes = [*(_largest(each) for each in exact[:4]), float(terms.max().sqrt())]
    eps = torch.finfo(case.dtype).eps
    names = ["out", "query", "key", "value", "sinks"]
    rows = zip(names[: len(found)], found, plain, exact, sizes[: len(found)], strict=True)
    return {
        name: (_largest(ours - want), 4 * (_largest(same - want) + eps * size)) for name, ours, same, want, size in rows
    }


def is_within(errors: Errors) -> bool:
    """Whether every error is within its budget; NaN is not."""
    return all(error <= allowed for error, allowed in errors.values())


def shown(errors: Errors) -> str:
    """Each error beside its budget, for a message."""
    return ", ".join(f"{name} {error:.1e} (at most {allowed:.1e})" for name, (error, allowed) in errors.items())


def with_gradients(
    attention: Attention, inputs: list[Tensor], mask: TreeMask, rule: LayerRule, cotangent: Tensor
) -> list[Tensor]:
    """The output, and the gradient of each input, detached."""
    query, key, value, *sinks = inputs
    out = attention(query, key, value, mask, rule, *sinks)
    return [out.detach(), *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))]


def _with_a_wrong_key(mask: TreeMask) -> TreeMask:
    """The mask with the key that most queries see hidden from the last of them."""
    hi = mask.hi.copy()
    hi[np.argmax(hi - mask.lo)] -= 1
    return TreeMask(mask.lo, hi, mask.key_depth, mask.num_queries)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())
