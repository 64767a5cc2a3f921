"""`treewise inspect DATA`: what the data holds, and what training on trees can gain on it; `--run`: what a run did."""

import argparse
import json
from typing import Any

from rich.console import Console

import treewise
from treewise.cli.load_model import load_flop_model, load_tokenizer
from treewise.data import RenderOptions, TreeDataset, load_trees
from treewise.errors import ConfigError
from treewise.report import RunReport, inspect_forests, inspect_view, read_run, run_view

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser, nargs="*")
    parser.add_argument("--run", dest="run_folder", metavar="OUTPUT_DIR", help="a run's folder: what it logged")
    parser.add_argument("--html", metavar="REPORT.html", help="write one page with everything, and its .json twin")
    parser.add_argument("--trees", type=int, default=12, help="trees that the page draws, the most interesting ones")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the model, for the page's bytes")
    parser.add_argument(
        "--model", help="folder, Hub name, .gguf file or smollm2-demo: for its FLOP bound and tokenizer"
    )
    parser.add_argument("--tokenizer", help="folder or name of a tokenizer; the model's where not given")
    parser.add_argument("--max_tokens", "--max-tokens", type=int, help="budget: names the trees that exceed it")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def add_data_arguments(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    """DATA and how it is rendered, as every command that reads data takes them."""
    parser.add_argument(
        "data", nargs=nargs, help=".jsonl, .jsonl.gz, .json or .parquet files, folders or globs of them"
    )
    parser.add_argument("--gguf_file", help="a GGUF file inside the model's folder")
    parser.add_argument("--chat_template", help="a Jinja template, a file that holds one, or chatml")
    parser.add_argument("--thinking", default="as_inference", choices=("as_inference", "keep"))
    parser.add_argument("--train_on", default="all_assistant", choices=("all_assistant", "last_assistant"))
    parser.add_argument("--group_by", help="field that names a record's tree, in place of group or task_id")
    parser.add_argument("--num_workers", type=int, help="processes that render; 0 for none")
    parser.add_argument(
        "--on_bad_record",
        default="error",
        choices=("error", "quarantine"),
        help="stop at it, or write it out and go on",
    )


def render_options(args: argparse.Namespace) -> RenderOptions:
    """Options of the data from the arguments of `add_data_arguments`."""
    return RenderOptions(
        thinking=args.thinking, train_on=args.train_on, group_by=args.group_by, chat_template=args.chat_template
    )


def load_data(args: argparse.Namespace) -> TreeDataset:
    """The trees that the arguments name, with the tokenizer given or else the model's."""
    return _load(args, data_tokenizer(args))


def data_tokenizer(args: argparse.Namespace) -> Any:
    """The tokenizer given, or else the model's; None where there is none."""
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer)
    if args.model is not None:
        return load_tokenizer(args.model, args.gguf_file, required=False)
    return None


def _load(args: argparse.Namespace, tokenizer: Any) -> TreeDataset:
    return load_trees(
        args.data,
        tokenizer,
        options=render_options(args),
        num_workers=args.num_workers,
        progress=not args.json,
        on_bad_record=args.on_bad_record,
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report, or writes the page; returns the exit code."""
    if not args.data and args.run_folder is None:
        raise ConfigError("nothing to inspect: name data files, or a run's folder with --run.")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError(f"--max_tokens is {args.max_tokens}; a micro-batch holds at least 1 token.")
    if args.trees < 0:
        raise ConfigError(f"--trees is {args.trees}; give the number of trees to draw.")
    logged = None if args.run_folder is None else read_run(args.run_folder)
    if args.html is not None:
        return _write_html(args, logged)
    printed: dict[str, Any] = {}
    if args.data:
        flops = None if args.model is None else load_flop_model(args.model, args.gguf_file)
        data = load_data(args)
        forests = ((tree.name, tree.forest()) for tree in data)
        report = inspect_forests(forests, data.report, flops, args.model, args.max_tokens)
        printed |= report.to_dict()
        if not args.json:
            Console().print(inspect_view(report))
    if logged is not None:
        printed["run"] = logged.to_dict()
        if not args.json:
            Console().print(run_view(logged))
    if args.json:
        print(json.dumps(printed, indent=2))
    return 0


def _write_html(args: argparse.Namespace, logged: RunReport | None) -> int:
    # Imported here: the terminal tables need neither templates nor plans.
    from treewise.report.html.build import build_data_report, twin
    from treewise.report.html.page import write_page

    data_report = None
    if args.data:
        flops = None if args.model is None else load_flop_model(args.model, args.gguf_file)
        tokenizer = data_tokenizer(args)
        data = _load(args, tokenizer)
        data_report = build_data_report(
            data,
            data.report,
            sources=args.data,
            tokenizer=tokenizer,
            tokenizer_name=None if tokenizer is None else (args.tokenizer or args.model),
            flops=flops,
            model=args.model,
            dtype=args.dtype,
            max_tokens=args.max_tokens,
            num_drawn=args.trees,
        )
    html, json_file = write_page(args.html, data_report, logged, treewise.__version__)
    if args.json:
        print(json.dumps(twin(data_report, logged, treewise.__version__), indent=2))
    else:
        print(f"{html} ({html.stat().st_size / 1e6:.1f} MB) and {json_file}")
    return 0
