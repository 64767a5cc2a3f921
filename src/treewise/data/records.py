"""One raw record to rows: what runs in the worker processes. Every `DataError` is handed back as text, in order."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.data import declared_nodes, token_rows
from treewise.data.images import ImageReader
from treewise.data.io.endings import KEYS, UnusableError, ending_of, own_reason
from treewise.data.io.field_checks import label, number, printable, shown
from treewise.data.io.files import PartialTailError, Placed, RawRecord, parse, raw_text
from treewise.data.io.forms import Record, detect_form, unused_keys
from treewise.data.io.options import RenderOptions
from treewise.data.io.other_forms import PER_TOKEN, REWRITTEN, split_pair, with_mask
from treewise.data.io.packed import samples_of
from treewise.data.io.rows import RecordResult, Row
from treewise.data.render import chat
from treewise.data.render.images import Placer, with_column, with_images_read
from treewise.data.render.messages import IMAGES, Tools, WeightedMessages, clean_conversation, find_tools
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import Template
from treewise.data.token_rows import Label
from treewise.errors import DataError
from treewise.tree.trajectory import STREAMS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PAIR = ("prompt", "completion")
UNTRAINED = "samples of packed rows hold no trained token and are left out"
NEEDS_TOKENIZER = (
    "holds text, which needs a tokenizer; give one (--model or --tokenizer; in Python load_trees(..., tokenizer))."
)


class RecordReader:
    """Reads records under one tokenizer and one set of options. images: reads those of records.

    left_out: replies of the record that was read last which cannot be trained for how they ended.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", options: RenderOptions, images: ImageReader | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.images = images
        self.left_out: chat.LeftOut = []

    def read_samples(self, raw: RawRecord, data_file: Path | None) -> list[RecordResult]:
        """The rows of a record, or its error; for a row of several samples those of each."""
        try:
            record = parse(raw)
            samples = samples_of(record, raw.location)
        except DataError as error:
            return [_failed(raw, error)]
        if samples is None:
            return [self._read(raw, Placed(raw.location, record, data_file))]
        results = [self._read(raw, Placed(where, sample, data_file)) for where, sample in samples.records]
        for result in results[1:]:
            result.is_sample = True
        if samples.num_untrained:
            results[0].counted[UNTRAINED] = samples.num_untrained
        return results

    def read(self, raw: RawRecord, data_file: Path | None) -> RecordResult:
        """The rows of a record of one sample, or its error."""
        (result,) = self.read_samples(raw, data_file)
        return result

    def _read(self, raw: RawRecord, item: Placed) -> RecordResult:
        self.left_out = []
        result = RecordResult(location=item.location, left_out=self.left_out)
        try:
            self._fill(result, item)
            limit = self.options.max_length
            for row in result.rows if not result.is_declared else ():
                if limit is not None and row.num_tokens > limit:
                    raise DataError(
                        f"{row.source or result.location}: {row.num_tokens} tokens, more than max_length {limit}; "
                        "raise it, shorten the record or quarantine it. Nothing is cut."
                    )
        except UnusableError as error:
            self.take_counted()
            return RecordResult(location=raw.location, left_out=[(error.location, error.reason)])
        except DataError as error:
            self.take_counted()
            return _failed(raw, error)
        result.counted |= self.take_counted()
        if self.tokenizer is not None and "_template" in self.__dict__:
            result.warnings += list(self._template.notes)
            written = str(self._template.text or getattr(self.tokenizer, "chat_template", None))  # and may read it
            unused = result.unused_keys
            result.unused_keys = [
                key for key in unused if not (key.startswith("messages[].") and key.partition(".")[2] in written)
            ]
        return result

    def take_counted(self) -> dict[str, int]:
        """What was mended since the last call, and how often."""
        if "_template" not in self.__dict__:
            return {}
        counted, self._template.counted = self._template.counted, Counter()
        return dict(counted)

    @cached_property
    def _template(self) -> Template:
        options = self.options
        template = options.chat_template
        if template is None and self.images is not None:
            template = getattr(self.images.processor, "chat_template", None)
        kwargs = dict(options.chat_template_kwargs)
        placer = None if self.images is None else Placer(self.images)
        return Template(Encoder(self.tokenizer), template, kwargs, options.on_hidden, placer)

    def _fill(self, result: RecordResult, item: Placed) -> None:
        record, location = item.value, item.location
        form = detect_form(record, location)
        if form in REWRITTEN:
            record = REWRITTEN[form](record, location)
            form = detect_form(record, location)
        if form == "token_row" and any(name in record for name in PER_TOKEN):
            record = with_mask(record, location)
        record = _with_ending(record, form, location)
        item = replace(item, value=record)
        result.unused_keys = unused_keys(record, form, self.options.group_by, location)
        group = self._group(record, location)
        if form in ("preference", "labelled"):
            self._fill_preference(result, item, form, group)
            return
        rollout = label(record.get("rollout"), "rollout", location)
        own = location if rollout is None else rollout
        if form == "tree_node":
            result.node = (json.dumps(label(record["tree"], "tree", location)), record)
            return
        if form == "token_row":
            [row] = result.rows = [token_rows.token_row(item, group, own, self.images)]
            if group is None:
                row.group = group = token_rows.prompt_group(row)
                result.is_grouped_by_prompt, result.rollout = True, rollout
            self._compare(result, item)
        elif form == "grouped_rows":
            result.rows = token_rows.grouped_rows(item, group)
        elif form == "nodes":
            placed = declared_nodes.nodes_of_record(item)
            is_forest = record.get("forest") is True
            result.is_declared, result.rows = self.declared_rows(placed, find_tools(item), is_forest=is_forest)
            reward = number(record.get("reward"), "reward", location)
            for row in result.rows if result.is_declared else ():  # ends that have no labels of their own get these
                row.group = group
                row.reward = reward if row.is_end and row.reward is None else row.reward
                row.rollout = rollout if row.is_end and row.rollout is None else row.rollout
        else:
            group = self._prompt_group(item) if form == "prompt_completion" and group is None else group
            result.rows = self._rendered(form, item)
        if form in ("token_row", "grouped_rows"):
            result.counted |= Counter(
                each for row in result.rows for each in token_rows.doubled_tokens(row, self.tokenizer)
            )
            result.warnings += [line for row in result.rows for line in token_rows.unlikely_logprobs(row, location)]
        elif not result.is_declared:
            self._label(result.rows, record, group, own, location)
        alone = group is None or form in ("grouped_rows", "nodes")
        result.key = None if alone else json.dumps(group)
        result.name = location if group is None or result.is_grouped_by_prompt else printable(group)

    def _rendered(self, form: str, item: Placed) -> list[Row]:
        """The rows of a record that holds text."""
        record, location = item.value, item.location
        if self.tokenizer is None:
            raise DataError(f"{location}: the record {NEEDS_TOKENIZER}")
        if form == "text":
            return self._text(record, location)
        if form == "prompt_completion":
            return self._pair(item)
        tools = find_tools(item)
        talk = self._talk(clean_conversation(record["messages"], location), item)
        if form == "calls":
            if self.options.thinking == "keep":
                raise DataError(
                    f"{location}: thinking='keep' needs one conversation; logged calls are rendered as_inference."
                )
            calls = chat.logged_calls(talk, record["calls"], self.options.train_on, location)
            return chat.render_calls(self._template, calls, tools, location, self.left_out)
        return self._conversation(talk, tools, location)

    def _talk(self, talk: WeightedMessages, item: Placed) -> WeightedMessages:
        """A conversation as the template takes it, with its images read."""
        record, location = item.value, item.location
        if "images" in record or any(message.get(IMAGES) for message in talk.messages):
            messages = with_column(talk.messages, record.get("images"), location)
            read = [
                with_images_read(message, self.images, item.file, f"{location}: messages[{turn}]")
                for turn, message in enumerate(messages)
            ]
            talk = WeightedMessages(read, talk.weights)
        return self._template.prepare(talk, location)

    def _fill_preference(self, result: RecordResult, item: Placed, form: str, group: Label) -> None:
        """Two rollouts of one pair, or one with a label, in the tree of their prompt. A reward of 1 is preferred to 0.

        The pair has a group of its own, so that a tree may hold many, named by the file's name and line, which is the
        same wherever the file lies.
        """
        location = item.location
        if form == "preference":
            chosen, rejected = split_pair(item.value, location)
            parts = [(f"{location}: chosen", 1.0, chosen), (f"{location}: rejected", 0.0, rejected)]
        else:
            told = item.value["label"]
            if not isinstance(told, bool | np.bool_) and told not in (0, 1):
                raise DataError(f"{location}: label must be true (desirable) or false, found {shown(told)}.")
            parts = [(location, float(told), item.value)]
        for where, reward, part in parts:
            rows = self._rendered("prompt_completion", own_item := Placed(where, part, item.file))
            own = {key: value for key, value in part.items() if key != "reward"}
            self._label(rows, own, f"pair {PurePath(location).name}", where, where)
            for row in rows:
                row.reward, row.rollout = reward, where
            result.rows += rows
            result.key = json.dumps(self._prompt_group(own_item) if group is None else group)
        result.name = location if group is None else str(group)
        result.is_preference = True

    def _text(self, record: Record, location: str) -> list[Row]:
        """Plain text, every token trained but the first; behind it an end-of-text token, unless it was cut off."""
        text = record["text"]
        if not isinstance(text, str):
            raise DataError(f"{location}: text must be text, found {shown(text)}.")
        if not text:
            raise UnusableError(location, "a text that holds nothing")
        template = self._template
        pieces = template.encoder.encode([text if _is_cut(record) else chat.with_end(template, text)])[0]
        ids = np.concatenate([chat.begin_ids(template, text), *pieces]).astype(np.int32)
        if len(ids) < 2:
            raise DataError(f"{location}: the text is one token long, so nothing is predicted.")
        return [Row(token_ids=ids, spans=[1, len(ids)], span_weights=[1.0])]

    def _conversation(self, talk: WeightedMessages, tools: Tools, location: str, first: int = 0) -> list[Row]:
        keeps = self.options.thinking == "keep"
        made = chat.conversation_calls(talk, self.options.train_on, location, first, keeps=keeps)
        render = chat.render_kept if keeps else chat.render_calls
        return render(self._template, made, tools, location, self.left_out)

    def _prompt_group(self, item: Placed) -> str:
        """A group of its own for every prompt."""
        prompt = item.value["prompt"]
        whole = [prompt, item.value["images"]] if "images" in item.value else prompt
        text = json.dumps(whole, sort_keys=True, default=_digest)
        return "prompt-" + hashlib.sha256(text.encode()).hexdigest()[:16]

    def _pair(self, item: Placed) -> list[Row]:
        record, location = item.value, item.location
        prompt, completion = record["prompt"], record["completion"]
        if "images" in record and isinstance(prompt, str):
            raise DataError(
                f"{location}: images beside a prompt of plain text; give messages (lists of role and content)."
            )
        if isinstance(prompt, str) and isinstance(completion, str):
            return chat.render_pair(self._template, prompt, completion, location, is_cut=_is_cut(record))
        if isinstance(prompt, str):
            raise DataError(f"{location}: completion is a list of messages, so prompt must be one too, not text.")
        if isinstance(completion, str):
            said = {key: record[key] for key in KEYS if key in record}
            completion = [{"role": "assistant", "content": completion, **said}]
        before = clean_conversation(prompt, location, "prompt")
        after = clean_conversation(completion, location, "completion")
        talk = WeightedMessages(before.messages + after.messages, before.weights + after.weights)
        talk = self._talk(talk, item)
        return self._conversation(talk, find_tools(item), location, len(before.messages))

    def declared_rows(self, placed: Sequence[Placed], tools: Tools, *, is_forest: bool) -> tuple[bool, list[Row]]:
        """Rows of a declared tree: its nodes where they hold tokens (true), rendered calls where they hold messages.

        is_forest: it may have several roots.
        """
        location = placed[0].location
        parents = declared_nodes.parents_of(placed, one_root=not is_forest)
        if "message" not in placed[0].value:
            return True, declared_nodes.token_rows(placed, parents, self.options.max_length, self.images)
        if self.tokenizer is None:
            raise DataError(f"{location}: the node {NEEDS_TOKENIZER}")
        if self.options.thinking == "keep":
            raise DataError(f"{location}: thinking='keep' needs one conversation; trees are rendered as_inference.")
        prepared, train_on = self._template.prepared, self.options.train_on
        calls = declared_nodes.message_calls(placed, parents, train_on, self.images, prepared)
        rows = chat.render_calls(self._template, calls, tools, location, self.left_out)
        without = {where for where, _ in self.left_out}
        for row, call in zip(rows, (call for call in calls if call.location not in without), strict=True):
            row.source = row.rollout = call.location
        return False, rows

    def _label(self, rows: list[Row], record: Record, group: Label, rollout: Label, location: str) -> None:
        """Values of the record that hold for all its rows."""
        reward = number(record.get("reward"), "reward", location)
        advantage = record.get("advantages")
        if isinstance(advantage, list):
            raise DataError(f"{location}: a list of advantages needs token_ids; with text give one number.")
        advantage = number(advantage, "advantages", location)
        for name in STREAMS:
            if name in record and not STREAMS[name].is_scalar_allowed:
                raise DataError(f"{location}: {name} needs token_ids to align with; add them or remove {name}.")
        for index, row in enumerate(rows):
            row.group, row.reward = group, reward
            if row.rollout is None:
                row.rollout = rollout
            if not row.source:
                row.source = location if len(rows) == 1 else f"{location}#{index}"
            if advantage is not None:
                row.streams["advantages"] = np.full(row.num_tokens, advantage, dtype=np.float32)

    def _compare(self, result: RecordResult, item: Placed) -> None:
        """Compares the ids of a row with its text, where it has one. The ids are trained either way."""
        record, location = item.value, item.location
        parts = [record.get(name) for name in (["text"] if isinstance(record.get("text"), str) else _PAIR)]
        texts = [part for part in parts if isinstance(part, str)]
        plain = "".join(texts) if len(texts) == len(parts) else None
        if self.tokenizer is None or ("messages" not in record and plain is None):
            return
        try:
            if "messages" in record:
                talk = self._template.prepare(clean_conversation(record["messages"], location), location)
                if "images" in record or any(message.get(IMAGES) for message in talk.messages):
                    raise DataError(f"{location}: the row holds images.")
                text = self._template.render([talk.messages], find_tools(item), location)[0]
            else:
                text = plain or ""
        except DataError as error:  # the ids are sound all the same
            if self.options.on_drift == "error":
                raise
            result.warnings.append(f"{error} So its text was not compared with its token ids, which are trained.")
            return
        result.is_compared = True
        warning = token_rows.drift_warning(
            result.rows[0].token_ids, text, self._template.encoder, location, is_plain="messages" not in record
        )
        if warning is not None and self.options.on_drift == "error":
            raise DataError(f"{warning} (on_drift: error)")
        result.drift = [] if warning is None else [warning]

    def _group(self, record: Record, location: str) -> Label:
        field = self.options.group_by
        if field is not None:
            if field not in record:
                keys = ", ".join(map(printable, list(record)[:12]))
                raise DataError(f"{location}: no field {shown(field)} to group by; its keys are {keys}.")
            return label(record[field], field, location)
        named = next((name for name in ("group", "task_id") if record.get(name) is not None), "group")
        return label(record.get(named), named, location)


