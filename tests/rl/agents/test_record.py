"""`treewise record`: calls of any key become rows, which load, and train as a plain loop over the calls would."""

import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.rl.agents.helpers import CALL, Speaker, episodes_on, say
from tests.rl.agents.test_endpoint import USER, post, served
from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.data import load_trees
from treewise.errors import ConfigError
from treewise.rl.agents.record import RowsFile
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
    assert process.returncode == (130 if ends == signal.SIGINT else -signal.SIGTERM), rest
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert sum(map(sum, (row["loss_weights"] for row in rows))) == len(first["logprobs"]["content"]) + sum(
        turn["end"] - turn["start"] for row in rows for turn in row["turns"][-1:]
    )
    assert "1 episode, 2 calls, 2 rows" in rest
