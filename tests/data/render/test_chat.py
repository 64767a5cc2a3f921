import json

import numpy as np
import pytest

from treewise.data import RenderOptions, load_trees
from treewise.errors import DataError

CHATML = RenderOptions(chat_template="chatml")
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
CALL = {"function": {"name": "look", "arguments": '{"at": "sky"}'}}


def only(dataset):
    [tree] = dataset
    return tree.trajectories


def text_of(tokenizer, trajectory, trained):
    return tokenizer.decode(trajectory.token_ids[(trajectory.loss_weights > 0) == trained])


def talk(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def test_every_assistant_turn_is_a_call_and_calls_of_one_rollout_share_it(write, tokenizer):
    record = {"messages": talk("a", "b", "c", "d"), "group": "g", "reward": 2, "advantages": -0.5}
    path = write(record)
    first, second = only(load_trees(path, tokenizer, options=CHATML))
    assert len(second) > len(first)
    assert np.array_equal(second.token_ids[: len(first)], first.token_ids)
    assert (first.rollout, second.rollout) == (f"{path}:1", f"{path}:1")
    assert (first.source, second.source) == (f"{path}:1#0", f"{path}:1#1")
    assert (second.group, second.reward, set(second.advantages)) == ("g", 2.0, {-0.5})


def test_weights_scale_and_zero_is_context(write, tokenizer):
    messages = talk("a", "b", "c", "d", "e", "f")
    messages[1]["weight"], messages[3]["weight"] = 0, 0.25
    trajectories = only(load_trees(write({"messages": messages}), tokenizer, options=CHATML))
    assert [float(item.loss_weights.max()) for item in trajectories] == [0.25, 1.0]


@pytest.mark.parametrize("mark", ["train", "training"])
def test_a_message_marked_as_not_trained_is_weighted_like_one_of_weight_0(write, tokenizer, mark):
    marked, weighted = talk("a", "b", "c", "d"), talk("a", "b", "c", "d")
    marked[1][mark], marked[3][mark] = False, True
    weighted[1]["weight"] = 0
    ours, theirs = (
        only(load_trees(write({"messages": messages}, name=name), tokenizer, options=CHATML))
        for name, messages in (("a.jsonl", marked), ("b.jsonl", weighted))
    )
    assert len(ours) == len(theirs) == 1
    assert np.array_equal(ours[0].loss_weights, theirs[0].loss_weights)
    assert text_of(tokenizer, ours[0], True) == "d<|im_end|>"


def test_a_function_call_is_the_tool_call_that_it_is(write, tokenizer):
    old = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    new = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    texts = [
        text_of(tokenizer, only(load_trees(write({"messages": [USER, turn]}), tokenizer, options=CHATML))[0], True)
        for turn in (old, new)
    ]
    assert texts[0] == texts[1] == '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call><|im_end|>'


def test_last_assistant_trains_one_turn(write, tokenizer):
    options = RenderOptions(chat_template="chatml", train_on="last_assistant")
    [trajectory] = only(load_trees(write({"messages": talk("a", "b", "c", "d")}), tokenizer, options=options))
    assert text_of(tokenizer, trajectory, True) == "d<|im_end|>"


def test_recorded_questions_render_to_the_recorded_ids(fixtures, tokenizer):
    rendered = {tree.name: tree for tree in load_trees(fixtures / "gsm8k.jsonl.gz", tokenizer, options=CHATML)}
    recorded = {tree.name: tree for tree in load_trees(fixtures / "tokens.jsonl.gz")}
    for name, tree in rendered.items():
        for ours, theirs in zip(tree.trajectories, recorded[name].trajectories, strict=True):
            assert np.array_equal(ours.token_ids, theirs.token_ids)
            assert np.array_equal(ours.loss_weights, theirs.loss_weights)


def test_recorded_multi_agent_calls_render_to_the_recorded_ids(fixtures, tokenizer):
    [tree] = load_trees(fixtures / "whowhen.jsonl.gz", tokenizer)
    [recorded] = [tree for tree in load_trees(fixtures / "tokens.jsonl.gz") if tree.name == "ww-algogen-102"]
    ours = {(t.token_ids.tobytes(), t.loss_weights.tobytes()) for t in tree.trajectories}
    assert ours == {(t.token_ids.tobytes(), t.loss_weights.tobytes()) for t in recorded.trajectories}


@pytest.mark.parametrize(("name", "num_calls", "num_leaves"), [("tau_airline", 27, 27), ("nemo", 7, 4)])
def test_qwen3_forks_real_records_as_recorded(fixtures, tokenizer, qwen3_template, name, num_calls, num_leaves):
    options = RenderOptions(chat_template=qwen3_template)
    [tree] = load_trees(fixtures / f"{name}.jsonl.gz", tokenizer, options=options)
    forest = tree.forest()
    assert len(tree.trajectories) == num_calls
    ids = [t.token_ids.tobytes() for t in tree.trajectories]
    assert sum(not any(other != one and other.startswith(one) for other in ids) for one in ids) == num_leaves
    assert forest.share_ratio > 3


def test_kept_thinking_makes_one_sequence_of_a_template_that_drops_it(fixtures, tokenizer, qwen3_template):
    path = fixtures / "nemo.jsonl.gz"
    [forked] = load_trees(path, tokenizer, options=RenderOptions(chat_template=qwen3_template))
    [kept] = load_trees(path, tokenizer, options=RenderOptions(chat_template=qwen3_template, thinking="keep"))
    [sequence] = kept.trajectories
    assert sequence.num_trained_tokens == sum(t.num_trained_tokens for t in forked.trajectories)
    assert forked.forest().num_tokens > kept.forest().num_tokens == len(sequence)
    assert text_of(tokenizer, sequence, True).count("</think>") == 7


def test_logged_calls_render_each_context_as_it_was(write, tokenizer):
    record = {
        "messages": [USER, ANSWER, {"role": "user", "content": "Summary"}, {"role": "assistant", "content": "Bye."}],
        "calls": [{"ctx": [0], "out": 1}, {"ctx": [2], "out": 3}],
    }
    trajectories = only(load_trees(write(record), tokenizer, options=CHATML))
    assert [text_of(tokenizer, item, True) for item in trajectories] == ["Yes.<|im_end|>", "Bye.<|im_end|>"]
    assert "Hi" not in text_of(tokenizer, trajectories[1], False)


def test_pairs_of_one_prompt_form_a_group(write, tokenizer):
    rows = [{"prompt": p, "completion": c} for p, c in (("2+2=", "4"), ("3+3=", "6"), ("2+2=", "5"))]
    dataset = load_trees(write(*rows), tokenizer)
    assert [len(tree.trajectories) for tree in dataset] == [2, 1]
    first = dataset[0].trajectories[0]
    assert text_of(tokenizer, first, True) == "4<|im_end|>"
    assert first.group == dataset[0].trajectories[1].group


def test_pairs_of_messages_equal_the_conversation(write, tokenizer):
    chat = load_trees(write({"messages": [USER, ANSWER]}, name="a.jsonl"), tokenizer, options=CHATML)
    pair = load_trees(write({"prompt": [USER], "completion": [ANSWER]}, name="b.jsonl"), tokenizer, options=CHATML)
    mixed = load_trees(write({"prompt": [USER], "completion": "Yes."}, name="c.jsonl"), tokenizer, options=CHATML)
    for other in (pair, mixed):
        assert np.array_equal(other[0].trajectories[0].token_ids, chat[0].trajectories[0].token_ids)


def test_answers_in_a_prompt_are_context(write, tokenizer):
    record = {"prompt": talk("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]}
    [trajectory] = only(load_trees(write(record), tokenizer, options=CHATML))
    assert text_of(tokenizer, trajectory, True) == "d<|im_end|>"


def test_text_parts_are_joined(write, tokenizer):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    whole = load_trees(write({"messages": [USER, ANSWER]}, name="a.jsonl"), tokenizer)
    split = load_trees(write({"messages": [{**USER, "content": parts}, ANSWER]}, name="b.jsonl"), tokenizer)
    assert np.array_equal(whole[0].trajectories[0].token_ids, split[0].trajectories[0].token_ids)


def test_tools_of_a_side_file_enter_the_prompt(fixtures, tokenizer):
    [tree] = load_trees(fixtures / "tau2_grok.jsonl.gz", tokenizer, options=CHATML)
    prompt = text_of(tokenizer, tree.trajectories[0], False)
    assert '"name": "book_reservation"' in prompt
    assert "How can I help" in prompt  # the greeting of weight 0 is context


BAD_RECORDS = [
    ({"messages": []}, ("messages is empty",)),
    ({"messages": "Hi"}, ("messages: text that is not valid JSON", "'Hi'", "Give the value itself")),
    ({"messages": {"role": "user"}}, ("must be a list",)),
    ({"messages": [3]}, ("messages[0]", "object")),
    ({"messages": [USER]}, ("no assistant message", "1 user", "no token is trained")),
    ({"messages": [USER, {**ANSWER, "weight": 0}]}, ("weight 0", "1 user, 1 assistant")),
    ({"messages": [ANSWER]}, ("message 0", "nothing before it")),
    ({"messages": [{"role": "robot", "content": ""}]}, ("messages[0]", "'robot'", "supported")),
    ({"messages": [{"from": "human", "value": ""}]}, ("role None", "belong under conversations")),
    ({"messages": [{"role": "user"}, ANSWER]}, ("messages[0]", "no content")),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ("0 images in images", "1 image part")),
    ({"messages": [{"role": "user", "content": 5}]}, ("content must be text",)),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}, ("type 'text' has no text",)),
    ({"messages": [USER, {**ANSWER, "weight": 0}]}, ("trains no assistant message", "--on_bad_record quarantine")),
    ({"messages": [{**USER, "train": True}, ANSWER]}, ("messages[0] (user)", "only assistant")),
    ({"messages": [{**USER, "weight": 1}, ANSWER]}, ("messages[0] (user) has weight: 1; only assistant",)),
    ({"messages": [{**USER, "tool_calls": [CALL]}, ANSWER]}, ("messages[0] (user) has tool_calls, which only",)),
    ({"messages": [{**USER, "reasoning": "a"}, ANSWER]}, ("messages[0] (user) has reasoning, which only",)),
    (
        {"messages": [USER, {**ANSWER, "reasoning": "a", "thinking": "b"}]},
        ("reasoning twice, another one as thinking",),
    ),
    ({"messages": [USER, ANSWER], "functions": [{"name": "f"}], "tools": [CALL]}, ("both functions and tools",)),
    ({"messages": [USER, ANSWER], "chat_template_kwargs": {"a": 1}}, ("variables of the template are the same",)),
    ({"prompt": "a", "completion": "b", "tools": [CALL]}, ("tools beside a prompt of plain text; give messages",)),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c", "functions": [CALL]},
        ("functions beside a prompt of plain text",),
    ),
    ({"messages": [{**USER, "weight": "x"}, ANSWER]}, ("messages[0]: weight 'x' must be a finite number",)),
    ({"messages": [USER, {**ANSWER, "train": "no"}]}, ("messages[1]", "train is 'no'")),
    ({"messages": [USER, {**ANSWER, "tool_calls": [CALL], "function_call": {"name": "f"}}]}, ("both function_call",)),
    ({"messages": [USER, {**ANSWER, "weight": -1}]}, ("weight -1",)),
    ({"messages": [USER, {**ANSWER, "weight": True}]}, ("weight True",)),
    ({"messages": [USER, {**ANSWER, "reasoning_content": 1}]}, ("reasoning_content",)),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": 1}]}]}, ("tool_calls", "name")),
    ({"messages": [USER, {**ANSWER, "tool_calls": {"a": 1}}]}, ("tool_calls must be a list",)),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "id": [1]}]}]}, ("tool_calls", "id must be text")),
    ({"messages": [USER, {"role": "tool", "content": "3", "tool_call_id": {}}]}, ("tool_call_id must be text",)),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": 3}]}]}, ("arguments", "int")),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "input": {"a": 1}}]}]}, ("'f' has input; write",)),
    ({"messages": [USER, ANSWER], "tools": [3]}, ("tools must be a list",)),
    ({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}, ("a function without a name",)),
    ({"messages": [USER, ANSWER], "tools_ref": "x"}, ("tools_ref 'x'", "not found", "give `tools`")),
    ({"messages": [USER, {**ANSWER, "content": [{"type": "tool_use"}]}]}, ("'tool_use'", "among the tool_calls")),
    ({"messages": [USER, ANSWER, {"type": "function_call_output"}]}, ("messages[2]", "message of role tool")),
    ({"messages": [USER, ANSWER], "reward": "1"}, ("reward must be one finite number",)),
    ({"messages": [USER, ANSWER], "advantages": [1]}, ("needs token_ids",)),
    ({"messages": [USER, ANSWER], "old_logprobs": [1]}, ("old_logprobs needs token_ids",)),
    ({"messages": [USER, ANSWER], "prompt": "a", "completion": "b"}, ("several forms",)),
    ({"messages": [USER, ANSWER], "calls": []}, ("calls must be",)),
    ({"messages": [USER, ANSWER], "calls": [{"ctx": [0]}]}, ("calls[0]", "out")),
    ({"messages": [USER, ANSWER], "calls": [{"ctx": [2], "out": 1}]}, ("calls[0].ctx", "0..1")),
    ({"messages": [USER, ANSWER], "calls": [{"ctx": [0], "out": -1}]}, ("calls[0].out", "-1")),
    ({"messages": [USER, ANSWER], "calls": [{"ctx": [], "out": 1}]}, ("calls[0]", "empty ctx")),
    ({"messages": [USER, ANSWER], "calls": [{"ctx": [0], "out": 0}]}, ("calls[0]", "user")),
    ({"messages": [USER, {**ANSWER, "weight": 0}], "calls": [{"ctx": [0], "out": 1}]}, ("weight 0",)),
    ({"prompt": "a"}, ("without completion.", "treewise rl --tasks")),
    ({"prompt": "a", "completon": "b"}, ("without completion", "Did you mean 'completion'")),
    ({"prompt": 1, "completion": "b"}, ("prompt must be text or a list of messages, found int",)),
    ({"prompt": "a", "completion": "b", "group": ""}, ("group is empty; leave it out",)),
    ({"completion": "a"}, ("without prompt",)),
    ({"prompt": "a", "completion": [ANSWER]}, ("prompt must be one too",)),
    ({"prompt": "", "completion": "x"}, ("prompt is empty",)),
]


