"""What a curriculum leaves out and refills; and that a killed run draws as an undisturbed one."""

import json
from dataclasses import replace

import pytest

from tests.rl.online.helpers import EvenBytes, digest, new_trainer
from tests.rl.online.test_loop import Killed, counted
from treewise.errors import ConfigError, DataError
from treewise.rl.curriculum import CURRICULA
from treewise.rl.online.records import draws_file, rollouts_file

RUN = {
    "iterations": 2,
    "eval_every": 0,
    "num_items": 7,
    "branching": "none",
    "branching_settings": {"roots": 3},
    "max_new_tokens": 4,
    "tokens_per_iteration": 24,
    "check_items": 0,
}


def draws_of(trainer):
    paths = [draws_file(trainer.folder, iteration) for iteration in range(1, RUN["iterations"] + 1)]
    return [json.loads(path.read_text())["draws"] for path in paths]


@pytest.mark.representatives("dynamic")
@pytest.mark.parametrize("name", [*CURRICULA, "control"])
def test_a_killed_run_draws_as_an_undisturbed_one(name, tmp_path):
    run = {**RUN, "curriculum": name}
    if name in ("gain", "control"):
        run |= {"curriculum": "gain", "curriculum_settings": {"force": True, "control": name == "control"}}
    whole = counted(tmp_path / "whole", **run)
    logs = whole.train()
    first = counted(tmp_path / "run", kill_at=whole.sampler.num_calls - 1, **run)
    with pytest.raises(Killed):
        first.train()
    second = counted(tmp_path / "run", **run)
    second.train(resume_from_checkpoint=True)
    assert digest(second.model) == digest(whole.model)
    assert draws_of(second) == draws_of(whole)
    assert second.items.state_dict() == whole.items.state_dict()
    assert first.sampler.num_tokens + second.sampler.num_tokens == whole.sampler.num_tokens
    assert logs["sampled_tokens"] == sum(each["num_tokens"] for each in draws_of(whole)[-1])
    assert logs["trained_tokens"] + logs.get("left_out_tokens", 0) == logs["recorded_tokens"]


class Odd(EvenBytes):
    """Items of odd number always fail."""

    def rewards(self, requests):
        is_even = [int(each.item.key.rpartition("/")[2]) % 2 == 0 for each in requests]
        return [reward * even for reward, even in zip(super().rewards(requests), is_even, strict=True)]


def test_dynamic_trains_groups_of_both_outcomes_alone(tmp_path):
    trainer = counted(tmp_path / "run", task=Odd("odd"), curriculum="dynamic", **RUN)
    trainer.train()
    rows = [json.loads(line) for line in rollouts_file(trainer.folder, 1).read_text().splitlines()]
    waves = 0
    for draws in draws_of(trainer):
        assert not [each for each in draws if each["is_kept"] and each["index"] % 2]
        assert len({each["index"] for each in draws}) == len(draws)
        waves = max(waves, *(each["wave"] for each in draws))
    assert 0 < waves <= 3
    for each in draws_of(trainer)[0]:
        rewards = {row["reward"] for row in rows if row["group"] == each["item"]}
        assert each["is_kept"] == (len(rewards) == 2)
    refilled = [each for draws in draws_of(trainer) for each in draws if each["wave"]]
    assert sum(entry.get("refilled_trees", 0) for entry in trainer.log_history) == len(refilled)


def test_a_pool_without_end_cannot_be_ranked(tmp_path):
    with pytest.raises(ConfigError, match="'gain' ranks the items of a pool"):
        new_trainer(tmp_path / "run", curriculum="gain")
    with pytest.raises(ConfigError, match="fewer than trees_per_iteration"):
        new_trainer(tmp_path / "run", task=Few(), num_items=None)
    with pytest.raises(ConfigError, match="unknown curriculum 'gian'"):
        new_trainer(tmp_path / "run", curriculum="gian")


class Few(EvenBytes):
    def num_items(self, split):
        return 1


class OneKey(EvenBytes):
    """All items have one key."""

    def item(self, split, index):
        return replace(super().item(split, index), key="the same")


def test_items_of_one_key_are_named_before_anything_is_sampled(tmp_path):
    trainer = counted(tmp_path / "run", task=OneKey("even"), **{**RUN, "trees_per_iteration": 2})
    with pytest.raises(DataError, match=r"items even/\d and even/\d both have the key 'the same', so their rollouts"):
        trainer.train()
    assert trainer.sampler.num_calls == 0
