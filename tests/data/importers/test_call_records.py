"""Exports of langfuse and LangSmith, files of OpenAI's batches, flat call logs: the same calls, the same rows."""

import json
from pathlib import Path

import pytest

from treewise.data import load_trees
from treewise.data.importers import import_rollouts
from treewise.errors import DataError

SAMPLES = Path(__file__).parent / "samples"
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
CHAT = [{"messages": [USER, ANSWER]}]


def talks(row):
    """(context, reply) of every call of a record: contents, and the names of tool calls."""
    texts = [
        message.get("content") or " ".join(call["function"]["name"] for call in message.get("tool_calls", ()))
        for message in row["messages"]
    ]
    return [([texts[i] for i in call["ctx"]], texts[call["out"]]) for call in row["calls"]]


@pytest.mark.parametrize(("name", "first"), [("langfuse", []), ("langsmith", ["S"])])
def test_an_export_of_calls_is_read_by_trace(name, first):
    rows = import_rollouts(SAMPLES / f"{name}.jsonl")
    one, two = list(rows)
    assert {reply: context for context, reply in talks(one)} == {
        "look": [*first, "Q"],
        "one": [*first, "Q", "look", "seen"],
    }
    assert talks(two) == [(["Other"], "two")]
    assert (one["rollout"], one["reward"], two["rollout"]) == ("t1", 1.0, "t2")
    assert one["tools"][0]["function"]["name"] == "look"
    assert "reward" not in two
    assert next(reason for _, reason in rows.report.left_out).startswith("no call of a model")


def test_traces_with_observations_and_scores(write):
    lines = [json.loads(line) for line in (SAMPLES / "langfuse.jsonl").read_text().splitlines()]
    trace = {"id": "t1", "observations": lines[:3], "scores": [{"name": "a", "value": 0.5}, {"name": "b", "value": 1}]}
    [row] = import_rollouts(write(trace), reward_field="b")
    assert [reply for _, reply in talks(row)] == ["look", "one"]  # in the order of their time
    assert row["reward"] == 1.0
    rows = import_rollouts(write({**trace, "observations": lines[1:3]}))
    assert "reward" not in next(iter(rows))
    assert "several scores" in next(iter(rows.report.warnings))


FLAT = {
    "response as text": [{"model": "m", "messages": [USER], "response": "Yes.", "usage": {"total_tokens": 3}}],
    "response as a message": [{"messages": [USER], "response": ANSWER}],
    "response of the API": [{"messages": [USER], "response": {"choices": [{"message": ANSWER}]}}],
    "choices": [{"messages": [USER], "choices": [{"message": ANSWER}]}],
    "batch": [
        {
            "custom_id": "r1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [USER]},
        },
        {"id": "b", "custom_id": "r1", "response": {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}}},
    ],
    "langfuse": [{"traceId": "t", "type": "GENERATION", "input": "Hi", "output": "Yes."}],
    "langsmith": [{"run_type": "llm", "trace_id": "t", "inputs": {"messages": [USER]}, "outputs": {"message": ANSWER}}],
}


@pytest.mark.parametrize("name", FLAT)
def test_a_logged_call_gives_the_tokens_of_the_chat(write, tokenizer, name):
    [expected] = load_trees(CHAT, tokenizer, num_workers=0)[0].trajectories
    for data in (FLAT[name], write(*FLAT[name]), write(*FLAT[name][::-1])):
        [found] = load_trees(data, tokenizer, num_workers=0)[0].trajectories
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.loss_weights.tolist() == expected.loss_weights.tolist()


def test_a_batch_in_two_files_is_joined_and_halves_are_reported(write, tokenizer, tmp_path):
    asked, answered = FLAT["batch"]
    lone = {**asked, "custom_id": "r2"}
    failed = [{**asked, "custom_id": "r3"}, {"custom_id": "r3", "response": None, "error": {"message": "too long"}}]
    write(asked, lone, failed[0], name="a_input.jsonl")
    write(answered, failed[1], name="b_output.jsonl")
    for files in ([tmp_path / "a_input.jsonl", tmp_path / "b_output.jsonl"], [tmp_path]):
        dataset = load_trees(files, tokenizer, num_workers=0)
        assert (len(dataset), dataset.report.num_trajectories) == (1, 1)
        reasons = "\n".join(reason for _, reason in dataset.report.dropped)
        assert "'r2') of which the output file is not given" in reasons
        assert "too long" in reasons
    write(answered, name="b_output.jsonl")
    with pytest.raises(DataError, match="input file is not given"):
        load_trees(tmp_path / "b_output.jsonl", tokenizer, num_workers=0)
    with pytest.raises(DataError, match=r"nothing to train on.*output file is not given"):
        list(import_rollouts(tmp_path / "a_input.jsonl"))


