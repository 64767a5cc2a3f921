"""Runs of two processes that are killed, stopped or fail: nothing published is lost, and nobody waits for the dead."""

import json
import os
import subprocess
import sys

import pytest

from tests.trainer import forked_ranks
from tests.trainer.forked_ranks import FAULT_STEP, NUM_KILLS

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("trainer/test_ranks_that_end"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

COMMON = {
    "max_steps": 8,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    "max_tokens": 14,  # trunks that are computed twice, trunks that are held, and pieces
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}
SHARDED = {**COMMON, "sharded": True}
KILLS = {"ddp": COMMON, "sharded": SHARDED}
FAULTS = {
    "killed": ("kill", COMMON),
    "killed with shards": ("kill", SHARDED),
    "raising": ("raise", SHARDED),
    "out of memory": ("memory", SHARDED),
    "stopped": ("stop", {**SHARDED, "ddp_timeout": 3}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forked")
    (folder / "kills.json").write_text(json.dumps(KILLS))
    (folder / "faults.json").write_text(json.dumps(FAULTS))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", forked_ranks.__file__, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", KILLS)
def test_two_processes_killed_again_and_again_end_like_undisturbed_ones(found, name):
    history = found[name]["history"]
    assert len(history) == NUM_KILLS
    for codes, _ in history:
        assert -9 in codes
        assert 0 not in codes  # the others ended, too
    steps = [step for _, step in history]
    assert steps == sorted(steps)  # nothing published was lost
    assert 0 < steps[-1] < COMMON["max_steps"]
    assert len(set(found[name]["digests"])) == 1  # of both processes of both runs, bit for bit


REASONS = {
    "killed": "rank 1 failed: its process was gone",
    "killed with shards": "rank 1 failed: its process was gone",
    "raising": "rank 1 failed: RuntimeError: the moon is full",
    "out of memory": f"OutOfMemoryError: rank 1 ran out of memory in step {FAULT_STEP} with max_tokens=14",
}


@pytest.mark.parametrize("name", REASONS)
def test_one_dead_process_ends_the_others_with_its_reason(found, name):
    assert found[name]["codes"][0] == 3  # within the alarm of the test, long before the timeout of collectives
    assert REASONS[name] in found[name]["said"][0]
    assert found[name]["step"] == FAULT_STEP - 1


def test_a_stopped_process_is_named_when_the_timeout_ends_the_others(found):
    assert found["stopped"]["codes"][0] == 3
    (line,) = [line for line in found["stopped"]["said"][0].splitlines() if line.startswith("error: ")]
    assert "waited 3 s (ddp_timeout) for another process. Rank 1 does not answer: it is stopped" in line
    assert "go on with --resume" in line
    assert found["stopped"]["step"] == FAULT_STEP - 1
