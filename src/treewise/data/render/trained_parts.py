"""Which characters of a sampled turn are trained, where a template or a message leaves some of them out.

A template marks them by `{% generation %}` blocks, as transformers' `return_assistant_tokens_mask` and TRL's
`assistant_only_loss` read them; a message by axolotl's `train_detail`. Spans are half-open ranges of characters.
"""

import re
from collections.abc import Sequence
from typing import Any

from treewise.data.io.printable import shown
from treewise.errors import DataError

Span = tuple[int, int]
GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def generation_spans(
    tokenizer: Any,
    chat_template: str,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
) -> tuple[str, list[Span]]:
    """The rendered conversation, and the spans of it that the template's `{% generation %}` blocks wrote."""
    from transformers.utils.chat_template_utils import render_jinja_template  # loaded with the tokenizer

    rendered, spans = render_jinja_template(
        conversations=[list(messages)],
        tools=tools,
        chat_template=chat_template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **kwargs},
    )
    return rendered[0], [(int(start), int(end)) for start, end in spans[0]]


def spans_of_sampled(spans: Sequence[Span], sampled: str, whole: str, eos: str | None) -> list[Span]:
    """Spans of a whole conversation as spans of the turn that was sampled at its end.

    What the whole does not hold (reasoning that the template moved into the prompt, an end token that was added) was
    sampled all the same, and is trained.
    """
    body, tail = sampled, whole.rstrip()
    if not _common_suffix(body, tail) and eos:
        body = sampled.removesuffix(eos)
    same = _common_suffix(body, tail)
    offset = len(tail) - len(body)
    inside = [(start - offset, end - offset) for start, end in spans]
    return union([(0, len(body) - same), *clip(inside, (len(body) - same, len(body))), (len(body), len(sampled))])


def detail_spans(value: Any, content: str, location: str) -> list[Span]:
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


def intersection(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What lies in a span of both."""
    return union([part for limits in second for part in clip(first, limits)])


def _common_suffix(a: str, b: str) -> int:
    """Length of the longest common end."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle :] == b[len(b) - middle :]:
            low = middle
        else:
            high = middle - 1
    return low
