"""Agents that change all that they may, and more: each sampled token is recorded as it was sampled, trained once."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rl.agents.helpers import (
    CALL,
    END,
    TOKENIZER,
    Speaker,
    arguments_respaced,
    asked,
    assert_rows_are,
    episodes_on,
    say,
)
from treewise.data.io.encoded_arrays import decoded
from treewise.rl.agents.forks import FORKS
from treewise.rl.agents.recording import Recording, written_for
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError

SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+2?"}
START = [SYSTEM, USER]
FIXTURES = Path(__file__).parents[2] / "data" / "fixtures"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("smollm2")
    for path in (FIXTURES / "smollm2").iterdir():
        if path.suffix == ".gz":
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        else:
            shutil.copy(path, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen3():
    return json.loads((FIXTURES / "qwen3" / "tokenizer_config.json").read_text())["chat_template"]


def result(message, text="3"):
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def prefix_of_last(speaker):
    return speaker.seen[-1][0]


def path_of(speaker, number):
    prefix, ids, _ = speaker.seen[number]
    return (*prefix, *ids)


def goes_on(speaker, number=-2):
    """Whether the last continuation was sampled behind all of an earlier one."""
    path = path_of(speaker, number)
    return prefix_of_last(speaker)[: len(path)] == path


@pytest.mark.parametrize(
    "change", [lambda turn: turn, arguments_respaced, lambda turn: {**turn, "refusal": None, "name": None}]
)
@pytest.mark.parametrize("text", [CALL, "Let me see.\n" + CALL, "<think>\nhm\n</think>\n\n" + CALL + "\n" + CALL])
def test_a_turn_stays_as_it_was_sampled(text, change):
    """Whatever a library writes otherwise: the ids stay, and one row holds the episode."""
    speaker = Speaker([text, "It is 3."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        turn, _ = say(episode, START)
        assert turn["tool_calls"][0]["function"]["name"] == "add"
        changed = change(turn)
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in changed["tool_calls"]]
        _, call = say(episode, [*START, changed, *answers])
        assert call.reason is None
        assert goes_on(speaker)
        rows, account = assert_rows_are(speaker, episode)
        assert len(rows) == 1
        assert account.again == 0
        assert not episode.recording.reasons.keys() - {"new conversation"}


CHANGES = {
    "thinking dropped": lambda talk: [
        *talk[:2],
        {k: v for k, v in talk[2].items() if k != "reasoning_content"},
        *talk[3:],
    ],
    "turn edited": lambda talk: [*talk[:2], {**talk[2], "content": talk[2]["content"] + " Or so."}, *talk[3:]],
    "result cut": lambda talk: [*talk[:3], {**talk[3], "content": talk[3]["content"][:4]}, *talk[4:]],
    "result edited": lambda talk: [*talk[:3], {**talk[3], "content": "another result of it"}, *talk[4:]],
    "system prompt edited": lambda talk: [{"role": "system", "content": "Be brief."}, *talk[1:]],
    "message edited": lambda talk: [talk[0], {"role": "user", "content": "1 + 2?"}, *talk[2:]],
    "messages dropped": lambda talk: [talk[0], *talk[4:]],
    "summarised": lambda talk: [talk[0], {"role": "user", "content": "So far: 3. Go on."}],
    "new conversation": lambda talk: [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Say a."},
    ],
    "same messages again": lambda talk: talk[:4],
    "other message after the same ones": lambda talk: [*talk[:4], {"role": "user", "content": "Really?"}],
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_change_forks_at_the_first_token_that_differs(reason):
    speaker = Speaker(["<think>\nhm\n</think>\n\nAh.\n" + CALL, "It is 3.", "Done."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        first, _ = say(episode, START)
        talk = [*START, first, result(first, "3, says the adder")]
        second, _ = say(episode, talk)
        changed = CHANGES[reason]([*talk, second, {"role": "user", "content": "Go on."}])
        _, call = say(episode, changed)
        assert call.reason == reason
        expected = written_for(episodes.chat, asked(changed)).text
        assert episodes.chat.decode(prefix_of_last(speaker)) == expected
        rows, account = assert_rows_are(speaker, episode)
        assert len(rows) == 2
        same = 0
        while prefix_of_last(speaker)[same] == path_of(speaker, 1)[same]:
            same += 1
            if same in (len(prefix_of_last(speaker)), len(path_of(speaker, 1))):
                break
        agreed = episodes.chat.decode(prefix_of_last(speaker)[:same])
        before = episodes.chat.decode(path_of(speaker, 1))
        common = next(
            (i for i, (a, b) in enumerate(zip(expected, before, strict=False)) if a != b),
            min(len(expected), len(before)),
        )
        assert len(agreed) == common
        assert (account.again > 0) == (
            reason not in ("summarised", "new conversation", "same messages again", "other message after the same ones")
        )
        assert reason in FORKS


def test_other_tools_are_another_conversation():
    speaker = Speaker(["Ah.", "Oh."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        turn, _ = say(episode, START)
        _, call = say(episode, [*START, turn, USER], tools=None)
        assert call.reason == "tools changed"
        assert len(assert_rows_are(speaker, episode)[0]) == 2


def test_an_edited_turn_stays_as_far_as_its_text_does():
    """In the tokens that were sampled, although the text would be cut into others."""
    speaker = Speaker([list(b"xyz wrong and more"), "Ok."], splits=False)
    with episodes_on(speaker, max_new_tokens=18) as episodes:
        episode = episodes.open("a")
        turn, _ = say(episode, START, tools=None)
        say(episode, [*START, {**turn, "content": turn["content"][:4]}, USER], tools=None)
        path, new = path_of(speaker, 0), prefix_of_last(speaker)
        size = len(speaker.seen[0][0]) + 4
        assert new[:size] == path[:size]
        assert new[size] == END
        assert len(assert_rows_are(speaker, episode)[0]) == 2


@pytest.mark.parametrize("back", ["cut", "put back"])
def test_a_stop_text_is_sampled_and_not_given_out(back):
    """The next call sees what was given out; where the agent puts the text back, as some do, the turn stays whole."""
    speaker = Speaker(["code</code> and", "Ok."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        turn, call = say(episode, START, stop=("</code>",))
        assert turn["content"] == "code"
        assert call.choices[0].reply.stop_text == "</code>"
        sampled = episodes.chat.decode(speaker.seen[0][1])
        assert sampled.startswith("code</code>")
        assert "and" not in sampled
        content = "code" if back == "cut" else sampled
        _, later = say(episode, [*START, {**turn, "content": content}, USER])
        assert goes_on(speaker) == (back != "cut")
        assert later.reason == ("end of turn" if back == "cut" else "turn edited")
        assert episodes.chat.decode(prefix_of_last(speaker)) == written_for(episodes.chat, later.asked).text
        assert len(assert_rows_are(speaker, episode)[0]) == (2 if back == "cut" else 1)


def test_a_turn_that_was_cut_by_its_length_is_closed_for_it():
    speaker = Speaker(["A long answer", "Ok."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        turn, call = say(episode, START, max_tokens=4)
        assert call.choices[0].finish == "length"
        _, later = say(episode, [*START, turn, USER])
        assert goes_on(speaker)
        assert later.reason is None
        assert prefix_of_last(speaker)[len(path_of(speaker, 0))] == END
        assert len(assert_rows_are(speaker, episode)[0]) == 1


def test_a_turn_that_is_kept_in_part_and_later_whole():
    """Its tokens are trained in the row that holds all of them."""
    speaker = Speaker(["A long answer.", "Ok.", "Fine."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        turn, _ = say(episode, START)
        say(episode, [*START, {**turn, "content": turn["content"][:6]}, USER])
        say(episode, [*START, turn, USER])
        assert goes_on(speaker, 0)
        assert len(assert_rows_are(speaker, episode)[0]) == 2


def test_another_end_than_the_templates_is_not_shown_again():
    other = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    speaker = Speaker(["A.", "Ok."], end=other)
    with episodes_on(speaker) as episodes:
        episodes.chat.end_ids = (END, other)
        episode = episodes.open("a")
        turn, _ = say(episode, START)
        assert turn["content"] == "A."
        _, call = say(episode, [*START, turn, USER])
        assert call.reason == "end of turn"
        assert other not in prefix_of_last(speaker)
        assert episodes.chat.decode(prefix_of_last(speaker)) == written_for(episodes.chat, call.asked).text
        assert len(assert_rows_are(speaker, episode)[0]) == 2


def test_choices_are_draws_of_their_own():
    """Also where two are the same tokens: each is trained."""
    speaker = Speaker(["same", "same", "other", "Ok."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        opened = episode.begin(asked(START, num_choices=3))
        replies = opened.done.result(60)
        assert [each.content for each in replies] == ["same", "same", "other"]
        _, call = say(episode, [*START, replies[2].message(), USER])
        assert call.start.reply.content == "other"
        rows, _ = assert_rows_are(speaker, episode)
        assert len(rows) == 3
        assert len({draw for row in rows for draw in row["draws"]}) == 5


def test_a_call_that_was_asked_for_is_begun_and_the_beginning_is_no_draw():
    speaker = Speaker(['add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', '{"a": 5}}\n</tool_call>'])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        turn, _ = say(episode, START, must_call="")
        assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        turn2, call = say(episode, [*START, turn, result(turn)], must_call="add")
        assert json.loads(turn2["tool_calls"][0]["function"]["arguments"]) == {"a": 5}
        assert goes_on(speaker)
        opening = '<tool_call>\n{"name": "add", "arguments": '
        assert episodes.chat.decode(prefix_of_last(speaker)).endswith(opening)
        rows, _ = assert_rows_are(speaker, episode)
        assert len(rows) == 1
        assert call.choices[0].num_sampled < len(call.choices[0].turn.token_ids)


def test_without_parallel_calls_a_turn_ends_with_its_first():
    speaker = Speaker(["<think>\nhm\n</think>\n\nOk.\n" + CALL + "\n" + CALL + " and", "It is 3."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        turn, _ = say(episode, START, is_parallel=False)
        assert len(turn["tool_calls"]) == 1
        assert turn["content"] == "Ok."
        _, call = say(episode, [*START, turn, result(turn)], is_parallel=False)
        assert call.reason == "end of turn"
        text = episodes.chat.decode(prefix_of_last(speaker))
        assert text.count('{"name": "add", "arguments"') == 1
        assert text == written_for(episodes.chat, call.asked).text
        assert len(assert_rows_are(speaker, episode)[0]) == 2


@pytest.mark.parametrize("records", [False, True])
def test_a_token_has_the_experts_of_the_forward_that_was_first_given_it(records):
    speaker = Speaker(["one", CALL, "three"])
    with episodes_on(speaker, records_experts=records) as episodes:
        episode = episodes.open("a")
        first, _ = say(episode, [USER])
        second, _ = say(episode, [USER, first, {"role": "user", "content": "and?"}])
        say(episode, [USER, first, {"role": "user", "content": "and?"}, second, result(second)])
        (row,), _ = episode.rows()
    if not records:
        assert "routed_experts" not in row
        return
    table = decoded(row["routed_experts"], "routed_experts", "row")
    assert table.shape == (len(row["token_ids"]), 1, 1)
    ends = [len(prefix) + len(ids) for prefix, ids, _ in speaker.seen]
    # The last token of a turn is an input of the next call's forward; that of the row had none.
    expected = [0] * (ends[0] - 1) + [1] * (ends[1] - ends[0]) + [2] * (ends[2] - ends[1]) + [-1]
    assert table[:, 0, 0].tolist() == expected


def test_an_account_without_a_row_does_not_add_up(monkeypatch):
    speaker = Speaker(["One.", "Two."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        say(episode, START)
        say(episode, [USER])
        assert assert_rows_are(speaker, episode)[1].fault is None
        leaves = Recording._leaves
        monkeypatch.setattr(Recording, "_leaves", lambda self: list(leaves(self))[:-1])
        _, account = episode.rows()
        assert account.recorded == len(speaker.seen[0][1]) < account.sampled
        assert "do not add up" in account.fault


def test_calls_that_are_not_trained_are_context():
    speaker = Speaker(["Judged.", "Ok.", "Fine."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        opened = episode.begin(asked(START), is_trained=False)
        turn = opened.done.result(60)[0].message()
        say(episode, [*START, turn, USER])
        rows, account = assert_rows_are(speaker, episode, context={0})
        assert len(rows) == 1
        assert account.context == len(speaker.seen[0][1])
        episode.begin(asked([USER]), is_trained=False).done.result(60)
        assert len(assert_rows_are(speaker, episode, context={0, 2})[0]) == 1


def test_texts_and_ids_go_on_where_they_do():
    speaker = Speaker([" two three", " five", " six", " seven"])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")

        def complete(prompt):
            opened = episode.begin(AgentRequest(model="m", prompt=prompt, max_tokens=64))
            return opened.done.result(60)[0].content

        text = complete("one")
        assert text == " two three"
        complete("one two three four")
        assert prefix_of_last(speaker)[: len(path_of(speaker, 0)) - 1] == path_of(speaker, 0)[:-1]
        complete(path_of(speaker, 1))
        assert goes_on(speaker)
        complete("one two and")
        rows, _ = assert_rows_are(speaker, episode)
        assert len(rows) == 3


def test_a_template_that_drops_thoughts_forks_or_keeps_them(smollm2, qwen3):
    """Qwen3's writes no thought before the last question."""
    for keeps, num_rows in ((False, 2), (True, 1)):
        speaker = Speaker(["<think>\nhm\n</think>\n\nAh.", "Ok."], smollm2, smollm2.eos_token_id)
        with episodes_on(speaker, chat_template=qwen3, keeps_thinking=keeps) as episodes:
            episode = episodes.open("a")
            turn, _ = say(episode, START, tools=None)
            assert turn == {"role": "assistant", "content": "Ah.", "reasoning_content": "hm"}
            if keeps:
                del turn["reasoning_content"]
            _, call = say(episode, [*START, turn, USER], tools=None)
            assert call.reason == (None if keeps else "template")
            assert goes_on(speaker) == keeps
            assert ("hm" in episodes.chat.decode(prefix_of_last(speaker))) == keeps
            rows, account = assert_rows_are(speaker, episode)
            assert len(rows) == num_rows
            assert (account.again == 0) == keeps


