"""What differs between releases of transformers, on the installed one under the number of another.

That earlier releases are as these functions say is held by `make versions`, whose sets have them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import nn
from transformers import LlamaConfig, TrainingArguments

from tests.needs import RECURRENT
from treewise import TreeEngine
from treewise.errors import UnsupportedModelError
from treewise.nn.platform import releases
from treewise.nn.recurrent import kinds_of
from treewise.nn.support_table import later_release, own_table
from treewise.testing import tiny_model


def under(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers says that it is another release."""
    monkeypatch.setattr(releases, "installed", lambda: Version(release))


@pytest.mark.parametrize(("installed", "expected"), [("5.3.0", True), ("5.4.0.dev0", True), ("5.4.0", False)])
def test_a_release_before_another(installed: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    under(installed, monkeypatch)
    assert releases.is_before("5.4") == expected


def test_settings_of_configurations_that_are_plain_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        def __init__(self, vocab_size: int = 3, layers: int = 2, **kwargs: object) -> None: ...

    assert {"hidden_size", "vocab_size"} <= set(releases.configuration_fields(LlamaConfig))
    under("5.2.0", monkeypatch)
    assert releases.configuration_fields(Plain) == ("vocab_size", "layers")
    under("5.4.0", monkeypatch)
    assert releases.configuration_fields(Plain) == ()


def test_names_are_those_of_the_installed_release() -> None:
    assert f"{releases.recomputation_name()}_checkpointing" in TrainingArguments.__dataclass_fields__
    assert hasattr(tiny_model(), f"{releases.recomputation_name()}_checkpointing_enable")
    assert releases.hub_api().library_name == "transformers"
    assert releases.cache_name(["input_ids", "past_key_values", "cache"]) == "cache"
    assert releases.cache_name(["input_ids", "past_key_values"]) == "past_key_values"
    assert releases.cache_name(["input_ids"]) is None


def test_weights_of_gguf_are_unpacked_where_they_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    if Version(transformers.__version__) >= Version("5.17"):
        assert releases.unpacking_gguf()["quantization_config"].dequantize
    under("5.16.1", monkeypatch)
    assert releases.unpacking_gguf() == {}


def test_the_forward_below_a_decorator_that_does_not_say_what_it_wraps() -> None:
    def forward(self: object) -> int:
        return 3

    def decorated(forward_func: Any) -> Any:
        return lambda self: forward_func(self)

    assert releases.own_forward(type("Layer", (), {"forward": decorated(forward)})) is forward
    assert releases.own_forward(type("Layer", (), {"forward": forward})) is forward


@pytest.mark.parametrize("has_kernel", [False, True])
def test_functions_that_a_delta_net_holds_are_called_as_those_by_name(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    under("5.14.1", monkeypatch)
    conv = nn.Conv1d(6, 6, 4, padding=3, groups=6, bias=False)
    x = torch.randn(1, 6, 9)
    expected = F.silu(conv(x)[..., :9])  # what such a layer computes where no kernel is installed

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: object, activation: str, seq_idx: object) -> torch.Tensor:
        return 2 * F.silu(F.conv1d(x, weight[:, None], padding=3, groups=6)[..., :9])

    mixer = SimpleNamespace(causal_conv1d_fn=kernel if has_kernel else None, chunk_gated_delta_rule=sum)
    seen = []

    def stand_in(name: str, original: Any) -> Any:
        def called(hidden_states: Any, *args: object, **options: Any) -> Any:
            seen.append(name)
            return original(hidden_states, *args, **options)

        return called

    replaced = releases.replaced_functions(mixer, stand_in)
    options = {"weight": conv.weight.squeeze(1), "bias": None, "activation": "silu", "seq_idx": None}
    torch.testing.assert_close(replaced["causal_conv1d_fn"](x=x, **options), expected * (2 if has_kernel else 1))
    assert replaced["chunk_gated_delta_rule"]([1, 2]) == 3
    assert seen == ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"]
    assert set(seen) == releases.held_functions(mixer)
    assert releases.held_functions(SimpleNamespace(causal_conv1d_fn=None)) == set()
    under("5.15.0", monkeypatch)
    assert releases.held_functions(mixer) == set()


@RECURRENT
def test_recurrent_layers_of_a_release_before_theirs_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("jamba")
    assert kinds_of(model)
    under("5.14.1", monkeypatch)
    assert not kinds_of(model)
    with pytest.raises(UnsupportedModelError, match=r"jamba follows a tree with transformers 5\.15: pip install "):
        TreeEngine(model)


def test_families_that_follow_a_tree_later(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = ".".join(own_table().transformers.split(".")[:2])
    under("5.15.0", monkeypatch)
    words = f" nemotron follows a tree with transformers {newest}: pip install 'transformers>={newest}'."
    assert later_release("nemotron", is_recurrent=False) == words
    assert later_release("jamba", is_recurrent=True).startswith(f" jamba follows a tree with transformers {newest}:")
    assert later_release("bloom", is_recurrent=False) == later_release("unknown", is_recurrent=False) == ""
    under(own_table().transformers, monkeypatch)
    assert later_release("nemotron", is_recurrent=False) == ""
