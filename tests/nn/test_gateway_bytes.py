"""The bytes of a gateway token, from the configuration, are those that a real gateway holds."""

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from treewise import Forest, Trajectory
from treewise.engine.budget import gateway_token_bytes
from treewise.nn.attention import Gateway, TreeContext, TreeMask
from treewise.nn.decoder import run_decoder
from treewise.nn.flops import gateway_bytes
from treewise.nn.model import split_model
from treewise.nn.model_flops import flop_model
from treewise.nn.recurrent import TreeRows
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.families import tiny_model

FAMILIES = [
    "llama",
    "qwen3_next",  # hybrids: a few layers attend
    "lfm2",
    "bamba",
    "falcon_h1",  # attention beside Mamba2 in every layer
    "zamba2",
    "deepseek_v3",  # latent attention: full heads, keys and values of different sizes
    "mimo_v2_flash",  # other heads in sliding layers
    "jetmoe",
    "diffllama",  # two calls a layer
    "dory",  # two calls of a layer between others; from transformers 5.24 on
    "whisper",  # a decoder of an encoder-decoder
    "mamba2",  # no attention
]


@pytest.mark.parametrize("family", [each for each in FAMILIES if each in CONFIG_MAPPING])
@pytest.mark.filterwarnings("default")  # of building models: transformers' own
def test_bytes_are_those_of_a_real_gateway(family: str) -> None:
    """The budget and the FLOP model once had formulas of their own: 96 and 32 values for this Qwen3-Next."""
    model = tiny_model(family)
    parts, run = split_model(model), plan(Forest.from_trajectories([Trajectory(np.full(2, 5))]), 1, hold="never")
    layout, gateway = lay_out(run, 0), Gateway()
    context = TreeContext(TreeMask.from_layout(layout), "reference", writes=gateway, rows=TreeRows(run, 0, layout))
    with torch.no_grad():
        run_decoder(parts, layout.token_ids, layout.depth, context)
    num_values = sum(each.numel() for kept in (gateway.keys, gateway.values) for each in kept.values())
    assert flop_model(model).gateway_values == num_values // layout.num_tokens
    assert gateway_token_bytes(parts) == max(1, (4 + 4) * num_values // layout.num_tokens)


def test_gradients_are_float32_or_wider() -> None:
    widths = [gateway_bytes(10, dtype.itemsize) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    assert widths == [60, 80, 160]
