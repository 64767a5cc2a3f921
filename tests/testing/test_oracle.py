"""The assertion passes on a correct tree, in every form of its arguments, and fails on a wrong one."""

import dataclasses

import pytest
import torch
from hypothesis import given

import treewise as tw
from treewise.engine import step
from treewise.errors import ConfigError, VerificationError
from treewise.planning.plans import Layout, lay_out
from treewise.testing import assert_equals_flat, tiny_model, trajectories

MODEL = tiny_model("gpt_neox", torch.float64)  # its norms are torch's, so float64 throughout
ITEMS = [tw.Trajectory([1, 2, 3, 4]), tw.Trajectory([1, 2, 3, 5, 6]), tw.Trajectory([7, 8])]


@given(items=trajectories(max_sequences=4))
def test_random_trees(items: list[tw.Trajectory]) -> None:
    assert_equals_flat(MODEL, items, tw.REINFORCE(), max_tokens=[None, 3], tolerance=1e-10)


def test_a_forest_and_a_function() -> None:
    report = assert_equals_flat(
        MODEL, tw.Forest.from_trajectories(ITEMS), lambda logprobs: torch.cat(logprobs).square().sum(), max_tokens=3
    )
    assert report.max_tokens == 3


def test_a_mask_that_shows_too_much_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(*args: object) -> Layout:
        layout = lay_out(*args)
        return dataclasses.replace(layout, hi=layout.hi * 0 + layout.num_tokens)

    monkeypatch.setattr(step, "lay_out", leaky)
    with pytest.raises((VerificationError, NotImplementedError)):
        assert_equals_flat(MODEL, ITEMS)


def test_no_budget_to_try() -> None:
    with pytest.raises(ConfigError, match="at least one budget"):
        assert_equals_flat(MODEL, ITEMS, max_tokens=[])
