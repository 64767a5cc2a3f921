"""Raw records to objects: JSON with named errors, Parquet rows without their null padding, and record forms by keys."""

import json
from typing import Any

import numpy as np

from treewise.data.io.files import RawRecord
from treewise.data.io.printable import shown
from treewise.errors import DataError, did_you_mean
from treewise.tree.trajectory import STREAMS

Record = dict[str, Any]

# Every form: what it is, the keys that it needs, and an example.
FORMS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "chat": ("messages of OpenAI's shape", ("messages",), '{"messages": [{"role": "user", "content": "2+2?"}, ...]}'),
    "prompt_completion": ("texts or message lists", ("prompt", "completion"), '{"prompt": "2+2=", "completion": "4"}'),
    "token_row": ("token ids and streams", ("token_ids",), '{"token_ids": [1, 15, 9], "loss_weights": [0, 0, 1]}'),
    "grouped_rows": ("several rows of a group", ("seqs",), '{"seqs": [{"ids": [1, 15, 9], "loss": [[2, 3]]}]}'),
    "calls": ("logged calls", ("messages", "calls"), '{"messages": [...], "calls": [{"ctx": [0], "out": 1}]}'),
    "nodes": ("a declared tree", ("nodes",), '{"nodes": [{"id": "a", "parent": null, "token_ids": [1, 15]}, ...]}'),
    "tree_node": ("a node of one", ("tree",), '{"tree": "t", "id": "a", "parent": null, "token_ids": [1, 15]}'),
    "preference": ("a preference pair", ("chosen", "rejected"), '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}'),
    "labelled": ("a labelled completion", ("prompt", "completion", "label"),
                 '{"prompt": "2+2=", "completion": "4", "label": true}'),
    "sharegpt": ("ShareGPT turns", ("conversations",), '{"conversations": [{"from": "human", "value": "2+2?"}, ...]}'),
    "alpaca": ("an instruction", ("instruction", "output"), '{"instruction": "Add.", "input": "2+2", "output": "4"}'),
    "text": ("plain text, all of it trained", ("text",), '{"text": "2+2=4"}'),
    "input_ids": ("ids with labels or a mask", ("input_ids",), '{"input_ids": [1, 15, 9], "labels": [-100, -100, 9]}'),
}  # fmt: skip

# Columns that hold nested values; a string in one of these is JSON text.
NESTED = ("messages", "tools", "calls", "nodes", "seqs", "token_ids", "conversations", "input_ids", *STREAMS)


class PartialTailError(DataError):
    """The last line of a file, cut off while it was written."""


def parse(raw: RawRecord) -> Record:
    """The record as an object, nulls at the top removed (a null field is an absent field).

    Raises:
        DataError: text that is not UTF-8, not JSON or not an object, at `file:line:column` or with the byte offset.
        PartialTailError: the same in a last line without a line end.
    """
    value = parsed_object(raw)
    if raw.is_row:
        value = {key: _without_nulls(item) for key, item in value.items()}
    record = {key: item for key, item in value.items() if item is not None}
    for name in NESTED:
        if isinstance(record.get(name), str):
            record[name] = parse_text(record[name], f"{raw.location}: {name}")
    return record


def parsed_object(raw: RawRecord) -> Record:
    """The record as the file holds it. Raises as `parse`."""
    return _parse_line(raw) if isinstance(raw.payload, bytes) else raw.payload


class _RepeatedKeyError(Exception):
    """A key that one object holds twice, of which `json` would silently keep the last."""


