"""Tokens below which a micro-batch waits for the host, from the table of cards."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from treewise.bench.workloads import SHAPES, make
from treewise.nn import launching
from treewise.nn.model_flops import flop_model_of_config
from treewise.tree.forest import Forest

FOREST = Forest.from_trajectories(list(make("ratio-6.5", "full", 151_936).trajectories))


def least(
    monkeypatch: pytest.MonkeyPatch,
    card: str = "NVIDIA H100 80GB HBM3",
    kind: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    shape: str = "qwen3-1.7b",
    *,
    compiled: bool = False,
) -> int:
    family, sizes = SHAPES[shape]
    config = AutoConfig.for_model(family, **sizes)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card)
    monkeypatch.setattr(launching, "flop_model", lambda _: flop_model_of_config(config))
    monkeypatch.setattr(launching, "is_compiled", lambda _: compiled)
    decoder = SimpleNamespace(dtype=dtype, config=config)
    return launching.least_tokens(SimpleNamespace(device=torch.device(kind), decoder=decoder, model=None), FOREST)


def test_the_steps_that_an_h100_measured(monkeypatch: pytest.MonkeyPatch):
    """1.42 s of five passes and a forward, which waited for the host, where 16,920 tokens took 0.82 s."""
    found = least(monkeypatch)
    seconds = (5 + 1 / 3) * found * 0.82 / FOREST.num_tokens
    assert 0.85 * 1.42 < seconds < 1.1 * 1.42


def test_larger_models_and_compiled_layers_wait_less(monkeypatch: pytest.MonkeyPatch):
    small, large = least(monkeypatch), least(monkeypatch, shape="qwen3-8b")
    assert 0.2 * small < large < 0.4 * small
    assert least(monkeypatch, compiled=True) == pytest.approx(0.4 * small, abs=1)


def test_nothing_where_no_card_was_measured(monkeypatch: pytest.MonkeyPatch):
    assert least(monkeypatch, kind="cpu") == 0
    assert least(monkeypatch, dtype=torch.float32) == 0
    assert least(monkeypatch, card="NVIDIA L4") == 0
