"""Agents that do what they should, and each way to go wrong: named, counted, and nothing of them is left."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rl.agents.helpers import Speaker, assert_rows_are, episodes_on
from treewise.errors import ConfigError, SamplerError, TaskError
from treewise.rl.agents import host
from treewise.rl.agents.endpoint import Endpoint, listening
from treewise.rl.agents.host import is_function
from treewise.rl.agents.running import RUN_FILE, AgentRunner

PLAIN = Path(__file__).parent / "plain_agents.py"
TASK = {"question": "1+2?"}
pytestmark = pytest.mark.xdist_group("test_agents_running")


@contextmanager
def runner_of(agent, texts=(), *, seconds=60.0, needs_reward=True, **settings):
    speaker = Speaker(list(texts))
    agent = agent if ":" in agent or " " in agent else f"{PLAIN}:{agent}"
    with episodes_on(speaker, **settings) as episodes, listening(Endpoint(episodes)) as url:
        runner = AgentRunner(agent, url, episodes, seconds=seconds, needs_reward=needs_reward)
        runner.speaker = speaker
        try:
            yield runner
        finally:
            runner.close()


def outcome_of(agent, texts=("Three.",), task=TASK, **settings):
    with runner_of(agent, texts, **settings) as runner:
        episode = runner.episodes.open("first", "task", seed=5)
        found = runner.run(episode, task)
        assert not episode.is_open
        assert not runner.episodes.all_open
        return found, episode, runner


def test_a_function_is_given_its_task_and_returns_its_reward():
    found, episode, runner = outcome_of("right")
    assert found.reward == 6.0
    assert found.failure is None
    assert found.output == "thinking about 1+2?\n"
    rows, _ = assert_rows_are(runner.speaker, episode)
    assert rows[0]["turns"][0]["reward"] == 0.25
    assert outcome_of("not_asynchronous")[0].reward == 2.0


def test_the_client_of_the_official_sdk():
    pytest.importorskip("openai")
    found, episode, _ = outcome_of("with_client")
    assert found.reward == 1.0
    assert episode.rows()[0][0]["turns"][0]["reward"] == 0.5


@pytest.mark.parametrize(("way", "reward"), [("", 0.5), ("file", 0.75), ("sent", 3.5)])
def test_a_command_is_given_its_task_and_gives_its_reward(way, reward):
    found, episode, runner = outcome_of(f"{sys.executable} {PLAIN} {way}")
    assert found.reward == reward
    assert len(assert_rows_are(runner.speaker, episode)[0]) == 1


@pytest.mark.parametrize(
    ("agent", "kind", "words"),
    [
        ("raising", "raised", r"plain_agents.py:\d+: ValueError: no idea"),
        ("exiting", "raised", "SystemExit: 3"),
        ("leaving", "exited", "code 0 before it returned"),
        ("killed", "exited", "signal 9 ended it"),
        ("hanging", "timeout", r"within 1.5 seconds \(episode_seconds\)"),
        ("silent", "silent", "made no call"),
        ("nothing", "no reward", "returned nothing"),
        ("words", "no reward", "it returned 'good', no number"),
        ("infinite", "no reward", "it returned inf"),
        ("flooding", "flooded", r"more than 5 calls \(max_calls\)"),
        (f"{sys.executable} {PLAIN} fail", "exited", "code 4.*it broke"),
        (f"{sys.executable} {PLAIN} words", "no reward", "its last line is 'so good', no number"),
        (f"{sys.executable} {PLAIN} huge", "no reward", r"its last line is 1e\+39, beyond float32"),
        (f"{sys.executable} {PLAIN} huge-file", "no reward", "its reward file holds -inf"),
        ("no-such-program --at-all", "exited", "code 127.*No such file"),
    ],
)
def test_what_goes_wrong_is_named_and_counted(agent, kind, words):
    seconds = 1.5 if kind == "timeout" else 60.0
    with runner_of(agent, seconds=seconds, max_calls=5) as runner:
        episode = runner.episodes.open("first")
        found = runner.run(episode, TASK)
        assert found.reward is None
        assert found.kind == kind
        assert found.failure.startswith("first: ")
        assert re.search(words, found.failure), found.failure
        assert runner.failures == {kind: 1}
        assert not episode.is_open
        again = runner.episodes.open("second")  # the next episode is not touched by it
        assert runner.run(again, TASK).kind == kind


RETURNED = {
    "1e39": "it returned 1e+39, beyond float32 (3.4e38)",
    "10**400": "it returned a number that no float holds",
    "-(10**5000)": "it returned a number that no float holds",
    "__import__('decimal').Decimal('NaN')": "it returned nan",
    "__import__('fractions').Fraction(10**400, 3)": "it returned a number that no float holds",
    "[1.0]": "it returned [1.0], no number",
    "__import__('numpy').ones(2)": "it returned ndarray, no number",
    "__import__('numpy').float32(0.5)": 0.5,
    "-3e38": -3e38,
    "True": 1.0,
}


def test_what_is_returned_is_a_reward_or_none():
    with runner_of("giving") as runner:
        for reward, expected in RETURNED.items():
            found = runner.run(runner.episodes.open(reward), {"reward": reward})
            assert_is(found, expected, found.reward)


def assert_is(found, expected, reward):
    """A reward, or set aside for what is wrong with it."""
    if isinstance(expected, float):
        assert found.failure is None
        assert reward == expected
    else:
        assert (found.reward, found.kind) == (None, "no reward")
        assert expected in found.failure


def test_what_is_sent_is_a_reward_or_none():
    """Also where the agent does not look at the answer; a reward of a call that is none takes the episode's, too."""
    cases = [
        ([1e39], "the reward that it sent is 1e+39, beyond float32"),
        ([10**400], "the reward that it sent is 1000"),
        ([0.5, 1e39], "beyond float32"),
        (["1"], "of type str"),
        ([1e39, 0.5], 0.5),
        ([True], 1.0),
    ]
    with runner_of("sending") as runner:
        for number, (rewards, expected) in enumerate(cases):
            for of_call in (False, True):
                episode = runner.episodes.open(f"{number}, {of_call}")
                found = runner.run(episode, {"rewards": rewards, "of_call": of_call})
                (row,), _ = episode.rows()
                assert_is(found, expected, row["turns"][0].get("reward") if of_call else found.reward)