def _unique(pairs: list[tuple[str, Any]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(next(key for key in keys if keys.count(key) > 1))
    return record


def parse_text(text: str, location: str) -> Any:
    """JSON inside a string (a Parquet column, the arguments of a tool call)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{location}: not valid JSON at character {error.pos}: {error.msg}; {shown(text)}.") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{location}: JSON that cannot be read ({type(error).__name__}).") from None


def detect_form(record: Record, location: str) -> str:
    """The form of a record, a key of `FORMS`.

    Raises:
        DataError: keys of no form, or of several.
    """
    forms = _forms_of(record)
    missing = [name for name in ("prompt", "completion") if name not in record]
    if forms == ["prompt_completion"] and missing:
        raise DataError(f"{location}: a prompt/completion record without {missing[0]}{_foreign(record)}.")
    if len(forms) == 1:
        return forms[0]
    keys = ", ".join(shown(key) for key in list(record)[:12]) or "no keys"
    if not forms:
        near = "".join(_near(key) for key in list(record)[:12])
        known = "\n".join(f"  {name} ({what}): {example}" for name, (what, _, example) in FORMS.items())
        raise DataError(
            f"{location}: a record with {keys} matches no form{_foreign(record)}.{near} The forms (docs/data.md):\n"
            f"{known}"
        )
    examples = "\n".join(f"  {name} ({FORMS[name][0]}): {FORMS[name][2]}" for name in forms)
    raise DataError(
        f"{location}: a record with {keys} matches several forms ({', '.join(forms)}); leave the keys of one:\n"
        f"{examples}"
    )


def has_form(record: Record) -> bool:
    """Whether a record's keys are those of a form, and not those of another stack's dump."""
    forms = _forms_of(record)
    if forms == ["chat"] and _awaits_response(record):
        return False
    return bool(forms) and not (set(forms) & {"input_ids", "prompt_completion", "nodes"} and _foreign(record))


def _awaits_response(record: Record) -> bool:
    """Whether this is a logged call: the reply to its messages stands beside them."""
    last = record["messages"][-1] if isinstance(record["messages"], list) and record["messages"] else None
    is_open = isinstance(last, dict) and last.get("role") in ("user", "tool", "function", "system", "developer")
    return is_open and ("response" in record or "choices" in record)


def _forms_of(record: Record) -> list[str]:
    if "token_ids" not in record and "tree" not in record and "nodes" not in record:
        for form, keys in _SIMPLE.items():
            if all(key in record for key in keys) and not ("messages" in record or "seqs" in record):
                return [form]
    forms = []
    if "nodes" in record:
        forms.append("nodes")
    if "tree" in record and ("token_ids" in record or "message" in record):
        forms.append("tree_node")
    elif "token_ids" in record:
        forms.append("token_row")
    elif "messages" in record:
        forms.append("calls" if "calls" in record else "chat")
    if "seqs" in record:
        forms.append("grouped_rows")
    if ("completion" in record and "token_ids" not in record) or ("prompt" in record and not forms):
        forms.append("prompt_completion")
    if "token_ids" in record and "calls" in record:
        forms.append("calls")
    return forms or (["text"] if "text" in record else [])


# Forms that follow from these keys alone, in this order.
_SIMPLE = {
    "preference": ("chosen", "rejected"),
    "labelled": ("prompt", "completion", "label"),
    "input_ids": ("input_ids",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}


def _near(key: str) -> str:
    """` Did you mean ...?` where a key is nearly one of a form."""
    return did_you_mean(key, dict.fromkeys(name for _, names, _ in FORMS.values() for name in names))


def _foreign(record: Record) -> str:
    """The library whose dump this looks like, as part of a message; empty for none."""
    from treewise.data.importers.formats import detect_format  # which imports this module

    name = detect_format(record)
    return "" if name is None else f" (it looks like {name}'s: `treewise import` turns it into rows)"


def _parse_line(raw: RawRecord) -> Record:
    assert isinstance(raw.payload, bytes)
    try:
        text = raw.payload.decode()
        value = json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        if raw.is_tail and error.reason == "unexpected end of data":
            raise PartialTailError(_partial(raw)) from None
        at = raw.offset + error.start
        raise DataError(f"{raw.location}: not UTF-8 at byte {at} of the file; save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        if raw.is_tail:
            raise PartialTailError(_partial(raw)) from None
        near = shown(text[max(0, error.pos - 15) : error.pos + 15])
        raise DataError(f"{raw.location}:{error.colno}: not valid JSON: {error.msg}, near {near}.") from None
    except _RepeatedKeyError as error:
        raise DataError(f"{raw.location}: the key {shown(error.args[0])} is given twice in one object.") from None
    except RecursionError:
        raise DataError(f"{raw.location}: JSON nested too deeply to read.") from None
    except ValueError as error:
        raise DataError(f"{raw.location}: JSON that cannot be read ({shown(str(error))}).") from None
    if not isinstance(value, dict):
        raise DataError(f"{raw.location}: a record must be a JSON object, found {type(value).__name__}.")
    if b"\\ud" in raw.payload or b"\\uD" in raw.payload:
        _check_surrogates(text, value, raw)
    return value


def _partial(raw: RawRecord) -> str:
    return (
        f"{raw.location}: incomplete final line (the writer stopped in the middle); "
        "remove it, or leave it out: on_bad_record quarantine, or in Python allow_partial_tail=True."
    )


def _check_surrogates(text: str, value: Record, raw: RawRecord) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        at = text.lower().find(f"\\u{code:04x}")
        column = "" if at < 0 else f" at byte {raw.offset + len(text[:at].encode())} of the file"
        raise DataError(
            f"{raw.location}: lone surrogate \\u{code:04x}{column} is not text; escape pairs in full or replace it."
        ) from None


def _without_nulls(value: Any) -> Any:
    """Arrow pads structs with nulls for the keys of other rows; those are absent, not null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, tuple | np.generic):
        return list(value) if isinstance(value, tuple) else value.item()
    return value
