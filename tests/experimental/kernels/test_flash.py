"""The FLASH backend gets the block mask of FlexAttention in blocks of its own; its kernels need a GPU."""

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention import flex_attention as public

from tests.nn.attention.test_flex import CPU, DV, RULES, H, branching_mask, draw_inputs, masks
from treewise.experimental.kernels import flash
from treewise.experimental.kernels.flash import BLOCKS, blocks_on, flash_attention_tree
from treewise.nn.attention import flex
from treewise.nn.attention.kernel_cases import with_gradients
from treewise.nn.attention.reference import reference_attention


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@settings(max_examples=5)
@given(mask=masks())
def test_outputs_and_gradients_are_those_of_the_reference(mask, capability):
    """By the uncompiled operator, under the same block mask and score cap."""
    inputs = draw_inputs(mask, True, torch.float64)
    cotangent = torch.randn(1, H, mask.num_queries, DV)
    expected = with_gradients(reference_attention, inputs, mask, RULES["all"], cotangent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "blocks_on", lambda _: BLOCKS[capability[0]])
        found = with_gradients(flash_attention_tree, inputs, mask, RULES["all"], cotangent)
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours - wanted).abs().max() < 1e-12  # float64, values of order one


def test_torch_is_asked_for_its_backend_and_for_nothing_of_triton(monkeypatch):
    """Tiles are Triton's; one graph serves all lengths here, too."""
    options: list[dict[str, object]] = []
    made: list[object] = []

    def kernel(*inputs: object) -> object:
        options.append(dict(inputs[-1]))
        return flex._kernel(*inputs)

    monkeypatch.setattr(public, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex._kernel, fullgraph=True, backend=lambda graph, _: made.append(graph) or graph.forward)
    monkeypatch.setattr(
        flex, "_compiled_kernel", lambda: lambda *inputs: options.append(inputs[-1]) or compiled(*inputs)
    )
    monkeypatch.setattr(flex, "_uncompiled", flex._compiled)
    monkeypatch.setattr(flex, "card", lambda _: flex.Card((9, 0), 227 * 1024))
    for shape in ((2, 150, 90), (3, 257, 64), (5, 300, 31)):
        mask = branching_mask(*shape)
        inputs = draw_inputs(mask, False, torch.float32)
        found = flash_attention_tree(*inputs, mask, RULES["softcap"])
        assert (found - reference_attention(*inputs, mask, RULES["softcap"])).abs().max() < 1e-5
    assert options == [{"BACKEND": "FLASH"}] * 3
    assert len(made) == 1


def test_blocks_are_those_of_the_card(monkeypatch):
    assert blocks_on(CPU) == (128, 128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 3))
    assert blocks_on(torch.device("cuda")) == (256, 128)
