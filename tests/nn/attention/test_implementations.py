"""The table of implementations: unknown names are errors everywhere, and a new one is one entry."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from treewise import Forest, TreeEngine
from treewise.errors import ConfigError
from treewise.nn.attention import IMPLEMENTATIONS, TreeContext, TreeMask, cascade, choose, implementations, reference
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing import tiny_model
from treewise.trainer.arguments import TreeTrainingArguments

UNKNOWN = r"attention='cascad' is unknown; choose 'auto' or one of flex, flash, cudnn, cascade, reference\."
MASK = TreeMask.from_layout(lay_out(plan(Forest.from_nodes([-1, 0, 0], [[1, 2], [3], [4, 5]])), 0))


def test_an_unknown_name_is_an_error_everywhere(tmp_path) -> None:
    """A context with an unknown name once computed with the reference, silently."""
    for make in (
        lambda: choose("cascad", "cpu"),
        lambda: TreeContext(MASK, "cascad"),
        lambda: TreeContext(MASK, "auto"),
        lambda: TreeEngine(tiny_model(num_hidden_layers=1), attention="cascad"),
        lambda: TreeTrainingArguments(output_dir=str(tmp_path), attention="cascad"),
    ):
        with pytest.raises(
            ConfigError, match="is unknown; choose 'auto' or one of flex, flash, cudnn, cascade, reference"
        ):
            make()
    with pytest.raises(ConfigError, match=UNKNOWN):
        choose("cascad", "cpu")


def test_auto_takes_the_first_that_suits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [choose("auto", device) for device in ("cuda", "cpu", "mps")] == ["flex", "cascade", "reference"]
    monkeypatch.setattr(cascade, "kernel_takes_groups", lambda: False)
    assert choose("auto", "cpu") == "reference"
    assert choose("cascade", "cpu") == "cascade"  # explicit requests are never replaced


def test_float64_on_a_gpu_takes_the_reference_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Triton multiplies no float64."""
    implementations._warn_of_other.cache_clear()
    for _ in range(2):
        assert choose("auto", "cuda", torch.float64) == "reference"
    assert (
        caplog.text.count("the model is in float64, for which flex has no kernels on cuda: attention is reference") == 1
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16, None):
        assert choose("auto", "cuda", dtype) == choose("flex", "cuda", dtype) == "flex"
    assert choose("auto", "cpu", torch.float64) == "cascade"
    assert choose("flex", "cpu", torch.float64) == "flex"  # the operator itself, which computes it
    with pytest.raises(ConfigError, match="attention='flex' has no kernels for float64 on cuda; use 'reference'"):
        choose("flex", "cuda", torch.float64)


def test_cascade_on_another_device_names_the_way_out() -> None:
    class OnGPU(torch.Tensor):
        device = torch.device("cuda")

    query = torch.empty(1, 2, 5, 8).as_subclass(OnGPU)
    with pytest.raises(ConfigError, match="attention='cascade' runs on the CPU, and the model is on cuda"):
        cascade.attend(query, query, query, MASK, None)


def test_a_new_implementation_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(query, key, *others):
        calls.append(query.shape)
        return reference.attend(query, key, *others)

    monkeypatch.setitem(IMPLEMENTATIONS, "mine", replace(IMPLEMENTATIONS["reference"], run=run))
    model, forest = tiny_model(num_hidden_layers=1), Forest.from_nodes([-1, 0, 0], [[5, 6], [7], [8, 9]])
    losses = [TreeEngine(model, 3, attention=name, check=False).step(forest).loss for name in ("mine", "reference")]
    assert calls
    assert losses[0] == losses[1]


def test_key_rows_are_counted_by_the_blocks_that_are_read() -> None:
    device = torch.device("cpu")
    counts = {name: each.num_key_rows(MASK, device) for name, each in IMPLEMENTATIONS.items()}
    assert counts["reference"] == MASK.num_keys * MASK.num_queries
    assert 0 < counts["cascade"] <= counts["reference"]
    assert counts["flex"] % 128 == 0


def test_what_layers_derive_from_a_mask_is_computed_once() -> None:
    calls = []

    def make(mask: TreeMask, step: int) -> np.ndarray:
        calls.append(step)
        return mask.lo + step

    assert MASK.derived(make, 1) is MASK.derived(make, 1)
    assert MASK.derived(make, 2) is not MASK.derived(make, 1)
    assert calls == [1, 2]
