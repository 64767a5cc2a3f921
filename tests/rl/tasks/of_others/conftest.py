"""The command `treewise rl --tasks` on a tiny model, and servers in this process."""

import json
import socket
import threading
from contextlib import ExitStack, contextmanager

import pytest

from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.cli.main import main


@pytest.fixture
def run_command(tmp_path, capsys):
    """Runs two iterations, and the second again from the checkpoint of the first; the figures of the last."""
    tiny_policy(max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    given = {
        **{"model": tmp_path / "model", "output_dir": tmp_path / "out", "use_cpu": "true", "report_to": "none"},
        **{"chat_template": "chatml", "trees_per_iteration": 2, "tokens_per_iteration": 96, "max_new_tokens": 16},
        **{"max_tokens": 64, "eval_items": 1, "branching": "turns", "branching_settings.roots": 2, "save_every": 1},
    }

    def call(tasks, **settings):
        for iterations, flags in ((1, []), (2, ["--resume"])):
            keys = {**given, **settings, "tasks": tasks, "iterations": iterations}
            words = [str(word) for key, value in keys.items() for word in (f"--{key}", value)]
            code = main(["rl", *words, *flags])
            said = capsys.readouterr()
            assert code == 0, said.err
            assert f"iteration {iterations}/{iterations}: reward" in said.out
        return json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"][-1]

    return call


@contextmanager
def _served(app):
    import uvicorn

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


@pytest.fixture(scope="module")
def serve():
    """Serves an app until the module's tests are over; its address."""
    with ExitStack() as stack:
        yield lambda app: stack.enter_context(_served(app))


@pytest.fixture(scope="module")
def echo_url(serve):
    """A server of OpenEnv: each step is worth a half, three end the episode."""
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

    return serve(create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=64))
