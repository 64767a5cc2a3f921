"""`treewise verify DATA --model M`: flat against tree on the user's own model and rows. Exit code 1 if they differ.

With `--config RUN.yaml` what the run trains is compared: its objective and what it needs of rewards and a reference,
adapters, losses on routers, budget, precision.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from annotated_types import Ge
from rich.console import Console

from treewise.cli.config import RunConfig, preference_objective, reference_of, typed_settings
from treewise.cli.data_arguments import (
    add_data_arguments,
    add_flags,
    apply_config,
    check_numbers,
    load_data,
)
from treewise.cli.values import read_mapping
from treewise.data import Trees
from treewise.errors import ConfigError, num
from treewise.models.load_model import DTYPES, load_model, load_processor, load_weights
from treewise.report import verification_view
from treewise.tree.forest import WEIGHTINGS, Forest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treewise.engine.engine import TreeEngine
    from treewise.nn.flops import FlopModel
    from treewise.objectives import Objective
    from treewise.trainer import TreeTrainingArguments

MAX_TOKENS = 1024  # flat ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    add_flags(parser, "model", "tokenizer", "attention", "json")
    add_flags(
        parser,
        dtype={"choices": (*DTYPES, "auto")},
        device={"default": "cpu"},
        limit={"default": MAX_TOKENS, "help": f"the first rows, up to so many flat tokens ({MAX_TOKENS:,}; 0 for all)"},
        max_tokens={"help": "budget of a micro-batch; whole trees if not given. Smaller ones are compared, too"},
    )
    parser.add_argument("--objective", help="whose loss is compared: sft, grpo, dapo, cispo, ... (the run's, or sft)")
    parser.add_argument("--settings", metavar="YAML", help="of the objective: '{clip_high: 0.28}'")
    parser.add_argument(
        "--advantages", help="from rewards: grpo, rloo, ...; the rows' own, or the objective's usual ones"
    )
    parser.add_argument("--weighting", choices=WEIGHTINGS, help="per_trajectory where not given")
    parser.add_argument(
        "--tolerance", type=float, help="relative error allowed in the gradient; if not given, by dtype"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 1 where an error is beyond its limit."""
    config = apply_config(args, ("data", "model"), dtype="float32", attention="auto")
    check_numbers(args, limit=Ge(0))
    from treewise.nn.device import chosen_device, on_device  # slow to import, as are all below
    from treewise.nn.model_flops import flop_model
    from treewise.nn.wrapped import num_embeddings
    from treewise.objectives.protocol import may_merge_trees
    from treewise.trainer.inputs import check_preferences
    from treewise.trainer.run_summary import num_optimizer_steps
    from treewise.verification.compare import verify

    arguments = None if config is None else _arguments(config)
    objective = _objective(args, config)
    device = chosen_device(args.device)
    model, tokenizer = _loaded(args, config, arguments)
    data = load_data(args, tokenizer, progress=not args.json)
    check_preferences(data, objective)
    data.check_vocabulary(num_embeddings(model))
    on_device(model, device)
    settings: dict[str, Any] = {} if arguments is None else _settings(arguments)
    forest, is_cut = _rows(data, objective, args, config)
    if may_merge_trees(objective) if arguments is None else arguments.merges_trees(objective):
        forest = Forest.from_trajectories(forest.trajectories, tree_of=range(forest.num_trajectories))
    print(_first_line(forest, flop_model(model), is_cut=is_cut), file=sys.stderr, flush=True)
    num_updates = 1 if arguments is None else num_optimizer_steps(arguments, len(data))
    forest = _with_streams(forest, objective, config, _engines(args, config, model, settings), num_updates)
    report = verify(
        model,
        forest,
        args.max_tokens,
        attention=args.attention,
        objective=objective,
        tolerance=args.tolerance,
        processor=tokenizer,
        **settings,
    )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(verification_view(report))
    return 0 if report.passed else 1


# -- what a run's configuration says ----------------------------------------------------------------------------------


def _arguments(config: RunConfig) -> "TreeTrainingArguments":
    from treewise.cli.training_run import training_arguments

    sizes = dict.fromkeys(("tp_size", "ep_size", "context_size"), 1)  # this process has the whole model
    return training_arguments(replace(config, training={**config.training, **sizes, "report_to": "none"}))


def _settings(arguments: "TreeTrainingArguments") -> Any:
    import torch

    precision = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else None
    return {
        "temperature": arguments.temperature,
        "offload": arguments.offload,
        "router_z_coefficient": arguments.router_z_coefficient,
        "router_loss_choices": arguments.router_loss_choices,
        "autocast": precision,
    }


def _objective(args: argparse.Namespace, config: RunConfig | None) -> "Objective":
    """The one of the flags, else the run's."""
    from treewise.cli.commands.rl import rollout_objective
    from treewise.objectives import objective_named
    from treewise.objectives.registry import PREFERENCES

    if args.objective is not None or config is None:
        name, settings = args.objective or "sft", read_mapping("--settings", args.settings or "{}")
        weighting = {} if args.weighting is None else {"weighting": args.weighting}
        return objective_named(name, **typed_settings(name, {**settings, **weighting}))
    if args.settings is not None:
        raise ConfigError("--settings are those of --objective; a run's are in its configuration.")
    name = config.more.get("objective")
    objective: Any
    if name in (None, "sft"):  # weighting and the like, keys of `treewise train`, are settings of `treewise rl`
        objective = objective_named("sft", **typed_settings("sft", config.more.get("objective_settings") or {}))
    else:
        objective = preference_objective(config) if name in PREFERENCES else rollout_objective(config)
    return objective if args.weighting is None else replace(objective, weighting=args.weighting)


