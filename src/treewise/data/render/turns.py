"""What the model sampled in a turn, located in the text that a chat template writes, and which of it is trained.

The completion is what the template writes after the turn's prompt when the turn is the last message, up to the
end-of-turn token. Templates that rewrite the history as soon as a turn is added (Qwen3 drops an empty `<think>` block
from a turn that is not the last) do not start with the prompt any more; then the turn is located behind its own
generation prompt. TRL asks for templates patched to be append-only instead; here any template works, and rewritten
history forks.

What the template writes in a turn and the model did not sample (the empty `<think>` block of a turn without reasoning)
is context. What it leaves out of a message is an error, or a warning: `template` finds it. A template may
mark what is trained by `{% generation %}` blocks, as transformers' `return_assistant_tokens_mask` and TRL's
`assistant_only_loss` read them; a message by axolotl's `train_detail`. Spans are half-open ranges of characters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treewise.data.io.endings import STOP_SEQUENCE, UnusableError, ending_of, is_known, why_unusable
from treewise.data.io.field_checks import shown
from treewise.data.render.messages import Message, Span, Tools, clip, detail_spans, union
from treewise.data.render.template import MARK, THINK, THINK_END, Template, common_prefix
from treewise.errors import DataError

# Thinking that holds nothing, at the start of a turn; in the tags of Qwen, DeepSeek, Seed and Mistral.
_EMPTY_THINKING = re.compile(r"\s*(?:<(think|thinking|seed:think)>\s*</\1>|\[THINK\]\s*\[/THINK\])\n*")
_OPENED_THINKING = re.compile(r"(?:<(?:think|thinking|seed:think)>|\[THINK\])\s*\Z")
_CLOSED_THINKING = re.compile(r"\s*(?:</(?:think|thinking|seed:think)>|\[/THINK\])\n*")
_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_EMPTY_THINKING_NOTE = (
    "the chat template opens trained turns without reasoning with an empty thinking block; the block is context, not "
    "trained. Give chat_template_kwargs: {enable_thinking: false} if the model was sampled without thinking, or "
    "reasoning_content if it did think."
)
_GENERATION_NOTE = (
    "the chat template's {% generation %} blocks leave out parts of what was sampled; these are context, not trained."
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model: what it saw, what it sampled, and the weight of that."""

    history: list[Message]
    turn: Message
    weight: float
    location: str


@dataclass(frozen=True, slots=True)
class RenderedCall:
    """A call as text.

    `prompt` is what the model saw, `opening` what the template wrote for it after that, `sampled` what it sampled, with
    its end token, or without it where the reply was cut off; then `closing` is what the template writes after that in a
    history. spans: the characters of `sampled` which are trained; None: all.
    """

    prompt: str
    opening: str
    sampled: str
    spans: list[Span] | None
    closing: str = ""


def check_turn(template: Template, call: Call, tools: Tools) -> None:
    """Checks that a trained turn can be trained for how it ended, and that all that it holds is trained.

    Raises:
        UnusableError: a reply that cannot be trained for how it ended, or with neither content nor tool calls, of which
            a template would make an empty turn.
        DataError: a field in use that the template does not write (`on_hidden="error"`).
    """
    reason = call.turn.get("finish_reason")
    if call.weight:
        _check_ending(call, reason)
    hidden = template.hidden_in_turn(
        call.history, call.turn, bool(tools), lambda marked: _with_turn(template, call, marked, tools)
    )
    if hidden and call.weight and not call.turn["content"] and ending_of(reason) == "cut":
        raise UnusableError(call.location, "reasoning alone that was cut off, which the chat template does not write")
    if hidden:
        template.report_hidden(hidden, f"{call.location}: this trained message")
    if call.weight and reason is not None and not is_known(reason):
        note = f"finish_reason {shown(reason)} is not known: such turns are trained without an end of turn"
        template.notes[note] = None


def _check_ending(call: Call, reason: str | None) -> None:
    if reason is not None:
        why = why_unusable(call.turn, reason)
        if why is not None:
            raise UnusableError(call.location, why)
    elif not any(call.turn.get(field) for field in ("content", "tool_calls", "refusal")):
        holds = "only reasoning" if call.turn.get("reasoning_content") else "nothing"
        raise UnusableError(call.location, f"a reply that holds {holds}")


