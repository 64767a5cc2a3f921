"""Any record, however strange, gives rows or a `DataError`: values of valid records are replaced at random places."""

import copy
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.data import RenderOptions
from treewise.data.io.files import RawRecord
from treewise.data.io.rows import rows_to_table, table_columns, trajectories_of
from treewise.data.records import RecordReader

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
