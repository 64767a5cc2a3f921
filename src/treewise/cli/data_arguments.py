"""DATA and how it is read: the arguments that every command which reads data shares, and the trees that they name."""

import argparse
from typing import Any

from treewise.cli.load_model import load_tokenizer
from treewise.data import RenderOptions, TreeDataset, load_trees


def add_data_arguments(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    """Adds DATA and its rendering."""
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


def load_data(args: argparse.Namespace, tokenizer: Any, *, progress: bool) -> TreeDataset:
    """The trees that the arguments of `add_data_arguments` name. `progress`: with a bar on a terminal."""
    return load_trees(
        args.data,
        tokenizer,
        options=RenderOptions(
            thinking=args.thinking, train_on=args.train_on, group_by=args.group_by, chat_template=args.chat_template
        ),
        num_workers=args.num_workers,
        progress=progress,
        on_bad_record=args.on_bad_record,
    )


def data_tokenizer(args: argparse.Namespace) -> Any:
    """The tokenizer of `--tokenizer`, or else of `--model`; None where there is none."""
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer)
    if args.model is not None:
        return load_tokenizer(args.model, args.gguf_file, required=False)
    return None
