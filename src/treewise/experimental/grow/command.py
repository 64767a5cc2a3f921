"""`treewise grow SMALL --output BIG --width 2 --layers 24`: a larger model from a smaller one, to train on."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.errors import ConfigError, num
from treewise.experimental.grow.configuration import MANGO, OPERATORS, Growth
from treewise.models.load_model import load_tokenizer, load_weights, locate
from treewise.nn.adapters import adapter_folder

if TYPE_CHECKING:
    from treewise.experimental.grow import GrowReport

DEFAULTS = Growth()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("small", metavar="SMALL", help="folder with safetensors, .gguf file, smollm2-demo")
    parser.add_argument("--output", required=True, help="folder to write; must not exist")
    parser.add_argument("--width", type=int, default=1, help="whole factor of hidden size, heads and inner sizes")
    parser.add_argument("--layers", type=int, help="layers of the grown model; as many as before where not given")
    parser.add_argument(
        "--operator",
        default="copy",
        choices=OPERATORS,
        help="copy keeps the logits; the others do not",
    )
    parser.add_argument("--noise", type=float, default=0.01, help="between copies, in standard deviations; cancels")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and of mango")
    parser.add_argument("--verify", action="store_true", help="compare logits before and after (loads both models)")
    parser.add_argument("--data", nargs="+", help="mango: rows that the operator is fitted to")
    parser.add_argument("--rank", type=int, default=DEFAULTS.rank, help="mango: rank of its tensor ring")
    parser.add_argument("--steps", type=int, default=DEFAULTS.steps, help="mango: optimizer steps")
    parser.add_argument("--learning_rate", type=float, default=DEFAULTS.learning_rate, help="mango: of Adam")
    parser.add_argument("--max_tokens", type=int, help="mango: budget of a micro-batch")
    parser.add_argument("--json", action="store_true", help="print the facts of grow.json")


def run(args: argparse.Namespace) -> int:
    """Grows the model and prints what was done; returns the exit code."""
    if args.data and args.operator != MANGO:
        raise ConfigError(f"--data is for mango; operator {args.operator!r} reads none.")
    if adapter_folder(args.small) is not None:
        raise ConfigError(
            f"{args.small} holds adapters, and weights are what grows; merge them into their base model first (peft's "
            "merge_and_unload, then save_pretrained)."
        )
    from transformers.utils import logging

    from treewise.experimental.grow import grow

    logging.disable_progress_bar()
    folder, gguf_file = locate(args.small)
    with tempfile.TemporaryDirectory() as unpacked:
        if gguf_file is not None:
            load_weights(args.small).save_pretrained(unpacked)
            load_tokenizer(args.small).save_pretrained(unpacked)
            folder = unpacked
        report = grow(
            folder,
            args.output,
            width=args.width,
            num_layers=args.layers,
            operator=args.operator,
            noise=args.noise,
            seed=args.seed,
            check=args.verify,
            forests=_forests(args) if args.data else (),
            rank=args.rank,
            steps=args.steps,
            learning_rate=args.learning_rate,
            max_tokens=args.max_tokens,
        )
    print(json.dumps(asdict(report), indent=2) if args.json else _text(report))
    return 0


def _forests(args: argparse.Namespace) -> list[Any]:
    from treewise.cli.data_arguments import naming_who_lacks_a_tokenizer
    from treewise.data import load_trees

    tokenizer = load_tokenizer(args.small, required=False)
    with naming_who_lacks_a_tokenizer(tokenizer, args.small, "save one there"):
        trees = load_trees(args.data, tokenizer, progress=not args.json)
    return [trees[index].forest() for index in range(len(trees))]


def _text(report: "GrowReport") -> str:
    lines = [
        f"{Path(report.source).name} -> {report.output}",
        f"  parameters   {report.num_parameters_before:,} -> {report.num_parameters_after:,}",
        f"  operator     {report.operator}: width x{report.width}, {num(report.num_layers, 'layer')}",
    ]
    if report.operator_losses:
        lines.append(f"  its loss     {report.operator_losses[0]:.4f} -> {report.operator_losses[-1]:.4f}"
                     f" in {num(report.steps or 0, 'step')}")  # fmt: skip
    if report.logit_difference is not None:
        lines.append(f"  logits       differ by {report.logit_difference:.1e} of the largest one")
    if not report.keeps_function:
        lines.append("  this operator does not keep the function: evaluate before you train on")
    lines.append(f"Go on with: treewise train CONFIG.yaml --model {report.output}")
    return "\n".join(lines)
