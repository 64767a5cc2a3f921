"""Models after `shard`: what they compute besides hidden rows, on one process."""

import os

import torch

from tests.trainer.forked_ranks import free_port
from tests.trainer.helpers import in_child
from treewise import Forest, Trajectory
from treewise.distributed.fsdp import ShardSettings, shard
from treewise.engine.walk import Walk
from treewise.nn.model import split_model
from treewise.planning.planner import plan
from treewise.testing.families import tiny_model


def test_a_sharded_mixture_of_experts_returns_its_router_logits():
    def work():
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.distributed.init_process_group("gloo")
        model = tiny_model("mixtral")
        lm = split_model(model)
        chain = plan(Forest.from_trajectories([Trajectory(range(1, 9))]))

        def router_logits():
            return Walk(lm, chain, "reference", with_router_logits=True).whole_output().router_logits

        expected = router_logits()
        ends = shard(model, lm, torch.device("cpu"), ShardSettings(), None)
        with ends.whole(trains=False):
            found = router_logits()
        assert len(expected) == len(found) > 0
        for left, right in zip(expected, found, strict=True):
            torch.testing.assert_close(left, right)

    assert os.waitstatus_to_exitcode(os.waitpid(in_child(work, 120), 0)[1]) == 0
