"""`treewise verify DATA --model M`: flat against tree on the user's own model and rows. Exit code 1 if they differ."""

import argparse
import json
from typing import TYPE_CHECKING

from annotated_types import Ge
from rich.console import Console

from treewise.cli.config import typed_settings
from treewise.cli.data_arguments import (
    add_data_arguments,
    add_flags,
    apply_config,
    check_numbers,
    load_data,
)
from treewise.cli.values import read_mapping
from treewise.data import Trees
from treewise.errors import ConfigError
from treewise.nn.load_model import DTYPES, load_model, load_processor
from treewise.report import verification_view
from treewise.tree.forest import WEIGHTINGS
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.objectives import Objective


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    add_flags(parser, "model", "tokenizer", "attention", "limit", "json")
    add_flags(
        parser,
        dtype={"choices": (*DTYPES, "auto")},
        device={"default": "cpu"},
        max_tokens={"help": "budget of a micro-batch; whole trees, and half of the largest, if not given"},
    )
    parser.add_argument("--objective", default="sft", help="whose loss is compared: sft, grpo, dapo, cispo, ... (sft)")
    parser.add_argument("--settings", default="{}", metavar="YAML", help="of the objective: '{clip_high: 0.28}'")
    parser.add_argument(
        "--advantages", help="from rewards: grpo, rloo, ...; the rows' own, or the objective's usual ones"
    )
    parser.add_argument("--weighting", choices=WEIGHTINGS, help="per_trajectory where not given")
    parser.add_argument(
        "--tolerance", type=float, help="relative error allowed in the gradient; if not given, by dtype"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 1 where an error is beyond its limit."""
    apply_config(args, ("data", "model"), dtype="float32", attention="auto")
    check_numbers(args, limit=Ge(0))
    from treewise.engine.engine import TreeEngine  # slow to import, as are all below
    from treewise.nn.device import chosen_device
    from treewise.objectives import DPO, KTO
    from treewise.trainer.data_loader import check_preferences
    from treewise.verification.compare import verify

    objective = _objective(args)
    device = chosen_device(args.device)
    model, tokenizer = load_model(args.model, args.gguf_file, args.dtype)
    if args.tokenizer is not None:
        tokenizer = load_processor(args.tokenizer)
    data = load_data(args, tokenizer, progress=not args.json)
    check_preferences(data, objective)
    data.check_vocabulary(model.get_input_embeddings().weight.shape[0])
    trajectories = _trajectories(data, objective, args)
    model.to(device)
    if isinstance(objective, DPO | KTO):
        from treewise.trainer.inputs import compared

        def engine() -> TreeEngine:  # as in `treewise train`, the model before its first step is the reference
            return TreeEngine(model, args.max_tokens, args.attention, processor=tokenizer)

        trajectories = compared([trajectories], objective, engine, batch_size=1)[0]
    report = verify(
        model,
        trajectories,
        args.max_tokens,
        attention=args.attention,
        objective=objective,
        tolerance=args.tolerance,
        processor=tokenizer,
    )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(verification_view(report))
    return 0 if report.passed else 1


def _objective(args: argparse.Namespace) -> "Objective":
    from treewise.objectives import objective_named

    settings = read_mapping("--settings", args.settings)
    if args.weighting is not None:
        settings["weighting"] = args.weighting
    return objective_named(args.objective, **typed_settings(args.objective, settings))


def _trajectories(data: Trees, objective: "Objective", args: argparse.Namespace) -> list[Trajectory]:
    """The first ones, of whole trees as far as advantages look at groups."""
    from treewise.objectives import DPO, PolicyGradient

    trees: list[list[Trajectory]] = []
    for tree in data:
        trees.append(tree.flat_trajectories())
        if args.limit and sum(map(len, trees)) >= args.limit:
            break
    if isinstance(objective, PolicyGradient):
        from treewise.rl.update import GIVEN, credit, judged, method_of

        method = method_of(objective, args.advantages, trees)
        assert method is not None
        trees, _ = credit(trees if method == GIVEN else judged(trees)[0], method, {})
    elif args.advantages is not None:
        raise ConfigError(f"--advantages {args.advantages}: objective {args.objective!r} takes none.")
    items = [item for tree in trees for item in tree]
    if args.limit and isinstance(objective, DPO):  # pairs stay whole
        groups = {item.group for item in items[: args.limit]}
        return [item for item in items if item.group in groups]
    return items[: args.limit or None]
