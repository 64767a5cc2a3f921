import json
import subprocess
import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest

from treewise.base.features import FEATURES
from treewise.data import load_trees
from treewise.data.io.forms import FORMS
from treewise.errors import ConfigError, DataError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
CHAT = {"messages": [USER, ANSWER]}
ROW = {"token_ids": [1, 5, 9], "loss_weights": [0, 1, 1]}

NEAR_MISSES = [
    ({"messages": [USER, {"role": "assistant", "contents": "Yes."}]}, "messages[1]: unknown key 'contents'", "content"),
    ({"messages": [USER, {**ANSWER, "wieght": 0.5}]}, "unknown key 'wieght'", "weight"),
    ({"messages": [USER, {**ANSWER, "tool_call": [1]}]}, "unknown key 'tool_call'", "tool_calls"),
    ({**ROW, "old_logprob": [0, -1, -1]}, "unknown key 'old_logprob'", "old_logprobs"),
    ({**ROW, "samplerLogprobs": [0, -1, -1]}, "unknown key 'samplerLogprobs'", "sampler_logprobs"),
    ({**CHAT, "rewards": 1.0}, "rewards is not a key here", "write it as reward,"),
    ({**CHAT, "group_id": "a"}, "'group_id' is not read", "write it as group"),
    ({**CHAT, "system": "Be brief."}, "'system' is not read", "in front of messages"),
    ({**CHAT, "images": ["a.png"]}, "the record holds images", "need the model's processor"),
    ({**CHAT, "train": False}, "train: false is for messages", "leave the record out"),
    ({**CHAT, "loss": False}, "loss: false is for messages", "leave the record out"),
    ({**CHAT, "weight": 0}, "weight: 0 is not read", "weights belong to messages and parts"),
    ({**CHAT, "calls": [{"ctx": [0], "out": 1, "weight": 0.5}]}, "calls[0]: weight: 0.5 is not", "weights belong to"),
    ({**CHAT, "calls": [{"ctx": [0], "out": 1, "train": False}]}, "calls[0]: train: false", "weights belong to"),
    ({"nodes": [{"token_ids": [1, 2], "weight": 1}]}, "nodes[0]: weight: 1 is not read", "loss_weights of tokens"),
    ({"seqs": [{"ids": [1, 2], "loss": [[1, 2]], "weight": 2}]}, "seqs[0]: weight: 2", "loss_weights of tokens"),
    (
        {"messages": [{**USER, "images": ["a.png"]}, ANSWER]},
        "messages[0]: 'images' is not read",
        "an image is a part of content",
    ),
    ({"seqs": [{"ids": [1, 2], "loss": [[1, 2]], "behavior_logprobs": [-1]}]}, "seqs[0]", "behaviour_logprobs"),
    ({"nodes": [{"token_ids": [1, 2], "advantage": 1.0}]}, "nodes[0]", "advantages"),
]


@pytest.mark.parametrize(("record", "place", "right"), NEAR_MISSES)
def test_a_near_miss_of_a_known_key_is_an_error_with_the_right_name(write, tokenizer, record, place, right):
    path = write(record)
    with pytest.raises(DataError) as caught:
        load_trees(path, tokenizer, num_workers=0)
    assert f"{path}:1" in str(caught.value)
    assert place in str(caught.value)
    assert right in str(caught.value)


def test_other_keys_that_nothing_reads_are_counted_and_survive_the_cache(write, tokenizer):
    noted = {**ANSWER, "timestamp": 3}
    path = write({**CHAT, "meta": {"a": 1}}, {"messages": [USER, noted], "meta": 2, "images": [], "id": None})
    for _ in range(2):
        report = load_trees(path, tokenizer).report
        assert report.unused_keys == {"meta": 2, "messages[].timestamp": 1}
        assert report.unused_key_lines() == ["meta (2 records)", "messages[].timestamp (1 record)"]


def test_a_key_that_groups_or_that_the_template_reads_is_used(write, tokenizer):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.mood }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant \n{% endif %}"
    )
    record = {"messages": [{**USER, "mood": "calm"}, ANSWER], "group_id": "a"}
    options = {"chat_template": template, "group_by": "group_id"}
    dataset = load_trees(write(record), tokenizer, options=options)
    assert dataset.report.unused_keys == {}
    assert dataset[0].name == "a"


