"""Stages of `make gpu` (`benchmarks/gpu.py`), each a process of its own that saves what it has as it has it.

python benchmarks/gpu_stages.py kernels --device cuda --seconds 120 --out kernels.json
"""

import argparse
import gc
import json
import statistics
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from treewise.bench import make, random_model
from treewise.bench.calibration.measure import calibrate
from treewise.bench.calibration.rates import as_json
from treewise.bench.contestants import fuse
from treewise.bench.gpu_facts import KernelChecks, gpu_facts
from treewise.cli.commands.doctor import case_line
from treewise.cli.main import main as treewise
from treewise.engine.engine import TreeEngine
from treewise.engine.profiling import profile_step
from treewise.errors import TreewiseError
from treewise.nn.device import matmul_flops, synchronized_clock
from treewise.nn.model import split_model
from treewise.nn.model_flops import flop_model
from treewise.nn.whole_gradients import zero_gradients
from treewise.report.analysis.machine_facts import machine_facts
from treewise.tree.forest import Forest

MODEL = {"full": "qwen3-1.7b", "tiny": "qwen3-tiny"}
SMALL_MODEL = {"full": "qwen3-0.6b", "tiny": "qwen3-tiny"}
LARGE_MODEL = {"full": "qwen3-8b", "tiny": "qwen3-tiny"}
LARGEST_MODEL = {"full": "qwen3-14b", "tiny": "qwen3-tiny"}
MIXTURE = {"full": "qwen3-30b-a3b", "tiny": "mixture-tiny"}
BUDGET = {"full": 5000, "tiny": 20}
# A third and a tenth of the trees of ratio-6.5 and tau2 (16,920 and 19,820 tokens), and of 164k-83k.
BUDGETS = {"full": ("6000", "2000"), "tiny": ("20",)}
LONG_BUDGETS = {"full": ("27700", "8300"), "tiny": ("20",)}
LAYERS = ("plain", "compiled", "whole", "liger")  # whole: compiled with attention inside
NUM_STEPS = 3  # that are timed
CALIBRATION_SECONDS = {"full": 60.0, "tiny": 2.0}
NUM_KERNELS = 20  # that are named, by their time


def save(out: Path, results: Any) -> None:
    """Whole or not at all: who ends this process may read the file."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(out)


def found(args: argparse.Namespace) -> int:
    """Facts of the machine and the rate of products."""
    device = torch.device(args.device)
    facts: dict[str, Any] = {**machine_facts(device), "card": gpu_facts(device)}
    save(args.out, facts)
    facts["products"] = {}
    for dtype in (torch.bfloat16, torch.float32):
        if (rate := matmul_flops(device.type, dtype)) is not None:
            facts["products"][str(dtype).removeprefix("torch.")] = rate
    save(args.out, facts)
    for title, lines in facts.items():
        for name, text in lines.items():
            print(f"{title}: {name}: {text}")
    return 0


def calibration(args: argparse.Namespace) -> int:
    """What products, attention, element-wise kernels, launches and copies take: `predict_gpu.py` reads it."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seconds = min(args.seconds, CALIBRATION_SECONDS[args.size])
    found = calibrate(device, dtype, MODEL[args.size], size=args.size, seconds=seconds, say=print)
    save(args.out, json.loads(as_json(found)))
    return 0


def kernels(args: argparse.Namespace) -> int:
    """The cases of `treewise doctor --gpu`."""
    device, checks = torch.device(args.device), KernelChecks()

    def on_case(name: str, each: dict[str, Any]) -> None:
        print(case_line(name, each))
        save(args.out, checks.facts(device))

    checks.run(device, perf_counter() + args.seconds, on_case=on_case)
    facts = checks.facts(device)
    save(args.out, facts)
    return 0 if facts["passed"] else 1


def bench(
    args: argparse.Namespace,
    model: str,
    workloads: tuple[str, ...],
    against: tuple[str, ...],
    budgets: tuple[str, ...],
) -> int:
    """`treewise bench`, which saves after each step."""
    size = ("--size", "tiny") if args.size == "tiny" else ()
    seconds = str(max(1.0, args.seconds))
    words = ["bench", "--device", args.device, "--model", model, "--workload", *workloads, "--against", *against, *size]
    words += ["--max_tokens", *budgets, "--reference", "flat", "--repetitions", "2"]
    return treewise([*words, "--max_seconds", seconds, "--json", str(args.out)])


def speed(args: argparse.Namespace) -> int:
    """Whole trees, and a third and a tenth of them, beside packed flat rows; layers of both compiled."""
    return bench(args, MODEL[args.size], ("ratio-6.5", "tau2"), ("flat",), BUDGETS[args.size])


def large(args: argparse.Namespace) -> int:
    """The same with a model of 8B."""
    return bench(args, LARGE_MODEL[args.size], ("ratio-6.5", "tau2"), ("flat",), BUDGETS[args.size])


def largest(args: argparse.Namespace) -> int:
    """The same with a model of 14B, where the card holds it."""
    return bench(args, LARGEST_MODEL[args.size], ("tau2",), ("flat",), BUDGETS[args.size])


def long(args: argparse.Namespace) -> int:
    """A tree of long paths."""
    return bench(args, MODEL[args.size], ("164k-83k",), ("flat",), LONG_BUDGETS[args.size])


def mixture(args: argparse.Namespace) -> int:
    """A mixture of experts, as many layers as fit: whole trees and a budget beside packed flat rows."""
    return bench(args, MIXTURE[args.size], ("ratio-6.5",), ("flat",), BUDGETS[args.size])