def test_an_agent_without_a_reward_may_be_judged_by_functions():
    assert outcome_of("nothing", needs_reward=False)[0].failure is None


def test_what_an_agent_prints_is_bounded():
    found, _, _ = outcome_of("chatty")
    assert found.reward == 1.0
    assert found.num_bytes > 3_000_000
    assert len(found.output) < 40_000


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave their group are found on Linux alone")
def test_what_leaves_the_group_ends_too(tmp_path):
    found, _, _ = outcome_of("daemons", task={"pid_file": str(tmp_path / "pid")})
    assert found.reward == 1.0, found
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_threads_and_forks_are_of_their_episode():
    with runner_of("threads_and_forks") as runner:
        episodes = [runner.episodes.open(f"e{number}", seed=number) for number in range(4)]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda episode: runner.run(episode, TASK), episodes))
        assert [each.reward for each in found] == [1.0] * 4
        for episode in episodes:
            asked = sorted(each.asked.messages[0]["content"] for each in episode.recording.calls)
            assert asked == ["fork", "thread 0", "thread 1", "thread 2"]


def test_the_same_random_numbers_for_a_seed():
    with runner_of("drawn", ["a"] * 4) as runner:
        texts = []
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            episode = runner.episodes.open(name, seed=seed)
            runner.run(episode, TASK)
            texts.append(episode.recording.calls[0].asked.messages[0]["content"])
        assert texts[0] == texts[1] != texts[2]


def test_a_key_that_is_guessed_is_nobodys():
    found, episode, runner = outcome_of("lying")
    assert found.reward == 1.0
    assert len(episode.recording.calls) == 1
    assert runner.episodes.refused == {"with a key that is not known": 1}


def test_a_call_that_outlives_its_agent_is_cancelled_and_counted():
    with runner_of("outliving") as runner:
        runner.speaker.block = threading.Event()
        threading.Timer(1.5, runner.speaker.block.set).start()
        episode = runner.episodes.open("first")
        assert runner.run(episode, TASK).reward == 1.0
        assert not episode._under_way
        assert_rows_are(runner.speaker, episode)


