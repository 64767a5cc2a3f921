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


TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "function", "function": TOOL}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {}}]}
CALLED["tool_calls"][0]["function"] |= {"name": "look", "arguments": '{"at":1}'}
TEXTS = [{**ANSWER, "content": text} for text in ("one", "two")]


def logged(output, messages=(USER,), **more):
    return {"traceId": "t", "type": "GENERATION", "input": [*messages], "output": output, **more}


@pytest.mark.parametrize("output", [TEXTS, {"messages": TEXTS}, json.dumps(TEXTS), {"output": TEXTS}])
def test_several_messages_of_the_model_are_choices(write, output):
    """As langfuse's wrapper of the SDK writes `n`, and as OpenTelemetry's output messages are defined."""
    [row] = import_rollouts(write(logged(output)))
    assert talks(row) == [(["Hi"], "one"), (["Hi"], "two")]


def test_what_an_agent_did_is_no_reply_unless_it_repeats_the_call(write):
    seen = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    [row] = import_rollouts(write(logged({"messages": [USER, ANSWER]})))
    assert talks(row) == [(["Hi"], "Yes.")]
    for output in ([CALLED, seen, ANSWER], [USER, CALLED, seen, ANSWER], [USER, ANSWER, ANSWER], [USER]):
        rows = import_rollouts(write(logged({"messages": output}), logged("Yes.", traceId="other")))
        assert [row["rollout"] for row in rows] == ["other"]
        [(location, reason)] = rows.report.left_out
        assert location.endswith(":1")
        assert f"{len(output)} messages, of which one alone is no reply" in reason


def test_blocks_of_content_are_one_message_and_items_of_responses_are_read(write):
    blocks = [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]
    [row] = import_rollouts(write(logged(blocks)))
    assert row["messages"][1]["content"] == blocks
    items = [{"type": "reasoning", "summary": []}, {"type": "message", "role": "assistant", "content": blocks}]
    for output in (items, {"object": "response", "output": items}):
        [row] = import_rollouts(write(logged(output)))
        assert talks(row) == [(["Hi"], "Yes.")]
    asked = {"instructions": "Short.", "input": "Hi"}
    for given, first in (
        (asked, ["Short."]),
        ({"input": [USER]}, []),
        ({"input": "Hi"}, []),
        ([*items, USER], ["Yes."]),
    ):
        [row] = import_rollouts(write({**logged(items), "input": given}))
        assert talks(row) == [([*first, "Hi"], "Yes.")]


def test_messages_of_opentelemetry_are_read_in_parts(write):
    def message(role, *parts):
        return {"role": role, "parts": list(parts)}

    called = message("assistant", {"type": "reasoning", "content": "Hm."}, {"type": "tool_call", "id": "c"})
    called["parts"][1] |= {"name": "look", "arguments": {"at": 1}}
    results = [{"type": "tool_call_response", "id": "c", "response": "seen"}]
    results.append({"type": "tool_call_response", "id": "d", "result": {"a": 1}})
    asked = [message("user", {"type": "text", "content": "Hi"}), called, message("tool", *results)]
    answer = {**message("assistant", {"type": "text", "content": "Yes."}), "finish_reason": "length"}
    [row] = import_rollouts(write(logged([answer], asked)))
    assert row["messages"] == [
        USER,
        {**CALLED, "reasoning_content": "Hm.", "tool_calls": [CALLED["tool_calls"][0] | {"function": row_call(row)}]},
        {"role": "tool", "content": "seen", "tool_call_id": "c"},
        {"role": "tool", "content": '{"a": 1}', "tool_call_id": "d"},
        ANSWER,
    ]
    assert row_call(row) == {"name": "look", "arguments": '{"at": 1}'}
    assert row["calls"] == [{"ctx": [0, 1, 2, 3], "out": 4, "finish_reason": "length"}]
    with pytest.raises(DataError, match=r":1: a part of a message is \{'type': 'blob'"):
        list(import_rollouts(write(logged([answer], [message("user", {"type": "blob"})]))))


def row_call(row):
    return row["messages"][1]["tool_calls"][0]["function"]


