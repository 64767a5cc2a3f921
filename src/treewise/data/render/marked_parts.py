"""Parts of a turn that are marked as trained: by a template's `{% generation %}` blocks, as transformers'
`return_assistant_tokens_mask` and TRL's `assistant_only_loss` read them, by a message's `train_detail` (axolotl), or by
the weights of the parts of its content.
"""

from collections.abc import Sequence

from treewise.data.io.field_checks import shown
from treewise.data.render.messages import KINDS, Message, Tools, train_mark
from treewise.data.render.template import Template, common_prefix
from treewise.data.render.turns import Call, Span, behind_end, difference, has_generation_blocks, with_turn
from treewise.errors import DataError

GENERATION_NOTE = (
    "the chat template's {% generation %} blocks leave out parts of what was sampled; these are context, not trained."
)


def trained_spans(template: Template, call: Call, tools: Tools, whole: str, sampled: str) -> list[Span]:
    """The characters of a sampled turn that are trained. whole: the rendered conversation.

    Raises:
        DataError: the content that `train_detail` marks is not in the turn; a template that writes another text each
            time.
    """
    spans = [(0, len(sampled))]
    if has_generation_blocks(template):
        inside = whole.removesuffix(behind_end(template, whole))
        spans = spans_of_sampled(_generation_spans(template, call, tools, whole), sampled, inside, template.eos)
        if spans != [(0, len(sampled))]:
            template.notes[GENERATION_NOTE] = None
    if call.turn.get("train_detail") is not None:
        details = _detail_in_sampled(template, call, sampled, tools)
        spans = union([part for limits in details for part in clip(spans, limits)])
    return spans


def within(spans: Sequence[Span], length: int) -> list[Span] | None:
    """The spans in the first characters of a turn; None where they are all of these."""
    clipped = clip(spans, (0, length))
    return None if clipped == [(0, length)] else clipped


def _generation_spans(template: Template, call: Call, tools: Tools, whole: str) -> list[Span]:
    """The spans of the rendered conversation that the template's `{% generation %}` blocks wrote."""
    [again] = template.rendered([[*call.history, call.turn]], tools, call.location)
    if again.text != whole:
        raise DataError(
            f"{call.location}: the chat template renders another text each time; {difference(whole, again.text)}"
        )
    return again.spans


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
    mark = template.mark([*call.history, call.turn], tools)
    at = with_turn(template, call, {**call.turn, "content": mark}, tools)[0].find(mark)
    kept = content if sampled.startswith(content, max(at, 0)) else content.strip()  # templates may trim it
    start = at - content.index(kept)
    if at < 0 or not sampled.startswith(kept, at):
        raise DataError(
            f"{call.location}: the chat template changes the content that train_detail marks; leave train_detail out."
        )
    details = detail_spans(call.turn["train_detail"], content, call.location)
    spans = [(low + start, high + start) for low, high in details]
    return union([*clip(spans, (at, at + len(kept))), (at + len(kept), len(sampled))])


def with_marked_parts(message: Message, parts: Sequence[Message], location: str) -> Message:
    """The message with the weights of the parts of its content as `train_detail`: 1 is trained, 0 is context.

    parts: as they were given; the text of the content is theirs, one after the other.

    Raises:
        DataError: another weight, a part of another role that is trained, or `train_detail` beside weights.
    """
    detail, at = [], 0
    for index, part in enumerate(parts):
        where = f"{location}.content[{index}]"
        mark, weight = train_mark(part, where), part.get("weight")
        if isinstance(weight, bool) or weight not in (None, 0, 1):
            raise DataError(
                f"{where}: weight {shown(weight)} of a part; a part is trained (1) or context (0). To scale the loss, "
                "write the weight beside the content."
            )
        if message["role"] != "assistant" and (mark or weight):
            raise DataError(f"{where} ({message['role']}) has a weight; only assistant messages can be trained.")
        size = 0 if part.get("type") in KINDS else len(part["text"])
        if size:
            is_trained = weight != 0 and mark is not False
            detail.append({"begin_offset": at, "end_offset": at + size - 1, "train": is_trained})
        at += size
    if message["role"] != "assistant" or all(part["train"] for part in detail):
        return message
    if message.get("train_detail") is not None:
        raise DataError(f"{location} has train_detail and weights of parts; mark them once.")
    return {**message, "train_detail": detail}


def detail_spans(value: object, content: str, location: str) -> list[Span]:
    """The trained spans of a content, from `train_detail`: `[{begin_offset, end_offset, train}, ...]`.

    Offsets count characters of the content, the last one included. What no entry covers is context.

    Raises:
        DataError: entries of another shape, or outside of the content.
    """
    if not isinstance(value, list):
        raise DataError(f"{location}: train_detail must be a list of parts, found {shown(value)}.")
    spans = []
    for index, part in enumerate(value):
        begin, end, train = (
            (part.get(key) for key in ("begin_offset", "end_offset", "train"))
            if isinstance(part, dict)
            else (None, None, None)
        )
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(content):
            raise DataError(
                f"{location}: train_detail[{index}] must be {{begin_offset, end_offset, train}} with 0 <= begin_offset "
                f"<= end_offset < {len(content)} (characters of the content), found {shown(part)}."
            )
        if not isinstance(train, bool):
            raise DataError(f"{location}: train_detail[{index}].train must be true or false, found {shown(train)}.")
        if train:
            spans.append((begin, end + 1))
    return union(spans)


def union(spans: Sequence[Span]) -> list[Span]:
    """Sorted spans that neither touch nor overlap; empty ones are left out."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def clip(spans: Sequence[Span], limits: Span) -> list[Span]:
    """What of the spans lies within the limits."""
    return union([(max(start, limits[0]), min(end, limits[1])) for start, end in spans])
