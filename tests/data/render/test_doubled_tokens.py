"""Begin and end tokens that data hold and the tokenizer or the template writes, too: a row has each once, as the model
was given and sampled it.
"""

import pytest
from transformers import AutoTokenizer

from treewise.data import RenderOptions, load_trees

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
CHATML = RenderOptions(chat_template="chatml")
# In the style of Phi-3: an end-of-text token behind the last turn alone.
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# In the style of Command A: every turn ends with two tokens, which the model samples.
COMMAND = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if m.role == 'assistant' %}<|response|>{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# In the style of gpt-oss: one token behind the last turn, another one behind that of a history.
RETURN = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{{ '<|return|>' if loop.last and m.role[:1] == 'a' "
    "else '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BLOCKS = PHI.replace(
    "m.content + '<|end|>\n' }}", "'' }}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}\n"
)


@pytest.fixture(scope="module")
def phi(tokenizer_folder):
    """A tokenizer with the tokens of these templates, that puts <s> in front of a plain text."""
    made = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokens = ["<|user|>", "<|assistant|>", "<|end|>", "<|response|>", "<|return|>"]
    made.add_special_tokens({"additional_special_tokens": tokens, "bos_token": "<s>", "eos_token": "<|endoftext|>"})
    from tokenizers.processors import TemplateProcessing

    begin = ("<s>", made.bos_token_id)
    made.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", special_tokens=[begin])
    return made


def rows_of(records, tokenizer, **options):
    trees = load_trees(records, tokenizer, options=RenderOptions(**options))
    rows = [item for tree in trees for item in tree.trajectories]
    texts = [tokenizer.decode(item.token_ids) for item in rows]
    trained = [tokenizer.decode(item.token_ids[item.loss_weights > 0]) for item in rows]
    counted = {line.rpartition(" (")[0]: line.rpartition(" (")[2] for line in trees.report.warnings if line[-2] in "es"}
    return texts, trained, counted


TEMPLATES = {
    "one behind the last turn alone": (PHI, "Yes.<|end|>"),
    "the same in blocks": (BLOCKS, "Yes.<|end|>"),
    "two of every turn": (COMMAND, "Yes.<|response|><|end|>"),
    "another one in a history": (RETURN, "Yes.<|return|>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_is_trained_up_to_the_end_that_the_model_samples(name, phi):
    template, expected = TEMPLATES[name]
    talk = [USER, ANSWER, {"role": "user", "content": "And?"}, ANSWER]
    texts, trained, _ = rows_of([{"messages": talk}], phi, chat_template=template)
    assert trained == [expected] * 2
    assert all(text.endswith(expected) for text in texts)


def test_what_was_left_out_of_a_record_that_fails_is_not_told(phi, tmp_path):
    long = {"messages": [{**USER, "content": "Hi " * 50}, {**ANSWER, "content": ENDS["once"]}]}
    trees = load_trees(
        [long, {"messages": [USER, ANSWER]}],
        phi,
        options={"chat_template": PHI, "max_length": 40},
        on_bad_record="quarantine",
        quarantine_path=tmp_path / "long.jsonl",
        num_workers=0,
    )
    assert trees.report.num_records == 2
    assert not any("end tokens" in each for each in trees.report.warnings)


def test_what_only_the_last_turn_has_is_told(phi):
    trees = load_trees([{"messages": [USER, ANSWER]}], phi, options={"chat_template": PHI})
    assert any(
        "writes '<|endoftext|>' behind the end of a turn that is the last" in each for each in trees.report.warnings
    )


ENDS = {
    "once": "Yes.<|end|>",
    "twice": "Yes.<|end|><|end|>",
    "with space": "Yes.<|end|>\n",
    "others": "Yes.<|end|><|endoftext|>",
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("form", ["messages", "conversations", "completion", "calls", "nodes"])
def test_ends_in_the_content_of_an_answer_are_left_out(name, form, phi):
    answer = {**ANSWER, "content": ENDS[name]}
    record = {
        "messages": {"messages": [USER, answer, USER, ANSWER]},
        "conversations": {
            "conversations": [
                {"from": "human" if each["role"] == "user" else "gpt", "value": each["content"]}
                for each in (USER, answer, USER, ANSWER)
            ]
        },
        "completion": {"prompt": [USER], "completion": [answer, USER, ANSWER]},
        "calls": {"messages": [USER, answer, ANSWER], "calls": [{"ctx": [0], "out": 1}, {"ctx": [0, 1, 0], "out": 2}]},
        "nodes": {
            "nodes": [
                {"parent": number - 1 if number else None, "message": each}
                for number, each in enumerate((USER, answer, USER, ANSWER))
            ]
        },
    }[form]
    texts, trained, counted = rows_of([record], phi, chat_template=PHI)
    assert trained == ["Yes.<|end|>"] * 2
    assert [text.count("<|end|>") for text in texts] == [2, 4]
    key = "end tokens at the end of an assistant's content, which the chat template writes again, are left out"
    assert counted[key] == "1 time)"


def test_ends_in_other_contents_and_within_are_reported_alone(phi):
    """A server reads them as the same tokens."""
    talk = [{**USER, "content": "Hi<|end|>"}, {**ANSWER, "content": "Yes.<|end|>\n<|user|>No."}]
    texts, trained, counted = rows_of([{"messages": talk}], phi, chat_template=PHI)
    assert texts[0].startswith("<|user|>\nHi<|end|><|end|>\n")
    assert trained == ["Yes.<|end|>\n<|user|>No.<|end|>"]
    assert counted == {
        "messages hold '<|end|>' as text, which becomes that special token": "2 times)",
        "messages hold '<|user|>' as text, which becomes that special token": "1 time)",
    }


PAIRS = {
    "neither": ("Hi", "Yes.", "<s>HiYes.<|endoftext|>", None),
    "begin": ("<s>Hi", "Yes.", "<s>HiYes.<|endoftext|>", "begin with the begin token"),
    "end of text": ("Hi", "Yes.<|endoftext|>", "<s>HiYes.<|endoftext|>", None),
    "two ends of text": ("Hi", "Yes.<|endoftext|><|endoftext|>", "<s>HiYes.<|endoftext|>", "end with several"),
    "space behind the end": ("Hi", "Yes.<|endoftext|>\n", "<s>HiYes.<|endoftext|>", "end with several"),
    "end of a turn": ("<|user|>\nHi<|end|>\n<|assistant|>\n", "Yes.<|end|>", "Yes.<|end|>", None),
    "both ends": ("Hi", "Yes.<|end|>\n<|endoftext|>", "<s>HiYes.<|end|>", "end with several"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_texts_begin_and_end_once(name, phi):
    prompt, completion, expected, words = PAIRS[name]
    texts, trained, counted = rows_of([{"prompt": prompt, "completion": completion}], phi, chat_template=PHI)
    assert texts[0].endswith(expected)
    assert texts[0].count("<s>") == 1
    assert trained[0] == expected[expected.index("Yes.") :]
    assert [words in each for each in counted] == ([] if words is None else [True])
    whole, _, _ = rows_of([{"text": prompt + completion}], phi, chat_template=PHI)
    assert whole == texts


def test_without_a_chat_template_the_end_of_text_is_the_only_end(phi, tokenizer_folder):
    plain = AutoTokenizer.from_pretrained(tokenizer_folder)
    plain.chat_template = None
    texts, _, _ = rows_of([{"prompt": "Hi", "completion": "Yes.<|im_start|>"}], plain)
    assert texts == ["HiYes.<|im_start|>" + plain.eos_token]


def test_rows_of_tokens_are_trained_as_they_are_and_reported(phi):
    begin, end = phi.bos_token_id, phi.eos_token_id
    rows = [
        {"token_ids": [begin, begin, 5, 6, end]},
        {"token_ids": [begin, 5, 6, end, end]},
        {"token_ids": [begin, 5, 6, end, end], "loss_weights": [0, 0, 1, 1, 0]},  # padding
        {"seqs": [{"ids": [begin, 5, 6, end, end], "loss": [[2, 5]]}]},
        {"input_ids": [begin, begin, 5, end]},
    ]
    trees = load_trees(rows, phi)
    assert trees[0].trajectories[0].token_ids.tolist() == [begin, begin, 5, 6, end]
    assert sorted(trees.report.warnings) == [
        "rows of token ids begin with two begin tokens; they are trained as they are (2 times)",
        "rows of token ids train two end tokens in a row; they are trained as they are (2 times)",
    ]
