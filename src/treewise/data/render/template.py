"""Chat templates: their text, and what they write of conversations and their messages.

For a turn, `prompt` is the template of the messages before it with the generation prompt: exactly what inference saw.
`sampled_turn` locates what the model sampled after it.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from treewise.data.images import ImageReader
from treewise.data.io.printable import shown
from treewise.data.render.chatml import CHATML
from treewise.data.render.field_probe import STANDARD_ROLES, FieldProbe
from treewise.data.render.images import IMAGE, Placer, as_parts
from treewise.data.render.messages import Conversation, Message, with_arguments
from treewise.data.render.piece_tokenizer import Encoder
from treewise.errors import ConfigError, DataError

MARK = "\ue0a7\ue0b7turn\ue0b7\ue0a7"  # private-use characters: no text and no template holds them
NO_TEMPLATE = "the tokenizer has no chat template; give one as chat_template, for instance 'chatml'."


class Template:
    """One chat template bound to a tokenizer. `notes` collects what users should be aware of.

    images: reads the images of messages, for the tokenizer of a model that sees.
    """

    def __init__(
        self,
        encoder: Encoder,
        chat_template: str | None,
        kwargs: dict[str, Any],
        on_hidden: str = "error",
        images: ImageReader | None = None,
    ) -> None:
        self.tokenizer = encoder.tokenizer
        self.encoder = encoder
        self.text = template_text(chat_template)
        self.kwargs = kwargs
        self.on_hidden = on_hidden
        self.placer = None if images is None else Placer(images)
        self.notes: dict[str, None] = {}
        self.probe = FieldProbe()
        self._reads_parts_alone = False
        self._reads_parts_alone = images is not None and not self._writes_plain_content()
        self._arguments_as_text = self._writes_text_arguments()
        self._tools_seen = False

    def prepare(self, talk: Conversation, location: str) -> Conversation:
        """Messages with tool-call arguments in the form that this template writes correctly."""
        as_text = self._arguments_as_text
        return Conversation(
            [with_arguments(m, as_text, f"{location}: messages[{i}]") for i, m in enumerate(talk.messages)],
            talk.weights,
        )

    def mentions(self, key: str) -> bool:
        """Whether the template's text holds the key of a message (`messages[].key`), so that it may read it."""
        text = self.text or getattr(self.tokenizer, "chat_template", None)
        return key.startswith("messages[].") and key.partition(".")[2] in str(text)

    def render(
        self,
        conversations: Sequence[list[Message]],
        tools: list[dict[str, Any]] | None,
        location: str,
        *,
        generation: bool = False,
    ) -> list[str]:
        """Rendered text of each conversation; `generation`: with the header that opens the model's turn.

        Raises:
            DataError: the template raises an error for a conversation, which the message holds.
        """
        if tools and not self._tools_seen:
            self._tools_seen = True
            self._note_unwritten_tools(conversations[0], tools, location)
        try:
            return self.tokenizer.apply_chat_template(
                [self.shaped(talk) for talk in conversations],
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=generation,
                tokenize=False,
                **self.kwargs,
            )
        except ValueError as error:
            if self.text is None and not getattr(self.tokenizer, "chat_template", None):
                raise DataError(f"{location}: {NO_TEMPLATE}") from None
            raise DataError(f"{location}: the chat template cannot be applied ({shown(str(error), 200)}).") from error
        except Exception as error:  # a template is a program of its own: any error of it is an error of the record
            raise DataError(
                f"{location}: the chat template raises an error for this conversation ({shown(str(error), 200)})."
            ) from error

    def shaped(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with content in the form that the template reads: text, or parts."""
        return [as_parts(message, always=self._reads_parts_alone) for message in messages]

    def check_history(
        self,
        history: list[Message],
        tools: list[dict[str, Any]] | None,
        location: str,
        checked: dict[int, Message],
    ) -> list[Message]:
        """The messages with roles that the template writes: `developer` as `system`, `function` as `tool` if it must.

        checked: messages of this record that were checked before, by `id`.

        Raises:
            DataError: a field in use that the template writes under no standard role (`on_hidden="error"`).
        """
        result = [checked.get(id(message), message) for message in history]
        for index, message in enumerate(history):
            if id(message) not in checked:
                result[index] = checked[id(message)] = self._shown_message(result, index, tools, location)
        return result

    def check_prompt(
        self, history: list[Message], prompt: str, tools: list[dict[str, Any]] | None, location: str, seen: set[int]
    ) -> None:
        """Checks that a prompt holds the content of every message that nobody sampled.

        `check_history` renders one message of each shape; a template may treat another of that shape differently (the
        last system message replaces the first). A content that the template rewrites (as JSON) is looked for by a
        sentinel.

        Parameters:
            seen: ids of messages of this record that were checked before.

        Raises:
            DataError: a message is missing (`on_hidden="error"`).
        """
        for index, message in enumerate(history):
            if id(message) in seen:
                continue
            seen.add(id(message))
            texts = [text for part in message["content"].split(IMAGE) if (text := part.strip())]
            if message["role"] == "assistant" or all(text in prompt or _as_json(text) in prompt for text in texts):
                continue
            renders = (lambda talk: self.render([talk], tools, location, generation=True)[0],)
            hidden = self.probe.hidden_in_context(history, index, bool(tools), renders, remembers=False)
            if hidden:
                self.report_hidden(hidden, f"{location}: message {index} ({message['role']})")

    def _shown_message(
        self, messages: list[Message], index: int, tools: list[dict[str, Any]] | None, location: str
    ) -> Message:
        """Message `index`, under its standard role where its own is hidden."""
        message = messages[index]
        renders = [lambda talk: self.render([talk], tools, location, generation=True)[0]]
        if message["role"] == "assistant":  # templates drop what was sampled long ago
            renders.append(lambda talk: self.render([talk], tools, location)[0])
        hidden = self.probe.hidden_in_context(messages, index, bool(tools), renders)
        if hidden == ():
            return message
        role = message["role"]
        if role in STANDARD_ROLES:
            mapped = {**message, "role": STANDARD_ROLES[role]}
            around = [*messages[:index], mapped, *messages[index + 1 :]]
            if self.probe.hidden_in_context(around, index, bool(tools), renders) == ():
                self.notes[f"the chat template has no role {role}; its messages are rendered as {mapped['role']}"] = (
                    None
                )
                return mapped
        if hidden:  # None: the template raises an error, which the rendering itself reports
            self.report_hidden(hidden, f"{location}: message {index} ({role})")
        return message

    def report_hidden(self, fields: Sequence[str], whose: str) -> None:
        names = ", ".join(fields)
        if self.on_hidden == "warn":
            self.notes[f"the chat template leaves out {names} of some messages (on_hidden: warn)"] = None
            return
        raise DataError(
            f"{whose}: the chat template does not write its {names}; remove it, put it into content, give a "
            "chat_template that writes it ('chatml'), or set on_hidden: warn to go on without it."
        )

    def _note_unwritten_tools(self, messages: list[Message], tools: list[dict[str, Any]], location: str) -> None:
        if self.render([messages], tools, location) == self.render([messages], None, location):
            self.notes[
                "the chat template never writes tools; the model does not see them (chat_template: chatml does)"
            ] = None

    def _writes_plain_content(self) -> bool:
        """Whether the template writes content that is text; some of vision models write content parts only."""
        try:
            return MARK in self.render([[{"role": "user", "content": MARK}]], None, "probe")[0]
        except DataError:
            return False

    def _writes_text_arguments(self) -> bool:
        """Whether the template writes arguments given as text verbatim (else it would quote them twice)."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": '{"probe": 1}'}}
        talk: list[Message] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return '{"probe": 1}' in self.render([talk], None, "probe")[0]
        except DataError:
            return False


def template_text(chat_template: str | None) -> str | None:
    """The Jinja text behind the option: given as it is, in a file, or by the name `chatml`.

    Raises:
        ConfigError: none of these, or a text that does not parse.
    """
    if chat_template is None or "{" in chat_template:
        return _parsed(chat_template, "chat_template")
    if chat_template == "chatml":
        return CHATML
    try:
        return _parsed(Path(chat_template).expanduser().read_text(encoding="utf-8"), chat_template)
    except OSError as error:
        raise ConfigError(
            f"chat_template {shown(chat_template)} is neither Jinja text, nor 'chatml', nor a readable file "
            f"({error.strerror})."
        ) from None


def _parsed(text: str | None, location: str) -> str | None:
    """The text, if it is a template; also where no record needs one."""
    try:
        without_marks = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", text or "")  # a tag of transformers
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_marks)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{location}: line {error.lineno} is not valid Jinja ({shown(error.message)[1:-1]})."
        ) from None
    return text


def _as_json(text: str) -> str:
    """As a template's `tojson` writes it, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
