"""What the model sampled in a turn, located in the text that a chat template writes.

The completion is what the template writes after the turn's prompt when the turn is the last message, up to the
end-of-turn token. Templates that rewrite the history as soon as a turn is added (Qwen3 drops an empty `<think>` block
from a turn that is not the last) do not start with the prompt any more; then the turn is located behind its own
generation prompt. TRL asks for templates patched to be append-only instead; here any template works, and rewritten
history forks.

What the template writes in a turn and the model did not sample (the empty `<think>` block of a turn without reasoning)
is context. What it leaves out of a message is an error, or a warning: `field_probe` finds it.
"""

import re
from collections.abc import Sequence
from typing import Any

from treewise.data.io.printable import shown
from treewise.data.render.field_probe import THINK, THINK_END
from treewise.data.render.messages import Message
from treewise.data.render.template import MARK, Template
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
from treewise.errors import DataError

# Thinking that holds nothing, at the start of a turn; in the tags of Qwen, DeepSeek, Seed and Mistral.
_EMPTY_THINKING = re.compile(r"\s*(?:<(think|thinking|seed:think)>\s*</\1>|\[THINK\]\s*\[/THINK\])\n*")
_OPENED_THINKING = re.compile(r"(?:<(?:think|thinking|seed:think)>|\[THINK\])\s*\Z")
_CLOSED_THINKING = re.compile(r"\s*(?:</(?:think|thinking|seed:think)>|\[/THINK\])\n*")
_EMPTY_THINKING_NOTE = (
    "the chat template opens trained turns without reasoning with an empty thinking block; the block is context, not "
    "trained. Give chat_template_kwargs: {enable_thinking: false} if the model was sampled without thinking, or "
    "reasoning_content if it did think."
)
_GENERATION_NOTE = (
    "the chat template's {% generation %} blocks leave out parts of what was sampled; these are context, not trained."
)


def check_turn(
    template: Template, history: list[Message], turn: Message, tools: list[dict[str, Any]] | None, location: str
) -> None:
    """Checks that all that a trained turn holds is trained.

    Raises:
        DataError: a field in use that the template does not write (`on_hidden="error"`).
    """

    def sample(marked: Message) -> tuple[str, str]:
        prompt = template.render([history], tools, location, generation=True)[0]
        whole = template.render([[*history, marked]], tools, location)[0]
        return completion(template, history, marked, prompt, whole, tools, location)[1], whole

    hidden = template.probe.hidden_in_turn(history, turn, bool(tools), sample)
    if hidden:
        template.report_hidden(hidden, f"{location}: this trained message")


def completion(
    template: Template,
    history: list[Message],
    turn: Message,
    prompt: str,
    whole: str,
    tools: list[dict] | None,
    location: str,
) -> tuple[str, str]:
    """What the template wrote for the model after the prompt, and what the model sampled, with its end token.

    Parameters:
        prompt: template of `history` with the generation prompt.
        whole: template of `history` and `turn`.
    """
    if whole.startswith(prompt):
        text = whole[len(prompt) :]
    else:
        text = _sampled_text(template, history, turn, prompt, whole, tools, location)
    _check_written(turn, text, location)
    opening = ""
    empty = _EMPTY_THINKING.match(text)
    if empty is None and _OPENED_THINKING.search(prompt) and THINK_END not in turn["content"]:
        empty = _CLOSED_THINKING.match(text)  # a prompt that ends in <think>, which the template closes at once
    if empty is not None and not _EMPTY_THINKING.match(turn["content"]):
        opening, text = empty.group(), text[empty.end() :]
        template.notes[_EMPTY_THINKING_NOTE] = None
    end = template.encoder.end_of_turn(text)
    if end is not None:
        return opening, text[: end[1]]
    if not template.tokenizer.eos_token:
        raise DataError(f"{location}: the template writes no end-of-turn token and the tokenizer has no eos_token.")
    template.notes["the chat template writes no end-of-turn token; eos_token was added to every trained turn"] = None
    return opening, text.rstrip() + template.tokenizer.eos_token


