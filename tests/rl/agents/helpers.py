"""A sampler that says what it is told, in whatever tokens, and remembers it; episodes on it; what rows must hold."""

import json
import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tests.rl.tasks.test_episode import byte_tokenizer
from treewise.rl.agents.endpoint_settings import EndpointSettings
from treewise.rl.agents.episodes import Episodes
from treewise.rl.agents.wire.asked import AgentRequest
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.samplers.batching import Batcher
from treewise.rl.samplers.protocol import Completion

TOKENIZER = byte_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@dataclass
class Speaker:
    """Says `texts` one after the other, each cut into tokens at random places, and the end of the turn behind it.

    seen: (prefix, sampled ids, log-probs) of each continuation. block: is waited for before a batch. Where experts are
    asked for, all tokens of a continuation have one: its number.
    """

    texts: list = field(default_factory=list)
    tokenizer: object = TOKENIZER
    end: int = END
    seen: list = field(default_factory=list)
    block: object = None
    num_batches: int = 0
    splits: bool = True

    def sample(self, requests):
        self.num_batches += 1
        if self.block is not None:
            self.block.wait()
        return [(self._one(request),) for request in requests]

    def update(self, model):
        pass

    def close(self):
        pass

    def _one(self, request):
        draw = random.Random(f"{request.seed}")
        text = self.texts.pop(0) if self.texts else draw.choice(["yes", "no, I think", CALL])
        if isinstance(text, BaseException):
            raise text
        ids = [*self._tokens(text, draw), self.end] if isinstance(text, str) else list(text)
        sampled = []
        for token in ids[: request.max_new_tokens]:
            sampled.append(token)
            if request.is_stopped(sampled):
                break
        logprobs = np.array([-draw.random() - 0.01 for _ in sampled], dtype=np.float32)
        finish = "stop" if request.is_stopped(sampled) else "length"
        self.seen.append((request.prefix_ids, tuple(sampled), logprobs))
        tops = {}
        if request.num_top:
            tops = {
                "top_ids": np.tile(np.array(sampled, dtype=np.int32)[:, None], (1, request.num_top)),
                "top_logprobs": np.tile(logprobs[:, None], (1, request.num_top)),
            }
        if request.want_routes:
            size = len(request.prefix_ids) + len(sampled) - 1
            tops["routed_experts"] = np.full((size, 1, 1), len(self.seen) - 1, dtype=np.int16)
        return Completion(np.array(sampled, dtype=np.int32), logprobs, finish, **tops)

    def _tokens(self, text, draw):
        cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 3))) if self.splits else []
        parts = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [i for part in parts if part for i in self.tokenizer(part, add_special_tokens=False)["input_ids"]]


@contextmanager
def episodes_on(speaker, *, chat_template="chatml", keeps_thinking=False, any_key=False, **changes):
    """Episodes of a speaker's tokenizer."""
    chat = ChatTokens(speaker.tokenizer, chat_template, on_hidden="warn", keeps_thinking=keeps_thinking)
    chat.end_ids = (speaker.end,)
    batcher = Batcher(speaker, gather_seconds=0.0).serve()
    given = {"max_length": 100_000, "max_new_tokens": 4096, "keeps_thinking": keeps_thinking, **changes}
    try:
        yield Episodes(chat, batcher, EndpointSettings(**given), takes_any_key=any_key)
    finally:
        batcher.close()


def asked(messages, **more):
    given = {"model": "policy", "messages": tuple(messages), "tools": [ADD], **more}
    return AgentRequest(**given)


def say(episode, messages, **more):
    """A call, its first reply as a message, and the call's record."""
    opened = episode.begin(asked(messages, **more))
    reply = opened.done.result(60)[0]
    return reply.message(), opened.call


def assert_rows_are(speaker, episode, *, context=()):
    """Every sampled token is trained once, where it was sampled, with its log-prob; nothing else is.

    context: continuations, by number, of calls that are not trained.
    """
    rows, account = episode.rows()
    total = sum(len(ids) for _, ids, _ in speaker.seen)
    trained = [each for number, each in enumerate(speaker.seen) if number not in context]
    assert account.sampled == total
    assert account.recorded == account.trained == sum(len(ids) for _, ids, _ in trained)
    spans = Counter()
    for row in rows:
        weights, ids = np.array(row["loss_weights"]), row["token_ids"]
        assert len(ids) == len(weights) == len(row["sampler_logprobs"]) == len(row["draws"])
        for turn in row["turns"]:
            own = np.arange(turn["start"], turn["end"])
            start = int(own[weights[own] > 0][0])
            end = turn["end"]
            logprobs = np.array(row["sampler_logprobs"][start:end], dtype=np.float32)
            spans[tuple(ids[:start]), tuple(ids[start:end]), logprobs.tobytes()] += 1
            weights[start:end] -= 1
        assert not weights.any(), "tokens of no turn are trained"
    assert spans == Counter((prefix, ids, logprobs.tobytes()) for prefix, ids, logprobs in trained)
    return rows, account


def arguments_respaced(message):
    """The same message, as another library writes it."""
    calls = [
        {
            "type": "function",
            "id": f"other-{number}",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(
                    dict(reversed(json.loads(call["function"]["arguments"]).items())), separators=(" , ", " : ")
                ),
            },
        }
        for number, call in enumerate(message.get("tool_calls", []))
    ]
    content = [{"type": "text", "text": part} for part in (message["content"][:2], message["content"][2:]) if part]
    return {**message, "content": content or None, "tool_calls": calls} if calls else {**message, "content": content}
