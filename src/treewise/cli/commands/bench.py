"""`treewise bench [DATA]`: treewise against flat training and tree rows, paired in one process."""

import argparse
import math
import sys
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from annotated_types import Ge, Gt
from rich.console import Console

from treewise import bench
from treewise.bench.settings import AGAINST, LAYERS, USUAL
from treewise.cli.data_arguments import add_data_arguments, apply_config, check_numbers, load_data
from treewise.errors import ConfigError, OutOfMemoryError, duration
from treewise.models.load_model import DTYPES, load_tokenizer, load_weights
from treewise.nn.attention import IMPLEMENTATIONS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DEFAULT_MODEL = {"cpu": "qwen3-17m", "cuda": "qwen3-0.6b"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--model",
        nargs="+",
        help=f"folder, Hub name, .gguf file, smollm2-demo, or a shape with random weights: {', '.join(bench.SHAPES)}",
    )
    what.add_argument("--tokenizer", help="of DATA: folder or name; the model's where not given")
    what.add_argument("--workload", nargs="+", choices=tuple(bench.KINDS), help="all, where no DATA is named")
    what.add_argument("--size", choices=bench.SIZES, help="of the workloads; cpu on a CPU, full on a GPU")
    what.add_argument("--trees", nargs="+", help="names of the trees of DATA; all without")
    what.add_argument(
        "--max_flat_tokens",
        "--max-flat-tokens",
        type=int,
        help="cut each tree of DATA after as many trajectories as fit",
    )
    against = parser.add_argument_group("contestants")
    against.add_argument("--against", nargs="+", default=list(USUAL), choices=AGAINST)
    against.add_argument("--max_tokens", nargs="+", type=int, help="budgets; a quarter of each tree")
    against.add_argument("--checkpointing", action="store_true", help="each also with gradient checkpointing")
    against.add_argument("--row_tokens", type=int, help="of a packed row of flat training; by memory")
    against.add_argument("--attention", choices=("auto", *IMPLEMENTATIONS))
    against.add_argument("--layers", choices=LAYERS, default="auto", help="of all contestants; compiled on a GPU")
    how = parser.add_argument_group("how")
    how.add_argument("--dtype", choices=DTYPES, help="float32 on a CPU, bfloat16 on a GPU")
    how.add_argument("--device", help="cuda where there is a GPU, else cpu")
    how.add_argument("--repetitions", type=int, default=3, help="after one to warm up (3)")
    how.add_argument(
        "--max_seconds",
        type=float,
        default=180.0,
        help="of measuring in all (180; inf): DATA is cut to what fits, and who still takes longer is left out",
    )
    how.add_argument("--reference", default="auto", choices=bench.REFERENCES, help="of the gradient errors")
    out = parser.add_argument_group("results")
    out.add_argument("--json", metavar="OUT", help="a file, or a folder for NAME-<hardware>.json; rows are added to it")
    out.add_argument("--name", default="bench", help="of the file (bench)")


def run(args: argparse.Namespace) -> int:
    """Measures, prints each step and each workload as it is done, and writes it; returns the exit code."""
    apply_config(args, attention="auto")
    limits = dict.fromkeys(("max_flat_tokens", "row_tokens", "max_seconds"), Gt(0))
    check_numbers(args, repetitions=Ge(1), max_tokens=Ge(1), **limits)
    if not args.data and (args.trees or args.max_flat_tokens):
        raise ConfigError("--trees and --max_flat_tokens choose out of DATA, and no DATA is named.")
    limit = "" if args.max_seconds == math.inf else f", for at most {duration(args.max_seconds)} (--max_seconds)"
    what = ", ".join(args.data or args.workload or [f"{len(bench.KINDS)} generated workloads"])
    print(f"measuring {what}: steps of {', '.join(args.against)} and treewise in turns{limit}", flush=True)
    import torch

    from treewise.bench.results import LEGEND, command_line, file_of, row_view
    from treewise.nn.device import chosen_device

    if args.json is not None and file_of(Path(args.json), args.name).exists():
        bench.load(Path(args.json), args.name)  # rows are added to it, and it is found damaged before they are measured
    device = chosen_device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    console = Console(width=None if Console().is_terminal else 200)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:  # after every step: a run that is cut short leaves what it measured
        if args.json is not None:
            bench.save(Path(args.json), bench.record([*rows, row], command_line()), args.name)

    def report(row: dict[str, Any]) -> None:
        keep(row)
        rows.append(row)
        console.print(row_view(row))

    def tell(line: str) -> None:
        print(line, flush=True)

    names = args.model or [DEFAULT_MODEL.get(device.type, DEFAULT_MODEL["cpu"])]
    settings = _settings(args, args.max_seconds / len(names))
    for name in names:
        model_of = partial(_model, name, args.gguf_file, dtype, device)
        bench.run(model_of, name, partial(_workloads, args, name, device), report, settings, tell, keep)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not any("contestants" in row for row in rows):
        raise OutOfMemoryError("nothing was measured: no model fits; choose a smaller one with --model.")
    console.print(LEGEND, highlight=False, markup=False)
    if args.json is not None:
        written = bench.save(Path(args.json), bench.record(rows, command_line()), args.name)
        console.print(f"written to {written}", highlight=False)
    return 0


def _settings(args: argparse.Namespace, max_seconds: float) -> bench.Settings:
    return bench.Settings(
        against=args.against,
        max_tokens=args.max_tokens,
        attention=args.attention,
        with_checkpointing=args.checkpointing,
        row_tokens=args.row_tokens,
        layers=args.layers,
        repetitions=args.repetitions,
        reference=args.reference,
        max_seconds=max_seconds,
    )


def _model(name: str, gguf_file: str | None, dtype: "torch.dtype", device: "torch.device") -> "PreTrainedModel":
    if name in bench.SHAPES:
        return bench.random_model(name, dtype, device)
    from treewise.nn.device import on_device
    from treewise.nn.model_checks import zero_dropout

    model = load_weights(name, gguf_file, str(dtype).removeprefix("torch."))
    note = zero_dropout(model)
    if note is not None:
        print(f"{name}: {note}", file=sys.stderr)
    return on_device(model, device).train()


def _workloads(
    args: argparse.Namespace, name: str, device: "torch.device", vocabulary: int
) -> Iterator[bench.Workload]:
    """The trees of DATA, then the generated ones; all, where none is named."""
    if args.data:
        yield from _trees(args, name, vocabulary)
    for kind in args.workload or ([] if args.data else bench.KINDS):
        yield bench.make(kind, args.size or ("full" if device.type == "cuda" else "cpu"), vocabulary)


def _trees(args: argparse.Namespace, name: str, vocabulary: int) -> Iterator[bench.Workload]:
    tokenizer = None
    if args.tokenizer is not None or name not in bench.SHAPES:
        tokenizer = load_tokenizer(args.tokenizer or name, None if args.tokenizer else args.gguf_file, required=False)
    data = load_data(args, tokenizer, progress=False)
    data.check_vocabulary(vocabulary)
    missing = set(args.trees or ()) - {tree.name for tree in data}
    if missing:
        raise ConfigError(f"--trees: no tree {sorted(missing)[0]!r} in the data.")
    for tree in data:
        if args.trees and tree.name not in args.trees:
            continue
        items = tree.flat_trajectories()
        totals = zip(items, accumulate(map(len, items)), strict=True)
        fitting = [item for item, total in totals if total <= (args.max_flat_tokens or total)]
        yield bench.Workload(tree.name, fitting or items[:1], may_be_cut=args.max_flat_tokens is None)
