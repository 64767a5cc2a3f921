"""Texts without messages: plain text, all of it trained, and prompts with their completions."""

import hashlib
import json
from typing import Any

import numpy as np

from treewise.data.io.endings import ending_of, own_reason
from treewise.data.io.field_checks import shown
from treewise.data.io.files import Placed
from treewise.data.io.forms import TOOLS, Record
from treewise.data.io.replies import KEYS, UnusableError
from treewise.data.io.rows import RecordResult, Row
from treewise.data.records import Label, RecordReader, rollout_of
from treewise.data.render.chat import row_of
from treewise.data.render.messages import WeightedMessages, clean_conversation, find_tools
from treewise.data.render.template import Template
from treewise.errors import DataError

DOUBLED_BEGIN = "texts begin with the begin token that the tokenizer puts in front of them; it is put there once"
DOUBLED_END = "texts end with several ends of a turn, or with space behind one; the first is kept"


def read(reader: RecordReader, result: RecordResult, form: str, item: Placed, group: Label) -> None:
    """Reads a text, or a prompt and its completion, which without a group is in that of its prompt."""
    rollout = rollout_of(item)
    if form == "prompt_completion" and group is None:
        group = prompt_group(item)
        result.belongs_to(group, group)
    result.rows = rendered(reader, form, item)
    reader.label(result.rows, item.value, group, rollout, item.location)


def rendered(reader: RecordReader, form: str, item: Placed) -> list[Row]:
    """The rows of a text, or of a prompt and its completion."""
    reader.check_tokenizer(item.location)
    return _text(reader, item.value, item.location) if form == "text" else _pair(reader, item)


def prompt_group(item: Placed) -> str:
    """A group of its own for every prompt."""
    prompt = item.value["prompt"]
    whole = [prompt, item.value["images"]] if "images" in item.value else prompt
    text = json.dumps(whole, sort_keys=True, default=_digest)
    return "prompt-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(value: Any) -> str:
    """What stands for the bytes of an image in a hash."""
    return hashlib.sha256(value if isinstance(value, bytes) else value.tobytes()).hexdigest()


def _text(reader: RecordReader, record: Record, location: str) -> list[Row]:
    """Plain text, every token trained but the first; behind it an end-of-text token, unless it was cut off."""
    text = record["text"]
    if not isinstance(text, str):
        raise DataError(f"{location}: text must be text, found {shown(text)}.")
    if not text:
        raise UnusableError(location, "a text that holds nothing")
    template = reader.template
    pieces = template.encoder.encode([text if _is_cut(record) else _with_end(template, text)])[0]
    ids = np.concatenate([_begin_ids(template, text), *pieces]).astype(np.int32)
    if len(ids) < 2:
        raise DataError(f"{location}: the text is one token long, so nothing is predicted.")
    return [Row(token_ids=ids, spans=[1, len(ids)], span_weights=[1.0])]


def _pair(reader: RecordReader, item: Placed) -> list[Row]:
    record, location = item.value, item.location
    prompt, completion = record["prompt"], record["completion"]
    if "images" in record and isinstance(prompt, str):
        raise DataError(f"{location}: images beside a prompt of plain text; give messages (lists of role and content).")
    if isinstance(prompt, str) and (tools := next((name for name in TOOLS if record.get(name)), None)):
        raise DataError(
            f"{location}: {tools} beside a prompt of plain text; give messages (lists of role and content)."
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        return _plain_pair(reader.template, prompt, completion, location, is_cut=_is_cut(record))
    if isinstance(prompt, str):
        raise DataError(f"{location}: completion is a list of messages, so prompt must be one too, not text.")
    if isinstance(completion, str):
        said = {key: record[key] for key in KEYS if key in record}
        completion = [{"role": "assistant", "content": completion, **said}]
    before = clean_conversation(prompt, location, "prompt")
    after = clean_conversation(completion, location, "completion")
    talk = WeightedMessages(before.messages + after.messages, before.weights + after.weights)
    talk = reader.prepared(talk, item)
    return reader.conversation(talk, find_tools(item), location, len(before.messages))


def _plain_pair(template: Template, prompt: str, completion: str, location: str, *, is_cut: bool = False) -> list[Row]:
    """A plain prompt and completion, without a template: begin token as the tokenizer puts it, end token trained.

    is_cut: the end was not sampled, so there is none.
    """
    if not completion:
        raise UnusableError(location, "a completion that holds nothing")
    encoder = template.encoder
    if not is_cut:
        completion = _with_end(template, completion)
    context = (_begin_ids(template, prompt), *encoder.encode([prompt])[0])
    [ids] = encoder.encode_behind([(prompt or encoder.begin_token(), completion)])
    if not sum(map(len, context)):
        raise DataError(
            f"{location}: prompt is empty and the tokenizer has no begin token; nothing predicts the completion."
        )
    if not len(ids):
        raise UnusableError(location, "a completion that holds nothing")
    return [row_of((*context, ids), (), [(len(context), 1.0, None)])]


def _begin_ids(template: Template, text: str) -> np.ndarray:
    """What the tokenizer puts in front of a plain text, unless it begins with that."""
    if template.encoder.begins(text):
        template.counted[DOUBLED_BEGIN] += 1
        return np.zeros(0, dtype=np.int32)
    return template.encoder.begin_ids()


def _with_end(template: Template, text: str) -> str:
    """A plain text with one end behind it: that which it has, or the tokenizer's end-of-text token."""
    ends = [text[slice(*span)] for span in template.encoder.endings(text)]
    own = next((end for end in ends if end in template.ends), template.eos or "")
    found = template.without_end(text) + own
    if ends and found != text:
        template.counted[DOUBLED_END] += 1
    return found


def _is_cut(record: Record) -> bool:
    return ending_of(own_reason(record)) == "cut"
