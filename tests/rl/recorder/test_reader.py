"""What is given out of a sampled turn, whole and while it grows, for the families whose templates are at hand."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.rl.agents.helpers import ADD, CALL, TOKENIZER
from treewise.data.render.messages import WeightedMessages
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import Template
from treewise.rl.recorder.families import FAMILIES, calls_in
from treewise.rl.recorder.reader import Parts, ReplyReader

MISTRAL = """\
{{- bos_token }}{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ m.content }}
    {%- for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}
    {%- endfor %}{{ eos_token }}
{%- endif %}{%- endfor %}"""
NAMED = {  # of TRL's templates: who reads
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "xml",
    "qwen3_5_nothink": "xml",
    "nemotron_3_nano": "xml",
    "glm4moe": "glm",
    "llama3_1": "llama",
    "lfm2_2_5": "lfm",
    "deepseekv3": "deepseek",
    "gptoss": "harmony",
    "llama3": "text alone",
}


def reader_of(template):
    return ReplyReader(Template(Encoder(TOKENIZER), template, {}), with_own=False)


def template_of_trl(name):
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", NAMED)
def test_what_a_template_writes_is_read_back(name):
    text = template_of_trl(name)
    reader = reader_of(text)
    assert reader.name == NAMED[name]
    if reader.name == "text alone":
        assert reader.whole(CALL, "", [ADD]) == Parts(content=CALL)
        assert reader.opening("") is None
        return
    template = Template(Encoder(TOKENIZER), text, {})
    question, arguments = {"role": "user", "content": "1+2?"}, {"a": 1, "b": 2}
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": arguments}}
    talk = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    talk = template.prepare(WeightedMessages(talk, [0.0, 1.0]), "").messages
    whole = template.render([talk], [ADD], "")[0]
    turn = re.sub(r"(<\|im_end\|>|<\|eot_id\|>|<\|call\|>|<｜end▁of▁sentence｜>)\s*\Z", "", whole)
    opening = re.sub(r"\A.*</think>\s*", "", reader.opening("") or " to=", flags=re.DOTALL)
    turn = turn[turn.rindex(opening) :]
    found = reader.whole(turn, "", [ADD])
    assert [(n, json.loads(a)) for n, a in found.calls] == [("add", arguments)]
    assert not found.content.strip()
    thought = reader.whole(f"hm</think>{turn}", "<think>", [ADD]) if reader.thinking else None
    assert thought is None or (thought.reasoning, thought.calls) == ("hm", found.calls)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]', 2),
        ('[TOOL_CALLS]add[ARGS]{"a": {"b": 1}}[TOOL_CALLS]f[ARGS]{}', 2),
        ('[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}', 1),
        ('[TOOL_CALLS]add{"a": 1}', 1),
        ("[TOOL_CALLS]add", 0),
    ],
)
def test_both_forms_of_mistral(text, calls):
    reader = reader_of(MISTRAL)
    assert reader.name == "mistral"
    found = reader.whole("Well. " + text, "", [ADD])
    assert len(found.calls) == calls
    assert found.content == ("Well." if calls else "Well. " + text)


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (
            "xml",
            "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=s>\n7\n</parameter>\n</function>\n</tool_call>",
            {"a": 7, "s": "7"},
        ),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 7}<|tool_call_end|><|tool_calls_section_end|>',
            {"a": 7},
        ),
        (
            "cohere",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 7}}]<|END_ACTION|>',
            {"a": 7},
        ),
        ("phi", '<|tool_call|>[{"name": "add", "arguments": {"a": 7}}]<|/tool_call|>', {"a": 7}),
        ("lfm", "<|tool_call_start|>[add(a=7, s='x, y')]<|tool_call_end|>", {"a": 7, "s": "x, y"}),
    ],
)
def test_other_families(family, text, expected):
    own = next(each for each in FAMILIES if each.name == family)
    types = {"add": {"a": {"type": "integer"}, "s": {"type": "string"}}}
    found, end = calls_in(own, text, 0, types)
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("add", expected)]
    assert end == len(text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{bad}</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_text(text):
    reader = reader_of("chatml")
    assert reader.whole(text, "", [ADD]) == Parts(content=text)
    both = reader.whole(f"So. {CALL}\n{text}", "", [ADD])
    assert both.calls == (("add", '{"a": 1, "b": 2}'),)
    assert both.content == f"So.\n{text}"


def test_calls_are_text_where_nobody_asked_for_them():
    assert reader_of("chatml").whole(CALL, "", None, reads_calls=False) == Parts(content=CALL)


def test_thinking_that_the_prompt_began_and_thinking_without_an_end():
    reader = reader_of("chatml")
    assert reader.whole("hm\n</think>\n\nSo.", "...assistant\n<think>\n", None) == Parts("hm", "So.")
    assert reader.whole("<think>\nhm, and", "", None) == Parts("hm, and", "")


def test_the_tokenizers_own_response_template_comes_first():
    from tests.rl.tasks.test_episode import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = Template(Encoder(tokenizer), "chatml", {}).text
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "CALL ",
                "close": "!",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "add", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    }
    reader = ReplyReader(Template(Encoder(tokenizer), None, {}), with_own=True)
    assert reader.name == "the tokenizer's response template"
    found = reader.whole('Well. CALL {"a": 1}!', "<|im_start|>assistant\n", [ADD])
    assert found == Parts("", "Well.", (("add", '{"a": 1}'),))
    bad = "Well. CALL {a!"
    assert reader.whole(bad, "<|im_start|>assistant\n", [ADD]) == Parts(content=bad)


PIECES = [
    "<think>\n",
    "a",
    " b\n",
    "</think>\n\n",
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<to",
    "{",
    " ",
    "é",
    "STOP",
    "ST",
]


@settings(deadline=None)
@example(text="ST" + CALL, family="chatml")
@example(text="a b\n" + CALL, family="chatml")
@example(text="<think>\na\n</think>\n\n b STOP", family="chatml")
@given(text=st.lists(st.sampled_from(PIECES), max_size=8).map("".join), family=st.sampled_from(["chatml", MISTRAL]))
def test_what_is_sure_is_the_beginning_of_the_whole(text, family):
    """At every length, and it never takes anything back."""
    reader = READERS[family]
    whole = text.partition("STOP")[0]
    parts = reader.whole(whole, "", [ADD])
    known = Parts()
    for size in range(len(text) + 1):
        sure = reader.sure(text[:size], "", stops=("STOP",))
        assert sure.reasoning.startswith(known.reasoning)
        assert sure.content.startswith(known.content)
        assert parts.reasoning.startswith(sure.reasoning)
        assert parts.content.startswith(sure.content)
        known = sure


READERS = {name: reader_of(name) for name in ("chatml", MISTRAL)}
