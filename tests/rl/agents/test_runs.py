"""Online runs with an agent: figures, files, kills and resumption."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rl.agents.plain_agents import __file__ as PLAIN
from tests.rl.online.helpers import TOKENIZER, arguments, settings, tiny_policy
from tests.rl.online.test_routing_replay import mixture
from treewise.data.load import load_trees
from treewise.errors import CheckpointError, ConfigError, TaskError
from treewise.report import read_run
from treewise.rl.agents.collecting import AgentCollector
from treewise.rl.agents.settings import AgentSettings
from treewise.rl.online import OnlineTrainer
from treewise.rl.online.journal import Journal
from treewise.rl.samplers import TransformersSampler
from treewise.rl.tasks.agent_task import AgentTask

TASK = AgentTask([{"question": f"{number}+2?"} for number in range(10)], held_out=0.2)
pytestmark = pytest.mark.xdist_group("test_agents_running")


def new_trainer(folder, agent="drawn_reward", *, own=None, model=None, **changes):
    model = tiny_policy(max_position_embeddings=4096) if model is None else model
    online = settings(
        **{
            "branching": "none",
            "branching_settings": {},
            "tokens_per_iteration": 8192,
            "gather_seconds": 0.0,
            **changes,
        }
    )
    given = AgentSettings(**{"episodes": 3, "episode_seconds": 600.0, **(own or {})})
    collector = AgentCollector(f"{PLAIN}:{agent}", TOKENIZER, model, TASK, online, given, folder=folder)
    sampler = TransformersSampler(model, isolate_requests=True)
    more = {"sampler": None if online.max_staleness else sampler, "collector": collector}
    return OnlineTrainer(model, TASK, TOKENIZER, online, arguments(folder), **more)


def weights_of(trainer):
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory):
    """The run of an agent that rewrites its history in every way, its weights before, and its last log."""
    trainer = new_trainer(tmp_path_factory.mktemp("rewriting"), "rewriting")
    before = weights_of(trainer).clone()
    return trainer, before, trainer.train()


def test_a_run_learns_from_an_agents_episodes(rewriting):
    trainer, before, logs = rewriting
    assert not torch.equal(before, weights_of(trainer))
    assert logs["num_rollouts"] == 6
    assert logs["agent_calls"] == 6 * 16
    assert logs["calls_per_episode"] == 16
    assert logs["agent_forks"] >= 6 * 3
    assert logs["forks/result cut"] == 6
    assert logs["written_again_tokens"] > 0
    assert logs["context_tokens"] > 0
    assert logs["sampled_tokens"] == logs["recorded_tokens"] == logs["trained_tokens"]
    assert logs["share_ratio"] > 2
    assert logs["logprob_gap"] == pytest.approx(1.0, abs=1e-4)
    assert {"eval_reward", "eval_pass@1"} <= set(logs)
    trees = load_trees(str(trainer.folder / "rollouts" / "iteration-00002.jsonl"))
    rows = [row for tree in trees for row in tree.flat_trajectories()]
    assert sum(int((row.loss_weights > 0).sum()) for row in rows) == logs["trained_tokens"]
    assert len({(row.group, row.rollout) for row in rows}) == 6
    assert len(rows) == logs["agent_rows"]


@pytest.mark.representatives("exact")
@pytest.mark.parametrize("replay", ["exact", "by_tokens", "off"])
def test_a_mixture_trains_through_the_experts_of_its_episodes(tmp_path, replay):
    model = mixture(max_position_embeddings=4096)
    trainer = new_trainer(tmp_path, "rewriting", model=model, routing_replay=replay, eval_every=0, iterations=1)
    logs = trainer.train()
    rows = [json.loads(row) for row in (tmp_path / "rollouts" / "iteration-00001.jsonl").read_text().splitlines()]
    assert all(("routed_experts" in row) == (replay != "off") for row in rows)
    assert ("routed_otherwise" in logs) == ("live_gap" in logs) == (replay != "off")
    first = next(each for each in trainer.log_history if each["iteration"] == 1)
    assert first["logprob_gap"] == pytest.approx(1.0, abs=1e-4)
    if replay != "off":  # one process, one precision
        assert first["routed_otherwise"] == 0
        assert first["replayed_gap"] == pytest.approx(first["live_gap"], abs=1e-5)
        (tree, *_) = load_trees(str(tmp_path / "rollouts" / "iteration-00001.jsonl"))
        assert all((row.routed_experts[:-1] >= 0).all() for row in tree.flat_trajectories())


class KilledInTestError(BaseException):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody kills."""
    trainer = new_trainer(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return trainer


@pytest.mark.representatives("1", "14")
@pytest.mark.parametrize("at", [1, 5, 9, 14])
def test_a_run_that_is_killed_goes_on_with_what_had_ended(at, whole, tmp_path, monkeypatch):
    """To the same weights, bit for bit; no episode that had ended is run again."""
    record, count = Journal.record, [0]

    def killing(self, *args):
        count[0] += 1
        if count[0] == at:
            raise KilledInTestError
        record(self, *args)

    monkeypatch.setattr(Journal, "record", killing)
    with pytest.raises(KilledInTestError):
        new_trainer(tmp_path / "cut").train()
    resumed = new_trainer(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights_of(whole), weights_of(resumed))
    first, second = (folder / "rollouts" / "iteration-00002.jsonl" for folder in (whole.folder, tmp_path / "cut"))
    assert first.read_bytes() == second.read_bytes()
    assert count[0] == 2 + 6 + 6 + 2 + 1  # two evaluations, two iterations, and the one that was not written


@pytest.mark.representatives("4")
@pytest.mark.parametrize("at", [2, 4, 8])
def test_a_run_whose_agents_are_killed_goes_on_with_what_had_ended(at, whole, tmp_path, monkeypatch):
    """What the others had not done is no failure of theirs."""
    record, count = Journal.record, [0]
    cut = new_trainer(tmp_path / "cut")

    def killing(self, *args):
        count[0] += 1
        if count[0] == at:
            cut.collector.runner._process.kill()
        record(self, *args)

    monkeypatch.setattr(Journal, "record", killing)
    with pytest.raises(TaskError, match="the agents' process is gone: signal 9"):
        cut.train()
    resumed = new_trainer(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights_of(whole), weights_of(resumed))


def test_too_many_failures_end_the_run_and_are_tried_again(tmp_path):
    with pytest.raises(TaskError, match=r"of 2 rollouts without reward.*ValueError: no idea"):
        new_trainer(tmp_path, "raising").train()
    assert not (tmp_path / "journal" / "iteration-00001.jsonl").read_bytes()


def test_another_agent_is_another_run(tmp_path):
    new_trainer(tmp_path).train()
    with pytest.raises(CheckpointError, match="agent"):
        new_trainer(tmp_path, "right", iterations=3).train(resume_from_checkpoint=True)


def test_a_failed_episode_takes_no_part(tmp_path):
    trainer = new_trainer(tmp_path, "half", max_failed=1.0, own={"episodes": 6})
    trainer.train()
    logs = [each for each in trainer.log_history if each["iteration"] > 0]
    assert sum(each["failed_rollouts"] for each in logs) > 0
    for each in logs:
        assert each["sampled_tokens"] == each["recorded_tokens"] + each["failed_tokens"]
        assert (each["failed_tokens"] > 0) == (each["failed_rollouts"] > 0)


def test_a_budget_of_tokens_decides_how_many_episodes_there_are(tmp_path):
    trainer = new_trainer(tmp_path, own={"episodes": None}, tokens_per_iteration=160, iterations=3)
    trainer.train()
    counts = [each["num_rollouts"] for each in trainer.log_history if each["iteration"] > 0]
    assert counts[0] == 16
    assert all(16 < count <= 24 for count in counts[1:])
    assert trainer.loop.overshoot < 160


def test_a_curriculum_that_measures_prompts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="measures prompts"):
        new_trainer(tmp_path, curriculum="gain")