def _loaded(
    args: argparse.Namespace, config: RunConfig | None, arguments: "TreeTrainingArguments | None"
) -> tuple["PreTrainedModel", object]:
    """The model and its tokenizer or processor; with the run's adapters, whose noise shows what an identity hides."""
    if config is None or arguments is None:
        model, tokenizer = load_model(args.model, args.gguf_file, args.dtype)
    else:
        from treewise.cli.training_run import bits_of, with_adapters
        from treewise.nn.wrapped import stir_adapters

        run = replace(config, model=args.model, gguf_file=args.gguf_file, dtype=args.dtype)
        model = load_weights(run.model, run.gguf_file, run.dtype, bits_of(run))
        tokenizer = load_processor(run.model, run.gguf_file, required=False)
        if run.lora is not None:
            model = with_adapters(model, run, arguments.seed)
            stir_adapters(model)
    return model, tokenizer if args.tokenizer is None else load_processor(args.tokenizer)


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(
    data: Trees, objective: "Objective", args: argparse.Namespace, config: RunConfig | None
) -> tuple[Forest, bool]:
    """The first ones, with advantages over their whole groups; and whether they are cut short."""
    from treewise.objectives import PolicyGradient
    from treewise.verification.rows import first_rows

    trees: list[list[Any]] = []
    total = 0
    for tree in data:
        trees.append(tree.labelled_trajectories())
        total += sum(map(len, trees[-1]))
        if args.limit and total >= args.limit and len(trees) > 1:
            break
    more = {} if config is None else config.more
    if isinstance(objective, PolicyGradient):
        from treewise.rl.update import GIVEN, credit, judged, method_of

        settings = {} if args.advantages else more.get("advantages_settings") or {}
        method = method_of(objective, args.advantages or more.get("advantages"), trees, settings)
        assert method is not None
        trees, _ = credit(trees if method == GIVEN else judged(trees)[0], method, settings)
    elif args.advantages is not None:
        raise ConfigError(f"--advantages {args.advantages}: {type(objective).__name__} takes none.")
    return first_rows(trees, args.limit, whole_groups=getattr(objective, "needs_whole_groups", False))


def _first_line(forest: Forest, costs: "FlopModel", *, is_cut: bool) -> str:
    """What is compared, before it begins."""
    rows = f"{num(forest.num_trajectories, 'trajectory', 'trajectories')} of {num(forest.num_trees, 'tree')}"
    rows += ", cut short to fit --limit" if is_cut else ""
    return (
        f"comparing {rows}: {num(forest.num_flat_tokens, 'flat token')}, "
        f"{num(forest.num_tokens, 'tree token')}, by FLOPs {costs.native_flat(forest) / costs.tree(forest):.2f} x"
    )


def _engines(
    args: argparse.Namespace, config: RunConfig | None, model: "PreTrainedModel", settings: Any
) -> Callable[[], tuple["TreeEngine", "TreeEngine | None"]]:
    """Makes engines that score: of the model, and of the reference that the run names."""

    def make() -> tuple["TreeEngine", "TreeEngine | None"]:
        from treewise.engine.engine import TreeEngine
        from treewise.nn.device import on_device

        reference = None if config is None else reference_of(config)
        temperature = settings.get("temperature", 1.0)
        own, other = (
            None if each is None else TreeEngine(each, args.max_tokens, args.attention, temperature=temperature)
            for each in (model, reference if reference is None else on_device(reference, model.device))
        )
        assert own is not None
        return own, other

    return make


def _with_streams(
    forest: Forest,
    objective: "Objective",
    config: RunConfig | None,
    engines: Callable[[], tuple["TreeEngine", "TreeEngine | None"]],
    num_updates: int,
) -> Forest:
    """The rows with the log-probs that the run computes before its first step: the policy's and the reference's."""
    from treewise.objectives import DPO, KTO, PolicyGradient
    from treewise.rl.update import Update, scored, with_streams
    from treewise.trainer.references import compared
    from treewise.verification.rows import of_trees

    items = list(forest.trajectories)
    if isinstance(objective, DPO | KTO):

        def reference() -> "TreeEngine":  # where the run names none, the model before its first step
            own, other = engines()
            return own if other is None else other

        return Forest.from_trajectories(compared([items], objective, reference, batch_size=1)[0])
    if not isinstance(objective, PolicyGradient):
        return forest
    more: Any = {} if config is None else config.more
    update = with_streams(
        Update([items]),
        objective,
        num_updates=num_updates,
        old_logprobs=more.get("old_logprobs", "auto"),
        has_reference=more.get("reference") is not None,
    )
    if update.computed_streams:
        own, other = engines()
        update = scored(update, own, batch_size=1, reference=other)
    return of_trees(forest, range(len(items)), update.trees[0])
