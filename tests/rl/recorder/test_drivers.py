"""The same policy, task and tools give the same rows, token for token, whether an environment or an agent drives: for
every template and form of a turn."""

import json
import re

import pytest

from tests.rl.agents.helpers import Speaker, episodes_on
from tests.rl.recorder.test_families import (
    TEMPLATES,
    Window,
    all_names,
    is_silent,
    representatives,
    sampled,
    tokenizer,
    tokens_of,
)
from treewise.rl.agents.wire.asked import AgentRequest
from treewise.rl.tasks import EnvironmentTask
from treewise.rl.tasks.calls import Calls
from treewise.rl.tasks.episode import start_episodes

OSLO, ROME, QUESTION = {"city": "Oslo"}, {"city": "Rome"}, "q"
FORMS = ("one call", "several calls", "no call", "a call that is none", "thinking before", "cut off")


def has_calls(name):
    return not is_silent(name) and not name.startswith("deepseekv3")  # an error for environments: it writes no tools


def ids_of(text):
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def ends_of(name):
    """The ids that end this template's turns: `<|end|>` only ends a part of GPT-OSS's."""
    (other, observation) = tokenizer().convert_tokens_to_ids(["<|end|>", "<|observation|>"])
    ids = [each for each in tokens_of(name).end_ids if each != other or not name.startswith("gptoss")]
    if name.startswith("glm"):
        return [observation]
    return ids


def turns_of(name, form):
    """The ids of what a policy says: a turn in this form, and one of text; None where the template has no such turn."""
    thoughts = ({"reasoning_content": "hm"},) if form == "thinking before" else ({}, {"reasoning_content": "hm"})
    made = sampled(name, [OSLO, ROME] if form == "several calls" else [OSLO], thoughts=thoughts)
    if made is None:
        return None
    _, opening, text = made
    if form == "thinking before":
        if "hm" not in opening + text:
            return None
    elif opening.lstrip().startswith("</think>"):  # the prompt began it
        opening = f"hm\n{opening.lstrip()}"
    else:
        opening = ""
    call, ends = ids_of(opening + text), ends_of(name)
    if call[-1] not in ends:  # GLM's template ends no turn: what follows begins with the token that ended it
        call[-1] = ends[-1]
    said = [*ids_of("It is cold."), call[-1]]
    if form == "several calls" and text.count("look") < 2:  # Llama 3.1 and GPT-OSS write one call
        return None
    if form == "no call":
        return [said]
    if form == "cut off":
        return [call[: len(call) * 2 // 3]]
    if form == "a call that is none":
        kept = call[:-1]
        begins = tokenizer().decode(kept).index("look")
        return [[*kept[: begins + (len(kept) - begins) * 2 // 3], call[-1]]]
    return [call, said]


def by_environment(name, turns, *, is_cut):
    task = EnvironmentTask(Window, prompt=QUESTION, rows=[{}, {}])
    [episode] = start_episodes(task, [task.item("train", 0)], tokens_of(name), Calls())
    for turn in turns:
        assert episode.end_reason is None
        episode.begin_turn(turn, "length" if is_cut else "stop")()
        episode.end_turn()
    return episode


def by_agent(name, turns, tools, *, is_cut):
    """The rows of an agent that does what the environment does: it calls tools, and ends with a turn without calls."""
    tokens = tokens_of(name)
    speaker = Speaker([list(turn) for turn in turns], tokenizer=tokenizer())
    with episodes_on(speaker, chat_template=tokens.template.text, keeps_thinking=True) as episodes:
        episodes.chat.end_ids = tuple(ends_of(name))
        episode, messages = episodes.open("first"), [{"role": "user", "content": QUESTION}]
        for turn in turns:
            limit = {"max_tokens": len(turn)} if is_cut else {}
            opened = episode.begin(AgentRequest(model="policy", messages=tuple(messages), tools=tools, **limit))
            messages.append(opened.done.result(60)[0].message())
            for call in messages[-1].get("tool_calls") or ():
                city = json.loads(call["function"]["arguments"])["city"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"Cold in {city}."})
        rows, _ = episode.rows()
    assert not speaker.texts
    return rows


@pytest.mark.representatives(*filter(has_calls, representatives()))
@pytest.mark.parametrize("name", filter(has_calls, all_names()))
def test_an_environment_and_an_agent_give_the_same_rows(name):
    seen = []
    for form in FORMS:
        turns = turns_of(name, form)
        if turns is None:
            continue
        is_cut = form == "cut off"
        episode = by_environment(name, turns, is_cut=is_cut)
        [row] = by_agent(name, turns, episode.schemas, is_cut=is_cut)
        # An environment says what is wrong with it, where the template can; for an agent it is text.
        size = episode.turn_starts[0] + len(turns[0]) if form == "a call that is none" else len(episode.token_ids)
        assert row["token_ids"] == episode.token_ids[:size], form
        trained = [index for index, weight in enumerate(row["loss_weights"]) if weight]
        starts = zip(episode.turn_starts, turns, strict=True)
        assert trained == [index for start, turn in starts for index in range(start, start + len(turn))], form
        seen.append(form)
    assert {"one call", "no call", "a call that is none", "cut off"} <= set(seen)


IN_FIELDS = (  # as GPT-OSS's: no result whose call is not there, by its id
    "{% if tools %}{{ tools | tojson }}{% endif %}{% set k = namespace(ids=[]) %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_start|>user {{ m.content }}<|im_end|>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id not in k.ids %}{{ raise_exception('of which call?') }}{% endif %}"
    "<|im_start|>tool {{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>assistant{{ m.content }}{% for c in m.tool_calls or [] %}{% set k.ids = k.ids + [c.id] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


WITH_IDS = (  # as Mistral's: no result without the id of its call, of nine characters
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | default('') | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("name", "template", "call", "end", "result", "num_different"),
    [
        (
            "in fields",
            IN_FIELDS,
            '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>',
            "<|im_end|>",
            "tool Cold in Oslo",
            1,
        ),
        (
            "with ids",
            WITH_IDS,
            '[TOOL_CALLS]look[CALL_ID]abcdefgh1[ARGS]{"city": "Oslo"}',
            "</s>",
            r"\[TOOL_RESULTS\](\w{9})\[TOOL_CONTENT\]Cold in Oslo",
            3,
        ),
    ],
)
def test_results_name_their_calls_alike_by_both(name, template, call, end, result, num_different, monkeypatch):
    monkeypatch.setitem(TEMPLATES, name, lambda: template)
    turns = [ids_of(f"{text}{end}") for text in (call, call * 2, "It is cold.")]
    episode = by_environment(name, turns, is_cut=False)
    [row] = by_agent(name, turns, episode.schemas, is_cut=False)
    assert row["token_ids"] == episode.token_ids
    found = re.findall(result, tokenizer().decode(episode.token_ids))
    assert (len(found), len(set(found))) == (3, num_different)
