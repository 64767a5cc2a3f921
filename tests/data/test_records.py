"""Any record, however strange, gives rows or a `DataError`: values of valid records are replaced at random places."""

import copy
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.data import RenderOptions, load_trees
from treewise.data.io.files import RawRecord
from treewise.data.io.rows import rows_to_table, table_columns, trajectories_of
from treewise.data.records import RecordReader
from treewise.errors import DataError

USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
VALID = [
    {
        "messages": [USER, {**ANSWER, "reasoning_content": "r", "weight": 1.0, "tool_calls": [CALL]}, ANSWER],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "group": "g",
        "reward": 1.0,
    },
    {"prompt": [USER], "completion": [ANSWER], "group": "x"},
    {"messages": [USER, {**ANSWER, "finish_reason": "length", "stop_sequence": "a"}], "finish_reason": "stop"},
    {"messages": [USER, ANSWER], "calls": [{"ctx": [0], "out": 1, "finish_reason": "length"}]},
    {"prompt": "p", "completion": "c"},
    {"token_ids": [1, 2, 3], "loss_weights": [0, 1, 1], "old_logprobs": [0, -1, -1], "messages": [USER, ANSWER]},
    {"seqs": [{"ids": [1, 2, 3], "loss": [[1, 2]], "reward": 1, "behaviour_logprobs": [-1]}], "group": "g"},
    {"messages": [USER, ANSWER, USER], "calls": [{"ctx": [0], "out": 1}, {"ctx": [0, 1, 2], "out": 1}]},
    {"nodes": [{"id": "a", "parent": None, "token_ids": [1, 2]}, {"id": "b", "parent": "a", "token_ids": [3]}]},
    {"nodes": [{"parent": None, "message": USER}, {"parent": 0, "message": ANSWER}]},
    {"tree": "t", "id": "a", "parent": None, "token_ids": [1, 2]},
]
STRANGE = [None, 0, 1, -1, 2.5, True, "", "x", "{}", "[1]", [], {}, [1], [None], ["x"], {"a": 1}, [[1]], [{}]]
STRANGE += [float("inf"), float("nan"), 10**30, 1e39, "\x00", "<|im_end|>", [[[1]]]]


@pytest.fixture(scope="module")
def readers(tokenizer):
    options = [
        RenderOptions(chat_template="chatml"),
        RenderOptions(chat_template="chatml", thinking="keep"),
        RenderOptions(group_by="group"),
    ]
    return [RecordReader(tokenizer, option) for option in options] + [RecordReader(None, RenderOptions())]


@given(st.integers(0, 2**32))
def test_strange_values_give_rows_or_a_data_error(readers, seed):
    rng = random.Random(seed)
    record = _changed(rng.choice(VALID), rng)
    result = rng.choice(readers).read(RawRecord("f:1", json.dumps(record).encode()), Path("f.jsonl"))
    if result.error is not None:
        assert result.error.startswith("f:1")
    elif result.rows:
        columns = table_columns(rows_to_table([0] * len(result.rows), result.rows))
        if columns["parent"][0] is None:
            assert [len(item) for item in trajectories_of(columns)] == [row.num_tokens for row in result.rows]


def _changed(record, rng):
    record = copy.deepcopy(record)
    places = [(holder, key) for holder in _holders(record) for key in _keys(holder)]
    holder, key = rng.choice(places)
    if rng.random() < 0.9:
        holder[key] = copy.deepcopy(rng.choice(STRANGE))
    else:
        del holder[key]
    return record


def _holders(value):
    if isinstance(value, dict | list):
        yield value
        for key in _keys(value):
            yield from _holders(value[key])


def _keys(holder):
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


FORMS = {
    "messages": ({"messages": [USER, ANSWER]}, "a"),
    "prompt and completion as messages": ({"prompt": [USER], "completion": [ANSWER]}, "a"),
    "a completion as text": ({"prompt": [USER], "completion": "a"}, "a"),
    "texts": ({"prompt": "p", "completion": "c"}, "c"),
    "a labelled completion": ({"prompt": [USER], "completion": [ANSWER], "label": True}, "a"),
    "plain text": ({"text": "one two"}, " two"),
}
END = "<|im_end|>"


def trained(reader, record):
    result = reader.read(RawRecord("a:1", record), None)
    assert result.error is None, result.error
    if not result.rows:
        return result.left_out
    items = trajectories_of(table_columns(rows_to_table([0] * len(result.rows), result.rows)))
    return [reader.tokenizer.decode(item.token_ids[item.loss_weights > 0]) for item in items]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["finish_reason", "stop_reason"])
