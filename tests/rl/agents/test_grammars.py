"""Replies that keep to a schema: what may be said, whatever the model would say, with the log-probs of the policy."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("llguidance")

from tests.rl.agents.helpers import ADD, CALL, END, TOKENIZER, asked, episodes_on
from tests.rl.agents.test_endpoint import USER, post, served
from tests.rl.online.helpers import tiny_policy
from treewise.rl.agents.grammars import Grammars
from treewise.rl.agents.wire.asked import RefusedError
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.samplers import TransformersSampler

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def length_of(grammar, text):
    """How many of a text's tokens a grammar takes, and whether it may end behind them; that, or more."""
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    for size, token in enumerate(ids):
        allowed = grammar.allowed(ids[:size])
        if allowed is not None and not allowed[token]:
            return size, bool(allowed[END]), len(ids)
    allowed = grammar.allowed(ids)
    return len(ids), allowed is None or bool(allowed[END]), len(ids)


def grammar_of(template="chatml", prompt="", **more):
    writer = ChatTokens(TOKENIZER, template)
    call = asked([USER], **{"schema": SCHEMA, "tools": None, "reads_calls": False, **more})
    return Grammars(TOKENIZER, [END]).of(call, writer.reader, prompt)


@pytest.mark.parametrize(
    ("text", "num_taken", "may_end"),
    [
        ('{"a": 1, "b": "x"}', None, True),
        ('{ "a":1,\n  "b":"y" }', None, True),
        ('{"b": "x"}', 2, False),
        ('{"a": 1}', 7, False),
        ('{"a": 1.5', 7, False),
        ('{"a": 1, "b": "z"}', 15, False),
        ("Sure: {", 0, False),
        ('<think>\nhm {</think>\n\n{"a": 1, "b": "x"}', None, True),
        ("<think>\nhm", None, False),
        (CALL, 2, False),  # `<t`, as of a thought
    ],
)
def test_what_an_answer_may_be(text, num_taken, may_end):
    taken, found, size = length_of(grammar_of(), text)
    assert (taken, found) == (size if num_taken is None else num_taken, may_end)


def test_white_space_comes_to_an_end():
    """Else a small model may write nothing else."""
    taken, may_end, _ = length_of(grammar_of(), '{"a":' + " " * 200)
    assert 40 <= taken <= 50
    assert not may_end


def test_beside_tools_a_call_may_come_instead():
    grammar = grammar_of(tools=[ADD], reads_calls=True)
    size = len(TOKENIZER(CALL, add_special_tokens=False)["input_ids"])
    assert length_of(grammar, CALL) == (size, True, size)
    assert length_of(grammar, "<think>a</think>" + CALL)[1]
    taken, may_end, size = length_of(grammar, '{"a": 1, "b": "y"}')  # from the beginning, once more
    assert (taken, may_end) == (size, True)
    assert not grammar.is_plain
    assert grammar_of().is_plain


def test_a_thought_that_the_prompt_began_comes_first():
    grammar = grammar_of(prompt="<|im_start|>assistant\n<think>\n")
    assert not length_of(grammar, '{"a": 1, "b": "x"}')[1]
    taken, may_end, size = length_of(grammar, 'hm</think>\n{"a": 1, "b": "x"}')
    assert (taken, may_end) == (size, True)
    assert not grammar.is_plain


def test_without_thinking_the_answer_is_all():
    assert length_of(grammar_of(PLAIN), "<think>")[0] == 0
    assert length_of(grammar_of(PLAIN), '{"a": 1, "b": "x"}')[1]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "none"}, "none"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused(schema, words):
    with pytest.raises(RefusedError, match=words):
        grammar_of(schema=schema)


# -- by the policy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_a_policy_that_says_anything_keeps_to_the_schema(temperature):
    """A model of random weights; each recorded log-prob is that of the policy without the grammar."""
    model = tiny_policy(max_position_embeddings=4096)
    sampler = TransformersSampler(model)
    sampler.tokenizer, sampler.end = TOKENIZER, END
    with episodes_on(sampler, chat_template=PLAIN) as episodes:
        episode = episodes.open("first", seed=3)
        more = {"schema": SCHEMA, "tools": None, "reads_calls": False, "temperature": temperature, "max_tokens": 400}
        opened = episode.begin(asked([USER], num_choices=3, **more))
        beside = episode.begin(asked([USER], tools=None, reads_calls=False, max_tokens=20))  # in the same batch
        for reply in opened.done.result(100):
            if reply.finish == "stop":
                assert set(json.loads(reply.content)) == {"a", "b"}
            else:  # at temperature 0 a model may write one digit for ever
                assert temperature == 0.0
        assert beside.done.result(100)
        rows, account = episode.rows()
    assert account.sampled == account.trained
    assert [row["turns"][0].get("constrained") for row in rows].count(True) >= 1
    for row in rows:
        weights = np.flatnonzero(row["loss_weights"])
        with torch.no_grad():
            logits = model.eval()(torch.tensor([row["token_ids"]])).logits[0].float()
        logprobs = torch.log_softmax(logits / (temperature or 1.0 if row["turns"][0].get("constrained") else 1.0), -1)
        own = [float(logprobs[i - 1, row["token_ids"][i]]) for i in weights]
        assert np.allclose(own, np.array(row["sampler_logprobs"])[weights], atol=1e-5)


BODIES = {
    "chat/completions": {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
    },
    "responses": {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "messages": {
        "messages": [USER],
        "max_tokens": 400,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_every_protocol_asks_for_it(path):
    model = tiny_policy(max_position_embeddings=4096)
    sampler = TransformersSampler(model)
    with served(chat_template=PLAIN, max_new_tokens=400) as client:
        client.episode.batcher.sampler = sampler
        found = post(client, path, {"model": "m", **BODIES[path]})
        text = {
            "chat/completions": lambda: found["choices"][0]["message"]["content"],
            "responses": lambda: found["output"][0]["content"][0]["text"],
            "messages": lambda: found["content"][0]["text"],
        }[path]()
        assert set(json.loads(text)) == {"a", "b"}
        if path == "responses":
            assert found["text"]["format"] == BODIES[path]["text"]["format"]


def test_what_cannot_be_kept_to_is_an_error_of_the_call():
    body = {"model": "m", **BODIES["chat/completions"]}
    with served() as client:
        assert "no grammar" in post(client, "chat/completions", body, 400)["error"]["message"]
        assert not client.episode._under_way
        client.episode.batcher.sampler = TransformersSampler(tiny_policy())
        bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"uniqueItems": True, "type": "array"}}}
        assert (
            "uniqueItems" in post(client, "chat/completions", {**body, "response_format": bad}, 400)["error"]["message"]
        )
        begun = [USER, {"role": "assistant", "content": "{"}]
        post(client, "messages", {"model": "m", **BODIES["messages"], "messages": begun}, 400)
        assert not client.speaker.seen