def _failed(raw: RawRecord, error: DataError) -> RecordResult:
    is_partial = isinstance(error, PartialTailError)
    return RecordResult(location=raw.location, error=str(error), is_partial_tail=is_partial, raw=raw_text(raw))


def _is_cut(record: Record) -> bool:
    return ending_of(own_reason(record)) == "cut"


def _with_ending(record: Record, form: str, location: str) -> Record:
    """The record with the reason that it gives beside its messages on the last of them, whose end it is.

    Raises:
        UnusableError: text or tokens that were filtered, refused or failed; an empty completion.
    """
    reason = own_reason(record)
    if reason is None or form in ("calls", "preference"):
        return record
    for name in ("messages", "completion"):
        talk = record.get(name)
        if isinstance(talk, list) and talk and form != "token_row":
            said = {key: record[key] for key in KEYS if key in record}
            is_reply = isinstance(talk[-1], dict) and talk[-1].get("role") == "assistant"
            return {**record, name: [*talk[:-1], {**said, **talk[-1]}]} if is_reply else record
    if ending_of(reason) == "unusable" or record.get("completion") == "":
        empty = "" if ending_of(reason) == "unusable" else "holds nothing and "
        raise UnusableError(location, f"a reply that {empty}ended with {shown(reason)}")
    return record


def _digest(value: Any) -> str:
    """What stands for the bytes of an image in a hash."""
    return hashlib.sha256(value if isinstance(value, bytes) else value.tobytes()).hexdigest()
