"""`treewise profile DATA --model M`: where the time of a training step goes, tree beside flat, by part."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from annotated_types import Ge
from rich.console import Console

from treewise.base.columns import Columns
from treewise.cli import training_run
from treewise.cli.config import RunConfig
from treewise.cli.data_arguments import (
    add_data_arguments,
    add_flags,
    apply_config,
    check_numbers,
    data_tokenizer,
    load_data,
)
from treewise.errors import ConfigError, num
from treewise.models.load_model import load_weights
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from treewise.engine.profiling import Profile

SEED = 42  # of adapters, as in training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    add_flags(parser, "model", "tokenizer", "dtype", "device", "attention", "limit", "json")
    add_flags(parser, max_tokens={"type": _budget, "help": "budget of a micro-batch, or auto; whole trees without"})
    parser.add_argument("--steps", type=int, default=3, help="profiled steps, after one that warms up (3)")
    parser.add_argument("--no_flat", action="store_true", help="leave flat training out")
    parser.add_argument("--trace", metavar="FILE", help="Chrome trace of the last step on the tree, as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints seconds and FLOP/s by part."""
    config = apply_config(args, ("data", "model"), dtype="float32", attention="auto")
    check_numbers(args, limit=Ge(0), steps=Ge(1))
    trace = _writable(args.trace)
    from treewise.bench.contestants import plain_parts  # slow to import, as are all below
    from treewise.bench.flat import FlatRows, can_pack
    from treewise.engine.engine import TreeEngine
    from treewise.nn.device import chosen_device, on_device
    from treewise.nn.wrapped import num_embeddings
    from treewise.trainer.step import optimizer_bytes

    device = chosen_device(args.device)
    model = on_device(_model(args, config), device).train()
    data = load_data(args, data_tokenizer(args), progress=False)
    data.check_vocabulary(num_embeddings(model))
    items = [item for tree in data for item in tree.flat_trajectories()][: args.limit or None]
    forest = Forest.from_trajectories(items)
    profiles: dict[str, Profile] = {}
    if not args.no_flat:
        lm = plain_parts(model)
        longest = max(map(len, items))
        rows = FlatRows(lm, items, max_row_tokens=max(2_048, longest), packs=can_pack(lm.model))
        profiles["flat"] = _profiled(rows.step, model, device, args.steps, None)
    engine = TreeEngine(model, args.max_tokens, args.attention, reserve_bytes=optimizer_bytes(model, None))
    profiles["tree"] = _profiled(lambda: engine.step(forest), model, device, args.steps, trace)
    facts = {
        "tree_tokens": forest.num_tokens,
        "flat_tokens": forest.num_flat_tokens,
        "max_tokens": engine.max_tokens,
        "max_tokens_setting": args.max_tokens,
        "trained_parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        **{name: asdict(profile) for name, profile in profiles.items()},
    }
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    console = Console(width=None if Console().is_terminal else 120)
    console.print(
        f"{forest.num_tokens:,} tree tokens of {forest.num_flat_tokens:,} flat ones; mean of {num(args.steps, 'step')}"
    )
    if args.max_tokens == "auto":
        console.print(f"max_tokens: auto chose {num(engine.max_tokens or 0, 'token')} by the memory that is free here")
    console.print(_view(profiles))
    if trace is not None:
        console.print(f"trace written to {trace}", highlight=False)
    return 0


def _budget(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of tokens, or auto") from None


def _model(args: argparse.Namespace, config: RunConfig | None) -> "PreTrainedModel":
    """The model with the adapters of the configuration, without dropout, with a line on stderr where it had some."""
    from treewise.nn.model_checks import zero_dropout

    bits = None if config is None else training_run.bits_of(config)
    model = load_weights(args.model, args.gguf_file, args.dtype, bits)
    if config is not None:
        model = training_run.with_adapters(model, config, config.training.get("seed", SEED))
    note = zero_dropout(model)
    if note is not None:
        print(f"{args.model}: {note}", file=sys.stderr)
    return model


def _writable(file: str | None) -> Path | None:
    """The file of the trace, tried before anything runs: torch's exporter reports a failure on stderr alone."""
    if file is None:
        return None
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:  # a run that fails leaves no empty file
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--trace {file}: {error.strerror}; name a file that can be written.") from error
    return path


def _profiled(
    step: Callable[[], object], model: "nn.Module", device: "torch.device", num_steps: int, trace: Path | None
) -> "Profile":
    """The mean of so many steps, after one that warms up. trace: of the last one."""
    from treewise.engine.profiling import mean, profile_step
    from treewise.nn.whole_gradients import zero_gradients

    step()
    profiles = []
    for index in range(num_steps):
        zero_gradients(model)
        profiles.append(profile_step(step, device, trace if index == num_steps - 1 else None))
    zero_gradients(model)
    return mean(profiles)


def _view(profiles: dict[str, "Profile"]) -> Columns:
    from treewise.engine.profiling import PARTS

    names = ["part", *(f"{name}, {unit}" for name in profiles for unit in ("s", "%", "GFLOP/s"))]
    rows: list[list[str]] = []
    for part in [part for part in PARTS if any(part in one.parts for one in profiles.values())]:
        cells = [part]
        for profile in profiles.values():
            cost = profile.parts.get(part)
            if cost is None:
                cells += ["", "", ""]
                continue
            rate = f"{cost.flops_per_second / 1e9:,.1f}" if cost.flops else ""
            cells += [f"{cost.seconds:.3f}", f"{100 * cost.seconds / profile.seconds:.0f}", rate]
        rows.append(cells)
    totals = ["all"]
    for profile in profiles.values():
        flops = sum(cost.flops for cost in profile.parts.values())
        totals += [f"{profile.seconds:.3f}", "100", f"{flops / profile.seconds / 1e9:,.1f}"]
    return Columns("", names, [*rows, totals])
