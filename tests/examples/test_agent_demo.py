"""The demo of an agent: it and the environment that it was rewritten as give the same trees for the same samples."""

import importlib
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.rl.online.helpers import TOKENIZER, arguments, tiny_policy
from treewise.rl.agents.collecting import AgentCollector
from treewise.rl.agents.settings import AgentSettings
from treewise.rl.online import OnlineSettings
from treewise.rl.online.collector import GroupRequest, Moment
from treewise.rl.online.journal import Journal, LoopState
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.online.trees import tree_collector
from treewise.rl.success_book import BookSettings, SuccessBook
from treewise.rl.tasks.agent_task import AgentTask

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON = os.environ.get("TREEWISE_AGENTS_PYTHON")
NUM_TASKS, NUM_TRIES = 3, 12
AGENTS = [
    (f"{Path(__file__).parent / 'plain_box_agent.py'}:run", None),
    pytest.param(
        (f"{EXAMPLES / 'box_agent.py'}:run", PYTHON),
        marks=[pytest.mark.agents, pytest.mark.skipif(PYTHON is None, reason="make agents says which Python")],
        id="openai-agents",
    ),
]
pytestmark = pytest.mark.xdist_group("test_agents_running")


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("agent_demo")


def same_script(demo):
    """Says the same behind the same prefix, in whatever order it is asked: what is drawn is named by how often."""

    class Same(demo.Script):
        def __init__(self, tokenizer):
            super().__init__(tokenizer)
            self.times = Counter()

        def draw_of(self, request):
            self.times[request.prefix_ids] += 1
            return random.Random(f"{request.prefix_ids}/{self.times[request.prefix_ids]}")

    return Same(TOKENIZER)


def collected(demo, collector, task):
    """Each group's rows, as ids, weights and rewards."""
    requests = [
        GroupRequest(number, task.item("train", number), f"t/{number}", 1, (7, number), NUM_TRIES)
        for number in range(NUM_TASKS)
    ]
    state = LoopState(SuccessBook(BookSettings()))
    try:
        found = collector.collect(requests, Moment("iteration 1", state, Journal(None), same_script(demo), 0))
    finally:
        collector.close()
    return [
        sorted((row.token_ids.tolist(), row.loss_weights.tolist(), row.reward) for row in group.rows)
        for group in found.groups
    ]


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_and_environment_give_the_same_trees(agent, demo, tmp_path):
    model = tiny_policy(max_position_embeddings=4096)
    given = {"chat_template": demo.TEMPLATE, "max_new_tokens": 1000}
    rows = demo.tasks_of("test", 10)
    (tmp_path / "tasks.jsonl").write_text("".join(demo.json.dumps(row) + "\n" for row in rows))
    task = task_named(f"{EXAMPLES / 'box_environment.py'}:boxes", {"rows": str(tmp_path / "tasks.jsonl")})
    environment = tree_collector(task, TOKENIZER, OnlineSettings(**given), arguments(tmp_path), model)
    trees = collected(demo, environment, task)
    name, python = agent
    of_agent = AgentTask(rows)
    own = (OnlineSettings(**given), AgentSettings(python=python))
    assert collected(demo, AgentCollector(name, TOKENIZER, model, of_agent, *own), of_agent) == trees
    rewards = [reward for tree in trees for _, _, reward in tree]
    assert len(rewards) == NUM_TASKS * NUM_TRIES
    assert 0.1 < np.mean(rewards) < 0.7  # right with probability 0.34
    assert len({tuple(ids) for tree in trees for ids, _, _ in tree}) > NUM_TASKS


def test_both_run_on_the_same_rows_from_the_same_weights(demo, tmp_path):
    words = {}
    for kind in ("agent", "environment"):
        args = demo.parser().parse_args(["--kind", kind, "--seed", "2", "--start", "model"])
        flags = demo.words_of(args, tmp_path)[1:]
        words[kind] = dict(zip(flags[::2], flags[1::2], strict=True))
    both = words["agent"].keys() & words["environment"].keys()
    differ = {name for name in both if words["agent"][name] != words["environment"][name]}
    assert differ == {"--tasks", "--max_new_tokens", "--gather_seconds"}
    assert words["agent"]["--tasks"] == words["environment"]["--tasks_settings.rows"]
    practised = demo.tasks_of("practice 2", 50)
    assert practised == demo.tasks_of("practice 2", 60)[:50]
    assert not [row for row in demo.tasks_of("recorded", 50) if row in practised]