def rendered(template: Template, call: Call, tools: Tools, prompt: str, whole: str) -> RenderedCall:
    """A call as text. prompt: template of the history with the generation prompt; whole: of the history and the turn.

    Raises:
        DataError: the turn cannot be located in the text, or the content that `train_detail` marks in the turn.
    """
    opening, sampled = _completion(template, call, tools, prompt, whole)
    if call.weight and not call.turn["content"].strip() and not _content_of(template, sampled):
        raise UnusableError(call.location, "a reply of white space alone, which the chat template does not write")
    is_cut = _is_cut(template, call, sampled)
    if is_cut and opening and call.turn["content"].lstrip().startswith(THINK):  # a thought whose end is missing
        thought = call.turn["content"].lstrip().removeprefix(THINK).lstrip("\n")
        call = replace(call, turn={**call.turn, "content": "", "reasoning_content": thought})
        whole = template.render([[*call.history, call.turn]], tools, call.location)[0]
        opening, sampled = _completion(template, call, tools, prompt, whole)
    spans = [(0, len(sampled))]
    if _GENERATION_BLOCK.search(str(template.text or getattr(template.tokenizer, "chat_template", None))):
        inside = whole.removesuffix(_behind_end(template, whole))
        spans = spans_of_sampled(_generation_spans(template, call, tools, whole), sampled, inside, template.eos)
        if spans != [(0, len(sampled))]:
            template.notes[_GENERATION_NOTE] = None
    if call.turn.get("train_detail") is not None:
        details = _detail_in_sampled(template, call, sampled, tools)
        spans = union([part for limits in details for part in clip(spans, limits)])
    closing = ""
    if is_cut:
        end = _last_sampled(template, call, sampled)
        sampled, closing, spans = sampled[:end], sampled[end:], clip(spans, (0, end))
    return RenderedCall(prompt, opening, sampled, None if spans == [(0, len(sampled))] else spans, closing)


def _content_of(template: Template, sampled: str) -> str:
    """What was sampled before the end of a turn."""
    end = template.encoder.end_of_turn(sampled)
    return sampled if end is None else sampled[: end[0]]


def _is_cut(template: Template, call: Call, sampled: str) -> bool:
    """Whether the model did not sample the end of its turn; a stop sequence may be that end itself."""
    turn = call.turn
    if ending_of(turn.get("finish_reason")) != "cut":
        return False
    end = template.encoder.end_of_turn(sampled)
    return end is None or sampled[slice(*end)] != turn.get(STOP_SEQUENCE)


def _last_sampled(template: Template, call: Call, sampled: str) -> int:
    """Where the text of a reply ends that was cut off: with its content, or its reasoning where it has none."""
    text = call.turn["content"] or call.turn["reasoning_content"]
    end = template.encoder.end_of_turn(sampled)
    for part in (text, text.rstrip(), text.strip()):  # templates may trim it
        start = sampled.rfind(part, 0, len(sampled) if end is None else end[0])
        if start >= 0 and part:
            return start + len(part)
    raise UnusableError(call.location, "a reply that was cut off, whose text the chat template changes")


def tails(
    template: Template, calls: Sequence[Call], texts: Sequence[RenderedCall], tools: Tools, location: str
) -> list[str]:
    """What the template writes in each prompt but the first after what was sampled in the turn before it.

    Raises:
        DataError: the template has no append-only form, so `thinking="keep"` cannot be honoured.
    """
    steps = list(zip(calls, calls[1:], texts, texts[1:], strict=False))
    marked = [_with_mark(later.history, len(call.history)) for call, later, _, _ in steps]
    others = template.render(marked, tools, location, generation=True) if marked else []
    found = []
    for (call, later, text, later_text), other in zip(steps, others, strict=True):
        turn = len(call.history)
        if MARK not in other:  # a template that writes either content or tool calls
            alone = _with_mark(later.history, turn, with_calls=False)
            other = template.render([alone], tools, location, generation=True)[0]
        whole = text.sampled + text.closing
        closing = template.encoder.end_of_turn(whole)
        assert closing is not None
        _, closed, tail = other.rpartition(MARK)[2].partition(whole[slice(*closing)])
        if not closed or not later_text.prompt.endswith(tail):
            raise DataError(
                f"{location}: the chat template has no append-only form after turn {turn}, so thinking='keep' is "
                "not possible; use thinking='as_inference'."
            )
        found.append(text.closing + tail)
    return found


def _with_turn(template: Template, call: Call, turn: Message, tools: Tools) -> tuple[str, str]:
    """What would be sampled with another turn, and the whole conversation."""
    prompt = template.render([call.history], tools, call.location, generation=True)[0]
    whole = template.render([[*call.history, turn]], tools, call.location)[0]
    return _completion(template, replace(call, turn=turn), tools, prompt, whole)[1], whole


def _completion(template: Template, call: Call, tools: Tools, prompt: str, whole: str) -> tuple[str, str]:
    """What the template wrote for the model after the prompt, and what the model sampled, with its end token."""
    turn, location = call.turn, call.location
    text = whole[len(prompt) :] if whole.startswith(prompt) else _behind_header(template, call, tools, prompt, whole)
    text = text.removesuffix(_behind_end(template, text))
    for each in turn.get("tool_calls", ()):
        if each["function"]["name"] not in text:
            raise DataError(
                f"{location}: the chat template does not write tool calls, so {shown(each['function']['name'])} "
                "would not be trained; give one as chat_template that does, for instance 'chatml'."
            )
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
    if not template.eos:
        raise DataError(f"{location}: the template writes no end-of-turn token and the tokenizer has no eos_token.")
    template.notes["the chat template writes no end-of-turn token; eos_token was added to every trained turn"] = None
    return opening, text.rstrip() + template.eos


