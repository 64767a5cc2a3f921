"""Environments that the wheel of `verifiers` ships: games, servers of OpenEnv, resource servers of NeMo Gym."""

import json

import pytest

from tests.rl.online.helpers import TOKENIZER
from tests.rl.tasks.test_episode import call, reward_of, start_episode, take_turn, text_of
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.recorder.chat_tokens import ChatTokens

pytestmark = [pytest.mark.environments, pytest.mark.filterwarnings("ignore")]  # of the packages
WORDS = ("crane", "slate", "plant", "house", "mouse", "water", "light")


def begin(name, **settings):
    task = task_named(f"verifiers:{name}", settings)
    return start_episode(task, task.item("train", 0), ChatTokens(TOKENIZER, "chatml"))


def test_a_game_of_textarena(tmp_path, monkeypatch):
    words, tagger = tmp_path / "corpora" / "words", tmp_path / "taggers" / "averaged_perceptron_tagger_eng"
    for folder in (words, tagger):
        folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("\n".join(WORDS))
    for name, held in (("weights", {}), ("tagdict", {}), ("classes", ["NN"])):
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(held))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    episode = begin("textarena", game="Wordle-v0", num_tasks=2)
    take_turn(episode, "[crane]")
    assert "C R A N E" in text_of(episode)
    for word in WORDS[1:]:
        if episode.end_reason is None:
            take_turn(episode, f"[{word}]")
    assert episode.end_reason == "done"
    assert 0 <= reward_of(episode) <= 1


def test_a_server_of_openenv(echo_url):
    episode = begin("openenv", base_url=echo_url, resets=[{"seed": n} for n in range(4)])
    assert '"text": "begin 0"' in text_of(episode)
    take_turn(episode, "hello")
    assert '"text": "1: hello"' in text_of(episode)
    for word in ("a", "b"):
        take_turn(episode, json.dumps({"message": word}))
    assert (episode.end_reason, reward_of(episode)) == ("done", 1.5)


def test_a_resource_server_of_nemo_gym(serve, tmp_path):
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    async def seed(request):
        answer = JSONResponse({})
        answer.set_cookie("session", str((await request.json())["wanted"]))
        return answer

    async def add(request):
        numbers = await request.json()
        return PlainTextResponse(str(numbers["a"] + numbers["b"] + int(request.cookies["session"])))

    async def verify(request):
        body = await request.json()
        outputs = [each["output"] for each in body["response"]["output"] if each["type"] == "function_call_output"]
        return JSONResponse({**body, "reward": float(str(body["wanted"] + 3) in outputs)})

    paths = {"/seed_session": seed, "/add": add, "/verify": verify}
    url = serve(Starlette(routes=[Route(path, answer, methods=["POST"]) for path, answer in paths.items()]))
    tool = {"type": "function", "name": "add", "description": "Adds.", "strict": True}
    tool["parameters"] = {"type": "object", "properties": {each: {"type": "integer"} for each in "ab"}}
    asked = {"input": [{"role": "user", "content": "Add 1 and 2."}], "tools": [tool]}
    rows = [json.dumps({"responses_create_params": asked, "wanted": n}) for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    episode = begin("nemo-gym", dataset=str(tmp_path / "rows.jsonl"), task={"resources_url": url})
    take_turn(episode, call("add", a=1, b=2))
    assert "<tool_response>\n3\n" in text_of(episode)
    take_turn(episode, "It is 3.")
    assert (episode.end_reason, reward_of(episode)) == ("done", 1.0)
