"""Chat templates: what the model saw before a turn, and what it sampled in it.

For a turn, `prompt` is the template of the messages before it with the generation prompt: exactly what inference saw.
The completion is what the template writes after that prompt when the turn is the last message, up to the end-of-turn
token. Templates that rewrite the history as soon as a turn is added (Qwen3 drops an empty `<think>` block from a turn
that is not the last) do not start with the prompt any more; then the turn is located behind its own generation prompt.
TRL asks for templates patched to be append-only instead; here any template works, and rewritten history forks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treewise.data.io.printable import shown
from treewise.data.render.chatml import CHATML
from treewise.data.render.messages import Conversation, Message, with_arguments
from treewise.data.render.piece_tokenizer import Encoder
from treewise.errors import ConfigError, DataError

MARK = "\ue0a7\ue0b7turn\ue0b7\ue0a7"  # private-use characters: no text and no template holds them
THINK = "<think>"
THINK_END = "</think>"
NO_TEMPLATE = "the tokenizer has no chat template; give one as chat_template, for instance 'chatml'."


class Template:
    """One chat template bound to a tokenizer. `notes` collects what users should be aware of."""

    def __init__(self, encoder: Encoder, chat_template: str | None, kwargs: dict[str, Any]) -> None:
        self.tokenizer = encoder.tokenizer
        self.encoder = encoder
        self.text = template_text(chat_template)
        self.kwargs = kwargs
        self.notes: dict[str, None] = {}
        self._arguments_as_text = self._writes_text_arguments()
        self._tools_seen = False

    def prepare(self, talk: Conversation, location: str) -> Conversation:
        """Messages with tool-call arguments in the form that this template writes correctly."""
        as_text = self._arguments_as_text
        return Conversation(
            [with_arguments(m, as_text, f"{location}: messages[{i}]") for i, m in enumerate(talk.messages)],
            talk.weights,
        )

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
                list(conversations),
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

    def completion(
        self, history: list[Message], turn: Message, prompt: str, whole: str, tools: list[dict] | None, location: str
    ) -> str:
        """What the model sampled in `turn`, through the end-of-turn token.

        Parameters:
            prompt: template of `history` with the generation prompt.
            whole: template of `history` and `turn`.
        """
        if whole.startswith(prompt):
            text = whole[len(prompt) :]
        else:
            text = self._sampled_text(history, turn, prompt, whole, tools, location)
        self._check_written(turn, text, location)
        end = self.encoder.end_of_turn(text)
        if end is not None:
            return text[: end[1]]
        if not self.tokenizer.eos_token:
            raise DataError(f"{location}: the template writes no end-of-turn token and the tokenizer has no eos_token.")
        self.notes["the chat template writes no end-of-turn token; eos_token was added to every trained turn"] = None
        return text.rstrip() + self.tokenizer.eos_token

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
            f"{location}: the template does not write this turn after its own prompt; {difference(prompt, whole)} "
            "If the turn was sampled with other template settings, give them in chat_template_kwargs."
        )

    def _check_written(self, turn: Message, text: str, location: str) -> None:
        for call in turn.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise DataError(
                    f"{location}: the chat template does not write tool calls, so {shown(call['function']['name'])} "
                    "would not be trained; give one as chat_template that does, for instance 'chatml'."
                )
        reasoning = turn.get("reasoning_content", "").strip()
        if reasoning and reasoning[:80] not in text:
            self.notes["the chat template never writes reasoning_content; reasoning is not trained"] = None

    def _note_unwritten_tools(self, messages: list[Message], tools: list[dict[str, Any]], location: str) -> None:
        if self.render([messages], tools, location) == self.render([messages], None, location):
            self.notes["the chat template never writes tools; the model does not see them"] = None

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
