"""Chat templates: what the model saw before a turn, and what it sampled in it.

For a turn, `prompt` is the template of the messages before it with the generation prompt: exactly what inference saw.
The completion is what the template writes after that prompt when the turn is the last message, up to the end-of-turn
token. Templates that rewrite the history as soon as a turn is added (Qwen3 drops an empty `<think>` block from a turn
that is not the last) do not start with the prompt any more; then the turn is located behind its own generation prompt.
TRL asks for templates patched to be append-only instead; here any template works, and rewritten history forks.

What the template writes in a turn and the model did not sample (the empty `<think>` block of a turn without reasoning)
is context. What it leaves out of a message is an error, or a warning: `field_probe` finds it.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treewise.data.images import ImageReader
from treewise.data.io.printable import shown
from treewise.data.render.chatml import CHATML
from treewise.data.render.field_probe import STANDARD_ROLES, THINK, THINK_END, FieldProbe
from treewise.data.render.images import IMAGE, Placer, as_parts
from treewise.data.render.messages import Conversation, Message, with_arguments
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.trained_parts import (
    GENERATION_BLOCK,
    Span,
    clip,
    detail_spans,
    generation_spans,
    intersection,
    spans_of_sampled,
    union,
)
from treewise.errors import ConfigError, DataError

MARK = "\ue0a7\ue0b7turn\ue0b7\ue0a7"  # private-use characters: no text and no template holds them
# Thinking that holds nothing, at the start of a turn; in the tags of Qwen, DeepSeek, Seed and Mistral.
EMPTY_THINKING = re.compile(r"\s*(?:<(think|thinking|seed:think)>\s*</\1>|\[THINK\]\s*\[/THINK\])\n*")
OPENED_THINKING = re.compile(r"(?:<(?:think|thinking|seed:think)>|\[THINK\])\s*\Z")
CLOSED_THINKING = re.compile(r"\s*(?:</(?:think|thinking|seed:think)>|\[/THINK\])\n*")
EMPTY_THINKING_NOTE = (
    "the chat template opens trained turns without reasoning with an empty thinking block; the block is context, not "
    "trained. Give chat_template_kwargs: {enable_thinking: false} if the model was sampled without thinking, or "
    "reasoning_content if it did think."
)
GENERATION_NOTE = (
    "the chat template's {% generation %} blocks leave out parts of what was sampled; these are context, not trained."
)
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
        self._probe = FieldProbe()
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
            hidden = self._probe.hidden_in_context(history, index, bool(tools), renders, remembers=False)
            if hidden:
                self._report_hidden(hidden, f"{location}: message {index} ({message['role']})")

    def check_turn(
        self, history: list[Message], turn: Message, tools: list[dict[str, Any]] | None, location: str
    ) -> None:
        """Checks that all that a trained turn holds is trained.

        Raises:
            DataError: a field in use that the template does not write (`on_hidden="error"`).
        """

        def sample(marked: Message) -> tuple[str, str]:
            prompt = self.render([history], tools, location, generation=True)[0]
            whole = self.render([[*history, marked]], tools, location)[0]
            return self.completion(history, marked, prompt, whole, tools, location)[1], whole

        hidden = self._probe.hidden_in_turn(history, turn, bool(tools), sample)
        if hidden:
            self._report_hidden(hidden, f"{location}: this trained message")

    def _shown_message(
        self, messages: list[Message], index: int, tools: list[dict[str, Any]] | None, location: str
    ) -> Message:
        """Message `index`, under its standard role where its own is hidden."""
        message = messages[index]
        renders = [lambda talk: self.render([talk], tools, location, generation=True)[0]]
        if message["role"] == "assistant":  # templates drop what was sampled long ago
            renders.append(lambda talk: self.render([talk], tools, location)[0])
        hidden = self._probe.hidden_in_context(messages, index, bool(tools), renders)
        if hidden == ():
            return message
        role = message["role"]
        if role in STANDARD_ROLES:
            mapped = {**message, "role": STANDARD_ROLES[role]}
            around = [*messages[:index], mapped, *messages[index + 1 :]]
            if self._probe.hidden_in_context(around, index, bool(tools), renders) == ():
                self.notes[f"the chat template has no role {role}; its messages are rendered as {mapped['role']}"] = (
                    None
                )
                return mapped
        if hidden:  # None: the template raises an error, which the rendering itself reports
            self._report_hidden(hidden, f"{location}: message {index} ({role})")
        return message

    def _report_hidden(self, fields: Sequence[str], whose: str) -> None:
        names = ", ".join(fields)
        if self.on_hidden == "warn":
            self.notes[f"the chat template leaves out {names} of some messages (on_hidden: warn)"] = None
            return
        raise DataError(
            f"{whose}: the chat template does not write its {names}; remove it, put it into content, give a "
            "chat_template that writes it, or set on_hidden: warn to go on without it."
        )

    def completion(
        self, history: list[Message], turn: Message, prompt: str, whole: str, tools: list[dict] | None, location: str
    ) -> tuple[str, str]:
        """What the template wrote for the model after the prompt, and what the model sampled, with its end token.

        Parameters:
            prompt: template of `history` with the generation prompt.
            whole: template of `history` and `turn`.
        """
        if whole.startswith(prompt):
            text = whole[len(prompt) :]
        else:
            text = self._sampled_text(history, turn, prompt, whole, tools, location)
        self._check_written(turn, text, location)
        opening = ""
        empty = EMPTY_THINKING.match(text)
        if empty is None and OPENED_THINKING.search(prompt) and THINK_END not in turn["content"]:
            empty = CLOSED_THINKING.match(text)  # a prompt that ends in <think>, which the template closes at once
        if empty is not None and not EMPTY_THINKING.match(turn["content"]):
            opening, text = empty.group(), text[empty.end() :]
            self.notes[EMPTY_THINKING_NOTE] = None
        end = self.encoder.end_of_turn(text)
        if end is not None:
            return opening, text[: end[1]]
        if not self.tokenizer.eos_token:
            raise DataError(f"{location}: the template writes no end-of-turn token and the tokenizer has no eos_token.")
        self.notes["the chat template writes no end-of-turn token; eos_token was added to every trained turn"] = None
        return opening, text.rstrip() + self.tokenizer.eos_token

    def trained_spans(
        self,
        history: list[Message],
        turn: Message,
        whole: str,
        sampled: str,
        tools: list[dict[str, Any]] | None,
        location: str,
    ) -> list[Span] | None:
        """Spans of a sampled turn's characters that are trained; None for all of it.

        The template's `{% generation %}` blocks and the message's `train_detail` may leave some out.

        Parameters:
            whole: template of `history` and `turn`.
            sampled: what `completion` returned as sampled.

        Raises:
            DataError: the content that `train_detail` marks cannot be located in the turn.
        """
        spans = [(0, len(sampled))]
        if self._has_generation_blocks:
            template = self.tokenizer.get_chat_template(self.text, tools)
            again, blocks = generation_spans(
                self.tokenizer, template, self.shaped([*history, turn]), tools, self.kwargs
            )
            if again != whole:
                raise DataError(
                    f"{location}: the chat template renders another text each time; {difference(whole, again)}"
                )
            spans = spans_of_sampled(blocks, sampled, whole, self.tokenizer.eos_token)
            if spans != [(0, len(sampled))]:
                self.notes[GENERATION_NOTE] = None
        if turn.get("train_detail") is not None:
            spans = intersection(spans, self._detail_in_sampled(history, turn, sampled, tools, location))
        return None if spans == [(0, len(sampled))] else spans

    def _detail_in_sampled(
        self,
        history: list[Message],
        turn: Message,
        sampled: str,
        tools: list[dict[str, Any]] | None,
        location: str,
    ) -> list[Span]:
        """`train_detail` in characters of the sampled turn; what stands behind the content (its end) is trained."""
        content = turn["content"]
        marked = {**turn, "content": MARK}
        prompt = self.render([history], tools, location, generation=True)[0]
        whole = self.render([[*history, marked]], tools, location)[0]
        at = self.completion(history, marked, prompt, whole, tools, location)[1].find(MARK)
        kept = content if sampled.startswith(content, max(at, 0)) else content.strip()  # templates may trim it
        start = at - content.index(kept)
        if at < 0 or not sampled.startswith(kept, at):
            raise DataError(
                f"{location}: the chat template changes the content that train_detail marks; leave train_detail out."
            )
        spans = [(low + start, high + start) for low, high in detail_spans(turn["train_detail"], content, location)]
        return union([*clip(spans, (at, at + len(kept))), (at + len(kept), len(sampled))])

    @property
    def _has_generation_blocks(self) -> bool:
        text = self.text or getattr(self.tokenizer, "chat_template", None)
        return GENERATION_BLOCK.search(str(text)) is not None

    def generation_prompt(self, history: list[Message], prompt: str, tools: list[dict] | None, location: str) -> str:
        """The header that opens the model's turn, the last part of `prompt`."""
        base = self.render([history], tools, location)[0]
        if not prompt.startswith(base):
            raise DataError(
                f"{location}: the template's generation prompt changes the history; {difference(prompt, base)}"
            )
        return prompt[len(base) :]

    def tails(
        self,
        histories: Sequence[list[Message]],
        turns: Sequence[int],
        prompts: Sequence[str],
        completions: Sequence[str],
        tools: list[dict] | None,
        location: str,
    ) -> list[str]:
        """What the template writes in each prompt after the end-of-turn token of message `turn` of its history.

        Raises:
            DataError: the template has no append-only form, so `thinking="keep"` cannot be honoured.
        """
        marked = [_with_mark(history, turn, with_calls=True) for history, turn in zip(histories, turns, strict=True)]
        others = self.render(marked, tools, location, generation=True) if marked else []
        tails = []
        for history, turn, prompt, completion, other in zip(
            histories, turns, prompts, completions, others, strict=True
        ):
            if MARK not in other:  # a template that writes either content or tool calls
                other = self.render([_with_mark(history, turn, with_calls=False)], tools, location, generation=True)[0]
            closing = self.encoder.end_of_turn(completion)
            assert closing is not None
            _, closed, tail = other.rpartition(MARK)[2].partition(completion[slice(*closing)])
            if not closed or not prompt.endswith(tail):
                raise DataError(
                    f"{location}: the chat template has no append-only form after turn {turn}, so thinking='keep' is "
                    "not possible; use thinking='as_inference'."
                )
            tails.append(tail)
        return tails

    def _sampled_text(
        self, history: list[Message], turn: Message, prompt: str, whole: str, tools: list[dict] | None, location: str
    ) -> str:
        mark: Message = {"role": "assistant", "content": MARK}
        marked = self.render([[*history, mark]], tools, location)[0]
        header = self.generation_prompt(history, prompt, tools, location)
        same = common_prefix(whole, marked)
        start = whole.rfind(header, 0, same) if header else -1
        if start >= 0:
            return whole[start + len(header) :]
        if header.rstrip().endswith(THINK):
            opened = header[: header.rindex(THINK)]
            start = whole.rfind(opened, 0, same)
            reasoning = _reasoning(turn)
            if start >= 0 and reasoning:
                return f"{reasoning}\n{THINK_END}\n\n" + whole[start + len(opened) :].lstrip("\n")
            raise DataError(
                f"{location}: the generation prompt opens {THINK} but the turn has no reasoning_content, so what the "
                "model sampled is unknown; add it, or turn thinking off in chat_template_kwargs."
            )
        raise DataError(
            f"{location}: with this turn, the rendered text does not begin with its prompt; "
            f"{difference(prompt, whole)} If the turn was sampled with other template settings, give them in "
            "chat_template_kwargs."
        )

    def _check_written(self, turn: Message, text: str, location: str) -> None:
        for call in turn.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise DataError(
                    f"{location}: the chat template does not write tool calls, so {shown(call['function']['name'])} "
                    "would not be trained; give one as chat_template that does, for instance 'chatml'."
                )

    def _note_unwritten_tools(self, messages: list[Message], tools: list[dict[str, Any]], location: str) -> None:
        if self.render([messages], tools, location) == self.render([messages], None, location):
            self.notes["the chat template never writes tools; the model does not see them"] = None

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
    """The Jinja text behind the option: given as it is, in a file, or by the name `chatml`."""
    if chat_template is None or "{" in chat_template:
        return chat_template
    if chat_template == "chatml":
        return CHATML
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat_template {shown(chat_template)} is neither Jinja text, nor 'chatml', nor a readable file "
            f"({error.strerror})."
        ) from None


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


def difference(a: str, b: str) -> str:
    """Where two texts first differ, shown."""
    at = common_prefix(a, b)
    return (
        f"at character {at} the prompt has {shown(a[at : at + 40])}, the whole conversation {shown(b[at : at + 40])}."
    )


def _as_json(text: str) -> str:
    """As a template's `tojson` writes it, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _with_mark(history: list[Message], turn: int, *, with_calls: bool) -> list[Message]:
    marked: Message = {**history[turn], "content": MARK}
    marked.pop("reasoning_content", None)
    if not with_calls:
        marked.pop("tool_calls", None)
    return [*history[:turn], marked, *history[turn + 1 :]]


def _reasoning(turn: Message) -> str:
    if turn.get("reasoning_content"):
        return turn["reasoning_content"].strip("\n")
    before, mark, _ = turn["content"].rpartition(THINK_END)
    return before.split(THINK)[-1].strip("\n") if mark else ""
