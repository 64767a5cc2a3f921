"""Seconds of steps on a card, predicted from its calibration; needs no GPU.

    python benchmarks/predict_gpu.py [--calibration FILE | --gpu H200] [--model qwen3-8b ...] [--parts 1 3]
    python benchmarks/predict_gpu.py --calibration FILE --measured RESULTS    its error on steps that were measured
    python benchmarks/predict_gpu.py --on_cpu                  calibrates this CPU, predicts and measures
    python benchmarks/predict_gpu.py --profile PROFILE --out FILE    mean rates, from the profile of one step
    python benchmarks/predict_gpu.py --commit_table            what `tests/test_predicted_steps.py` holds to

A step is recorded on tensors without data (`step_operations.py`), with plain layers; what each operation takes is read
from what `treewise doctor --gpu --calibrate` or `make gpu` measured, or, outside of its domain, from the roofline. With
`--gpu` all of it is the roofline of a data sheet, which is a bound and no forecast. The last column says how much of
the device's seconds are within the domain.
"""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch
from count_gpu import MODELS, RESULTS, WORKLOADS, model_without_data
from step_operations import of_flat, of_tree

from treewise.bench import SHAPES, make, random_model
from treewise.bench.calibration.measure import calibrate
from treewise.bench.calibration.rates import (
    ATTENTION,
    DATA_SHEETS,
    MOVED,
    Calibration,
    Forecast,
    Operation,
    Roofline,
    as_json,
    load,
    of_data_sheet,
    work,
)
from treewise.bench.workloads import Workload
from treewise.engine.engine import TreeEngine
from treewise.nn.whole_gradients import zero_gradients
from treewise.planning.planner import plan
from treewise.tree.forest import Forest

ROW_TOKENS = 16_384  # of packed flat rows, as `treewise bench` has them
COMMITTED, COMMITTED_MODEL = RESULTS / "predicted-steps.json", "qwen3-1.7b"
# Budgets, as parts of the tree: in the table, and on a CPU. Most operations are those of budgets.
COMMITTED_PARTS = {name: (1, 3) if name in ("tau2", "ratio-6.5") else (1,) for name in WORKLOADS}
PARTS, ALLOWED = (1, 3), 1.03  # of the committed seconds


class Case(NamedTuple):
    """A contestant of `treewise bench`: `flat`, `tree` or `tree@BUDGET`."""

    model: str
    workload: str
    contestant: str


def predicted(
    case: Case, calibration: Calibration, size: str = "full", layers: int | None = None, attention: str = "flex"
) -> Forecast:
    """A step of a case. layers: of the model; None: all."""
    dtype = torch.bfloat16 if calibration.item_bytes == 2 else torch.float32
    return calibration.step(operations_of(case, dtype, size, layers, attention))


def operations_of(
    case: Case, dtype: torch.dtype, size: str = "full", layers: int | None = None, attention: str = "flex"
) -> list[Operation]:
    """What a step of a case asks of the device."""
    model = shape_without_data(case.model, layers, dtype)
    items = workload_of(case.model, case.workload, size).trajectories
    if case.contestant == "flat":
        return of_flat(model, items, ROW_TOKENS)
    _, _, budget = case.contestant.partition("@")
    return of_tree(model, plan(Forest.from_trajectories(items), int(budget) if budget else None), attention)


@cache
def shape_without_data(name: str, layers: int | None, dtype: torch.dtype) -> Any:
    """The model of a shape, or the first layers of it."""
    return model_without_data(name, layers, dtype)


@cache
def workload_of(model: str, name: str, size: str) -> Workload:
    """A workload of a model's tokens."""
    return make(name, size, SHAPES[model][1]["vocab_size"])


def table(parts: dict[str, tuple[int, ...]] = COMMITTED_PARTS) -> dict[str, dict[str, float]]:
    """Milliseconds of steps on an H100 by workload and contestant: what is committed. Layers are equal, so a model of
    one and one of two stand for all of them."""
    calibration = load(RESULTS / "calibration-nvidia-h100-80gb-hbm3.json")
    found: dict[str, dict[str, float]] = {}
    more = SHAPES[COMMITTED_MODEL][1]["num_hidden_layers"] - 1
    for workload, of in parts.items():
        tokens = Forest.from_trajectories(workload_of(COMMITTED_MODEL, workload, "full").trajectories).num_tokens
        found[workload] = {}
        for name in ("tree" if part == 1 else f"tree@{-(-tokens // part)}" for part in of):
            case = Case(COMMITTED_MODEL, workload, name)
            one, two = (predicted(case, calibration, layers=layers).seconds for layers in (1, 2))
            found[workload][name] = round(1e3 * (one + more * (two - one)), 1)
    return found


def of_profile(profile: Path) -> Calibration:
    """Mean rates of a card on which no calibration ran, from the kernels of one step: the recorded work of each kind
    over its seconds. Nothing is within a domain. Attention of flat rows, which it has not, is taken as that of trees.
    """
    found = json.loads(profile.read_text())
    case = Case(found["model"], found["workload"], found["contestant"])
    flops, moved = dict.fromkeys(("product", "attention", "attention_backward"), 0.0), 0.0
    for each in operations_of(case, torch.bfloat16):
        if each.kind in MOVED:
            moved += each.size[0]
        elif each.kind in flops:
            flops[each.kind] += work(each)
    seconds = found["kernel_seconds"]
    rates = {kind: each / seconds[kind] for kind, each in flops.items()}
    forward, backward = rates["attention"], rates["attention_backward"]
    attention = dict(zip(ATTENTION, (forward, backward, forward, backward), strict=True))
    bandwidth = moved / seconds["moved"]
    return Calibration(
        Roofline(rates["product"], bandwidth, bandwidth, attention),
        host_seconds=found["launches"]["seconds"] / found["launches"]["calls"],
        about={
            **{key: found[key] for key in ("card", "measured", "versions", "commit")},
            "of": f"the profile of one step ({profile.name}); no calibration ran on this card",
            "domain": "none: mean rates of that step stand in everywhere",
        },
    )


