"""Chat templates: their text, what they write of conversations, and which fields of messages they leave out.

For a turn, `prompt` is the template of the messages before it with the generation prompt: exactly what inference saw.
`turns` locates what the model sampled after it.

Templates leave things out without an error: Qwen3's writes nothing for the role `developer`, Llama 3.1's drops the
content beside a tool call, SmolLM2's has no tool calls. The first message of every shape (role, fields in use, where it
stands) is therefore rendered once more in its own conversation, each field replaced by a sentinel; what does not come
back is hidden. Later messages of the same shape cost one look-up.

Records of one tree repeat their first turns, so what was rendered is kept: each conversation is rendered once.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jinja2

from treewise.base.features import feature
from treewise.base.paths import path_of
from treewise.data.io.field_checks import shown
from treewise.data.io.files import read_text
from treewise.data.io.replies import KEYS
from treewise.data.render import limits
from treewise.data.render.messages import BAD_CALL, IMAGE, Message, Tools, WeightedMessages, as_parts
from treewise.data.render.piece_tokenizer import Encoder, Pieces
from treewise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from treewise.tree.images import ImageSpan

MARK = "\ue0a7\ue0b7turn\ue0b7\ue0a7"  # private-use characters: no text and no template holds them
THINK, THINK_END = "<think>", "</think>"
MAX_KEPT = 16_000_000  # characters that were rendered
MAX_CALLS = 2  # tool calls of one message: one, or several
DOUBLED_ENDS = "end tokens at the end of an assistant's content, which the chat template writes again, are left out"
MAX_LOOKS = 20  # at messages of one shape whose content a template rewrites
STANDARD_ROLES = {"developer": "system", "function": "tool"}
CHATML = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8").partition("#}\n")[2]
UNWRITTEN_TOOLS = "the chat template never writes tools; the model does not see them (chat_template: chatml does)"
NO_TEMPLATE = "the tokenizer has no chat template; give one as chat_template, for instance 'chatml'."


class Placer(Protocol):
    """Puts images into tokenised texts (`treewise.data.images`)."""

    def written(self, text: str) -> str:
        """A rendered text with what the processor writes around images."""

    def place(
        self, pieces: Pieces, messages: Sequence[Message], location: str
    ) -> "tuple[Pieces, tuple[ImageSpan, ...]]":
        """The pieces with the tokens of images in place of placeholders, and where these are."""


class Template:
    """One chat template bound to a tokenizer. `notes` collects what users should be aware of.

    counted: what was mended in messages. placer: of images, for the tokenizer of a model that sees.
    """

    def __init__(
        self,
        encoder: Encoder,
        chat_template: str | None,
        kwargs: dict[str, Any],
        on_hidden: str = "error",
        placer: Placer | None = None,
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
        self._hidden: dict[tuple[Any, ...], tuple[str, ...]] = {}  # by shape: the fields that are hidden
        self._looks: dict[tuple[Any, ...], int] = {}
        self._kept: dict[tuple[object, ...], str] = {}  # rendered conversations
        self._num_kept = 0  # their characters
        self._reads_parts_alone = False
        question: Message = {"role": "user", "content": MARK}
        # Some templates of vision models write content parts only; some would quote arguments given as text twice.
        self._reads_parts_alone = placer is not None and not self._writes(MARK, [question])
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": '{"probe": 1}'}}
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        self._arguments_as_text = self._writes('{"probe": 1}', [question, answer])
        self._tools_seen = False

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
        return feature("tools").with_arguments(message, self._arguments_as_text, location, self.counted)

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
    def behind_end(self) -> str:
        """What it writes behind that only where no turn follows, with a token: Phi-3's <|endoftext|>."""
        last, later = self._behind_content
        behind = last[len(self.end) :].rstrip()
        return behind if self.end and self._leading(behind) and not later.startswith(self.end + behind) else ""

    @cached_property
    def _behind_content(self) -> tuple[str, str]:
        """What stands behind an assistant's content that is the last, and behind one that is not."""
        question: Message = {"role": "user", "content": "a"}
        talk, found = [question, {"role": "assistant", "content": MARK}], ["", ""]
        for number, messages in enumerate((talk, [*talk, question])):
            with suppress(DataError):  # a template with demands of its own, or none
                found[number] = self.render([messages], None, "a probe")[0].rpartition(MARK)[2]
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
        for message in itertools.chain(*conversations):
            if BAD_CALL in message:
                raise DataError(message[BAD_CALL])
        if tools and not self._tools_seen:
            self._tools_seen = True
            if self.render(conversations[:1], tools, location) == self.render(conversations[:1], None, location):
                self.notes[UNWRITTEN_TOOLS] = None
        try:
            keys = _keys(conversations, tools, generation=generation)
        except (TypeError, ValueError):  # they hold what JSON does not
            return self._applied(conversations, tools, location, generation=generation)
        kept = self._kept  # in whose place another thread may put an empty one
        texts = {key: kept[key] for key in keys if key in kept}
        new = {key: talk for key, talk in zip(keys, conversations, strict=True) if key not in texts}
        if new:
            rendered = self._applied(list(new.values()), tools, location, generation=generation)
            if self._num_kept > MAX_KEPT:
                self._kept, self._num_kept = {}, 0
            self._kept.update(added := dict(zip(new, rendered, strict=True)))
            self._num_kept += sum(map(len, rendered))
            texts.update(added)
        return [texts[key] for key in keys]

    def _applied(
        self, conversations: Sequence[list[Message]], tools: Tools, location: str, *, generation: bool
    ) -> list[str]:
        try:
            with self.limited(tools, location):
                return self.tokenizer.apply_chat_template(
                    [self.shaped(talk) for talk in conversations],
                    tools=tools,
                    chat_template=self.text,
                    add_generation_prompt=generation,
                    tokenize=False,
                    **self.kwargs,
                )
        except ConfigError:
            raise
        except ValueError as error:
            if self.text is None and not getattr(self.tokenizer, "chat_template", None):
                raise DataError(f"{location}: {NO_TEMPLATE}") from None
            raise DataError(f"{location}: the chat template cannot be applied ({shown(str(error), 200)}).") from error
        except Exception as error:  # a template is a program of its own: any error of it is an error of the record
            raise DataError(
                f"{location}: the chat template raises an error for this conversation ({shown(str(error), 200)})."
            ) from error

    @contextmanager
    def limited(self, tools: Tools, location: str) -> Iterator[None]:
        """Inside, what the template computes is limited.

        Raises:
            ConfigError: it goes beyond a limit, as it may for other records, too.
        """
        try:
            with limits.limited(self.tokenizer.get_chat_template(self.text, tools)):
                yield
        except limits.TemplateLimitError as error:
            raise ConfigError(
                f"{self.name} {error} for one conversation ({location}), so it is not applied; give another "
                "chat_template."
            ) from None

    def shaped(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template reads them: content as text or parts, without why a reply ended."""
        return [as_parts(_written(message), always=self._reads_parts_alone) for message in messages]

    def check_history(
        self,
        history: list[Message],
        tools: Tools,
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

    def check_prompt(self, history: list[Message], prompt: str, tools: Tools, location: str, seen: set[int]) -> None:
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
        marked, sentinels = with_sentinels(messages[index], name_is_known=_is_named_by_call(messages, index))
        for name in ("reasoning_content", "thinking in content"):  # templates may drop the reasoning of earlier turns
            sentinels.pop(name, None)
        key = ("context", role, tuple(sentinels), before, bool(tools))
        if not remembers:  # a message that was not found in its prompt is probed itself: the first of each shape are
            self._looks[key] = self._looks.get(key, 0) + 1
        if key not in self._hidden or (not remembers and self._looks[key] <= MAX_LOOKS):
            around, texts = [*messages[:index], marked, *messages[index + 1 :]], []
            for talk in (around, around[: index + 1]) if role == "assistant" else (around,):
                with suppress(DataError):
                    texts.append(self.render([talk], tools, location, generation=talk is around)[0].lower())
            if not texts:
                return None
            shown = "\n".join(texts)
            self._hidden[key] = tuple(name for name, sentinel in sentinels.items() if sentinel not in shown)
        return self._hidden[key]

    def hidden_in_turn(
        self, history: Sequence[Message], turn: Message, has_tools: bool, sample: Callable[[Message], tuple[str, str]]
    ) -> tuple[str, ...] | None:
        """Fields of a trained turn that are not among its trained text; None where the template raises an error.

        sample: the text that is trained where a message is the turn, and the whole conversation.
        """
        marked, sentinels = with_sentinels(turn, name_is_known=False)
        key = ("turn", tuple(sentinels), history[-1]["role"], has_tools)
        if key not in self._hidden:
            try:
                trained, whole = (text.lower() for text in sample(marked))
            except DataError:
                return None
            self._hidden[key] = tuple(
                field  # who speaks is part of the header, which is not sampled
                for field, sentinel in sentinels.items()
                if sentinel not in (whole if field == "name" else trained)
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

    def _writes(self, text: str, talk: list[Message]) -> bool:
        """Whether the template writes a text that a conversation holds."""
        try:
            return text in self.render([talk], None, "a probe")[0]
        except DataError:
            return False


def _written(message: Message) -> Message:
    return message if KEYS.isdisjoint(message) else {key: value for key, value in message.items() if key not in KEYS}


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


def _keys(conversations: Sequence[list[Message]], tools: Tools, *, generation: bool) -> list[tuple[object, ...]]:
    """All that the text of each conversation depends on; messages that conversations share are written once."""
    messages = {id(message): message for talk in conversations for message in talk}
    written = {key: json.dumps(message) for key, message in messages.items()}
    head = (generation, json.dumps(tools))
    return [(head, *(written[id(message)] for message in talk)) for talk in conversations]


def with_sentinels(message: Message, *, name_is_known: bool) -> tuple[Message, dict[str, str]]:
    """A message of the same shape whose texts are sentinels, and the sentinel (lower case) of every field in use.

    name_is_known: a tool result whose function an earlier call names; the name says nothing new.
    """
    sentinels: dict[str, str] = {}

    def sentinel(field: str) -> str:
        sentinels[field] = f"zq{len(sentinels)}sentinel{len(field)}qz"
        return sentinels[field]

    marked = dict(message)
    content = message["content"]
    if message["role"] == "assistant" and THINK_END in content:
        thought, _, rest = content.rpartition(THINK_END)
        opened = f"{THINK}\n{sentinel('thinking in content')}" if thought.replace(THINK, "").strip() else thought
        marked["content"] = f"{opened}\n{THINK_END}\n\n{sentinel('content') if rest.strip() else rest}"
    elif content.strip():
        marked["content"] = sentinel("content")
    for field in ("reasoning_content", "refusal", "name"):
        if isinstance(message.get(field), str) and message[field].strip():
            is_skipped = field == "name" and name_is_known
            marked[field] = message[field] if is_skipped else sentinel(field)
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            feature("tools").marked_call(call, number, sentinel)
            for number, call in enumerate(message["tool_calls"][:MAX_CALLS])
        ]
    return marked, sentinels


def _is_named_by_call(messages: Sequence[Message], index: int) -> bool:
    """Whether the nearest tool calls before a result name its function."""
    name = messages[index].get("name")
    if name is None or messages[index]["role"] not in ("tool", "function"):
        return False
    for message in reversed(messages[:index]):
        if message.get("tool_calls"):
            return any(call["function"]["name"] == name for call in message["tool_calls"])
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
        return _parsed(read_text(path_of(chat_template)), chat_template)
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
    except RecursionError:
        raise ConfigError(f"{location}: Jinja nested too deeply to read.") from None
    return text