@pytest.mark.parametrize("text", ["[1, 2]", '{"answer": 4}', "[]", "{}"])
@pytest.mark.parametrize("name", ["langfuse", "response as text"])
def test_a_reply_whose_text_is_json_is_that_text(write, name, text):
    [line] = FLAT[name]
    [row] = import_rollouts(write({**line, "output" if name == "langfuse" else "response": text}))
    assert talks(row) == [(["Hi"], text)]


def test_content_in_parts_of_text_goes_on_with_the_same_conversation(write):
    parts = {**USER, "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    answer = {**ANSWER, "content": [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]}
    lines = {"messages": [parts], "response": ANSWER}, {"messages": [USER, answer, USER], "response": "No."}
    assert len(list(import_rollouts(write(*lines)))) == 1


def test_a_call_under_its_older_name_is_a_call(write):
    called = {"role": "assistant", "content": "Well.", "function_call": {"name": "look", "arguments": "{}"}}
    seen = {"role": "function", "name": "look", "content": "seen"}
    lines = {"messages": [USER], "response": called}, {"messages": [USER, called, seen], "response": ANSWER}
    [row] = import_rollouts(write(*lines))
    assert [len(call["ctx"]) for call in row["calls"]] == [1, 3]
    assert row["messages"][1]["tool_calls"] == [{"type": "function", "function": called["function_call"]}]


def test_a_reply_with_a_call_that_langchain_could_not_read_is_left_out(write):
    calls = {"tool_calls": [{"name": "look", "args": {}, "id": "1"}]}
    calls |= {"invalid_tool_calls": [{"name": "look", "args": "{bad", "id": "2", "error": "no JSON"}]}
    bad, good = ({"type": "ai", "content": "Well.", **more} for more in (calls, {}))
    lines = [
        {"run_type": "llm", "trace_id": name, "inputs": {"messages": [USER]}, "outputs": {"message": message}}
        for name, message in (("a", bad), ("b", good))
    ]
    rows = import_rollouts(write(*lines))
    assert [row["rollout"] for row in rows] == ["b"]
    assert "arguments are no JSON object" in rows.report.left_out[0][1]


@pytest.mark.parametrize("half", [0, 1])
def test_an_id_that_a_batch_holds_twice_is_an_error(write, half):
    twice = [*FLAT["batch"], FLAT["batch"][half]]
    path = write(twice[half], *twice)
    with pytest.raises(DataError, match=r"data.jsonl:\d: a second batch .* with custom_id 'r1', after .*:\d;"):
        list(import_rollouts(path))


def test_each_of_several_generations_is_trained(write):
    generations = [[{"text": "one"}, {"message": {"type": "ai", "content": "two"}}]]
    call = {"run_type": "llm", "trace_id": "t", "inputs": {"messages": [USER]}, "outputs": {"generations": generations}}
    [row] = import_rollouts(write(call))
    assert talks(row) == [(["Hi"], "one"), (["Hi"], "two")]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"traceId": "t", "type": "GENERATION", "input": 3, "output": "x"}, "records:0: the input of a call must be"),
        ({"id": "t", "observations": ["o1"]}, "export them in full"),
        ({"request": {"messages": []}, "response": {"choices": [{"message": ANSWER}]}}, r"calls\[0\] has an empty ctx"),
        ({"run_type": "llm", "inputs": {"messages": [{"content": "x"}]}}, "a message without a role"),
    ],
)
def test_what_cannot_be_read_is_an_error(tokenizer, record, words):
    with pytest.raises(DataError, match=words):
        load_trees([record], tokenizer, num_workers=0)


def test_a_chat_with_its_reply_keeps_its_form(tokenizer):
    dataset = load_trees([{"messages": [USER, ANSWER], "response": "Yes."}], tokenizer, num_workers=0)
    assert dataset.report.unused_keys == {"response": 1}
