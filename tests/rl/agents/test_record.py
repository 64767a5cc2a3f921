"""`treewise record`: calls of any key become rows, which load, and train as a plain loop over the calls would."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack

import httpx
import pytest

from tests.damage import no_room
from tests.rl.agents.helpers import CALL, Speaker, episodes_on, say
from tests.rl.agents.test_endpoint import USER, post, served
from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.base.durable import append
from treewise.data import load_trees
from treewise.errors import ConfigError, DiskError
from treewise.rl.agents import record as record_module
from treewise.rl.agents.record import RowsFile, _end_idle
from treewise.rl.agents.record_settings import RecordSettings


def test_rows_load_and_say_what_they_are(tmp_path):
    speaker, lines = Speaker(["<think>\nhm\n</think>\n\n" + CALL, "It is 3.", "No."]), []
    with episodes_on(speaker) as episodes:
        file = RowsFile(tmp_path / "rows.jsonl", TOKENIZER, lines.append)
        episode = episodes.open("a", "task")
        turn, call = say(episode, [USER])
        del turn["reasoning_content"]
        say(episode, [USER, turn, {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "3"}])
        episode.set_reward(1.0)
        episode.set_reward(0.5, call.id)
        episodes.end(episode)
        found = file.add(episode)
        again = episodes.open("a", "task")
        say(again, [USER])
        episodes.end(again)
        file.add(again)
    assert found["forks"]["thinking dropped"] == 1
    assert found["sampled"] == found["trained"] > 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["rollout"] for row in rows] == ["a", "a", "a-2"]
    assert rows[0]["turns"][0]["reward"] == 0.5
    assert rows[1]["prompt_text"].endswith("<|im_start|>assistant\n")
    assert rows[1]["completion_text"] == "It is 3.<|im_end|>"
    loaded = load_trees(tmp_path / "rows.jsonl")
    items = [item for tree in loaded for item in tree.labelled_trajectories()]
    assert len(items) == 3
    assert sum(item.num_trained_tokens for item in items) == sum(len(ids) for _, ids, _ in speaker.seen)
    assert "reward 1" in lines[0]
    assert "1 thinking dropped" in file.summary()


def test_rows_of_a_mixture_hold_its_experts(tmp_path):
    with episodes_on(Speaker(["one"]), records_experts=True) as episodes:
        file = RowsFile(tmp_path / "rows.jsonl", TOKENIZER, lambda _: None)
        episode = episodes.open("a", "task")
        say(episode, [USER])
        episodes.end(episode)
        file.add(episode)
    (tree,) = load_trees(tmp_path / "rows.jsonl")
    (item,) = tree.flat_trajectories()
    assert item.routed_experts[:, 0, 0].tolist() == [0] * (len(item) - 1) + [-1]


def test_clients_begin_and_end_episodes(tmp_path):
    speaker_texts = ["one", "two"]
    ended = []
    with served(speaker_texts, any_key=True, on_end=lambda episode: ended.append(episode) or {"rows": 1}) as client:
        made = post(client, "episodes", {"name": "mine", "group": "g"})
        head = {"Authorization": f"Bearer {made['key']}"}
        post(client, "chat/completions", {"model": "m", "messages": [USER]}, **head)
        assert post(client, "episodes/end", {"reward": 2}, **head) == {"rows": 1}
        post(client, "chat/completions", {"model": "m", "messages": [USER]}, 410, **head)
        post(client, "chat/completions", {"model": "m", "messages": [USER]}, Authorization="Bearer try-7")
        assert [(each.name, each.group, each.reward) for each in ended] == [("mine", "g", 2.0)]
        assert {each.name for each in client.episodes.all_open} == {"first", "try-7"}


def test_episodes_of_one_task_are_different_draws_unless_seeds_say_otherwise():
    with served([], any_key=True, on_end=lambda _: {}) as client:
        for fields in ({}, {}, {"seed": 3}, {"seed": 3}):
            post(client, "episodes", {"name": "mine", "group": "g", **fields})
        seeds = [each.seed for each in client.episodes.all_open if each.name == "mine"]
    assert len(set(seeds[:2])) == 2
    assert seeds[2:] == [3, 3]


# -- a full disk ------------------------------------------------------------------------------------------------------


def rows_in(path):
    return [json.loads(line)["rollout"] for line in path.read_text().splitlines()]


def test_rows_wait_for_room(tmp_path):
    """The end of an episode is answered with 507, again and again; once there is room, nothing was lost."""
    path = tmp_path / "rows.jsonl"
    file = RowsFile(path, TOKENIZER)
    with served(["one", "two", "three"], any_key=True, on_end=file.add) as client:
        head = {name: {"Authorization": f"Bearer {name}"} for name in ("a", "b")}
        for name in ("a", "b"):
            post(client, "chat/completions", {"model": "m", "messages": [USER]}, **head[name])
        post(client, "episodes/end", {}, **head["a"])
        size = path.stat().st_size
        for more in (size, size + 100):  # nothing of the rows has room, or a part of them
            with no_room(more):
                error = post(client, "episodes/end", {"reward": 1}, 507, **head["b"])["error"]
            assert path.stat().st_size == size
            assert re.search(
                rf"{path} cannot be written \(.*\): \d+ bytes needed, .* free on its disk", error["message"]
            )
        post(client, "chat/completions", {"model": "m", "messages": [USER]}, 410, **head["b"])
        assert post(client, "episodes/end", {"reward": 1}, **head["b"])["rows"] == 1
        post(client, "episodes/end", {}, 410, **head["b"])
    assert rows_in(path) == ["a", "b"]
    assert file.num_episodes == 2


def test_idle_episodes_wait_for_room(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    with episodes_on(Speaker(["one", "two"])) as episodes, ExitStack() as full:
        file, looks = RowsFile(path, TOKENIZER), itertools.count(1)
        for name in ("a", "b"):
            say(episodes.open(name), [USER])
        full.enter_context(no_room(10))

        class Over:
            def wait(self, _):
                look = next(looks)
                if look == 3:
                    full.close()
                return look > 3

        for episode in episodes.all_open:
            episode.last_call -= 60.0
        _end_idle(episodes, file, 1.0, Over())
        assert not episodes.all_open
    assert rows_in(path) == ["a", "b"]
    assert [record.getMessage()[-23:] for record in caplog.records] == [f"Episode {n} waits for it." for n in "ab"]


def test_the_last_rows_go_where_there_is_room(tmp_path, monkeypatch):
    path, elsewhere, lines = tmp_path / "rows.jsonl", tmp_path / "other", []
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    with episodes_on(Speaker(["one", "two"])) as episodes:
        file = RowsFile(path, TOKENIZER, lines.append)
        for name in ("a", "b"):
            say(episodes.open(name), [USER])
        before, after = episodes.all_open
        episodes.end(before, file.add_last)

        def one(target, content):
            if target == path:
                raise DiskError("full.")
            append(target, content)

        monkeypatch.setattr(record_module, "append", one)
        episodes.end(after, file.add_last)
    (kept,) = elsewhere.iterdir()
    assert (rows_in(path), rows_in(kept)) == (["a"], ["b"])
    assert f"The rows of b go to {kept}; append them to {path}." in lines[1]
    assert file.summary().startswith(f"2 episodes, 2 calls, 1 row in {path} and 1 row in {kept}\n")


# -- its beginning ----------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_found_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = RecordSettings(
            model=str(tmp_path / "none"), output=str(tmp_path / "rows.jsonl"), port=other.getsockname()[1]
        )
        with pytest.raises(ConfigError, match=rf"port {settings.port} of 127.0.0.1 cannot be listened on: .* in use"):
            record_module.record(settings, lambda _: None)
    assert not list(tmp_path.iterdir())


def test_what_does_not_begin_leaves_no_file(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    for left in (False, True):  # as a start that was killed leaves it
        if left:
            path.touch()
        with pytest.raises(ConfigError):
            record_module.record(RecordSettings(model=str(tmp_path / "none"), output=str(path), port=0), lambda _: None)
        assert not path.exists()


def test_settings_that_contradict_one_another(tmp_path):
    (tmp_path / "there.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="is there"):
        RecordSettings(model="m", output=str(tmp_path / "there.jsonl"))
    with pytest.raises(ConfigError, match=r"sampler_settings\.base_url"):
        RecordSettings(model="m", output=str(tmp_path / "a"), sampler="vllm")
    with pytest.raises(ConfigError, match="--token"):
        RecordSettings(model="m", output=str(tmp_path / "a"), host="0.0.0.0")
    with pytest.raises(ConfigError, match="judge"):
        RecordSettings(model="m", output=str(tmp_path / "a"), models={"judge": "free"})


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_the_command_records_until_a_signal_ends_it(tmp_path, ends):
    model = tiny_policy(max_position_embeddings=4096)
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
    words = [
        "record",
        "--model",
        str(tmp_path / "model"),
        "--output",
        str(tmp_path / "rows.jsonl"),
        "--port",
        str(port),
    ]
    words += ["--chat_template", "chatml", "--max_new_tokens", "12"]
    process = subprocess.Popen(
        [sys.executable, "-m", "treewise", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run behind a shell
    )
    try:
        lines = []
        while not any("running on" in line for line in lines):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        url = f"http://127.0.0.1:{port}/v1"
        with httpx.Client(base_url=url, timeout=120, trust_env=False, headers={"Authorization": "Bearer a"}) as client:
            body = {"model": "m", "messages": [USER], "logprobs": True}
            first = client.post("/chat/completions", json=body).json()["choices"][0]
            talk = [USER, first["message"], {"role": "user", "content": "And?"}]
            client.post("/chat/completions", json={**body, "messages": talk, "n": 2})
        process.send_signal(ends)
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + ends, rest
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert sum(map(sum, (row["loss_weights"] for row in rows))) == len(first["logprobs"]["content"]) + sum(
        turn["end"] - turn["start"] for row in rows for turn in row["turns"][-1:]
    )
    assert "1 episode, 2 calls, 2 rows" in rest
