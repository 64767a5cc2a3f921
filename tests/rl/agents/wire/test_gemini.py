"""Google's Gemini API by plain HTTP."""

import json

import pytest

from tests.rl.agents.helpers import ADD, CALL, assert_rows_are
from tests.rl.agents.test_endpoint import served
from treewise.rl.agents.wire.asked import RefusedError
from treewise.rl.agents.wire.gemini import json_schema, read
from treewise.rl.agents.wire.protocol import environment, key_of

NUMBERS = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}, "b": {"type": "INTEGER", "nullable": True}}}
TOOLS = [{"functionDeclarations": [{"name": "add", "description": "Adds.", "parameters": NUMBERS}]}]
ASK = {"role": "user", "parts": [{"text": "1+2?"}]}
THINKS = "<think>\nhm\n</think>\n\nLet me see.\n" + CALL


def post(client, method, body, status=200):
    key = {"x-goog-api-key": client.episode.key}
    answer = client.post(f"/v1beta/models/policy:{method}", json=body, headers=key)
    assert answer.status_code == status, answer.text
    return answer


def test_a_talk_with_tools_is_one_row():
    with served([THINKS, "It is 3."]) as client:
        del client.headers["Authorization"]
        first = post(client, "generateContent", {"contents": [ASK], "tools": TOOLS}).json()
        thought, text, call = first["candidates"][0]["content"]["parts"]
        assert thought == {"text": "hm", "thought": True}
        assert text == {"text": "Let me see."}
        assert call["functionCall"]["args"] == {"a": 1, "b": 2}
        assert first["candidates"][0]["finishReason"] == "STOP"
        call["functionCall"].pop("id")  # as an SDK does that keeps names alone
        result = {"functionResponse": {"name": "add", "response": {"result": 3}}}
        talk = [ASK, first["candidates"][0]["content"], {"role": "user", "parts": [result]}]
        second = post(client, "generateContent", {"contents": talk, "tools": TOOLS}).json()
        assert second["candidates"][0]["content"]["parts"] == [{"text": "It is 3."}]
        used = second["usageMetadata"]
        assert used["totalTokenCount"] == used["promptTokenCount"] + used["candidatesTokenCount"]
        assert used["cachedContentTokenCount"] > 0
        rows, account = assert_rows_are(client.speaker, client.episode)
        assert (len(rows), account.calls) == (1, 2)


def test_the_same_talk_is_the_same_call_in_every_protocol():
    """What a template is given does not depend on the protocol, so the rows of two agents do not."""
    of_gemini = read(
        {
            "model": "m",
            "systemInstruction": {"parts": [{"text": "Be kind."}]},
            "tools": TOOLS,
            "contents": [
                ASK,
                {"role": "model", "parts": [{"functionCall": {"id": "x", "name": "add", "args": {"a": 1}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"output": "3"}}}]},
            ],
            "generationConfig": {"temperature": 0.5, "topP": 0.9, "topK": 7.0, "maxOutputTokens": 9, "seed": 3},
        }
    )
    call = {"type": "function", "id": "x", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert list(of_gemini.messages) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "3"},
    ]
    numbers = {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}}
    assert of_gemini.tools[0]["function"]["parameters"] == {"type": "object", "properties": numbers}
    assert of_gemini.tools[0]["function"]["name"] == ADD["function"]["name"]
    assert (of_gemini.temperature, of_gemini.top_p, of_gemini.top_k, of_gemini.seed) == (0.5, 0.9, 7, 3)
    assert of_gemini.max_tokens == 9


