"""One raw record to rows: what runs in the worker processes. Every `DataError` is handed back as text, in order."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from treewise.data import declared_nodes, token_rows
from treewise.data.images import ImageReader
from treewise.data.io.field_checks import label, number
from treewise.data.io.files import RawRecord
from treewise.data.io.known_keys import unused_keys
from treewise.data.io.options import RenderOptions
from treewise.data.io.other_forms import REWRITTEN, has_mask, label_of, pair_name, split_pair, with_mask
from treewise.data.io.printable import printable, shown
from treewise.data.io.record_forms import PartialTailError, Record, detect_form, parse
from treewise.data.io.rows import RecordResult, Row
from treewise.data.render import chat
from treewise.data.render.images import IMAGES, with_column, with_images_read
from treewise.data.render.messages import Conversation, clean_conversation
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import Template
from treewise.data.render.tools import find_tools
from treewise.errors import DataError
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import STREAMS

NEEDS_TOKENIZER = "holds text, which needs a tokenizer; give one (--tokenizer, or load_trees(..., tokenizer))."


class RecordReader:
    """Reads records under one tokenizer and one set of options. images: reads those of records."""

    def __init__(self, tokenizer: Any, options: RenderOptions, images: ImageReader | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.images = images

    def read(self, raw: RawRecord, data_file: Path | None) -> RecordResult:
        """The rows of a record, or its error."""
        result = RecordResult(location=raw.location)
        try:
            record = parse(raw)
            self._fill(result, record, data_file)
            self._check_length(result)
        except DataError as error:
            text = raw.payload.decode(errors="replace") if isinstance(raw.payload, bytes) else None
            return RecordResult(
                location=raw.location,
                error=str(error),
                is_partial_tail=isinstance(error, PartialTailError),
                raw=text if text is not None else json.dumps(raw.payload, default=str),
            )
        if self.tokenizer is not None and "_template" in self.__dict__:
            result.warnings += list(self._template.notes)
            if result.unused_keys:
                reads = self._template.mentions
                result.unused_keys = [key for key in result.unused_keys if "[]." not in key or not reads(key)]
        return result

    @cached_property
    def _template(self) -> Template:
        assert self.tokenizer is not None
        options = self.options
        template = options.chat_template
        if template is None and self.images is not None:
            template = getattr(self.images.processor, "chat_template", None)
        kwargs = dict(options.chat_template_kwargs)
        return Template(Encoder(self.tokenizer), template, kwargs, options.on_hidden, self.images)

    def _fill(self, result: RecordResult, record: Record, data_file: Path | None) -> None:
        location = result.location
        form = detect_form(record, location)
        if form in REWRITTEN:
            record = REWRITTEN[form](record, location)
            form = detect_form(record, location)
        if form == "token_row" and has_mask(record):
            record = with_mask(record, location)
        result.unused_keys = unused_keys(record, form, self.options.group_by, location)
        if form in ("preference", "labelled"):
            self._fill_preference(result, record, form, data_file)
            return
        group = self._group(record, location)
        rollout = label(record.get("rollout"), "rollout", location)
        if form == "tree_node":
            result.node = (json.dumps(label(record["tree"], "tree", location)), record)
            return
        if form == "token_row":
            own = location if rollout is None else rollout
            [row] = result.rows = [token_rows.token_row(record, group, own, location, self.images, data_file)]
            if group is None:
                row.group = group = token_rows.prompt_group(row)
                result.is_grouped_by_prompt, result.rollout = True, rollout
            self._compare(result, record, data_file)
        elif form == "grouped_rows":
            result.rows = token_rows.grouped_rows(record, group, location)
        elif form == "nodes":
            self._fill_declared(result, record, data_file)
        else:
            result.rows, group = self._rendered(form, record, group, data_file, location)
        if form in ("token_row", "grouped_rows"):
            result.warnings += [line for row in result.rows for line in token_rows.unlikely_logprobs(row, location)]
        elif not result.is_declared:
            self._label(result.rows, record, group, location if rollout is None else rollout, location)
        alone = group is None or form in ("grouped_rows", "nodes")
        result.key = None if alone else json.dumps(group)
        result.name = location if group is None or result.is_grouped_by_prompt else printable(group)

    def _rendered(
        self, form: str, record: Record, group: Any, data_file: Path | None, location: str
    ) -> tuple[list[Row], Any]:
        if self.tokenizer is None:
            raise DataError(f"{location}: the record {NEEDS_TOKENIZER}")
        if form == "text":
            return self._text(record["text"], location), group
        if form == "prompt_completion":
            return self._pair(record, group, data_file, location)
        tools = find_tools(record, data_file, location)
        talk = self._talk(clean_conversation(record["messages"], location), record, data_file, location)
        if form == "calls":
            if self.options.thinking == "keep":
                raise DataError(
                    f"{location}: thinking='keep' needs one conversation; logged calls are rendered as_inference."
                )
            calls = chat.logged_calls(talk, record["calls"], self.options.train_on, location)
            return chat.render_calls(self._template, calls, tools, location), group
        return self._conversation(talk, tools, location), group

    def _talk(self, talk: Conversation, record: Record, data_file: Path | None, location: str) -> Conversation:
        """A conversation as the template takes it, with its images read."""
        if "images" in record or any(message.get(IMAGES) for message in talk.messages):
            messages = with_column(talk.messages, record.get("images"), location)
            read = [
                with_images_read(message, self.images, data_file, f"{location}: messages[{turn}]")
                for turn, message in enumerate(messages)
            ]
            talk = Conversation(read, talk.weights)
        return self._template.prepare(talk, location)

    def _fill_preference(self, result: RecordResult, record: Record, form: str, data_file: Path | None) -> None:
        """Two rollouts of one pair, or one with a label, in the tree of their prompt. A reward of 1 is preferred to 0.

        The pair has a group of its own, so that a tree may hold many.
        """
        location = result.location
        group = self._group(record, location)
        if form == "preference":
            pair = split_pair(record, location)
            parts = [("chosen", 1.0, pair[0]), ("rejected", 0.0, pair[1])]
        else:
            parts = [("labelled", label_of(record, location), record)]
        for name, reward, part in parts:
            where = location if form == "labelled" else f"{location}: {name}"
            rows, key = self._rendered("prompt_completion", part, group, data_file, where)
            own = {key: value for key, value in part.items() if key != "reward"}
            self._label(rows, own, pair_name(location), where, where)
            for row in rows:
                row.reward, row.rollout = reward, where
            result.rows += rows
            result.key = json.dumps(key)
        result.name = location if group is None else str(group)
        result.is_preference = True

    def _text(self, text: Any, location: str) -> list[Row]:
        """Plain text, every token trained but the first; an end-of-text token is put behind it."""
        if not isinstance(text, str) or not text:
            raise DataError(f"{location}: text must be text that is not empty, found {shown(text)}.")
        encoder = self._template.encoder
        end = encoder.tokenizer.eos_token
        pieces = encoder.encode([text if not end or text.endswith(end) else text + end])[0]
        ids = np.concatenate([encoder.begin_ids(), *pieces]).astype(np.int32)
        if len(ids) < 2:
            raise DataError(f"{location}: the text is one token long, so nothing is predicted.")
        return [Row(token_ids=ids, spans=[1, len(ids)], span_weights=[1.0])]

    def _conversation(self, talk: Conversation, tools: chat.Tools, location: str, first: int = 0) -> list[Row]:
        train_on = self.options.train_on
        if self.options.thinking == "keep":
            return chat.render_kept(self._template, chat.kept_calls(talk, train_on, location, first), tools, location)
        return chat.render_calls(
            self._template, chat.conversation_calls(talk, train_on, location, first), tools, location
        )

    def _pair(self, record: Record, group: Any, data_file: Path | None, location: str) -> tuple[list[Row], Any]:
        prompt, completion = record["prompt"], record["completion"]
        if group is None:
            text = json.dumps(
                [prompt, record["images"]] if "images" in record else prompt, sort_keys=True, default=_digest
            )
            group = "prompt-" + hashlib.sha256(text.encode()).hexdigest()[:16]
        if "images" in record and isinstance(prompt, str):
            raise DataError(
                f"{location}: images beside a prompt of plain text; give messages (lists of role and content)."
            )
        if isinstance(prompt, str) and isinstance(completion, str):
            return chat.render_pair(self._template, prompt, completion, location), group
        if isinstance(prompt, str):
            raise DataError(f"{location}: completion is a list of messages, so prompt must be one too, not text.")
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        before = clean_conversation(prompt, location, "prompt")
        after = clean_conversation(completion, location, "completion")
        talk = Conversation(before.messages + after.messages, before.weights + after.weights)
        talk = self._talk(talk, record, data_file, location)
        return self._conversation(talk, find_tools(record, data_file, location), location, len(before.messages)), group

    def _fill_declared(self, result: RecordResult, record: Record, data_file: Path | None) -> None:
        placed = declared_nodes.nodes_of_record(record["nodes"], result.location)
        one_root = record.get("forest") is not True
        tools = find_tools(record, data_file, result.location)
        declared, rows = self.declared_rows(placed, tools, data_file, one_root)
        result.is_declared, result.rows = declared, rows
        if declared:
            self._label_ends(rows, record, result.location)

    def _label_ends(self, rows: Sequence[Row], record: Record, location: str) -> None:
        """Labels of the record for all its ends that have none of their own."""
        group = self._group(record, location)
        rollout = label(record.get("rollout"), "rollout", location)
        reward = number(record.get("reward"), "reward", location)
        for row in rows:
            row.group = group
            if row.is_end:
                row.reward = reward if row.reward is None else row.reward
                row.rollout = rollout if row.rollout is None else row.rollout

    def declared_rows(
        self,
        placed: Sequence[declared_nodes.PlacedNode],
        tools: chat.Tools,
        data_file: Path | None,
        one_root: bool = True,
    ) -> tuple[bool, list[Row]]:
        """Rows of a declared tree: its nodes where they hold tokens, rendered calls where they hold messages."""
        parents = declared_nodes.parents_of(placed, one_root)
        if "message" not in placed[0].value:

            def images_of(node: declared_nodes.PlacedNode, ids: np.ndarray) -> list[ImageSpan]:
                return token_rows.row_images(node.value, ids, self.images, data_file, node.location)

            return True, declared_nodes.token_rows(placed, parents, self.options.max_length, images_of)
        if self.tokenizer is None:
            raise DataError(f"{placed[0].location}: the node {NEEDS_TOKENIZER}")
        if self.options.thinking == "keep":
            raise DataError(
                f"{placed[0].location}: thinking='keep' needs one conversation; trees are rendered as_inference."
            )

        def with_images(message: dict[str, Any], images: Any, location: str) -> dict[str, Any]:
            [message] = with_column([message], images, location)
            return with_images_read(message, self.images, data_file, location)

        calls = declared_nodes.message_calls(placed, parents, self.options.train_on, with_images)
        ready = []
        for call in calls:
            talk = self._template.prepare(Conversation([*call.history, call.turn], []), call.location)
            ready.append(chat.Call(talk.messages[:-1], talk.messages[-1], call.weight, call.location))
        rows = chat.render_calls(self._template, ready, tools, placed[0].location)
        for row, call in zip(rows, calls, strict=True):
            row.source = row.rollout = call.location
        return False, rows

    def _label(self, rows: list[Row], record: Record, group: Any, rollout: Any, location: str) -> None:
        """Values of the record that hold for all its rows."""
        reward = number(record.get("reward"), "reward", location)
        advantage = record.get("advantages")
        if advantage is not None:
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

    def _compare(self, result: RecordResult, record: Record, data_file: Path | None) -> None:
        """Compares the ids of a row with its text, where it has one. The ids are trained either way."""
        location = result.location
        plain = _plain_text(record)
        if self.tokenizer is None or ("messages" not in record and plain is None):
            return
        try:
            if "messages" in record:
                talk = self._template.prepare(clean_conversation(record["messages"], location), location)
                if "images" in record or any(message.get(IMAGES) for message in talk.messages):
                    raise DataError(f"{location}: the row holds images.")
                text = self._template.render([talk.messages], find_tools(record, data_file, location), location)[0]
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

    def _group(self, record: Record, location: str) -> Any:
        field = self.options.group_by
        if field is not None:
            if field not in record:
                keys = ", ".join(map(printable, list(record)[:12]))
                raise DataError(f"{location}: no field {shown(field)} to group by; its keys are {keys}.")
            return label(record[field], field, location)
        for name in ("group", "task_id"):
            if record.get(name) is not None:
                return label(record[name], name, location)
        return None

    def _check_length(self, result: RecordResult) -> None:
        limit = self.options.max_length
        if limit is None or result.is_declared:
            return
        for row in result.rows:
            if row.num_tokens > limit:
                raise DataError(
                    f"{row.source or result.location}: {row.num_tokens} tokens, more than max_length {limit}; raise "
                    "it, shorten the record or quarantine it. Nothing is cut."
                )


def _digest(value: Any) -> str:
    """What stands for the bytes of an image in a hash."""
    data = value if isinstance(value, bytes) else value.tobytes()
    return hashlib.sha256(data).hexdigest()


def _plain_text(record: Record) -> str | None:
    """The text of a token row that holds no messages."""
    if isinstance(record.get("text"), str):
        return str(record["text"])
    prompt, completion = record.get("prompt"), record.get("completion")
    return prompt + completion if isinstance(prompt, str) and isinstance(completion, str) else None
