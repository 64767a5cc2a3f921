"""A tokenizer and its template for environments and agents; see also `test_drivers` and `test_families`."""

import pytest
from tokenizers import Tokenizer, processors

from tests.rl.recorder.test_families import LOOK, tokenizer, tokens_of
from treewise.data.render.template import CHATML
from treewise.errors import ConfigError, DataError
from treewise.rl.recorder.chat_tokens import ChatTokens

SILENT = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
USER = {"role": "user", "content": "q"}


def ids_of(text):
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_both_drivers_are_shown_the_same_ids():
    tokens = tokens_of("chatml")
    for tools in (None, [LOOK]):
        written = tokens.written([USER], tools)
        assert tuple(tokens.ids_of(written.text)) == tokens.prompt_ids([USER], tools)
        assert written.text.endswith("<|im_start|>assistant\n")


def test_tools_that_are_not_written_are_an_error_for_both():
    tokens = ChatTokens(tokenizer(), SILENT)
    with pytest.raises(ConfigError, match="no prompt would hold look"):
        tokens.prompt_ids([USER], [LOOK])
    with pytest.raises(ConfigError, match="does not write tools"):
        tokens.written([USER], [LOOK])
    with pytest.raises(DataError, match="image"):
        tokens.written([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])


def test_what_ends_a_turn_is_one_rule():
    tokens = tokens_of("chatml")
    end = tokens.end_ids[0]
    assert list(tokens.said([5, end])) == [5]
    assert list(tokens.said([end, 5])) == [end, 5]
    assert list(tokens.said([])) == []
    read = tokens.read([*ids_of("a"), end], "", None)
    assert (read.text, read.turn.is_ended, read.turn.is_cut) == ("a", True, False)
    assert not tokens.read(ids_of("a"), "", None).turn.is_ended


def test_a_turn_ends_before_a_text_that_was_asked_for():
    read = tokens_of("chatml").read(ids_of("one STOP two END"), "", None, stop_texts=("END", "STOP"))
    assert (read.text, read.stop_text, read.turn.is_cut) == ("one ", "STOP", True)


def test_a_completion_is_no_chat_and_holds_no_calls():
    text = '<think>hm</think><tool_call>{"name": "look"}</tool_call>'
    assert tokens_of("chatml").read(ids_of(text), None, [LOOK]).parts.content == text
    assert tokens_of("chatml").read(ids_of(text), "", [LOOK]).calls[0].name == "look"


def test_a_text_begins_with_the_begin_token_once():
    raw = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    begin = raw.token_to_id("<|im_start|>")
    special = [("<|im_start|>", begin)]
    raw.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
    own = tokenizer().__class__(tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|endoftext|>")
    assert own("<|im_start|>a")["input_ids"] == [begin, begin, *ids_of("a")]
    tokens = ChatTokens(own, CHATML)
    assert tokens.text_ids("<|im_start|>a") == tokens.text_ids("a") == (begin, *ids_of("a"))


def test_a_note_is_logged_once(caplog):
    tokens = ChatTokens(tokenizer(), CHATML)
    for _ in range(2):
        tokens.note("mind this")
    assert [record.message for record in caplog.records] == ["mind this"]
    assert list(tokens.notes) == ["mind this"]
