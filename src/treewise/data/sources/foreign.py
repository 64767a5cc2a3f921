"""Dumps of other stacks among data: recognised by the keys of a source's first record, and read by their importer."""

from collections.abc import Iterator
from itertools import chain

from treewise.data.importers.common import Context, Placed
from treewise.data.importers.convert import READERS
from treewise.data.importers.formats import detect_format
from treewise.data.io.files import RawRecord
from treewise.data.io.options import LoadReport
from treewise.data.io.record_forms import has_form, parse
from treewise.data.sources.source import Source
from treewise.errors import DataError


def read_source(source: Source, report: LoadReport) -> Iterator[RawRecord]:
    """The records of a source in treewise's own forms. What an importer leaves out is added to the report.

    Raises:
        DataError: a dump that has not the shape of its format.
    """
    records = source.records()
    first = next(records, None)
    if first is None:
        return
    name = _format(first)
    if name is None:
        yield first
        yield from records
        return
    context = Context()
    placed = (Placed(raw.location, parse(raw)) for raw in chain([first], records))
    try:
        for row in READERS[name](placed, context):
            location = row.pop("source")
            yield RawRecord(location, row, num_bytes=first.num_bytes)
    except (KeyError, TypeError, AttributeError) as error:  # keys that the format promises and the data lacks
        raise DataError(
            f"{source.name}: looks like a dump of {name}, and has not its shape ({type(error).__name__}: {error}); "
            "name another format with `treewise import --from`."
        ) from error
    report.dropped += context.left_out
    report.warnings += [f"{source.name}: {text} ({count} times)" for text, count in context.warnings.items()]


def _format(first: RawRecord) -> str | None:
    """The format of a dump; None for treewise's own forms, and for a record that its reader will refuse."""
    try:
        record = parse(first)
    except DataError:
        return None
    return None if has_form(record) else detect_format(record)
