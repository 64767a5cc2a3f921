"""Which calls of a log are one run, in which order, and each of them once: whatever wrote the log, and how."""

import json
import random
from datetime import UTC, datetime

import pytest

from treewise import advantages
from treewise.data import load_trees
from treewise.data.importers import import_rollouts
from treewise.data.importers.runs import AMBIGUOUS, NO_CLOCK, NOT_SHOWN, ONE_CALL, REWARDS, TWICE
from treewise.data.render.canonical import content_text

ASK = {"role": "user", "content": "Which city is largest?"}
SECONDS = 1_767_225_600


def assistant(text):
    return {"role": "assistant", "content": text}


def user(text):
    return {"role": "user", "content": text}


# (run, its messages, its reply, the second in which it was made, its reward)
CALLS = [
    ("a", [ASK], "Rome.", 10.0, 0.0),
    ("b", [ASK], "Tokyo.", 11.0, 1.0),
    ("c", [ASK], "I look.", 12.0, None),
    ("d", [ASK], "I guess.", 12.25, None),
    ("c", [ASK, assistant("I look."), user("seen c")], "Tokyo!", 12.5, 1.0),
    ("d", [ASK, assistant("I guess."), user("seen d")], "Paris!", 13.0, 0.0),
]


def iso(seconds):
    """As JavaScript writes it, but for whole seconds, which Python writes without a fraction."""
    return datetime.fromtimestamp(SECONDS + seconds, UTC).isoformat().replace("+00:00", "Z")


def langfuse(run, talk, text, seconds, reward):
    line = {"id": f"{run}{seconds}", "traceId": run, "type": "GENERATION", "startTime": iso(seconds)}
    scores = {} if reward is None else {"scores": [{"name": "right", "value": reward}]}
    return {**line, "input": {"messages": talk}, "output": assistant(text), **scores}


def langsmith(run, talk, text, seconds, reward):
    stats = {} if reward is None else {"feedback_stats": {"right": {"n": 1, "avg": reward}}}
    line = {"id": f"{run}{seconds}", "trace_id": run, "run_type": "llm", "start_time": iso(seconds), **stats}
    return {**line, "inputs": {"messages": talk}, "outputs": assistant(text)}


def openai(run, talk, text, seconds, reward, **times):
    label = {} if reward is None else {"reward": reward}
    response = {"id": f"{run}{seconds}", "choices": [{"message": assistant(text)}]}
    return {"request": {"messages": talk}, "response": response, "session_id": run, **label, **times}


def openai_iso(run, talk, text, seconds, reward):
    return openai(run, talk, text, seconds, reward, timestamp=iso(seconds))


def openai_milliseconds(run, talk, text, seconds, reward):
    return openai(run, talk, text, seconds, reward, ts=int(1000 * (SECONDS + seconds)))


def openai_created(run, talk, text, seconds, reward):
    """By the server's whole seconds, of which two calls share one."""
    line = openai(run, talk, text, seconds, reward)
    line["response"]["created"] = SECONDS + int(seconds)
    return line


def anthropic(run, talk, text, seconds, reward):
    line = openai(run, talk, text, seconds, reward, timestamp=iso(seconds))
    response = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": text}]}
    return {**line, "response": {**response, "stop_reason": "end_turn"}}


def responses(run, talk, text, seconds, reward):
    items = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    response = {"object": "response", "status": "completed", "output": items, "created_at": SECONDS + seconds}
    line = openai(run, talk, text, seconds, reward)
    return {**line, "request": {"input": talk}, "response": response}


def unnamed(run, talk, text, seconds, reward):
    line = openai(run, talk, text, seconds, reward, timestamp=iso(seconds))
    del line["session_id"]
    return line


def unnamed_without_a_time(run, talk, text, seconds, reward):
    line = unnamed(run, talk, text, seconds, reward)
    del line["timestamp"]
    return line


def litellm(run, talk, text, seconds, reward):
    """A trace per call, as LiteLLM logs it."""
    line = {"id": f"{run}{seconds}", "trace_id": f"t{seconds}", "startTime": SECONDS + seconds, "messages": talk}
    line |= {"response": {"choices": [{"message": assistant(text)}]}, "call_type": "acompletion"}
    label = {} if reward is None else {"reward": reward}
    return {**line, "metadata": {"requester_metadata": {"session_id": run}, **label}}


