"""Settings of sharding and of the engine: accepted, rejected, and passed on."""

import json

import pytest

from treewise.distributed.fsdp import ShardSettings, shard_settings
from treewise.errors import ConfigError
from treewise.testing import families
from treewise.trainer import TreeTrainingArguments


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


def test_settings_of_the_engine_reach_it(make_trainer, trees):
    model = families.tiny_model("mixtral")
    trainer = make_trainer(trees, model=model, offload=True, router_z_coefficient=0.1)
    assert trainer.engine.offload
    assert trainer.engine.router_loss_rule.z_coefficient == 0.1


def test_a_z_loss_below_zero_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"router_z_coefficient=-0\.1 must be 0 or positive"):
        TreeTrainingArguments(output_dir=str(tmp_path), router_z_coefficient=-0.1, report_to="none")
