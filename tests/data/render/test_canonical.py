"""What protocols, SDKs and frameworks write otherwise is the same message; what the model sees otherwise is not."""

import pytest

from treewise.data.render.canonical import canonical, canonical_all, chain, content_text, following

FUNCTION = {"name": "get", "arguments": '{"city":"Rome","at":1}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
TURN = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "other",
    [
        {**TURN, "content": [{"type": "text", "text": "I "}, {"type": "output_text", "text": "look."}]},
        {**TURN, "name": None, "reasoning_content": None, "refusal": None},
        {**TURN, "tool_calls": [{**CALL, "index": 0, "id": "c2"}]},
        {**TURN, "tool_calls": [FUNCTION]},
        {**TURN, "tool_calls": [{**CALL, "function": {**FUNCTION, "arguments": '{"at": 1, "city": "Rome"}'}}]},
        {**TURN, "tool_calls": [{**CALL, "function": {**FUNCTION, "arguments": {"at": 1, "city": "Rome"}}}]},
        {**TURN, "content": "<think>\n</think>\n\nI look."},
    ],
)
def test_other_spellings_are_the_same(other):
    assert canonical(other) == canonical(TURN)


@pytest.mark.parametrize(
    "other",
    [
        {**TURN, "content": "I look"},
        {**TURN, "content": "I look.\n"},
        {**TURN, "role": "user"},
        {**TURN, "reasoning_content": "hm"},
        {**TURN, "tool_calls": None},
        {**TURN, "tool_calls": [CALL, CALL]},
        {**TURN, "tool_calls": [{**CALL, "function": {**FUNCTION, "arguments": '{"city":"Rome"}'}}]},
        {**TURN, "tool_calls": [{**CALL, "function": {**FUNCTION, "name": "put"}}]},
        {**TURN, "content": [{"type": "text", "text": "I look."}, {"type": "image", "image": "a.png"}]},
    ],
)
def test_what_differs_is_another_message(other):
    assert canonical(other) != canonical(TURN)


def test_reasoning_and_margins_may_be_left_away():
    thought = {**TURN, "content": "<think>hm</think>\n\nI look.\n"}
    assert canonical(thought, with_reasoning=False, with_margins=False) == canonical(TURN)
    spaced = {"role": "user", "content": " Hi "}
    assert canonical(spaced, with_margins=False) != canonical({"role": "user", "content": "Hi"}, with_margins=False)


@pytest.mark.parametrize("arguments", [None, "", "  ", "{}", {}])
def test_blank_arguments_are_none(arguments):
    call = {**CALL, "function": {"name": "get", "arguments": arguments}}
    assert canonical({**TURN, "tool_calls": [call]})[3] == (("get", "{}"),)


def test_results_go_by_the_call_that_they_name_else_by_their_place():
    calls = {**TURN, "tool_calls": [{**CALL, "id": "x"}, {**CALL, "id": "y"}]}
    named = [{"role": "tool", "tool_call_id": name, "content": name} for name in "yx"]
    assert [item[-1] for item in canonical_all([calls, *named])] == [None, 1, 0]
    nameless = [{"role": "tool", "content": name} for name in "yx"]
    assert [item[-1] for item in canonical_all([calls, *nameless, calls, nameless[0]])] == [None, 0, 1, None, 0]
    assert canonical_all([named[0]])[0][-1] == "y"


def test_every_beginning_of_a_conversation_has_a_name():
    items = canonical_all([{"role": "user", "content": "Hi"}, TURN])
    names = chain("root", items)
    assert names[0] == "root"
    assert len(set(names)) == 3
    assert names[2] == following(names[1], items[1])
    assert chain("other", items)[2] != names[2]


def test_the_text_of_a_content():
    assert [content_text(content) for content in (None, "a", [], [{"type": "text", "text": "a"}])] == ["", "a", "", "a"]
    assert content_text([{"type": "image", "image": "a.png"}]) == '{"image": "a.png", "type": "image"}'


@pytest.mark.parametrize("calls", ["[]", 3, [1, "a"], {"id": 1}, [{"function": 3}]])
def test_odd_calls_raise_nothing(calls):
    canonical_all([{"role": "assistant", "content": {"a": 1}, "tool_calls": calls}, {"role": "tool"}])
