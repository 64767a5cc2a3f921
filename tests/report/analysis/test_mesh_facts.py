"""Memory of the processes of a mesh: `tests/distributed/test_mesh.py` compares weights with what processes hold."""

import pytest
import torch

from tests.needs import MESHES
from treewise.errors import ConfigError
from treewise.report.analysis.mesh_facts import read_bytes_setting, read_mesh, report_mesh
from treewise.testing import tiny_model

# tiny_model("llama"): 3 layers, width 32, 4 heads and 2 key heads of 8, 48 wide, 64 tokens, a head of its own.
LAYER_SPLIT = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
NORMS = 2 * 32
ENDS = 2 * 64 * 32


@pytest.mark.parametrize(
    ("mesh", "weights"),
    [
        ("tp=1", 3 * (LAYER_SPLIT + NORMS) + 32 + ENDS),
        pytest.param("tp=2", 3 * (LAYER_SPLIT / 2 + NORMS) + 32 + ENDS / 2, marks=MESHES),
        pytest.param("tp=2,fsdp=4", (3 * (LAYER_SPLIT / 2 + NORMS) + 32 + ENDS / 2) / 4, marks=MESHES),
        pytest.param("tp=2, dp=4", 3 * (LAYER_SPLIT / 2 + NORMS) + 32 + ENDS / 2, marks=MESHES),
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


@MESHES
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
        ("tp=2,cp=2", "'cp=2' is not an axis and its size; give some of tp, ep, fsdp, dp"),
        ("context=2,dp=2", "'context=2' is not an axis"),
        ("tp=0", "'tp=0' is not an axis"),
        pytest.param("tp=2,ep=3,fsdp=3", "ep_size=3 must be a multiple of tp_size=2 and divide the 6", marks=MESHES),
    ],
)
def test_axes_that_do_not_fit_are_errors(mesh, message):
    with pytest.raises(ConfigError, match=message):
        read_mesh(mesh)


@MESHES
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
