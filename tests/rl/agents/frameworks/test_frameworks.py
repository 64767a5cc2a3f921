"""Agents of frameworks from PyPI, each unchanged but for base URL and key (`make agents`): what is recorded is what the
sampler saw, and training on it is a plain loop over the calls.
"""

import os
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.rl.agents.frameworks.helpers import ADDS, TWO, ToolUser, called, runner_on
from tests.rl.agents.helpers import assert_rows_are
from tests.rl.online.helpers import tiny_policy
from treewise import Forest, TreeEngine
from treewise.nn.whole_gradients import gradient_error, gradients_of
from treewise.objectives import SFT
from treewise.tree.trajectory import Trajectory

HERE = Path(__file__).parent
PYTHON = os.environ.get("TREEWISE_AGENTS_PYTHON")
pytestmark = [pytest.mark.agents, pytest.mark.skipif(PYTHON is None, reason="make agents says which Python")]
FIRST, AGAIN = "1+2 and 3+4?", "And again?"


def counts(prompt, last):
    return TWO if last.startswith("user") and FIRST in last else "<think>\nhm\n</think>\n\nIt is 10."


def hands_over(prompt, last):
    if "You write the answer." in prompt:
        return "Ten."
    return TWO if FIRST in last or AGAIN in last else called("transfer_to_writer")


def manages(prompt, last):
    if "final_answer" not in prompt or "<code>" in prompt:
        return "Thought: I add.\n<code>\nfinal_answer(add(1, 2))\n</code>"
    if "managed agent" in last or "helper" not in prompt:
        return called("final_answer", answer="7")
    return called("helper", task="3+4") if FIRST in last else called("final_answer", answer="10")


def uses_a_shell(prompt, last):
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 3"
    return called("bash", command="echo $((1+2))" if FIRST in last else done)


def talks_on(prompt, last):
    return ADDS if AGAIN in last and "Let me see" not in prompt.partition(AGAIN)[2] else counts(prompt, last)


# Calls that are made, rows that they become, and reasons for which something is written again.
AGENTS = {
    "openai": (counts, 4, {"tools changed": 1}),
    "anthropic": (counts, 3, {}),
    "google_genai": (counts, 3, {}),
    "openai_agents": (hands_over, 6, {"system prompt edited": 1, "other turns": 2}),
    "langgraph": (counts, 7, {"tools changed": 1}),
    "smolagents": (manages, None, None),
    "pydantic_ai": (talks_on, None, {"system prompt edited": 1}),  # with Anthropic's protocol, once there is a history
    "mini_swe_agent": (uses_a_shell, 2, {}),
    "autogen": (counts, 6, None),
}
HARMLESS = ("new conversation", "same messages again", "other message after the same ones")


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_what_a_framework_does_is_recorded_and_trained(name, api, monkeypatch):
    if api != "responses" and name != "openai_agents":
        pytest.skip("one protocol")
    say, num_calls, forks = AGENTS[name]
    monkeypatch.setenv("OPENAI_AGENTS_API", api)
    speaker = ToolUser(say=say)
    with runner_on(speaker, shlex.join([str(PYTHON), str(HERE / f"of_{name}.py")]), max_calls=30) as runner:
        episode = runner.episodes.open(name, "task", seed=3)
        found = runner.run(episode, {"question": FIRST})
        assert found.reward == 1.0, found.failure
        rows, account = assert_rows_are(speaker, episode)
        reasons = {name: count for name, count in episode.recording.reasons.items() if name not in HARMLESS}
        if num_calls is not None:
            assert account.calls == num_calls
        if forks is not None:
            assert reasons == forks
        assert not episode.refused
    assert_trains_as_its_calls(rows, Counter((prefix, ids) for prefix, ids, _ in speaker.seen))


def assert_trains_as_its_calls(rows, calls):
    """Whole and at a budget."""
    model = tiny_policy(max_position_embeddings=16_384)
    total = sum(len(ids) * count for (_, ids), count in calls.items())
    for (prefix, ids), count in calls.items():
        logits = model(torch.tensor([[*prefix, *ids]])).logits[0, len(prefix) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        (-logprobs.sum() * count / total).backward()
    expected = gradients_of(model)
    names = ("token_ids", "loss_weights", "draws", "group", "rollout")
    items = [Trajectory(**{name: row[name] for name in names}) for row in rows]
    for budget in (None, 512):
        model.zero_grad()
        TreeEngine(model, max_tokens=budget).step(Forest.from_trajectories(items), SFT())
        assert gradient_error(gradients_of(model), expected) < 1e-5