EXPORTERS = (
    *(langfuse, langsmith, openai, openai_iso, openai_milliseconds, openai_created, anthropic, responses, unnamed),
    *(unnamed_without_a_time, litellm),
)
ORDERS = {
    "oldest first": lambda lines: lines,
    "newest first": lambda lines: lines[::-1],
    "in no order": lambda lines: random.Random(3).sample(lines, len(lines)),
    "by run": lambda lines: sorted(lines, key=json.dumps),
}


def facts(rows):
    """Of every rollout its group, its reward and its calls."""
    found = []
    for row in rows:
        texts = [content_text(message["content"]) for message in row["messages"]]
        calls = [([texts[index] for index in call["ctx"]], texts[call["out"]]) for call in row["calls"]]
        found.append((row["group"], row["reward"], calls))
    return sorted(found, key=repr)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("exporter", EXPORTERS, ids=lambda exporter: exporter.__name__)
def test_the_order_of_a_log_changes_nothing(exporter, order, write):
    lines = ORDERS[order]([exporter(*call) for call in CALLS])
    rows = import_rollouts(write(*lines))
    found = facts(rows)
    assert len({group for group, _, _ in found}) == 1
    assert [(reward, [reply for _, reply in calls]) for _, reward, calls in found] == [
        (0.0, ["I guess.", "Paris!"]),
        (0.0, ["Rome."]),
        (1.0, ["I look.", "Tokyo!"]),
        (1.0, ["Tokyo."]),
    ]
    assert not rows.report.left_out


@pytest.mark.parametrize("order", ["oldest first", "newest first"])
def test_runs_of_one_prompt_are_compared_with_one_another(order, write, tokenizer):
    path = write(*ORDERS[order]([langsmith(*call) for call in CALLS]))
    trees = load_trees(path, tokenizer, num_workers=0)
    items, _ = advantages.group_normalized([item for tree in trees for item in tree.labelled_trajectories()])
    values = {round(float(item.advantages[item.loss_weights > 0][0]), 3) for item in items}
    assert values == {-0.866, 0.866}


def test_the_last_reward_is_that_of_the_last_call(write):
    lines = [langfuse("a", [ASK], "I look.", 1.0, 0.0), langfuse("a", [ASK, assistant("I look.")], "Rome.", 2.5, 1.0)]
    for several in (lines, lines[::-1]):
        rows = import_rollouts(write(*several))
        assert [row["reward"] for row in rows] == [1.0]
        assert rows.report.warnings == {REWARDS: 1}


def test_the_calls_of_a_run_may_stand_in_several_files(write, tmp_path, tokenizer):
    write(*[openai_iso(*call) for call in CALLS[3:]], name="a.jsonl")
    write(*[openai_iso(*call) for call in CALLS[:3]], name="b.jsonl")
    whole = write(*[openai_iso(*call) for call in CALLS], name="whole.jsonl")
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert facts(import_rollouts(files)) == facts(import_rollouts(whole))
    one, two = (load_trees(path, tokenizer, num_workers=0) for path in (whole, files))
    assert [len(tree.trajectories) for tree in one] == [len(tree.trajectories) for tree in two] == [6]


def test_calls_of_which_only_some_have_a_time_stay_as_logged(write):
    rows = import_rollouts(write(openai_iso(*CALLS[2]), openai(*CALLS[4])))
    assert [reply for _, _, calls in facts(rows) for _, reply in calls] == ["I look.", "Tokyo!"]
    assert rows.report.warnings == {NO_CLOCK: 1}


# -- logged twice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("exporter", [e for e in EXPORTERS if not e.__name__.startswith("unnamed")])
def test_a_call_that_is_logged_twice_is_trained_once(exporter, order, write):
    lines = [exporter(*call) for call in CALLS]
    again = [{**line, "id": f"{line.get('id')}-again"} for line in lines]  # an observation's own id is no call's
    rows = import_rollouts(write(*ORDERS[order]([*lines, *again])))
    expected = facts(import_rollouts(write(*lines, name="once.jsonl")))
    assert facts(rows) == expected
    assert [why for _, why in rows.report.left_out] == [TWICE] * len(CALLS)


def test_calls_without_the_name_of_a_run_are_one_by_the_id_of_their_response(write):
    lines = [unnamed(*call) for call in CALLS]
    rows = import_rollouts(write(*lines, *lines))
    assert facts(rows) == facts(import_rollouts(write(*lines, name="once.jsonl")))
    assert [why for _, why in rows.report.left_out] == [TWICE] * len(CALLS)


