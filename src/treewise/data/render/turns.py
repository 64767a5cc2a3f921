"""What the model sampled in a turn, located in the text that a chat template writes, and which of it is trained.

The completion is what the template writes after the turn's prompt when the turn is the last message, up to the
end-of-turn token. Templates that rewrite the history as soon as a turn is added (Qwen3 drops an empty `<think>` block
from a turn that is not the last) do not start with the prompt any more; then the turn is located behind its own
generation prompt. TRL asks for templates patched to be append-only instead; here any template works, and rewritten
history forks.

What the template writes in a turn and the model did not sample (the empty `<think>` block of a turn without reasoning)
is context. What it leaves out of a message is an error, or a warning: `template` finds it. A template or a message may
mark which parts of a turn are trained: `marked_parts`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treewise.base import features
from treewise.data.io.field_checks import shown
from treewise.data.io.replies import STOP_SEQUENCE, UnusableError
from treewise.data.render.messages import Message, Tools
from treewise.data.render.probes import MAX_CALLS, THINK, THINK_END
from treewise.data.render.template import Template, common_prefix
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

_CALL_NAME = {f"tool_calls[{number}].name" for number in range(MAX_CALLS)}

Span = tuple[int, int]  # a half-open range of characters


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
        call.history, call.turn, tools, lambda marked: with_turn(template, call, marked, tools)
    )
    if hidden and call.weight and not call.turn["content"] and _ending_of(call.turn) == "cut":
        raise UnusableError(call.location, "reasoning alone that was cut off, which the chat template does not write")
    if hidden and (calls := [each for each in call.turn.get("tool_calls", ()) if _CALL_NAME.intersection(hidden)]):
        raise DataError(
            f"{call.location}: the chat template does not write tool calls, so {shown(calls[0]['function']['name'])} "
            "would not be trained; give one as chat_template that does, for instance 'chatml'."
        )
    if hidden:
        template.report_hidden(hidden, f"{call.location}: this trained message")
    if call.weight and reason is not None and not features.endings.is_known(reason):
        note = f"finish_reason {shown(reason)} is not known: such turns are trained without an end of turn"
        template.notes[note] = None


def _check_ending(call: Call, reason: str | None) -> None:
    if reason is not None:
        why = features.endings.why_unusable(call.turn, reason)
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
    spans = None
    if _is_marked(template, call):
        spans = features.marked_parts.trained_spans(template, call, tools, whole, sampled)
    end = _last_sampled(template, call, sampled) if is_cut else len(sampled)
    if spans is not None:
        spans = features.marked_parts.within(spans, end)
    return RenderedCall(prompt, opening, sampled[:end], spans, sampled[end:])


def _is_marked(template: Template, call: Call) -> bool:
    """Whether the template or the message marks parts of a turn as trained."""
    return call.turn.get("train_detail") is not None or has_generation_blocks(template)


def has_generation_blocks(template: Template) -> bool:
    """Whether a template marks by `{% generation %}` blocks what is trained."""
    return _GENERATION_BLOCK.search(template.source) is not None


def _content_of(template: Template, sampled: str) -> str:
    """What was sampled before the end of a turn."""
    end = template.encoder.end_of_turn(sampled)
    return sampled if end is None else sampled[: end[0]]


def _is_cut(template: Template, call: Call, sampled: str) -> bool:
    """Whether the model did not sample the end of its turn; a stop sequence may be that end itself."""
    turn = call.turn
    if _ending_of(turn) != "cut":
        return False
    end = template.encoder.end_of_turn(sampled)
    return end is None or sampled[slice(*end)] != turn.get(STOP_SEQUENCE)


def _ending_of(turn: Message) -> str | None:
    """What may be trained of a turn for how it ended; None where it does not say."""
    reason = turn.get("finish_reason")
    return None if reason is None else features.endings.ending_of(reason)


def _last_sampled(template: Template, call: Call, sampled: str) -> int:
    """Where the text of a reply ends that was cut off: with its content, or its reasoning where it has none."""
    text = call.turn["content"] or call.turn["reasoning_content"]
    end = template.encoder.end_of_turn(sampled)
    for part in (text, text.rstrip(), text.strip()):  # templates may trim it
        start = sampled.rfind(part, 0, len(sampled) if end is None else end[0])
        if start >= 0 and part:
            return start + len(part)
    raise UnusableError(call.location, "a reply that was cut off, whose text the chat template changes")


def with_turn(template: Template, call: Call, turn: Message, tools: Tools) -> tuple[str, str]:
    """What would be sampled with another turn, and the whole conversation."""
    prompt = template.render([call.history], tools, call.location, generation=True)[0]
    whole = template.render([[*call.history, turn]], tools, call.location)[0]
    return _completion(template, replace(call, turn=turn), tools, prompt, whole)[1], whole


def _completion(template: Template, call: Call, tools: Tools, prompt: str, whole: str) -> tuple[str, str]:
    """What the template wrote for the model after the prompt, and what the model sampled, with its end token."""
    turn, location = call.turn, call.location
    text = whole[len(prompt) :] if whole.startswith(prompt) else _behind_header(template, call, tools, prompt, whole)
    text = text.removesuffix(behind_end(template, text))
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


def behind_end(template: Template, text: str) -> str:
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
    mark: Message = {"role": "assistant", "content": template.mark([*call.history, call.turn], tools)}
    marked = template.render([[*call.history, mark]], tools, location)[0]
    base = template.render([call.history], tools, location)[0]
    if not prompt.startswith(base):
        raise DataError(f"{location}: the template's generation prompt changes the history; {difference(prompt, base)}")
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
        f"{difference(prompt, whole)} If the turn was sampled with other template settings, give them in "
        "chat_template_kwargs."
    )


def behind_turn(
    template: Template, talk: Sequence[Message], index: int, tools: Tools, end: str, location: str
) -> tuple[str, str, str] | None:
    """What the template writes in front of the content of message `index`, behind it up to the end of the turn, and
    behind that through the header of the next turn; found by a mark in place of the content. None where the turn does
    not end there as it does where it is the last.

    end: the token that closes the turn; "" where the template has none.
    """
    mark = template.mark(talk, tools)
    for without in ((), ("tool_calls",)):  # templates may write either content or calls
        turn = {key: value for key, value in talk[index].items() if key not in ("reasoning_content", *without)}
        before = [*talk[:index], {**turn, "content": mark}]
        try:
            [last] = template.render([before], tools, location)
            [whole] = template.render([[*before, *talk[index + 1 :]]], tools, location, generation=True)
            bare = {key: value for key, value in before[-1].items() if key != "tool_calls"}
            [called] = [last] if end else template.render([[*before[:-1], bare]], tools, location)
        except DataError:  # a template with demands of its own
            continue
        head, found, rest = whole.partition(mark)
        last = last.removesuffix(behind_end(template, last))
        span = template.encoder.end_of_turn(last)
        if not end:  # the turn ends behind its calls, in front of what the template writes behind a text, too
            at = len(last) - len(called.removesuffix(behind_end(template, called)).rpartition(mark)[2])
            span = (at, at)
        closing = last[: span[1]].rpartition(mark)[2] if span else ""  # what a text holds may look like an end, too
        if found and span and last[slice(*span)] == end and rest.startswith(closing):
            return head, closing, rest[len(closing) :]
    return None


def difference(a: str, b: str) -> str:
    """Where two texts first differ, shown."""
    at = common_prefix(a, b)
    return f"the texts differ at character {at}: {shown(a[at : at + 40])} and {shown(b[at : at + 40])}."
