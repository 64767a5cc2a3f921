"""How a reply ended decides what of it is trained, in every log; what is imported loads again, and trains."""

import json

import pytest

import treewise as tw
from treewise.data import RenderOptions, load_trees
from treewise.data.importers import import_rollouts
from treewise.errors import DataError
from treewise.testing import tiny_model

USER = {"role": "user", "content": "Which day is it?"}
END = "<|im_end|>"


def reply(text, **more):
    return {"role": "assistant", "content": text, **more}


def openai(text, reason):
    return {
        "request": {"messages": [USER]},
        "response": {"choices": [{"finish_reason": reason, "message": reply(text)}]},
    }


def flat(text, reason):
    return {"messages": [USER], "response": text, "finish_reason": reason}


def batch(text, reason):
    body = {"choices": [{"finish_reason": reason, "message": reply(text)}]}
    return [{"custom_id": "a", "body": {"messages": [USER]}}, {"custom_id": "a", "response": {"body": body}}]


def langfuse(text, reason):
    return {
        "traceId": "t",
        "type": "GENERATION",
        "input": [USER],
        "output": reply(text),
        "metadata": {"finish_reason": reason},
    }


def langfuse_of_anthropic(text, reason):
    output = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "stop_reason": reason,
    }
    return {"traceId": "t", "type": "GENERATION", "input": [USER], "output": output}


def langsmith(text, reason):
    kwargs = {"content": text, "response_metadata": {"finish_reason": reason}}
    message = {"lc": 1, "id": ["langchain", "schema", "messages", "AIMessage"], "kwargs": kwargs}
    outputs = {"generations": [[{"text": text, "message": message}]]}
    return {"run_type": "llm", "trace_id": "t", "inputs": {"messages": [USER]}, "outputs": outputs}


def langsmith_by_generation(text, reason):
    outputs = {
        "generations": [
            [{"message": {"type": "ai", "data": reply(text)}, "generation_info": {"finish_reason": reason}}]
        ]
    }
    return {"run_type": "llm", "trace_id": "t", "inputs": {"messages": [USER]}, "outputs": outputs}


def art(text, reason):
    choice = {"finish_reason": reason, "index": 0, "message": reply(text)}
    return {"trajectories": [{"reward": 1.0, "metrics": {}, "messages_and_choices": [USER, choice]}]}


def verifiers(text, reason):
    nodes = [{"parent": None, "message": USER, "sampled": False}]
    nodes.append({"parent": 0, "message": reply(text), "sampled": True, "finish_reason": reason})
    return {"id": "t", "task": {}, "agent": {}, "nodes": nodes, "rewards": {}, "ok": True}


def verifiers_call(text, reason):
    trace = verifiers(text, None)
    return {**trace, "calls": [{"node": 1, "model": "m", "finish_reason": reason}]}


def verifiers_result(text, reason):
    answer = reply(text, finish_reason=reason)
    return {"example_id": 1, "prompt": [USER], "completion": [answer], "reward": 1.0, "is_completed": True}


def trl(text, reason):
    return {"prompt": [USER], "completion": [reply(text)], "advantage": 1.0, "step": 1, "finish_reason": reason}


def chat(text, reason):
    return {"messages": [USER, reply(text)], "finish_reason": reason}


LOGS = (
    *(openai, flat, batch, langfuse, langfuse_of_anthropic, langsmith, langsmith_by_generation),
    *(art, verifiers, verifiers_call, verifiers_result, trl),
)


def trained(dataset, tokenizer):
    return [tokenizer.decode(item.token_ids[item.loss_weights > 0]) for tree in dataset for item in tree.trajectories]


def records(log, text, reason):
    made = log(text, reason)
    return made if isinstance(made, list) else [made]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.__name__)
def test_an_end_that_was_not_sampled_is_not_trained(log, write, tokenizer):
    expected = {"stop": f"Friday.{END}", "length": "Friday.", "max_tokens": "Friday.", "end_turn": f"Friday.{END}"}
    for reason, text in expected.items():
        path = write(*records(log, "Friday.", reason))
        rows = list(import_rollouts(path))
        written = write(*rows, name="rows.jsonl")
        for dataset in (load_trees(path, tokenizer, num_workers=0), load_trees(written, tokenizer, num_workers=0)):
            assert trained(dataset, tokenizer) == [text], reason
            [item] = dataset[0].trajectories
            assert item.loss_weights[-1] > 0  # nothing stands behind what was sampled


