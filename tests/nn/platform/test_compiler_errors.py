"""What a compiler could not do is told by kernel, dtype, head size, card and versions, wherever it is met."""

import re
from dataclasses import replace

import pytest
import torch

from tests.nn.attention.test_flex import branching_mask
from treewise import TreeEngine
from treewise.errors import UnsupportedModelError
from treewise.nn.attention import IMPLEMENTATIONS, flex, reference
from treewise.nn.attention.mask import LayerRule
from treewise.nn.platform.card import card_name
from treewise.nn.platform.compiler_errors import compiler_failure
from treewise.nn.platform.versions import installed_version
from treewise.testing import tiny_model
from treewise.tree.forest import Forest

CPU = torch.device("cpu")
# As Triton has it: the source of the kernel up to the line that fails, then the reason.
MESSAGE = """at 149:12:
    for start_n in range(block_n_start, block_n_end):
        qk = tl.dot(q, k, input_precision=FLOAT32_PRECISION)
            ^
Unsupported dtype fp64 for tl.dot"""


class CompilationError(Exception):
    """Stands for Triton's, which is a plain exception."""


CompilationError.__module__ = "triton.compiler.errors"


def failing(*_: object) -> None:
    raise CompilationError(MESSAGE)


def wrapped() -> Exception:
    """The error as torch's compiler wraps it."""
    torch._dynamo.reset()
    with pytest.raises(Exception, match="Unsupported dtype") as found:
        torch.compile(lambda x: x + 1, backend=failing)(torch.ones(2))
    return found.value


@pytest.mark.parametrize("error", [wrapped, lambda: CompilationError(MESSAGE)], ids=["wrapped", "raw"])
def test_the_reason_stands_after_what_was_compiled_where(error, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    failure = compiler_failure(error(), "FlexAttention's kernels for heads of 64 in float64", torch.device("cuda"))
    triton = installed_version("triton") or "is not installed"
    assert str(failure) == (
        "FlexAttention's kernels for heads of 64 in float64 do not compile on NVIDIA H100 80GB HBM3 (compute "
        f"capability 9.0), torch {installed_version('torch')}, triton {triton}: CompilationError: Unsupported dtype "
        "fp64 for tl.dot. attention='reference' computes the same without kernels of its own; `treewise doctor --gpu` "
        "tries them all."
    )


@pytest.mark.parametrize(
    "error", [ValueError("a size"), torch.OutOfMemoryError("all of it"), UnsupportedModelError("a layer")]
)
def test_errors_of_others_are_left(error) -> None:
    assert compiler_failure(error, "kernels", CPU) is None


def test_attention_names_what_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel of a kind ran before."""
    monkeypatch.setattr(flex, "card", lambda _: flex.Card((9, 0), 2**18))
    monkeypatch.setattr(flex, "_uncompiled", flex._compiled)
    mask, rule = branching_mask(2, 150, 30), LayerRule(0.3)
    query, key = torch.randn(1, 2, mask.num_queries, 64), torch.randn(1, 1, mask.num_keys, 64)
    value = torch.randn(1, 1, mask.num_keys, 32)
    outcomes = [lambda query, *_: (query[..., :32], None), failing]
    monkeypatch.setattr(flex, "_compiled_kernel", lambda: outcomes.pop(0))
    flex.flex_attention_tree(query, key, value, mask, rule)
    with pytest.raises(
        UnsupportedModelError, match="FlexAttention's kernels for heads of 64 and values of 32 in float32"
    ):
        flex.flex_attention_tree(query, key, value, mask, rule)


class FailsToCompile(torch.autograd.Function):
    """A kernel whose backward is compiled when it first runs, and cannot be."""

    @staticmethod
    def forward(ctx, out):
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        return failing()


def test_a_probe_does_not_blame_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = lambda *inputs: FailsToCompile.apply(reference.attend(*inputs))  # noqa: E731
    monkeypatch.setitem(IMPLEMENTATIONS, "cascade", replace(IMPLEMENTATIONS["cascade"], run=broken))
    expected = f"kernels of LlamaModel in float32, heads of 8 do not compile on {card_name(CPU)}, torch "
    with pytest.raises(UnsupportedModelError, match=re.escape(expected)):
        TreeEngine(tiny_model(), attention="cascade").check(Forest.from_nodes([-1, 0, 0], [[5, 6], [7], [8, 9]]))
