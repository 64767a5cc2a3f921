"""Chat templates: their text, what they write of conversations, and which fields of messages they leave out.

For a turn, `prompt` is the template of the messages before it with the generation prompt: exactly what inference saw.
`turns` locates what the model sampled after it.

Templates leave things out without an error: Qwen3's writes nothing for the role `developer`, Llama 3.1's drops the
content beside a tool call, SmolLM2's has no tool calls. The first message of every shape (role, fields in use, where it
stands) is therefore rendered once more in its own conversation, each field replaced by a word that it does not hold;
what does not come back is hidden. Later messages of the same shape cost one look-up.

Templates run in a process of their own (`template_process`). Today's date, which some write, is one for a whole run.

Records of one tree repeat their first turns, so what was rendered is kept: each conversation is rendered once.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from treewise.base import features
from treewise.base.paths import path_of
from treewise.data.io.field_checks import shown
from treewise.data.io.files import read_text
from treewise.data.io.options import today_as
from treewise.data.io.replies import KEYS, REASONING_NAMES
from treewise.data.render import probes, template_process
from treewise.data.render.messages import (
    BAD_CALL,
    IMAGES,
    PLACES,
    Message,
    Tools,
    WeightedMessages,
    as_parts,
    text_parts,
)
from treewise.data.render.piece_tokenizer import Encoder, Pieces
from treewise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from treewise.tree.images import ImageSpan

MAX_KEPT = 16_000_000  # characters that were rendered
DOUBLED_ENDS = "end tokens at the end of an assistant's content, which the chat template writes again, are left out"
MAX_LOOKS = 20  # at messages of one shape whose content a template rewrites
STANDARD_ROLES = {"developer": "system", "function": "tool"}
CHATML = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8").partition("#}\n")[2]
UNWRITTEN_TOOLS = "the chat template never writes tools; the model does not see them (chat_template: chatml does)"
NO_TEMPLATE = "the tokenizer has no chat template; give one as chat_template, for instance 'chatml'."
REORDERED = (
    "results of tools are put in the order of their calls, by tool_call_id: the chat template writes no ids, so a "
    "model takes the first result for that of the first call"
)
NOW = "strftime_now"  # by which templates ask for today's date


class Placer(Protocol):
    """Puts images into tokenised texts (`treewise.data.images`)."""

    def written(self, text: str) -> str:
        """A rendered text with what the processor writes around images."""

    def place(
        self, pieces: Pieces, messages: Sequence[Message], location: str
    ) -> "tuple[Pieces, tuple[ImageSpan, ...]]":
        """The pieces with the tokens of images in place of placeholders, and where these are."""


_Key = tuple[Any, ...]  # generation, tools and messages of a conversation, as JSON text


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text; spans: the characters that the template's `{% generation %}` blocks wrote."""

    text: str
    spans: list[tuple[int, int]]