def test_a_record_says_beside_its_messages_how_its_reply_ended(form, key, tokenizer):
    record, text = FORMS[form]
    reader = RecordReader(tokenizer, RenderOptions())
    assert trained(reader, record) == trained(reader, {**record, key: "end_turn"}) == [text + END]
    assert trained(reader, {**record, key: "max_tokens"}) == [text]
    assert trained(reader, {**record, "truncated": True}) == [text]
    assert trained(reader, {**record, "truncated": False}) == [text + END]
    [(location, why)] = trained(reader, {**record, key: "content_filter"})
    assert location.startswith("a:1")
    assert why == "a reply that ended with 'content_filter'"


def test_a_preference_pair_says_it_in_its_messages_alone(tokenizer):
    reader = RecordReader(tokenizer, RenderOptions())
    record = {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b", "finish_reason": "length"}]}
    assert trained(reader, record) == [f"a{END}", "b"]
    result = reader.read(RawRecord("a:1", {**record, "finish_reason": "length"}), None)
    assert result.unused_keys == ["finish_reason"]


def test_a_declared_node_of_a_reply_that_failed_is_context(tokenizer):
    reader = RecordReader(tokenizer, RenderOptions())
    nodes = [{"id": "a", "parent": None, "message": USER}]
    nodes += [{"id": "b", "parent": "a", "message": {**ANSWER, "finish_reason": "error"}}]
    nodes += [{"id": "c", "parent": "b", "message": USER}, {"id": "d", "parent": "c", "message": ANSWER}]
    result = reader.read(RawRecord("a:1", {"nodes": nodes}), None)
    assert [(row.source, row.rollout) for row in result.rows] == [("a:1: nodes[3]", "a:1: nodes[3]")]
    assert result.left_out == [("a:1: nodes[1]", "a reply that ended with 'error'")]


def test_plain_text_is_trained_but_for_its_first_token(tokenizer):
    result = RecordReader(tokenizer, RenderOptions()).read(RawRecord("a:1", {"text": "2+2=4"}), None)
    (item,) = trajectories_of(table_columns(rows_to_table([0], result.rows)))
    assert tokenizer.decode(item.token_ids) == "2+2=4" + tokenizer.eos_token
    assert item.loss_weights.tolist() == [0, *[1] * (len(item) - 1)]
    assert RecordReader(tokenizer, RenderOptions()).read(RawRecord("a:1", {"text": 5}), None).error == (
        "a:1: text must be text, found 5."
    )


HALF = "\ud83d"
HALF_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": HALF}}}
HALVES = {
    "text": {"text": f"a{HALF}"},
    "content": {"messages": [{"role": "user", "content": HALF}, ANSWER]},
    "answer": {"messages": [USER, {**ANSWER, "content": f"b{HALF}c"}]},
    "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}, ANSWER]},
    "reasoning": {"messages": [USER, {**ANSWER, "reasoning_content": HALF}]},
    "arguments": {"messages": [USER, {**ANSWER, "tool_calls": [HALF_CALL]}]},
    "tools": {"messages": [USER, ANSWER], "tools": [{"type": "function", "function": {"name": HALF}}]},
    "tuple": {"messages": ({"role": "user", "content": HALF}, ANSWER)},
    "pair": {"prompt": HALF, "completion": "b"},
    "preference": {"prompt": "a", "chosen": "b", "rejected": HALF},
    "node": {"nodes": [{"parent": None, "message": {"role": "user", "content": HALF}}]},
    "calls": {"messages": [{"role": "user", "content": HALF}, ANSWER], "calls": [{"ctx": [0], "out": 1}]},
    "log": {"request": {"messages": [{"role": "user", "content": HALF}]}, "response": {"choices": []}},
    "group": {"messages": [USER, ANSWER], "group": HALF},
    "key": {"messages": [USER, ANSWER], f"a{HALF}": 1},
    "among numbers": {"messages": [USER, ANSWER], "other": [1, HALF]},
}


@pytest.mark.parametrize("name", HALVES)
def test_half_of_a_surrogate_pair_is_an_error_that_names_the_record(name, tokenizer, tmp_path):
    for data in ([HALVES[name]], iter([HALVES[name]])):
        with pytest.raises(DataError, match=r"records:0: lone surrogate \\ud83d is not text"):
            load_trees(data, tokenizer, num_workers=0)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(HALVES[name]) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: lone surrogate \\ud83d at byte \d+ of the file is not text"):
        load_trees(path, tokenizer, num_workers=0)


def test_half_of_a_surrogate_pair_in_a_file_of_tools_is_an_error(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [USER, ANSWER], "tools_ref": "a"}) + "\n")
    (tmp_path / "tools.json").write_text(json.dumps({"a": HALVES["tools"]["tools"]}))
    with pytest.raises(DataError, match=r"tools\.json: lone surrogate \\ud83d is not text"):
        load_trees(tmp_path / "rows.jsonl", tokenizer, num_workers=0)
