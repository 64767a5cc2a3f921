"""`treewise inspect DATA`: what the data holds, and what training on trees can gain on it; `--run`: what a run did."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge
from rich.console import Console

import treewise
from treewise.base.progress import busy_with, tell_progress
from treewise.cli.data_arguments import (
    add_data_arguments,
    add_flags,
    apply_config,
    check_numbers,
    data_tokenizer,
    load_data,
    rendering_note,
)
from treewise.errors import ConfigError
from treewise.models.load_costs import load_costs
from treewise.models.load_model import load_shapes
from treewise.report import RunReport, bill_view, inspect_forests, inspect_view, read_run, run_view, verdict_view
from treewise.report.analysis.bill import Rates
from treewise.report.analysis.lost_sharing import LostCollector
from treewise.report.analysis.token_text import TokenText
from treewise.report.analysis.verdict import verdict_on
from treewise.tree.forest import Forest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    parser.add_argument("--run", dest="run_folder", metavar="OUTPUT_DIR", help="a run's folder: what it logged")
    parser.add_argument("--html", metavar="REPORT.html", help="write one page with everything, and its .json twin")
    parser.add_argument("--trees", type=int, default=12, help="trees that the page draws, the most interesting ones")
    add_flags(
        parser,
        "tokenizer",
        "json",
        dtype={"help": "of the model, for the page's bytes (float32)"},
        model={"help": "folder, Hub name, .gguf file or smollm2-demo: for its FLOP bound and tokenizer"},
        max_tokens={"help": "budget: names the trees that exceed it"},
    )
    bill = parser.add_argument_group("the bill, at the end of the tables")
    bill.add_argument("--card", help="a card (h100), its FLOPs per second, or a file of treewise bench --json: hours")
    bill.add_argument("--dollars_per_hour", type=float, help="what an hour of the card costs")
    bill.add_argument("--dollars_per_million", type=float, help="what a training API takes for a million tokens")


def run(args: argparse.Namespace) -> int:
    """Prints the report, or writes the page; returns the exit code."""
    apply_config(args, dtype="float32")
    if not args.data and args.run_folder is None:
        raise ConfigError("nothing to inspect: name data files, or a run's folder with --run.")
    check_numbers(args, max_tokens=Ge(1), trees=Ge(0))
    rates = Rates(args.card, args.dollars_per_hour, args.dollars_per_million)
    rates.check(args.model)
    logged = None if args.run_folder is None else read_run(args.run_folder)
    if args.html is not None:
        return _write_html(args, rates, logged)
    printed: dict[str, Any] = {}
    if args.data:
        flops = None if args.model is None else load_costs(args.model, args.gguf_file)
        tokenizer = data_tokenizer(args)
        data = load_data(args, tokenizer, progress=not args.json)
        if flops is not None:
            data.check_vocabulary(flops.vocabulary)
        lost = LostCollector(TokenText(tokenizer), flops)

        def forests() -> Iterator[tuple[str, Forest]]:
            for index, tree in enumerate(data):
                tell_progress("looking at trees", index, len(data), "tree")
                forest = tree.forest()
                lost.add(tree.name, forest)
                yield tree.name, forest

        with busy_with("looking at trees"):
            report = inspect_forests(forests(), data.report, flops, args.model, args.max_tokens)
        verdict = verdict_on(report, lost.result())
        bill = rates.bill_of(report.total, args.model)
        printed |= verdict.to_dict() | {"bill": bill.to_dict()} | report.to_dict()
        if not args.json:
            Console().print(inspect_view(report, verdict.lines, rendering_note(args, data), bill))
    if logged is not None:
        printed["run"] = logged.to_dict()
        if not args.json:
            Console().print(run_view(logged))
    if args.json:
        print(json.dumps(printed, indent=2))
    return 0


def _write_html(args: argparse.Namespace, rates: Rates, logged: RunReport | None) -> int:
    # Imported here: the terminal tables need neither templates nor plans.
    from treewise.nn.wrapped import num_embeddings
    from treewise.report.html.build import build_data_report, twin
    from treewise.report.html.page import checked_paths, write_page

    checked_paths(args.html)
    data_report = None
    if args.data:
        model = None if args.model is None else load_shapes(args.model, args.gguf_file, args.dtype)
        tokenizer = data_tokenizer(args)
        data = load_data(args, tokenizer, progress=not args.json)
        if model is not None:
            data.check_vocabulary(num_embeddings(model))
        data_report = build_data_report(
            data,
            data.report,
            sources=args.data,
            tokenizer=tokenizer,
            tokenizer_name=None if tokenizer is None else (args.tokenizer or args.model),
            model=model,
            model_name=args.model,
            max_tokens=args.max_tokens,
            num_drawn=args.trees,
            rates=rates,
        )
    html, json_file = write_page(args.html, data_report, logged, treewise.__version__)
    if args.json:
        print(json.dumps(twin(data_report, logged, treewise.__version__), indent=2))
    else:
        if data_report is not None:
            Console().print(verdict_view(data_report.verdict.lines))
            Console().print(bill_view(data_report.bill))
        print(f"{html} ({html.stat().st_size / 1e6:.1f} MB) and {json_file}")
    return 0