class Template:
    """One chat template bound to a tokenizer. `notes` collects what users should be aware of.

    counted: what was mended in messages. placer: of images, for the tokenizer of a model that sees. today: the date
    that the template writes as today's (`template_date`), and is_dated whether it has written it.
    """

    def __init__(
        self,
        encoder: Encoder,
        chat_template: str | None,
        kwargs: dict[str, Any],
        on_hidden: str = "error",
        placer: Placer | None = None,
        today: str | None = None,
    ) -> None:
        self.tokenizer = encoder.tokenizer
        self.encoder = encoder
        self.eos: str | None = getattr(self.tokenizer, "eos_token", None)
        self.text = template_text(chat_template)
        is_named = chat_template is not None and "{" not in chat_template
        self.name = f"chat_template {shown(chat_template)}" if is_named else "the chat template"
        self.kwargs = kwargs
        self.on_hidden = on_hidden
        self.placer = placer
        self.notes: dict[str, None] = {}
        self.counted: Counter[str] = Counter()
        self.today, self.is_dated = today or today_as(), False
        self._hidden: dict[tuple[Any, ...], tuple[str, ...]] = {}  # by shape: the fields that are hidden
        self._looks: dict[tuple[Any, ...], int] = {}
        self._kept: dict[_Key, Rendered] = {}  # rendered conversations
        self._num_kept = 0  # their characters
        self._reads_parts_alone = False
        # Some templates of vision models write content parts only.
        question, mark = probes.QUESTION, self.mark([])
        text = self._probed([{**question, "content": mark}], None) if placer is not None else mark
        self._reads_parts_alone = text is None or mark not in text
        self._tools_seen = False

    @cached_property
    def source(self) -> str:
        """The text of the template; empty where there is none."""
        return str(self.text or getattr(self.tokenizer, "chat_template", None) or "")

    def mark(self, talk: Sequence[Message], tools: Tools = None) -> str:
        """A content for a probe that can be found in what the template writes for a conversation."""
        return probes.mark_for(self._all_of(talk, tools))

    def _all_of(self, talk: Sequence[Message], tools: Tools) -> str:
        """All text that a rendered conversation may be made of."""
        return self.source + json.dumps([talk, tools, self.kwargs], ensure_ascii=False, default=_placeholder)

    @cached_property
    def _takes_text(self) -> dict[bool, bool]:
        """Whether arguments of tool calls are given as text, by whether there are any."""
        return {has_any: probes.takes_text(self._probed, has_arguments=has_any) for has_any in (False, True)}

    @cached_property
    def dates(self) -> list[str]:
        """The date that prompts hold, where the template writes one."""
        if NOW in self.source and not self.is_dated:
            self._probed([probes.QUESTION], None)
        return [self.today] if self.is_dated else []

    @cached_property
    def _is_paired_by_place(self) -> bool:
        return probes.is_paired_by_place(self._probed)

    def prepare(self, talk: WeightedMessages, location: str) -> WeightedMessages:
        """Messages with tool-call arguments in the form that this template writes correctly."""
        messages = [self.prepared(message, f"{location}: messages[{i}]") for i, message in enumerate(talk.messages)]
        return WeightedMessages(messages, talk.weights)

    def prepared(self, message: Message, location: str) -> Message:
        """One message of those, without end tokens in an assistant's content that the template writes again.

        Special tokens that stand elsewhere in it become these tokens, as they do in servers, and are counted.
        """
        content = message["content"]
        if message["role"] == "assistant" and "train_detail" not in message:
            content = self.without_end(content)
        if content != message["content"]:
            self.counted[DOUBLED_ENDS] += 1
        for token in self.encoder.special_tokens(content):
            self.counted[f"messages hold {shown(token)} as text, which becomes that special token"] += 1
        message = {**message, "content": content}
        if not message.get("tool_calls"):
            return message
        return features.tools.with_arguments(message, self._takes_text, location, self.counted)

    def without_end(self, text: str) -> str:
        """A text without the end-of-turn tokens at its end."""
        spans = self.encoder.endings(text)
        kept = len(spans)
        while kept and text[slice(*spans[kept - 1])] in self.ends:
            kept -= 1
        return text if kept == len(spans) else text[: spans[kept][0]]

    @cached_property
    def ends(self) -> frozenset[str]:
        """The special tokens that end a turn: those that the template writes behind an assistant's content, and eos."""
        last, later = self._behind_content
        found = [*self._leading(last), *self._leading(later)[:1], self.eos]
        return frozenset(token for token in found if token)

    @cached_property
    def end(self) -> str:
        """What the template writes behind an assistant's content, up to the token that ends the turn; empty: none."""
        last, later = self._behind_content
        if ends := self._leading(last[: common_prefix(last, later)]) or self._leading(last):
            return last[: last.index(ends[-1]) + len(ends[-1])]
        span = self.encoder.end_of_turn(last)  # behind text of the template's own
        return last[: span[1]] if span else ""

    @cached_property
    def end_token(self) -> str:
        """The special token that ends a turn; empty where the template writes none, or there is no template."""
        span = self.encoder.end_of_turn(self.end) if self.source else None
        return self.end[slice(*span)].strip() if span else ""

    @cached_property
    def behind_end(self) -> str:
        """What it writes behind that only where no turn follows, with a token: Phi-3's <|endoftext|>."""
        last, later = self._behind_content
        behind = last[len(self.end) :].rstrip()
        return behind if self.end and self._leading(behind) and not later.startswith(self.end + behind) else ""

    @cached_property
    def _behind_content(self) -> tuple[str, str]:
        """What stands behind an assistant's content that is the last, and behind one that is not."""
        question, mark = probes.QUESTION, self.mark([])
        talk, found = [question, {"role": "assistant", "content": mark}], ["", ""]
        for number, messages in enumerate((talk, [*talk, question])):  # a template may have demands of its own
            found[number] = (self._probed(messages, None) or "").rpartition(mark)[2]
        return found[0], found[1] or found[0]

    def _leading(self, text: str) -> list[str]:
        """The special tokens at the beginning of a text; white space may stand between them."""
        found: list[str] = []
        while match := self.encoder.special_at(text := text.lstrip()):
            found.append(match)
            text = text[len(match) :]
        return found

    def render(
        self,
        conversations: Sequence[list[Message]],
        tools: Tools,
        location: str,
        *,
        generation: bool = False,
    ) -> list[str]:
        """Rendered text of each conversation; `generation`: with the header that opens the model's turn.

        Raises:
            DataError: the template raises an error for a conversation, which the message holds; a tool call that cannot
                be written.
        """
        if tools and not self._tools_seen:
            self._tools_seen = True
            if self.render(conversations[:1], tools, location) == self.render(conversations[:1], None, location):
                self.notes[UNWRITTEN_TOOLS] = None
        return [each.text for each in self.rendered(conversations, tools, location, generation=generation)]

    def rendered(
        self, conversations: Sequence[list[Message]], tools: Tools, location: str, *, generation: bool = False
    ) -> list[Rendered]:
        """As `render`, with what `{% generation %}` blocks wrote."""
        for message in itertools.chain(*conversations):
            if BAD_CALL in message:
                raise DataError(message[BAD_CALL])
        messages = {id(message): message for message in itertools.chain(*conversations)}
        try:  # all that a text depends on; messages that conversations share are written once
            written = {key: _json_of(self._shaped(message)) for key, message in messages.items()}
            keys = [
                (generation, _json_of(tools), *(written[id(message)] for message in talk)) for talk in conversations
            ]
        except (TypeError, ValueError) as error:
            raise DataError(f"{location}: the messages are no JSON ({shown(str(error))[1:-1]}).") from None
        kept = self._kept  # in whose place another thread may put an empty one
        found = {key: kept[key] for key in keys if key in kept}
        new = list(dict.fromkeys(key for key in keys if key not in found))
        if new:
            rendered = self._applied(new, tools, location)
            if self._num_kept > MAX_KEPT:
                self._kept, self._num_kept = {}, 0
            self._kept.update(added := dict(zip(new, rendered, strict=True)))
            self._num_kept += sum(len(each.text) for each in rendered)
            found.update(added)
        return [found[key] for key in keys]

    def _applied(self, talks: Sequence[_Key], tools: Tools, location: str) -> list[Rendered]:
        """What the process renders of conversations that differ in their messages alone."""
        try:
            template = self.tokenizer.get_chat_template(self.text, tools)
        except ValueError:
            raise DataError(f"{location}: {NO_TEMPLATE}") from None
        generation, of_tools, *_ = talks[0]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(itertools.chain(*(t[2:] for t in talks))))}
        variables = {**self.tokenizer.special_tokens_map, **self.kwargs, "add_generation_prompt": generation}
        head = _json_of(
            {
                "template": template,
                "talks": [[numbers[text] for text in talk[2:]] for talk in talks],
                "variables": variables,
                "date": self.today,
            }
        )
        request = f'{head[:-1]}, "tools": {of_tools}, "messages": [{", ".join(map(str, numbers))}]}}'
        try:
            answers = template_process.ask(request, len(talks))
        except template_process.RenderingError as error:
            raise ConfigError(
                f"{self.name} {error} for one conversation ({location}), so it is not applied; give another "
                "chat_template."
            ) from None
        if "syntax" in answers[-1]:
            raise DataError(f"{location}: {self.name} is not valid Jinja ({shown(answers[-1]['syntax'])[1:-1]}).")
        if "error" in answers[-1]:
            said = shown(answers[-1]["error"], 200)
            raise DataError(f"{location}: the chat template raises an error for this conversation ({said}).")
        if not self.is_dated and any(answer["is_dated"] for answer in answers):
            self.is_dated = True
            self.notes[f"the chat template writes today's date, which is {self.today} here (template_date)"] = None
        return [Rendered(answer["text"], [(low, high) for low, high in answer["spans"]]) for answer in answers]

    def _shaped(self, message: Message) -> Message:
        """A message as the template reads it: content as text or parts, reasoning by each of its names, without what
        is empty, and why a reply ended."""
        message = as_parts(message, always=self._reads_parts_alone)
        unseen = KEYS | {IMAGES, PLACES}
        message = {key: value for key, value in message.items() if value is not None and key not in unseen}
        reasoning = next((message[name] for name in REASONING_NAMES if name in message), None)
        if reasoning is None:
            return message
        return {"thinking": reasoning, **message, "reasoning_content": reasoning}  # as transformers does

    def check_history(
        self,
        history: list[Message],
        tools: Tools,
        location: str,
        checked: dict[int, Message],
    ) -> list[Message]:
        """The messages with roles that the template writes (`developer` as `system`, `function` as `tool` if it must),
        and results of tools in the order of their calls where only that pairs them.

        checked: messages of this record that were checked before, by `id`.

        Raises:
            DataError: a field in use that the template writes under no standard role (`on_hidden="error"`).
        """
        history = self._in_order(history)
        result = [checked.get(id(message), message) for message in history]
        for index, message in enumerate(history):
            if id(message) not in checked:
                result[index] = checked[id(message)] = self._shown_message(result, index, tools, location)
        return result

    def _in_order(self, history: list[Message]) -> list[Message]:
        ordered = probes.in_order_of_calls(history)
        if ordered == history or not self._is_paired_by_place:
            return history
        self.notes[REORDERED] = None
        return ordered

    def check_prompt(self, history: list[Message], prompt: str, tools: Tools, location: str, seen: set[int]) -> None:
        """Checks that a prompt holds the content of every message that nobody sampled.

        `check_history` renders one message of each shape; a template may treat another of that shape differently (the
        last system message replaces the first). A content that the template rewrites (as JSON) is looked for by a word
        in its place.

        Parameters:
            seen: ids of messages of this record that were checked before.

        Raises:
            DataError: a message is missing (`on_hidden="error"`).
        """
        for index, message in enumerate(history):
            if id(message) in seen:
                continue
            seen.add(id(message))
            texts = [text for part in text_parts(message) if (text := part.strip())]
            if message["role"] == "assistant" or all(
                text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt  # as `tojson` writes it
                for text in texts
            ):
                continue
            hidden = self._hidden_in_context(history, index, tools, location, remembers=False)
            if hidden:
                self.report_hidden(hidden, f"{location}: message {index} ({message['role']})")

    def _shown_message(self, messages: list[Message], index: int, tools: Tools, location: str) -> Message:
        """Message `index`, under its standard role where its own is hidden."""
        message = messages[index]
        hidden = self._hidden_in_context(messages, index, tools, location)
        if hidden == ():
            return message
        role = message["role"]
        if role in STANDARD_ROLES:
            mapped = {**message, "role": STANDARD_ROLES[role]}
            around = [*messages[:index], mapped, *messages[index + 1 :]]
            if self._hidden_in_context(around, index, tools, location) == ():
                note = f"the chat template has no role {role}; its messages are rendered as {mapped['role']}"
                self.notes[note] = None
                return mapped
        if hidden:  # None: the template raises an error, which the rendering itself reports
            self.report_hidden(hidden, f"{location}: message {index} ({role})")
        return message

    def _hidden_in_context(
        self, messages: Sequence[Message], index: int, tools: Tools, location: str, *, remembers: bool = True
    ) -> tuple[str, ...] | None:
        """Fields of message `index` that reach no prompt; None where the template raises an error.

        The whole history is rendered with the generation prompt, an assistant's message also as the last one. Templates
        that put a system message into the turn after it need the first, those that drop what is old need the second.
        """
        role, before = messages[index]["role"], messages[index - 1]["role"] if index else None
        is_known = probes.is_named_by_call(messages, index)
        _, names = probes.with_words(messages[index], "", name_is_known=is_known)
        key = ("context", role, tuple(names), before, bool(tools))
        if not remembers:  # a message that was not found in its prompt is probed itself: the first of each shape are
            self._looks[key] = self._looks.get(key, 0) + 1
        if key not in self._hidden or (not remembers and self._looks[key] <= MAX_LOOKS):
            word = probes.word_for(self._all_of(messages, tools))
            marked, words = probes.with_words(messages[index], word, name_is_known=is_known)
            for name in ("reasoning_content", "thinking in content"):  # templates may drop that of earlier turns
                words.pop(name, None)
            around, texts = [*messages[:index], marked, *messages[index + 1 :]], []
            for talk in (around, around[: index + 1]) if role == "assistant" else (around,):
                with suppress(DataError):
                    texts.append(self.render([talk], tools, location, generation=talk is around)[0].lower())
            if not texts:
                return None
            shown = "\n".join(texts)
            self._hidden[key] = tuple(name for name, word in words.items() if word not in shown)
        return self._hidden[key]

    def hidden_in_turn(
        self, history: Sequence[Message], turn: Message, tools: Tools, sample: Callable[[Message], tuple[str, str]]
    ) -> tuple[str, ...] | None:
        """Fields of a trained turn that are not among its trained text; None where the template raises an error.

        sample: the text that is trained where a message is the turn, and the whole conversation.
        """
        _, names = probes.with_words(turn, "", name_is_known=False)
        key = ("turn", tuple(names), history[-1]["role"], bool(tools))
        if key not in self._hidden:
            word = probes.word_for(self._all_of([*history, turn], tools))
            marked, words = probes.with_words(turn, word, name_is_known=False)
            try:
                trained, whole = (text.lower() for text in sample(marked))
            except DataError:
                return None
            self._hidden[key] = tuple(
                field  # who speaks is part of the header, which is not sampled
                for field, word in words.items()
                if word not in (whole if field == "name" else trained)
            )
        return self._hidden[key]

    def report_hidden(self, fields: Sequence[str], whose: str) -> None:
        """Raises `DataError` for fields that the template does not write, or notes them (`on_hidden="warn"`)."""
        names = ", ".join(fields)
        if self.on_hidden == "warn":
            self.notes[f"the chat template leaves out {names} of some messages (on_hidden: warn)"] = None
            return
        raise DataError(
            f"{whose}: the chat template does not write its {names}; remove it, put it into content, give a "
            "chat_template that writes it ('chatml'), or set on_hidden: warn to go on without it."
        )

    def _probed(self, talk: list[Message], tools: Tools) -> str | None:
        """What the template writes of a conversation of ours; None where it raises an error."""
        with suppress(DataError):
            return self.rendered([talk], tools, "a probe")[0].text
        return None