@pytest.mark.parametrize("log", [*LOGS, chat], ids=lambda log: log.__name__)
@pytest.mark.parametrize("reason", ["content_filter", "refusal", "error", "stop"])
def test_what_cannot_be_trained_is_left_out_and_counted(log, reason, write, tokenizer):
    text = "" if reason == "stop" else "Fri"
    path = write(*records(log, text, reason))
    with pytest.raises(DataError, match="left out"):
        load_trees(path, tokenizer, num_workers=0)
    if log is not chat:
        rows = import_rollouts(path)
        with pytest.raises(DataError, match="nothing to train on"):
            list(rows)
        [(location, why)] = rows.report.left_out
        assert location.startswith(str(path))
        assert repr(reason) in why or (log is flat and why == "a call without a reply")
    beside = write(*records(log, text, reason), *records(log, "Friday.", "stop"), name="both.jsonl")
    if log is not batch:  # whose lines have one name
        dataset = load_trees(beside, tokenizer, num_workers=0)
        assert trained(dataset, tokenizer) == [f"Friday.{END}"]
        assert len(dataset.report.dropped) == 1


def test_reasoning_alone_is_trained_where_it_was_cut_and_the_template_writes_it(write, tokenizer, qwen3_template):
    def call(reason):
        answer = {"role": "assistant", "content": None, "reasoning_content": "Let me count"}
        choice = {"finish_reason": reason, "message": answer}
        return {"request": {"messages": [USER]}, "response": {"choices": [choice]}}

    rows = import_rollouts(write(call("stop"), call("length")))
    [row] = rows
    assert rows.report.left_out[0][1] == "a reply that holds only reasoning and ended with 'stop'"
    path = write(row, name="rows.jsonl")
    dataset = load_trees(path, tokenizer, options=RenderOptions(chat_template=qwen3_template), num_workers=0)
    assert trained(dataset, tokenizer) == ["<think>\nLet me count"]
    with pytest.raises(
        DataError, match=r"left out.*reasoning alone that was cut off, which the chat template does not"
    ):
        load_trees(path, tokenizer, num_workers=0)
    with pytest.raises(DataError, match="nothing to train on"):  # with a tokenizer the import says so
        list(import_rollouts(path.with_name("data.jsonl"), tokenizer=tokenizer))


def test_a_stop_sequence_is_an_end_where_it_is_the_templates_own(write, tokenizer):
    def call(matched):
        choice = {"finish_reason": "stop", "stop_reason": matched, "message": reply("Friday.")}
        return {"request": {"messages": [USER]}, "response": {"choices": [choice]}, "rollout": str(matched)}

    path = write(*import_rollouts(write(call("</answer>"), call(END), call(2), call(None))), name="rows.jsonl")
    ends = [text.removeprefix("Friday.") for text in trained(load_trees(path, tokenizer, num_workers=0), tokenizer)]
    assert ends == ["", END, END, END]


def test_an_unknown_reason_is_said_and_trains_no_end(write, tokenizer):
    rows = import_rollouts(path := write(openai("Friday.", "lunch")))
    dataset = load_trees(write(*rows, name="rows.jsonl"), tokenizer, num_workers=0)
    assert trained(dataset, tokenizer) == ["Friday."]
    assert "replies that ended with 'lunch', which is not known" in next(iter(rows.report.warnings))
    assert "'lunch' is not known" in dataset.report.warnings[0]
    assert any("'lunch', which is not" in line for line in load_trees(path, tokenizer, num_workers=0).report.warnings)


def test_a_run_goes_on_behind_a_call_that_is_left_out(write):
    asked = [USER, reply("Fri"), {"role": "user", "content": "Go on."}]
    second = {"request": {"messages": asked}, "response": {"choices": [{"message": reply("Friday.")}]}}
    [row] = import_rollouts(write(openai("Fri", "content_filter"), second))
    other = next(iter(import_rollouts(write(openai("Friday.", "stop"), name="b.jsonl"))))
    assert [(call["ctx"], call["out"]) for call in row["calls"]] == [([0, 1, 2], 3)]
    assert row["rollout"].endswith("data.jsonl:1")  # it began with the call that is left out
    assert row["group"] == other["group"]


def test_a_refusal_is_what_the_model_sees_of_its_turn(write):
    refused = {"role": "assistant", "content": None, "refusal": "I cannot say."}
    second = {"request": {"messages": [USER, refused, USER]}, "response": {"choices": [{"message": reply("Friday.")}]}}
    first = {"request": {"messages": [USER]}, "response": {"choices": [{"finish_reason": "stop", "message": refused}]}}
    rows = import_rollouts(write(first, second))
    [row] = rows
    assert row["messages"][1]["content"] == "I cannot say."
    assert [why for _, why in rows.report.left_out] == ["a reply that ended with 'refusal'"]
    assert row["rollout"].endswith("data.jsonl:1")


