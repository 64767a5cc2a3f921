"""Calls of every template at hand, as a policy would sample them: read alike for environments and agents. What is no
call is told to the policy by environments, and text for agents. Episodes of environments go on behind them."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treewise.data.render import chat
from treewise.data.render.messages import clean_conversation
from treewise.data.render.template import CHATML
from treewise.errors import ConfigError, DataError
from treewise.rl.recorder.chat_tokens import ChatTokens, Turn
from treewise.rl.recorder.families import Broken
from treewise.rl.tasks import EnvironmentTask
from treewise.rl.tasks.calls import Calls
from treewise.rl.tasks.episode import start_episodes

ROOT = Path(__file__).parents[3]
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<|return|>", "<|end|>", "<|eot|>", "<|user|>"),
    *("<|observation|>", "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>", "<|END_OF_TURN_TOKEN|>", "</s>"),
)
SILENT = {  # templates of TRL that write no calls
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl"),
    *("idefics3", "llava_next", "smolvlm"),
}
FIRST = {"city": "Rome: the {x}, [y]", "days": 2, "flag": True, "list": [1.5, 2], "deep": {"a": {"b": "c: d, e"}}}
CALLS = {"one": [FIRST], "several": [{"city": "Oslo"}, FIRST], "without arguments": [{}]}
PROPERTIES = {
    "city": {"type": "string", "description": "Of it."},
    **{name: {"type": kind, "description": "Of it."} for name, kind in (("days", "integer"), ("flag", "boolean"))},
    "list": {"type": "array", "description": "Of it.", "items": {"type": "number"}},
    "deep": {"type": "object", "description": "Of it.", "properties": {}},
}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    },
}
TEMPLATES = {
    "chatml": lambda: CHATML,
    "examples": lambda: (ROOT / "examples/data/chatml_tools.jinja").read_text(),
    "Mistral": lambda: (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
        "{% endfor %}</s>{% endif %}{% endfor %}"
    ),
}


@cache
def tokenizer():
    """Every byte is a token, and each end of a turn."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=letters, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|endoftext|>", *ENDS])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>", bos_token="<|im_start|>")


@cache
def tokens_of(name):
    """As a run has them, whose model was published with these ends."""
    ids = [tokenizer().convert_tokens_to_ids(end) for end in ENDS]
    text = TEMPLATES[name]() if name in TEMPLATES else trl_template(name)
    return ChatTokens(tokenizer(), text, generation_config=SimpleNamespace(eos_token_id=ids))


