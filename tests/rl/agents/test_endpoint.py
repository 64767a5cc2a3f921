"""The server by plain HTTP: protocols, limits, keys, clients that go away."""

import json
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest

from tests.rl.agents.helpers import ADD, CALL, END, Speaker, asked, assert_rows_are, episodes_on
from treewise.base.http import bodies
from treewise.errors import ConfigError, RequestRefusedError
from treewise.rl.agents.endpoint import Endpoint, listening
from treewise.rl.agents.streaming import Spoken, more
from treewise.rl.agents.wire import chat

USER = {"role": "user", "content": "1+2?"}
FLAT = {"type": "function", **ADD["function"]}
CLAUDES = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}


@contextmanager
def served(texts=(), *, on_end=None, host="127.0.0.1", token=None, any_key=False, **settings):
    """A client of an endpoint, its speaker and its episodes; the client has the key of an episode."""
    speaker = Speaker(list(texts))
    with episodes_on(speaker, any_key=any_key, **settings) as episodes:
        endpoint = Endpoint(episodes, host=host, token=token, on_end=on_end)
        with listening(endpoint) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            episode = episodes.open("first")
            client.headers["Authorization"] = f"Bearer {episode.key}"
            client.speaker, client.episodes, client.episode = speaker, episodes, episode
            yield client


def post(client, path, body, status=200, **headers):
    answer = client.post(f"/v1/{path}", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def events_of(client, path, body):
    """The events of a stream, and whether it ended as its protocol has it."""
    with client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# -- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_with_tools_and_log_probs():
    with served(["Let me see.\n" + CALL, "It is 3."]) as client:
        body = {
            "model": "m",
            "messages": [USER],
            "tools": [ADD],
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 200,
        }
        first = post(client, "chat/completions", {**body, "return_token_ids": True})
        choice = first["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        call = choice["message"]["tool_calls"][0]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        prefix, ids, logprobs = client.speaker.seen[0]
        assert choice["token_ids"] == list(ids)
        assert first["prompt_token_ids"] == list(prefix)
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(logprobs.tolist())
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 1
        assert first["usage"]["prompt_tokens"] == len(prefix)
        assert first["usage"]["completion_tokens"] == len(ids)
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        second = post(
            client, "chat/completions", {**body, "messages": [USER, choice["message"], answer], "logprobs": False}
        )
        assert second["choices"][0]["message"] == {"role": "assistant", "content": "It is 3.", "refusal": None}
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prefix) + len(ids)
        assert second["id"] != first["id"]
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1


def test_a_streamed_chat_is_the_whole_one_in_parts():
    texts = ["<think>\nhm\n</think>\n\nLet me see.\n" + CALL + "\n" + CALL] * 2
    with served(texts) as client:
        body = {"model": "m", "messages": [USER], "tools": [ADD], "seed": 3}
        whole = post(client, "chat/completions", body)["choices"][0]
        events = events_of(client, "chat/completions", {**body, "stream_options": {"include_usage": True}})
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] == len(client.speaker.seen[1][1])
        parts = [each["choices"][0]["delta"] for each in events[:-2]]
        assert "".join(part.get("content") or "" for part in parts) == whole["message"]["content"]
        assert "".join(part.get("reasoning_content") or "" for part in parts) == whole["message"]["reasoning_content"]
        calls = {}
        for call in (call for part in parts for call in part.get("tool_calls", [])):
            known = calls.setdefault(
                call["index"], {"id": call.get("id"), "name": call["function"].get("name"), "arguments": ""}
            )
            known["arguments"] += call["function"]["arguments"]
        expected = [each["function"] for each in whole["message"]["tool_calls"]]
        assert [{"name": c["name"], "arguments": c["arguments"]} for c in calls.values()] == expected
        assert events[-3]["choices"][0]["finish_reason"] == "tool_calls"
        assert_rows_are(client.speaker, client.episode)