def tool_call(arguments):
    return {"id": "c1", "type": "function", "function": {"name": "today", "arguments": arguments}}


@pytest.mark.parametrize("blank", ["", "  ", "\n"])
def test_blank_arguments_are_those_of_a_call_without_any(blank, write, tokenizer, qwen3_template):
    calls = {"role": "assistant", "content": "", "tool_calls": [tool_call(blank)]}
    talk = [USER, calls, {"role": "tool", "tool_call_id": "c1", "content": "Friday"}]
    lines = [{"request": {"messages": talk}, "response": {"choices": [{"message": reply("Friday.")}]}}]
    lines.append({"request": {"messages": [USER]}, "response": {"choices": [{"message": calls}]}})
    rows = import_rollouts(write(*lines))
    dataset = load_trees(
        write(*rows, name="rows.jsonl"), tokenizer, options=RenderOptions(chat_template=qwen3_template), num_workers=0
    )
    assert rows.report.warnings == {"tool calls with blank arguments are read as calls without any ({})": 2}
    texts = [tokenizer.decode(item.token_ids) for tree in dataset for item in tree.trajectories]
    assert len(texts) == 2
    assert all('{"name": "today", "arguments": {}}' in text for text in texts)


def test_arguments_in_pythons_notation_are_json(write):
    calls = {"role": "assistant", "content": "", "tool_calls": [tool_call("{'day': None}")]}
    rows = import_rollouts(write({"request": {"messages": [USER]}, "response": {"choices": [{"message": calls}]}}))
    [row] = rows
    assert row["messages"][1]["tool_calls"][0]["function"] == {"name": "today", "arguments": '{"day": null}'}
    assert rows.report.warnings == {"tool calls with arguments in Python's notation are read as JSON": 1}


@pytest.mark.parametrize("arguments", ["[]", "null", '{"a": 1', '"{\\"a\\": 1}"', "3", ["a"]])
def test_a_call_whose_arguments_are_no_object_is_left_out_with_what_follows(arguments, write):
    calls = {"role": "assistant", "content": "", "tool_calls": [tool_call(arguments)]}
    later = [USER, calls, {"role": "tool", "tool_call_id": "c1", "content": "no"}]
    lines = [
        {"request": {"messages": [USER]}, "response": {"choices": [{"message": calls}]}},
        {"request": {"messages": later}, "response": {"choices": [{"message": reply("Friday.")}]}},
        openai("Friday.", "stop") | {"rollout": "other"},
    ]
    rows = import_rollouts(write(*lines))
    [row] = rows
    assert row["rollout"] == "other"
    assert len(rows.report.left_out) == 2
    assert {why for _, why in rows.report.left_out} == {
        "a tool call whose arguments are no JSON object, so its sampled text is not known"
    }
    trajectory = {
        "reward": 1.0,
        "metrics": {},
        "messages_and_choices": [
            USER,
            {"finish_reason": "stop", "message": reply("a")},
            *later,
            {"finish_reason": "stop", "message": reply("b")},
        ],
    }
    rows = import_rollouts(write({"trajectories": [trajectory]}))
    [row] = rows
    assert [message["content"] for message in row["messages"]] == [USER["content"], "a", USER["content"]]
    assert "with all that follows it" in rows.report.left_out[0][1]


def test_text_that_would_not_load_stops_the_import(write):
    asked = [{"role": "narrator", "content": "Once."}]
    line = {"traceId": "t", "type": "GENERATION", "input": asked, "output": reply("Friday.")}
    with pytest.raises(DataError, match=r"data\.jsonl:1: messages\[0\] has role 'narrator'"):
        list(import_rollouts(write(line)))


def test_what_was_imported_trains(write, tokenizer):
    lines = [openai("Friday.", "stop"), openai("It is the day aft", "length"), openai("", "content_filter")]
    lines = [{**line, "reward": float(index == 0), "rollout": str(index)} for index, line in enumerate(lines)]
    path = write(*import_rollouts(write(*lines)), name="rows.jsonl")
    [tree] = load_trees(path, tokenizer, num_workers=0)
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=128)
    out = tw.TreeEngine(model).step(tree.forest(), tw.SFT())
    flat = tw.TreeEngine(model).step([tw.Forest.from_trajectories([item]) for item in tree.trajectories], tw.SFT())
    assert out.loss == pytest.approx(flat.loss, rel=1e-5)
    assert json.loads(path.read_text().splitlines()[1])["calls"][0]["finish_reason"] == "length"
