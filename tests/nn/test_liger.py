"""What of liger-kernel is taken, what is refused, and gradients through its kernels, which Triton interprets here."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.needs import packages
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn import liger
from treewise.testing import tiny_model

GPU = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """How a stand-in for the package, with functions of its signature, was called."""
    found: list[dict] = []

    def of_qwen3(
        rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None
    ):
        found.append(dict(locals()))

    package, above = ModuleType("monkey_patch"), ModuleType("liger_kernel.transformers")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": of_qwen3}
    above.monkey_patch = package
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel.transformers", above)
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setattr(liger, "installed_version", lambda _: "0.8.5")
    return found


def test_norms_rotary_and_mlps_are_taken_and_no_loss(calls):
    model = tiny_model("qwen3", num_hidden_layers=1)
    assert liger.use_liger(model, GPU) == ["rope", "rms_norm", "swiglu"]
    (call,) = calls
    assert call["model"] is model
    assert not call["fused_linear_cross_entropy"]
    assert not call["cross_entropy"]


def test_adapters_are_seen_through(calls):
    import peft

    plain = tiny_model("qwen3", num_hidden_layers=1)
    settings = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    liger.use_liger(peft.get_peft_model(plain, settings), GPU)
    assert calls[0]["model"] is plain


def test_what_it_cannot_do_is_refused_by_name(calls, monkeypatch):
    with pytest.raises(UnsupportedModelError, match=r"liger-kernel 0\.8\.5 has nothing for gpt_neox; leave it out"):
        liger.use_liger(tiny_model("gpt_neox"), GPU)
    with pytest.raises(ConfigError, match="its kernels run on a GPU, and the model is on cpu"):
        liger.use_liger(tiny_model("qwen3"), torch.device("cpu"))
    monkeypatch.setattr(liger, "installed_version", lambda _: "0.5.2")
    with pytest.raises(ConfigError, match=r"needs liger-kernel 0\.8 or later, and 0\.5\.2 is installed: pip install"):
        liger.require_liger()
    assert not calls


@packages("triton", "liger_kernel")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("qwen3", {"rope", "rms_norm", "swiglu"}),
        ("llama", {"rope", "rms_norm", "swiglu"}),
        ("gemma2", {"rope", "rms_norm", "geglu"}),
    ],
)
def test_gradients_through_its_kernels_are_those_of_flat_training(family, parts):
    """In a process of its own, since Triton reads at its import whether it interprets."""
    command = [sys.executable, "-m", "tests.nn.interpreted_liger", family]
    found = json.loads(subprocess.run(command, cwd=Path(__file__).parents[2], stdout=-1, check=True).stdout)[family]
    assert set(found["parts"]) == parts
    for error, tolerance in found["errors"]:
        assert 0 < error < tolerance
