"""Chat messages as token ids, observations as the ids that follow a sampled turn, which is never tokenised again, and
the tool calls that a sampled turn holds.

What a template writes between a turn and the next is found with a mark instead of the turn's text: the rendered
conversation is cut behind the mark and the end-of-turn token, and only that tail is tokenised. Where a template does
not keep what stands before the turn as the model saw it, the tail would follow another history; that is an error.

Tool calls are read by the tokenizer's own response template where it has one, else as JSON between `<tool_call>` and
`</tool_call>`, the form of Hermes and Qwen models.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.data.render.messages import Message
from treewise.data.render.piece_tokenizer import Encoder, joined
from treewise.data.render.template import MARK, Template
from treewise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = list[dict[str, Any]] | None
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class ChatTokens:
    """A tokenizer and its chat template (or another: a text, a file, or `chatml`)."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.template = Template(self.encoder, chat_template, {})

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
        if getattr(self.tokenizer, "response_template", None) is None:
            return None
        try:
            parsed = self.tokenizer.parse_response(list(token_ids), prefix=list(prompt_ids))
        except (ValueError, TypeError, KeyError):
            return None
        return None if parsed is None else {**parsed, "content": parsed.get("content") or ""}

    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: the template's end-of-turn token, where there is a template, and the tokenizer's eos."""
        eos = self.tokenizer.eos_token_id
        if self.template.text is None and not getattr(self.tokenizer, "chat_template", None):
            return () if eos is None else (eos,)
        span = self.encoder.end_of_turn(end := self.template.end)
        ids = self.encoder.encode_continuations([end[slice(*span)].strip()])[0].tolist() if span else []
        ids = ids if len(ids) == 1 else []
        return tuple(dict.fromkeys([*ids, *([eos] if eos is not None else [])]))

    def answer_ids(
        self,
        history: Sequence[Message],
        text: str,
        end_id: int,
        answers: Sequence[Message],
        tools: Tools,
        location: str,
    ) -> np.ndarray:
        """int32 ids that the template writes after a sampled turn, through the header of the next turn.

        Parameters:
            history: what stood before the turn; sampled turns in it may hold any text.
            text: what was sampled, without the token that ended it.
            end_id: the id that ended the turn.
            answers: the messages that follow it.

        Raises:
            DataError: the template rewrites what stands before, or writes no end of turn.
        """
        before = self.template.render([list(history)], tools, location, generation=True)[0]
        turn: Message = {"role": "assistant", "content": MARK}
        whole = self.template.render([[*history, turn, *answers]], tools, location, generation=True)[0]
        head, mark, tail = whole.partition(MARK)
        real = self.template.render(
            [[*history, {**turn, "content": text}, *answers]], tools, location, generation=True
        )[0]
        is_kept = "".join(text.split()) in "".join(real[len(before) :].split())  # templates may move white space
        if not mark or not head.startswith(before) or not is_kept:
            raise DataError(
                f"{location}: the chat template rewrites what stands before a turn once messages follow it, so the "
                "tokens of an episode would not be those that the model saw; take another chat_template, as 'chatml'."
            )
        end = self.tokenizer.decode([end_id], skip_special_tokens=False)
        _, mark_end, rest = tail.partition(end)
        if not mark_end:
            raise DataError(
                f"{location}: the chat template writes no {end!r} after a turn, which is where the turn ended."
            )
        return self.encoder.encode_continuations([rest])[0].astype(np.int32)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. problem: why it cannot be carried out; the environment's answer says so to the model."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def parse_tool_calls(
    tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]
) -> tuple[str, tuple[ToolCall, ...]]:
    """The text of a sampled turn without its end token, and its calls in order.

    Parameters:
        token_ids: as sampled.
        prefix_ids: what the model saw; a response template may need what the prompt opened (`<think>`).
        tools: JSON schemas.
    """
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    if len(token_ids) and int(token_ids[-1]) in tokenizer.all_special_ids:
        text = text.removesuffix(tokenizer.decode([int(token_ids[-1])], skip_special_tokens=False))
    if getattr(tokenizer, "response_template", None) is None:
        return text, hermes_calls(text)
    try:
        parsed = tokenizer.parse_response(list(token_ids), prefix=list(prefix_ids), tools=list(tools) or None)
        return text, tuple(_checked(call) for call in (parsed or {}).get("tool_calls") or [])
    except (ValueError, TypeError, KeyError) as error:
        return text, (ToolCall("unknown", problem=f"the call cannot be read: {error}"),)


def hermes_calls(text: str) -> tuple[ToolCall, ...]:
    """Calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    calls = []
    for body, closing in _BLOCK.findall(text):
        if not closing:
            calls.append(ToolCall("unknown", problem="<tool_call> is not closed by </tool_call>"))
            continue
        try:
            calls.append(_checked(json.loads(body)))
        except ValueError as error:
            calls.append(ToolCall("unknown", problem=f"the call is not JSON: {error}"))
    return tuple(calls)


def without_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """The text of a turn without the blocks that held its calls."""
    return _BLOCK.sub("", text).strip() if calls else text


def _checked(call: object) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return ToolCall("unknown", problem="a call needs a name and arguments")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            return ToolCall(function["name"], problem=f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(function["name"], problem="its arguments are not an object")
    return ToolCall(function["name"], arguments)
