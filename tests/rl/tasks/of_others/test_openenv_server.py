"""An environment on a server of OpenEnv: sessions, rewards of steps, branches that are played again or not at all."""

import logging
import socket
import threading

import pytest

from tests.rl.online.helpers import new_trainer, tiny_policy
from tests.rl.online.test_continuing import Scripted
from treewise.rl.online import growing
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.tasks.environment import state_method

pytest.importorskip("openenv.core.env_server", reason="pip install 'openenv-core>=0.3'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the package


@pytest.fixture(scope="module")
def url():
    """A server in this process: each step is worth its number of letters, three end the episode."""
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Said(Action):
        message: str

    class Heard(Observation):
        text: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **_):
            self.seed, self.num_steps = seed or 0, 0
            return Heard(text=f"begin {self.seed}", reward=0.0, done=False)

        def step(self, action, **_):
            self.num_steps += 1
            return Heard(text=f"{self.num_steps}: {action.message}", reward=0.5, done=self.num_steps == 3)

        @property
        def state(self):
            return State(step_count=self.num_steps)

    app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=64)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    is_ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            is_ready.set()

    server = Server(uvicorn.Config(app, port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    assert is_ready.wait(60)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True


def test_a_session_is_an_episode(url):
    task = task_named(f"openenv:{url}", {"observation": "text"})
    one, other = task.environment(), task.environment()
    assert (one.reset(seed=6), other.reset(seed=8)) == ("begin 6", "begin 8")
    assert [one.act("a"), other.act("b"), one.act("c")] == ["1: a", "1: b", "2: c"]
    assert (state_method(one), one.done) == ("replay", False)
    one.act("d")
    assert (one.done, one.get_reward(), other.get_reward()) == (True, 1.5, 0.5)


@pytest.mark.parametrize("replay", [True, False])
def test_a_run_branches_within_episodes_or_at_their_start(replay, url, tmp_path, caplog):
    growing._say_once.cache_clear()
    task = task_named(f"openenv:{url}", {"observation": "text", "replay": replay})
    run = {"branching": "turns", "branching_settings": {"roots": 2}, "tokens_per_iteration": 60, "max_new_tokens": 40}
    with caplog.at_level(logging.WARNING):
        trainer = new_trainer(
            *(tmp_path / "run", task),
            sampler=Scripted(),
            model=tiny_policy(max_position_embeddings=2048),
            iterations=1,
            eval_every=0,
            **run,
        )
        logs = trainer.train()
    assert (logs["reward"], logs["failed_rollouts"], logs["refused_branches"]) == (1.5, 0, 0)
    assert (logs["num_branches"] > 0) == replay
    assert ("branch at their prompts alone" in caplog.text) == (not replay)


def test_a_run_from_the_command(url, run_command):
    logs = run_command(f"openenv:{url}", **{"tasks_settings.observation": "text", "tokens_per_iteration": 160})
    assert logs["num_rollouts"] > 2
    assert logs["failed_rollouts"] == 0
