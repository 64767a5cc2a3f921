"""verl's trainers with groups kept on one rank, without Ray: a batch of verl's, dealt by them and by verl's own."""

import subprocess
import sys
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.integrations.test_verl_batches import rows_of_groups
from treewise.errors import ConfigError

pytest.importorskip("transfer_queue", reason="verl's TransferQueue is not installed", exc_type=ImportError)
pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, ray and torch

MODES = ("sync", "colocate_async", "separate_async")


@pytest.fixture(scope="module")
def trainers():
    pytest.importorskip("verl.trainer.ppo.v1", reason="verl's trainer does not import", exc_type=ImportError)
    from verl.trainer.ppo.v1 import get_trainer_cls

    from treewise.integrations import verl_trainer

    verl_trainer.register()
    verl_trainer.register()  # a second call changes nothing
    return get_trainer_cls


def trainer_of(trainer_class, num_ranks, mini_batch_size, num_answers):
    """A trainer of which only what deals rows to ranks is built."""
    from omegaconf import OmegaConf

    trainer = object.__new__(trainer_class)
    trainer.config = OmegaConf.create({
        "trainer": {"critic_warmup": 0},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": mini_batch_size}, "rollout": {"n": num_answers}},
    })  # fmt: skip
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(num_ranks))}, world_size=num_ranks)
    trainer.tokenizer = SimpleNamespace(eos_token_id=2)
    trainer.use_critic, trainer.global_steps = False, 1
    return trainer


class Queue:
    """The transfer queue of one process."""

    def __init__(self, rows):
        self.rows = dict(rows)

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        from tensordict import TensorDict

        rows = [torch.as_tensor(self.rows[key]) for key in keys]
        if select_fields is None:  # the row that padding is made from
            return [{"input_ids": rows[0], "position_ids": torch.arange(len(rows[0]))}]
        assert partition_id == "train"
        assert select_fields == ["input_ids"]
        return TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(rows))

    def kv_batch_put(self, keys, partition_id, fields, tags):
        self.rows |= dict(zip(keys, (row.numpy() for row in fields["input_ids"].unbind()), strict=True))


def batch_of(rows, groups):
    from transfer_queue import KVBatchMeta

    keys = [f"p{group}_{index}_0" for index, group in enumerate(groups)]
    tags = [{"seq_len": len(row), "status": "success"} for row in rows]
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags), Queue(zip(keys, rows, strict=True))


def deal(monkeypatch, trainer_class, rows, groups, num_ranks, mini_batch_size=8, num_answers=4):
    """The keys of each rank, the metrics, and the queue."""
    import transfer_queue
    from verl.trainer.ppo import padding_utils

    batch, queue = batch_of(rows, groups)
    monkeypatch.setattr(transfer_queue, "kv_batch_get", queue.kv_batch_get)
    monkeypatch.setattr(padding_utils, "tq", queue)
    metrics = {}
    dealt = trainer_of(trainer_class, num_ranks, mini_batch_size, num_answers)._balance_batch(batch, metrics)
    assert [tag["seq_len"] for tag in dealt.tags] == [len(queue.rows[key]) for key in dealt.keys]
    return [chunk.keys for chunk in dealt.chunk(num_ranks)], metrics, queue


def tree_tokens(keys, queue):
    seen = {tuple(queue.rows[key][: end + 1]) for key in keys for end in range(len(queue.rows[key]))}
    return len(seen)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_groups_are_whole_on_ranks_where_verl_scatters_them(monkeypatch, trainers, mode, num_ranks):
    rows, groups = rows_of_groups(np.random.default_rng(num_ranks), 8, [4] * 8)
    whole, metrics, queue = deal(monkeypatch, trainers(f"treewise_{mode}"), rows, groups, num_ranks)
    own, own_metrics, _ = deal(monkeypatch, trainers(mode), rows, groups, num_ranks)
    assert sorted(chain(*whole)) == sorted(chain(*own)) == sorted(queue.rows)
    ranks_of = {}
    for rank, keys in enumerate(whole):
        assert len(keys) == 32 // num_ranks
        for key in keys:
            ranks_of.setdefault(key.split("_")[0], set()).add(rank)
    assert all(len(ranks) == 1 for ranks in ranks_of.values())
    found, scattered = ([tree_tokens(keys, queue) for keys in each] for each in (whole, own))
    assert sum(found) == tree_tokens(queue.rows, queue) < 0.7 * sum(scattered)
    assert max(found) < 1.1 * sum(found) / num_ranks
    assert metrics["treewise/cut_groups"] == 0
    assert metrics["treewise/imbalance"] == pytest.approx(max(found) * num_ranks / sum(found), rel=0.01)
    assert metrics.keys() - own_metrics.keys() == {"treewise/imbalance", "treewise/cut_groups"}
    loads = [sum(len(queue.rows[key]) for key in keys) for keys in whole]
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (min(loads), max(loads))


def test_mini_batches_are_of_whole_groups_and_padding_fills_up(monkeypatch, trainers):
    rows, groups = rows_of_groups(np.random.default_rng(0), 8, [4] * 7 + [3])
    dealt, _, queue = deal(monkeypatch, trainers("treewise_sync"), rows, groups, num_ranks=2, mini_batch_size=4)
    assert len(queue.rows) == 32
    assert sum(key.startswith("pad") for keys in dealt for key in keys) == 1
    parts = [{key.split("_")[0] for key in keys[half : half + 8]} for keys in dealt for half in (0, 8)]
    prompts = [part & {f"p{group}" for group in range(8)} for part in parts]
    assert sorted(chain(*prompts)) == sorted(f"p{group}" for group in range(8))


def test_a_mode_sets_the_line_and_takes_fsdp_alone(monkeypatch, trainers):
    from omegaconf import OmegaConf

    seen = []
    monkeypatch.setattr(trainers("sync"), "__init__", lambda _, config: seen.append(config))
    tree = "treewise_sync"
    config = OmegaConf.create({
        "trainer": {"v1": {"trainer_mode": tree}},
        "actor_rollout_ref": {"actor": {"strategy": "fsdp2", "shuffle": False}, "model": {"external_lib": None}},
    })  # fmt: skip
    trainers(tree)(config.copy())
    config.actor_rollout_ref.model.external_lib = "mine"
    trainers(tree)(config.copy())
    libraries = [each.actor_rollout_ref.model.external_lib for each in seen]
    assert libraries == ["treewise.integrations.verl", "mine"]
    assert [each.trainer.v1.trainer_mode for each in seen] == ["sync"] * 2
    config.actor_rollout_ref.actor.strategy = "megatron"
    with pytest.raises(ConfigError, match="strategy is megatron: set it to fsdp2 or fsdp, or the mode to sync"):
        trainers(tree)(config)


@pytest.mark.slow
def test_installed_means_usable_by_name():
    """The entry point registers the modes when verl's trainer is imported, and imports nothing of verl before."""
    code = (
        "import sys, verl; assert 'verl.trainer' not in sys.modules; from verl.trainer.ppo.v1 import get_trainer_cls;"
        f"print([get_trainer_cls('treewise_' + mode).__name__ for mode in {MODES}])"
    )
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    names = ["TreePPOTrainerSync", "TreePPOTrainerColocateAsync", "TreePPOTrainerSeparateAsync"]
    assert told.stdout.splitlines()[-1] == str(names)