def test_a_stream():
    with served([THINKS]) as client:
        place = "/v1beta/models/policy:streamGenerateContent?alt=sse"
        with client.stream("POST", place, json={"contents": [ASK], "tools": TOOLS}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
        parts = [part for each in found for one in each.get("candidates", ()) for part in one["content"]["parts"]]
        assert "".join(part["text"] for part in parts if part.get("thought")) == "hm"
        assert "".join(part["text"] for part in parts if "text" in part and not part.get("thought")) == "Let me see."
        assert [part["functionCall"]["name"] for part in parts if "functionCall" in part] == ["add"]
        assert [
            one["finishReason"] for each in found for one in each.get("candidates", ()) if "finishReason" in one
        ] == ["STOP"]
        assert found[-1]["usageMetadata"]["candidatesTokenCount"] == len(client.speaker.seen[0][1])
        post(client, "streamGenerateContent", {"contents": [ASK]}, status=400)


def test_tokens_choices_models_and_log_probs():
    with served(["Yes.", "No."]) as client:
        count = post(client, "countTokens", {"contents": [ASK]}).json()
        settings = {"candidateCount": 2, "responseLogprobs": True, "logprobs": 1}
        found = post(client, "generateContent", {"contents": [ASK], "generationConfig": settings}).json()
        assert count == {"totalTokens": found["usageMetadata"]["promptTokenCount"]}
        assert [each["index"] for each in found["candidates"]] == [0, 1]
        logprobs = found["candidates"][0]["logprobsResult"]
        assert [each["tokenId"] for each in logprobs["chosenCandidates"]] == list(client.speaker.seen[0][1])
        assert len(logprobs["topCandidates"]) == len(logprobs["chosenCandidates"])
        assert client.get("/v1beta/models").json()["models"][0]["name"].startswith("models/")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "contents is missing"),
        ({"contents": []}, "contents is empty"),
        ({"contents": [{"role": "robot", "parts": []}]}, r"contents\[0\].role"),
        ({"contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png"}}]}]}, "inlineData"),
        ({"contents": [ASK], "tools": [{"googleSearch": {}}]}, r"tools\[0\].googleSearch"),
        ({"contents": [ASK], "cachedContent": "c"}, "cachedContent"),
        ({"contents": [ASK], "generationConfig": {"topP": 2}}, "top_p"),
        ({"contents": [ASK], "generationConfig": {"topK": 7.5}}, "topK is 7.5"),
        ({"contents": [ASK], "generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType"),
        (
            {"contents": [{"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {}}}]}]},
            "no call of 'f'",
        ),
        (
            {
                "contents": [ASK],
                "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"minItems": "few"}}]}],
            },
            "minItems must be a whole number, found 'few'",
        ),
        (
            {
                "contents": [ASK],
                "tools": TOOLS,
                "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["a", "b"]}},
            },
            "allowedFunctionNames",
        ),
    ],
)
def test_what_is_not_served_is_named(body, named):
    with pytest.raises(RefusedError, match=named):
        read({"model": "m", **body})


def test_an_error_has_googles_form():
    with served() as client:
        error = post(client, "generateContent", {"contents": 3}, status=400).json()["error"]
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
        wrong = client.post(
            "/v1beta/models/m:generateContent", json={"contents": [ASK]}, headers={"Authorization": "Bearer other"}
        )
        assert wrong.json()["error"]["status"] in ("UNAUTHENTICATED", "NOT_FOUND")


def test_a_call_of_another_endpoints_model_is_refused():
    with served(models={"big": {"base_url": "http://127.0.0.1:9/v1"}}) as client:
        answer = client.post(
            "/v1beta/models/big:generateContent",
            json={"contents": [ASK]},
            headers={"x-goog-api-key": client.episode.key},
        )
        assert answer.status_code == 400
        assert "not passed on" in answer.json()["error"]["message"]


def test_schemas_in_googles_spelling():
    given = {
        "type": "ARRAY",
        "minItems": "2",
        "items": {"anyOf": [{"type": "STRING", "enum": ["A"]}, {"type": "NULL"}]},
    }
    assert json_schema(given) == {
        "type": "array",
        "minItems": 2,
        "items": {"anyOf": [{"type": "string", "enum": ["A"]}, {"type": "null"}]},
    }
    assert json_schema({"type": "OBJECT", "properties": {"type": {"type": "STRING"}}})["properties"] == {
        "type": {"type": "string"}
    }


def test_every_provider_has_its_variables():
    found = environment("http://here:1", "key")
    assert found["OPENAI_BASE_URL"] == "http://here:1/v1"
    assert found["ANTHROPIC_BASE_URL"] == found["GOOGLE_GEMINI_BASE_URL"] == "http://here:1"
    assert {found[f"{name}_API_KEY"] for name in ("OPENAI", "ANTHROPIC", "GEMINI", "GOOGLE")} == {"key"}


def test_a_key_of_its_own_comes_before_a_bearer():
    both = {"authorization": "Bearer other", "x-api-key": "own"}
    assert key_of(both) == "own"
    assert key_of({**both, "x-api-key": ""}) == "other"
    assert key_of({"x-goog-api-key": "own", "authorization": "Basic x"}) == "own"
    assert key_of({"authorization": "Basic x"}) == key_of({}) == ""
