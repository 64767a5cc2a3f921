"""Chat messages as token ids, what a sampled turn says and calls, and observations as the ids that follow a turn, which
is never tokenised again.

What a template writes between a turn and the next is found with a mark in place of the turn's text, and only that is
tokenised. Where a template does not keep what stands before the turn as the model saw it, the ids would follow another
history; that is an error. Turns are read, and ended, as those of agents (`treewise.rl.replies`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.data.render.messages import Message
from treewise.data.render.piece_tokenizer import Encoder, joined
from treewise.data.render.template import Template
from treewise.data.render.turns import behind_end, behind_turn
from treewise.errors import ConfigError, DataError
from treewise.rl.replies import Broken, Parts, ReplyReader, end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = list[dict[str, Any]] | None
MAX_PROMPT = 1024  # tokens at the end of a prompt, which may open what a turn holds


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. problem: why it cannot be carried out; the environment's answer says so to the model."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A sampled turn as text, without its end, taken apart. calls: with those that cannot be carried out, in order."""

    text: str
    parts: Parts
    calls: tuple[ToolCall, ...]

    @property
    def message(self) -> Message:
        """The turn as a message in the template's own fields; without calls that cannot be carried out."""
        calls = [
            {"type": "function", "id": f"call{number:05}", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(self.calls)
            if call.problem is None
        ]
        thought = {"reasoning_content": self.parts.reasoning} if self.parts.reasoning else {}
        return {
            "role": "assistant",
            "content": self.parts.content,
            **thought,
            **({"tool_calls": calls} if calls else {}),
        }


class ChatTokens:
    """A tokenizer and its chat template (or another: a text, a file, or `chatml`). today: as of `Template`. end_ids: of
    a turn. model: whose turns they are; None where it is not known."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template: str | None = None,
        today: str | None = None,
        model: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.template = Template(self.encoder, chat_template, {}, today=today)
        self.reader = ReplyReader(self.template, with_own=chat_template is None)
        self.end_ids = end_ids(self.template, getattr(model, "generation_config", None))

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None, location: str = "prompt") -> tuple[int, ...]:
        """The ids that the model sees: the messages and the header of its turn.

        Raises:
            ConfigError: the template does not write the tools.
            DataError: the template refuses the messages.
        """
        talk = list(messages)
        text = self.template.render([talk], tools, location, generation=True)[0]
        if tools and text == self.template.render([talk], None, location, generation=True)[0]:
            names = ", ".join(tool["function"]["name"] for tool in tools)
            raise ConfigError(
                f"{location}: the chat template does not write tools, so no prompt would hold {names}; give a "
                "chat_template that does, for instance 'chatml' (--chat_template chatml), or let the text of a turn be "
                "the action: tasks_settings.text_tool."
            )
        return tuple(joined(self.encoder.encode([text])[0]).tolist())

    def text_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt that is a text: as the tokenizer writes it, with one begin token, without a template."""
        ids = tuple(int(i) for i in self.tokenizer(text)["input_ids"])
        return ids[1:] if self.encoder.begins(text) and ids[:1] == ids[1:2] else ids

    def message(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Message | None:
        """A sampled turn as the tokenizer's own response template reads it; None where it has none, or cannot."""
        if self.reader.own is None:
            return None
        try:
            parsed = self.tokenizer.parse_response(list(token_ids), prefix=list(prompt_ids))
        except (ValueError, TypeError, KeyError):
            return None
        return None if parsed is None else {**parsed, "content": parsed.get("content") or ""}

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of a sampled turn, special tokens included, without the id that ended it."""
        is_ended = len(token_ids) > 0 and int(token_ids[-1]) in self.end_ids
        text: str = self.tokenizer.decode(list(token_ids[:-1] if is_ended else token_ids), skip_special_tokens=False)
        return text

    def read(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools) -> ReadTurn:
        """A sampled turn taken apart. prompt_ids: what the model saw, which may have opened the thinking."""
        text, prompt = self.text_of(token_ids), self.tokenizer.decode(list(prompt_ids[-MAX_PROMPT:]))
        parts = self.reader.whole(text, prompt, tools)
        calls = tuple(
            ToolCall("unknown", problem=call.why)
            if isinstance(call, Broken)
            else ToolCall(call[0], json.loads(call[1] or "{}"))
            for call in parts.told
        )
        return ReadTurn(text, parts, calls)

    def answer_ids(
        self,
        history: Sequence[Message],
        turn: Message,
        end_id: int,
        answers: Sequence[Message],
        tools: Tools,
        location: str,
    ) -> np.ndarray:
        """int32 ids that the template writes after a sampled turn, through the header of the next turn.

        Where the turn ended with another token than the template ends turns with, that token stays in its place.

        Parameters:
            history: what stood before the turn.
            turn: what was sampled, without the token that ended it, as text in `content` or in the template's fields.
            end_id: the id that ended the turn.
            answers: the messages that follow it.

        Raises:
            DataError: the template rewrites what stands before, or does not end the turn.
        """
        talk = [*history, turn, *answers]
        before, last, real = (
            self.template.render([part], tools, location, generation=generation)[0]
            for part, generation in (([*history], True), (talk[: len(history) + 1], False), (talk, True))
        )
        last = last.removesuffix(behind_end(self.template, last))
        span = self.encoder.end_of_turn(last) or (len(last), len(last))
        end = last[slice(*span)]
        after: str | None = None
        if "tool_calls" in turn:  # in the template's own fields, which it writes in its own order
            after = last[span[1] :] + real[len(last) :] if last.startswith(before) and real.startswith(last) else None
        elif (around := behind_turn(self.template, talk, len(history), tools, end, location)) is not None:
            head, closing, tail = around
            wholes = {"".join(f"{begun}{turn['content']}{closing}{tail}".split()) for begun in (before, head)}
            is_kept = real.startswith(before) and head.startswith(before) and "".join(real.split()) in wholes
            after = tail if is_kept else None  # templates may move white space, and write a beginning that was sampled
        if after is None:
            raise DataError(
                f"{location}: the chat template rewrites what stands before a turn once messages follow it, so the "
                "tokens of an episode would not be those that the model saw; take another chat_template, as 'chatml'."
            )
        self._check_answers([*history, turn], answers, tools, location)
        own = self.tokenizer.decode([end_id], skip_special_tokens=False)
        rest = (end + after)[len(own) :] if (end + after).startswith(own) else after
        return self.encoder.encode_behind([(own, rest)])[0].astype(np.int32)

    def _check_answers(self, talk: Sequence[Message], answers: Sequence[Message], tools: Tools, location: str) -> None:
        """Raises `DataError` where the template leaves out an answer, as Gemma 4's does behind a turn of text."""
        mark = self.template.mark([*talk, *answers], tools)
        marked = [{**answer, "content": mark} if answer["content"].strip() else answer for answer in answers]
        [whole] = self.template.render([[*talk, *marked]], tools, location, generation=True)
        if whole.count(mark) < sum(answer["content"] == mark for answer in marked):
            raise DataError(f"{location}: the chat template does not write what answers a turn; take another one.")