def test_a_sampler_that_fails_is_no_fault_of_the_agent():
    with pytest.raises(SamplerError, match="out of memory"):
        outcome_of("raising", [RuntimeError("out of memory")])


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (f"{PLAIN}:nobody", "nobody"),
        ("no_such_module_at_all:run", "No module named"),
        ("broken.py:run", r"broken\.py:1"),
    ],
)
def test_an_agent_that_cannot_be_loaded(agent, words, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words), runner_of(agent):
        pass


# -- clients from before the episodes ---------------------------------------------------------------------------------

CALLS = f"""
import os, sys
sys.path.insert(0, {str(PLAIN.parent)!r})
from plain_agents import call, post
def run(task):
    os.environ.update(OPENAI_API_KEY=key_of(), OPENAI_BASE_URL=URL)
    call("1+2?")
    return 1.0
URL = URL_NOW = os.environ["OPENAI_BASE_URL"]
"""
MINE = "http://127.0.0.1:9/v1"  # where a call to the user's own provider would go


@pytest.fixture
def own_keys(monkeypatch):
    """As of a user who has keys of providers in the environment."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "sk-mine")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL"):
        monkeypatch.setenv(name, MINE)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "class Client:\n    api_key = None\nclient = Client()\nclient.api_key = os.environ['OPENAI_API_KEY']",
            "makes a client when it is loaded: agent.client (agent.Client). Make the client in the function",
        ),
        (
            "class URL(str): pass\nclass Client: api_key = 'own'\nclient = Client()\nclient.url = URL(URL_NOW)",
            "makes a client when it is loaded: agent.client (agent.Client). Make the client in the function",
        ),
        ("KEY = os.environ['ANTHROPIC_API_KEY']", "makes a client when it is loaded: agent.KEY. Make the client in"),
        (
            "post('chat/completions', {'model': 'm', 'messages': [{'role': 'user', 'content': 'a'}]})",
            "HTTPError: HTTP Error 403: Forbidden",
        ),
    ],
)
def test_a_client_that_is_made_when_the_module_is_loaded(code, words, tmp_path, own_keys):
    """No episode begins, and nothing goes to the user's provider."""
    (tmp_path / "agent.py").write_text(f"{CALLS}\n{code}\n")
    with pytest.raises(ConfigError, match=re.escape(words)), runner_of(f"{tmp_path / 'agent.py'}:run"):
        pass


@pytest.mark.parametrize(
    ("sdk", "key"), [("openai.OpenAI", ""), ("openai.AsyncOpenAI", "api_key='sk-own'"), ("anthropic.Anthropic", "")]
)
def test_a_client_of_an_official_sdk_that_is_made_when_the_module_is_loaded(sdk, key, tmp_path, own_keys):
    package = sdk.partition(".")[0]
    pytest.importorskip(package)
    (tmp_path / "agent.py").write_text(f"import {package}\nclient = {sdk}({key})\ndef run(task):\n    return 1.0\n")
    with (
        pytest.raises(ConfigError, match=re.escape(f"agent.client ({sdk}). Make the client in the function")),
        runner_of(f"{tmp_path / 'agent.py'}:run"),
    ):
        pass


def test_a_key_that_is_hidden_from_the_load_ends_the_first_episode_with_it(tmp_path, own_keys):
    (tmp_path / "agent.py").write_text(
        f"{CALLS}\nHEADER = 'Bearer ' + os.environ['OPENAI_API_KEY']\ndef key_of():\n    return HEADER[7:]\n"
    )
    with (
        runner_of(f"{tmp_path / 'agent.py'}:run") as runner,
        pytest.raises(ConfigError, match=r"key from before the episode\. Make the client in the function"),
    ):
        runner.run(runner.episodes.open("first"), TASK)
    assert not runner.speaker.seen


