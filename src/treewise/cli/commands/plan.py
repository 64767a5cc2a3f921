"""`treewise plan DATA --max_tokens N`: how trees are cut into micro-batches, and what that should cost."""

import argparse
import json

from rich.console import Console

from treewise.cli.data_arguments import add_data_arguments, apply_config, data_tokenizer, load_data
from treewise.cli.load_model import DTYPES, load_flop_model
from treewise.errors import ConfigError
from treewise.planning.planner import plan
from treewise.report import plan_view, report_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    parser.add_argument("--max_tokens", "--max-tokens", type=int, help="budget of a micro-batch")
    parser.add_argument("--hold", default="auto", choices=("auto", "never", "always"), help="keep open micro-batches")
    parser.add_argument("--limit", type=int, help="plan the first K trees only")
    parser.add_argument("--model", help="folder, Hub name, .gguf file or smollm2-demo: for bytes, time and tokenizer")
    parser.add_argument("--tokenizer", help="folder or name of a tokenizer; the model's where not given")
    parser.add_argument("--dtype", choices=DTYPES, help="of the model, for its bytes (float32)")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the plan of all trees side by side; returns the exit code."""
    apply_config(args, ("data", "max_tokens"), dtype="float32")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; give the number of trees to plan, at least 1.")
    flops = None if args.model is None else load_flop_model(args.model, args.gguf_file)
    data = load_data(args, data_tokenizer(args), progress=not args.json)
    count = len(data) if args.limit is None else min(args.limit, len(data))
    forests = [data[index].forest() for index in range(count)]
    whole = plan(forests, args.max_tokens, hold=args.hold)
    report = report_plan(whole, flops, args.model, args.dtype)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(plan_view(whole, report))
    return 0
