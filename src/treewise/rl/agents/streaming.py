"""What of a reply is given out while it grows, and what is left in the end."""

from collections.abc import Sequence
from typing import Any

from treewise.rl.agents.episodes import OpenCall
from treewise.rl.agents.wire.asked import RefusedError, Reply
from treewise.rl.agents.wire.common import Delta
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.recorder.reader import held_back


class Spoken:
    """What of a reply was given out while it grew, and what comes next."""

    def __init__(self) -> None:
        self.reasoning = self.content = ""

    def more(self, reasoning: str, content: str) -> tuple[str, str]:
        """What a longer reasoning and content add to those before."""
        new = []
        for name, text in (("reasoning", reasoning), ("content", content)):
            known = getattr(self, name)
            part = text[len(known) :] if text.startswith(known) else ""
            setattr(self, name, known + part)
            new.append(part)
        return new[0], new[1]


def more(chat: ChatTokens, opened: OpenCall, spoken: Sequence[Spoken], stream: Any) -> list[bytes]:
    """The events of what has become sure of a growing reply."""
    events: list[bytes] = []
    call = opened.call
    for choice, (tokens, known) in enumerate(zip(opened.tokens, spoken, strict=True)):
        text = chat.decode([*call.forced_ids, *chat.said(tokens)])
        if call.reader is None:
            reasoning, content = "", held_back(text, call.asked.stop)
        else:
            parts = call.reader.sure(text, call.prompt_end, reads_calls=call.asked.reads_calls, stops=call.asked.stop)
            reasoning, content = parts.reasoning, parts.content
        new = known.more(reasoning, content)
        if any(new):
            events += stream.delta(Delta(choice, *new))
    return events


def rest(opened: OpenCall, spoken: Sequence[Spoken], stream: Any) -> list[bytes]:
    """The events of what is left of replies that have ended. Raises as `replies_of`."""
    events: list[bytes] = []
    for choice, (reply, known) in enumerate(zip(replies_of(opened), spoken, strict=True)):
        new = known.more(reply.reasoning, reply.content)
        events += stream.delta(Delta(choice, *new, calls=reply.calls, reply=reply))
    return events


def replies_of(opened: OpenCall) -> tuple[Reply, ...]:
    """Of a call that has ended. Raises `RefusedError` where the sampler refused it, or failed."""
    error = opened.done.exception()
    if isinstance(error, RefusedError):
        raise error
    if error is not None:
        raise RefusedError(f"the sampler fails: {type(error).__name__}: {error}", status=500) from error
    return opened.done.result()
