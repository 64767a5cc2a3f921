"""One raw record to rows: what runs in the worker processes. Every `DataError` is handed back as text, in order.

Chats are read here; records of the other forms by what `forms.FORMS` names.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.base import features
from treewise.data.io.field_checks import label, number, printable, shown
from treewise.data.io.files import PartialTailError, Placed, RawRecord, raw_text
from treewise.data.io.forms import FORMS, Record, forms_of, is_packed, parse, with_unknown_keys
from treewise.data.io.options import RenderOptions, today_as
from treewise.data.io.replies import KEYS, UnusableError
from treewise.data.io.rows import RecordResult, Row
from treewise.data.render import chat
from treewise.data.render.messages import IMAGES, Tools, WeightedMessages, clean_conversation, find_tools
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import Template, template_text
from treewise.errors import DataError
from treewise.tree.trajectory import STREAMS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treewise.data.images import ImageReader

Label = str | int | float | None
Job = tuple[RawRecord, Path | None]
UNTRAINED = "samples of packed rows hold no trained token and are left out"
NEEDS_TOKENIZER = (
    "holds text, which needs a tokenizer; give one (--model or --tokenizer; in Python load_trees(..., tokenizer))."
)


class RecordReader:
    """Reads records under one tokenizer and one set of options. images: reads those of records. today: the date that
    chat templates write, one for all workers.

    left_out: replies of the record that was read last which cannot be trained for how they ended.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", options: RenderOptions, images: "ImageReader | None" = None
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.images = images
        self.today = options.template_date or today_as()
        self.left_out: chat.LeftOut = []

    def read_batch(self, batch: Iterable[Job]) -> list[RecordResult]:
        """The rows of several records."""
        return [result for raw, data_file in batch for result in self.read_samples(raw, data_file)]

    def read_samples(self, raw: RawRecord, data_file: Path | None) -> list[RecordResult]:
        """The rows of a record, or its error; for a row of several samples those of each."""
        try:
            record = parse(raw)
            samples = features.packed_rows.samples_of(record, raw.location) if is_packed(record) else None
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
        if self.tokenizer is not None and "template" in self.__dict__:
            result.warnings += list(self.template.notes)
            result.dates = [self.today] if self.template.is_dated else []
            written = self.template.source  # and may read it
            unused = result.unused_keys
            result.unused_keys = [
                key for key in unused if not (key.startswith("messages[].") and key.partition(".")[2] in written)
            ]
        return result

    def take_counted(self) -> dict[str, int]:
        """What was mended since the last call, and how often."""
        if "template" not in self.__dict__:
            return {}
        counted, self.template.counted = self.template.counted, Counter()
        return dict(counted)

    @cached_property
    def template(self) -> Template:
        """The chat template at hand, with the tokenizer."""
        options = self.options
        template = options.chat_template or self._of_processor()
        kwargs = dict(options.chat_template_kwargs)
        placer = None if self.images is None else features.image_records.ImagePlacer(self.images)
        return Template(Encoder(self.tokenizer), template, kwargs, options.on_hidden, placer, self.today)

    def _of_processor(self) -> str | None:
        return None if self.images is None else getattr(self.images.processor, "chat_template", None)

    def template_text(self) -> object:
        """The text of that template, or several by name."""
        given = template_text(self.options.chat_template) or self._of_processor()
        return given or getattr(self.tokenizer, "chat_template", None)

    def _fill(self, result: RecordResult, item: Placed) -> None:
        """Reads a record by its form, which may be that of another as which it is written first.

        What reads a form is a module with `read`, `rewritten`, or both.
        """
        location = item.location
        form, reader = _form_and_reader(item.value, location)
        if hasattr(reader, "rewritten"):
            item = replace(item, value=reader.rewritten(item.value, form, location))
            form, reader = _form_and_reader(item.value, location)
        record = _with_ending(item.value, form, location)
        item = replace(item, value=record)
        unknown = list(with_unknown_keys(record, form, self.options.group_by))
        if unknown:
            from treewise.data.other_names import unused_keys

            result.unused_keys = unused_keys(unknown, form, location)
        group = self._group(record, location)
        result.belongs_to(group, location if group is None else printable(group))
        if reader is not None:
            reader.read(self, result, form, item, group)
        else:
            self._read_chat(result, item, group)

    def _read_chat(self, result: RecordResult, item: Placed, group: Label) -> None:
        record, location, rollout = item.value, item.location, rollout_of(item)
        self.check_tokenizer(location)
        tools = find_tools(item)
        talk = self.prepared(clean_conversation(record["messages"], location), item)
        result.rows = self.conversation(talk, tools, location)
        self.label(result.rows, record, group, rollout, location)

    def check_tokenizer(self, location: str, what: str = "record") -> None:
        """Raises `DataError` where text cannot be read. what: holds it."""
        if self.tokenizer is None:
            raise DataError(f"{location}: the {what} {NEEDS_TOKENIZER}")

    def prepared(self, talk: WeightedMessages, item: Placed) -> WeightedMessages:
        """A conversation as the template takes it, with its images read."""
        if "images" in item.value or any(message.get(IMAGES) for message in talk.messages):
            talk = features.image_records.with_images(talk, item, self.images)
        return self.template.prepare(talk, item.location)

    def conversation(self, talk: WeightedMessages, tools: Tools, location: str, first: int = 0) -> list[Row]:
        """The rows of a conversation. first: of the messages that may be trained."""
        keeps = self.options.thinking == "keep"
        made = chat.conversation_calls(talk, self.options.train_on, location, first, keeps=keeps)
        render = features.kept_reasoning.render_kept if keeps else chat.render_calls
        return render(self.template, made, tools, location, self.left_out)

    def label(self, rows: list[Row], record: Record, group: Label, rollout: Label, location: str) -> None:
        """Gives rows of text the values of their record that hold for all of them."""
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

    def _group(self, record: Record, location: str) -> Label:
        field = self.options.group_by
        if field is not None:
            if field not in record:
                keys = ", ".join(map(printable, list(record)[:12]))
                raise DataError(f"{location}: no field {shown(field)} to group by; its keys are {keys}.")
            return label(record[field], field, location)
        named = next((name for name in ("group", "task_id") if record.get(name) is not None), "group")
        return label(record.get(named), named, location)