def test_thoughts_stay_while_tools_are_called(smollm2, qwen3):
    texts = [f"<think>\nhm{i}\n</think>\n\n{CALL}" for i in range(3)]
    speaker = Speaker(texts, smollm2, smollm2.eos_token_id)
    with episodes_on(speaker, chat_template=qwen3) as episodes:
        episode, talk = episodes.open("a"), list(START)
        for _ in range(3):
            turn, call = say(episode, talk)
            assert call.reason in (None, "new conversation")
            talk += [turn, result(turn)]
        assert len(assert_rows_are(speaker, episode)[0]) == 1


def test_a_prompt_that_is_too_long_is_refused_by_its_usual_name():
    speaker = Speaker()
    with episodes_on(speaker, max_length=40) as episodes:
        episode = episodes.open("a")
        with pytest.raises(RefusedError, match="maximum context length is 40 tokens") as caught:
            episode.begin(asked(START))
        assert caught.value.code == "context_length_exceeded"
        assert not speaker.seen


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["on", "branch", "again", "drop", "edit", "strip", "cut", "system", "respace", "two"]),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=8,
)
TEXTS = st.lists(
    st.sampled_from(
        [CALL, "Hm.\n" + CALL, "  Ok \n", "<think>\na b\n</think>\n\nSo", "é≠🙂 ok", "<tool_call>{bad", "", CALL + CALL]
    ),
    min_size=16,
    max_size=16,
)


