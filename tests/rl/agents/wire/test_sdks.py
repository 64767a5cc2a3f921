"""The official SDKs against the endpoint, unchanged but for base URL and key; their types check every answer."""

import asyncio
import json

import pytest

from tests.rl.agents.helpers import ADD, CALL, assert_rows_are
from tests.rl.agents.test_endpoint import CLAUDES, FLAT, USER, served

THINKS = "<think>\nhm\n</think>\n\nLet me see.\n" + CALL


def client_of(kind, client, **more):
    openai = pytest.importorskip("openai")
    return getattr(openai, kind)(base_url=f"{client.base_url}/v1", api_key=client.episode.key, **more)


def claude_of(client):
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=str(client.base_url), api_key=client.episode.key)


def test_openais_chat():
    openai = pytest.importorskip("openai")
    with served([THINKS, "It is 3.", "Bye."]) as client, client_of("OpenAI", client) as sdk:
        first = sdk.chat.completions.create(model="m", messages=[USER], tools=[ADD], logprobs=True, top_logprobs=1)
        type(first).model_validate(first.model_dump())
        message = first.choices[0].message
        assert message.tool_calls[0].function.name == "add"
        assert len(first.choices[0].logprobs.content) == first.usage.completion_tokens
        talk = [USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}]
        with sdk.chat.completions.stream(
            model="m", messages=talk, tools=[ADD], stream_options={"include_usage": True}
        ) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion()
        assert "content.delta" in events
        assert final.choices[0].message.content == "It is 3."
        assert final.usage.prompt_tokens_details.cached_tokens > 0
        sdk.post("/reward", body={"reward": 1.0, "call_id": final.id}, cast_to=object)
        rows, _ = assert_rows_are(client.speaker, client.episode)
        assert len(rows) == 1
        assert rows[0]["turns"][1]["reward"] == 1.0
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            sdk.chat.completions.create(model="m", messages=[USER], logit_bias={"1": 1})
        with pytest.raises(openai.NotFoundError, match="not served"):
            sdk.embeddings.create(model="m", input="a")
        assert sdk.models.list().data
        assert sdk.completions.create(model="m", prompt="a", max_tokens=50).choices[0].text == "Bye."


def test_many_calls_at_once_of_the_asynchronous_client():
    with served([f"text {i}" for i in range(12)]) as client:

        async def run():
            async with client_of("AsyncOpenAI", client) as sdk:
                calls = [
                    sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": str(i)}])
                    for i in range(12)
                ]
                return await asyncio.gather(*calls)

        found = asyncio.run(run())
        assert len({each.choices[0].message.content for each in found}) == 12
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 12


def test_openais_responses():
    with served([THINKS, "It is 3."]) as client, client_of("OpenAI", client) as sdk:
        first = sdk.responses.create(model="m", input="1+2?", tools=[FLAT], instructions="Be kind.")
        type(first).model_validate(first.model_dump())
        call = next(item for item in first.output if item.type == "function_call")
        assert json.loads(call.arguments) == {"a": 1, "b": 2}
        items = [{"role": "user", "content": "1+2?"}, *first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        with sdk.responses.stream(model="m", input=items, tools=[FLAT], instructions="Be kind.") as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
        assert final.output_text == "It is 3."
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1


def test_anthropics_messages():
    anthropic = pytest.importorskip("anthropic")
    with served([THINKS, "It is 3."]) as client, claude_of(client) as sdk:
        common = {"model": "m", "max_tokens": 300, "tools": [CLAUDES], "system": "Be kind."}
        first = sdk.messages.create(messages=[USER], **common)
        type(first).model_validate(first.model_dump())
        use = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
        talk = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with sdk.messages.stream(messages=talk, **common) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == final.content[0].text == "It is 3."
        assert final.usage.cache_read_input_tokens > 0
        assert len(assert_rows_are(client.speaker, client.episode)[0]) == 1
        with pytest.raises(anthropic.BadRequestError, match="web_search"):
            sdk.messages.create(
                messages=[USER], **{**common, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
            )
        assert sdk.messages.count_tokens(model="m", messages=[USER]).input_tokens > 5
        assert next(iter(sdk.models.list())).id == "policy"


def test_an_ended_episode_is_not_asked_again():
    """The SDKs send a call again on some errors; here that would be a call after the end each time."""
    openai = pytest.importorskip("openai")
    with served(["a"]) as client, client_of("OpenAI", client, max_retries=5) as sdk:
        client.episodes.end(client.episode)
        with pytest.raises(openai.APIStatusError) as caught:
            sdk.chat.completions.create(model="m", messages=[USER])
        assert caught.value.status_code == 410
        assert client.episodes.refused == {"after the episode's end": 1}
