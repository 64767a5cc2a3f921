"""`treewise verify DATA --model M`: flat against tree on the user's own model and rows. Exit code 1 if they differ."""

import argparse
import json

from rich.console import Console

from treewise.cli.devices import chosen_device
from treewise.cli.inspect import add_data_arguments, render_options
from treewise.cli.pretrained import load_model, load_tokenizer
from treewise.data import check_vocabulary, load_trees
from treewise.errors import ConfigError
from treewise.objectives import SFT, WEIGHTINGS
from treewise.report import verification_view
from treewise.trajectory import Trajectory
from treewise.verification import verify

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    parser.add_argument("--model", required=True, help="folder, Hub name, .gguf file or smollm2-demo")
    parser.add_argument("--tokenizer", help="folder or name of a tokenizer; the model's where not given")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--max_tokens", "--max-tokens", type=int, help="budget of a micro-batch; whole trees without")
    parser.add_argument("--limit", type=int, default=32, help="the first K trajectories (32; 0 for all)")
    parser.add_argument("--attention", default="auto", choices=("auto", "reference", "cascade", "flex"))
    parser.add_argument("--weighting", default="per_trajectory", choices=WEIGHTINGS)
    parser.add_argument("--tolerance", type=float, help="relative error allowed in the gradient; by dtype without")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 1 where an error is beyond its limit."""
    if args.limit < 0:
        raise ConfigError(f"--limit is {args.limit}; give a number of trajectories, or 0 for all.")
    device = chosen_device(args.device)
    model, tokenizer = load_model(args.model, args.gguf_file, args.dtype)
    data = load_trees(
        args.data,
        tokenizer if args.tokenizer is None else load_tokenizer(args.tokenizer),
        options=render_options(args),
        num_workers=args.num_workers,
        progress=not args.json,
        on_bad_record=args.on_bad_record,
    )
    check_vocabulary(data, model.get_input_embeddings().weight.shape[0])
    trajectories: list[Trajectory] = []
    for tree in data:
        if tree.trajectories is None:
            trajectories += tree.forest().trajectories or ()
        else:
            trajectories += tree.trajectories
        if args.limit and len(trajectories) >= args.limit:
            break
    if not trajectories:
        raise ConfigError("the declared trees are too large to be trained flat; verify on a smaller one.")
    report = verify(
        model.to(device),
        trajectories[: args.limit or None],
        args.max_tokens,
        attention=args.attention,
        objective=SFT(weighting=args.weighting),
        tolerance=args.tolerance,
    )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console = Console()
        console.print(verification_view(report))
        for failure in report.failures:
            console.print(f"[red]{failure}[/]", highlight=False)
    return 0 if report.passed else 1
