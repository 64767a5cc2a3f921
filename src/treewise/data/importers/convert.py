"""Dumps of any known format to records that `load_trees` reads: for `treewise import`, which checks each one by the
reader that will read it, and on the way into `load_trees`, where the keys of a source's first record show its format.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from treewise.data.importers.common import MISSHAPEN, Context, kept, unjoined
from treewise.data.importers.runs import CallLog
from treewise.data.io.files import PathLike, Placed, RawRecord, find_files
from treewise.data.io.formats import FORMATS, detect_format
from treewise.data.io.forms import Record, parse
from treewise.data.io.options import LoadReport, RenderOptions
from treewise.data.records import RecordReader
from treewise.data.render.messages import clean_conversation
from treewise.data.sources import Source, read_records
from treewise.errors import ConfigError, DataError, did_you_mean, num

TORCH_SUFFIXES = (".pt", ".pth")
REFUSED = (".pkl", ".pickle", ".bin", ".dill")
MAX_SHOWN_DRIFTS = 20


@dataclass(slots=True)
class ImportReport:
    """Counts of an import. `left_out`: records that are not among the rows, and why. `warnings`: findings, counted."""

    formats: dict[str, str] = field(default_factory=dict)  # file: format
    num_records: int = 0
    num_rows: int = 0
    num_text_rows: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_rollouts: int = 0
    num_groups: int = 0
    num_without_reward: int = 0
    num_without_sampler_logprobs: int = 0
    num_compared: int = 0
    num_drifted: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    drifts: list[str] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def _reader(name: str) -> Callable[[Iterable[Placed], Context], Iterator[Any]]:
    module, _, function = FORMATS[name].reader.partition(".")
    found: Callable[[Iterable[Placed], Context], Iterator[Any]] = getattr(
        import_module(f"treewise.data.importers.{module}"), function
    )
    return found


def _rows(source: str, name: str, records: Iterable[Placed], context: Context) -> Iterator[Placed]:
    """What the reader of a format that is no log makes of the records of a source."""
    try:
        for record in records:
            for row in kept(context, _reader(name)([record], context), record):
                yield Placed(row["source"], row, record.file)
    except MISSHAPEN as error:
        raise DataError(
            f"{source}: does not have the shape of a {name} dump ({type(error).__name__}: {error}); see "
            "docs/import.md, or name another format (treewise import --from)."
        ) from error


class RolloutImport:
    """An iterable of records; `report` is complete when it is exhausted. See `import_rollouts`."""

    def __init__(self, files: Sequence[Path], format: str | None, context: Context, strict: bool, keep: bool) -> None:
        self.files, self.format, self.context = files, format, context
        self.strict, self.keep_messages = strict, keep
        self.report = ImportReport(left_out=context.left_out, warnings=context.warnings)
        self._reader = RecordReader(context.tokenizer, RenderOptions())
        self._rollouts: set[str] = set()
        self._groups: set[str] = set()
        self._prefix = ""

    def __iter__(self) -> Iterator[Record]:
        logs: dict[str, CallLog] = {}
        for path in self.files:
            records = self._records(path)
            first = next(records, None)
            if first is None:
                raise DataError(f"{path}: no record; the file is empty, or blank.")
            name = self.format or detect_format(first.value)
            if name is None:
                keys = ", ".join(str(key) for key in list(first.value)[:12]) or "none"
                raise DataError(
                    f"{first.location}: a record with the keys {keys} matches no known format; name it with --from "
                    f"({', '.join(FORMATS)}). Records in treewise's own forms (docs/forms.md) need no import."
                )
            self.report.formats[str(path)] = name
            # Most stacks count groups anew in each dump; the calls of a log may go on in its next file.
            self._prefix = f"{path.name}: " if len(self.files) > 1 else ""
            try:
                if FORMATS[name].is_log:
                    logs.setdefault(name, CallLog(_reader(name), self.context)).take(chain([first], records))
                    continue
                for row in _rows(str(path), name, chain([first], records), self.context):
                    yield from self._checked(row.value)
            except DataError as error:
                seen = detect_format(first.value)
                if seen in (None, name):
                    raise
                raise DataError(f"{error} The record's keys are those of {seen!r}, not of {name!r}.") from None
        self._prefix = ""
        for log in logs.values():
            for row in log.rows():
                yield from self._checked(row.value)
        unjoined(self.context)
        if not self.report.num_rows:
            left_out = self.report.left_out
            why = f"; the first of {len(left_out)} left out: {': '.join(left_out[0])}" if left_out else ""
            raise DataError(f"nothing to train on in {num(len(self.files), 'file')}{why}.")

    def _records(self, path: Path) -> Iterator[Placed]:
        if path.name.endswith(TORCH_SUFFIXES):
            from treewise.data.importers.torch_files import read_torch_file

            for index, value in enumerate(read_torch_file(path)):
                self.report.num_records += 1
                yield Placed(f"{path}: record {index}", value)
            return
        for raw in read_records(path):
            self.report.num_records += 1
            yield Placed(raw.location, parse(raw))

    def _checked(self, row: Record) -> Iterator[Record]:
        """The row as it is written, after the reader of `load_trees` has read it; nothing where that leaves it out."""
        report, location = self.report, row["source"]
        has_ids = "token_ids" in row
        group = row.get("group", location)
        if self._prefix and "group" in row:
            row = {**row, "group": f"{self._prefix}{row['group']}"}
        if has_ids or self.context.tokenizer is not None:
            result = self._reader.read(RawRecord(location, dict(row)), Path(location))
            if result.error is not None:
                raise DataError(result.error)
            self.context.left_out += result.left_out
            if not result.rows:
                return
            if self.context.tokenizer is not None and {"messages", "text"} & set(row) and has_ids:
                report.num_compared += 1
                report.num_drifted += bool(result.drift)
                if result.drift and self.strict:
                    raise DataError(f"{result.drift[0]} (--strict)")
                report.drifts += result.drift if len(report.drifts) < MAX_SHOWN_DRIFTS else []
            group = location if (own := result.rows[0].group) is None else own
            report.num_tokens += sum(row.num_tokens for row in result.rows)
        if has_ids:
            report.num_trained_tokens += sum(1 for weight in row["loss_weights"] if weight)
            report.num_without_sampler_logprobs += "sampler_logprobs" not in row
        else:
            for name in ("messages", "prompt", "completion"):
                if isinstance(row.get(name), list):
                    clean_conversation(row[name], location, name)
            report.num_text_rows += 1
            if self.strict:
                raise DataError(
                    f"{location}: holds text without token ids, so the sampled tokens are not known (--strict)."
                )
        report.num_rows += 1
        report.num_without_reward += "reward" not in row
        self._rollouts.add(repr(row.get("rollout", location)))
        self._groups.add(repr(group))
        report.num_rollouts, report.num_groups = len(self._rollouts), len(self._groups)
        if has_ids and not self.keep_messages:
            row = {name: value for name, value in row.items() if name not in ("messages", "tools", "text")}
        yield row


def import_rollouts(
    paths: PathLike | Sequence[PathLike],
    format: str | None = None,
    *,
    tokenizer: object = None,
    reward_field: str | None = None,
    strict: bool = False,
    keep_messages: bool = False,
) -> RolloutImport:
    """Reads dumps of other training stacks as records of treewise's own forms, in order.

    Parameters:
        paths: `.jsonl`, `.jsonl.gz`, `.json`, `.parquet` and `.pt` files, folders or globs.
        format: a name of `FORMATS`; recognised by its keys where not given, an error where they leave a doubt.
        tokenizer: a transformers tokenizer. Rows with ids and messages are then compared with the rendered text.
        reward_field: which reward counts, where a record holds several.
        strict: text without ids, and text that gives other ids, are errors.
        keep_messages: keep the messages beside token ids.

    Raises:
        DataError: a file of no known format, or a record that its format does not allow.
        ConfigError: an unknown format name.
    """
    known = format and format.lower().replace("_", "-")  # underscores and capitals are forgiven
    known = {"prime": "prime-rl", "primerl": "prime-rl"}.get(known or "", known)
    if known is not None and known not in FORMATS:
        hint = did_you_mean(known, FORMATS)
        raise ConfigError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}.{hint}")
    return RolloutImport(_files(paths), known, Context(reward_field, tokenizer), strict, keep_messages)


def _files(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if path.name.endswith(REFUSED):
            raise DataError(
                f"{path}: pickles and binary dumps are not read; export JSON lines, or torch.save of plain tensors "
                "(docs/import.md)."
            )
        if path.name.endswith(TORCH_SUFFIXES):
            if not path.is_file():
                raise DataError(f"{path}: no such file.")
            files.append(path)
        else:
            files += find_files(path)
    if not files:
        raise DataError("no files to import; name at least one.")
    return files


class Dumps:
    """The dumps among the sources of one load: their records in treewise's own forms. What is left out is reported.

    drop: takes bad records, and their errors; None: they are errors.
    """

    def __init__(self, report: LoadReport, drop: Callable[[Placed, str], None] | None) -> None:
        self._report, self._drop = report, drop
        self._logs: dict[str, _OpenLog] = {}  # by format
        self._known: set[bytes] = set()

    def read(
        self, source: Source, format: str, records: Iterable[RawRecord]
    ) -> Iterator[tuple[RawRecord, Path | None]]:
        """The records of a source, with its file; those of a log come with `finish`, after the last source.

        Raises:
            DataError: it has not the shape of its format.
        """
        file = source.data_file or source.place
        if FORMATS[format].is_log:
            context = Context(drop=self._drop)
            log = self._logs.setdefault(format, _OpenLog([], CallLog(_reader(format), context), context))
            log.sources.append(source.name)
            log.calls.take(_placed(records, file, log.context))
            return
        context = Context(drop=self._drop, known=self._known)
        for row in _rows(source.name, format, _placed(records, file, context), context):
            yield _raw(row), file
        self._tell(source.name, context)

    def finish(self) -> Iterator[tuple[RawRecord, Path | None]]:
        """The records of logs, and reports what no other source has completed."""
        for log in self._logs.values():
            for row in log.calls.rows():
                yield _raw(row), row.file
            unjoined(log.context)
            more = f" and {num(len(log.sources) - 1, 'other')}" if len(log.sources) > 1 else ""
            self._tell(f"{log.sources[0]}{more}", log.context)

    def _tell(self, source: str, context: Context) -> None:
        self._report.dropped += context.left_out
        self._report.warnings += [f"{source}: {text} ({count} times)" for text, count in context.warnings.items()]


@dataclass(slots=True)
class _OpenLog:
    """A log, and the names of the sources that it was read from so far."""

    sources: list[str]
    calls: CallLog
    context: Context


def _placed(records: Iterable[RawRecord], file: Path | None, context: Context) -> Iterator[Placed]:
    """Records of a dump as objects, without those that are bad and may be dropped."""
    for raw in records:
        text = raw.payload.decode(errors="replace") if isinstance(raw.payload, bytes) else ""
        found = (Placed(each.location, parse(each), file) for each in [raw])
        yield from kept(context, found, Placed(raw.location, {"": text}))


def _raw(row: Placed) -> RawRecord:
    """A row as a source has it."""
    fields = {name: value for name, value in row.value.items() if name != "source"}
    return RawRecord(row.location, fields, num_bytes=sum(map(len, map(repr, fields.values()))))
