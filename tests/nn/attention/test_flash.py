"""`attention="flash"`: what it refuses, and that results are compared with the reference before the first use.

Its kernels need a GPU; here FlexAttention's uncompiled operator stands in for them.
"""

import pytest
import torch

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.attention import choose, flash
from treewise.nn.attention.flash import flash_attention_tree
from treewise.nn.attention.flex import flex_attention_tree
from treewise.nn.attention.kernel_cases import Case
from treewise.nn.attention.mask import LayerRule
from treewise.nn.attention.reference import reference_attention

CASE = Case(LayerRule(scaling=0.2), shape=(2, 20, 9), head_sizes=(16, 16), dtype=torch.bfloat16)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """As if a GPU and the packages were there."""
    flash._compare.cache_clear()
    monkeypatch.setattr(flash, "_require_packages", lambda _: None)
    yield monkeypatch
    flash._compare.cache_clear()


def call(case: Case = CASE) -> torch.Tensor:
    mask = case.mask()
    query, key, value, *sinks = case.inputs(mask)
    return flash_attention_tree(query, key, value, mask, case.rule, *sinks)


def test_auto_never_takes_it() -> None:
    assert "flash" not in {choose("auto", device) for device in ("cuda", "cpu", "mps")}


def test_it_computes_once_values_and_gradients_are_those_of_the_reference(stand_in) -> None:
    mask = CASE.mask()
    inputs = CASE.inputs(mask)
    wanted = reference_attention(*inputs, mask, CASE.rule)
    assert (call() - wanted).abs().max() < 0.05


@pytest.mark.parametrize("wrong", ["value", "gradient", "sometimes"])
def test_a_device_whose_results_differ_is_refused(stand_in, wrong) -> None:
    num_calls = 0

    def attention(query, key, value, *others, backend):
        nonlocal num_calls
        num_calls += 1
        assert backend == "FLASH"
        out = flex_attention_tree(query, key, value, *others)
        if wrong == "value" or (wrong == "sometimes" and num_calls % 3 == 0):
            return out * 1.1
        return out / 2 + out.detach() / 2 if wrong == "gradient" else out

    stand_in.setattr(flash, "flex_attention_tree", attention)
    with pytest.raises(UnsupportedModelError, match="differs from the reference on this device: out"):
        call()


@pytest.mark.parametrize(
    ("case", "what"),
    [
        (Case(CASE.rule, CASE.shape, has_sinks=True), "attention sinks"),
        (Case(LayerRule(scaling=0.2, softcap=30.0), CASE.shape), r"a score cap \(30\)"),
    ],
)
def test_sinks_and_score_caps_are_refused(case, what) -> None:
    with pytest.raises(UnsupportedModelError, match=f"takes no {what}; use attention='flex'"):
        call(case)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="runs on CUDA, and the model is on cpu"):
        call()


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"torch": "2.13.0+cpu"}, [r"flash-attn-4 (needs 4.0.0b26)"]),
        ({"torch": "2.12.1", "flash-attn-4": "4.0.0b36"}, ["torch 2.12.1 (needs 2.13)"]),
        ({"torch": "2.13.0", "flash-attn-4": "4.0.0b25"}, ["flash-attn-4 4.0.0b25 (needs 4.0.0b26)"]),
        ({"torch": "2.14.0", "flash-attn-4": "4.0.0b26"}, []),
    ],
)
def test_versions_with_known_faults_are_refused(monkeypatch, installed, message) -> None:
    monkeypatch.setattr(flash, "installed_version", installed.get)
    assert flash.missing_packages() == message
