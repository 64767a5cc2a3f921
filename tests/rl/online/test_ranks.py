"""Two processes are one (of shards: test_meshes): same rollouts, same weights to rounding, also after a resumption."""

import subprocess
import sys

import pytest
import torch

from tests.rl.online.helpers import assert_same_rollouts
from tests.rl.online.ranks import CASES, trainer_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("rl/online/test_ranks")]

COUNTED = (
    "reward",
    "num_rollouts",
    "failed_rollouts",
    "sampled_tokens",
    "trained_tokens",
    "eval_reward",
    "eval_length",
)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    done = subprocess.run([sys.executable, "-m", "tests.rl.online.ranks", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(case, of_two, tmp_path):
    trainer = trainer_of(case, tmp_path / "run")
    logs = trainer.train()
    assert_same_rollouts(tmp_path / "run", of_two / case)
    for rank in (0, 1):
        found = torch.load(of_two / f"{case}-{rank}.pt", weights_only=True)
        for name, value in trainer.model.state_dict().items():
            assert torch.allclose(found["weights"][name], value, rtol=0, atol=1e-6), name
        assert {name: found["logs"][name] for name in COUNTED} == pytest.approx({name: logs[name] for name in COUNTED})
    assert not list((of_two / case / "journal").iterdir())
