"""Logs of Anthropic's Messages and OpenAI's Responses: the rows are those of the same calls as chat completions."""

import json

import pytest

from treewise.data import RenderOptions, load_trees
from treewise.data.importers import import_rollouts
from treewise.data.importers.interfaces import HIDDEN
from treewise.data.render.canonical import canonical_all
from treewise.errors import DataError

FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
SYSTEM, ASK = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+2?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TURN = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL], "reasoning_content": "hm"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
ANSWER = {"role": "assistant", "content": "It is 3."}
TALK = [SYSTEM, ASK, TURN, RESULT]


def chat(talk, reply, reason=None):
    choice = {"message": reply, **({} if reason is None else {"finish_reason": reason})}
    return {"request": {"messages": talk, "tools": TOOLS}, "response": {"choices": [choice]}}


# -- the same calls by the other interfaces ---------------------------------------------------------------------------


def blocks(message):
    """A message in Anthropic's blocks."""
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    found = []
    if message.get("reasoning_content"):
        found.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "s"})
    if message["content"]:
        found.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        found.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return {"role": message["role"], "content": found}


def anthropic(talk, reply, reason="end_turn"):
    tools = [{"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}]
    request = {"model": "m", "max_tokens": 100, "tools": tools, "messages": [blocks(each) for each in talk[1:]]}
    request["system"] = [{"type": "text", "text": talk[0]["content"], "cache_control": {"type": "ephemeral"}}]
    response = {"id": "msg_1", "type": "message", "model": "m", "stop_reason": reason, "stop_sequence": None}
    return {"request": request, "response": {**response, **blocks(reply), "usage": {"input_tokens": 3}}}


def items(message):
    """A message as items of Responses."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    if message["role"] != "assistant":
        return [{"role": message["role"], "content": [{"type": "input_text", "text": message["content"]}]}]
    found = []
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        found.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
    if message["content"]:
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        found.append({"type": "message", "id": "m_1", "role": "assistant", "status": "completed", "content": content})
    for call in message.get("tool_calls", ()):
        found.append({"type": "function_call", "id": "f_1", "call_id": call["id"], **call["function"]})
    return found


def responses(talk, reply, reason=None):
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    asked = [item for message in talk[1:] for item in items(message)]
    request = {"model": "m", "instructions": talk[0]["content"], "input": asked, "tools": tools}
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": items(reply)}
    if reason is not None:
        response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"request": request, "response": response}


def assert_equal_rows(write, tokenizer, template, expected, lines):
    """Whether two logs train the same tokens, one of them also by way of rows that are written."""
    options = RenderOptions(chat_template=template)
    imported = write(*import_rollouts(write(*lines, name="log.jsonl")), name="rows.jsonl")
    found = []
    for path in (write(*expected), write(*lines, name="log.jsonl"), imported):
        trees = load_trees(path, tokenizer, options=options, num_workers=0)
        items = [item for tree in trees for item in tree.trajectories]
        found.append([(item.token_ids.tolist(), item.loss_weights.tolist(), item.rollout != "") for item in items])
    assert found[0]
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("interface", [anthropic, responses])
def test_a_run_is_read_as_its_chat_completions_are(interface, write, tokenizer, qwen3_template):
    expected = [chat(TALK[:2], TURN), chat(TALK, ANSWER)]
    lines = [interface(TALK[:2], TURN), interface(TALK, ANSWER)]
    lines[1]["response"]["id"] += "2"
    assert_equal_rows(write, tokenizer, qwen3_template, expected, lines)
    [row] = import_rollouts(write(*lines))
    assert [len(call["ctx"]) for call in row["calls"]] == [2, 4]
    assert row["tools"] == TOOLS


@pytest.mark.parametrize("interface", [anthropic, responses])
def test_a_reply_that_was_cut_off_has_no_end(interface, write, tokenizer, qwen3_template):
    lines = [interface(TALK[:2], ANSWER, "max_tokens")]
    assert_equal_rows(write, tokenizer, qwen3_template, [chat(TALK[:2], ANSWER, "length")], lines)


# -- Anthropic's Messages ---------------------------------------------------------------------------------------------


def test_results_of_tools_stand_in_front_of_what_the_user_says(write):
    line = anthropic(TALK, ANSWER)
    last = line["request"]["messages"][-1]["content"]
    last[0]["content"] = [{"type": "text", "text": "3"}]
    last[0]["is_error"] = False
    last.append({"type": "text", "text": "Well?"})
    [row] = import_rollouts(write(line))
    assert row["messages"][3:5] == [
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
    ]


def test_of_a_turn_that_the_request_began_only_the_reply_is_trained(write, tokenizer):
    line = anthropic([SYSTEM, ASK, {"role": "assistant", "content": "It is"}], {**ANSWER, "content": " 3."})
    path = write(line)
    [row] = import_rollouts(path)
    assert [row["messages"][index]["content"] for index in (*row["calls"][0]["ctx"], row["calls"][0]["out"])][1:] == [
        [{"type": "text", "text": "1+2?"}],
        "It is 3.",
    ]
    [item] = load_trees(path, tokenizer, num_workers=0)[0].trajectories
    assert tokenizer.decode(item.token_ids[item.loss_weights > 0]) == " 3.<|im_end|>"
    begun = anthropic([SYSTEM, ASK, {"role": "assistant", "content": "It is"}], TURN)
    rows = import_rollouts(write(begun, chat(TALK, ANSWER)))
    assert len(list(rows)) == 1
    assert "goes on from a turn which its request began" in rows.report.left_out[0][1]


def test_the_files_of_a_batch_of_messages_are_joined(write):
    line = anthropic(TALK[:2], ANSWER)
    asked = {"custom_id": "a", "params": line["request"]}
    for result, rows in (({"type": "succeeded", "message": line["response"]}, 1), ({"type": "expired"}, 0)):
        lines = [asked, {"custom_id": "a", "result": result}, chat(TALK, ANSWER)]
        found = import_rollouts(write(*lines), "openai")
        assert len(list(found)) == rows + 1
        assert [why for _, why in found.report.left_out] == ([] if rows else ["a call without a reply ('expired')"])


def test_an_error_is_no_reply(write):
    failed = {**anthropic(TALK[:2], ANSWER), "response": {"type": "error", "error": {"message": "Overloaded"}}}
    rows = import_rollouts(write(failed, chat(TALK, ANSWER)))
    assert len(list(rows)) == 1
    assert rows.report.left_out[0][1] == "a call without a reply ('Overloaded')"


@pytest.mark.parametrize("kind", ["document", "server_tool_use", "web_search_tool_result", "input_audio"])
def test_a_call_with_content_that_is_not_read_is_left_out(kind, write):
    line = anthropic(TALK[:2], ANSWER)
    line["request"]["messages"][0]["content"].append({"type": kind})
    rows = import_rollouts(write(line, chat(TALK, ANSWER)))
    assert len(list(rows)) == 1
    assert rows.report.left_out[0][1] == f"a message with content of type '{kind}', which is not read"


def test_tools_that_the_provider_runs_are_counted(write):
    line = anthropic(TALK[:2], ANSWER)
    line["request"]["tools"].append({"type": "web_search_20250305", "name": "web_search"})
    rows = import_rollouts(write(line))
    assert next(iter(rows))["tools"] == TOOLS
    assert rows.report.warnings == {"tools of type 'web_search_20250305', which are not read": 1}


def test_langchain_has_a_call_in_two_places_and_it_is_one(write):
    content = [{"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "c1", "name": "add", "input": {}}]
    message = {"type": "ai", "content": content, "tool_calls": [{"name": "add", "args": {}, "id": "c1"}]}
    run = {"run_type": "llm", "trace_id": "t", "inputs": {"messages": [ASK]}, "outputs": {"message": message}}
    [row] = import_rollouts(write(run))
    assert row["messages"][1]["content"] == content[:1]
    assert [call["function"] for call in row["messages"][1]["tool_calls"]] == [{"name": "add", "arguments": "{}"}]


def test_thinking_that_is_not_there_is_said(write):
    line = anthropic(TALK[:2], ANSWER)
    line["response"]["content"].insert(0, {"type": "redacted_thinking", "data": "x"})
    rows = import_rollouts(write(line))
    assert [row["messages"][-1]["content"] for row in rows] == [[{"type": "text", "text": "It is 3."}]]
    assert rows.report.warnings == {HIDDEN: 1}


# -- OpenAI's Responses -----------------------------------------------------------------------------------------------


def stateful():
    """Two calls, of which the second names the response of the first in place of what was said."""
    first, second = responses(TALK[:2], TURN), responses(TALK, ANSWER)
    second["request"] |= {"previous_response_id": "resp_1", "input": items(RESULT)}
    second["response"]["id"] = "resp_2"
    return [first, second]


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_call_that_names_an_earlier_response_goes_on_from_it(newest_first, write, tokenizer, qwen3_template):
    lines = stateful()[:: -1 if newest_first else 1]
    expected = [chat(TALK[:2], TURN), chat(TALK, ANSWER)]
    assert_equal_rows(write, tokenizer, qwen3_template, expected, lines)


def test_instructions_are_those_of_the_call(write):
    lines = stateful()
    lines[1]["request"]["instructions"] = "Be brief."
    [row] = import_rollouts(write(*lines))
    starts = [row["messages"][call["ctx"][0]]["content"] for call in row["calls"]]
    assert starts == ["Be kind.", "Be brief."]


def test_items_that_are_named_are_found(write):
    lines = stateful()
    asked = [*items(ASK), *({"type": "item_reference", "id": item["id"]} for item in items(TURN)), *items(RESULT)]
    lines[1]["request"] = {**lines[1]["request"], "input": asked, "previous_response_id": None}
    [row] = import_rollouts(write(*lines))
    whole = next(iter(import_rollouts(write(responses(TALK[:2], TURN), responses(TALK, ANSWER)))))
    assert [row[name] for name in ("messages", "calls")] == [whole[name] for name in ("messages", "calls")]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"previous_response_id": "resp_9"}, "a response which the log does not hold"),
        ({"conversation": "conv_1"}, "conversation is kept by the provider"),
        ({"prompt": {"id": "p"}}, "prompt is kept by the provider"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "names an item which the log does not hold"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "an item of type 'web_search_call', which is not read"),
        ({"input": ["Hi"]}, "an item that is no object, 'Hi'"),
    ],
)
def test_what_the_log_does_not_hold_is_left_out_and_counted(change, why, write):
    line = responses(TALK[:2], ANSWER)
    line["request"] |= change
    rows = import_rollouts(write(line, chat(TALK, ANSWER)))
    assert len(list(rows)) == 1
    assert why in rows.report.left_out[0][1]


def test_responses_that_name_one_another_in_a_circle_end(write):
    lines = stateful()
    lines[0]["request"]["previous_response_id"] = "resp_2"
    with pytest.raises(DataError, match="nothing to train on"):
        list(import_rollouts(write(*lines)))


def test_thoughts_behind_a_text_begin_another_turn(write):
    line = responses(TALK[:2], TURN)
    line["response"]["output"] = [*items({**TURN, "tool_calls": []}), *items({**TURN, "content": ""})]
    [row] = import_rollouts(write(line))
    assert [(len(call["ctx"]), row["messages"][call["out"]].get("tool_calls")) for call in row["calls"]] == [
        (2, None),
        (3, [CALL]),
    ]


def test_sums_of_reasoning_are_not_trained_and_said(write):
    line = responses(TALK[:2], ANSWER)
    line["response"]["output"].insert(0, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]})
    rows = import_rollouts(write(line))
    assert "reasoning_content" not in next(iter(rows))["messages"][-1]
    assert rows.report.warnings == {HIDDEN: 1}


def test_a_refusal_is_left_out_and_seen_by_what_follows(write):
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    first, second = responses(TALK[:2], ANSWER), responses(TALK[:2], ANSWER)
    first["response"] |= {"output": [refusal], "id": "r0"}
    second["request"]["input"] += [refusal, {"role": "user", "content": "Please."}]
    rows = import_rollouts(write(first, second))
    [row] = rows
    assert [why for _, why in rows.report.left_out] == ["a reply that ended with 'refusal'"]
    assert [row["messages"][index]["content"] for index in row["calls"][0]["ctx"]][2] == "No."


@pytest.mark.parametrize("status", ["failed", "cancelled", "in_progress"])
def test_a_response_that_did_not_complete_is_left_out(status, write):
    line = responses(TALK[:2], ANSWER)
    line["response"] |= {"status": status, "error": {"message": "no"} if status == "failed" else None}
    rows = import_rollouts(write(line, chat(TALK, ANSWER)))
    assert len(list(rows)) == 1
    assert len(rows.report.left_out) == 1


def test_a_request_of_embeddings_is_no_chat_call(write):
    line = {"request": {"input": "Hi", "model": "e"}, "response": {"object": "list", "data": [{"embedding": [1.0]}]}}
    rows = import_rollouts(write(line, chat(TALK, ANSWER)))
    assert len(list(rows)) == 1
    assert rows.report.left_out[0][1] == "no chat call (its request has no messages)"


@pytest.mark.parametrize("interface", [anthropic, responses])
def test_an_export_of_langfuse_holds_these_calls_too(interface, write):
    """As its wrappers of the SDKs and OpenTelemetry write them: a request as input, a response, or its content."""
    for make in (lambda response: response, lambda response: response.get("output", response)):
        lines = []
        for number, (talk, reply) in enumerate(((TALK[:2], TURN), (TALK, ANSWER))):
            call = interface(talk, reply)
            call["response"]["id"] += str(number)
            line = {"id": str(number), "traceId": "t", "type": "GENERATION", "input": call["request"]}
            lines.append({**line, "output": make(call["response"])})
        [row] = import_rollouts(write(*lines))
        whole = next(iter(import_rollouts(write(interface(TALK[:2], TURN), interface(TALK, ANSWER)))))
        assert canonical_all(row["messages"]) == canonical_all(whole["messages"])
        assert [row[name] for name in ("calls", "tools")] == [whole[name] for name in ("calls", "tools")]
