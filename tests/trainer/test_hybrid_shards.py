"""Hybrid sharding (HSDP): two copies of a model, each sharded over two processes, train like one process."""

import os

import pytest
import torch

from tests.trainer.forked_ranks import free_port, join
from tests.trainer.helpers import in_child
from tests.trainer.ranks import outcome, train
from treewise.distributed.fsdp import ShardSettings, shard_settings
from treewise.errors import ConfigError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SETTINGS = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.5, "max_tokens": 14, "max_grad_norm": 0.1}
HYBRID = {"sharded": True, "shard_config": {"dp_replicate_size": 2}}
SAVED = {"save_strategy": "steps", "save_steps": 2}


def run(num_ranks, folder, **settings):
    """The outcome of a run of forked processes, on rank 0."""
    folder.mkdir(exist_ok=True)
    port = free_port()

    def work(rank):
        if num_ranks > 1:
            join(rank, port, num_ranks)
        found = outcome(train(folder / "run", **SETTINGS, per_device_train_batch_size=4 // num_ranks, **settings))
        if rank == 0:
            torch.save(found, folder / "outcome.pt")

    children = [in_child(lambda rank=rank: work(rank), 120) for rank in range(num_ranks)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * num_ranks
    return torch.load(folder / "outcome.pt", weights_only=True)


def assert_same(found, expected):
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name, value in expected["model"].items():
        assert torch.allclose(found["model"][name], value, rtol=0, atol=1e-6), name


@pytest.mark.exhaustive
def test_four_processes_in_two_copies_train_like_one_which_goes_on_from_their_checkpoint(tmp_path):
    expected = run(1, tmp_path / "one")
    hybrid = run(4, tmp_path / "four", **HYBRID, **SAVED, async_checkpoints=True)
    assert hybrid["kinds"] == ["DTensor"]
    assert_same(hybrid, expected)
    assert_same(run(1, tmp_path / "on", resume=str(tmp_path / "four" / "run" / "checkpoint-2")), expected)


def test_the_number_of_copies_is_read_and_written():
    settings = shard_settings(True, {"dp_replicate_size": 2})
    assert settings == ShardSettings(dp_replicate_size=2)
    assert shard_settings(True, settings.as_config()) == settings
    assert shard_settings("hybrid_shard", {"dp_replicate_size": 2}) == settings


@pytest.mark.parametrize(
    ("fsdp", "config", "message"),
    [
        ("hybrid_shard", {}, "give the number of copies"),
        (True, {"dp_replicate_size": 0}, "dp_replicate_size=0 must be a whole number"),
        (True, {"dp_replicate_size": "two"}, "dp_replicate_size='two' must be a whole number"),
    ],
)
def test_a_wrong_number_of_copies_is_an_error(fsdp, config, message):
    with pytest.raises(ConfigError, match=message):
        shard_settings(fsdp, config)