@settings(deadline=None)
@given(steps=STEPS, texts=TEXTS, family=st.sampled_from(["chatml", "qwen3"]), keeps=st.booleans())
def test_whatever_an_agent_does_each_token_is_trained_once(smollm2, qwen3, steps, texts, family, keeps):
    speaker = Speaker(list(texts), smollm2, smollm2.eos_token_id) if family == "qwen3" else Speaker(list(texts))
    template = qwen3 if family == "qwen3" else "chatml"
    with episodes_on(speaker, chat_template=template, keeps_thinking=keeps) as episodes:
        episode, talk = episodes.open("a"), list(START)
        for what, number in steps:
            at = number % len(talk)
            if what == "branch":
                talk = [*talk[: max(at, 1)], {"role": "user", "content": f"other {number}"}]
            elif what == "drop" and len(talk) > 2:
                talk = [*talk[:at], *talk[at + 1 :]] if talk[at]["role"] == "user" and at else talk
            elif what == "edit":
                talk = [*talk[:at], {**talk[at], "content": f"{talk[at]['content']}{number}"}, *talk[at + 1 :]]
            elif what == "strip":
                talk = [{**each, "content": each["content"].strip()} for each in talk]
            elif what == "cut":
                talk = [
                    {**each, "content": each["content"][:number]} if each["role"] == "tool" else each for each in talk
                ]
            elif what == "system":
                talk = [{"role": "system", "content": f"Be {number}."}, *talk[1:]]
            elif what == "respace":
                talk = [
                    arguments_respaced(each) if each["role"] == "assistant" and each.get("tool_calls") else each
                    for each in talk
                ]
                ids = [call["id"] for each in talk for call in each.get("tool_calls", [])]
                tools = [each for each in talk if each["role"] == "tool"]
                if len(ids) == len(tools):
                    for each, name in zip(tools, ids, strict=True):
                        talk[talk.index(each)] = {**each, "tool_call_id": name}
                talk = [
                    {**each, "content": "".join(part["text"] for part in each["content"] or [])}
                    if isinstance(each["content"], list | None)
                    else each
                    for each in talk
                ]
            opened = episode.begin(asked(talk, num_choices=2 if what == "two" else 1))
            turn = opened.done.result(60)[-1].message()
            if what != "again":
                answers = [
                    {"role": "tool", "tool_call_id": c["id"], "content": f"got {number}"}
                    for c in turn.get("tool_calls", [])
                ]
                talk = [*talk, turn, *(answers or [{"role": "user", "content": f"next {number}"}])]
        assert_rows_are(speaker, episode)