def test_the_end_of_a_turn_is_not_given_out_before_it_is_known_as_such():
    """The last token has come, and the reply is not recorded yet."""
    with episodes_on(Speaker(["It is 3."])) as episodes:
        opened = episodes.open("a").begin(asked([USER], is_streamed=True))
        opened.done.result(60)
        stream, spoken = chat.ReplyStream(opened.answer, {}, episodes.chat.decode), [Spoken()]
        assert opened.tokens[0][-1] == END
        parts = more(episodes.chat, opened, spoken, stream)
        assert b"It is 3." in parts[0]
        assert spoken[0].content == "It is 3."


def test_choices_of_a_stream():
    with served(["one", "two"]) as client:
        events = events_of(client, "chat/completions", {"model": "m", "messages": [USER], "n": 2})
        texts = {0: "", 1: ""}
        for each in (choice for event in events[:-1] for choice in event["choices"]):
            texts[each["index"]] += each["delta"].get("content") or ""
        assert texts == {0: "one", 1: "two"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"max_tokenz": 5}, "max_tokenz"),
        ({"n": 0}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content",
        ),
        ({"tools": [{"type": "computer"}]}, "tools[0]"),
        (
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]}]},
            "tools[0].tools[0]",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"tokenize": True}}, None),
        ({"stop": [""]}, "stop"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(change, param):
    with served() as client:
        found = post(client, "chat/completions", {"model": "m", "messages": [USER], **change}, 400)
        assert set(found) == {"error"}
        assert found["error"]["type"] == "invalid_request_error"
        assert found["error"]["param"] == param
        assert (param or "chat_template_kwargs").split("[")[0] in found["error"]["message"]
        assert not client.speaker.seen


MADE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]}
TOLD = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]}
CLAUDE, TEXT = {"messages": [USER], "max_tokens": 4}, {"prompt": "a"}
BAD_BODIES = [
    ("chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": 5}]}, "messages[1].tool_calls"),
    (
        "chat/completions",
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "f"}}]}, USER]},
        "messages",
    ),
    ("chat/completions", {"messages": [USER, {"role": "tool", "tool_call_id": [1], "content": "3"}]}, "messages"),
    ("chat/completions", {"messages": [USER], "tool_choice": {"type": "function", "function": "add"}}, "tool_choice"),
    ("chat/completions", {"messages": [USER], "max_completion_tokens": -1}, "max_completion_tokens"),
    ("chat/completions", {"messages": [USER], "top_k": 10**30}, "top_k"),
    ("chat/completions", {"messages": [{**USER, "content": "\ud800"}]}, "messages"),
    ("chat/completions", {"messages": [USER], "metadata": {"\udfff": 1}}, "metadata"),
    ("chat/completions", {"messages": [USER], "top_p": float("nan")}, "top_p"),
    ("completions", {**TEXT, "prompt": [10**30]}, "prompt"),
    ("completions", {**TEXT, "metadata": {"a": float("inf")}}, "metadata"),
    ("responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ("responses", {"input": "a", "metadata": {"a": float("nan")}}, "metadata"),
    ("responses", {"input": [USER, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
    ("responses", {"input": [USER, {"type": "function_call", "name": "add"}]}, "input[1].call_id"),
    ("responses", {"input": [USER, {"type": "function_call_output", "output": "3"}]}, "input[1].call_id"),
    ("responses", {"input": [USER, {"type": "reasoning", "summary": [3]}]}, "input[1].reasoning"),
    ("messages", {**CLAUDE, "top_k": -1}, "top_k"),
    ("messages", {**CLAUDE, "messages": [USER, {**MADE, "content": [{"type": "tool_use", "id": "c"}]}, TOLD]}, "name"),
    ("messages", {**CLAUDE, "messages": [USER, {**MADE, "content": [{**MADE["content"][0], "input": 3}]}]}, "input"),
    ("messages", {**CLAUDE, "messages": [{**TOLD, "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    (
        "messages",
        {**CLAUDE, "messages": [USER, {**MADE, "content": [{"type": "thinking", "thinking": 3}]}]},
        "thinking",
    ),
    ("reward", {"reward": 10**400}, "reward"),
    ("reward", {"reward": float("nan")}, "reward"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_BODIES)
def test_a_wrong_value_is_refused_by_its_name(path, body, param):
    """None of them is a fault of the server, or is read as another value."""
    with served() as client:
        answer = client.post(f"/v1/{path}", content=json.dumps(body))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert param in error["message"]
        assert path == "messages" or error["param"] == param
        assert not client.speaker.seen


def test_a_choice_before_the_first_is_none():
    with served(["Three."]) as client:
        made = post(client, "chat/completions", {"messages": [USER]})
        post(client, "reward", {"reward": 1, "call_id": made["id"], "choice": -1}, 404)


def test_fields_that_change_nothing_are_taken():
    with served(["Ok."]) as client:
        plain = {"user": "u", "store": True, "metadata": {}, "frequency_penalty": 0, "logit_bias": None, "n": 1}
        plain |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "stream": False, "top_k": -1}
        post(client, "chat/completions", {"model": "m", "messages": [USER], **plain})


def test_paths_that_are_not_served():
    with served() as client:
        assert "/v1/embeddings is not served" in post(client, "embeddings", {}, 404)["error"]["message"]
        assert client.get("/v1/models").json()["data"][0]["id"] == "policy"
        assert client.get("/v1/models/gpt-5").json()["id"] == "gpt-5"
        assert client.get("/nothing").status_code == 404
        answer = client.get("/v1/messages")
        found = {"type": "invalid_request_error", "message": "/v1/messages takes POST, not GET."}
        assert (answer.status_code, answer.json()["error"]) == (405, found)


# -- the other protocols ----------------------------------------------------------------------------------------------


def test_completions_of_texts_and_ids():
    with served([" two", " b", " c", " five"]) as client:
        one = post(client, "completions", {"model": "m", "prompt": "one", "max_tokens": 20, "logprobs": 1})
        assert one["choices"][0]["text"] == " two"
        assert len(one["choices"][0]["logprobs"]["tokens"]) == len(client.speaker.seen[0][1])
        both = post(client, "completions", {"model": "m", "prompt": ["a", "bb"], "max_tokens": 20})
        assert [(each["index"], each["text"]) for each in both["choices"]] == [(0, " b"), (1, " c")]
        events = events_of(client, "completions", {"model": "m", "prompt": [70, 71], "max_tokens": 20})
        assert "".join(each["choices"][0]["text"] for each in events[:-1]) == " five"
        assert client.speaker.seen[-1][0] == (70, 71)
        found = post(client, "completions", {"model": "m", "prompt": "a", "echo": True}, 400)
        assert found["error"]["param"] == "echo"
        assert_rows_are(client.speaker, client.episode)


def test_messages_of_anthropic():
    with served(["<think>\nhm\n</think>\n\nLet me see.\n" + CALL, "It is 3."]) as client:
        body = {"model": "m", "max_tokens": 200, "system": [{"type": "text", "text": "Be kind."}], "tools": [CLAUDES]}
        first = post(client, "messages", {**body, "messages": [USER]})
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
        assert first["content"][2]["input"] == {"a": 1, "b": 2}
        assert first["stop_reason"] == "tool_use"
        result = {
            "type": "tool_result",
            "tool_use_id": first["content"][2]["id"],
            "content": [{"type": "text", "text": "3"}],
        }
        talk = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        second = post(client, "messages", {**body, "messages": talk})
        assert second["content"] == [{"type": "text", "text": "It is 3."}]
        assert second["stop_reason"] == "end_turn"
        assert second["usage"]["cache_read_input_tokens"] == sum(map(len, client.speaker.seen[0][:2]))
        assert post(client, "messages/count_tokens", {"model": "m", "messages": [USER]})["input_tokens"] > 5
        rows, _ = assert_rows_are(client.speaker, client.episode)
        assert len(rows) == 1


def test_a_streamed_message_of_anthropic():
    with served(["<think>\nhm\n</think>\n\nLet me see.\n" + CALL]) as client:
        body = {"model": "m", "max_tokens": 200, "messages": [USER], "tools": [CLAUDES]}
        events = events_of(client, "messages", body)
        kinds = [each["type"] for each in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        starts = [each["content_block"]["type"] for each in events if each["type"] == "content_block_start"]
        assert starts == ["thinking", "text", "tool_use"]
        deltas = {}
        for each in events:
            if each["type"] == "content_block_delta":
                text = next((each["delta"][k] for k in ("thinking", "text", "partial_json") if k in each["delta"]), "")
                deltas[each["index"]] = deltas.get(each["index"], "") + text
        assert deltas == {0: "hm", 1: "Let me see.", 2: '{"a": 1, "b": 2}'}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
    ],
)
def test_errors_in_anthropics_form(change, word):
    with served() as client:
        found = post(client, "messages", {"model": "m", "max_tokens": 5, "messages": [USER], **change}, 400)
        assert found["type"] == "error"
        assert found["error"]["type"] == "invalid_request_error"
        assert word in found["error"]["message"]


def test_a_turn_that_is_begun_for_the_model():
    with served(["b", "Ok."]) as client:
        talk = [USER, {"role": "assistant", "content": "a"}]
        found = post(client, "messages", {"model": "m", "max_tokens": 50, "messages": talk})
        assert found["content"][0]["text"] == "b"
        assert client.episodes.chat.decode(client.speaker.seen[0][0]).endswith("assistant\na")
        talk = [USER, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "And?"}]
        post(client, "messages", {"model": "m", "max_tokens": 50, "messages": talk})
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1


def test_responses():
    with served(["<think>\nhm\n</think>\n\nLet me see.\n" + CALL, "It is 3."]) as client:
        body = {"model": "m", "instructions": "Be kind.", "tools": [FLAT], "store": False}
        first = post(client, "responses", {**body, "input": "1+2?"})
        assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
        assert first["status"] == "completed"
        call = first["output"][2]
        assert call["arguments"] == '{"a": 1, "b": 2}'
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        items = [{"role": "user", "content": "1+2?"}, *first["output"], result]
        second = post(client, "responses", {**body, "input": items})
        assert second["output"][0]["content"][0]["text"] == "It is 3."
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == sum(map(len, client.speaker.seen[0][:2]))
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1
        for change, word in (
            ({"tools": [{"type": "file_search"}]}, "file_search"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
            ({"background": True}, "background"),
        ):
            found = post(client, "responses", {**body, "input": "a", **change}, 400)
            assert word in found["error"]["message"]


# -- what changes nothing ---------------------------------------------------------------------------------------------


IGNORED = {
    "chat/completions": {
        "messages": [USER],
        **{"verbosity": "low", "reasoning_effort": "xhigh", "store": True, "client_metadata": {"a": "b"}},
        "response_format": {"type": "text"},
        "tools": [ADD, {"type": "web_search_preview"}],
    },
    "responses": {
        "input": "a",
        **{"client_metadata": {"a": "b"}, "reasoning": {"effort": "none", "summary": "auto"}, "truncation": "auto"},
        **{"text": {"verbosity": "high"}, "max_tool_calls": 5, "include": ["web_search_call.results"]},
        "tools": [FLAT, {"type": "web_search", "external_web_access": False}],
    },
    "messages": {
        "messages": [USER],
        "max_tokens": 40,
        "output_config": {"effort": "low"},
        "metadata": {"user_id": "a"},
    },
}


@pytest.mark.parametrize("path", IGNORED)
def test_what_asks_for_nothing_that_the_sampler_does_is_ignored_counted_and_said_once(path, caplog):
    names = {
        "chat/completions": ["verbosity", "reasoning_effort", "store", "client_metadata"],
        "responses": ["client_metadata", "reasoning.effort", "text.verbosity", "max_tool_calls"],
        "messages": ["output_config.effort", "metadata"],
    }[path]
    more = {
        "chat/completions": ["tools of type web_search_preview"],
        "responses": ["tools of type web_search", "include: 'web_search_call.results'"],
        "messages": [],
    }[path]
    with served(["a", "b"]) as client:
        for _ in range(2):
            post(client, path, {"model": "m", **IGNORED[path]})
        assert client.episode.ignored == dict.fromkeys([*names, *more], 2)
        said = [record.getMessage() for record in caplog.records]
        assert sorted(said) == sorted(
            f"calls give {name}, which changes nothing here and is ignored" for name in [*names, *more]
        )
        prompt = client.episodes.chat.decode(client.speaker.seen[0][0])
        assert "web_search" not in prompt
        if path != "messages":
            assert '"name": "add"' in prompt


def test_functions_of_a_namespace():
    """As Codex gives its own: the model calls them by one name, and the client gets both."""
    space = {"type": "namespace", "name": "team", "description": "Agents.", "tools": [FLAT]}
    text = CALL.replace('"add"', '"team__add"')
    with served([text, "It is 3.", text]) as client:
        body = {"model": "m", "tools": [space]}
        made = post(client, "responses", {**body, "input": "1+2?"})["output"]
        call = made[-1]
        assert (call["namespace"], call["name"], call["arguments"]) == ("team", "add", '{"a": 1, "b": 2}')
        assert '"name": "team__add"' in client.episodes.chat.decode(client.speaker.seen[0][0])
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        post(client, "responses", {**body, "input": [{"role": "user", "content": "1+2?"}, *made, result]})
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1
        events = events_of(client, "responses", {**body, "input": "1+2?"})
        (done,) = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert (done["namespace"], done["name"]) == ("team", "add")


# -- responses that are kept ------------------------------------------------------------------------------------------


def test_a_response_is_gone_on_from_by_its_name():
    texts = ["Let me see.\n" + CALL, "It is 3.", "It is 7.", "Alone."]
    with served(texts) as client:
        body = {"model": "m", "tools": [FLAT], "instructions": "Be kind."}
        first = post(client, "responses", {**body, "input": "1+2?"})
        assert (first["store"], first["previous_response_id"]) == (True, None)
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "3"}
        events = events_of(client, "responses", {**body, "input": [result], "previous_response_id": first["id"]})
        second = events[-1]["response"]
        assert second["previous_response_id"] == first["id"]
        asked = {**body, "input": "And 3+4?", "previous_response_id": second["id"], "store": False}
        third = post(client, "responses", asked)
        assert third["store"] is False
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1
        listed = client.get(f"/v1/responses/{second['id']}/input_items").json()
        assert [item["type"] for item in listed["data"]] == [
            *("function_call_output", "function_call", "message", "message")
        ]
        assert listed["last_id"] == listed["data"][-1]["id"]
        assert client.get(f"/v1/responses/{second['id']}").json() == second
        for name in (third["id"], "resp_0"):  # that was not to be kept, or never was
            found = post(client, "responses", {**body, "input": "a", "previous_response_id": name}, 404)
            assert found["error"]["code"] == "previous_response_not_found"
            assert found["error"]["param"] == "previous_response_id"
            assert client.get(f"/v1/responses/{name}").status_code == 404
        assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
        assert client.get(f"/v1/responses/{first['id']}").status_code == 404
        assert post(client, f"responses/{second['id']}/cancel", {}, 400)["error"]["message"]
        other = client.episodes.open("second")
        post(client, "responses", asked, 404, Authorization=f"Bearer {other.key}")


def test_items_by_their_names():
    """As Vercel's AI SDK sends them in its usual mode: what the model said, by id alone."""
    with served(["<think>\nhm\n</think>\n\nLet me see.\n" + CALL, "It is 3.", "a"]) as client:
        body, user = {"model": "m", "tools": [FLAT]}, {"role": "user", "content": "1+2?"}
        made = post(client, "responses", {**body, "input": [user]})["output"]
        assert [item["type"] for item in made] == ["reasoning", "message", "function_call"]
        names = [{"type": "item_reference", "id": item["id"]} for item in made[:2]] + [
            {"id": made[2]["id"], "type": None}
        ]
        result = {"type": "function_call_output", "call_id": made[2]["call_id"], "output": "3"}
        post(client, "responses", {**body, "input": [user, *names, result], "store": False})
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1
        unknown = [user, {"type": "item_reference", "id": "msg_0"}]
        assert "'msg_0' is not kept" in post(client, "responses", {**body, "input": unknown}, 404)["error"]["message"]


def test_conversations():
    with served(["Hello.", "You said hi.", "b"]) as client:
        begun = post(client, "conversations", {"items": [{"role": "user", "content": "hi"}], "metadata": {"a": "b"}})
        talk = f"conversations/{begun['id']}"
        body = {"model": "m", "conversation": begun["id"]}
        first = post(client, "responses", {**body, "input": [], "store": False})
        assert first["conversation"] == {"id": begun["id"]}
        post(client, "responses", {**body, "conversation": {"id": begun["id"]}, "input": "What did I say?"})
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1
        kinds = [item["role"] for item in client.get(f"/v1/{talk}/items").json()["data"]]
        assert kinds == ["assistant", "user", "assistant", "user"]
        added = post(client, f"{talk}/items", {"items": [{"role": "user", "content": "c"}]})["data"]
        assert client.get(f"/v1/{talk}/items").json()["first_id"] == added[0]["id"]
        assert post(client, talk, {"metadata": {"c": "d"}})["metadata"] == {"c": "d"}
        assert client.get(f"/v1/{talk}").json()["metadata"] == {"c": "d"}
        both = {**body, "input": "a", "previous_response_id": first["id"]}
        assert post(client, "responses", both, 400)["error"]["param"] == "conversation"
        assert client.delete(f"/v1/{talk}").json()["deleted"] is True
        post(client, "responses", {**body, "input": "a"}, 404)


def test_streamed_responses():
    with served(["<think>\nhm\n</think>\n\nLet me see.\n" + CALL]) as client:
        events = events_of(client, "responses", {"model": "m", "input": "1+2?", "tools": [FLAT]})
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == "response.completed"
        done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
        text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
        assert text == done[1]["content"][0]["text"] == "Let me see."


# -- keys, limits, faults ---------------------------------------------------------------------------------------------


def test_keys_name_episodes():
    with served(["a", "b"]) as client:
        body = {"model": "m", "messages": [USER]}
        other = client.episodes.open("second")
        assert len(other.key) > 30
        post(client, "chat/completions", body, Authorization=f"Bearer {other.key}")
        assert len(other.recording.calls) == 1
        assert not client.episode.recording.calls
        assert (
            post(client, "chat/completions", body, 401, Authorization="Bearer no")["error"]["code"] == "invalid_api_key"
        )
        assert client.post("/v1/chat/completions", json=body, headers={"Authorization": ""}).status_code == 401
        client.episodes.end(other)
        found = post(client, "chat/completions", body, 410, Authorization=f"Bearer {other.key}")
        assert found["error"]["code"] == "episode_ended"
        assert client.episodes.refused == {
            "with a key that is not known": 1,
            "without a key": 1,
            "after the episode's end": 1,
        }


def test_rewards_of_calls_and_of_the_episode():
    with served(["a"]) as client:
        made = post(client, "chat/completions", {"model": "m", "messages": [USER]})
        post(client, "reward", {"reward": 0.5, "call_id": made["id"]})
        post(client, "reward", {"reward": 2})
        post(client, "reward", {"reward": 1, "call_id": "none"}, 404)
        assert "finite" in client.post("/v1/reward", content=b'{"reward": NaN}').text
        rows, _ = client.episode.rows()
        assert rows[0]["reward"] == 2.0
        assert rows[0]["turns"][0]["reward"] == 0.5


def test_bodies_and_calls_are_limited():
    with served(["a"] * 3, max_request_mb=1, max_calls=2) as client:
        big = {"model": "m", "messages": [{"role": "user", "content": "a" * (1 << 20)}]}
        assert post(client, "chat/completions", big, 413)["error"]["type"] == "request_too_large"
        assert client.post("/v1/chat/completions", content=b"{").status_code == 400
        assert client.post("/v1/chat/completions", content=b"[" * 100_000).status_code == 400
        assert (
            client.post("/v1/chat/completions", content=b"{}", headers={"Content-Encoding": "gzip"}).status_code == 415
        )
        body = {"model": "m", "messages": [USER]}
        for status in (200, 200, 403):
            post(client, "chat/completions", body, status)
        assert sum(client.episode.refused.values()) == 1


def test_a_body_that_does_not_end_is_answered_in_the_form_of_its_protocol(monkeypatch):
    monkeypatch.setattr(bodies, "IDLE_SECONDS", 0.5)
    with served(["a"]) as client:
        key, body = client.headers["Authorization"], {"model": "m", "messages": [USER]}
        head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\nContent-Length: 100\r\n\r\n{{"
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
            connection.sendall(head.encode())
            answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        assert answer.startswith("HTTP/1.1 408")
        assert "x-should-retry: true" in answer
        assert json.loads(answer.partition("\r\n\r\n")[2])["type"] == "error"  # Anthropic's form
        post(client, "chat/completions", body)


def test_calls_at_a_time_are_limited():
    with served(["a"] * 3, calls_at_once=1) as client:
        client.speaker.block = threading.Event()
        found = []
        body = {"model": "m", "messages": [USER]}
        thread = threading.Thread(target=lambda: found.append(post(client, "chat/completions", body)))
        thread.start()
        while not client.speaker.num_batches:
            thread.join(0.01)
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 429
        assert answer.headers["x-should-retry"] == "true"
        client.speaker.block.set()
        thread.join()
        assert found


def test_a_client_that_goes_away_frees_its_place_and_its_tokens_count():
    """Mid-stream, and before any token: in both cases what was sampled is recorded."""
    with served() as client:
        client.speaker.block = threading.Event()
        body = {"model": "m", "messages": [USER]}
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        client.timeout = 0.2
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body)
        client.timeout = 60
        under_way = client.episode._under_way
        while not all(each.is_cancelled for each in list(under_way)):
            threading.Event().wait(0.01)
        client.speaker.block.set()
        client.episode.end()
        assert not under_way
        _, account = client.episode.rows()
        assert (
            account.sampled == account.recorded == account.trained == sum(len(ids) for _, ids, _ in client.speaker.seen)
        )


def test_a_call_that_waits_when_its_episode_ends_is_told_so():
    with served(["first", "second"]) as client:
        client.speaker.block = threading.Event()
        first = client.episode.begin(asked([USER]))
        while not client.speaker.num_batches:
            threading.Event().wait(0.01)
        second = client.episode.begin(asked([USER]))  # no batch holds it yet
        client.episode.end(0.0)
        client.speaker.block.set()
        assert first.done.result(60)[0].token_ids  # what was sampled until then
        error = second.done.exception(60)
        assert (error.status, error.code) == (410, "episode_ended")
        assert client.episode.failure is None


def test_a_call_without_a_reply_in_time():
    with served(["a"], call_seconds=0.2) as client:
        client.speaker.block = threading.Event()
        answer = client.post("/v1/chat/completions", json={"model": "m", "messages": [USER]})
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        client.speaker.block.set()


def test_a_sampler_that_fails_is_said_and_kept():
    with served([RuntimeError("no memory")]) as client:
        found = post(client, "chat/completions", {"model": "m", "messages": [USER]}, 500)
        assert "no memory" in found["error"]["message"]
        assert isinstance(client.episode.failure, RuntimeError)
        assert client.episode.rows()[0] == []


def test_what_a_call_asks_in_vain_is_its_own_error():
    """A sampler that refuses one request, or a setting that the call chose; the next call is answered."""
    refusals = [RequestRefusedError("the server gave fewer than 20 log-probs a token"), ConfigError("top_p=0.9")]
    with served([*refusals, "a"]) as client:
        body = {"model": "m", "messages": [USER]}
        for words in ("fewer than 20", "top_p=0.9"):
            found = post(client, "chat/completions", body, 400)
            assert words in found["error"]["message"]
            assert found["error"]["type"] == "invalid_request_error"
        post(client, "chat/completions", body)
        assert client.episode.failure is None
        assert_rows_are(client.speaker, client.episode)


def test_a_setting_of_the_run_that_the_sampler_refuses_is_no_fault_of_a_call():
    for model, is_runs in (("m", True), ("other", False)):
        with served([ConfigError("top_p=0.9")], temperature=1.0) as client:
            post(client, "chat/completions", {"model": model, "messages": [USER]}, 500 if is_runs else 400)
            assert isinstance(client.episode.failure, ConfigError) == is_runs


def test_values_that_no_sampler_takes_free_their_place():
    with served(["a"], calls_at_once=2) as client:
        body = {"model": "m", "messages": [USER], "temperature": 1e-40}
        assert "temperature" in post(client, "chat/completions", body, 400)["error"]["message"]
        assert not client.episode._under_way


def test_nobody_waits_for_the_first_prompts_of_a_call_that_is_refused():
    with served() as client:
        client.speaker.block = threading.Event()
        assert post(client, "completions", {"model": "m", "prompt": ["a", ""]}, 400)["error"]["param"] == "prompt"
        assert [opened.is_cancelled for opened in client.episode._under_way] == [True]
        client.speaker.block.set()


def test_models_by_name():
    models = {"judge": "context", "policy": "train"}
    with served(["a", "b"], models=models) as client:
        post(client, "chat/completions", {"model": "judge", "messages": [USER]})
        post(client, "chat/completions", {"model": "policy", "messages": [USER]})
        found = post(client, "chat/completions", {"model": "gpt-5", "messages": [USER]}, 404)
        assert found["error"]["code"] == "model_not_found"
        assert_rows_are(client.speaker, client.episode, context={0})


def test_calls_that_are_passed_on():
    with served(["from the other"]) as other:
        models = {
            "gpt-5": {"base_url": f"{other.base_url}/v1", "model": "m", "api_key": other.episode.key},
            "*": "train",
        }
        with served(models=models) as client:
            body = {"model": "gpt-5", "messages": [USER]}
            assert post(client, "chat/completions", body)["choices"][0]["message"]["content"] == "from the other"
            events = events_of(client, "chat/completions", body)
            assert events[-1] == "[DONE]"
            assert client.episode.num_passed_on == 2
            assert not client.episode.recording.calls
            assert len(other.episode.recording.calls) == 2


def test_other_hosts_need_a_token():
    with pytest.raises(ConfigError, match="--token"), served(host="0.0.0.0", any_key=True):
        pass
    with served(["a", "b"], token="secret", any_key=True) as client:
        body = {"model": "m", "messages": [USER]}
        post(client, "chat/completions", body, 401, Authorization="Bearer other.a")
        post(client, "chat/completions", body, Authorization="Bearer secret.a")
        post(client, "chat/completions", body, **{"Authorization": "", "x-api-key": "secret"})
        assert {each.name for each in client.episodes.all_open} == {"first", "a", "default"}


def test_a_page_of_another_origin_cannot_call():
    with served() as client:
        answer = client.post("/v1/chat/completions", json={"messages": [USER]}, headers={"Host": "evil.example"})
        assert answer.status_code == 400
