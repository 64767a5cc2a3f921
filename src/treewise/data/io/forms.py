"""What the form of a record is: one table. A form is recognised by its keys (`forms_of`), and what reads it is loaded
when a record of it is met.

Dumps of other stacks (`formats`) become records of these forms. A near miss of a known key is an error (`other_names`),
other keys that nothing reads are counted: `"contents"` instead of `"content"` would train an empty turn, `old_logprob`
would be computed again, both silently.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treewise.data.io.files import RawRecord, parse_text, parsed_object
from treewise.data.io.replies import KEYS as ENDING
from treewise.tree.trajectory import STREAMS

Record = dict[str, Any]

LABELS = frozenset({"group", "task_id", "reward", "rollout", "advantages"})
TOOLS = frozenset({"tools", "tools_ref", "functions"})
CHAT = frozenset({"messages", "images", *TOOLS, *LABELS, *ENDING})
PAIR = frozenset({"prompt", "completion", "images", *TOOLS, *LABELS, *ENDING})
OF_ROLLOUTS = frozenset({"reward", "rollout"})  # of a completion that is preferred to another, `label` says it
NODE = frozenset({"id", "parent", "token_ids", "message", "images", "reward", "rollout", "end", *STREAMS})
SHOWN = frozenset({"prompt_text", "completion_text", "iteration", "turns"})  # beside rows, for people
ROW = (CHAT | PAIR | SHOWN | {"token_ids", "text", *STREAMS}) - {"functions"}
REWRITTEN: frozenset[str] = frozenset()
MESSAGE = frozenset(
    {"role", "content", "name", "tool_calls", "function_call", "tool_call_id", "id", "refusal", "weight", "train"}
    | {"training", "loss", "train_detail", "reasoning_content", "reasoning", "thinking", *ENDING}
)
# Lists of objects within records, and the keys of these.
PARTS = {
    **dict.fromkeys(("messages", "prompt", "completion"), MESSAGE),
    "nodes": NODE,
    "seqs": frozenset({"ids", "loss", "reward", "advantages", "behaviour_logprobs", "rollout"}),
    "calls": frozenset({"ctx", "out", *ENDING}),
}
# Keys that hold nested values; text in one of these is JSON, as columns of Parquet have it.
_NUMBERS = (name for name, stream in STREAMS.items() if not stream.is_routes)  # those may be base64
NESTED = ("messages", "tools", "calls", "nodes", "seqs", "token_ids", "conversations", "input_ids", *_NUMBERS)


@dataclass(frozen=True, slots=True)
class Form:
    """A form of records.

    Parameters:
        text: what it is, for messages.
        needs: keys that a record of it has; all that recognises one of `BY_KEYS_ALONE`, else `forms_of` has its signs.
        reads: all keys that it reads; none where it is rewritten as another form.
        reader: the feature (`treewise.base.features`) that reads or rewrites it; empty: `treewise.data.records` does.
        example: a record.
    """

    text: str
    needs: tuple[str, ...]
    reads: frozenset[str]
    reader: str
    example: str


FORMS = {
    "chat": Form(
        "messages of OpenAI's shape",
        ("messages",),
        CHAT,
        "",
        '{"messages": [{"role": "user", "content": "2+2?"}, ...]}',
    ),
    "prompt_completion": Form(
        "texts or message lists", ("prompt", "completion"), PAIR, "texts", '{"prompt": "2+2=", "completion": "4"}'
    ),
    "token_row": Form(
        "token ids and streams",
        ("token_ids",),
        ROW,
        "token_rows",
        '{"token_ids": [1, 15, 9], "loss_weights": [0, 0, 1]}',
    ),
    "grouped_rows": Form(
        "several rows of a group",
        ("seqs",),
        frozenset({"seqs", "group", "task_id"}),
        "token_rows",
        '{"seqs": [{"ids": [1, 15, 9], "loss": [[2, 3]]}]}',
    ),
    "calls": Form(
        "logged calls",
        ("messages", "calls"),
        (CHAT - ENDING) | {"calls"},
        "logged_calls",
        '{"messages": [...], "calls": [{"ctx": [0], "out": 1}]}',
    ),
    "nodes": Form(
        "a declared tree",
        ("nodes",),
        TOOLS | LABELS | {"nodes", "forest"},
        "declared_trees",
        '{"nodes": [{"id": "a", "parent": null, "token_ids": [1, 15]}, ...]}',
    ),
    "tree_node": Form(
        "a node of one",
        ("tree",),
        NODE | TOOLS | {"tree"},
        "declared_trees",
        '{"tree": "t", "id": "a", "parent": null, "token_ids": [1, 15]}',
    ),
    "preference": Form(
        "a preference pair",
        ("chosen", "rejected"),
        (PAIR - ENDING - OF_ROLLOUTS) | {"chosen", "rejected"},
        "preference_records",
        '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}',
    ),
    "labelled": Form(
        "a labelled completion",
        ("prompt", "completion", "label"),
        (PAIR - OF_ROLLOUTS) | {"label"},
        "preference_records",
        '{"prompt": "2+2=", "completion": "4", "label": true}',
    ),
    "sharegpt": Form(
        "ShareGPT turns",
        ("conversations",),
        REWRITTEN,
        "other_libraries",
        '{"conversations": [{"from": "human", "value": "2+2?"}, ...]}',
    ),
    "alpaca": Form(
        "an instruction",
        ("instruction", "output"),
        REWRITTEN,
        "other_libraries",
        '{"instruction": "Add.", "input": "2+2", "output": "4"}',
    ),
    "text": Form("plain text, all of it trained", ("text",), LABELS | ENDING | {"text"}, "texts", '{"text": "2+2=4"}'),
    "input_ids": Form(
        "ids with labels or a mask",
        ("input_ids",),
        REWRITTEN,
        "token_rows",
        '{"input_ids": [1, 15, 9], "labels": [-100, -100, 9]}',
    ),
}
BY_KEYS_ALONE = ("preference", "labelled", "input_ids", "alpaca", "sharegpt")  # in this order
# What beside token ids says that several samples follow one another in the row (`readers.packed_rows`): their lengths,
# the sums of these, or the number of the sample that a token is of (0 is padding but for the last of these).
LENGTHS = ("seq_lengths", "seq_lens", "packed_seq_lengths", "sequence_lengths", "sample_lengths")
CUMULATIVE = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q", "cu_seqlens_k", "cu_seq_lens_k")
NUMBERS = ("attention_mask", "segment_ids", "seq_idx")
PACKING = (*LENGTHS, *CUMULATIVE, *NUMBERS, "position_ids")


def parse(raw: RawRecord) -> Record:
    """The record as an object, nulls at the top removed (a null field is an absent field).

    Raises:
        DataError: text that is not UTF-8, not JSON or not an object, at `file:line:column` or with the byte offset.
        PartialTailError: the same in a last line without a line end.
    """
    record = {key: item for key, item in parsed_object(raw, is_padded=raw.is_row).items() if item is not None}
    if record.get("tools") == "":  # as LLaMA-Factory writes none
        del record["tools"]
    for name in NESTED:
        text = record.get(name)
        if isinstance(text, str):
            record[name] = parse_text(text, f"{raw.location}: {name}")
    return record


def forms_of(record: Record) -> list[str]:
    """The forms whose keys a record has: one, unless it is a record of none, or of several at once."""
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


def is_packed(record: Record) -> bool:
    """Whether a row of token ids may hold several samples."""
    return ("input_ids" in record or "token_ids" in record) and not record.keys().isdisjoint(PACKING)


def has_form(record: Record) -> bool:
    """Whether a record's keys are those of a form, and not those of another stack's dump."""
    forms = forms_of(record)
    if forms == ["chat"] and ("response" in record or "choices" in record):  # a logged call, whose reply is there?
        last = record["messages"][-1] if isinstance(record["messages"], list) and record["messages"] else None
        if isinstance(last, dict) and last.get("role") in ("user", "tool", "function", "system", "developer"):
            return False
    if set(forms) & {"input_ids", "prompt_completion", "nodes"}:  # keys that dumps have, too
        from treewise.data.io.formats import detect_format

        return not detect_format(record)
    return bool(forms)


def with_unknown_keys(record: Record, form: str, group_by: str | None) -> Iterator[tuple[str, Record, frozenset[str]]]:
    """The record, and objects in its lists, that hold a key which the form does not read: the list, with the index of
    the object (`messages[2]`; empty for the record itself), the object, and the keys that are read.
    """
    known = FORMS[form].reads
    top = known | {"source", group_by or "source"}  # where a row is from, as importers write it
    if not top.issuperset(record):
        yield "", record, top
    for name, keys in PARTS.items():
        values = record.get(name)
        if name in known and isinstance(values, list):
            for index, part in enumerate(values):
                if isinstance(part, dict) and not keys.issuperset(part):
                    yield f"{name}[{index}]", part, keys