@pytest.mark.parametrize(("record", "words"), BAD_RECORDS)
def test_bad_records_are_refused_with_their_line(write, tokenizer, record, words):
    path = write("", record)
    with pytest.raises(DataError) as caught:
        load_trees(path, tokenizer, num_workers=0)
    for word in (f"{path}:2", *words):
        assert word in str(caught.value), str(caught.value)


def test_a_template_that_loses_tool_calls_is_refused(write, tokenizer):
    path = write({"messages": [USER, {**ANSWER, "tool_calls": [CALL]}]})
    with pytest.raises(DataError, match=r"turn 1 .*does not write tool calls.*'look'.*chatml"):
        load_trees(path, tokenizer)


AS_OBJECT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = '\n<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>'
ARGUMENTS = {
    "object": ({"at": "sky"}, '{"at": "sky"}'),
    "text": ('{"at":   "sky"}', '{"at":   "sky"}'),  # as it was sampled
    "null": (None, "{}"),
    "empty": ("", "{}"),
    "blank": (" \n", "{}"),
    "an empty object": ("{}", "{}"),
    "Python": ("{'at': 'sky', 'far': True, 'or': None}", '{"at": "sky", "far": true, "or": null}'),
}


def called(arguments):
    return {**ANSWER, "content": "", "tool_calls": [{"type": "function", "function": {"name": "look", **arguments}}]}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("template", ["qwen3", "object"])
