"""What a template does is found by conversations of our own: no text of a user's is taken for a probe, and forms are
compared as wholes. Every template at hand, in files, environments and agents' calls."""

import json
from pathlib import Path

import numpy as np
import pytest

from treewise.data import load_trees
from treewise.data.render import probes
from treewise.data.render.messages import WeightedMessages
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import CHATML, Template
from treewise.errors import DataError
from treewise.rl.recorder.chat_tokens import ChatTokens, Turn

ROOT = Path(__file__).parents[3]
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "Yes."}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Of it."}}},
    },
}
# In the style of Gemma 4: its own form of an object, in braces that it writes also around arguments given as text.
BRACES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "call:{{ c.function.name }}{{ '{' }}{% if c.function.arguments is mapping %}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:<|'|>{{ v }}<|'|>{% endfor %}"
    "{% else %}{{ c.function.arguments }}{% endif %}{{ '}' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(arguments, name="call00000"):
    return {"type": "function", "id": name, "function": {"name": "look", "arguments": arguments}}


def calling(*arguments):
    return {"role": "assistant", "content": "", "tool_calls": [call(*each) for each in arguments]}


def trl_templates():
    trl = pytest.importorskip("trl")
    return {path.name: path.read_text() for path in sorted(Path(trl.__file__).parent.glob("chat_templates/*.jinja"))}


def trained(tokenizer, messages, template, **options):
    trees = load_trees(
        [{"messages": messages, "tools": [TOOL]}], tokenizer, options={"chat_template": template, **options}
    )
    items = [item for tree in trees for item in tree.trajectories]
    return [tokenizer.decode(item.token_ids[item.loss_weights > 0]) for item in items]


# -- arguments of tool calls ------------------------------------------------------------------------------------------