def dated(template: Template) -> dict[str, str]:
    """What a run records of a template that writes today's date: nothing of others."""
    return {"template_date": template.dates[0]} if template.dates else {}


def common_prefix(a: str, b: str) -> int:
    """Length of the longest common start, by bisection on slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _json_of(value: object) -> str:
    return json.dumps(value, default=_placeholder)


def _placeholder(value: object) -> str:
    """What stands for a value that JSON does not hold; templates do not read such values."""
    return f"<{type(value).__name__}>"


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
        return _parsed(read_text(path_of(chat_template)), chat_template)
    except OSError as error:
        raise ConfigError(
            f"chat_template {shown(chat_template)} is neither Jinja text, nor 'chatml', nor a readable file "
            f"({error.strerror})."
        ) from None


def _parsed(text: str | None, location: str) -> str | None:
    """The text, if it is a template; also where no record needs one."""
    if text is None:
        return None
    try:
        [answer] = template_process.ask(json.dumps({"template": text}), 1)
    except template_process.RenderingError as error:
        raise ConfigError(f"{location} {error} to be read, so it is not applied; give another chat_template.") from None
    if "syntax" in answer:
        reason = shown(answer["syntax"])[1:-1]
        raise ConfigError(f"{location}: line {answer['line']} is not valid Jinja ({reason}).")
    if "error" in answer:
        reason = "Jinja nested too deeply to read" if answer["kind"] == "RecursionError" else answer["error"]
        raise ConfigError(f"{location}: {reason}.")
    return text
