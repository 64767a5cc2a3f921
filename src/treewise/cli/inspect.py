"""`treewise inspect DATA`: what the data holds, and what training on trees can gain on it."""

import argparse
import json

from rich.console import Console

from treewise.cli.pretrained import load_config, load_tokenizer
from treewise.data import RenderOptions, TreeDataset, load_trees
from treewise.flops import flop_model_of_config
from treewise.report import inspect_forests, inspect_view


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    parser.add_argument(
        "--model", help="folder, Hub name, .gguf file or smollm2-demo: for its FLOP bound and tokenizer"
    )
    parser.add_argument("--tokenizer", help="folder or name of a tokenizer; the model's where not given")
    parser.add_argument("--max_tokens", "--max-tokens", type=int, help="budget: names the trees that exceed it")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """DATA and how it is rendered, as every command that reads data takes them."""
    parser.add_argument("data", nargs="+", help=".jsonl, .jsonl.gz, .json or .parquet files, folders or globs of them")
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
    tokenizer = None
    if args.tokenizer is not None:
        tokenizer = load_tokenizer(args.tokenizer)
    elif args.model is not None:
        tokenizer = load_tokenizer(args.model, args.gguf_file, required=False)
    return load_trees(
        args.data,
        tokenizer,
        options=render_options(args),
        num_workers=args.num_workers,
        progress=not args.json,
        on_bad_record=args.on_bad_record,
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns the exit code."""
    flops = None if args.model is None else flop_model_of_config(load_config(args.model, args.gguf_file))
    data = load_data(args)
    forests = ((tree.name, tree.forest()) for tree in data)
    report = inspect_forests(forests, data.report, flops, args.model, args.max_tokens)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(inspect_view(report))
    return 0
