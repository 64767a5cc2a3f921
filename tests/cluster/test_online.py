"""Online runs with their sampler on another machine, and agents on a third: killed and queued again, they end with the
tokens and weights of a quiet one. The server is vLLM on a CPU where `make engines` has put it, else a stand-in.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import jobs, machines
from tests.cluster.machines import Machines
from tests.engines import vllm_server
from tests.engines.runs import HEADS
from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.rl.online.records import rollouts_file

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster")]

ITERATIONS = 6
ONLINE = {
    "model": "model",
    "tasks": "tasks.jsonl",
    "sampler": "vllm",
    "iterations": ITERATIONS,
    "trees_per_iteration": 2,
    "tokens_per_iteration": 64,
    "max_new_tokens": 8,
    "max_length": 128,
    "save_every": 1,
    "save_total_limit": ITERATIONS,
    "eval_every": ITERATIONS,
    "eval_items": 2,
    "chat_template": "chatml",
    "reward_functions": ["reward.py:even"],
    "learning_rate": 1e-2,
    "max_tokens": 64,
    "sharded": True,
    "use_cpu": True,
    "report_to": "none",
}
REWARD = """
def even(completion_ids, **_):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]
"""
STAND_IN = f"{sys.executable} -m tests.cluster.completions_server {{model}} {{port}}"
# Its words, but for those that say where it listens.
VLLM = [word for word in vllm_server.COMMAND if word not in ("--host", "127.0.0.1")]
SERVERS = {
    "vllm": " ".join([str(vllm_server.PYTHON), *VLLM, "--host 0.0.0.0 --model {model} --port {port}"]),
    "stand-in": STAND_IN,
}
SERVER = "vllm" if vllm_server.PYTHON.exists() else "stand-in"
AGENT = """
import json, os, socket, sys, urllib.request

body = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": os.environ["TREEWISE_TASK"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)))
text = answer["choices"][0]["message"]["content"] or ""
with open("called.jsonl", "a") as file:
    print(json.dumps([socket.gethostname(), address]), file=file)
print(float(sum(map(ord, text)) % 2 == 0))
"""


@contextmanager
def online(folder: Path, count: int, server: str = SERVER, **changes: object) -> Iterator[jobs.Job]:
    folder.mkdir(exist_ok=True)
    tiny_policy(**HEADS).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "tasks.jsonl").write_text("".join(f'{{"prompt": "{n}+2?"}}\n' for n in range(40)))
    (folder / "agent.py").write_text(AGENT)
    settings = {key: value for key, value in {**ONLINE, **changes}.items() if value is not None}
    with Machines(count) as of_job:
        job = jobs.Job(folder, of_job, settings)
        job.slurm.environment |= vllm_server.ENVIRONMENT
        command = f"--server_command={SERVERS[server]}"
        job.launch("--nodes", str(min(count, 3)), "--server_nodes", "1", command, "--server_seconds", "500")
        yield job


def sampled(job: jobs.Job) -> list[object]:
    """The token ids of all rollouts."""
    files = [rollouts_file(job.output, number) for number in range(1, ITERATIONS + 1)]
    return [json.loads(line)["token_ids"] for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> jobs.Job:
    """A run on `n0` and `n1` whose server is on `n2`, and that nothing happens to."""
    machines.require()
    with online(tmp_path_factory.mktemp("whole"), 3) as job:
        job.slurm.start()
        job.finish()
    return job


def test_a_run_samples_on_another_machine(whole: jobs.Job) -> None:
    logs = {each.name: each.read_text(errors="replace") for each in (whole.output / "logs").iterdir()}
    assert {"job-41.log", "trainer-n0.log", "trainer-n1.log", "server-n2.log"} <= set(logs)
    state = json.loads((whole.output / "trainer_state.json").read_text())
    gaps = [each["logprob_gap"] for each in state["log_history"] if "logprob_gap" in each]
    assert len(gaps) == ITERATIONS
    assert max(abs(gap - 1) for gap in gaps) < 1e-5  # the server has the weights of each iteration


def test_a_server_that_dies_is_started_anew(whole: jobs.Job, tmp_path: Path) -> None:
    with online(tmp_path / "run", 3) as job:
        job.slurm.start()
        job.until_step(2)
        job.kill_server("n2")
        jobs.assert_the_same(job.finish(), whole.weights(), atol=1e-6)
        assert sampled(job) == sampled(whole)
        assert "ended with code 137" in (job.output / "logs" / "server-n2.log").read_text(errors="replace")


def test_a_job_that_loses_the_node_of_its_server_goes_on(whole: jobs.Job, tmp_path: Path) -> None:
    with online(tmp_path / "run", 3) as job:
        job.slurm.start()
        job.until_step(2)
        job.machines.lose("n2")
        job.slurm.end()
        assert job.last_step < ITERATIONS
        job.machines.bring_back("n2")
        job.slurm.start()
        jobs.assert_the_same(job.finish(), whole.weights(), atol=1e-6)
        assert sampled(job) == sampled(whole)


def test_a_job_whose_time_ends_saves_and_goes_on(whole: jobs.Job, tmp_path: Path) -> None:
    with online(tmp_path / "run", 3) as job:
        job.slurm.start()
        job.until_step(2)
        job.slurm.end_its_time()
        job.slurm.wait()
        assert job.slurm.is_queued_again, job.logs()
        assert job.last_step < ITERATIONS
        job.slurm.start()
        jobs.assert_the_same(job.finish(), whole.weights(), atol=1e-6)
        assert sampled(job) == sampled(whole)


def test_agents_on_another_machine_call_the_endpoint(tmp_path: Path) -> None:
    """Trainers on `n0` and `n1`, the server on `n2`, agents on `n3`."""
    machines.require()
    agents = {"reward_functions": None, "tokens_per_iteration": None, "agent_settings": {"episodes": 2}}
    with online(tmp_path / "run", 4, iterations=2, eval_every=2, **agents, agent="./agent") as job:
        command = " ".join(f"'{word}'" for word in job.machines.words("n3", [sys.executable, "agent.py"]))
        (job.folder / "agent").write_text(f"#!/bin/bash\nexec {command}\n")
        (job.folder / "agent").chmod(0o755)
        job.slurm.start()
        job.finish()
        calls = [json.loads(line) for line in (job.folder / "called.jsonl").read_text().splitlines()]
    assert {name for name, _ in calls} == {"n3"}
    assert {address.split("//")[1].split(":")[0] for _, address in calls} == {"n0", "n1"}