def test_episodes_may_be_sampled_while_the_policy_trains(tmp_path):
    trainer = new_trainer(tmp_path, max_staleness=1, iterations=3)
    logs = trainer.train()
    assert logs["staleness"] == 1.0
    rows = (tmp_path / "rollouts" / "iteration-00003.jsonl").read_text().splitlines()
    assert {max(json.loads(row)["policy_versions"]) for row in rows} == {1}


def test_rewards_of_calls_are_credited_by_turns(tmp_path):
    trainer = new_trainer(tmp_path, "right", advantages="turns", advantages_settings={"baseline": "none"})
    trainer.train()
    rows = (tmp_path / "rollouts" / "iteration-00001.jsonl").read_text().splitlines()
    assert all(max(json.loads(row)["token_rewards"]) == np.float32(0.25) for row in rows)


def test_the_calls_of_each_iteration_are_on_the_page(rewriting):
    """From the run to the page: as many as were made, with their text, where each went on from, and what forks cost."""
    trainer, _, logs = rewriting
    folder = Path(trainer.folder)
    lines = [json.loads(line) for line in (folder / "calls" / "iteration-00002.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert sum(len(line["calls"]) for line in lines) == logs["agent_calls"]
    assert sum(sum(call["tokens"]) for line in lines for call in line["calls"]) == (
        logs["sampled_tokens"] + logs["context_tokens"]
    )
    assert sum(call["again_tokens"] for line in lines for call in line["calls"]) == logs["written_again_tokens"]
    first, second = lines[0]["calls"][:2]
    assert first["text"].startswith("<|im_start|>system\nCount.")
    assert second["from"] == 0
    assert second["text"].endswith("And?<|im_end|>\n<|im_start|>assistant\n")
    agent = read_run(folder).online.agent
    assert agent.num_calls == logs["agent_calls"]
    assert sum(count for _, count, _ in agent.forks) == logs["agent_forks"]
    assert sum(again for _, _, again in agent.forks) == logs["written_again_tokens"]
    assert agent.share_ratio == pytest.approx(logs["share_ratio"], rel=0.05)  # of trees, not merged with one another