def test_what_is_a_function_and_what_a_command():
    functions = ("my_agent.py:run", "a.b:run", "/x y/z.py:run")
    assert [is_function(each) for each in functions] == [True, True, False]
    assert not any(map(is_function, ("python my_agent.py", "./agent", "make run:all", "curl http://a:80")))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_agents_and_their_files_end_with_a_run_that_is_killed(number, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    program = (
        "import sys\nfrom tests.rl.agents.test_running import *\n"
        "with runner_of('hanging') as runner:\n    runner.run(runner.episodes.open('a'), {'pid_file': sys.argv[1]})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "pid")],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        agent = pid_in(tmp_path / "pid", lambda: process.poll() is None)
        os.kill(agent, 0)
        assert list(folder.glob("treewise-agents-*"))
    finally:
        process.send_signal(number)
        process.wait()
    assert_ends(agent)
    for _ in range(6000):
        if not list(folder.glob("treewise-agents-*")):
            return
        threading.Event().wait(0.01)
    pytest.fail("its folder is left")


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave their group are found on Linux alone")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_where_the_agents_process_is_killed(number, tmp_path):
    """Nor is anything said of the episode, which did not end."""
    with runner_of("lingering") as runner:
        episode = runner.episodes.open("first")
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(runner.run, episode, {"pid_file": str(tmp_path / "pid")})
            stray = pid_in(tmp_path / "pid", lambda: not found.done())
            runner._process.send_signal(number)
            with pytest.raises(TaskError, match=rf"process is gone: signal {number} ended it.*with --resume"):
                found.result(60)
        assert not episode.is_open
        with pytest.raises(TaskError, match="process is gone"):
            runner.run(runner.episodes.open("second"), TASK)
        runner.stop(episode)
    assert_ends(stray)


def pid_in(path, goes_on):
    """What a process writes, while it does."""
    while not (path.is_file() and path.read_text()):
        assert goes_on()
        threading.Event().wait(0.01)
    return int(path.read_text())


def assert_ends(pid):
    for _ in range(3000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        except (FileNotFoundError, ProcessLookupError):  # before it is opened, and between that and reading
            return
        if "Z" in state:
            return
        threading.Event().wait(0.01)
    pytest.fail(f"{pid} goes on")


@pytest.mark.parametrize("code", ["def run(task): pass", "1 / 0"])
def test_a_run_that_ends_while_its_agent_loads_leaves_no_traceback(code, tmp_path):
    (tmp_path / "agent.py").write_text(code)
    own, other = socket.socketpair()
    command = [sys.executable, "-c", RUN_FILE, host.__file__, str(other.fileno()), f"{tmp_path / 'agent.py'}:run"]
    (tmp_path / "episodes").mkdir()
    command.append(str(tmp_path / "episodes"))
    keys = {"OPENAI_API_KEY": "tw-x", "ANTHROPIC_BASE_URL": "http://127.0.0.1:9"}
    own.close()
    with other:
        done = subprocess.run(
            command, env=os.environ | keys, pass_fds=[other.fileno()], capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_agents_end_with_the_run():
    with runner_of("hanging") as runner:
        episode = runner.episodes.open("first")
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(runner.run, episode, TASK)
            while not episode.recording.calls:
                threading.Event().wait(0.01)
            runner.close()
            assert found.result(60).kind == "stopped"


# -- another Python ---------------------------------------------------------------------------------------------------


def test_a_function_runs_in_another_python_with_modules_of_its_own(tmp_path):
    """Of the names that modules of ours have, too; and without treewise's own path."""
    (tmp_path / "tasks.py").write_text("REWARD = 0.75\n")
    (tmp_path / "agent.py").write_text(
        "import sys\nimport settings\nimport tasks\nfrom plain_agents import call\n"
        "def run(task):\n    call(task['question'])\n    return tasks.REWARD + settings.MORE\n"
    )
    (tmp_path / "settings.py").write_text("MORE = 1\n")
    (tmp_path / "plain_agents.py").write_text(PLAIN.read_text())
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    speaker = Speaker(["Three."])
    with episodes_on(speaker) as episodes, listening(Endpoint(episodes)) as url:
        runner = AgentRunner(f"{tmp_path / 'agent.py'}:run", url, episodes, python=str(python))
        try:
            episode = episodes.open("first", "task", seed=5)
            assert runner.run(episode, TASK).reward == 1.75
            assert_rows_are(speaker, episode)
        finally:
            runner.close()


@pytest.mark.parametrize(
    ("agent", "python", "words"),
    [
        ("python x.py", sys.executable, "is given with the command 'python x.py'"),
        (
            f"{PLAIN}:right",
            "/nowhere/python",
            "/nowhere/python: No such file or directory; name a Python 3.10 or later",
        ),
    ],
)
def test_a_python_that_cannot_be_is_named(agent, python, words):
    with episodes_on(Speaker()) as episodes, pytest.raises(ConfigError, match=re.escape(words)):
        AgentRunner(agent, "http://127.0.0.1:9", episodes, python=python)
