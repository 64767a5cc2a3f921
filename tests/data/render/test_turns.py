"""What `{% generation %}` blocks and `train_detail` leave out of a turn is context; the rest is trained."""

import logging

import pytest

from treewise.data import RenderOptions, load_trees
from treewise.data.render.marked_parts import detail_spans, spans_of_sampled, union
from treewise.errors import DataError

USER, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a tree."}
LATER = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Quite sure."}]


def template(answer):
    """A ChatML-like template whose assistant turns are `answer`, in which CONTENT stands for the message's."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + answer.replace("CONTENT", "{{ m.content }}")
        + "\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


PLAIN = template("CONTENT<|im_end|>")
ALL = template("{% generation %}CONTENT<|im_end|>{% endgeneration %}")
NO_END = template("{% generation %}CONTENT{% endgeneration %}<|im_end|>")
TAIL = template("{{ m.content[:6] }}{% generation %}{{ m.content[6:] }}<|im_end|>{% endgeneration %}")
LAST = template(
    "{% if loop.last %}{% generation %}CONTENT<|im_end|>{% endgeneration %}{% else %}CONTENT<|im_end|>{% endif %}"
)
NEVER = template("{% if false %}{% generation %}{% endgeneration %}{% endif %}CONTENT<|im_end|>")


def trained(tokenizer, messages, chat_template, **options):
    """The trained text of every trajectory, and the data set."""
    dataset = load_trees(
        [{"messages": messages}],
        tokenizer,
        options=RenderOptions(chat_template=chat_template, **options),
        num_workers=0,
    )
    return [tokenizer.decode(t.token_ids[t.loss_weights > 0]) for t in dataset[0].trajectories], dataset


@pytest.mark.parametrize(
    ("chat_template", "expected"),
    [
        (PLAIN, "It is a tree.<|im_end|>"),
        (ALL, "It is a tree.<|im_end|>"),
        (NO_END, "It is a tree."),
        (TAIL, " a tree.<|im_end|>"),
    ],
)
def test_only_what_generation_blocks_hold_is_trained(tokenizer, chat_template, expected):
    texts, dataset = trained(tokenizer, [USER, ANSWER], chat_template)
    assert texts == [expected]
    assert any("generation" in line for line in dataset.report.warnings) == (chat_template in (NO_END, TAIL))
    if chat_template != PLAIN:  # transformers' own mask, but for the newline that stands behind the end token
        theirs = tokenizer.apply_chat_template(
            [USER, ANSWER], chat_template=chat_template, return_assistant_tokens_mask=True, return_dict=True
        )
        [trajectory] = dataset[0].trajectories
        assert list(trajectory.loss_weights.astype(int)) == theirs["assistant_masks"][: len(trajectory.token_ids)]


def test_blocks_hold_in_sequences_that_keep_all_turns(tokenizer):
    texts, _ = trained(tokenizer, [USER, ANSWER, *LATER], NO_END, thinking="keep")
    assert texts == ["It is a tree.Quite sure."]


def test_a_turn_in_no_block_is_context(tokenizer):
    assert trained(tokenizer, [USER, ANSWER, *LATER], LAST)[0][-1] == "Quite sure.<|im_end|>"
    with pytest.raises(DataError, match=r"records:0: no token is trained: neither .*generation"):
        trained(tokenizer, [USER, ANSWER], NEVER)


@pytest.mark.parametrize("content", ["It is a tree.", "  It is a tree. \n"])
@pytest.mark.parametrize("chat_template", [PLAIN, PLAIN.replace("m.content", "m.content | trim")])
def test_train_detail_marks_characters_of_the_content(tokenizer, chat_template, content):
    at = content.index("It")
    parts = [
        {"begin_offset": at, "end_offset": at + 1, "train": True},
        {"begin_offset": at + 2, "end_offset": at + 6, "train": False},
        {"begin_offset": at + 7, "end_offset": at + 12, "train": True},
    ]
    texts, _ = trained(
        tokenizer, [USER, {"role": "assistant", "content": content, "train_detail": parts}], chat_template
    )
    assert [text.strip() for text in texts] == ["It tree.<|im_end|>"]


def test_a_token_that_reaches_over_the_border_is_context(tokenizer):
    parts = [{"begin_offset": 0, "end_offset": 10, "train": True}]  # ends within " tree"
    assert trained(tokenizer, [USER, {**ANSWER, "train_detail": parts}], PLAIN)[0] == ["It is a<|im_end|>"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("all", "must be a list of parts"),
        ([{"begin_offset": 0, "end_offset": 13, "train": True}], r"train_detail\[0\] must be .* < 13"),
        ([{"begin_offset": 3, "end_offset": 1, "train": True}], r"train_detail\[0\] must be"),
        ([{"begin_offset": 0, "end_offset": 1}], r"train_detail\[0\].train must be true or false"),
        ([{"begin_offset": 0, "end_offset": 12, "train": False}], "trains no assistant message"),
    ],
)
def test_a_wrong_train_detail_is_an_error(tokenizer, parts, words):
    with pytest.raises(DataError, match=rf"records:0: .*{words}"):
        trained(tokenizer, [USER, {**ANSWER, "train_detail": parts}], PLAIN)


def test_train_detail_beside_tool_calls_or_on_other_roles_is_an_error(tokenizer):
    parts = [{"begin_offset": 0, "end_offset": 1, "train": True}]
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages, words in (
        ([USER, {**ANSWER, "train_detail": parts, "tool_calls": [call]}], "tool calls or reasoning"),
        ([{**USER, "train_detail": parts}, ANSWER], r"messages\[0\] \(user\) has train_detail"),
    ):
        with pytest.raises(DataError, match=words):
            trained(tokenizer, messages, "chatml")


def parts(*pairs, **more):
    """Content in parts of text, each with a weight; None: it names none."""
    weights = ({} if weight is None else {"weight": weight} for _, weight in pairs)
    return [{"type": "text", "text": text, **weight, **more} for (text, _), weight in zip(pairs, weights, strict=True)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (parts(("It is", 0), (" a tree.", 1)), [" a tree.<|im_end|>"]),
        (parts(("It is", 1.0), (" a", 0.0), (" tree.", None)), ["It is tree.<|im_end|>"]),
        (parts(("It is", 1), (" a tree.", 1)), ["It is a tree.<|im_end|>"]),
        (parts(("", 0), ("It is a tree.", None)), ["It is a tree.<|im_end|>"]),
        ([{"type": "text", "text": "It is", "train": False}, {"type": "text", "text": " a"}], [" a<|im_end|>"]),
        ([{"type": "text", "text": "It is", "loss": 0}, {"type": "text", "text": " a"}], [" a<|im_end|>"]),
    ],
)
def test_parts_of_content_are_trained_by_their_weights(tokenizer, content, expected):
    assert trained(tokenizer, [USER, {"role": "assistant", "content": content}], PLAIN)[0] == expected


def test_a_turn_whose_parts_are_all_context_is_context(tokenizer):
    none = {"role": "assistant", "content": parts(("It is", 0), (" a", 0))}
    assert trained(tokenizer, [USER, none, USER, ANSWER], PLAIN)[0] == [f"{ANSWER['content']}<|im_end|>"]
    context = {**USER, "content": parts(("Hi", 0))}
    assert trained(tokenizer, [context, ANSWER], PLAIN)[0] == [f"{ANSWER['content']}<|im_end|>"]


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({**ANSWER, "content": parts(("It", 0.5))}, r"\[1\].content\[0\]: weight 0.5 of a part"),
        ({**ANSWER, "content": parts(("It", True))}, r"weight True of a part"),
        ({**ANSWER, "content": parts(("It", "1"))}, r"weight '1' of a part"),
        ({**ANSWER, "content": parts(("It", None), train="yes")}, r"content\[0\]: train is 'yes'"),
        ({**USER, "content": parts(("It", 1))}, r"content\[0\] \(user\) has a weight"),
        ({**ANSWER, "content": parts(("It", 0), (" is", 1)), "tool_calls": [CALL]}, "tool calls or reasoning"),
        ({**ANSWER, "content": parts(("It", 0), (" is", 1)), "train_detail": []}, "train_detail and weights of parts"),
        ({**ANSWER, "tool_calls": [{**CALL, "weight": 0}]}, r"tool_calls has weight, which a call of its own"),
    ],
)
def test_weights_that_cannot_be_honoured_are_errors(tokenizer, message, words):
    with pytest.raises(DataError, match=rf"records:0: .*{words}"):
        trained(tokenizer, [USER, message, ANSWER], PLAIN)


def test_a_prompt_that_opens_a_thinking_block_closes_it_as_context(tokenizer):
    opens = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
        "{{ m.content }}<|im_end|>\n{% else", "<think>\n\n</think>\n\n{{ m.content }}<|im_end|>\n{% else"
    )
    texts, dataset = trained(tokenizer, [USER, ANSWER], opens)
    assert texts == ["It is a tree.<|im_end|>"]
    assert "empty thinking block" in dataset.report.warnings[0]


CUT = {"role": "assistant", "content": "It is a tr", "finish_reason": "length"}


@pytest.mark.parametrize("chat_template", [PLAIN, ALL, NO_END, template("CONTENT")])
def test_a_turn_that_was_cut_off_has_no_end(tokenizer, chat_template):
    texts, dataset = trained(tokenizer, [USER, CUT, *LATER], chat_template)
    first, second = dataset[0].trajectories
    assert texts[0] == "It is a tr"
    assert tokenizer.decode(first.token_ids).endswith("assistant\nIt is a tr")
    assert texts[1].startswith("Quite sure.")
    assert "It is a tr<|im_end|>" in tokenizer.decode(second.token_ids) or chat_template == template("CONTENT")


def test_a_turn_that_was_cut_off_is_closed_as_context_where_its_conversation_is_one_row(tokenizer):
    texts, dataset = trained(tokenizer, [USER, CUT, *LATER], PLAIN, thinking="keep")
    assert texts == ["It is a trQuite sure.<|im_end|>"]
    [item] = dataset[0].trajectories
    whole = tokenizer.decode(item.token_ids)
    expected = trained(tokenizer, [USER, {**CUT, "finish_reason": "stop"}, *LATER], PLAIN, thinking="keep")
    assert expected[0] == ["It is a tr<|im_end|>Quite sure.<|im_end|>"]
    assert whole == tokenizer.decode(expected[1][0].trajectories[0].token_ids)


def test_train_detail_of_a_turn_that_was_cut_off(tokenizer):
    turn = {**CUT, "train_detail": [{"begin_offset": 8, "end_offset": 9, "train": True}]}
    assert trained(tokenizer, [USER, turn], PLAIN)[0] == [" tr"]


def test_a_thought_that_was_cut_off_stands_in_no_closed_block(tokenizer, qwen3_template):
    whole = ["<think>\nIs it a tr"]
    for turn in (
        {"role": "assistant", "content": "<think>\nIs it a tr", "finish_reason": "length"},
        {"role": "assistant", "content": "", "reasoning_content": "Is it a tr", "finish_reason": "max_tokens"},
        {"role": "assistant", "content": None, "reasoning": "\nIs it a tr", "stop_reason": "max_tokens"},
    ):
        texts, dataset = trained(tokenizer, [USER, turn], qwen3_template)
        assert texts == whole
        assert "</think>" not in tokenizer.decode(dataset[0].trajectories[0].token_ids)
    with_answer = {**CUT, "reasoning_content": "It has leaves."}
    assert trained(tokenizer, [USER, with_answer], qwen3_template)[0] == [
        "<think>\nIt has leaves.\n</think>\n\nIt is a tr"
    ]


def test_replies_that_cannot_be_trained_for_their_end_are_context_and_counted(tokenizer):
    filtered = {**ANSWER, "finish_reason": "content_filter"}
    texts, dataset = trained(tokenizer, [USER, filtered, *LATER], PLAIN)
    assert texts == ["Quite sure.<|im_end|>"]
    assert dataset.report.dropped == [("records:0: turn 1 (assistant)", "a reply that ended with 'content_filter'")]
    rows, dataset = trained(tokenizer, [USER, filtered, *LATER], PLAIN, thinking="keep")
    assert rows == ["Quite sure.<|im_end|>"]
    assert len(dataset.report.dropped) == 1
    with pytest.raises(DataError, match=r"no record to train on.*1 record left out.*a reply that ended with"):
        trained(tokenizer, [USER, filtered], PLAIN)


def test_spans():
    assert union([(5, 6), (0, 2), (2, 3), (4, 4)]) == [(0, 3), (5, 6)]
    assert detail_spans([{"begin_offset": 1, "end_offset": 1, "train": True}], "abc", "x") == [(1, 2)]
    assert spans_of_sampled([(2, 4)], "cdE", "abcd\n", "E") == [(0, 3)]
    assert spans_of_sampled([(3, 4)], "cdE", "abcdE\n", "E") == [(1, 2)]


def test_masks_of_token_rows_are_read(write):
    ids = [1, 15, 9, 2]
    for key, mask in {
        "assistant_masks": [0, 0, 1, 1],
        "completion_mask": [0, 0, 1, 1],
        "response_mask": [0, 0, 1, 1],
        "loss_mask": [False, False, True, True],
        "labels": [-100, -100, 9, 2],
    }.items():
        [trajectory] = load_trees([{"token_ids": ids, key: mask}])[0].trajectories
        assert list(trajectory.loss_weights) == [0, 0, 1, 1], key
    padded = {"token_ids": [0, *ids], "attention_mask": [0, 1, 1, 1, 1], "old_logprobs": [0, 0, 0, -1, -2]}
    [trajectory] = load_trees([padded])[0].trajectories
    assert trajectory.token_ids.tolist() == ids
    assert trajectory.old_logprobs.tolist() == [0, 0, -1, -2]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"token_ids": [1, 2, 3], "assistant_masks": [0, 1]}, "2 assistant_masks for 3 token_ids"),
        ({"token_ids": [1, 2], "labels": [-100, 2], "loss_weights": [0, 1]}, "loss_weights and labels both"),
        ({"messages": [USER, ANSWER], "assistant_masks": [0, 1]}, "'assistant_masks' is not read: it needs token_ids"),
        ({"nodes": [{"token_ids": [1, 2], "completion_mask": [0, 1]}]}, r"nodes\[0\]: 'completion_mask' is not read"),
        ({"seqs": [{"ids": [1, 2], "loss": [[1, 2]], "labels": [0, 1]}]}, r"seqs\[0\]: 'labels' is not read"),
    ],
)
def test_masks_that_cannot_be_read_are_errors(tokenizer, record, words):
    with pytest.raises(DataError, match=rf"records:0: .*{words}"):
        load_trees([record], tokenizer, num_workers=0)


def test_a_history_longer_than_the_models_context_is_tokenised_without_a_warning(tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(tokenizer, "model_max_length", 8)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trained(tokenizer, [USER, {"role": "assistant", "content": "It is a tree. " * 20}], NO_END)
    assert "longer than" not in caplog.text
