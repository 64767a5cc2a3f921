"""Settings of sharding and placement: what is honoured, what is refused, and what a checkpoint keeps of it."""

import json

import numpy as np
import pytest

from treewise.balance import CostModel
from treewise.errors import ConfigError
from treewise.forest import Forest
from treewise.trainer import TreeTrainingArguments, placement
from treewise.trainer.placement import Placing
from treewise.trainer.sharding import ShardSettings, shard_settings
from treewise.trajectory import Trajectory


@pytest.mark.parametrize(
    ("fsdp", "config", "expected"),
    [
        ("", None, None),
        (False, {"cpu_offload": True}, None),
        (True, None, ShardSettings()),
        ("full_shard auto_wrap offload", {"fsdp_version": 2}, ShardSettings(cpu_offload=True)),
        ("shard_grad_op", None, ShardSettings(reshard_after_forward=False)),
        (["full_shard"], {"fsdp_offload_params": "true"}, ShardSettings(cpu_offload=True)),
        (True, {"state_dict_type": "FULL_STATE_DICT"}, ShardSettings(whole_checkpoints=True)),
        (True, {"transformer_layer_cls_to_wrap": "Block"}, ShardSettings(layer_names=("Block",))),
        (True, {"reshard_after_forward": False}, ShardSettings(reshard_after_forward=False)),
    ],
)
def test_settings_of_transformers_are_understood(fsdp, config, expected):
    found = shard_settings(fsdp, config)
    assert found == expected
    if found is not None:
        assert shard_settings(True, found.as_config()) == found


@pytest.mark.parametrize(
    ("fsdp", "config", "message"),
    [
        ("hybrid_shard", None, "hybrid_shard is not supported"),
        (True, {"version": 1}, "only FSDP2"),
        (True, {"ofload_params": True}, "fsdp_config has ofload_params"),
        (True, {"activation_checkpointing": True}, "use the setting gradient_checkpointing"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(fsdp, config, message):
    with pytest.raises(ConfigError, match=message):
        shard_settings(fsdp, config)


def test_fsdp_in_any_form_is_taken_over(tmp_path, monkeypatch):
    common = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    (tmp_path / "fsdp.json").write_text(json.dumps({"state_dict_type": "FULL_STATE_DICT"}))
    by_flag = TreeTrainingArguments(fsdp="full_shard", fsdp_config=str(tmp_path / "fsdp.json"), **common)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    by_launcher = TreeTrainingArguments(**common)
    assert by_flag.shard_settings() == ShardSettings(whole_checkpoints=True)
    assert by_launcher.shard_settings() == ShardSettings(reshard_after_forward=False)
    assert not by_flag.fsdp
    again = TreeTrainingArguments(sharded=by_flag.sharded, shard_config=by_flag.shard_config, **common)
    assert again.shard_settings() == by_flag.shard_settings()


PRIOR = CostModel(1.0, 0.01, 100.0)


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return [Forest.from_trajectories([Trajectory(rng.integers(0, 9, 30)) for _ in range(3)]) for _ in range(4)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shares_of_all_ranks_are_every_trajectory_once(monkeypatch, batch, num_ranks):
    monkeypatch.setattr(placement.ranks, "count", lambda: num_ranks)
    lengths = []
    for rank in range(num_ranks):
        monkeypatch.setattr(placement.ranks, "own", lambda rank=rank: rank)
        (share,) = Placing(PRIOR, 64, "per_trajectory").shares(iter([batch]), 0, 1)
        lengths += [forest.num_trajectories for forest in share]
    assert sum(lengths) == 12


def test_prices_are_fitted_once_hold_after_the_next_step_and_are_kept(batch):
    placing = Placing(PRIOR, 64, "per_trajectory")
    for _ in range(4):
        with placing.measured([placing_plan(batch)]):
            pass
    placing.fit(5)
    assert placing.prices_at(5) == PRIOR  # the sixth step is placed already
    assert placing.prices_at(6) != PRIOR
    fitted = placing.facts()
    placing.fit(9)
    assert placing.facts() == fitted
    again = Placing(PRIOR, 64, "per_trajectory")
    again.restore(json.loads(json.dumps(fitted)))
    assert [again.prices_at(step) for step in (0, 6)] == [placing.prices_at(step) for step in (0, 6)]
    assert again.is_fitted


def placing_plan(batch):
    from treewise.planner import plan

    return plan(Forest.concatenate(batch), 64)
