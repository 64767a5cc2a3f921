"""The forms of records, in one table: their keys, what each is, and the advice for a key that nothing reads.

`FORMS` are those that records may have; `FORMATS` those of other stacks' dumps, which `treewise.data.importers` turns
into them. A near miss of a known key is an error, other keys that nothing reads are counted: `"contents"` instead of
`"content"` would train an empty turn, `old_logprob` would be computed again, both silently.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from treewise.data.io.endings import KEYS as ENDING
from treewise.data.io.field_checks import shown
from treewise.errors import DataError, did_you_mean
from treewise.tree.trajectory import STREAMS

Record = dict[str, Any]

LABELS = frozenset({"group", "task_id", "reward", "rollout", "advantages"})
TOOLS = frozenset({"tools", "tools_ref", "functions"})
CHAT = frozenset({"messages", "images", *TOOLS, *LABELS, *ENDING})
PAIR = frozenset({"prompt", "completion", "images", *TOOLS, *LABELS, *ENDING})
NODE = frozenset({"id", "parent", "token_ids", "message", "images", "reward", "rollout", "end", *STREAMS})
SHOWN = frozenset({"prompt_text", "completion_text", "iteration", "turns"})  # beside rows, for people
ROW = (CHAT | PAIR | SHOWN | {"token_ids", "text", *STREAMS}) - {"functions"}
REWRITTEN: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Form:
    """A form of records.

    Parameters:
        text: what it is, for messages.
        needs: the keys by which it is recognised.
        reads: all keys that it reads; none where it is rewritten as another form (`treewise.data.io.other_forms`).
        example: a record.
    """

    text: str
    needs: tuple[str, ...]
    reads: frozenset[str]
    example: str


FORMS = {
    "chat": Form(
        "messages of OpenAI's shape", ("messages",), CHAT, '{"messages": [{"role": "user", "content": "2+2?"}, ...]}'
    ),
    "prompt_completion": Form(
        "texts or message lists", ("prompt", "completion"), PAIR, '{"prompt": "2+2=", "completion": "4"}'
    ),
    "token_row": Form(
        "token ids and streams", ("token_ids",), ROW, '{"token_ids": [1, 15, 9], "loss_weights": [0, 0, 1]}'
    ),
    "grouped_rows": Form(
        "several rows of a group",
        ("seqs",),
        frozenset({"seqs", "group", "task_id"}),
        '{"seqs": [{"ids": [1, 15, 9], "loss": [[2, 3]]}]}',
    ),
    "calls": Form(
        "logged calls",
        ("messages", "calls"),
        (CHAT - ENDING) | {"calls"},
        '{"messages": [...], "calls": [{"ctx": [0], "out": 1}]}',
    ),
    "nodes": Form(
        "a declared tree",
        ("nodes",),
        TOOLS | LABELS | {"nodes", "forest"},
        '{"nodes": [{"id": "a", "parent": null, "token_ids": [1, 15]}, ...]}',
    ),
    "tree_node": Form(
        "a node of one",
        ("tree",),
        NODE | TOOLS | {"tree"},
        '{"tree": "t", "id": "a", "parent": null, "token_ids": [1, 15]}',
    ),
    "preference": Form(
        "a preference pair",
        ("chosen", "rejected"),
        (PAIR - ENDING) | {"chosen", "rejected"},
        '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}',
    ),
    "labelled": Form(
        "a labelled completion",
        ("prompt", "completion", "label"),
        PAIR | {"label"},
        '{"prompt": "2+2=", "completion": "4", "label": true}',
    ),
    "sharegpt": Form(
        "ShareGPT turns", ("conversations",), REWRITTEN, '{"conversations": [{"from": "human", "value": "2+2?"}, ...]}'
    ),
    "alpaca": Form(
        "an instruction",
        ("instruction", "output"),
        REWRITTEN,
        '{"instruction": "Add.", "input": "2+2", "output": "4"}',
    ),
    "text": Form("plain text, all of it trained", ("text",), LABELS | ENDING | {"text"}, '{"text": "2+2=4"}'),
    "input_ids": Form(
        "ids with labels or a mask", ("input_ids",), REWRITTEN, '{"input_ids": [1, 15, 9], "labels": [-100, -100, 9]}'
    ),
}
BY_KEYS_ALONE = ("preference", "labelled", "input_ids", "alpaca", "sharegpt")  # in this order

# What of a row of token ids is trained, in the words of torch, TRL, transformers, verl and prime-rl.
OTHER_MASKS = (
    *("labels", "loss_mask", "completion_mask", "response_mask", "action_mask"),
    *("assistant_masks", "assistant_mask", "assistant_tokens_mask"),
)
# Names of the same thing elsewhere. Ignored, they would change what is trained.
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
    "weight": "weights belong to messages, or are loss_weights of tokens",
    **dict.fromkeys(MEDIA, "images are read beside messages and token_ids; take it out, or write `images`"),
}
IN_MESSAGE = dict.fromkeys(
    MEDIA, "an image is a part of content, {type: image, image: ...}; videos and sounds are not read"
)
IN_NODE = dict.fromkeys(OTHER_MASKS, "write it as loss_weights, one per token (0: context)")
IN_SEQ = dict.fromkeys(OTHER_MASKS, "write it as loss, [start, end) of every trained range")
MESSAGE = frozenset(
    {"role", "content", "name", "tool_calls", "function_call", "tool_call_id", "id", "refusal", "weight", "train"}
    | {"training", "train_detail", "reasoning_content", "reasoning", "thinking", *ENDING}
)
# Lists of objects within records: the keys of these, and the advice for others.
PARTS: dict[str, tuple[frozenset[str], dict[str, str]]] = {
    **dict.fromkeys(("messages", "prompt", "completion"), (MESSAGE, IN_MESSAGE)),
    "nodes": (NODE, IN_NODE),
    "seqs": (frozenset({"ids", "loss", "reward", "advantages", "behaviour_logprobs", "rollout"}), IN_SEQ),
    "calls": (frozenset({"ctx", "out", *ENDING}), {}),
}
NEAR = 0.82  # of difflib: two letters swapped in six


@dataclass(frozen=True, slots=True)
class Format:
    """A dump of another stack.

    text: what it is, for messages and `--help`. signs: alternatives, each the keys that must all be there; no other
    format has them.
    """

    text: str
    signs: tuple[str, ...]


FORMATS = {
    "verifiers": Format(
        "traces.jsonl of verifiers v1 (also written by prime-rl), or results.jsonl of its earlier versions",
        (
            *("traces task", "traces env", "nodes task agent", "nodes calls rewards"),
            "example_id prompt completion reward timing",
            "example_id prompt completion reward is_completed",
            "example_id prompt completion reward trajectory",
        ),
    ),
    "prime-rl": Format(
        "token_exports/step_N/rank_R.jsonl, or its traces.jsonl", ("token_ids inference_logprobs loss_mask",)
    ),
    "slime": Format(
        "--save-debug-rollout-data (.pt), or its samples one per line",
        ("tokens response_length reward", "samples rollout_id"),
    ),
    "verl": Format(
        "tensors of a batch (.pt), or trainer.rollout_data_dir (text without ids)",
        ("input output score step", "prompts responses attention_mask", "prompts responses response_mask"),
    ),
    "areal": Format(
        "trajectories (.pt), or rollout.dump_to_file (text; needs --tokenizer)",
        (
            "prompt completion reward seqlen prompt_len tail_version",
            "input_ids loss_mask logprobs",
            "input_ids loss_mask versions",
        ),
    ),
    "art": Format(
        "trajectories of OpenPipe ART, .jsonl or .parquet (text without ids)",
        ("trajectories", "messages_and_choices reward", "group_index messages reward"),
    ),
    "trl": Format(
        "prompts, completions and rewards: what a rollout_func returns, or completions_N.parquet (text)",
        ("prompt_ids completion_ids", "prompt completion advantage step"),
    ),
    "openai": Format(
        "recorded chat calls, {request, response} or {messages, response} a line; requests alone; batch files",
        ("request", "custom_id body", "custom_id response", "messages response", "messages choices"),
    ),
    "langfuse": Format(
        "observations, or traces with their observations, as .jsonl or .json",
        ("traceId type", "trace_id type input", "id observations"),
    ),
    "langsmith": Format("runs, as .jsonl, .json or .parquet", ("run_type inputs",)),
}


def detect_form(record: Record, location: str) -> str:
    """The form of a record, a key of `FORMS`.

    Raises:
        DataError: keys of no form, or of several.
    """
    forms = _forms_of(record)
    missing = [name for name in ("prompt", "completion") if name not in record]
    if forms == ["prompt_completion"] and missing:
        if "chosen" in record or "rejected" in record:
            other = "rejected" if "chosen" in record else "chosen"
            raise DataError(f"{location}: a preference pair without {other}; add it, or leave both out.")
        near = "".join(did_you_mean(key, missing) for key in record if key not in ("prompt", "completion"))
        hint = near or (" Prompts alone are tasks: treewise rl --tasks." if missing == ["completion"] else "")
        raise DataError(f"{location}: a prompt/completion record without {missing[0]}{_foreign(record)}.{hint}")
    if len(forms) == 1:
        return forms[0]
    keys = ", ".join(shown(key) for key in list(record)[:12]) or "no keys"
    named = FORMS if not forms else {name: FORMS[name] for name in forms}
    examples = "\n".join(f"  {name} ({form.text}): {form.example}" for name, form in named.items())
    if not forms:
        known = dict.fromkeys(name for form in FORMS.values() for name in form.needs)
        near = "".join(did_you_mean(key, known) for key in list(record)[:12] if key not in known)
        raise DataError(
            f"{location}: a record with {keys} matches no form{_foreign(record)}.{near} The forms (docs/data.md):\n"
            f"{examples}"
        )
    raise DataError(
        f"{location}: a record with {keys} matches several forms ({', '.join(forms)}); leave the keys of one:\n"
        f"{examples}"
    )


def detect_format(record: Mapping[str, Any]) -> str | None:
    """The format whose keys a record has; None where it has those of none, or of several."""
    keys = {str(key) for key, value in record.items() if value is not None}
    names = [name for name, format in FORMATS.items() if any(keys.issuperset(sign.split()) for sign in format.signs)]
    return names[0] if len(names) == 1 else None


def has_form(record: Record) -> bool:
    """Whether a record's keys are those of a form, and not those of another stack's dump."""
    forms = _forms_of(record)
    if forms == ["chat"] and ("response" in record or "choices" in record):  # a logged call, whose reply is there?
        last = record["messages"][-1] if isinstance(record["messages"], list) and record["messages"] else None
        if isinstance(last, dict) and last.get("role") in ("user", "tool", "function", "system", "developer"):
            return False
    return bool(forms) and not (set(forms) & {"input_ids", "prompt_completion", "nodes"} and _foreign(record))


def _forms_of(record: Record) -> list[str]:
    if not {"token_ids", "tree", "nodes", "messages", "seqs"} & record.keys():
        for form in BY_KEYS_ALONE:
            if all(key in record for key in FORMS[form].needs):
                return [form]
    has_ids, has_talk = "token_ids" in record, "messages" in record
    is_node = "tree" in record and (has_ids or "message" in record)
    signs = {
        "nodes": "nodes" in record,
        "tree_node": is_node,
        "token_row": has_ids and not is_node,
        "chat": has_talk and not has_ids and not is_node and "calls" not in record,
        "calls": "calls" in record and (has_ids or (has_talk and not is_node)),
        "grouped_rows": "seqs" in record,
    }
    forms = [form for form, is_there in signs.items() if is_there]
    if ("completion" in record and not has_ids) or ("prompt" in record and not forms):
        forms.append("prompt_completion")
    return forms or (["text"] if "text" in record else [])


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


def unused_keys(record: Mapping[str, Any], form: str, group_by: str | None, location: str) -> list[str]:
    """Keys that this form does not read, those of its parts as `messages[].key`; the value of each is not empty.

    Raises:
        DataError: a key that is nearly a known one, or that holds what would change the training.
    """
    known = FORMS[form].reads
    if record.get("train") is False:
        raise DataError(f"{location}: train: false is for messages; leave the record out instead.")
    top = known | {"source", group_by or "source"}  # where a row is from, as importers write it
    unused = dict.fromkeys(_unused(record, top, IN_NODE if form == "tree_node" else IN_RECORD, location))
    for name, (keys, hints) in PARTS.items():
        values = record.get(name)
        if name not in known or not isinstance(values, list):
            continue
        for index, part in enumerate(values):
            if isinstance(part, dict) and not keys.issuperset(part):
                names = _unused(part, keys, hints, f"{location}: {name}[{index}]")
                unused.update(dict.fromkeys(f"{name}[].{key}" for key in names))
    return list(unused)


def _unused(value: Mapping[str, Any], known: frozenset[str], hints: Mapping[str, str], location: str) -> Iterator[str]:
    for key in value:
        item = value[key]
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
