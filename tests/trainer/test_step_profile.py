"""`profile: true`: files of the run's folder."""

import json

import numpy as np
import pytest

import treewise as tw
from treewise.engine import profiling
from treewise.testing import tiny_model
from treewise.trainer.run_context import FILE, TRACE


def run(tmp_path, num_steps: int) -> None:
    rng = np.random.default_rng(0)
    trees = [tw.Forest.from_trajectories([tw.Trajectory(rng.integers(0, 60, 12))]) for _ in range(num_steps)]
    args = tw.TreeTrainingArguments(
        str(tmp_path),
        profile=True,
        per_device_train_batch_size=1,
        num_train_epochs=1,
        max_tokens=None,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    tw.TreeTrainer(tiny_model(num_hidden_layers=1), args, train_dataset=trees).train()


def test_steps_three_to_five_are_profiled(tmp_path) -> None:
    run(tmp_path, 6)
    parts = json.loads((tmp_path / FILE).read_text())["parts"]
    assert parts[profiling.PROJECTIONS]["flops"] > 0
    assert json.loads((tmp_path / TRACE).read_text())["traceEvents"]


def test_a_shorter_run_warns(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 2)
    assert not (tmp_path / FILE).exists()
    assert "the run ended before step 3; nothing was profiled" in caplog.text
