"""Every role and field through templates of eleven families: it is in the tokens, or an error names it."""

import json
import re
from pathlib import Path

import pytest

from treewise.data import RenderOptions, load_trees
from treewise.data.io.files import RawRecord
from treewise.data.io.rows import rows_to_table, table_columns, trajectories_of
from treewise.data.records import RecordReader
from treewise.errors import DataError

# Templates in the style of families whose own are not at hand. What each leaves out is what the family's leaves out.
MISTRAL = """\
{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}
    {%- if m.tool_calls %}[TOOL_CALLS]
        {%- for c in m.tool_calls %}{{ c.function.name + c.function.arguments | tojson }}{% endfor %}{{ eos_token }}
    {%- else %}{{ m.content + eos_token }}{%- endif %}
{%- else %}{{ raise_exception('Only user, system, tool and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""
SMOLLM3 = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + m.content.lstrip('\n') }}
        {%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}{% endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif -%}
{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + (first if loop.first else '')
   + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
DEEPSEEK = """\
{{- bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ '<|Assistant|>' + (m.content or '') }}
    {%- for c in m.tool_calls %}{{ '<|call|>' + c.function.name + '\n' + c.function.arguments }}{% endfor %}
    {{- '<|im_end|>' }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}
{%- elif m.role == 'tool' %}{{ '<|output|>' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
OWN = {"mistral": MISTRAL, "smollm3": SMOLLM3, "gemma-1": GEMMA, "deepseek-r1": DEEPSEEK, "chatml": "chatml"}
FAMILIES = (
    *OWN,
    *("smollm2", "qwen3"),
    *("trl:qwen2_5", "trl:llama3", "trl:llama3_1", "trl:gemma3", "trl:deepseekv3", "trl:gptoss", "trl:phi3"),
    *("trl:glm4moe", "trl:qwen3_instruct_2507", "trl:cohere2"),
)

USER, CALLED = {"role": "user", "content": "Aask"}, {"role": "assistant", "content": "Banswer"}
LATER = {"role": "user", "content": "Clater"}
CALL = {"type": "function", "id": "call00000", "function": {"name": "Dname", "arguments": '{"Ekey": "Fvalue"}'}}
SECOND = {"type": "function", "id": "call00001", "function": {"name": "Gname", "arguments": {"Hkey": 1}}}
TOOL_TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "Dname", "content": "Iresult"}
TALKS = {
    "user and assistant": [USER, CALLED, LATER, {"role": "assistant", "content": "Jsecond"}],
    "system": [{"role": "system", "content": "Ksystem"}, USER, CALLED],
    "a later system": [USER, {"role": "system", "content": "Ksystem"}, LATER, CALLED],
    "developer": [{"role": "developer", "content": "Kdeveloper"}, USER, CALLED],
    "content parts": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Lone", "Mtwo")]}, CALLED],
    "name": [{**USER, "name": "Nuser"}, CALLED],
    "name of the answer": [USER, {**CALLED, "name": "Nagent"}],
    "reasoning": [USER, {**CALLED, "reasoning_content": "Othought"}],
    "reasoning elsewhere": [USER, {**CALLED, "thinking": "Othought"}],
    "thinking in content": [USER, {**CALLED, "content": "<think>\nOthought\n</think>\n\nBanswer"}],
    "reasoning and calls": [USER, {**TOOL_TURN, "reasoning_content": "Othought"}],
    "refusal": [USER, {"role": "assistant", "content": None, "refusal": "Prefuse"}],
    "tools": [USER, TOOL_TURN, RESULT, CALLED],
    "content and calls": [USER, {**TOOL_TURN, "content": "Qbeside"}, RESULT, CALLED],
    "two calls": [USER, {**TOOL_TURN, "tool_calls": [CALL, SECOND]}, RESULT, {**RESULT, "content": "Rresult"}, CALLED],
    "function": [
        USER,
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "Dname", "content": "Iresult"},
        CALLED,
    ],
    "result of another name": [USER, TOOL_TURN, {**RESULT, "name": "Sname"}, CALLED],
}


