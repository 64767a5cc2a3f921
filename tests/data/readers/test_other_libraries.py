"""Each form of another library is read as the record of ours that says the same."""

import pytest

from treewise.data import load_trees
from treewise.errors import DataError

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
SAME = {
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"messages": CHAT},
    ),
    "no tools": (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "tools": ""},
        {"messages": CHAT},
    ),
    "system": (
        {"system": "Be brief.", "conversations": [{"from": "user", "value": "2+2?"}, {"from": "model", "value": "4"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, *CHAT]},
    ),
    "weight": (
        {"conversations": [*CHAT[:1], {"from": "gpt", "value": "5", "weight": 0}, *CHAT]},
        {"messages": [*CHAT[:1], {"role": "assistant", "content": "5", "weight": 0}, *CHAT]},
    ),
    "loss": (
        {"messages": [*CHAT[:1], {"role": "assistant", "content": "5", "loss": False}, *CHAT]},
        {"messages": [*CHAT[:1], {"role": "assistant", "content": "5", "weight": 0}, *CHAT]},
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"prompt": [{"role": "user", "content": "Add.\n\n2, 2"}], "completion": CHAT[1:]},
    ),
    "history": (
        {"instruction": "2+2?", "output": "4", "history": [["1+1?", "2"]]},
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, *CHAT]},
    ),
    "labels": (
        {"input_ids": [1, 5, 6], "labels": [-100, -100, 6]},
        {"token_ids": [1, 5, 6], "loss_weights": [0, 0, 1]},
    ),
    "mask and padding": (
        {"input_ids": [0, 1, 5, 6, 0], "attention_mask": [0, 1, 1, 1, 0], "completion_mask": [0, 0, 1, 0, 0]},
        {"token_ids": [1, 5, 6], "loss_weights": [0, 1, 0]},
    ),
    "all ids": ({"input_ids": [1, 5, 6]}, {"token_ids": [1, 5, 6]}),
}


def streams(record, tokenizer):
    (tree,) = load_trees([record], tokenizer, options={"chat_template": "chatml"})
    return [(item.token_ids.tolist(), item.loss_weights.tolist()) for item in tree.trajectories]


@pytest.mark.parametrize("name", SAME)
def test_a_form_equals_ours(name, tokenizer):
    theirs, ours = SAME[name]
    assert streams(theirs, tokenizer) == streams(ours, tokenizer)


def test_function_calls_of_sharegpt_become_tool_calls(tokenizer):
    turns = [
        {"from": "human", "value": "2+?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]
    messages = [
        {"role": "user", "content": "2+?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    assert streams({"conversations": turns}, tokenizer) == streams({"messages": messages}, tokenizer)


BAD = {
    "unknown speaker": ({"conversations": [{"from": "humn", "value": "x"}]}, "Did you mean 'human'"),
    "no value": ({"conversations": [{"from": "gpt", "valeu": "x"}]}, "Did you mean 'valeu'"),
    "shifted labels": ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "not shifted"),
    "two masks": ({"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [0, 1]}, "labels and loss_mask"),
    "short labels": ({"input_ids": [1, 2, 3], "labels": [1]}, "1 labels for 3 input_ids"),
    "nested labels": ({"input_ids": [1, 2, 3], "labels": [[1], 2, 3]}, "labels is not a flat sequence of numbers"),
    "holes": ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "padding is at the ends only"),
    "mask": ({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0.5]}, "holds other values than 0 and 1"),
    "positions": ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 3]}, r"position_ids\[2\] is 3 behind 1"),
    "nested ids": (
        {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3, 4]]},
        r"array\(\[\[1, 2\], \[3, 4\]\]\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_an_error(name, tokenizer):
    record, words = BAD[name]
    with pytest.raises(DataError, match=words):
        load_trees([record], tokenizer)
