"""Conversations to rows, one row per call that is trained.

Every trained assistant turn becomes (what inference saw, what was sampled). The rows of a record stay separate even
where each is a prefix of the next: merging is the forest's work, by token.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treewise.data.io.replies import UnusableError
from treewise.data.io.rows import Row
from treewise.data.render import turns
from treewise.data.render.messages import Message, Tools, WeightedMessages
from treewise.data.render.piece_tokenizer import Pieces, joined
from treewise.data.render.template import Template
from treewise.data.render.turns import Call
from treewise.errors import DataError
from treewise.tree.images import ImageSpan

NOTHING_MARKED = (
    "no token is trained: neither the chat template's {% generation %} blocks nor train_detail mark one; mark some, "
    "or give another chat_template."
)
QUARANTINE = " (--on_bad_record quarantine leaves out all like it)"
UNMARKED = "a reply of which the chat template marks no token as trained"
CALLS_AT_ONCE = 32  # bounds the rendered text that is alive
LeftOut = list[tuple[str, str]]  # locations and reasons


def conversation_calls(
    talk: WeightedMessages, train_on: str, location: str, first: int = 0, *, keeps: bool = False
) -> list[Call]:
    """A call for every trained assistant turn from message `first` on.

    keeps: also for the other sampled turns, with weight 0: rendered as they were sampled, their reasoning stays in
    front of the turns that are trained.

    Raises:
        DataError: no trained turn, or a trained turn with nothing before it.
    """
    sampled = [i for i, m in enumerate(talk.messages) if m["role"] == "assistant" and i >= first]
    if train_on == "last_assistant":
        sampled = sampled[-1:]
    trained = [i for i in sampled if talk.weights[i] > 0]
    if not trained:
        roles = [message["role"] for message in talk.messages]
        counts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        reason = "has no assistant message" if not sampled else "trains no assistant message (each has weight 0)"
        raise DataError(
            f"{location}: the record {reason} among {counts or 'no messages'}, so no token is trained; "
            f"add an assistant message, give one a weight above 0, or drop the record{QUARANTINE}."
        )
    if trained[0] == 0:
        raise DataError(
            f"{location}: message 0 is a trained assistant message with nothing before it; "
            f"put a system or user message first, set its weight to 0, or drop the record{QUARANTINE}."
        )
    if keeps:
        shown = [i for i, m in enumerate(talk.messages) if i and m["role"] == "assistant" and talk.weights[i] > 0]
    return [
        Call(
            talk.messages[:i],
            talk.messages[i],
            talk.weights[i] if i in trained else 0.0,
            f"{location}: turn {i} (assistant)",
        )
        for i in (shown if keeps else trained)
    ]


def render_calls(
    template: Template, calls: Sequence[Call], tools: Tools, location: str, left_out: LeftOut
) -> list[Row]:
    """One row per call: prompt as context, completion as trained tokens, tokenised apart as in inference.

    left_out: gets the calls that cannot be trained for how they ended.

    Raises:
        DataError: nothing is trained.
    """
    rows: list[Row] = []
    before: Pieces = ()
    seen: set[int] = set()
    calls = checked_calls(template, calls, tools, left_out)
    for low in range(0, len(calls), CALLS_AT_ONCE):
        block = calls[low : low + CALLS_AT_ONCE]
        block, texts = rendered_calls(template, block, tools, location, seen, left_out)
        shown = [text.prompt + text.opening for text in texts]
        if template.placer is not None:
            shown = [template.placer.written(text) for text in shown]
        contexts = template.encoder.encode(shown)
        for call, context, (ids, mask) in zip(block, contexts, sampled_ids(template, texts), strict=True):
            if mask is not None and not mask.any():
                left_out.append((call.location, UNMARKED))
                continue
            images: tuple[ImageSpan, ...] = ()
            if template.placer is not None:
                context, images = template.placer.place(context, call.history, call.location)
            pieces = (*context, ids)
            rows.append(replace(row_of(pieces, before, [(len(context), call.weight, mask)]), images=images))
            before = pieces
    if not rows:
        others = [each for each in left_out if each[1] != UNMARKED]
        raise UnusableError(*others[0]) if others else DataError(f"{location}: {NOTHING_MARKED}")
    return rows


def checked_calls(template: Template, calls: Sequence[Call], tools: Tools, left_out: LeftOut) -> list[Call]:
    """The calls that can be trained, with messages that the template writes in full."""
    checked: dict[int, Message] = {}
    result = []
    for call in calls:
        call = replace(call, history=template.check_history(call.history, tools, call.location, checked))
        try:
            turns.check_turn(template, call, tools)
        except UnusableError as error:
            left_out.append((error.location, error.reason))
        else:
            result.append(call)
    return result


def rendered_calls(
    template: Template, calls: Sequence[Call], tools: Tools, location: str, seen: set[int], left_out: LeftOut
) -> tuple[list[Call], list[turns.RenderedCall]]:
    """The calls that can be trained, and each as text. `seen` are ids of messages that some prompt is known to hold."""
    prompts = template.render([call.history for call in calls], tools, location, generation=True)
    wholes = template.render([[*call.history, call.turn] for call in calls], tools, location)
    kept, texts = [], []
    for call, prompt, whole in zip(calls, prompts, wholes, strict=True):
        template.check_prompt(call.history, prompt, tools, call.location, seen)
        try:
            texts.append(turns.rendered(template, call, tools, prompt, whole))
        except UnusableError as error:
            left_out.append((error.location, error.reason))
        else:
            kept.append(call)
    return kept, texts


def sampled_ids(template: Template, texts: Sequence[turns.RenderedCall]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Token ids of what each call sampled, and which of them are trained ([len(ids)] bool; None: all)."""
    encoder = template.encoder
    prompts = [text.prompt + text.opening for text in texts]
    ids = encoder.encode_behind([(before, text.sampled) for before, text in zip(prompts, texts, strict=True)])
    return [
        (own, None if text.spans is None else encoder.trained_tokens(before, text.sampled, text.spans))
        for text, before, own in zip(texts, prompts, ids, strict=True)
    ]


def row_of(pieces: Pieces, before: Pieces, trained: Sequence[tuple[int, float, np.ndarray | None]]) -> Row:
    """A row of the pieces that differ from those of the row before; `trained` are pieces, weights and masks."""
    bounds = np.cumsum([0, *map(len, pieces)])
    same = 0
    while same < min(len(pieces), len(before)) and pieces[same] is before[same]:
        same += 1
    spans: list[int] = []
    weights: list[float] = []
    for piece, weight, mask in trained:
        is_trained = np.ones(len(pieces[piece]), dtype=bool) if mask is None else mask.copy()
        is_trained[: max(0, 1 - int(bounds[piece]))] = False  # nothing predicts a first token
        edges = np.flatnonzero(np.diff(is_trained, prepend=False, append=False)) if weight else np.zeros(0, dtype=int)
        spans += (int(bounds[piece]) + edges).tolist()  # [start, end) of every run of trained tokens
        weights += [weight] * (len(edges) // 2)
    return Row(joined(pieces[same:]), shared=int(bounds[same]), spans=spans, span_weights=weights)
