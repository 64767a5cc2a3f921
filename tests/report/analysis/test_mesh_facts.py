"""Memory of the processes of a mesh: `tests/distributed/test_mesh.py` compares weights with what processes hold."""

import pytest
import torch

from treewise.errors import ConfigError
from treewise.nn.model_flops import flop_model
from treewise.planning.planner import plan
from treewise.report.analysis.mesh_facts import (
    ContextReport,
    read_bytes_setting,
    read_mesh,
    report_context,
    report_mesh,
)
from treewise.testing import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# tiny_model("llama"): 3 layers, width 32, 4 heads and 2 key heads of 8, 48 wide, 64 tokens, a head of its own.
LAYER_SPLIT = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
NORMS = 2 * 32
ENDS = 2 * 64 * 32


@pytest.mark.parametrize(
    ("mesh", "weights"),
    [
        ("tp=1", 3 * (LAYER_SPLIT + NORMS) + 32 + ENDS),
        ("tp=2", 3 * (LAYER_SPLIT / 2 + NORMS) + 32 + ENDS / 2),
        ("tp=2,fsdp=4", (3 * (LAYER_SPLIT / 2 + NORMS) + 32 + ENDS / 2) / 4),
        ("tp=2, dp=4", 3 * (LAYER_SPLIT / 2 + NORMS) + 32 + ENDS / 2),
    ],
)
def test_bytes_of_a_small_model_by_hand(mesh, weights):
    report = report_mesh(tiny_model("llama").config, read_mesh(mesh), torch.float32, gpu_bytes=2**30)
    assert report.bytes_weights == report.bytes_gradients == report.bytes_optimizer // 2 == pytest.approx(4 * weights)
    tp = report.mesh.get("tp", 1)
    assert report.bytes_per_gateway_token == 3 * (2 // tp) * 2 * 8 * (4 + 4)
    whole = 0 if "fsdp" not in mesh else 2 * (32 + ENDS / 2) + 3 * (LAYER_SPLIT / 2 + NORMS)
    assert report.bytes_whole == 4 * whole
    assert report.bytes_static == 4 * (4 * weights + whole)
    assert report.max_tokens * report.bytes_per_activation_token <= 0.9 * 2**30 - report.bytes_static


def test_processes_that_share_tokens_hold_copies_or_shards():
    config = tiny_model("llama").config
    one = report_mesh(config, read_mesh("tp=1"), torch.bfloat16)
    for mesh, parts in (("context=4,dp=4", 1), ("context=2,fsdp=4", 4)):
        report = report_mesh(config, read_mesh(mesh), torch.bfloat16)
        assert (report.processes, report.bytes_weights) == (4, one.bytes_weights / parts)
        assert report.bytes_per_activation_token == one.bytes_per_activation_token
        assert report.bytes_per_read_token == 3 * 2 * (8 + 8) * 2


def test_experts_are_split_and_the_rest_is_not():
    model = tiny_model("qwen3_moe")
    experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    rest = sum(each.numel() for name, each in model.named_parameters()) - experts
    report = report_mesh(model.config, read_mesh("ep=4,dp=4"), torch.bfloat16)
    assert report.bytes_weights == 2 * (rest + experts / 4)
    assert report_mesh(model.config, read_mesh("ep=2,fsdp=4"), torch.bfloat16).bytes_weights == pytest.approx(
        2 * (rest / 4 + experts / 2 / 2)
    )


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tp=2,cp=2", "'cp=2' is not an axis and its size; give some of tp, ep, context, fsdp, dp"),
        (
            "context=4,fsdp=2",
            "tp x fsdp x dp = 2 processes: context_size=4 does not divide the 2",
        ),
        ("context=2,tp=2", "context_size=2 cannot be combined with tp_size=2, ep_size=1"),
        ("tp=0", "'tp=0' is not an axis"),
        ("tp=2,ep=3,fsdp=3", "ep_size=3 must be a multiple of tp_size=2 and divide the 6 processes"),
    ],
)
def test_axes_that_do_not_fit_are_errors(mesh, message):
    with pytest.raises(ConfigError, match=message):
        read_mesh(mesh)


def test_models_without_such_a_plan_are_errors():
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no plan for ep=2; leave ep out"):
        report_mesh(tiny_model("llama").config, read_mesh("ep=2,fsdp=2"), torch.float32)
    with pytest.raises(ConfigError, match="2 heads of keys cannot be shared by tp=4 processes"):
        report_mesh(tiny_model("llama").config, read_mesh("tp=4"), torch.float32)


def test_sizes_are_read():
    assert read_bytes_setting("80GiB") == 80 * 2**30
    assert read_bytes_setting("80 GB") == 80 * 10**9
    assert read_bytes_setting("1024") == 1024
    with pytest.raises(ConfigError, match=r"'big'.*80GiB"):
        read_bytes_setting("big")


# -- processes that share micro-batches, beside counts by hand

VALUES = 3 * 2 * (8 + 8)  # of a token: layers, key heads, sizes of keys and values


@pytest.mark.parametrize(
    ("budget", "dtype", "live", "read", "sent"),
    [
        # Tokens 0 to 4 and 5 to 7: the second process has three tokens, which see five of the first one.
        (None, torch.float32, 5, 0, 5 * (4 + 4)),
        (None, torch.bfloat16, 5, 0, 5 * (2 + 4)),
        # The prompt as 3 and 1, forward, and forward and backward again; the answers as 2 and 2.
        (4, torch.float32, 3, 0, (3 + 2 + 3) * 4 + (2 + 3) * 4),
    ],
)
def test_a_prompt_of_four_tokens_and_two_answers_by_hand(budget, dtype, live, read, sent):
    forest = Forest.from_trajectories([Trajectory([3, 4, 5, 6, answer, answer]) for answer in (7, 8)])
    report = report_context(plan(forest, budget, hold="never"), flop_model(tiny_model("llama")), 2, dtype)
    assert report == ContextReport(2, live, read, VALUES * sent)


def test_the_last_process_of_a_long_path_reads_the_tokens_of_the_others():
    # Attention weighs most and its keys take most bytes, so the last process has few tokens and reads all others.
    flops = flop_model(tiny_model("llama", num_key_value_heads=4, head_dim=4096, hidden_size=4, intermediate_size=4))
    report = report_context(plan(Forest.from_trajectories([Trajectory(range(3, 43))])), flops, 4, torch.float32)
    assert report.live_tokens + report.read_tokens == 40
    assert report.read_tokens > 30