def template_of(family, qwen3_template):
    if family in OWN:
        return OWN[family]
    if family.startswith("trl:"):
        trl = pytest.importorskip("trl")
        return (Path(trl.__file__).parent / "chat_templates" / f"{family[4:]}.jinja").read_text()
    return {"qwen3": qwen3_template, "smollm2": None}[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_chat_reaches_the_tokens_or_an_error_names_it(tokenizer, qwen3_template, family):
    options = RenderOptions(chat_template=template_of(family, qwen3_template))
    reader = RecordReader(tokenizer, options)
    num_shown = 0
    for name, talk in TALKS.items():
        text = json.dumps({"messages": talk})
        sentinels = set(re.findall(r"\b[A-S][a-z]{2,}\b", text))
        result = reader.read(RawRecord("a.jsonl:1", text.encode()), Path("a.jsonl"))
        if result.error is not None:
            assert re.search(r"a.jsonl:1: .*(does not write|raises|opens <think>)", result.error), (name, result)
            continue
        trajectories = trajectories_of(table_columns(rows_to_table([0] * len(result.rows), result.rows)))
        trained = "".join(tokenizer.decode(t.token_ids[t.loss_weights > 0]) for t in trajectories)
        whole = "".join(tokenizer.decode(t.token_ids) for t in trajectories)
        assert sentinels <= set(re.findall(r"[A-S][a-z]{2,}", whole)), (name, whole)
        ours = {text for text in sentinels if text[0] in "BDEFGHJOPQ"}
        assert ours <= set(re.findall(r"[A-S][a-z]{2,}", trained)), (name, trained)
        assert "<think>\n\n</think>" not in trained
        num_shown += 1
    assert num_shown >= 2


SHOWN = {  # what a family's own template writes, or we map: no error
    "chatml": set(TALKS) - {"name", "name of the answer", "refusal", "result of another name"},
    "qwen3": set(TALKS) - {"name", "name of the answer", "refusal", "result of another name"},
    "smollm3": {"user and assistant", "system", "developer", "content parts", "tools", "content and calls", "function"},
}


@pytest.mark.parametrize("family", SHOWN)
def test_what_a_template_can_write_is_not_refused(write, tokenizer, qwen3_template, family):
    options = RenderOptions(chat_template=template_of(family, qwen3_template))
    load_trees(write(*[{"messages": TALKS[name]} for name in sorted(SHOWN[family])]), tokenizer, options=options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("name", r"message 0 \(user\): .*does not write its name; "),
        ("reasoning", r"turn 1 \(assistant\): this trained message: .*reasoning_content"),
        ("refusal", "its refusal"),
        ("thinking in content", "its thinking in content"),
        ("a later system", r"message 1 \(system\): .*does not write its content"),
    ],
)
def test_the_error_names_record_message_and_field(write, tokenizer, name, words):
    path = write({"messages": TALKS[name]})
    template = DEEPSEEK if name == "thinking in content" else SMOLLM3
    with pytest.raises(DataError, match=rf"jsonl:1: .*{words}") as caught:
        load_trees(path, tokenizer, options=RenderOptions(chat_template=template))
    assert "on_hidden: warn" in str(caught.value)


LAST_SYSTEM = """{% set s = namespace(text='') %}
{%- for m in messages if m.role == 'system' %}{% set s.text = m.content %}
{%- endfor %}{{ s.text }}{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content if m.role != 'tool' or loop.last else m.content[:3] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
LOOKED = {"role": "assistant", "content": "Banswer", "weight": 0}
SAW = {"role": "tool", "content": "Iresult"}


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([{"role": "system", "content": "Kfirst"}, USER, {"role": "system", "content": "Klast"}, CALLED], "0 .system."),
        ([USER, LOOKED, SAW, {**SAW, "content": 'Said "R"'}, CALLED], "2 .tool."),
    ],
)
def test_a_message_that_another_of_its_shape_hides_is_an_error(write, tokenizer, lost, words):
    """As DeepSeek R1's template does with system messages: of each shape one was written, so its probe passed."""
    whole = [{"messages": [{"role": "system", "content": "Kfirst"}, USER, CALLED]}]
    whole.append({"messages": [{"role": "user", "content": "Go"}, LOOKED, SAW, CALLED]})
    options = RenderOptions(chat_template=LAST_SYSTEM)
    load_trees(write(*whole), tokenizer, options=options, num_workers=0)
    with pytest.raises(DataError, match=rf"jsonl:3: .*message {words}: .*does not write its content"):
        load_trees(write(*whole, {"messages": lost}), tokenizer, options=options, num_workers=0)


def test_hidden_fields_can_be_allowed_and_are_reported(write, tokenizer):
    options = RenderOptions(chat_template="chatml", on_hidden="warn")
    dataset = load_trees(write({"messages": TALKS["name"]}), tokenizer, options=options)
    assert dataset.report.warnings == ["the chat template leaves out name of some messages (on_hidden: warn)"]


def test_a_mapped_role_is_reported_and_gives_the_tokens_of_the_standard_one(write, tokenizer, qwen3_template):
    options = RenderOptions(chat_template=qwen3_template, chat_template_kwargs={"enable_thinking": False})
    mapped = load_trees(write({"messages": TALKS["developer"]}), tokenizer, options=options)
    system = [{"role": "system", "content": "Kdeveloper"}, *TALKS["developer"][1:]]
    plain = load_trees(write({"messages": system}), tokenizer, options=options)
    assert mapped.fingerprint == plain.fingerprint
    assert "developer; its messages are rendered as system" in mapped.report.warnings[0]
