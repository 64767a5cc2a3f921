"""Keys of records and messages that nothing reads: near misses of known ones are errors, the others are counted.

`"contents"` instead of `"content"` would train an empty turn, `old_logprob` would be computed again: both silently.
"""

import difflib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from treewise.data.io.field_checks import OTHER_NAMES
from treewise.data.io.other_forms import OTHER_MASKS
from treewise.data.io.printable import shown
from treewise.errors import DataError
from treewise.tree.trajectory import STREAMS

LABELS = ("group", "task_id", "reward", "rollout", "advantages")
CHAT = frozenset({"messages", "tools", "tools_ref", "functions", *LABELS})
ROW = frozenset(
    {"token_ids", "images", "messages", "text", "prompt", "completion", "tools", "tools_ref", *LABELS, *STREAMS}
    | {"prompt_text", "completion_text"}  # of rollouts of online runs: for people
)
PAIR = frozenset({"prompt", "completion", "images", "tools", "tools_ref", "functions", *LABELS})
NODE = frozenset({"id", "parent", "token_ids", "message", "images", "reward", "rollout", "end", *STREAMS})
RECORD_KEYS: dict[str, frozenset[str]] = {
    "chat": CHAT | {"images"},
    "calls": CHAT | {"calls", "images"},
    "prompt_completion": PAIR,
    "token_row": ROW,
    "grouped_rows": frozenset({"seqs", "group", "task_id"}),
    "nodes": frozenset({"nodes", "forest", "tools", "tools_ref", "functions", *LABELS}),
    "tree_node": NODE | {"tree", "tools", "tools_ref", "functions"},
    "preference": PAIR | {"chosen", "rejected"},
    "labelled": PAIR | {"label"},
    "text": frozenset({"text", *LABELS}),
}
MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "function_call", "tool_call_id", "id", "refusal", "weight", "train"}
    | {"training", "train_detail", "reasoning_content", "reasoning", "thinking"}
)
SEQ_KEYS = frozenset({"ids", "loss", "reward", "advantages", "behaviour_logprobs", "rollout"})
CALL_KEYS = frozenset({"ctx", "out"})

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
IN_RECORD = {
    **dict.fromkeys(OTHER_MASKS, "it needs token_ids to align with; messages take weight or train"),
    "system": 'put it in front of messages, as {"role": "system", "content": ...}',
    "group_id": "write it as group, or set group_by: group_id",
    "weight": "weights belong to messages, or are loss_weights of tokens",
    **dict.fromkeys(MEDIA, "images are read beside messages and token_ids; take it out, or write `images`"),
}
IN_MESSAGE = {
    **dict.fromkeys(MEDIA, "an image is a part of content, {type: image, image: ...}; videos and sounds are not read"),
}
IN_NODE = dict.fromkeys(OTHER_MASKS, "write it as loss_weights, one per token (0: context)")
IN_SEQ = dict.fromkeys(OTHER_MASKS, "write it as loss, [start, end) of every trained range")
NEAR = 0.82  # of difflib: two letters swapped in six


def unused_keys(record: Mapping[str, Any], form: str, group_by: str | None, location: str) -> list[str]:
    """Keys that this form does not read, those of its parts as `messages[].key`; the value of each is not empty.

    Raises:
        DataError: a key that is nearly a known one, or that holds what would change the training.
    """
    known = RECORD_KEYS.get(form)
    if known is None:
        return []
    if record.get("train") is False:
        raise DataError(f"{location}: train: false is for messages; leave the record out instead.")
    top = known if group_by is None else known | {group_by}
    unused = dict.fromkeys(_unused(record, top, IN_NODE if form == "tree_node" else IN_RECORD, location))
    parts: tuple[tuple[str, frozenset[str], dict[str, str]], ...] = (
        ("messages", MESSAGE_KEYS, IN_MESSAGE),
        ("prompt", MESSAGE_KEYS, IN_MESSAGE),
        ("completion", MESSAGE_KEYS, IN_MESSAGE),
        ("nodes", NODE, IN_NODE),
        ("seqs", SEQ_KEYS, IN_SEQ),
        ("calls", CALL_KEYS, {}),
    )
    for name, keys, hints in parts:
        values = record.get(name)
        if name not in known or not isinstance(values, list):
            continue
        for index, part in enumerate(values):
            if isinstance(part, dict) and not keys.issuperset(part):
                names = _unused(part, keys, hints, f"{location}: {name}[{index}]")
                unused.update(dict.fromkeys(f"{name}[].{key}" for key in names))
    return list(unused)


def _unused(value: Mapping[str, Any], known: frozenset[str], hints: Mapping[str, str], location: str) -> Iterable[str]:
    for key in value:
        item = value[key]
        if key in known or item is None or item is False or (isinstance(item, str | list | dict) and not item):
            continue
        if key in hints:
            raise DataError(f"{location}: {shown(key)} is not read: {hints[key]}.")
        other = OTHER_NAMES.get(str(key))
        if other in known and other not in value:
            raise DataError(
                f"{location}: {key} is not a key here; write it as {other}, or let `treewise import` read the dump."
            )
        right = _nearest(str(key), known)
        if right is not None and right not in value:
            raise DataError(f"{location}: unknown key {shown(key)}. Did you mean {right!r}? Rename or remove it.")
        yield str(key)


@lru_cache(maxsize=4096)
def _nearest(key: str, known: frozenset[str]) -> str | None:
    plain = {name.replace("_", ""): name for name in known}
    same = plain.get(key.lower().replace("_", "").replace("-", ""))
    near = difflib.get_close_matches(key.lower(), sorted(known), 1, NEAR)
    return same or (near[0] if near else None)