def test_draws_that_are_equal_are_not_one(write):
    """A server's ids differ; so may runs. Choices of one response are draws, too."""
    first, second = (openai("a", [ASK], "Rome.", seconds, 1.0) for seconds in (1.0, 2.0))
    assert [len(row["calls"]) for row in import_rollouts(write(first, second))] == [2]
    assert len(list(import_rollouts(write(first, {**second, "session_id": "b"})))) == 2
    for line in (first, second):
        del line["response"]["id"]
    assert [len(row["calls"]) for row in import_rollouts(write(first, second))] == [1]
    first["response"]["choices"] *= 2
    [row] = import_rollouts(write(first, first))
    assert [call["out"] for call in row["calls"]] == [1, 1]


def test_other_tools_reasoning_or_text_make_another_call(write):
    line = openai("a", [ASK], "Rome.", 1.0, 1.0)
    del line["response"]["id"]
    others = [json.loads(json.dumps(line)) for _ in range(3)]
    others[0]["request"]["tools"] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    others[1]["response"]["choices"][0]["message"]["reasoning"] = "Hm."
    others[2]["response"]["choices"][0]["message"]["content"] = "Rome. "
    rows = import_rollouts(write(line, *others))
    assert sum(len(row["calls"]) for row in rows) == 4
    assert not rows.report.left_out


def test_of_a_call_that_is_logged_twice_what_says_more_is_kept(write):
    line = openai("a", [ASK], "Rome.", 1.0, None)
    whole = json.loads(json.dumps(line))
    whole["response"] |= {"prompt_token_ids": [1, 5]}
    whole["response"]["choices"][0] |= {"token_ids": [6, 2], "finish_reason": "stop"}
    for lines in ([line, whole], [whole, line]):
        [row] = import_rollouts(write(*[{**each, "reward": 1.0} if each is line else each for each in lines]))
        assert (row["token_ids"], row["reward"]) == ([1, 5, 6, 2], 1.0)


# -- without the name of a run ----------------------------------------------------------------------------------------

LOOK = {"name": "get", "arguments": '{"city":"Rome","at":1}'}


def call(**more):
    return {"id": "c1", "type": "function", "function": LOOK, **more}


def called(**more):
    return {**CALLED, "tool_calls": [call(function={**LOOK, **more})]}


CALLED = {"role": "assistant", "content": "I look.\n", "tool_calls": [call(index=0)]}
SPELLINGS = {
    "without its index": {**CALLED, "tool_calls": [call()]},
    "arguments respaced": called(arguments='{"at": 1, "city": "Rome"}'),
    "arguments as an object": called(arguments={"city": "Rome", "at": 1}),
    "without the line's end": {**CALLED, "content": "I look."},
    "in parts": {**CALLED, "content": [{"type": "text", "text": "I look."}]},
    "nulls": {**CALLED, "refusal": None, "audio": None, "name": None},
    "another id": {**CALLED, "tool_calls": [call(id="c9")]},
    "its reasoning dropped": {**CALLED, "content": "<think>\nhm\n</think>\n\nI look."},
}


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_call_that_comes_back_spelled_otherwise_is_of_its_run(name, newest_first, write):
    back = SPELLINGS[name]
    result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": "sunny"}
    lines = [{"request": {"messages": [ASK]}, "response": {"choices": [{"message": CALLED}]}}]
    later = {"messages": [ASK, back, result]}
    lines.append({"request": later, "response": {"choices": [{"message": assistant("Sunny.")}]}, "reward": 1.0})
    [row] = import_rollouts(write(*lines[:: -1 if newest_first else 1]))
    assert row["reward"] == 1.0
    assert [len(each["ctx"]) for each in row["calls"]] == [1, 3]
    written = row["messages"][row["calls"][0]["out"]]
    assert written["tool_calls"] == [call(index=0)]  # as it was sampled


@pytest.mark.parametrize(
    "back", [{**CALLED, "content": "I saw."}, {**CALLED, "tool_calls": [call(function={**LOOK, "name": "put"})]}]
)
def test_another_reply_is_of_another_run(back, write):
    later = {"messages": [ASK, back, user("Go on.")]}
    lines = [{"request": {"messages": [ASK]}, "response": {"choices": [{"message": CALLED}]}}]
    lines.append({"request": later, "response": {"choices": [{"message": assistant("Sunny.")}]}})
    assert len(list(import_rollouts(write(*lines)))) == 2


