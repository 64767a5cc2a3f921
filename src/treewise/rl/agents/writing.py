"""Conversations as token ids, and what follows a sampled turn, whose ids are never written again.

The chat template writes the messages up to a turn, and all of them with the header of the next turn. Where the second
text begins with the first, the template only appends: what follows the turn is the rest, and that alone is tokenised.
Where it does not (a template that drops earlier thinking), the turn is not kept: the model sees what the template
writes, as with any other server. With `keeps_thinking` it is kept, and what follows is found behind a mark.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.base import features
from treewise.data.io.options import today_as
from treewise.data.render.messages import IMAGES, Message, Tools, WeightedMessages, clean_conversation
from treewise.data.render.piece_tokenizer import Encoder, joined
from treewise.data.render.template import Template
from treewise.data.render.turns import behind_end, behind_turn
from treewise.errors import ConfigError, DataError
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError
from treewise.rl.replies.reader import UNFINISHED, ReplyReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treewise.rl.agents.grammars import Grammars

logger = logging.getLogger("treewise")
MAX_TEMPLATES = 16  # of different variables
RESERVED = {"conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "documents", "padding"}
RESERVED |= {"continue_final_message", "return_dict", "return_tensors", "tokenizer_kwargs", "max_length", "truncation"}
RESERVED |= {"return_assistant_tokens_mask"}


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as text, with the header of the model's turn (and its prefill). given: the messages of the call,
    checked; messages: as the template gets them."""

    template: Template
    given: tuple[Message, ...]
    messages: tuple[Message, ...]
    tools: Tools
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn. text: as it was given out, without its end; it may be less than the ids hold. is_ended: the last
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


class Writer:
    """One tokenizer and its chat template (or another: a text, a file, or `chatml`). For several threads. today: the
    date that the template writes as today's, however long the episodes take."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template: str | None = None,
        *,
        keeps_thinking: bool = False,
        today: str | None = None,
    ) -> None:
        self.tokenizer, self.keeps_thinking = tokenizer, keeps_thinking
        self.today = today or today_as()
        self.encoder = Encoder(tokenizer)
        self.chat_template = chat_template
        self.notes: dict[str, None] = {}
        self._lock = threading.RLock()
        self._templates: dict[str, tuple[Template, ReplyReader]] = {}
        self._writes_tools: dict[str, bool] = {}
        self._grammars: Any = None
        self.template_of({})

    def note(self, text: str) -> None:
        """Says something once, and keeps it among the notes."""
        with self._lock:
            if text in self.notes:
                return
            self.notes[text] = None
        logger.warning("%s", text)

    def grammars(self, stop_ids: Sequence[int]) -> "Grammars":
        """Those of the tokenizer."""
        with self._lock:
            if self._grammars is None:
                self._grammars = features.grammars.Grammars(self.tokenizer, stop_ids)
            found: Grammars = self._grammars
            return found

    def template_of(self, variables: Mapping[str, Any]) -> tuple[Template, ReplyReader]:
        """The template with its variables, and what reads its turns."""
        name = json.dumps(dict(variables), sort_keys=True, default=str)
        with self._lock:
            if name not in self._templates:
                if len(self._templates) >= MAX_TEMPLATES:
                    del self._templates[list(self._templates)[-1]]
                template = Template(
                    self.encoder, self.chat_template, dict(variables), on_hidden="warn", today=self.today
                )
                template.notes = self.notes
                reader = ReplyReader(template, with_own=self.chat_template is None)
                self._templates[name] = (template, reader)
            return self._templates[name]

    @property
    def source(self) -> str:
        """The text of the template."""
        return self.template_of({})[0].source

    def written(self, asked: AgentRequest) -> Written:
        """The conversation of a call.

        Raises:
            RefusedError: messages of another shape, images, tools that the template does not write, or an error of the
                template.
        """
        with self._lock:
            try:
                return self._written(asked)
            except (DataError, ConfigError) as error:
                raise RefusedError(str(error), param="messages") from None

    def _written(self, asked: AgentRequest) -> Written:
        if reserved := RESERVED & set(asked.variables):
            raise RefusedError(
                f"chat_template_kwargs holds {', '.join(sorted(reserved))}; give the template's variables."
            )
        template, _ = self.template_of(asked.variables)
        talk = clean_conversation(list(asked.messages), "the call")
        if any(message.get(IMAGES) for message in talk.messages):
            raise RefusedError("content of type image is not served; the recorded rows are of text.", param="messages")
        named = _with_names(talk.messages)
        messages = template.prepare(WeightedMessages(named, talk.weights), "the call").messages
        messages = template.check_history(messages, asked.tools, "the call", {})
        text = template.render([messages], asked.tools, "the call", generation=True)[0]
        if asked.tools and not self._are_tools_written(template, messages, asked.tools, text):
            raise RefusedError(
                "the chat template does not write tools, so the model would not see them; start with a chat_template "
                "that does, as --chat_template chatml.",
                param="tools",
            )
        return Written(template, tuple(talk.messages), tuple(messages), asked.tools, text + asked.prefill)

    def _are_tools_written(self, template: Template, messages: list[Message], tools: Tools, text: str) -> bool:
        name = json.dumps(tools, sort_keys=True)
        if name not in self._writes_tools:
            without = template.render([messages], None, "the call", generation=True)[0]
            if len(self._writes_tools) > MAX_TEMPLATES:
                self._writes_tools.clear()
            self._writes_tools[name] = without != text
        return self._writes_tools[name]

    # -- ids ----------------------------------------------------------------------------------------------------------

    def prompt_ids(self, text: str) -> np.ndarray:
        """int32, of a text that the template wrote."""
        with self._lock:
            return joined(self.encoder.encode([text])[0]).astype(np.int32)

    def text_ids(self, text: str) -> np.ndarray:
        """int32, of a text without a template, as the tokenizer writes it."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int32)

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

    # -- turns --------------------------------------------------------------------------------------------------------

    def tail(self, written: Written, num_messages: int, turn: Turn) -> Tail | None:
        """What follows a turn that is the last of the first `num_messages` messages; None where the template writes
        these otherwise once others follow."""
        with self._lock:
            return self._tail(written, num_messages, turn)

    def _tail(self, written: Written, num_messages: int, turn: Turn) -> Tail | None:
        template, encoder = written.template, self.encoder
        try:
            head = template.render([list(written.messages[:num_messages])], written.tools, "the call")[0]
        except DataError:  # a template that writes no conversation that ends so
            return None
        head = head.removesuffix(behind_end(template, head))
        end = encoder.end_of_turn(head)
        closes = "" if end is None else head[slice(*end)]
        if written.text.startswith(head):
            rest = written.text[len(head) :]
            return self._closed(turn, closes, rest if end is None else head[end[1] :] + rest)
        return self._after_mark(written, num_messages, turn, closes) if self.keeps_thinking else None

    def _after_mark(self, written: Written, num_messages: int, turn: Turn, end: str) -> Tail | None:
        """What the template writes behind a turn that it does not write as it was sampled. end: the token that closes
        the turn; "" where the template has none."""
        around = behind_turn(written.template, written.messages, num_messages - 1, written.tools, end, "the call")
        return None if around is None else self._closed(turn, end, around[2])

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