def test_training_on_the_rows_is_a_plain_loop_over_the_calls():
    """With forks, choices and equal draws: the gradient is that of each call's own prompt and reply, at any budget."""
    import torch

    from tests.rl.online.helpers import tiny_policy
    from treewise import Forest, TreeEngine
    from treewise.nn.whole_gradients import gradient_error, gradients_of
    from treewise.objectives import SFT
    from treewise.rl.samplers import TransformersSampler
    from treewise.tree.trajectory import Trajectory

    model = tiny_policy(max_position_embeddings=4096)
    speaker = Speaker()
    speaker.model = TransformersSampler(model)

    def sample(requests):
        found = speaker.model.sample(requests)
        speaker.seen += [
            (request.prefix_ids, tuple(each.token_ids.tolist()), each.logprobs)
            for request, (each,) in zip(requests, found, strict=True)
        ]
        return found

    speaker.sample = sample
    with episodes_on(speaker, max_new_tokens=9) as episodes:
        episode = episodes.open("a", "task", seed=3)
        turn, _ = say(episode, START, tools=None)
        say(episode, [*START, turn, USER], tools=None)
        say(episode, [*START, {**turn, "content": turn["content"][:3]}, USER], tools=None)
        opened = episode.begin(asked([*START, turn, USER], tools=None, num_choices=2, temperature=0.0))
        opened.done.result(60)
        say(episode, [{"role": "system", "content": "Be brief."}, USER, turn, USER], tools=None)
        rows, account = assert_rows_are(speaker, episode)
    assert len(rows) == 5
    assert account.again > 0
    names = ("token_ids", "loss_weights", "sampler_logprobs", "draws", "group", "rollout")
    items = [Trajectory(**{name: row[name] for name in names}) for row in rows]
    total = sum(len(ids) for _, ids, _ in speaker.seen)
    model.zero_grad()
    for prefix, ids, logprobs in speaker.seen:
        logits = model(torch.tensor([[*prefix, *ids]])).logits[0, len(prefix) - 1 : -1].float()
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert found.tolist() == pytest.approx(logprobs.tolist(), abs=1e-4)
        (-found.sum() / total).backward()
    expected = gradients_of(model)
    for budget in (None, 48):
        model.zero_grad()
        TreeEngine(model, max_tokens=budget).step(Forest.from_trajectories(items), SFT())
        assert gradient_error(gradients_of(model), expected) < 1e-5
