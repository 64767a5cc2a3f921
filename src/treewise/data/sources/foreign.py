"""Dumps of other stacks among data: recognised by the keys of a source's first record, and read by their importer."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from treewise.data.importers.call_records import unjoined
from treewise.data.importers.common import Context, Placed
from treewise.data.importers.convert import READERS
from treewise.data.importers.formats import detect_format
from treewise.data.io.files import RawRecord
from treewise.data.io.options import LoadReport
from treewise.data.io.record_forms import has_form, parse
from treewise.data.sources.source import Source
from treewise.errors import DataError


def read_sources(sources: Sequence[Source], report: LoadReport) -> Iterator[tuple[RawRecord, Path | None]]:
    """The records of sources in treewise's own forms, with their files. What importers leave out is reported.

    Raises:
        DataError: a source without a record; a dump that has not the shape of its format.
    """
    halves: dict[str, tuple[str, Any]] = {}
    for source in sources:
        for raw in _read_source(source, report, halves):
            yield raw, source.data_file
    context = Context(halves=halves)
    unjoined(context)
    report.dropped += context.left_out


def _read_source(source: Source, report: LoadReport, halves: dict[str, tuple[str, Any]]) -> Iterator[RawRecord]:
    records = source.records()
    first = next(records, None)
    if first is None:
        raise DataError(f"{source.name}: no record; {'the file' if source.data_file else 'it'} is empty.")
    name = _format(first)
    if name is None:
        yield first
        yield from records
        return
    context = Context(halves=halves)
    placed = (Placed(raw.location, parse(raw)) for raw in chain([first], records))
    try:
        for row in READERS[name](placed, context):
            location = row.pop("source")
            yield RawRecord(location, row, num_bytes=first.num_bytes)
    except (KeyError, TypeError, AttributeError) as error:  # keys that the format promises and the data lacks
        raise DataError(
            f"{source.name}: looks like a dump of {name}, but does not have its shape ({type(error).__name__}: "
            f"{error}); name another format with `treewise import --from`."
        ) from error
    report.dropped += context.left_out
    report.warnings += [f"{source.name}: {text} ({count} times)" for text, count in context.warnings.items()]


def _format(first: RawRecord) -> str | None:
    """The format of a dump; None for treewise's own forms, and for a record that its reader reports as invalid."""
    try:
        record = parse(first)
    except DataError:
        return None
    return None if has_form(record) else detect_format(record)