def trl_template(name):
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def all_names():
    try:
        import trl
    except ImportError:
        return [*TEMPLATES]
    names = sorted(path.stem for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    return [*TEMPLATES, *names]


FIRST_NAMES = [  # of each family one
    *("chatml", "examples", "Mistral", "deepseekv3", "gemma4_v4", "glm4moe", "gptoss", "lfm2_2_5_vl", "llama3_1"),
    *("muse_glimmer", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_8", "llama3"),
]


def representatives():
    return [name for name in FIRST_NAMES if name in all_names()]


def sampled(name, arguments, prompt="q", thoughts=({}, {"reasoning_content": "hm"})):
    """The prompt of a turn that calls `look`, what a policy writes before the call, and the rest with the end."""
    template = tokens_of(name).template
    calls = [
        {"type": "function", "id": f"call0000{number}", "function": {"name": "look", "arguments": json.dumps(given)}}
        for number, given in enumerate(arguments)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    for more in thoughts:  # a prompt may open the thinking
        talk = template.prepare(clean_conversation([{"role": "user", "content": prompt}, {**turn, **more}], "a"), "a")
        made = chat.conversation_calls(talk, "all_assistant", "a")
        try:
            _, [text] = chat.rendered_calls(template, made, [LOOK], "a", set(), [])
        except DataError:
            continue
        return text.prompt, text.opening, text.sampled
    return None


def is_silent(name):
    return name.removesuffix("_training") in SILENT


@pytest.mark.representatives(*representatives())
@pytest.mark.parametrize("name", all_names())
def test_calls_of_every_template_are_read_at_both_doors(name):
    tokens = tokens_of(name)
    if is_silent(name):
        assert tokens.reader.name in ("text alone", "hermes")
        return
    writer = ChatTokens(tokenizer(), tokens.template.text)
    num_read = 0
    for arguments in CALLS.values():
        made = sampled(name, arguments)
        if made is None or made[2].count("look") < len(arguments):  # Llama 3.1 and GPT-OSS write one call
            continue
        prompt, text = made[0], made[1] + made[2]
        ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
        read = tokens.read(ids, prompt, [LOOK])
        assert [(call.name, call.arguments, call.problem) for call in read.calls] == [
            ("look", given, None) for given in arguments
        ], text
        own = writer.reader.whole(read.text, prompt, [LOOK])
        assert [(found, json.loads(given)) for found, given in own.calls] == [("look", given) for given in arguments]
        assert not own.content.strip()
        num_read += 1
    assert num_read >= 2


@pytest.mark.representatives(*representatives())
@pytest.mark.parametrize("name", all_names())
def test_a_call_that_was_not_finished_is_told_and_is_text_for_agents(name):
    if is_silent(name):
        return
    tokens = tokens_of(name)
    *_, text = sampled(name, [FIRST])
    text = tokens.read(tokenizer()(text, add_special_tokens=False)["input_ids"], None, None).text
    begins = text.index("look")
    broken = text[: begins + (len(text) - begins) * 2 // 3]
    read = tokens.read(tokenizer()(broken, add_special_tokens=False)["input_ids"], "", [LOOK])
    [call] = read.calls
    assert (call.name, call.arguments) == ("unknown", {})
    assert call.problem
    assert not read.parts.calls
    assert "look" in read.parts.content


@pytest.mark.representatives(*representatives())
@pytest.mark.parametrize("name", all_names())
def test_an_episode_goes_on_behind_a_call_of_every_template(name):
    """The ids are those of the prompt, the turn and what the template writes of the answer: no template that agents
    have a reader of leaves an environment without its call."""
    if is_silent(name):
        return
    tokens = tokens_of(name)
    task = EnvironmentTask(lambda: Window(), prompt="q", rows=[{}, {}])
    if name.startswith("deepseekv3"):
        with pytest.raises(ConfigError, match="does not write tools"):
            start_episodes(task, [task.item("train", 0)], tokens, Calls())
        return
    [episode] = start_episodes(task, [task.item("train", 0)], tokens, Calls())
    _, opening, text = sampled(name, [{"city": "Oslo"}])
    is_begun = opening.lstrip().startswith("</think>")  # by the prompt
    opening = f"hm\n{opening.lstrip()}" if is_begun else ""
    before, ids = list(episode.token_ids), tokenizer()(opening + text, add_special_tokens=False)["input_ids"]
    episode.begin_turn(ids, "stop")()
    episode.end_turn()
    assert episode.environment.cities == ["Oslo"]
    assert episode.end_reason is None
    assert episode.token_ids[: len(before) + len(ids)] == [*before, *ids]
    told = tokenizer().decode(episode.token_ids[len(before) + len(ids) :])
    assert "Cold in Oslo." in told
    assert told.count("Oslo") == 1


class Window:
    def __init__(self):
        self.cities = []

    def reset(self):
        return None

    def look(self, city: str) -> str:
        """Looks.

        Args:
            city: Of it.
        """
        self.cities.append(city)
        return f"Cold in {city}."

    def get_reward(self):
        return float(len(self.cities))


@pytest.mark.parametrize(
    ("text", "told", "content"),
    [
        (
            '<tool_call>{"name": "look"}</tool_call><tool_call>{</tool_call> so',
            ["look", "not JSON"],
            "<tool_call>{</tool_call> so",
        ),
        ('a<tool_call>[1]</tool_call>b<tool_call>{"name": "look"}</tool_call>', ["a name and an object", "look"], None),
        ("<tool_call> <tool_call>", ["not closed", "not closed"], "<tool_call> <tool_call>"),
        ("no call", [], "no call"),
    ],
)
def test_what_is_no_call_is_told_in_its_place(text, told, content):
    tokens = tokens_of("chatml")
    read = tokens.read(tokenizer()(text)["input_ids"], "", [LOOK])
    assert len(read.calls) == len(told)
    for call, words in zip(read.calls, told, strict=True):
        assert words in (call.problem or call.name)
    assert content is None or read.parts.content == content
    if told and content is None:
        assert (read.parts.said, read.parts.content) == ("a\nb", "a<tool_call>[1]</tool_call>b")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("qwen3_5_nothink", "<tool_call>look(1)</tool_call>", "in another form; write <tool_call><function=NAME>"),
        ("glm4moe", "<tool_call>{}</tool_call>", "in another form; write <tool_call>NAME<arg_key>"),
        ("gemma4_v5", '<|tool_call>call:look{city:<|"|>A}<tool_call|>', "cannot be read"),
        (
            "gemma4_v5",
            "<|tool_call>call:look{city}<tool_call|>",
            "character 1 of its arguments; write <|tool_call>call:NAME{",
        ),
        ("gptoss", "<|channel|>commentary to=functions.look<|message|>[1]<|call|>", "its arguments are no object"),
        ("muse_glimmer", " to=look<|message|>Rome<|eot|>", "the call of look cannot be read"),
        ("llama3_1", '{"name": "look", "parameters": {', 'is in another form; write {"name": NAME'),
        ("lfm2_2_5_vl", "<|tool_call_start|>[look(1)]<|tool_call_end|>", "a name and an object of arguments"),
    ],
)
def test_why_a_call_cannot_be_read(name, text, words):
    [call] = tokens_of(name).read(tokenizer()(text, add_special_tokens=False)["input_ids"], "", [LOOK]).calls
    assert words in call.problem


def test_an_answer_in_json_is_no_call_that_failed():
    read = tokens_of("llama3_1").read(tokenizer()('{"result": 3}')["input_ids"], "", [LOOK])
    assert read.calls == ()
    assert read.parts.content == '{"result": 3}'


def test_a_tokenizer_may_tell_how_calls_are_written():
    """LFM2's first template writes tools, and no calls."""
    own = tokenizer().__class__(
        tokenizer_object=Tokenizer.from_str(tokenizer().backend_tokenizer.to_str()), eos_token="</s>"
    )
    own.add_special_tokens({"additional_special_tokens": ["<|tool_call_start|>", "<|tool_call_end|>"]})
    tokens = ChatTokens(own, trl_template("lfm2"))
    assert tokens.reader.name == "lfm"
    assert tokens_of("lfm2").reader.name == "hermes"


def test_the_broken_is_not_among_the_calls_of_agents():
    reader = tokens_of("chatml").reader
    parts = reader.whole('<tool_call>{"name": "look"}</tool_call><tool_call>', "", [LOOK])
    assert parts.calls == (("look", "{}"),)
    assert isinstance(parts.told[1], Broken)


# -- ends of turns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["<|im_end|>", "<|user|>", "<|observation|>", "<|endoftext|>"])
def test_a_turn_that_ended_with_another_end_goes_on(end):
    """The end that was sampled stays in its place; the template's own is not written beside it."""
    tokens = tokens_of("chatml")
    own = tokenizer().convert_tokens_to_ids(end)
    assert own in tokens.end_ids
    user = {"role": "user", "content": "b"}
    found = tokens.answer_ids([user], {"role": "assistant", "content": "a"}, own, [user], None, "here")
    assert tokenizer().decode(found) == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def test_an_end_that_begins_what_follows_is_not_written_twice():
    """GLM ends a turn with the header of the next: in environments, and at the endpoint, where the turn stays whole."""
    tokens = tokens_of("glm4moe")
    writer = ChatTokens(tokenizer(), trl_template("glm4moe"))
    for role, end in (("user", "<|user|>"), ("tool", "<|observation|>")):
        own = tokenizer().convert_tokens_to_ids(end)
        talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": role, "content": "b"}]
        found = tokens.answer_ids(talk[:1], talk[1], own, talk[2:], None, "here")
        assert end not in tokenizer().decode(found)
        written = writer.written(talk)
        ids = tokenizer()(f"\na{end}", add_special_tokens=False, return_tensors="np")["input_ids"][0]
        tail = writer.tail(written, 2, Turn(ids, "\na", is_ended=True, is_cut=False))
        assert tail.num_kept == len(ids)
        assert end not in tail.text
