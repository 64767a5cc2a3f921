"""Keys that nothing reads, and records of no form: what each is called here, or what to do with it.

Loaded when a record holds one. A key that would change what is trained, were it ignored, is an error.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from treewise.data.io.field_checks import shown
from treewise.data.io.formats import detect_format
from treewise.data.io.forms import FORMS, Record
from treewise.errors import DataError, did_you_mean
from treewise.tree.trajectory import STREAMS

# What of a row of token ids is trained, in the words of torch, TRL, transformers, verl and prime-rl.
OTHER_MASKS = (
    *("labels", "loss_mask", "completion_mask", "response_mask", "action_mask"),
    *("assistant_masks", "assistant_mask", "assistant_tokens_mask"),
)
# Names of the same thing elsewhere.
OTHER_NAMES = {
    **{other: name for name, stream in STREAMS.items() for other in stream.other_names},
    "rewards": "reward",
    "rollout_id": "rollout",
}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
IN_RECORD = {
    **dict.fromkeys(OTHER_MASKS, "it needs token_ids to align with; messages take weight or train"),
    "system": 'put it in front of messages, as {"role": "system", "content": ...}',
    "group_id": "write it as group, or set group_by: group_id",
    "chat_template_kwargs": "variables of the template are the same for all records; give them as chat_template_kwargs",
    **dict.fromkeys(MEDIA, "images are read beside messages and token_ids; take it out, or write `images`"),
}
IN_MESSAGE = dict.fromkeys(
    MEDIA, "an image is a part of content, {type: image, image: ...}; videos and sounds are not read"
)
MARKS = ("weight", "train", "training", "loss")  # where nothing reads them: "loss" alone may be a figure
MISPLACED = "weights belong to messages and parts of their content, or are loss_weights of tokens"
IN_NODE = dict.fromkeys(OTHER_MASKS, "write it as loss_weights, one per token (0: context)")
IN_SEQ = dict.fromkeys(OTHER_MASKS, "write it as loss, [start, end) of every trained range")
HINTS = {"": IN_RECORD, "nodes": IN_NODE, "seqs": IN_SEQ, "calls": {}}  # of others: IN_MESSAGE
NEAR = 0.82  # of difflib: two letters swapped in six


def raise_no_form(record: Record, forms: list[str], location: str) -> NoReturn:
    """Raises `DataError` for a record with the keys of no form, of several, or of a part of one."""
    missing = [name for name in ("prompt", "completion") if name not in record]
    if forms == ["prompt_completion"] and missing:
        if "chosen" in record or "rejected" in record:
            other = "rejected" if "chosen" in record else "chosen"
            raise DataError(f"{location}: a preference pair without {other}; add it, or leave both out.")
        near = "".join(did_you_mean(key, missing) for key in record if key not in ("prompt", "completion"))
        hint = near or (" Prompts alone are tasks: treewise rl --tasks." if missing == ["completion"] else "")
        raise DataError(f"{location}: a prompt/completion record without {missing[0]}{_foreign(record)}.{hint}")
    keys = ", ".join(shown(key) for key in list(record)[:12]) or "no keys"
    named = FORMS if not forms else {name: FORMS[name] for name in forms}
    examples = "\n".join(f"  {name} ({form.text}): {form.example}" for name, form in named.items())
    if not forms:
        known = dict.fromkeys(name for form in FORMS.values() for name in form.needs)
        near = "".join(did_you_mean(key, known) for key in list(record)[:12] if key not in known)
        raise DataError(
            f"{location}: a record with {keys} matches no form{_foreign(record)}.{near} The forms (docs/forms.md):\n"
            f"{examples}"
        )
    raise DataError(
        f"{location}: a record with {keys} matches several forms ({', '.join(forms)}); leave the keys of one:\n"
        f"{examples}"
    )


def _foreign(record: Record) -> str:
    """The library whose dump this looks like, as part of a message; empty for none."""
    name = detect_format(record)
    return "" if name is None else f" (it looks like {name}'s: `treewise import` turns it into rows)"


def check_names(record: Mapping[str, Any], location: str) -> None:
    """Checks that no stream beside token ids has a name that treewise would ignore.

    Raises:
        DataError: with the name that it should have.
    """
    for name, ours in OTHER_NAMES.items():
        if name in record and ours not in record:
            raise DataError(f"{location}: {name} {_as_ours(ours)}")


def unused_keys(holders: Iterable[tuple[str, Record, frozenset[str]]], form: str, location: str) -> list[str]:
    """Keys that a form does not read, those of its parts as `messages[].key`; the value of each is not empty.

    holders: of `with_unknown_keys`.

    Raises:
        DataError: a key that is nearly a known one, or that holds what would change the training.
    """
    unused: dict[str, None] = {}
    for place, value, known in holders:
        name = place.partition("[")[0]
        hints = IN_NODE if form == "tree_node" and not name else HINTS.get(name, IN_MESSAGE)
        keys = _unused(value, known, hints, f"{location}: {place}" if name else location)
        unused |= dict.fromkeys(f"{name}[].{key}" if name else key for key in keys)
    return list(unused)


def _unused(value: Mapping[str, Any], known: frozenset[str], hints: Mapping[str, str], location: str) -> Iterator[str]:
    for key in value:
        item = value[key]
        if key in MARKS and key not in known and (item is False or (key == "weight" and item is not None)):
            of_record = "is for messages; leave the record out instead"
            why = of_record if hints is IN_RECORD and item is False else f"is not read: {MISPLACED}"
            raise DataError(f"{location}: {key}: {'false' if item is False else shown(item)} {why}.")
        if key in known or item is None or item is False or (isinstance(item, str | list | dict) and not item):
            continue
        if key in hints:
            raise DataError(f"{location}: {shown(key)} is not read: {hints[key]}.")
        other = OTHER_NAMES.get(str(key))
        if other in known and other not in value:
            raise DataError(f"{location}: {key} {_as_ours(other)}")
        right = _nearest(str(key), known)
        if right is not None and right not in value:
            raise DataError(f"{location}: unknown key {shown(key)}. Did you mean {right!r}? Rename or remove it.")
        yield str(key)


def _as_ours(name: str) -> str:
    return f"is not a key here; write it as {name}, or let `treewise import` read the dump."


@lru_cache(maxsize=4096)
def _nearest(key: str, known: frozenset[str]) -> str | None:
    plain = {name.replace("_", ""): name for name in known}
    same = plain.get(key.lower().replace("_", "").replace("-", ""))
    near = difflib.get_close_matches(key.lower(), sorted(known), 1, NEAR)
    return same or (near[0] if near else None)
