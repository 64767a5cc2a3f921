"""Two processes are one: same episodes, same weights to rounding, after a resumption and while the policy trains."""

import os
import traceback

import pytest
import torch

from tests.rl.agents.plain_agents import __file__ as PLAIN
from tests.rl.online.helpers import TOKENIZER, arguments, assert_same_rollouts, settings, tiny_policy
from tests.trainer.forked_ranks import NUM_RANKS, free_port, join
from tests.trainer.helpers import in_child
from treewise.distributed import ranks, watchdog
from treewise.errors import ConfigError
from treewise.rl.agents.collecting import AgentCollector
from treewise.rl.agents.settings import AgentSettings
from treewise.rl.online import OnlineTrainer
from treewise.rl.samplers import TransformersSampler
from treewise.rl.tasks.agent_task import AgentTask

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("test_agents_running")]

SECONDS = 400  # on a machine that does other things, too
# Agents whose calls come one after another: of threads, which call comes first is chance.
CASES = {
    "drawn_reward": {"trees_per_iteration": 3},
    "half": {"trees_per_iteration": 3, "max_failed": 1.0},
    "nothing": {"trees_per_iteration": 3},  # judged by a function
    "right": {"advantages": "turns", "mini_batches": 2},
}
SAME = (
    *("reward", "num_rollouts", "failed_rollouts", "sampled_tokens", "recorded_tokens", "trained_tokens"),
    *("agent_calls", "agent_rows", "agent_forks", "written_again_tokens", "calls_per_episode"),
    *("eval_reward", "eval_length"),
)


def judged(completions, log_metric, **_):
    log_metric("length", 3.0)
    return [float(len(each[0]["content"] or "")) for each in completions]


def trainer_of(agent, folder, **changes):
    """One process's part of a run. Other processes than the first begin with other weights."""
    model = tiny_policy(max_position_embeddings=4096)
    if ranks.own():
        for parameter in model.parameters():
            parameter.data += 0.1
    rows = [{"question": f"{number}+2?"} for number in range(10)]
    task = AgentTask(rows, [judged] if agent == "nothing" else [], held_out=0.2)
    given = {"branching": "none", "branching_settings": {}, "tokens_per_iteration": 8192, "gather_seconds": 0.0}
    online = settings(**{**given, **CASES[agent], **changes})
    own = AgentSettings(episodes=3, episode_seconds=SECONDS)
    return OnlineTrainer(
        model,
        task,
        TOKENIZER,
        online,
        arguments(folder, optim="sgd", learning_rate=0.5, max_grad_norm=1.0, max_tokens=256),
        sampler=TransformersSampler(model, isolate_requests=True),
        collector=AgentCollector(f"{PLAIN}:{agent}", TOKENIZER, model, task, online, own),
    )


def on_two(work):
    """Runs `work(rank)` in two processes; both end well."""
    port = free_port()

    def joined(rank):
        try:
            join(rank, port)
            watchdog.start_group(SECONDS)
            work(rank)
            torch.distributed.barrier()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            raise

    children = [in_child(lambda rank=rank: joined(rank), SECONDS) for rank in range(NUM_RANKS)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * NUM_RANKS


@pytest.mark.representatives("half", "nothing")
@pytest.mark.parametrize("agent", CASES)
def test_two_processes_are_one(agent, tmp_path):
    def work(rank):
        trainer_of(agent, tmp_path / "two", iterations=1).train()
        trainer = trainer_of(agent, tmp_path / "two")
        logs = trainer.train(resume_from_checkpoint=True)
        torch.save({"weights": trainer.model.state_dict(), "logs": logs}, tmp_path / f"{rank}.pt")

    on_two(work)
    trainer = trainer_of(agent, tmp_path / "one")
    logs = trainer.train()
    assert_same_rollouts(tmp_path / "one", tmp_path / "two")
    for rank in range(NUM_RANKS):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, value in trainer.model.state_dict().items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6)
        assert {name: found["logs"][name] for name in SAME} == pytest.approx(
            {name: logs[name] for name in SAME}, nan_ok=True
        )
    assert not list((tmp_path / "two" / "journal").iterdir())


def test_one_port_is_not_that_of_several_processes(tmp_path):
    def work(rank):
        model = tiny_policy()
        own = AgentSettings(port=free_port())
        online = settings(branching="none", branching_settings={})
        with pytest.raises(ConfigError, match=r"agent_settings\.port=\d+ is one port, and each of the 2 processes"):
            AgentCollector(f"{PLAIN}:right", TOKENIZER, model, AgentTask([{}] * 10), online, own)

    on_two(work)