def trl(args: argparse.Namespace) -> int:
    """TRL's tree rows, with compiled layers and with Liger's."""
    return bench(args, SMALL_MODEL[args.size], ("tau2",), ("flat", "trl", "trl-liger"), BUDGETS[args.size])


def layers(args: argparse.Namespace) -> int:
    """Whole trees of two lengths through plain, compiled and Liger's layers: seconds, launches, the part of the seconds
    in which a kernel runs, MFU. The second length is compiled no more."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results: dict[str, Any] = {"model": MODEL[args.size], "dtype": str(dtype), "layers": {}}
    has_failed = False
    for name in LAYERS:
        found: dict[str, Any] = {}
        results["layers"][name] = found
        try:
            model = random_model(MODEL[args.size], dtype, device)
            fuse(split_model(model), name)
            for workload in ("ratio-6.5", "tau2"):
                found[workload] = _steps_of(model, workload, args.size, device)
                save(args.out, results)
                print(name, workload, found[workload])
        except TreewiseError as error:  # liger-kernel is not installed, or not for a CPU
            found["skipped"] = str(error)
            print(f"{name}: {error}")
        except Exception as error:  # of one kind, or no memory: the next ones run
            found["failed"], has_failed = told(error), True
        save(args.out, results)
        model = None
        release_memory()
    return int(has_failed)


def told(error: Exception) -> str:
    """An error in a line; the whole of it goes to the log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


def release_memory() -> None:
    """Graphs of a step that was interrupted, and cached blocks of the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _steps_of(model: Any, workload: str, size: str, device: torch.device) -> dict[str, Any]:
    vocabulary, flops = model.get_input_embeddings().weight.shape[0], flop_model(model)
    forest = Forest.from_trajectories(make(workload, size, vocabulary).trajectories)
    engine = TreeEngine(model, None, check=False)
    seconds = []
    for _ in range(NUM_STEPS + 1):
        begin = synchronized_clock(device)
        engine.step(forest)
        seconds.append(synchronized_clock(device) - begin)
        zero_gradients(model)
    kernels, median = _kernels(engine, forest, device), statistics.median(seconds[1:])
    zero_gradients(model)
    rate = matmul_flops(device.type, model.dtype, model.config.hidden_size)
    return {
        "tree_tokens": forest.num_tokens,
        "first_seconds": seconds[0],
        "seconds": median,
        "launches": kernels["launches"],
        "launches_per_layer": kernels["launches"] / model.config.num_hidden_layers,
        "busy": kernels["kernel_seconds"] / median,
        "mfu": None if rate is None else flops.tree(forest) / median / rate,
    }


def profiled(args: argparse.Namespace) -> int:
    """A whole tree, and the same under a budget: seconds by part, launches, the kernels that take longest."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(MODEL[args.size], dtype, device)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    forest = Forest.from_trajectories(make("ratio-6.5", args.size, vocabulary).trajectories)
    results: dict[str, Any] = {"model": MODEL[args.size], "workload": "ratio-6.5", "dtype": str(dtype)}
    has_failed = False
    for name, budget in (("whole", None), (f"at {BUDGET[args.size]}", BUDGET[args.size])):
        try:
            engine = TreeEngine(model, budget, check=False)
            engine.step(forest)
            zero_gradients(model)
            found = asdict(profile_step(lambda engine=engine: engine.step(forest), device))
            zero_gradients(model)
            results[name] = {**found, **_kernels(engine, forest, device)}
        except Exception as error:  # the tree may not fit, and a part of it may
            results[name], has_failed = {"failed": told(error)}, True
            zero_gradients(model)
            release_memory()
        save(args.out, results)
        if "failed" in results[name]:
            continue
        each = results[name]
        print(f"{name}: {each['seconds']:.3f} s, kernels {each['kernel_seconds']:.3f} s, {each['launches']:,} launches")
        for part, cost in each["parts"].items():
            print(f"  {part:32} {cost['seconds']:.3f} s  {cost['calls']:,} operations")
        for kernel in each["kernels"]:
            print(f"  {1000 * kernel['seconds']:9.2f} ms {kernel['calls']:6} x {kernel['name'][:100]}")
    return int(has_failed)


def _kernels(engine: TreeEngine, forest: Forest, device: torch.device) -> dict[str, Any]:
    """Kernels of a step by name, on a CPU its operations."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as record:
        engine.step(forest)
        if is_gpu:
            torch.cuda.synchronize()
    seconds = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    averages = [each for each in record.key_averages() if getattr(each, seconds) > 0]
    ordered = sorted(averages, key=lambda each: -getattr(each, seconds))
    named = [{"name": each.key, "seconds": getattr(each, seconds) / 1e6, "calls": each.count} for each in ordered]
    return {
        "kernel_seconds": sum(each["seconds"] for each in named),
        "launches": sum(each["calls"] for each in named),
        "kernels": named[:NUM_KERNELS],
    }


STAGES = {
    **{
        "found": found,
        "calibration": calibration,
        "kernels": kernels,
        "layers": layers,
        "speed": speed,
        "large": large,
        "profile": profiled,
    },
    **{"long": long, "largest": largest, "mixture": mixture, "trl": trl},
}


def main() -> int:
    """Runs one stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=MODEL, default="full")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    return STAGES[args.stage](args)


if __name__ == "__main__":
    sys.exit(main())
