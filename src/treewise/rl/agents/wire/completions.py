"""OpenAI's `POST /v1/completions`: a text, or token ids, that the model continues as it stands."""

from collections.abc import Sequence
from typing import Any

from treewise.data.io.field_checks import shown
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError, Reply
from treewise.rl.agents.wire.chat import IGNORED, OPENAI, PENALTIES, top_k_of, usage_of
from treewise.rl.agents.wire.common import Answer, Delta, Fields, TextOf, Usage, sse, stops_of
from treewise.rl.agents.wire.protocol import Exchange, Protocol

DEFAULT_TOKENS = 16  # OpenAI's
MAX_ID = 2**31 - 1


def read(body: object) -> list[AgentRequest]:
    """A call for each prompt. Raises `RefusedError`."""
    fields = Fields(body)
    prompts = _prompts(fields.need("prompt", str, list))
    for name, neutral in PENALTIES.items():
        fields.only(name, (neutral,))
    fields.only("echo", (False,))
    fields.only("suffix", ("",))
    num_choices = fields.take("n", int, default=1)
    fields.only("best_of", (1, num_choices))
    fields.take("return_token_ids", bool)
    fields.ignore(*IGNORED)
    fields.take("stream_options", dict)
    common: dict[str, Any] = {
        "model": fields.take("model", str, default=""),
        "reads_calls": False,
        "num_choices": num_choices,
        "max_tokens": fields.take("max_tokens", int, default=DEFAULT_TOKENS),
        "temperature": fields.take("temperature", float),
        "top_p": fields.take("top_p", float),
        "top_k": top_k_of(fields.take("top_k", int)),
        "seed": fields.take("seed", int),
        "stop": stops_of(fields, "stop"),
        "num_top": fields.take("logprobs", int),
        "is_streamed": fields.take("stream", bool, default=False),
        "ignored": tuple(fields.ignored),
    }
    fields.done()
    return [AgentRequest(prompt=prompt, **common) for prompt in prompts]


def _prompts(value: Sequence[Any]) -> list[str | tuple[int, ...]]:
    def is_ids(item: object) -> bool:
        return isinstance(item, list) and all(type(token) is int and 0 <= token <= MAX_ID for token in item)

    if isinstance(value, str):
        return [value]
    if value and is_ids(value):
        return [tuple(value)]
    if not value or not all(isinstance(prompt, str) or is_ids(prompt) for prompt in value):
        raise RefusedError(f"prompt must be texts or token ids, found {shown(value)}.", param="prompt")
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value]


def answer(found: Sequence[Answer], text_of_ids: TextOf, *, shows_ids: bool = False) -> dict[str, Any]:
    """A whole answer: the replies of all prompts, in order."""
    choices: list[dict[str, Any]] = []
    for answered in found:
        for reply in answered.replies:
            logprobs = _logprobs(reply, text_of_ids) if answered.asked.num_top is not None else None
            choice = {"index": len(choices), "text": reply.content, "logprobs": logprobs, "finish_reason": reply.finish}
            ids = (
                {"token_ids": list(reply.token_ids), "prompt_token_ids": list(answered.prompt_ids)} if shows_ids else {}
            )
            choices.append({**choice, **ids})
    usage = Usage(
        *(sum(getattr(answered.usage, name) for answered in found) for name in ("prompt", "completion", "cached"))
    )
    return {**_head(found[0]), "choices": choices, "usage": usage_of(usage)}


def _head(found: Answer) -> dict[str, Any]:
    return {"id": found.id, "object": "text_completion", "created": found.created, "model": found.asked.model}


def _logprobs(reply: Reply, text_of_ids: TextOf) -> dict[str, Any]:
    texts = [text_of_ids([token]) for token in reply.token_ids]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    tops = [{text_of_ids([token]): value for token, value in top.items()} for top in reply.tops]
    return {
        "tokens": texts,
        "token_logprobs": list(reply.logprobs),
        "top_logprobs": tops or None,
        "text_offset": offsets,
    }


class ReplyStream:
    """The events of one prompt's answer. first: the index of its first choice."""

    def __init__(self, found: Answer, body: dict[str, Any], text_of_ids: TextOf, first: int = 0) -> None:
        self._found, self._text_of_ids, self._first = found, text_of_ids, first
        self._has_usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def begin(self) -> list[bytes]:
        """Before the first token."""
        return []

    def delta(self, delta: Delta) -> list[bytes]:
        """A part of a reply."""
        text, reply = delta.reasoning + delta.content, delta.reply
        finish = None if reply is None else reply.finish
        if not text and finish is None:
            return []
        wants = reply is not None and self._found.asked.num_top is not None
        logprobs = _logprobs(reply, self._text_of_ids) if wants and reply is not None else None
        choice = {"index": self._first + delta.choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return [sse({**_head(self._found), "choices": [choice]})]

    def end(self, usage: Usage) -> list[bytes]:
        """After the last reply."""
        last = [sse({**_head(self._found), "choices": [], "usage": usage_of(usage)})] if self._has_usage else []
        return [*last, b"data: [DONE]\n\n"]

    def error(self, value: dict[str, Any]) -> list[bytes]:
        """In place of the rest."""
        return [sse(value)]


def _exchange(body: dict[str, Any], _: str, __: object) -> Exchange:
    shows_ids = bool(body.get("return_token_ids"))
    return Exchange(
        asked=read(body),
        answer=lambda found, text_of_ids: answer(found, text_of_ids, shows_ids=shows_ids),
        events=lambda found, first, text_of_ids: ReplyStream(found, body, text_of_ids, first),
    )


PROTOCOL = Protocol(provider=OPENAI, paths=["/v1/completions"], exchange=_exchange)
