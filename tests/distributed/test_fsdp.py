"""Settings of sharding: supported, or an error."""

import pytest

from treewise.distributed.fsdp import ShardSettings, shard_settings
from treewise.errors import ConfigError


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