def _behind_end(template: Template, text: str) -> str:
    """What the template writes behind the end of a turn only where it is the last; it was not sampled."""
    behind, text_alone = template.behind_end, text.rstrip()
    if not behind or not text_alone.endswith(behind):
        return ""
    template.notes[
        f"the chat template writes {shown(behind.strip())} behind the end of a turn that is the last; it is not "
        "trained, because no prompt holds it"
    ] = None
    return text[len(text_alone) - len(behind) :]


def _behind_header(template: Template, call: Call, tools: Tools, prompt: str, whole: str) -> str:
    """The turn where the whole does not begin with the prompt: behind the last header that opens the model's turn."""
    location = call.location
    mark: Message = {"role": "assistant", "content": MARK}
    marked = template.render([[*call.history, mark]], tools, location)[0]
    base = template.render([call.history], tools, location)[0]
    if not prompt.startswith(base):
        raise DataError(
            f"{location}: the template's generation prompt changes the history; {_difference(prompt, base)}"
        )
    header = prompt[len(base) :]
    same = common_prefix(whole, marked)
    start = whole.rfind(header, 0, same) if header else -1
    if start >= 0:
        return whole[start + len(header) :]
    if header.rstrip().endswith(THINK):
        opened, content = header[: header.rindex(THINK)], call.turn["content"]
        start = whole.rfind(opened, 0, same)
        thought = content.rpartition(THINK_END)[0].split(THINK)[-1]
        reasoning = (call.turn.get("reasoning_content") or thought).strip("\n")
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


def _with_mark(history: list[Message], turn: int, *, with_calls: bool = True) -> list[Message]:
    marked: Message = {**history[turn], "content": MARK}
    marked.pop("reasoning_content", None)
    if not with_calls:
        marked.pop("tool_calls", None)
    return [*history[:turn], marked, *history[turn + 1 :]]


def _generation_spans(template: Template, call: Call, tools: Tools, whole: str) -> list[Span]:
    """The spans of the rendered conversation that the template's `{% generation %}` blocks wrote."""
    from transformers.utils.chat_template_utils import render_jinja_template  # loaded with the tokenizer

    with template.limited(tools, call.location):
        again, spans = render_jinja_template(
            conversations=[template.shaped([*call.history, call.turn])],
            tools=tools,
            chat_template=template.tokenizer.get_chat_template(template.text, tools),
            return_assistant_tokens_mask=True,
            **{**template.tokenizer.special_tokens_map, **template.kwargs},
        )
    if again[0] != whole:
        raise DataError(
            f"{call.location}: the chat template renders another text each time; {_difference(whole, again[0])}"
        )
    return [(int(start), int(end)) for start, end in spans[0]]


def spans_of_sampled(spans: Sequence[Span], sampled: str, whole: str, eos: str | None) -> list[Span]:
    """Spans of a whole conversation as spans of the turn that was sampled at its end.

    What the whole does not hold (reasoning that the template moved into the prompt, an end token that was added) was
    sampled all the same, and is trained.
    """
    body, tail = sampled, whole.rstrip()
    if not common_prefix(body[::-1], tail[::-1]) and eos:
        body = sampled.removesuffix(eos)
    same = common_prefix(body[::-1], tail[::-1])
    offset = len(tail) - len(body)
    inside = [(start - offset, end - offset) for start, end in spans]
    return union([(0, len(body) - same), *clip(inside, (len(body) - same, len(body))), (len(body), len(sampled))])


def _detail_in_sampled(template: Template, call: Call, sampled: str, tools: Tools) -> list[Span]:
    """`train_detail` in characters of the sampled turn; what stands behind the content (its end) is trained."""
    content = call.turn["content"]
    at = _with_turn(template, call, {**call.turn, "content": MARK}, tools)[0].find(MARK)
    kept = content if sampled.startswith(content, max(at, 0)) else content.strip()  # templates may trim it
    start = at - content.index(kept)
    if at < 0 or not sampled.startswith(kept, at):
        raise DataError(
            f"{call.location}: the chat template changes the content that train_detail marks; leave train_detail out."
        )
    details = detail_spans(call.turn["train_detail"], content, call.location)
    spans = [(low + start, high + start) for low, high in details]
    return union([*clip(spans, (at, at + len(kept))), (at + len(kept), len(sampled))])


def _difference(a: str, b: str) -> str:
    """Where two texts first differ, shown."""
    at = common_prefix(a, b)
    return f"the texts differ at character {at}: {shown(a[at : at + 40])} and {shown(b[at : at + 40])}."
