"""The examples of one file per objective run as they stand, and learn."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "objectives"
# What must be reached after a few steps: a mean reward, which starts near 0.46, or a loss.
REWARDED = {"reinforce": 6, "grpo": 4, "dr_grpo": 6, "dapo": 4, "gspo": 4, "cispo": 4, "ppo_critic": 8}
LOSSES = {"sft": (3, 3.46), "reward_model": (10, 0.65), "distillation": (3, 1.49)}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_every_file_is_run_below() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*REWARDED, *LOSSES, "tree_advantages", "toy"}
    assert all(len(path.read_text().splitlines()) <= 120 for path in FOLDER.glob("*.py"))


@pytest.mark.representatives("grpo-4")
@pytest.mark.parametrize(("name", "num_steps"), REWARDED.items())
def test_rewards_rise(example, name: str, num_steps: int) -> None:
    assert example(name).main(num_steps) > 0.5


@pytest.mark.representatives("sft-3-3.46")
@pytest.mark.parametrize(("name", "num_steps", "limit"), [(name, *values) for name, values in LOSSES.items()])
def test_losses_fall(example, name: str, num_steps: int, limit: float) -> None:
    assert example(name).main(num_steps) < limit


def test_tree_advantages(example) -> None:
    assert example("tree_advantages").main(6) > 0.5
