"""Which kernels multiply in bfloat16 on a CPU: oneDNN's own log of a step, beside the FLOPs that the step needs."""

import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import treewise as tw
from treewise.nn.flops import tree_head_rows
from treewise.nn.model_flops import flop_model

CPUINFO = Path("/proc/cpuinfo")
WIDTHS = {64, 128, 256, 512}  # of the model's matrices; attention multiplies by heads of 32
PRODUCT = re.compile(r"primitive,exec,cpu,matmul,([^,]*),.*,(\d+)x(\d+):\d+x(\d+),")

pytestmark = pytest.mark.skipif(
    not CPUINFO.is_file() or "amx_bf16" not in CPUINFO.read_text(), reason="needs a CPU with AMX"
)


def step_with_log(capfd, dtype: torch.dtype, max_tokens: int | None, *, autocast: bool = False):
    """FLOPs of the model's own products in AMX kernels, and those that the plan of the step needs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    model = LlamaForCausalLM(config).to(dtype)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 512, 100)
    items = [tw.Trajectory(np.concatenate([shared, rng.integers(0, 512, 60)])) for _ in range(2)]
    engine = tw.TreeEngine(model, max_tokens, check=False, hold="never")
    forest = tw.Forest.from_trajectories(items)
    capfd.readouterr()
    log, cast = torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON), torch.autocast("cpu", torch.bfloat16)
    with log, cast if autocast else nullcontext():
        out = engine.step(forest)
    logged = 0
    for kernel, *sizes in PRODUCT.findall(capfd.readouterr().out):
        rows, inner, columns = map(int, sizes)
        if "amx" in kernel and len([size for size in (rows, inner, columns) if size in WIDTHS]) >= 2:
            logged += 2 * rows * inner * columns
    flops = flop_model(model)
    rows = (flops.head + flops.head_backward) * tree_head_rows(forest)
    return logged, flops.linear * out.num_computed_tokens + flops.linear_backward * forest.num_tokens + rows


@pytest.mark.parametrize("max_tokens", [None, 110], ids=["whole", "budget"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_every_large_product_of_a_bfloat16_step_takes_an_amx_kernel(capfd, autocast, max_tokens):
    dtype = torch.float32 if autocast else torch.bfloat16
    logged, needed = step_with_log(capfd, dtype, max_tokens, autocast=autocast)
    assert logged == needed


def test_float32_takes_none(capfd):
    logged, _ = step_with_log(capfd, torch.float32, None)
    assert logged == 0