def trained_spans(
    template: Template,
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
    if _has_generation_blocks(template):
        text = template.tokenizer.get_chat_template(template.text, tools)
        talk = template.shaped([*history, turn])
        again, blocks = generation_spans(template.tokenizer, text, talk, tools, template.kwargs)
        if again != whole:
            raise DataError(
                f"{location}: the chat template renders another text each time; {_difference(whole, again)}"
            )
        spans = spans_of_sampled(blocks, sampled, whole, template.tokenizer.eos_token)
        if spans != [(0, len(sampled))]:
            template.notes[_GENERATION_NOTE] = None
    if turn.get("train_detail") is not None:
        spans = intersection(spans, _detail_in_sampled(template, history, turn, sampled, tools, location))
    return None if spans == [(0, len(sampled))] else spans


def tails(
    template: Template,
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
    others = template.render(marked, tools, location, generation=True) if marked else []
    tails = []
    for history, turn, prompt, completion, other in zip(histories, turns, prompts, completions, others, strict=True):
        if MARK not in other:  # a template that writes either content or tool calls
            other = template.render([_with_mark(history, turn, with_calls=False)], tools, location, generation=True)[0]
        closing = template.encoder.end_of_turn(completion)
        assert closing is not None
        _, closed, tail = other.rpartition(MARK)[2].partition(completion[slice(*closing)])
        if not closed or not prompt.endswith(tail):
            raise DataError(
                f"{location}: the chat template has no append-only form after turn {turn}, so thinking='keep' is "
                "not possible; use thinking='as_inference'."
            )
        tails.append(tail)
    return tails


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


def _detail_in_sampled(
    template: Template,
    history: list[Message],
    turn: Message,
    sampled: str,
    tools: list[dict[str, Any]] | None,
    location: str,
) -> list[Span]:
    """`train_detail` in characters of the sampled turn; what stands behind the content (its end) is trained."""
    content = turn["content"]
    marked = {**turn, "content": MARK}
    prompt = template.render([history], tools, location, generation=True)[0]
    whole = template.render([[*history, marked]], tools, location)[0]
    at = completion(template, history, marked, prompt, whole, tools, location)[1].find(MARK)
    kept = content if sampled.startswith(content, max(at, 0)) else content.strip()  # templates may trim it
    start = at - content.index(kept)
    if at < 0 or not sampled.startswith(kept, at):
        raise DataError(
            f"{location}: the chat template changes the content that train_detail marks; leave train_detail out."
        )
    spans = [(low + start, high + start) for low, high in detail_spans(turn["train_detail"], content, location)]
    return union([*clip(spans, (at, at + len(kept))), (at + len(kept), len(sampled))])


def _has_generation_blocks(template: Template) -> bool:
    text = template.text or getattr(template.tokenizer, "chat_template", None)
    return GENERATION_BLOCK.search(str(text)) is not None


def _generation_prompt(
    template: Template, history: list[Message], prompt: str, tools: list[dict] | None, location: str
) -> str:
    """The header that opens the model's turn, the last part of `prompt`."""
    base = template.render([history], tools, location)[0]
    if not prompt.startswith(base):
        raise DataError(
            f"{location}: the template's generation prompt changes the history; {_difference(prompt, base)}"
        )
    return prompt[len(base) :]


def _sampled_text(
    template: Template,
    history: list[Message],
    turn: Message,
    prompt: str,
    whole: str,
    tools: list[dict] | None,
    location: str,
) -> str:
    mark: Message = {"role": "assistant", "content": MARK}
    marked = template.render([[*history, mark]], tools, location)[0]
    header = _generation_prompt(template, history, prompt, tools, location)
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
        f"{_difference(prompt, whole)} If the turn was sampled with other template settings, give them in "
        "chat_template_kwargs."
    )


def _check_written(turn: Message, text: str, location: str) -> None:
    for call in turn.get("tool_calls", ()):
        if call["function"]["name"] not in text:
            raise DataError(
                f"{location}: the chat template does not write tool calls, so {shown(call['function']['name'])} "
                "would not be trained; give one as chat_template that does, for instance 'chatml'."
            )


def _difference(a: str, b: str) -> str:
    """Where two texts first differ, shown."""
    at = common_prefix(a, b)
    return f"the texts differ at character {at}: {shown(a[at : at + 40])} and {shown(b[at : at + 40])}."


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