GEMMA_4 = [
    USER,
    calling(('{"city": "Rome"}',)),
    {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
]


@pytest.mark.parametrize(
    "name", ["gemma4.jinja", "gemma4_v2.jinja", "gemma4_v3.jinja", "gemma4_v4.jinja", "gemma4_v5.jinja"]
)
def test_a_call_of_gemma_4_is_in_its_own_form(tokenizer, name):
    template = trl_templates()[name]
    written = 'call:look{city:<|"|>Rome<|"|>}<tool_call|>'
    first, second = load_trees(
        [{"messages": GEMMA_4, "tools": [TOOL]}], tokenizer, options={"chat_template": template}
    )[0].trajectories
    assert written in tokenizer.decode(first.token_ids[first.loss_weights > 0])
    assert written in tokenizer.decode(second.token_ids[second.loss_weights == 0])  # in the history
    text = ChatTokens(tokenizer, template, on_hidden="warn").written(GEMMA_4[:3], [TOOL]).text
    assert written in text
    assert "{{" not in text


def test_braces_that_a_template_writes_itself(tokenizer):
    assert trained(tokenizer, GEMMA_4[:2], BRACES) == ["call:look{city:<|'|>Rome<|'|>}<|im_end|>"]


def test_every_template_gets_arguments_as_servers_give_them(tokenizer):
    """As an object; where that is an error, as text. What is written is what `apply_chat_template` writes of that."""
    arguments = {"city": "Rome", "days": 2, "flags": [True, None], "at": {"hour": 1.5}}
    templates = {**trl_templates(), "chatml": CHATML, "tools": (ROOT / "examples/data/chatml_tools.jinja").read_text()}
    num_written = 0
    for name, text in templates.items():
        template = Template(Encoder(tokenizer), text, {})
        for given in (arguments, {}):
            talk = [USER, calling((json.dumps(given),)), {"role": "tool", "name": "look", "content": "x"}]
            messages = template.prepare(WeightedMessages(talk, [0.0] * 3), "here").messages
            for form in (given, json.dumps(given)):
                try:
                    theirs = tokenizer.apply_chat_template(
                        [USER, calling((form,)), talk[2]], tools=[TOOL], chat_template=text, tokenize=False
                    )
                except Exception:  # of the template, of any kind
                    continue
                assert template.render([messages], [TOOL], "here") == [theirs], name
                num_written += "look" in theirs.rpartition("q")[2]
                break
    assert num_written >= 80


@pytest.mark.parametrize(
    ("body", "written"),
    [
        ("{{ c.function.arguments }}", '{"city":"Rome"}'),  # Python's spelling of an object is no JSON
        ("{{ c.function.arguments | tojson }}", '{"city": "Rome"}'),
        ("{{ c.function.arguments | tojson(indent=1) }}", '{\n "city": "Rome"\n}'),
        ("{{ 'a' + c.function.arguments }}", 'a{"city":"Rome"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k + '=' + v }}{% endfor %}", "city=Rome"),
        (
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
            '{"city":"Rome"}',
        ),
    ],
)
def test_the_form_that_a_template_can_write(tokenizer, body, written):
    template = BRACES[: BRACES.index("{{ '{' }}")] + body + BRACES[BRACES.index("{% endfor %}<|im_end|>") :]
    assert trained(tokenizer, [USER, calling(('{"city":"Rome"}',))], template) == [f"call:look{written}<|im_end|>"]


# -- texts that look like probes --------------------------------------------------------------------------------------

PRIVATE = "".join(map(chr, range(0xE000, 0xE100)))
ODD = [
    "~/src \ue0b8 main",
    "\ue0a7\ue0b7turn\ue0b7\ue0a7",
    PRIVATE,
    "zqz0sentinel7qz zq0sentinel7qz",
    "\0 \ufffd \U000f0000",
]


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("thinking", ["as_inference", "keep"])
@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_no_character_of_a_text_has_a_meaning(tokenizer, qwen3_template, name, thinking, text):
    template = {"chatml": "chatml", "qwen3": qwen3_template}[name]
    ours, plain = (
        trained(
            tokenizer,
            [{"role": "user", "content": f"a{part}b"}, {"role": "assistant", "content": f"c{part}d"}] * 2,
            template,
            thinking=thinking,
        )
        for part in (text, "WORD")
    )
    kept = tokenizer.decode(tokenizer(text)["input_ids"])
    assert [each.replace("WORD", kept) for each in plain] == ours


def test_details_of_a_content_that_holds_every_mark(tokenizer):
    content = f"{PRIVATE} a"
    details = [{"begin_offset": len(content) - 1, "end_offset": len(content) - 1, "train": True}]
    message = {"role": "assistant", "content": content, "train_detail": details}
    assert trained(tokenizer, [USER, message], "chatml") == [" a<|im_end|>"]


def test_a_mark_cannot_be_put_together():
    for text in ("", "abc", PRIVATE, "".join(probes.PRIVATE), probes.PRIVATE[0] * 3 + "".join(probes.PRIVATE)):
        mark = probes.mark_for(text)
        assert mark not in text
        assert "".join(sorted(text)).count(mark) == 0  # whichever parts a template puts side by side
    word = probes.word_for("ZQZ zq1z")
    assert word == "zq2z"


def test_a_hidden_name_is_found_in_a_talk_about_probes(tokenizer):
    own = "zqz0sentinel7qz zqz1sentinel4qz"
    with pytest.raises(DataError, match=r"message 0 \(user\): the chat template does not write its name"):
        trained(tokenizer, [{"role": "user", "content": own, "name": "Ann"}, ANSWER], "chatml")


@pytest.mark.parametrize("text", ODD)
def test_turns_of_environments_and_agents_that_hold_probes(tokenizer, text):
    tokens = ChatTokens(tokenizer, "chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    reply = {"role": "user", "content": text}
    found = tokens.answer_ids([reply], {"role": "assistant", "content": text}, end, [reply], None, "here")
    assert tokenizer.decode(found) == tokenizer.decode(
        tokenizer(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    )
    writer = ChatTokens(tokenizer, "chatml", keeps_thinking=True)
    talk = ({"role": "user", "content": text}, {"role": "assistant", "content": text}, reply)
    written = writer.written(talk)
    turn = Turn(np.array([*tokenizer(text)["input_ids"], end]), text, is_ended=True, is_cut=False)
    assert writer.tail(written, 2, turn).text == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_without_an_end_in_the_history_has_no_append_only_form(tokenizer):
    """The end of the next message is not that of the turn."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'user' %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match="no append-only form after turn 1"):
        trained(tokenizer, [USER, ANSWER, USER, ANSWER], template, thinking="keep")


def test_an_end_within_the_arguments_of_a_call_does_not_end_its_turn(tokenizer):
    talk = [USER, calling(('{"city": "a<|im_end|>b"}',)), {"role": "tool", "content": "x"}, ANSWER]
    found = []
    for thinking in ("as_inference", "keep"):
        [tree] = load_trees([{"messages": talk}], tokenizer, options={"chat_template": "chatml", "thinking": thinking})
        found.append(tree.trajectories[-1].token_ids.tolist())
    assert found[0] == found[1]


# -- results of tools -------------------------------------------------------------------------------------------------

TWO = calling(('{"city": "A"}', "a"), ('{"city": "B"}', "b"))
SWAPPED = [
    USER,
    TWO,
    *({"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "ba"),
    {"role": "assistant", "content": "A: of a, B: of b"},
]
IN_ORDER = [*SWAPPED[:2], SWAPPED[3], SWAPPED[2], SWAPPED[4]]


def rows(tokenizer, messages, template, **options):
    trees = load_trees([{"messages": messages}], tokenizer, options={"chat_template": template, **options})
    return [item.token_ids.tolist() for tree in trees for item in tree.trajectories], trees.report.warnings


@pytest.mark.parametrize(
    ("name", "thinking"),
    [
        *(
            (name, "as_inference")
            for name in ("qwen3.jinja", "glm4moe.jinja", "gemma4_v4.jinja", "qwen2_5.jinja", "chatml")
        ),
        *((name, "keep") for name in ("qwen3.jinja", "chatml")),
    ],
)
def test_results_follow_the_order_of_their_calls(tokenizer, name, thinking):
    template = "chatml" if name == "chatml" else trl_templates()[name]
    ours, warnings = rows(tokenizer, SWAPPED, template, thinking=thinking)
    theirs, others = rows(tokenizer, IN_ORDER, template, thinking=thinking)
    assert ours == theirs
    assert [line for line in warnings if line not in others] == [
        "results of tools are put in the order of their calls, by tool_call_id: the chat template writes no ids, so a "
        "model takes the first result for that of the first call"
    ]


def test_results_stay_where_a_template_writes_their_ids(tokenizer):
    template = BRACES.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}", 1)
    ours, _ = rows(tokenizer, SWAPPED, template)
    assert tokenizer.decode(ours[-1]).index("of b") < tokenizer.decode(ours[-1]).index("of a")


@pytest.mark.parametrize(
    "ids",
    [("b", "c"), ("a", "a"), (None, "a"), ("b", None)],
    ids=["unknown", "twice", "the first without", "the last without"],
)
def test_results_stay_where_their_ids_say_nothing(ids):
    results = [
        {"role": "tool", "content": str(name), **({} if name is None else {"tool_call_id": name})} for name in ids
    ]
    assert probes.in_order_of_calls([USER, TWO, *results, ANSWER]) == [USER, TWO, *results, ANSWER]


def test_each_block_of_results_has_its_own_order():
    later = calling(('{"city": "C"}', "c"), ('{"city": "A"}', "a"))
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "baac"]
    talk = [USER, TWO, *results[:2], later, *results[2:], ANSWER]
    found = probes.in_order_of_calls(talk)
    assert [message["content"] for message in found] == ["q", "", "a", "b", "", "c", "a", "Yes."]
    assert [message["content"] for message in talk] == ["q", "", "b", "a", "", "a", "c", "Yes."]


def test_an_agents_results_are_written_in_the_order_of_their_calls(tokenizer):
    writer = ChatTokens(tokenizer, "chatml")
    ours, theirs = (writer.written(talk[:4]).text for talk in (SWAPPED, IN_ORDER))
    assert ours == theirs