def detect_form(record: Record, location: str) -> str:
    """The form of a record, a key of `FORMS`.

    Raises:
        DataError: keys of no form, or of several.
    """
    forms = forms_of(record)
    if len(forms) != 1 or not all(key in record for key in FORMS[forms[0]].needs):
        from treewise.data.other_names import raise_no_form

        raise_no_form(record, forms, location)
    return forms[0]


def _form_and_reader(record: Record, location: str) -> tuple[str, Any]:
    form = detect_form(record, location)
    return form, getattr(features, FORMS[form].reader) if FORMS[form].reader else None


def rollout_of(item: Placed) -> Label:
    """The rollout that a record names; else its own location."""
    rollout = label(item.value.get("rollout"), "rollout", item.location)
    return item.location if rollout is None else rollout


def _failed(raw: RawRecord, error: DataError) -> RecordResult:
    is_partial = isinstance(error, PartialTailError)
    return RecordResult(location=raw.location, error=str(error), is_partial_tail=is_partial, raw=raw_text(raw))


def _with_ending(record: Record, form: str, location: str) -> Record:
    """The record with the reason that it gives beside its messages on the last of them, whose end it is.

    Raises:
        UnusableError: text or tokens that were filtered, refused or failed; an empty completion.
    """
    if form in ("calls", "preference") or KEYS.isdisjoint(record):
        return record
    endings = features.endings
    reason = endings.own_reason(record)
    if reason is None:
        return record
    for name in ("messages", "completion"):
        talk = record.get(name)
        if isinstance(talk, list) and talk and form != "token_row":
            said = {key: record[key] for key in KEYS if key in record}
            is_reply = isinstance(talk[-1], dict) and talk[-1].get("role") == "assistant"
            return {**record, name: [*talk[:-1], {**said, **talk[-1]}]} if is_reply else record
    if endings.ending_of(reason) == "unusable" or record.get("completion") == "":
        empty = "" if endings.ending_of(reason) == "unusable" else "holds nothing and "
        raise UnusableError(location, f"a reply that {empty}ended with {shown(reason)}")
    return record