def test_functions_are_tools(write, tokenizer):
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    old = load_trees(write({**CHAT, "functions": [function]}), tokenizer, options={"chat_template": "chatml"})
    tools = [{"type": "function", "function": function}]
    new = load_trees(write({**CHAT, "tools": tools}), tokenizer, options={"chat_template": "chatml"})
    assert old.fingerprint == new.fingerprint


def test_an_unknown_form_lists_all_with_examples():
    with pytest.raises(DataError) as caught:
        load_trees([{"mesages": []}])
    message = str(caught.value)
    assert "Did you mean 'messages'" in message
    for name, form in FORMS.items():
        assert name in message
        assert form.example in message
    with pytest.raises(DataError) as caught:
        load_trees([{"instruction": None, "output": "4"}])
    assert "Did you mean" not in str(caught.value)  # 'output' is a known key already


READ_BY = {name: module for name, (module, _) in FEATURES.items() if module.startswith("treewise.data.")}
TOOL = {"type": "function", "function": {"name": "look", "arguments": {}}}
# What a user gives to get each: a record of a form, a field of a chat, a setting, another source.
ASKS = {
    "declared_trees": {"data": [{"nodes": [{"id": 0, "parent": None, "token_ids": [1, 5]}]}]},
    "encoded_arrays": {"data": [{**ROW, "routed_experts": [[[0, 1]], [[1, 2]], [[0, 2]]]}]},
    "endings": {"data": [{"messages": [USER, {**ANSWER, "finish_reason": "stop"}]}]},
    "image_records": {"data": [{"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}]},
    "importers": {"data": [{"prompt_ids": [1, 5], "completion_ids": [9]}]},
    "kept_reasoning": {"data": [CHAT], "options": {"thinking": "keep"}},
    "logged_calls": {"data": [{**CHAT, "calls": [{"ctx": [0], "out": 1}]}]},
    "marked_parts": {"data": [{"messages": [USER, {**ANSWER, "train_detail": []}]}]},
    "mixtures": {"data": [{"data": [CHAT], "weight": 2}]},
    "other_libraries": {"data": [{"instruction": "Add.", "output": "4"}]},
    "packed_rows": {"data": [{"input_ids": [1, 5, 1, 9], "seq_lengths": [2, 2]}]},
    "preference_records": {"data": [{"prompt": "Hi", "chosen": "Yes.", "rejected": "No."}]},
    "progress_bar": {"data": [CHAT], "progress": True},
    "tables": {"data": pa.table({"messages": [[USER, ANSWER]]})},
    "texts": {"data": [{"text": "2+2=4"}]},
    "token_rows": {"data": [ROW]},
    "tools": {"data": [{"messages": [USER, {**ANSWER, "tool_calls": [TOOL]}]}]},
    "workers": {"data": [CHAT], "num_workers": 1},
}


# A load in a process of its own, in which the modules of the first argument cannot be imported.
ALONE = """
import json, sys

class Missing:
    hidden = json.loads(sys.argv[1])

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in cls.hidden):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
from treewise.data import load_trees

print(load_trees(*sys.argv[2:], options={"chat_template": "chatml"}, read_only=True).fingerprint)
"""


@pytest.fixture
def take_out(monkeypatch):
    """Takes a module out of this process, until the test ends."""

    def take(module):
        def find_spec(name, path=None, target=None):
            if name == module or name.startswith(f"{module}."):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        for loaded in [each for each in sys.modules if each == module or each.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])

    return take


def test_a_file_of_chats_is_read_without_every_feature(write, tokenizer, tmp_path):
    path = write(CHAT, {"messages": [USER, {**ANSWER, "content": "No."}]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    alone = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(list(READ_BY.values())), path, tmp_path / "tokenizer"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    whole = load_trees(path, tokenizer, options={"chat_template": "chatml"}, read_only=True)
    assert alone.stdout.strip() == whole.fingerprint


def test_every_feature_of_data_is_asked_for():
    assert set(ASKS) == set(READ_BY)


@pytest.mark.parametrize("name", sorted(READ_BY))
def test_a_record_that_asks_for_a_feature_that_is_gone_is_one_error(name, tokenizer, take_out):
    take_out(READ_BY[name])
    with pytest.raises(
        ConfigError, match=f"need {READ_BY[name]}, which this installation of treewise was made without"
    ):
        load_trees(tokenizer=tokenizer, **ASKS[name])
