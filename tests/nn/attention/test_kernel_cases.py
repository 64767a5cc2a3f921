"""The comparison of kernels with the reference: what is right passes, and one wrong key does not."""

from dataclasses import replace

import pytest
import torch

from treewise.nn.attention.flex import flex_attention_tree
from treewise.nn.attention.kernel_cases import CASES, is_within, kernel_errors
from treewise.nn.attention.reference import reference_attention


@pytest.mark.parametrize("name", ["whole", "all", "gateway", "broken", "broken gateway", "heads of 32, bfloat16"])
def test_cases_pass_unless_they_are_broken(name: str) -> None:
    """FlexAttention's uncompiled operator."""
    assert is_within(kernel_errors(flex_attention_tree, CASES[name])) is not CASES[name].is_broken


@pytest.mark.parametrize("gradient", ["query", "key", "value", "sinks"])
def test_a_wrong_gradient_is_named(gradient: str) -> None:
    def wrong(query, key, value, mask, rule, *sinks):
        tensors = {"query": query, "key": key, "value": value, "sinks": sinks[0]}
        halved = tensors[gradient]
        tensors[gradient] = halved / 2 + halved.detach() / 2  # the same value with half of its gradient
        return reference_attention(*list(tensors.values())[:3], mask, rule, tensors["sinks"])

    errors = kernel_errors(wrong, CASES["sinks"])
    assert [name for name in errors if not is_within({name: errors[name]})] == [gradient]


def test_nan_is_an_error() -> None:
    def undefined(query, *others):
        return reference_attention(query, *others) * torch.nan

    assert not is_within(kernel_errors(undefined, replace(CASES["whole"], dtype=torch.float64)))