def changed(committed: dict[str, dict[str, float]], now: dict[str, dict[str, float]]) -> list[str]:
    """A sentence for each step that takes 3 % more than the committed one, or less."""
    rows = [(workload, name, each) for workload, of in committed.items() for name, each in of.items()]
    return [
        f"{workload}, {name}: {now[workload][name]:.1f} ms predicted, {before:.1f} committed "
        f"({now[workload][name] / before - 1:+.1%})"
        for workload, name, before in rows
        if not 1 / ALLOWED <= now[workload][name] / before <= ALLOWED
    ]


def measured_cases(results: Path) -> Iterator[tuple[Case, str, float]]:
    """Cases of a file of `treewise bench`, with the size of their workloads' and their seconds."""
    for row in json.loads(results.read_text())["rows"]:
        for name, each in row["contestants"].items():
            yield Case(row["model"], row["workload"], name), row.get("size", "full"), each["seconds"]["median"]


def print_row(case: Case, found: Forecast, measured: float | None = None) -> None:
    """A line of the table."""
    cells = [*case, f"{found.seconds:.3f}", f"{found.host_seconds:.3f}", f"{found.num_operations:,}"]
    cells += [f"{found.by_kind.get('product', 0):.3f}"]
    cells += [f"{sum(each for kind, each in found.by_kind.items() if 'attention' in kind):.3f}"]
    cells += [f"{found.measured_part:.0%}"]
    if measured is not None:
        cells += [f"{measured:.3f}", f"{found.seconds / measured - 1:+.0%}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def print_head(with_measured: bool) -> None:
    """The head of the table."""
    names = [
        "model",
        "workload",
        "contestant",
        "s",
        "host, s",
        "operations",
        "products, s",
        "attention, s",
        "in domain",
    ]
    names += ["measured, s", "error"] if with_measured else []
    print(f"| {' | '.join(names)} |\n|---|---|---|{'---:|' * (len(names) - 3)}")


def on_cpu(model: str, seconds: float, out: Path | None) -> None:
    """Calibrates this CPU with one thread, and holds predicted steps against measured ones, by CPU time."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    calibration = calibrate(cpu, torch.float32, model, size="cpu", seconds=seconds, say=print)
    if out is not None:
        out.write_text(as_json(calibration))
    real = random_model(model, torch.float32, cpu)
    print_head(with_measured=True)
    for workload in WORKLOADS:
        forest = Forest.from_trajectories(workload_of(model, workload, "cpu").trajectories)
        for part in PARTS:
            budget = None if part == 1 else -(-forest.num_tokens // part)
            case = Case(model, workload, "tree" if budget is None else f"tree@{budget}")
            found = predicted(case, calibration, "cpu", attention="cascade")
            engine, least = TreeEngine(real, budget, attention="cascade", check=False), float("inf")
            for _ in range(3):
                begin = process_time()
                engine.step(forest)
                least = min(least, process_time() - begin)
                zero_gradients(real)
            print_row(case, found, least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, help="a file of doctor --gpu --calibrate, or of make gpu")
    parser.add_argument("--gpu", choices=DATA_SHEETS, help="the roofline of a data sheet in its place")
    parser.add_argument("--model", nargs="+", choices=(*MODELS, "qwen3-17m"), default=["qwen3-1.7b"])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 3], help="budget: tree tokens over this (1 3)")
    parser.add_argument("--measured", type=Path, help="a JSON of treewise bench: say the error")
    parser.add_argument("--on_cpu", action="store_true", help="calibrate, predict and measure on this CPU")
    parser.add_argument("--seconds", type=float, default=60.0, help="of --on_cpu's calibration (60)")
    parser.add_argument("--profile", type=Path, help="seconds of the kernels of one step, by kind")
    parser.add_argument("--out", type=Path, help="a file for the calibration of --on_cpu or --profile")
    parser.add_argument("--commit_table", action="store_true", help=f"write {COMMITTED.name}, which a test holds to")
    args = parser.parse_args()
    if args.on_cpu:
        on_cpu("qwen3-17m", args.seconds, args.out)
        return
    if args.profile is not None:
        args.out.write_text(as_json(of_profile(args.profile)))
        return
    if args.commit_table:
        COMMITTED.write_text(json.dumps(table(), indent=1) + "\n")
        return
    given = args.calibration or RESULTS / "calibration-nvidia-h100-80gb-hbm3.json"
    calibration = of_data_sheet(args.gpu) if args.gpu else load(given)
    print(f"{calibration.about['card']}, measured: {calibration.about['measured']}")
    print_head(with_measured=args.measured is not None)
    if args.measured is not None:
        for case, size, seconds in measured_cases(args.measured):
            print_row(case, predicted(case, calibration, size), seconds)
        return
    for model in args.model:
        for workload in args.workload:
            tokens = Forest.from_trajectories(workload_of(model, workload, "full").trajectories).num_tokens
            trees = ["tree" if part == 1 else f"tree@{-(-tokens // part)}" for part in args.parts]
            for name in ("flat", *trees):
                case = Case(model, workload, name)
                print_row(case, predicted(case, calibration))


if __name__ == "__main__":
    main()
