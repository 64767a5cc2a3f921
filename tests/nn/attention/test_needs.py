"""What kernels of attention need: every fact that does not hold is one error by name, before anything is computed.

Cards and packages are stand-ins: no GPU is looked for.
"""

import json
from pathlib import Path

import pytest
import torch

from treewise import Forest, TreeEngine
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.attention import IMPLEMENTATIONS, choose, needs
from treewise.nn.attention.mask import LayerRule
from treewise.nn.attention.needs import CAPS, CHUNKS, SINKS, WINDOWS, Asked, asked_by
from treewise.nn.model import split_model
from treewise.testing import tiny_model

INSTALLED = {
    "torch": "2.14.1+cu130",
    "flash-attn-4": "4.0.0b36",
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cutlass-dsl": "4.8.1",
}
PLAIN = Asked(frozenset({(128, 128)}))


class Machine:
    """A GPU that is not there, and packages that are not installed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.capability, self.packages = (9, 0), dict(INSTALLED)
        self.rows: list[dict[str, object]] = []
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: self.capability)
        patch.setattr(needs, "installed_version", lambda name: self.packages.get(name))
        patch.setattr(needs, "measured", lambda: self.rows)
        patch.setattr(needs, "asked_by", lambda asked: asked)  # in place of a model, what it asks


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_a_kernel_is_taken_by_name_where_all_holds(machine, name):
    for dtype in (torch.bfloat16, torch.float16):
        assert choose(name, "cuda", dtype, PLAIN) == name
    machine.capability = (10, 0)
    assert choose(name, "cuda", torch.bfloat16, PLAIN) == name


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("flash", {"flash-attn-4": None}, r"'flash' needs flash-attn-4 4\.0\.0b26 or later, and it is not installed: "),
        ("flash", {"flash-attn-4": "4.0.0b25"}, r"b26 or later, and 4\.0\.0b25 is installed: pip install --pre"),
        ("flash", {"torch": "2.10.0"}, r"'flash' needs torch 2\.11 or later, and 2\.10\.0 is installed"),
        ("cudnn", {"nvidia-cudnn-frontend": "1.31.0"}, r"needs nvidia-cudnn-frontend 1\.32 or later, and 1\.31\.0 is"),
        ("cudnn", {"nvidia-cutlass-dsl": "4.7.2"}, r"needs nvidia-cutlass-dsl 4\.8 or later, and 4\.7\.2 is installed"),
    ],
)
def test_releases_are_gated(machine, name, change, says):
    machine.packages |= change
    with pytest.raises(ConfigError, match=says + r".*use attention='flex'"):
        choose(name, "cuda", torch.bfloat16, PLAIN)


def test_cards_dtypes_and_repeatable_backwards_are_gated(machine):
    def refused(name: str, says: str, dtype: torch.dtype = torch.bfloat16) -> None:
        with pytest.raises(ConfigError, match=says):
            choose(name, "cuda", dtype, PLAIN)

    refused("flash", r"computes in bfloat16 and float16, not in float32; use attention='flex'", torch.float32)
    refused("cudnn", r"not in float64; use attention='reference'", torch.float64)
    for capability, number in (((8, 0), "8.0"), ((12, 0), "12.0")):
        machine.capability = capability
        refused(
            "flash", rf"'flash' has kernels for GPUs of compute capability 9\.0, 10\.0, .*, and this one has {number}"
        )
        refused("cudnn", rf"'cudnn' has kernels .* this one has {number}; use attention='flex'")
    machine.capability = (9, 0)
    torch.use_deterministic_algorithms(True)
    try:
        refused("flash", "no backward that gives the same bits each time, which torch.use_deterministic_algorithms")
        assert choose("cudnn", "cuda", torch.bfloat16, PLAIN) == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("flash", (256, 256), r"takes heads of 8 to 128 in steps of 8 on .* 9\.0, and the model has some of 256;"),
        ("flash", (192, 128), r"and the model has some of 192 and values of 128; use attention='flex'"),
        ("cudnn", (192, 192), r"or 192 with values of 128, or 256 with values of 256 .* some of 192;"),
        ("cudnn", (20, 20), r"the model has some of 20;"),
    ],
)
def test_sizes_of_heads_are_gated(machine, name, sizes, says):
    with pytest.raises(UnsupportedModelError, match=says):
        choose(name, "cuda", torch.bfloat16, Asked(frozenset({sizes})))
    assert choose("cudnn", "cuda", torch.bfloat16, Asked(frozenset({(256, 256), (192, 128)}))) == "cudnn"


def test_sinks_and_score_caps_are_gated(machine):
    for feature in (WINDOWS, CHUNKS, SINKS):
        asked = PLAIN.__class__(PLAIN.sizes, frozenset({feature}))
        assert [choose(name, "cuda", torch.bfloat16, asked) for name in ("flash", "cudnn")] == ["flash", "cudnn"]
    caps, sinks = (Asked(PLAIN.sizes, frozenset({each})) for each in (CAPS, SINKS))
    assert choose("flash", "cuda", torch.bfloat16, caps) == "flash"
    with pytest.raises(UnsupportedModelError, match="'cudnn' has no score caps, which the model has; use"):
        choose("cudnn", "cuda", torch.bfloat16, caps)
    machine.packages["torch"] = "2.13.0"
    with pytest.raises(
        UnsupportedModelError, match=r"'flash' has attention sinks, .*, from torch 2\.14 on, and 2\.13\.0"
    ):
        choose("flash", "cuda", torch.bfloat16, sinks)


def test_auto_takes_another_kernel_only_where_a_result_says_that_it_is_faster(machine):
    def auto(asked: Asked = PLAIN, dtype: torch.dtype = torch.bfloat16) -> str:
        return choose("auto", "cuda", dtype, asked)

    def row(kernel: str, speed: float, *packages: str, features: tuple[str, ...] = ()) -> dict[str, object]:
        versions = {each: INSTALLED[each].partition("+")[0] for each in packages}
        facts = {"capability": [9, 0], "dtype": "bfloat16", "head_sizes": [128, 128], "features": list(features)}
        return {"kernel": kernel, "packages": versions, "speed": speed, "result": "", **facts}

    of_flash, of_cudnn = ("torch", "flash-attn-4"), ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl")
    assert auto() == "flex"
    machine.rows = [row("flash", 1.5, *of_flash)]
    assert auto() == "flash"
    assert auto(dtype=torch.float16) == auto(Asked(frozenset({(128, 128), (64, 64)}))) == "flex"
    assert auto(Asked(PLAIN.sizes, frozenset({WINDOWS}))) == "flex"  # was not tried
    machine.rows.append(row("cudnn", 1.7, *of_cudnn, features=(WINDOWS,)))
    assert auto() == auto(Asked(PLAIN.sizes, frozenset({WINDOWS}))) == "cudnn"
    machine.rows.append(row("cudnn", 1.01, *of_cudnn))  # the last counts
    assert auto() == "flash"
    machine.packages["flash-attn-4"] = "4.0.0b37"  # nobody ran it
    assert auto() == "flex"
    machine.packages["flash-attn-4"], machine.capability = "4.0.0b36", (10, 0)
    assert auto() == "flex"


def test_no_kernel_is_adopted_that_no_committed_result_holds():
    """Each row of the table is one of a file of benchmarks/results; today there are none."""
    root = Path(__file__).parents[3]
    rows = json.loads((root / "src/treewise/nn/attention/measured.json").read_text())["rows"]
    for row in rows:
        found = json.loads((root / "benchmarks" / "results" / row["result"]).read_text())
        assert row["kernel"] in found["kernels"], row
    assert rows == needs.measured.__wrapped__()


# -- what models ask --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "sizes", "features"),
    [
        ("qwen3", {(16, 16)}, set()),
        ("gemma2", {(16, 16)}, {CAPS, WINDOWS}),
        ("gpt_oss", {(16, 16)}, {SINKS, WINDOWS}),
    ],
)
def test_models_say_what_their_layers_ask(family, sizes, features):
    model = tiny_model(family, head_dim=16)
    assert asked_by(split_model(model).decoder) == Asked(frozenset(sizes), frozenset(features))


def test_a_call_says_what_its_layer_asks():
    rule = LayerRule(0.1, window=3, softcap=2.0)
    assert Asked.by_call((16, 8), rule, has_sinks=True) == Asked(
        frozenset({(16, 8)}), frozenset({WINDOWS, CAPS, SINKS})
    )
    assert Asked.by_call((16, 16), LayerRule(0.1, chunk=4), has_sinks=False).features == {CHUNKS}


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_on_a_cpu_they_are_refused_by_name_before_the_first_forward(name):
    model = tiny_model(num_hidden_layers=1)
    with pytest.raises(
        ConfigError, match=f"attention='{name}' runs on CUDA, and the model is on cpu; use attention='auto'"
    ):
        TreeEngine(model, attention=name).step(Forest.from_nodes([-1, 0, 0], [[5, 6], [7], [8, 9]]))
    assert IMPLEMENTATIONS[name].num_key_rows  # counted without a GPU, too
