"""Chat records, logged calls and prompt/completion pairs to rows, one row per call that is trained.

Every trained assistant turn becomes (what inference saw, what was sampled). The rows of a record stay separate even
where each is a prefix of the next: merging is the forest's work, by token.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treewise.data.io.endings import KEYS, UnusableError, with_reason
from treewise.data.io.field_checks import flat_list
from treewise.data.io.rows import Row
from treewise.data.render import turns
from treewise.data.render.messages import IMAGES, Message, Tools, WeightedMessages
from treewise.data.render.piece_tokenizer import Pieces, joined
from treewise.data.render.template import Template
from treewise.data.render.turns import Call
from treewise.errors import DataError
from treewise.tree.images import ImageSpan

NOTHING_MARKED = (
    "no token is trained: neither the chat template's {% generation %} blocks nor train_detail mark one; mark some, "
    "or give another chat_template."
)
DOUBLED_BEGIN = "texts begin with the begin token that the tokenizer puts in front of them; it is put there once"
DOUBLED_END = "texts end with several ends of a turn, or with space behind one; the first is kept"
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


def logged_calls(pool: WeightedMessages, calls: object, train_on: str, location: str) -> list[Call]:
    """A call for every entry of `calls`, whose indices point into the pool.

    Raises:
        DataError: an entry of another shape, an index outside the pool, an output that is no assistant message.
    """
    if not isinstance(calls, list) or not calls:
        raise DataError(f"{location}: calls must be a non-empty list of {{ctx: [indices], out: index}}.")
    result = []
    for number, call in enumerate(calls):
        where = f"{location}: calls[{number}]"
        if not isinstance(call, dict) or "ctx" not in call or "out" not in call:
            raise DataError(f"{where} needs ctx (indices of the context) and out (index of the completion).")
        context = [
            _pool_index(i, len(pool.messages), f"{where}.ctx") for i in list(flat_list(call["ctx"], "ctx", where))
        ]
        out = _pool_index(call["out"], len(pool.messages), f"{where}.out")
        turn = with_reason(pool.messages[out], {key: call[key] for key in KEYS if key in call})
        if not context:
            raise DataError(f"{where} has an empty ctx; a completion needs something before it.")
        if pool.messages[out]["role"] != "assistant":
            raise DataError(
                f"{where}: out is message {out}, of role {pool.messages[out]['role']}; it must be assistant."
            )
        history = [pool.messages[i] for i in context]
        result.append(Call(history, turn, pool.weights[out], f"{where} (message {out})"))
    trained = [call for call in (result[-1:] if train_on == "last_assistant" else result) if call.weight > 0]
    if not trained:
        raise DataError(
            f"{location}: all {len(result)} calls have weight 0, so no token is trained; drop the record{QUARANTINE}."
        )
    return trained


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
    calls = _checked(template, calls, tools, left_out)
    for low in range(0, len(calls), CALLS_AT_ONCE):
        block = calls[low : low + CALLS_AT_ONCE]
        block, texts = _rendered(template, block, tools, location, seen, left_out)
        shown = [text.prompt + text.opening for text in texts]
        if template.placer is not None:
            shown = [template.placer.written(text) for text in shown]
        contexts = template.encoder.encode(shown)
        for call, context, (ids, mask) in zip(block, contexts, _sampled(template, texts), strict=True):
            if mask is not None and not mask.any():
                left_out.append((call.location, UNMARKED))
                continue
            images: tuple[ImageSpan, ...] = ()
            if template.placer is not None:
                context, images = template.placer.place(context, call.history, call.location)
            pieces = (*context, ids)
            rows.append(replace(_row(pieces, before, [(len(context), call.weight, mask)]), images=images))
            before = pieces
    if not rows:
        others = [each for each in left_out if each[1] != UNMARKED]
        raise UnusableError(*others[0]) if others else DataError(f"{location}: {NOTHING_MARKED}")
    return rows


def render_kept(template: Template, calls: Sequence[Call], tools: Tools, location: str, left_out: LeftOut) -> list[Row]:
    """One row for all calls of a conversation: the reasoning of every turn stays, so the calls are append-only.

    The sequence is the first prompt, then what each turn sampled and what the template writes from there to the next.
    """
    if any(message.get(IMAGES) for call in calls for message in call.history):
        raise DataError(f"{location}: thinking='keep' is not supported for images; use thinking='as_inference'.")
    calls = _checked(template, calls, tools, left_out)
    calls, texts = _rendered(template, calls, tools, location, set(), left_out)
    if not any(call.weight for call in calls):
        raise UnusableError(*left_out[0])
    tails = turns.tails(template, calls, texts, tools, location)
    encoder = template.encoder
    pieces = list(encoder.encode([texts[0].prompt + texts[0].opening])[0])
    sampled = _sampled(template, texts)
    between = encoder.encode_continuations([tail + text.opening for tail, text in zip(tails, texts[1:], strict=True)])
    trained = []
    for number, (call, (ids, mask)) in enumerate(zip(calls, sampled, strict=True)):
        if number:
            pieces.append(between[number - 1])
        trained.append((len(pieces), call.weight, mask))
        pieces.append(ids)
    row = _row(tuple(pieces), (), trained)
    if not row.spans:
        raise DataError(f"{location}: {NOTHING_MARKED}")
    return [row]


def render_pair(template: Template, prompt: str, completion: str, location: str, *, is_cut: bool = False) -> list[Row]:
    """A plain prompt and completion, without a template: begin token as the tokenizer puts it, end token trained.

    is_cut: the end was not sampled, so there is none.
    """
    if not completion:
        raise UnusableError(location, "a completion that holds nothing")
    encoder = template.encoder
    if not is_cut:
        completion = with_end(template, completion)
    context = (begin_ids(template, prompt), *encoder.encode([prompt])[0])
    ids = encoder.encode_continuations([completion])[0]
    if not sum(map(len, context)):
        raise DataError(
            f"{location}: prompt is empty and the tokenizer has no begin token; nothing predicts the completion."
        )
    if not len(ids):
        raise UnusableError(location, "a completion that holds nothing")
    return [_row((*context, ids), (), [(len(context), 1.0, None)])]


def begin_ids(template: Template, text: str) -> np.ndarray:
    """What the tokenizer puts in front of a plain text, unless it begins with that."""
    if template.encoder.begins(text):
        template.counted[DOUBLED_BEGIN] += 1
        return np.zeros(0, dtype=np.int32)
    return template.encoder.begin_ids()


def with_end(template: Template, text: str) -> str:
    """A plain text with one end behind it: that which it has, or the tokenizer's end-of-text token."""
    ends = [text[slice(*span)] for span in template.encoder.endings(text)]
    own = next((end for end in ends if end in template.ends), template.eos or "")
    found = template.without_end(text) + own
    if ends and found != text:
        template.counted[DOUBLED_END] += 1
    return found


def _checked(template: Template, calls: Sequence[Call], tools: Tools, left_out: LeftOut) -> list[Call]:
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


def _rendered(
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


def _sampled(template: Template, texts: Sequence[turns.RenderedCall]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Token ids of what each call sampled, and which of them are trained ([len(ids)] bool; None: all)."""
    encoder = template.encoder
    ids = encoder.encode_continuations([text.sampled for text in texts])
    return [
        (each, None if text.spans is None else encoder.trained_tokens(text.sampled, text.spans, each))
        for text, each in zip(texts, ids, strict=True)
    ]


def _row(pieces: Pieces, before: Pieces, trained: Sequence[tuple[int, float, np.ndarray | None]]) -> Row:
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


def _pool_index(value: object, size: int, location: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < size:
        raise DataError(f"{location} holds {value!r}; indices must be in 0..{size - 1}.")
    return int(value)
