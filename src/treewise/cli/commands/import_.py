"""`treewise import FILES -o rollouts.jsonl`: dumps of other training stacks to rows that every command reads."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from treewise.base.durable import moved_into_place
from treewise.base.progress import busy_with, tell_progress
from treewise.data.importers import FORMATS, ImportReport, import_rollouts
from treewise.data.io.field_checks import shown
from treewise.data.render.template import template_text
from treewise.errors import ConfigError, num
from treewise.models.load_model import load_tokenizer

MAX_SHOWN = 5
MAX_REASON = 160  # characters of a reason that are shown, and by which equal ones are counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("data", nargs="+", help=".jsonl, .jsonl.gz, .json, .parquet or .pt files, folders or globs")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.jsonl", help="the rows; - for standard output")
    parser.add_argument(
        "--from", dest="format", metavar="FORMAT", help=f"{', '.join(FORMATS)}; recognised by its keys where not given"
    )
    parser.add_argument(
        "--tokenizer", help="the policy's: compares ids with messages, and tokenises dumps of text (folder or name)"
    )
    parser.add_argument("--chat_template", help="in place of the tokenizer's: Jinja text, a file of it, or chatml")
    parser.add_argument("--reward", metavar="NAME", help="which reward counts, where records hold several")
    parser.add_argument("--strict", action="store_true", help="text without ids, or with other ids, is an error")
    parser.add_argument("--keep_messages", action="store_true", help="keep messages beside ids")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Writes the rows, prints how many records were imported and left out; returns the exit code."""
    to_stdout = args.output == "-"
    path = Path(args.output)
    if not to_stdout:
        if not path.name.endswith(".jsonl"):
            raise ConfigError(f"--output {path}: rows are written as JSON lines; name it {path.stem}.jsonl.")
        if path.exists() and not args.overwrite:
            raise ConfigError(f"--output {path} exists; name another file, or --overwrite.")
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    if args.chat_template is not None:
        if tokenizer is None:
            raise ConfigError("--chat_template renders messages to compare them with ids; give --tokenizer, too.")
        tokenizer.chat_template = template_text(args.chat_template)
    rows = import_rollouts(
        args.data,
        args.format,
        tokenizer=tokenizer,
        reward_field=args.reward,
        strict=args.strict,
        keep_messages=args.keep_messages,
    )
    if to_stdout:
        for row in _told(rows):
            print(json.dumps(row))
    else:
        _write(path, _told(rows))
    console = Console(stderr=to_stdout)
    if args.json:
        console.print_json(json.dumps(rows.report.to_dict()))
    else:
        _show(console, rows.report, "standard output" if to_stdout else str(path))
    return 0


def _told(rows: Iterable[object]) -> Iterator[object]:
    with busy_with("importing"):
        for number, row in enumerate(rows, 1):
            tell_progress("importing", number, None, "row")
            yield row


def _write(path: Path, rows: Iterable[object]) -> None:
    """An import that fails leaves nothing half-written."""
    try:
        with moved_into_place(path) as part, part.open("w", encoding="utf-8") as stream:
            for row in rows:
                stream.write(json.dumps(row) + "\n")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written ({error.strerror or error}).") from error


def _show(console: Console, report: ImportReport, output: str) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    with_ids = report.num_rows - report.num_text_rows
    formats = Counter(report.formats.values())
    table.add_row("format", ", ".join(formats))
    table.add_row("records", f"{report.num_records:,} in {num(len(report.formats), 'file')}")
    table.add_row("rollouts", f"{report.num_rollouts:,} in {num(report.num_groups, 'group')}")
    table.add_row("rows", f"{report.num_rows:,}: {with_ids:,} with token ids, {report.num_text_rows:,} of text alone")
    if report.num_tokens:
        table.add_row("tokens", f"{report.num_tokens:,}, {report.num_trained_tokens:,} of them sampled")
    table.add_row("without a reward", num(report.num_without_reward, "row"))
    if with_ids:
        table.add_row("without sampler log-probs", num(report.num_without_sampler_logprobs, "row"))
    if report.num_compared:
        table.add_row("compared with their text", f"{num(report.num_compared, 'row')}, {report.num_drifted:,} drifted")
    table.add_row("written to", output)
    console.print(table)
    if report.num_text_rows:
        _say(console, f"{num(report.num_text_rows, 'row')} of text alone, which is tokenised when it is loaded and may "
                      "give other tokens than were sampled.")  # fmt: skip
    for text, count in report.warnings.items():
        _say(console, f"{text} ({count:,} times)" if count > 1 else text)
    for line in report.drifts[:MAX_SHOWN]:
        _say(console, line)
    if report.num_drifted > MAX_SHOWN:
        _say(console, f"{report.num_drifted - MAX_SHOWN:,} more rows whose text gives other ids")
    if report.left_out:
        _say(console, f"left out: {len(report.left_out):,}, of which")
    first = {shown(reason, MAX_REASON): location for location, reason in reversed(report.left_out)}
    counts = Counter(shown(reason, MAX_REASON) for _, reason in report.left_out)
    for reason, count in counts.most_common(MAX_SHOWN):
        where = first[reason] if count == 1 else f"the first: {first[reason]}"
        _say(console, f"  {count:,}: {reason[1:-1]} ({where})")
    if len(counts) > MAX_SHOWN:
        _say(console, f"  and {len(counts) - MAX_SHOWN:,} more reasons (--json)")


def _say(console: Console, text: str) -> None:
    console.print(text, style="yellow", highlight=False, markup=False)