def test_requests_alone_are_read_in_any_order(write):
    talk = [ASK, assistant("I look."), user("seen"), assistant("Rome."), user("Thanks.")]
    requests = [{"request": {"messages": talk[:size]}} for size in (1, 3, 5)]
    for lines in (requests, requests[::-1], [requests[1], requests[2], requests[0]]):
        rows = import_rollouts(write(*lines))
        [row] = rows
        assert [len(each["ctx"]) for each in row["calls"]] == [1, 3]
        assert [why for _, why in rows.report.left_out] == [NOT_SHOWN]


def test_equal_calls_without_names_are_shared_out_and_said(write):
    lines = [unnamed(run, *CALLS[2][1:]) for run in "ab"] + [unnamed(run, *CALLS[4][1:]) for run in "ab"]
    for line in lines:
        del line["response"]["id"]
    rows = import_rollouts(write(*lines))
    assert [len(row["calls"]) for row in rows] == [2, 2]
    assert rows.report.warnings == {AMBIGUOUS: 2}


@pytest.mark.parametrize("name", [0, "0", 0.0])
def test_a_run_may_be_number_0(name, write):
    lines = [{**openai(*each), "session_id": name} for each in (CALLS[2], CALLS[4])]
    rows = list(import_rollouts(write(*lines)))
    assert [(row["rollout"], len(row["calls"])) for row in rows] == [("0", 2)]


# -- sessions ---------------------------------------------------------------------------------------------------------


def traced(trace, session, number):
    """A trace of one call, as langfuse exports it."""
    observation = langfuse(trace, *CALLS[number][1:])
    scores = observation.pop("scores", [])
    return {"id": trace, "sessionId": session, "observations": [observation], "scores": scores}


def test_a_session_is_a_run_where_its_traces_hold_one_call(write):
    lines = [traced("t1", "s1", 2), traced("t2", "s1", 4), traced("t3", "s2", 3), traced("t4", "s2", 5)]
    for several in (lines, lines[::-1]):
        rows = import_rollouts(write(*several))
        found = {(row["rollout"], row["reward"], len(row["calls"])) for row in rows}
        assert found == {("s1", 1.0, 2), ("s2", 0.0, 2)}
        assert rows.report.num_groups == 1
        assert rows.report.warnings == {ONE_CALL: 2}


def test_a_session_whose_traces_are_runs_is_none(write):
    one, two = traced("t1", "s1", 2), traced("t2", "s1", 0)
    one["observations"] += traced("t1", "s1", 4)["observations"]
    rows = import_rollouts(write(one, two))
    assert sorted(row["rollout"] for row in rows) == ["t1", "t2"]
    assert not rows.report.warnings
    assert [row["rollout"] for row in import_rollouts(write(traced("t1", "s1", 2)))] == ["t1"]


def test_a_call_that_two_handlers_log_into_traces_of_their_own_is_one(write):
    lines = [traced("t1", "s1", 2), traced("t2", "s1", 4), traced("u1", "s1", 2), traced("u2", "s1", 4)]
    rows = import_rollouts(write(*lines))
    assert [(row["rollout"], len(row["calls"])) for row in rows] == [("s1", 2)]
    assert [why for _, why in rows.report.left_out] == [TWICE] * 2


@pytest.mark.parametrize("name", ["session_id", "thread_id", "conversation_id"])
def test_threads_of_langsmith_are_sessions_and_its_projects_are_not(name, write):
    lines = [langsmith(f"t{number}", *CALLS[number][1:]) | {"session_id": "project"} for number in (2, 4)]
    assert len(list(import_rollouts(write(*lines)))) == 2
    threads = [{**line, "extra": {"metadata": {name: "s1"}}} for line in lines]
    assert [row["rollout"] for row in import_rollouts(write(*threads))] == ["s1"]


@pytest.mark.parametrize("place", ["observation", "metadata"])
def test_a_session_may_stand_at_the_observation(place, write):
    named = {"sessionId": "s1"} if place == "observation" else {"metadata": {"session_id": "s1"}}
    lines = [{**langfuse(f"t{number}", *CALLS[number][1:]), **named} for number in (2, 4)]
    rows = import_rollouts(write(*lines))
    assert [(row["rollout"], row["reward"]) for row in rows] == [("s1", 1.0)]