FLAT_TOOL = {name: value for name, value in TOOL.items() if name != "parameters"}
WITH_TOOLS = {
    "functions": {"input": {"messages": [USER], "functions": [TOOL]}},
    "behind the messages": {"input": [USER, {"role": "tool", "content": SCHEMA}]},
    "Anthropic's": {"input": {"messages": [USER], "tools": [{**FLAT_TOOL, "input_schema": TOOL["parameters"]}]}},
    "flat": {"input": {"messages": [USER], "tools": [{"type": "function", **TOOL}]}},
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_arrive_whatever_wrote_them(write, name):
    [row] = import_rollouts(write({**logged("Yes."), **WITH_TOOLS[name]}))
    assert (row["tools"], talks(row)) == ([SCHEMA], [(["Hi"], "Yes.")])


def test_functions_of_other_logs_are_tools(write):
    flat = {"messages": [USER], "functions": [TOOL], "response": "Yes."}
    whole = {"request": {"messages": [USER], "functions": [TOOL]}, "response": {"choices": [{"message": ANSWER}]}}
    run = {"run_type": "llm", "trace_id": "t", "inputs": {"messages": [USER]}, "outputs": {"message": ANSWER}}
    for line in (flat, whole, {**run, "extra": {"invocation_params": {"functions": [TOOL]}}}):
        [row] = import_rollouts(write(line))
        assert row["tools"] == [SCHEMA]


def test_arguments_are_those_that_were_sampled_where_langchain_keeps_them(write):
    read = [{"name": "look", "args": {"at": 1}, "id": "c", "type": "tool_call"}]
    kept = {"tool_calls": CALLED["tool_calls"], "refusal": None}
    output = {"role": "assistant", "content": "", "tool_calls": read, "additional_kwargs": kept}
    [row] = import_rollouts(write(logged(output)))
    assert row["messages"][1]["tool_calls"] == CALLED["tool_calls"]


def test_what_stands_beside_the_content_of_a_message_is_counted_or_left_out(write):
    odd, seeing = {**USER, "mood": "good"}, {**USER, "images": ["iVBOR"]}
    rows = import_rollouts(write(logged("Yes.", [odd]), logged("Yes.", [seeing], traceId="other")))
    assert len(list(rows)) == 1
    assert rows.report.warnings == {"messages hold 'mood', which is not read": 1}
    assert "images beside its content" in rows.report.left_out[0][1]


def test_runs_and_groups_in_columns_of_floats_are_read(write):
    lines = [{"messages": [USER], "response": "Yes.", "session_id": 3.0, "task_id": 1.0}]
    lines.append({**lines[0], "session_id": 3, "task_id": 1, "messages": [ANSWER, USER]})
    [row] = import_rollouts(write(*lines))
    assert (row["rollout"], row["group"], len(row["calls"])) == ("3", 1, 2)


def test_a_system_prompt_beside_the_messages_is_the_first_of_them(write):
    """As Anthropic's requests have it."""
    asked, blocks = {"messages": [USER], "system": "Short."}, [{"type": "text", "text": "Yes."}]
    output = {"type": "message", "role": "assistant", "content": blocks, "stop_reason": "end_turn"}
    run = {"run_type": "llm", "trace_id": "t", "inputs": asked, "outputs": output}
    whole = {"request": asked, "response": {"choices": [{"message": ANSWER}]}}
    for line in ({**logged(output), "input": asked}, run, whole, {**asked, "response": "Yes."}):
        [row] = import_rollouts(write(line))
        assert row["messages"][0] == {"role": "system", "content": "Short."}
        assert [len(call["ctx"]) for call in row["calls"]] == [2]


def test_what_decides_a_prompt_beside_its_messages_is_counted(write):
    request = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    rows = import_rollouts(write({"request": request, "response": {"choices": [{"message": ANSWER}]}}))
    assert len(list(rows)) == 1
    assert "'chat_template_kwargs', which decides their prompts" in next(iter(rows.report.warnings))


def test_a_score_with_several_values_is_no_reward(write):
    """Those of a trace hold the scores of its observations, too."""
    scores = [{"name": "right", "value": value, "observationId": str(value)} for value in (1, 0)]
    trace = {"id": "t", "observations": [logged("Yes.")], "scores": [*scores, {"name": "short", "value": 1}]}
    for name, reward in (("right", None), ("short", 1.0), (None, 1.0)):
        rows = import_rollouts(write(trace), reward_field=name)
        [row] = rows
        assert row.get("reward") == reward
        assert any("several values of the score 'right'" in text for text in rows.report.warnings)
