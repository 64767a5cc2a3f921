"""Online runs of mixtures record the experts of every token and train through them."""

import json

import pytest
import torch

from tests.rl.online.helpers import new_trainer, tiny_policy
from treewise.data import load_trees
from treewise.nn.model import split_model
from treewise.nn.routing import routers_of
from treewise.rl.online.records import rollouts_file


def mixture(**changes):
    model = tiny_policy(family="qwen3_moe", num_local_experts=4, moe_intermediate_size=16, **changes)
    for router in routers_of(split_model(model).decoder):
        torch.nn.init.normal_(router.module.weight, std=0.5)
    return model


@pytest.mark.parametrize("replay", ["exact", "by_tokens", "off"])
def test_rollouts_hold_the_experts_that_they_were_sampled_with_and_train_through_them(tmp_path, replay):
    trainer = new_trainer(tmp_path, model=mixture(), routing_replay=replay, eval_every=0)
    trainer.train()
    path = rollouts_file(tmp_path, 2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(("routed_experts" in each) == (replay != "off") for each in records)
    logs = [each for each in trainer.state.log_history if "iteration" in each]
    assert all(("routed_otherwise" in each) == (replay != "off") for each in logs)
    if replay == "off":
        return
    # One process, one precision: the experts are those that training takes by itself, so all that is shared stays so.
    assert logs[0]["routed_otherwise"] == 0
    assert logs[0]["replayed_gap"] == pytest.approx(logs[0]["live_gap"], abs=1e-5)
    assert logs[0]["logprob_gap"] == pytest.approx(1, abs=1e-4)
    for tree in load_trees(path):
        assert all((item.routed_experts[:-1] >= 0).all() for item in tree.trajectories)
        plain = load_trees(path, options={"routing_replay": "off"})
        assert {each.name: each.forest().num_tokens for each in plain}[tree.name] == tree.forest().num_tokens