def test_arguments_are_an_object_however_they_are_written(name, template, write, tokenizer, qwen3_template):
    given, text = ARGUMENTS[name]
    options = RenderOptions(
        chat_template=qwen3_template if template == "qwen3" else AS_OBJECT,
        chat_template_kwargs={"enable_thinking": False},
    )
    message = called({"arguments": given})
    trees = load_trees(write({"messages": [USER, message, USER, ANSWER]}), tokenizer, options=options)
    first, second = only(trees)
    normal = '{"at": "sky"}' if name == "text" else text
    expected = HERMES.lstrip("\n") % text if template == "qwen3" else "look" + normal
    assert text_of(tokenizer, first, True) == expected + "<|im_end|>"
    assert expected in tokenizer.decode(second.token_ids)
    words = {"empty": "blank arguments", "blank": "blank arguments", "Python": "Python's notation"}
    found = [warning for warning in trees.report.warnings if "(1 time)" in warning]
    assert len(found) == (name in words)
    assert all(words[name] in warning for warning in found)


BAD_ARGUMENTS = {
    "a list": ("[]", "a list, not an object: '\\[\\]'; give {} for none"),
    "null": ("null", "null, not an object"),
    "a number": ("3", "3, not an object"),
    "cut": ('{"at": "sk', "text that is not valid JSON"),
    "encoded twice": (json.dumps('{"at": "sky"}'), "JSON that was written as text once more, not an object"),
    "a key twice": ('{"at": 1, "at": 2}', "the key 'at' is given twice"),
    "half a pair": ('{"at": "\\ud83d"}', "JSON that cannot be read"),
    "a Python list": ("['a']", "text that is not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
@pytest.mark.parametrize("template", ["qwen3", "object"])
def test_arguments_that_are_no_object_are_named(name, template, write, tokenizer, qwen3_template):
    given, words = BAD_ARGUMENTS[name]
    options = RenderOptions(chat_template=qwen3_template if template == "qwen3" else AS_OBJECT)
    for talk in ([USER, called({"arguments": given})], [USER, called({"arguments": given}), USER, ANSWER]):
        path = write({"messages": [USER, ANSWER]}, {"messages": talk})
        where = r"jsonl:2: messages\[1\]\.tool_calls\[0\]: the arguments of 'look' are "
        with pytest.raises(DataError, match=where + words):
            load_trees(path, tokenizer, options=options)


def test_arguments_of_a_reply_that_was_cut_off_stop_no_file(write, tokenizer):
    """Nothing of such a reply is trained; as context of a later call it is an error."""
    cut = {**called({"arguments": '{"at": "sk'}), "finish_reason": "length"}
    trees = load_trees(write({"messages": [USER, ANSWER, USER, cut]}), tokenizer, options=CHATML)
    assert len(only(trees)) == 1
    assert [reason.partition(" (")[0] for _, reason in trees.report.dropped] == [
        "tool calls of a reply that was cut off"
    ]
    with pytest.raises(DataError, match=r"messages\[1\]\.tool_calls\[0\]: the arguments of 'look'"):
        load_trees(write({"messages": [USER, cut, USER, ANSWER]}), tokenizer, options=CHATML)


EMPTY = {
    "empty": ({"content": ""}, "a reply that holds nothing"),
    "absent": ({}, "a reply that holds nothing"),
    "null": ({"content": None, "tool_calls": []}, "a reply that holds nothing"),
    "reasoning": ({"content": "", "reasoning_content": "Hm."}, "a reply that holds only reasoning"),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("thinking", ["as_inference", "keep"])
def test_an_empty_turn_is_context_and_counted(name, thinking, write, tokenizer):
    fields, reason = EMPTY[name]
    empty = {"role": "assistant", **fields}
    talk = [USER, empty, {"role": "user", "content": "Hello?"}, ANSWER]
    options = RenderOptions(chat_template="chatml", thinking=thinking)
    path = write({"messages": talk}, {"messages": [USER, empty]})
    trees = load_trees(path, tokenizer, options=options)
    (row,) = only(trees)
    assert text_of(tokenizer, row, True) == "Yes.<|im_end|>"
    assert "<|im_start|>assistant\n" in tokenizer.decode(row.token_ids).partition("Hello?")[0]
    assert trees.report.dropped == [(f"{path}:{line}: turn 1 (assistant)", reason) for line in (1, 2)]


def test_empty_turns_of_logged_calls_and_completions_are_left_out(write, tokenizer):
    empty = {"role": "assistant", "content": ""}
    calls = [{"ctx": [0], "out": 1}, {"ctx": [0, 1, 0], "out": 2}]
    path = write(
        {"messages": [USER, empty, ANSWER], "calls": calls},
        {"prompt": "a", "completion": ""},
        {"prompt": [USER], "completion": [empty]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
        {"instruction": "a", "output": ""},
        {"text": ""},
        {
            "nodes": [
                {"parent": None, "message": USER},
                {"parent": 0, "message": empty},
                {"parent": 0, "message": ANSWER},
            ]
        },
    )
    trees = load_trees(path, tokenizer, options=CHATML)
    assert [len(tree.trajectories) for tree in trees] == [1, 1]
    assert [where.partition(".jsonl:")[2].partition(":")[0] for where, _ in trees.report.dropped] == list("1234567")
    assert {reason for _, reason in trees.report.dropped} == {
        "a reply that holds nothing",
        "a completion that holds nothing",
        "a text that holds nothing",
    }


def test_white_space_that_a_template_trims_is_nothing(write, tokenizer):
    path = write({"messages": [USER, {**ANSWER, "content": " \n"}, USER, ANSWER]})
    trimming = AS_OBJECT.replace("m.content }}", "m.content | trim }}")
    trees = load_trees(path, tokenizer, options=RenderOptions(chat_template=trimming))
    assert [reason for _, reason in trees.report.dropped] == [
        "a reply of white space alone, which the chat template does not write"
    ]
    kept = only(load_trees(path, tokenizer, options=CHATML))
    assert [text_of(tokenizer, row, True) for row in kept] == [" \n<|im_end|>", "Yes.<|im_end|>"]


def test_a_trajectory_beyond_max_length_is_refused_and_never_cut(write, tokenizer):
    path = write({"messages": [USER, ANSWER]})
    (row,) = only(load_trees(path, tokenizer))
    load_trees(path, tokenizer, options=RenderOptions(max_length=len(row)))
    with pytest.raises(DataError, match=rf"jsonl:1: {len(row)} tokens, more than max_length {len(row) - 1}"):
        load_trees(path, tokenizer, options=RenderOptions(max_length=len(row) - 1))
