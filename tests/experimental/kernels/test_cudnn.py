"""The intervals given to cuDNN's kernels against the exact mask; outputs and gradients with a stand-in for the package.

The stand-in reads the package's documented arguments: [Hmask, nfunc, T] int32 ends of intervals, tokens before heads.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.nn.attention.test_flex import CPU, DV, HKV, RULES, D, H, draw_inputs, masks
from treewise import Forest, TreeEngine
from treewise.errors import ConfigError
from treewise.experimental.kernels import cudnn
from treewise.experimental.kernels.cudnn import cudnn_attention_tree, interval_ends, visible_runs
from treewise.nn.attention import IMPLEMENTATIONS, needs
from treewise.nn.attention.kernel_cases import with_gradients
from treewise.nn.attention.mask import TreeMask
from treewise.nn.attention.reference import reference_attention, visible
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing import assert_equals_flat, tiny_model
from treewise.testing.strategies import forests_and_budgets
from treewise.tree.trajectory import Trajectory


def dense(ends: np.ndarray, num_keys: int) -> torch.Tensor:
    """[T, K] bool of ends of intervals [F, T]: [0, F0), [F1, F2), ..."""
    key_K = np.arange(num_keys)
    seen = key_K < ends[0][:, None]
    for start, end in zip(ends[1::2], ends[2::2], strict=True):
        overlap = seen & (start[:, None] <= key_K) & (key_K < end[:, None])
        assert not overlap.any()
        seen = seen | (start[:, None] <= key_K) & (key_K < end[:, None])
    return torch.from_numpy(seen)


@dataclass
class Plan:
    seen: torch.Tensor
    has_backward: bool


class Package(SimpleNamespace):
    """What of `cudnn.flex_attention` is called."""

    def __init__(self) -> None:
        super().__init__(plans=[])

    def create_mask_plan(self, mask_func, q, k, v, *, build_backward) -> Plan:
        assert mask_func.dtype == torch.int32
        assert mask_func.is_contiguous()
        assert mask_func.shape[0] == 1
        assert mask_func.shape[1] % 2 == 1
        assert mask_func.shape[2] == q.shape[1]
        assert q.shape[2:] == (q.shape[2], k.shape[3])
        assert v.shape[1:3] == k.shape[1:3]
        assert all(each.stride(3) == 1 for each in (q, k, v))
        self.plans.append(Plan(dense(mask_func[0].numpy(), k.shape[1]), build_backward))
        return self.plans[-1]

    def flex_attn_func(self, q, k, v, *, mask_plan, softmax_scale, deterministic, return_lse=False):
        assert isinstance(deterministic, bool)
        assert mask_plan.has_backward or not torch.is_grad_enabled()
        group = q.shape[2] // k.shape[2]
        key, value = (each.repeat_interleave(group, dim=2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, key) * softmax_scale
        lse = scores.masked_fill(~mask_plan.seen, -torch.inf).logsumexp(dim=3)
        weights = torch.exp(scores - lse[..., None]).masked_fill(~mask_plan.seen, 0.0)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, value)
        return (out, lse) if return_lse else out


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setattr(cudnn, "package", lambda: made)
    return made


@pytest.mark.parametrize("name", ["plain", "window", "chunk", "all"])
@given(mask=masks())
def test_intervals_are_the_mask(mask, name):
    rule = RULES[name]
    ends = interval_ends(mask, rule.window, rule.chunk)
    assert ends.dtype == np.int32
    assert len(ends) % 2 == 1
    assert (np.diff(ends, axis=0) >= 0).all()
    assert torch.equal(dense(ends, mask.num_keys), visible(mask, rule.window, rule.chunk, CPU))


@given(drawn=forests_and_budgets())
def test_a_whole_tree_has_a_run_more_than_light_edges(drawn):
    """Siblings lie heaviest first, so intervals are few: those of a path are at most its depth of light edges."""
    mask = TreeMask.from_layout(lay_out(plan(drawn[0]), 0))
    query_R, _, _ = visible_runs(mask, None, None)
    runs_T = np.bincount(query_R, minlength=mask.num_queries)
    assert runs_T.max() <= 1 + np.log2(mask.num_queries)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize("name", ["plain", "window", "chunk"])
@given(mask=masks())
def test_outputs_and_gradients_are_those_of_the_reference(mask, name, has_sinks):
    inputs = draw_inputs(mask, has_sinks, torch.float64)
    cotangent = torch.randn(1, H, mask.num_queries, DV)
    expected = with_gradients(reference_attention, inputs, mask, RULES[name], cotangent)
    with pytest.MonkeyPatch.context() as patch:
        made = Package()
        patch.setattr(cudnn, "package", lambda: made)
        found = with_gradients(cudnn_attention_tree, inputs, mask, RULES[name], cotangent)
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.shape == wanted.shape
        assert (ours - wanted).abs().max() < 1e-12  # float64, values of order one


def test_a_plan_serves_all_layers_of_a_kind(package):
    mask = TreeMask.from_layout(lay_out(plan(Forest.from_trajectories([Trajectory([1, 2, 3]), Trajectory([1, 4])])), 0))
    inputs = [torch.randn(1, heads, mask.num_queries, D) for heads in (H, HKV, HKV)]
    for _ in range(3):
        cudnn_attention_tree(*inputs, mask, RULES["plain"])
        cudnn_attention_tree(*inputs, mask, replace(RULES["plain"], scaling=0.7))
    assert len(package.plans) == 1
    with torch.no_grad():
        cudnn_attention_tree(*inputs, mask, RULES["plain"])
    assert [each.has_backward for each in package.plans] == [True, False]
    cudnn_attention_tree(*inputs, mask, RULES["window"])
    assert len(package.plans) == 3


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_training_is_flat_training(package, monkeypatch, family):
    monkeypatch.setattr(needs, "require", lambda *_: None)
    forest = Forest.from_nodes([-1, 0, 0, 2, 2], [[5, 6, 7], [8, 9], [3, 4, 5, 6], [9], [8, 7]])
    model = tiny_model(family)
    for budget in (None, 5):
        assert_equals_flat(model, forest, max_tokens=budget, attention="cudnn")
    assert package.plans


def test_a_package_without_what_is_called_is_named(monkeypatch):
    cudnn.package.cache_clear()
    monkeypatch.setattr(cudnn, "installed_version", lambda _: "1.40.0")
    monkeypatch.setattr(cudnn, "import_module", lambda _: SimpleNamespace(create_mask_plan=1))
    with pytest.raises(
        ConfigError, match=r"nvidia-cudnn-frontend 1\.40\.0 has no flex_attn_func; use attention='flex'"
    ):
        cudnn.package()

    def broken(_: str) -> None:
        raise OSError("libcudnn.so.9: cannot open")

    monkeypatch.setattr(cudnn, "import_module", broken)
    with pytest.raises(
        ConfigError, match=r"has no cudnn\.flex_attention; .* \(OSError: libcudnn\.so\.9: cannot open\)"
    ):
        cudnn.package()
    cudnn.package.cache_clear()


def test_engines_run_no_other_kernel(package, monkeypatch):
    """What a call asks is looked at again, for models whose layers do not say it of themselves."""
    monkeypatch.setitem(IMPLEMENTATIONS, "cudnn", IMPLEMENTATIONS["cudnn"])
    with pytest.raises(ConfigError, match="attention='cudnn' runs on CUDA"):
        TreeEngine(tiny_model(num_hidden_layers=1), attention="cudnn").step(Forest.from_nodes([-1], [[5, 6]]))
    assert not package.plans
