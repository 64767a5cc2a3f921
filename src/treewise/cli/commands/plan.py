"""`treewise plan DATA`: how trees are cut into micro-batches, and what that and other budgets should cost."""

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from annotated_types import Ge
from rich.console import Console

from treewise.base.progress import busy_with, tell_progress
from treewise.cli.config import RunConfig
from treewise.cli.data_arguments import (
    add_data_arguments,
    add_flags,
    apply_config,
    check_numbers,
    data_tokenizer,
    load_data,
    rendering_note,
)
from treewise.data import Trees
from treewise.errors import ConfigError, DataError
from treewise.models.load_costs import load_costs
from treewise.models.load_model import load_config, load_shapes
from treewise.planning.planner import plan
from treewise.planning.plans import Plan
from treewise.report import (
    BudgetMemory,
    budgets_view,
    fit_of,
    fit_view,
    mesh_view,
    plan_view,
    report_budgets,
    report_plan,
)
from treewise.tree.forest import one_forest

if TYPE_CHECKING:
    from treewise.engine.step_memory import StepMemory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_data_arguments(parser)
    add_flags(
        parser,
        "tokenizer",
        "json",
        model={"help": "folder, Hub name, .gguf file or smollm2-demo: for bytes, time and tokenizer"},
        max_tokens={"help": "budget of a micro-batch; none: all trees in one"},
        dtype={"help": "of the model, for its bytes (float32)"},
        limit={"default": None, "help": "plan the first K trees only"},
    )
    parser.add_argument("--hold", default="auto", choices=("auto", "never", "always"), help="keep open micro-batches")
    parser.add_argument("--mesh", help="sizes of tp, ep, fsdp and dp, as tp=2,fsdp=4; needs --model")
    parser.add_argument("--memory", action="store_true", help="predict the peak memory of a step (seconds)")
    parser.add_argument(
        "--gpu_memory", help="as 80GiB: says whether a step fits into one GPU, or with --mesh each process"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan of all trees side by side; returns the exit code."""
    config = apply_config(args, ("data",), dtype="float32")
    check_numbers(args, limit=Ge(1))
    if args.model is None and (args.mesh is not None or args.gpu_memory is not None):
        raise ConfigError("--mesh and --gpu_memory count the bytes of a model; name it with --model.")
    mesh = gpu = flops = memory = None
    training = {} if config is None else config.training
    if args.mesh is not None or args.gpu_memory is not None:
        from treewise.report.analysis.mesh_facts import read_bytes_setting, read_mesh  # with torch, which takes seconds

        gpu = None if args.gpu_memory is None else read_bytes_setting(args.gpu_memory)
        mesh = None if args.mesh is None else read_mesh(args.mesh)
    is_of_one_gpu = gpu is not None and mesh is None
    if args.model is not None:
        lora = None if config is None else config.lora
        flops = load_costs(args.model, args.gguf_file, lora)
        if args.memory or is_of_one_gpu:
            memory = _memory(args, config, on_gpu=is_of_one_gpu)
    data = _data(args)
    if flops is not None:
        data.check_vocabulary(flops.vocabulary)
    count = len(data) if args.limit is None else min(args.limit, len(data))
    forests = []
    with busy_with("merging trees"):
        for index in range(count):
            tell_progress("merging trees", index, count, "tree")
            forests.append(data[index].forest())
    planned = plan if flops is None else flops.plan
    sizes: dict[str, Any] = {
        "optim": training.get("optim"),
        "float32_gradients": bool(training.get("float32_gradients")),
    }
    budgets: tuple[BudgetMemory, ...] = ()
    with busy_with("planning"):
        forest = one_forest(forests)
        whole = planned(forest, args.max_tokens, hold=args.hold)
        report = report_plan(whole, flops, args.model, args.dtype, memory=memory, **sizes)
        if flops is not None and args.max_tokens is None:
            budgets = report_budgets(forest, flops, report, args.hold, memory)
    processes = None
    fit = fit_of(report, budgets, gpu) if gpu is not None and mesh is None else None
    if mesh is not None:
        import torch

        from treewise.report.analysis.mesh_facts import report_mesh

        config, dtype = load_config(args.model, args.gguf_file), getattr(torch, args.dtype)
        processes = report_mesh(config, mesh, dtype, gpu, sizes["optim"])
    if args.json:
        extra: dict[str, Any] = {"budgets": [asdict(budget) for budget in budgets]}
        extra |= {} if processes is None else {"mesh": processes.to_dict()}
        extra |= {} if fit is None else {"gpu": asdict(fit)}
        print(json.dumps(report.to_dict() | extra, indent=2))
        return 0
    if note := rendering_note(args, data):
        Console().print(note)
    Console().print(plan_view(whole, report))
    if budgets:
        Console().print(budgets_view(budgets))
    if fit is not None:
        Console().print(fit_view(fit))
    if processes is not None:
        Console().print(mesh_view(processes, report.peak_live_tokens, report.peak_gateway_tokens))
    return 0


def _memory(args: argparse.Namespace, config: RunConfig | None, *, on_gpu: bool) -> "Callable[[Plan], StepMemory]":
    """The prediction of a step's memory, with what the configuration of a run asks of the step.

    on_gpu: wherever this runs.
    """
    import torch

    from treewise.engine.step_memory import step_memory
    from treewise.nn.router_loss import router_loss_rule
    from treewise.nn.wrapped import base_model
    from treewise.objectives.registry import PREFERENCES

    training = {} if config is None else config.training
    # `auto` leaves layers alone while this prediction fits.
    checkpointing = any(training.get(name) is True for name in ("activation_checkpointing", "gradient_checkpointing"))
    lora = None if config is None else config.lora
    model = load_shapes(args.model, args.gguf_file, args.dtype, lora=lora, checkpointing=checkpointing)
    settings: dict[str, Any] = {}
    if config is not None and config.more.get("objective") not in (None, "sft", *PREFERENCES):
        from treewise.cli.commands.rl import rollout_objective

        objective = rollout_objective(config)
        settings["outputs"] = objective.outputs
        settings["measured"] = () if getattr(objective, "entropy_coefficient", 0.0) else ("entropy",)
    z_coefficient = training.get("router_z_coefficient", 0.0)
    return partial(
        step_memory,
        model,
        device_type="cuda" if on_gpu or torch.cuda.is_available() else "cpu",
        autocast=torch.bfloat16 if training.get("bf16") else None,
        router_loss=router_loss_rule(base_model(model), wants_aux=None, z_coefficient=z_coefficient),
        **settings,
    )


def _data(args: argparse.Namespace) -> Trees:
    """The trees. A tokenizer, which takes seconds out of a GGUF file, is loaded where the rows hold text."""
    if args.on_bad_record == "error":
        with suppress(DataError):  # of text, or of whatever is wrong with it: then said below
            return load_data(args, None, progress=False)
    return load_data(args, data_tokenizer(args), progress=not args.json)
