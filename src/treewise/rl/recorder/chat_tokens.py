"""Conversations as token ids: what a policy is shown, what its turns say and call, and what follows a turn, whose ids
are never written again.

The chat template writes the messages up to a turn, and all of them with the header of the next turn. Where the second
text begins with the first, the template only appends, and what follows the turn is the rest; else it is found behind a
mark that stands for the turn's text. What follows is all that is tokenised. Where a template does not keep what stands
before the turn as the model saw it, an environment cannot go on, which is an error; an agent's next call is shown what
the template writes, as by any other server, unless `keeps_thinking`.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.data.io.options import today_as
from treewise.data.render.messages import IMAGES, Message, Tools, WeightedMessages, clean_conversation
from treewise.data.render.piece_tokenizer import Encoder, joined
from treewise.data.render.template import Template
from treewise.data.render.turns import behind_end, behind_turn
from treewise.errors import ConfigError, DataError
from treewise.rl.recorder.ends import end_ids
from treewise.rl.recorder.families import Broken
from treewise.rl.recorder.reader import UNFINISHED, Parts, ReplyReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("treewise")
MAX_PROMPT = 1024  # tokens at the end of a prompt, which may open what a turn holds
MAX_TEMPLATES = 16  # of different variables


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as text, with the header of the model's turn (and its prefill). given: the messages, checked;
    messages: as the template gets them."""

    template: Template
    given: tuple[Message, ...]
    messages: tuple[Message, ...]
    tools: Tools
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn. text: as it is given out, without its end; it may be less than the ids hold. is_ended: the last
    id is one that ends turns."""

    token_ids: np.ndarray
    text: str
    is_ended: bool
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows a turn. num_kept: of its ids. text: behind these."""

    num_kept: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. problem: why it cannot be carried out; the environment's answer says so to the model. id: what its
    answer names."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A sampled turn taken apart. stop_text: the text that ended it, where one did. call_ids: of its calls."""

    turn: Turn
    parts: Parts
    stop_text: str | None = None
    call_ids: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Of the turn, special tokens included, without its end."""
        return self.turn.text

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those that cannot be carried out, too, in order."""
        told = zip(self.parts.told, self.call_ids or ("",) * len(self.parts.told), strict=True)
        return tuple(
            ToolCall("unknown", problem=call.why, id=name)
            if isinstance(call, Broken)
            else ToolCall(call[0], json.loads(call[1] or "{}"), id=name)
            for call, name in told
        )

    @property
    def message(self) -> Message:
        """The turn as a message in the template's own fields; without calls that cannot be carried out."""
        calls = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
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
    """A tokenizer and its chat template (or another: a text, a file, or `chatml`). For several threads.

    Parameters:
        today: the date that the template writes as today's, however long a run takes.
        generation_config: of the model whose turns they are; None where it is not known.
        on_hidden: as of `Template`.
        keeps_thinking: turns stay as they were sampled where the template writes them otherwise later.

    Attributes:
        end_ids: that end a turn. notes: what was logged once.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template: str | None = None,
        today: str | None = None,
        generation_config: Any = None,
        *,
        on_hidden: str = "error",
        keeps_thinking: bool = False,
    ) -> None:
        self.tokenizer, self.keeps_thinking = tokenizer, keeps_thinking
        self.encoder = Encoder(tokenizer)
        self.notes: dict[str, None] = {}
        self._given = (chat_template, on_hidden, today or today_as())
        self._lock = threading.RLock()
        self._templates: dict[str, tuple[Template, ReplyReader]] = {}
        self._writes_tools: dict[str, bool] = {}
        self.template, self.reader = self.template_of({})
        self.end_ids = end_ids(self.template, generation_config)

    def note(self, text: str) -> None:
        """Says something once, and keeps it among the notes."""
        with self._lock:
            if text in self.notes:
                return
            self.notes[text] = None
        logger.warning("%s", text)

    def template_of(self, variables: Mapping[str, Any]) -> tuple[Template, ReplyReader]:
        """The template with its variables, and what reads its turns."""
        name, (chat_template, on_hidden, today) = json.dumps(dict(variables), sort_keys=True, default=str), self._given
        with self._lock:
            if name not in self._templates:
                if len(self._templates) >= MAX_TEMPLATES:
                    del self._templates[list(self._templates)[-1]]
                template = Template(self.encoder, chat_template, dict(variables), on_hidden=on_hidden, today=today)
                template.notes = self.notes
                self._templates[name] = (template, ReplyReader(template, with_own=chat_template is None))
            return self._templates[name]

    # -- what a policy is shown ---------------------------------------------------------------------------------------

    def written(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        variables: Mapping[str, Any] | None = None,
        *,
        prefill: str = "",
        location: str = "the call",
    ) -> Written:
        """The conversation of an agent's call, from which its turn is sampled.

        Raises:
            DataError: messages of another shape, images, or an error of the template.
            ConfigError: the template does not write the tools.
        """
        with self._lock:
            template, _ = self.template_of(variables or {})
            talk = clean_conversation(list(messages), location)
            if any(message.get(IMAGES) for message in talk.messages):
                raise DataError("content of type image is not served; the recorded rows are of text.")
            named = _with_names(talk.messages)
            found = template.prepare(WeightedMessages(named, talk.weights), location).messages
            found = template.check_history(found, tools, location, {})
            text = template.render([found], tools, location, generation=True)[0]
            if tools and not self._are_tools_written(template, found, tools, text, location):
                raise ConfigError(
                    "the chat template does not write tools, so the model would not see them; start with a "
                    "chat_template that does, as --chat_template chatml."
                )
            return Written(template, tuple(talk.messages), tuple(found), tools, text + prefill)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None, location: str = "prompt") -> tuple[int, ...]:
        """The ids of a task's prompt: the messages and the header of the model's turn.

        Raises:
            ConfigError: the template does not write the tools.
            DataError: the template refuses the messages.
        """
        talk = list(messages)
        text = self.template.render([talk], tools, location, generation=True)[0]
        if tools and not self._are_tools_written(self.template, talk, tools, text, location):
            names = ", ".join(tool["function"]["name"] for tool in tools)
            raise ConfigError(
                f"{location}: the chat template does not write tools, so no prompt would hold {names}; give a "
                "chat_template that does, for instance 'chatml' (--chat_template chatml), or let the text of a turn be "
                "the action: tasks_settings.text_tool."
            )
        return tuple(self.ids_of(text).tolist())

    def _are_tools_written(
        self, template: Template, messages: list[Message], tools: Tools, text: str, location: str
    ) -> bool:
        name = json.dumps(tools, sort_keys=True)
        with self._lock:
            if name not in self._writes_tools:
                without = template.render([messages], None, location, generation=True)[0]
                if len(self._writes_tools) > MAX_TEMPLATES:
                    self._writes_tools.clear()
                self._writes_tools[name] = without != text
            return self._writes_tools[name]

    # -- ids ----------------------------------------------------------------------------------------------------------

    def ids_of(self, text: str) -> np.ndarray:
        """int32, of a text that the template wrote."""
        with self._lock:
            return joined(self.encoder.encode([text])[0]).astype(np.int32)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt that is a text: as the tokenizer writes it, with one begin token, without a template."""
        ids = tuple(int(i) for i in self.tokenizer(text, verbose=False)["input_ids"])
        return ids[1:] if self.encoder.begins(text) and ids[:1] == ids[1:2] else ids

    def following_ids(self, before: str, text: str) -> np.ndarray:
        """int32, of a text that follows another."""
        if not text:
            return np.zeros(0, dtype=np.int32)
        with self._lock:
            return self.encoder.encode_behind([(before, text)])[0].astype(np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens included."""
        ids = [int(token) for token in token_ids]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def num_within(self, token_ids: np.ndarray, text: str) -> int:
        """How many of the ids a text begins with."""
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high + 1) // 2
            if text.startswith(self.decode(token_ids[:middle]).rstrip(UNFINISHED)):
                low = middle
            else:
                high = middle - 1
        while low and not text.startswith(self.decode(token_ids[:low])):
            low -= 1
        return low

    # -- what it wrote ------------------------------------------------------------------------------------------------

    def said(self, token_ids: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
        """A turn without the id that ended it."""
        return token_ids[:-1] if len(token_ids) and int(token_ids[-1]) in self.end_ids else token_ids

    def read(
        self,
        token_ids: Sequence[int] | np.ndarray,
        prompt: str | None,
        tools: Tools,
        *,
        reader: ReplyReader | None = None,
        stop_texts: Sequence[str] = (),
        **ways: bool,
    ) -> ReadTurn:
        """A sampled turn taken apart.

        Parameters:
            prompt: the end of what the model saw, which may have opened the thinking; None: it was no chat.
            reader: of the variables of the template. stop_texts: before the first of which the turn ends. ways: as of
                `ReplyReader.whole`.
        """
        said = self.said(token_ids)
        whole = self.decode(said)
        text, stop_text = _cut(whole, stop_texts)
        parts = Parts(content=text)
        if prompt is not None:
            parts = (reader or self.reader).whole(text, prompt, tools, **ways)
            text = text[: parts.end]
        turn = Turn(np.asarray(token_ids, dtype=np.int32), text, len(said) < len(token_ids), is_cut=text != whole)
        return ReadTurn(turn, parts, stop_text)

    def message(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Message | None:
        """A sampled turn as the tokenizer's own response template reads it; None where it has none, or cannot."""
        if self.reader.own is None:
            return None
        try:
            parsed = self.tokenizer.parse_response(list(token_ids), prefix=list(prompt_ids))
        except (ValueError, TypeError, KeyError):
            return None
        return None if parsed is None else {**parsed, "content": parsed.get("content") or ""}

    # -- what follows -------------------------------------------------------------------------------------------------

    def answer_ids(
        self,
        history: Sequence[Message],
        turn: Message,
        end_id: int,
        answers: Sequence[Message],
        tools: Tools,
        location: str,
    ) -> np.ndarray:
        """int32 ids that the template writes after a sampled turn of an episode, through the header of the next turn.

        Where the turn ended with another token than the template ends turns with, that token stays in its place.

        Parameters:
            history: what stood before the turn.
            turn: what was sampled, without the token that ended it, as text in `content` or in the template's fields.
            end_id: the id that ended the turn.
            answers: the messages that follow it.

        Raises:
            DataError: the template rewrites what stands before, or does not end the turn.
        """
        template, talk = self.template, [*history, turn, *answers]
        before = template.render([[*history]], tools, location, generation=True)[0]
        last, span = self._up_to(template, talk[: len(history) + 1], tools, location)
        real = template.render([talk], tools, location, generation=True)[0]
        span = span or (len(last), len(last))
        end = last[slice(*span)]
        after: str | None = None
        if "tool_calls" in turn:  # in the template's own fields, which it writes in its own order
            after = last[span[1] :] + real[len(last) :] if last.startswith(before) and real.startswith(last) else None
        elif (around := behind_turn(template, talk, len(history), tools, end, location)) is not None:
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
        own = self.decode([end_id])
        rest = (end + after)[len(own) :] if (end + after).startswith(own) else after
        return self.encoder.encode_behind([(own, rest)])[0].astype(np.int32)

    def _check_answers(self, talk: Sequence[Message], answers: Sequence[Message], tools: Tools, location: str) -> None:
        """Raises `DataError` where the template leaves out an answer, as Gemma 4's does behind a turn of text."""
        mark = self.template.mark([*talk, *answers], tools)
        marked = [{**answer, "content": mark} if answer["content"].strip() else answer for answer in answers]
        [whole] = self.template.render([[*talk, *marked]], tools, location, generation=True)
        if whole.count(mark) < sum(answer["content"] == mark for answer in marked):
            raise DataError(f"{location}: the chat template does not write what answers a turn; take another one.")

    def tail(self, written: Written, num_messages: int, turn: Turn) -> Tail | None:
        """What follows a turn of an agent that is the last of the first `num_messages` messages; None where the
        template writes these otherwise once others follow."""
        template = written.template
        with self._lock:
            try:
                head, end = self._up_to(template, written.messages[:num_messages], written.tools, "the call")
            except DataError:  # a template that writes no conversation that ends so
                return None
            closes = "" if end is None else head[slice(*end)]
            if written.text.startswith(head):
                rest = written.text[len(head) :]
                return self._closed(turn, closes, rest if end is None else head[end[1] :] + rest)
            if not self.keeps_thinking:
                return None
            around = behind_turn(template, written.messages, num_messages - 1, written.tools, closes, "the call")
            return None if around is None else self._closed(turn, closes, around[2])

    def _up_to(
        self, template: Template, talk: Sequence[Message], tools: Tools, location: str
    ) -> tuple[str, tuple[int, int] | None]:
        """What is written of a conversation up to its last turn, and where that turn's end stands in it."""
        text = template.render([[*talk]], tools, location)[0]
        text = text.removesuffix(behind_end(template, text))
        return text, self.encoder.end_of_turn(text)

    def _closed(self, turn: Turn, end: str, after: str) -> Tail:
        """Behind the ids that stay. end: the text of the token that closes a turn."""
        size = len(turn.token_ids)
        if turn.is_cut:
            kept = self.num_within(turn.token_ids, turn.text)
            return Tail(kept, turn.text[len(self.decode(turn.token_ids[:kept])) :] + end + after)
        if not turn.is_ended:
            return Tail(size, end + after)
        own = self.decode(turn.token_ids[-1:])
        if (end + after).startswith(own):  # the token that closes turns, or one that begins what follows (GLM)
            return Tail(size, (end + after)[len(own) :])
        return Tail(size - 1, end + after)


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first of some texts, and which."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)[0]], min(found)[1]) if found else (text, None)


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Results of tools with the name of their function, which some templates write."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            if call.get("id") is not None:
                names[str(call["id"])] = call["function"]["name"]
        name = names.get(str(message.get("tool_call_id")))
        is_nameless = message["role"] == "tool" and name is not None and "name" not in message
        found.append({**message, "name": name} if is_nameless else message)
    return found
