"""Conversations whose reasoning is kept (`thinking="keep"`): one sequence for all calls of a record."""

from collections.abc import Sequence

from treewise.data.io.replies import UnusableError
from treewise.data.io.rows import Row
from treewise.data.render.chat import NOTHING_MARKED, LeftOut, checked_calls, rendered_calls, row_of, sampled_ids
from treewise.data.render.messages import IMAGES, Tools
from treewise.data.render.template import Template
from treewise.data.render.turns import Call, RenderedCall, behind_turn
from treewise.errors import DataError


def render_kept(template: Template, calls: Sequence[Call], tools: Tools, location: str, left_out: LeftOut) -> list[Row]:
    """One row for all calls of a conversation: the reasoning of every turn stays, so the calls are append-only.

    The sequence is the first prompt, then what each turn sampled and what the template writes from there to the next.
    """
    if any(message.get(IMAGES) for call in calls for message in call.history):
        raise DataError(f"{location}: thinking='keep' is not supported for images; use thinking='as_inference'.")
    calls = checked_calls(template, calls, tools, left_out)
    calls, texts = rendered_calls(template, calls, tools, location, set(), left_out)
    if not any(call.weight for call in calls):
        raise UnusableError(*left_out[0])
    tails = _tails(template, calls, texts, tools, location)
    encoder = template.encoder
    pieces = list(encoder.encode([texts[0].prompt + texts[0].opening])[0])
    sampled = sampled_ids(template, texts)
    between = encoder.encode_behind(
        [(text.sampled, tail + later.opening) for text, tail, later in zip(texts, tails, texts[1:], strict=False)]
    )
    trained = []
    for number, (call, (ids, mask)) in enumerate(zip(calls, sampled, strict=True)):
        if number:
            pieces.append(between[number - 1])
        trained.append((len(pieces), call.weight, mask))
        pieces.append(ids)
    row = row_of(tuple(pieces), (), trained)
    if not row.spans:
        raise DataError(f"{location}: {NOTHING_MARKED}")
    return [row]


def _tails(
    template: Template, calls: Sequence[Call], texts: Sequence[RenderedCall], tools: Tools, location: str
) -> list[str]:
    """What the template writes in each prompt but the first after what was sampled in the turn before it.

    Raises:
        DataError: the template has no append-only form, so `thinking="keep"` cannot be honoured.
    """
    found = []
    for call, later, text, later_text in zip(calls, calls[1:], texts, texts[1:], strict=False):
        turn, whole = len(call.history), text.sampled + text.closing
        closing = template.encoder.end_of_turn(whole)
        assert closing is not None
        around = behind_turn(template, later.history, turn, tools, whole[slice(*closing)], location)
        if around is None or not later_text.prompt.endswith(around[2]):
            raise DataError(
                f"{location}: the chat template has no append-only form after turn {turn}, so thinking='keep' is "
                "not possible; use thinking='as_inference'."
            )
        found.append(text.closing + around[2])
    return found
