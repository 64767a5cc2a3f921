"""Settings of sharding and placement: what is honoured, what is refused, and what a checkpoint keeps of it."""

import json
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from treewise.distributed import online_placement
from treewise.distributed.fsdp import ShardSettings, shard_settings
from treewise.distributed.online_placement import (
    FIT_STEPS,
    NO_WORK,
    OnlinePlacer,
    fit_in_lockstep,
    fit_independent,
    measures_costs,
)
from treewise.distributed.placement import CostFit, CostModel, Work, work_of
from treewise.errors import ConfigError
from treewise.planning.planner import plan
from treewise.testing import families
from treewise.trainer import TreeTrainingArguments
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


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


def test_a_launcher_that_starts_one_process_of_several_is_refused(tmp_path, monkeypatch):
    common = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    for name in ("ACCELERATE_USE_CPU", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    TreeTrainingArguments(**common)  # asked for one
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="asked for several processes and started one"):
        TreeTrainingArguments(**common)


PRIOR = CostModel(1.0, 0.01, 100.0)
CPU = torch.device("cpu")


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return [Forest.from_trajectories([Trajectory(rng.integers(0, 9, 30)) for _ in range(3)]) for _ in range(4)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_all_ranks_are_every_trajectory_once(monkeypatch, batch, num_ranks):
    monkeypatch.setattr(online_placement.ranks, "count", lambda: num_ranks)
    lengths = []
    for rank in range(num_ranks):
        monkeypatch.setattr(online_placement.ranks, "own", lambda rank=rank: rank)
        (part,) = OnlinePlacer(PRIOR, 64, "per_trajectory").rank_parts(iter([batch]), 0, 1)
        lengths += [forest.num_trajectories for forest in part]
    assert sum(lengths) == 12


def measure(placer, batch, num_steps, first=1):
    """Steps `first` to `num_steps`, of one batch each."""
    for step in range(first, num_steps + 1):
        with placer.measure(plan(Forest.concatenate(batch), 64), CPU):
            pass
        placer.on_step_end(step)


@pytest.mark.parametrize("saved_at", [None, 2, 5])
def test_costs_are_fitted_once_hold_after_the_next_step_and_are_kept(batch, saved_at):
    placer = OnlinePlacer(PRIOR, 64, "per_trajectory")
    fitted_at = 5 if saved_at == 5 else FIT_STEPS  # a save after two steps has nothing to fit to
    measure(placer, batch, saved_at or 1)
    if saved_at:
        placer.before_save(saved_at)
    assert placer.is_fitted == (saved_at == 5)
    measure(placer, batch, FIT_STEPS, first=(saved_at or 1) + 1)
    assert placer.costs_at(fitted_at) == PRIOR  # the next step is placed already
    assert placer.costs_at(fitted_at + 1) != PRIOR
    fitted = placer.state()
    measure(placer, batch, FIT_STEPS)
    placer.before_save(40)
    assert placer.state() == fitted
    again = OnlinePlacer(PRIOR, 64, "per_trajectory")
    again.restore(json.loads(json.dumps(fitted)))
    assert [again.costs_at(step) for step in (0, fitted_at + 1)] == [PRIOR, placer.costs_at(fitted_at + 1)]
    assert not again.is_measuring


def test_costs_that_are_not_measured_stay_those_of_flops(batch):
    placer = OnlinePlacer(PRIOR, 64, "per_trajectory", fits=False)
    measure(placer, batch, 2 * FIT_STEPS)
    placer.before_save(40)
    assert placer.state() == [[0, 1.0, 0.01, 100.0]]


@pytest.mark.parametrize(
    ("source", "device", "is_deterministic", "expected"),
    [
        ("auto", "cpu", False, False),
        ("auto", "cuda", False, True),
        ("auto", "cuda", True, False),
        ("measured", "cpu", True, True),
        ("flops", "cuda", False, False),
    ],
)
def test_costs_are_measured_where_runs_do_not_repeat_anyway(source, device, is_deterministic, expected):
    assert measures_costs(source, torch.device(device), is_deterministic) == expected


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_all_take_the_time_of_the_slowest_are_fitted_as_if_it_were_known(seed):
    rng = np.random.default_rng(seed)
    true, prior = CostModel(2e-6, 4e-9, 3e-3), CostModel(1e-6, 0.5e-9, 1.5e-3)
    everything, known = [[], []], CostFit(prior)
    for _ in range(FIT_STEPS - 1):
        works = [Work(*(rng.integers(1, 9, 3) * (1000.0, 400_000.0, 1.0))) for _ in everything]
        passes = max(each.micro_batches for each in works)
        slowest = max((replace(each, micro_batches=passes) for each in works), key=true.seconds)
        seconds = true.seconds(slowest) * rng.uniform(0.97, 1.03)
        known.add(slowest, seconds)
        for rank, work in enumerate(works):
            everything[rank].append((work, seconds * (1 + 0.2 * rank)))  # the second rank waited for the batch to begin
    assert fit_in_lockstep(prior, everything) == known.model()
    assert astuple(known.model()) == pytest.approx(astuple(true), rel=0.15)
    assert astuple(fit_independent(prior, everything)) != pytest.approx(astuple(true), rel=0.15)


def test_a_batch_of_no_trees_is_no_measurement(batch):
    work = work_of(plan(Forest.concatenate(batch), 64))
    assert fit_independent(PRIOR, [[(work, 2.0)], [(NO_WORK, 0.1)]]) == fit_independent(PRIOR, [[(work, 2.0)]])


def test_settings_of_the_engine_reach_it(make_trainer, trees):
    model = families.tiny_model("mixtral")
    trainer = make_trainer(trees, model=model, offload=True, router_z_coefficient=0.1)
    assert trainer.engine.offload
    assert trainer.engine.router_loss_rule.z_coefficient == 0.1


def test_a_z_loss_below_zero_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"router_z_coefficient=-0\.1 must be 0 or positive"):
        TreeTrainingArguments(output_dir=str(tmp_path), router_z_coefficient=-0.1, report_to="none")
