"""Models after `shard`: what they compute besides hidden rows, on one process."""

import os

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.forked_ranks import free_port
from tests.trainer.helpers import in_child
from treewise import Forest, Trajectory
from treewise.distributed.fsdp import ShardSettings, refuse_narrow_experts, shard, shard_settings, whole_state
from treewise.engine.step import Walk
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.model import split_model
from treewise.planning.planner import plan
from treewise.testing.families import tiny_model
from treewise.trainer.checkpoint.contents import sharded_weights
from treewise.trainer.checkpoint.weights import save_shards


def sharded(work):
    """Runs `work` in a process group of one."""

    def run():
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.distributed.init_process_group("gloo")
        work()

    assert os.waitstatus_to_exitcode(os.waitpid(in_child(run, 120), 0)[1]) == 0


def test_a_tied_head_is_gathered_and_saved_once(tmp_path):
    def work():
        model = tiny_model("gemma")
        shard(model, split_model(model), torch.device("cpu"), ShardSettings(), None)
        state = whole_state(model)
        assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
        model.save_pretrained(tmp_path, state_dict=state)
        saved = load_file(tmp_path / "model.safetensors")
        assert "lm_head.weight" not in saved
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(loaded.lm_head.weight, saved["model.embed_tokens.weight"])
        save_shards(tmp_path / "shards", sharded_weights(model))
        (file,) = (tmp_path / "shards").glob("*.safetensors")
        assert "lm_head.weight" not in load_file(file)

    sharded(work)


def test_a_sharded_mixture_of_experts_returns_its_router_logits():
    def work():
        model = tiny_model("mixtral")
        lm = split_model(model)
        chain = plan(Forest.from_trajectories([Trajectory(range(1, 9))]))

        def router_logits():
            return Walk(lm, chain, "reference", reads_routers=True).forward(0).router_logits

        expected = router_logits()
        ends = shard(model, lm, torch.device("cpu"), ShardSettings(), None)
        with ends.whole(trains=False):
            found = router_logits()
        assert len(expected) == len(found) > 0
        for left, right in zip(expected, found, strict=True):
            torch.testing.assert_close(left, right)

    sharded(work)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_sharding_would_lose_are_refused(kind):
    def work():
        model = tiny_model()
        getattr(model.lm_head.weight, kind)(lambda _: None)
        with pytest.raises(ConfigError, match=r"lm_head\.weight has the hook .* sharding puts another parameter"):
            shard(model, split_model(model), torch.device("cpu"), ShardSettings(), None)

    sharded(work)


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


def test_experts_that_grouped_products_do_not_take_in_half_precision_are_named():
    """As where `tp_size` halves 24 columns: in float32 rows of 12 are whole 16 bytes, in bfloat16 they are not."""

    def parts(columns):
        return split_model(tiny_model("qwen3_moe", moe_intermediate_size=columns))

    narrow = parts(12)
    narrow.decoder.config._experts_implementation = "grouped_mm"
    token_ids = torch.arange(20)[None]
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        narrow.model.to(torch.bfloat16)(token_ids)
    with pytest.raises(UnsupportedModelError, match=r"down_proj has 12 columns on this rank, 24 bytes in bfloat16"):
        refuse_narrow_experts(narrow, torch.bfloat16)
    refuse_narrow_experts(narrow, torch.float32)
    narrow.decoder.config._experts_implementation = "eager"
    refuse_narrow_experts(narrow, torch.bfloat16)
    narrow.model(token_ids)
    wide = parts(24)
    wide.decoder.config._experts_implementation = "grouped_mm"
    refuse_narrow_experts(wide, torch.bfloat16)
