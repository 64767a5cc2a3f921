"""Attention's kernels on a card: right, free of races, compiled once, and how fast beside Triton's. Two minutes.

python benchmarks/attention_kernels.py run --device cuda --seconds 120 --out kernels.json
python benchmarks/attention_kernels.py adopt kernels.json   # into measured.json, by which `attention="auto"` chooses

Each kernel runs in a process of its own, so one that ends its process leaves the results of the others, and saves what
it has as it has it:

* `right`: outputs and gradients in bfloat16 against the reference in float64, beside an error budget
  (`treewise.nn.attention.kernel_cases`), and which key each query sees, pair by pair, in both directions; for plain
  layers and each feature, whole and below a gateway.
* `backwards`: the backward of one graph, many times. Bits that change are counted (kernels that add in any order change
  them); a race changes numbers by more than the error budget.
* `lengths`: seconds of the first and second call at a length and at another one, and graphs that torch compiled for the
  other one: none.
* `seconds`: forward, and forward with backward, on whole trees, and the same of Triton's kernels.

With `--device cpu` shapes are tiny and the kernels are `flex` (its uncompiled operator) and `cascade`, to try it out.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from pkgutil import resolve_name
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from treewise.bench import make
from treewise.bench.results import hardware
from treewise.nn.attention import IMPLEMENTATIONS, TreeMask
from treewise.nn.attention.kernel_cases import Case, is_within, kernel_errors, shown, with_gradients
from treewise.nn.attention.mask import LayerRule
from treewise.nn.attention.needs import CAPS, CHUNKS, FASTER, NEEDS, SINKS, WINDOWS, Asked, place_of
from treewise.nn.attention.reference import visible
from treewise.nn.device import synchronized_clock
from treewise.nn.platform.versions import installed_version
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.tree.forest import Forest

ROOT = Path(__file__).resolve().parents[1]
TRITON = "flex"
KERNELS = {"cuda": ("flex", "flash", "cudnn"), "cpu": ("flex", "cascade")}
SIZES = {"full": (128, 64), "tiny": (16,)}  # of heads, in order of worth
HEADS = {"full": (32, 8), "tiny": (2, 1)}  # of queries and keys: those of Qwen3-8B
WORKLOADS = {"full": ("tau2", "ratio-6.5"), "tiny": ("tau2",)}
BACKWARDS = {"full": 500, "tiny": 5}
REPETITIONS = {"full": 10, "tiny": 2}
_PLAIN = LayerRule(scaling=0.2)
# A case for each feature, by the name of the feature; the first two are plain layers.
CASES = {
    "": Case(_PLAIN),
    "gateway": Case(_PLAIN, shape=(3, 270, 150), is_below=True),
    WINDOWS: Case(replace(_PLAIN, window=90)),
    CHUNKS: Case(replace(_PLAIN, chunk=100)),
    CAPS: Case(replace(_PLAIN, softcap=1.3)),
    SINKS: Case(_PLAIN, has_sinks=True),
}
NOT_FEATURES = ("", "gateway")
Attention = Callable[..., Tensor]
Save = Callable[[dict[str, Any]], None]


def main(argv: list[str] | None = None) -> int:
    """Runs all kernels, one, or adopts what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run, one = (commands.add_parser(name) for name in ("run", "one"))
    for each in (run, one):
        each.add_argument("--device", choices=tuple(KERNELS), default="cuda")
        each.add_argument("--size", choices=tuple(SIZES), default="full")
        each.add_argument("--seconds", type=float, default=120.0)
        each.add_argument("--out", type=Path, required=True)
    run.add_argument("--kernels", nargs="+", choices=tuple(IMPLEMENTATIONS), help="of the table (flex, flash, cudnn)")
    one.add_argument("--kernel", choices=tuple(IMPLEMENTATIONS), required=True)
    commands.add_parser("adopt").add_argument("file", type=Path, help="in benchmarks/results")
    args = parser.parse_args(argv)
    if args.command == "adopt":
        return adopt(args.file)
    return run_all(args) if args.command == "run" else run_one(args)


# -- all of them ------------------------------------------------------------------------------------------------------


def run_all(args: argparse.Namespace) -> int:
    """Each kernel in a process of its own; a fair part of the time that is left."""
    found: dict[str, Any] = {"hardware": hardware(), "device": args.device, "kernels": {}}
    names, deadline = args.kernels or KERNELS[args.device], perf_counter() + args.seconds
    for index, name in enumerate(names):
        seconds = (deadline - perf_counter()) / (len(names) - index)
        found["kernels"][name] = _in_a_process(args, name, seconds)
        _compare(found["kernels"])
        _save(args.out, found)
        for line in lines(name, found["kernels"][name]):
            print(line)
    return int(any(each.get("passed") is False for each in found["kernels"].values()))


def _in_a_process(args: argparse.Namespace, name: str, seconds: float) -> dict[str, Any]:
    part = args.out.with_suffix(f".{name}.json")
    part.unlink(missing_ok=True)
    words = [sys.executable, __file__, "one", "--kernel", name, "--device", args.device, "--size", args.size]
    words += ["--seconds", str(seconds), "--out", str(part)]
    try:
        ran = subprocess.run(
            words, timeout=max(seconds, 1.0), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        last = (ran.stderr.strip().splitlines() or [""])[-1]
        why = "" if ran.returncode == 0 else f"ended with code {ran.returncode}: {last[:400]}"
    except subprocess.TimeoutExpired:
        why = f"cut short after {seconds:.0f} s"
    found: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {}
    part.unlink(missing_ok=True)
    if why:
        found |= {"why": why, "passed": False}
    return found


def _compare(kernels: dict[str, Any]) -> None:
    """`speed` of each kernel and size of heads: Triton's seconds of forward and backward over its own, the least."""
    triton = kernels.get(TRITON, {}).get("sizes", {})
    for found in kernels.values():
        for size, each in found.get("sizes", {}).items():
            own, theirs = each.get("seconds", {}), triton.get(size, {}).get("seconds", {})
            both = [theirs[name]["both"] / own[name]["both"] for name in own.keys() & theirs.keys()]
            each["speed"] = min(both) if both else None


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """What was found of a kernel, for people."""
    if "skipped" in found:
        return [f"{name}: {found['skipped']}"]
    told = [f"{name}: {found['why']}"] if found.get("why") else []
    for size, each in found.get("sizes", {}).items():
        cases = each.get("right", {})
        wrong = [f"{case or 'plain'}: {row['shown']}" for case, row in cases.items() if not row["passed"]]
        told.append("; ".join([f"{name}, heads of {size}: {len(cases) - len(wrong)} of {len(cases)} right", *wrong]))
        for workload, seconds in each.get("seconds", {}).items():
            forward, both = (f"{1000 * seconds[part]:.2f} ms" for part in ("forward", "both"))
            told.append(f"  {workload}: {forward}, with backward {both}, {seconds['teraflops']:.0f} TFLOP/s")
        if (times := each.get("backwards")) is not None:
            told.append("  {times} backwards: {changed} changed, {beyond} beyond roundings".format(**times))
        if (times := each.get("lengths")) is not None:
            told.append("  seconds of calls at two lengths: {seconds}, {graphs} graphs for the second".format(**times))
        if each.get("speed") is not None:
            told.append(f"  {each['speed']:.2f} times Triton's speed")
    return told


# -- one of them ------------------------------------------------------------------------------------------------------


def run_one(args: argparse.Namespace) -> int:
    """All of one kernel, in this process."""
    device = torch.device(args.device)
    name, deadline = args.kernel, perf_counter() + 0.95 * args.seconds
    needs = NEEDS.get(name)
    packages = {} if needs is None else {each: _release(installed_version(each)) for each in needs.packages}
    dtype = torch.bfloat16
    place = place_of(device.type, dtype)
    found: dict[str, Any] = {"packages": packages, "capability": place.capability, "dtype": place.dtype, "sizes": {}}
    refusal = None if needs is None else needs.refusal(name, place, Asked())
    if refusal is not None:
        _save(args.out, found | {"skipped": str(refusal)})
        return 0
    attention = resolve_name(str(IMPLEMENTATIONS[name].run))
    for size in SIZES[args.size]:
        each = found["sizes"][str(size)] = dict[str, Any]()
        parts = (_right, _seconds, _backwards, _lengths)
        for part in parts:
            if perf_counter() > deadline:
                break
            part(each, attention, size, args.size, device, name)
            found["passed"] = all(_is_right(row) for row in found["sizes"].values())
            _save(args.out, found)
    return 0 if found["passed"] else 1


def _attend(
    run: Attention, query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, rule: LayerRule, *sinks: Tensor
) -> Tensor:
    return run(query, key, value, mask, rule, *sinks)


def _is_right(each: dict[str, Any]) -> bool:
    backwards, lengths = each.get("backwards", {}), each.get("lengths", {})
    cases_hold = all(row["passed"] for row in each.get("right", {}).values())
    return cases_hold and not backwards.get("beyond") and not lengths.get("graphs")


def _right(each: dict[str, Any], attention: Attention, size: int, _: str, device: torch.device, name: str) -> None:
    needs = NEEDS.get(name)
    each["right"] = {}
    for case_name, case in CASES.items():
        asked = Asked(frozenset({(size, size)}), frozenset({case_name} - {*NOT_FEATURES}))
        if needs is not None and needs.refusal(name, place_of(device.type, torch.bfloat16), asked) is not None:
            continue
        sized = replace(case, head_sizes=(size, size), num_heads=(4, 2), dtype=torch.bfloat16)
        errors = kernel_errors(attention, sized, device)
        wrong = num_wrong_pairs(attention, case.mask(), case.rule, size, device)
        told = f"{shown(errors)}, {wrong[0]} and {wrong[1]} pairs wrong"
        each["right"][case_name] = {"passed": is_within(errors) and not any(wrong), "shown": told}


def num_wrong_pairs(
    attention: Attention,
    mask: TreeMask,
    rule: LayerRule,
    size: int,
    device: torch.device,
    given: TreeMask | None = None,
) -> tuple[int, int]:
    """Pairs of a query and a key that are seen and should not be, or the other way round, in the forward and in the
    backward: exact in any precision. given: the mask that the kernel gets, where it is another one.

    All scores are equal. A column of the values is one key, so a number of the output is not zero where its query sees
    the key; a column of the gradient of the output is one query, and the same holds for the gradients of the values.
    """
    expected = visible(mask, rule.window, rule.chunk, device)
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    num_queries, num_keys = expected.shape
    query, key = (
        torch.zeros(1, 1, rows, size, device=device, dtype=torch.bfloat16) for rows in (num_queries, num_keys)
    )
    for start in range(0, max(num_queries, num_keys), size):
        value, cotangent = (_columns(rows, start, size, device) for rows in (num_keys, num_queries))
        value.requires_grad_()
        out = attention(query, key, value, given or mask, rule)
        (grad,) = torch.autograd.grad(out, [value], cotangent)
        keys, queries = expected[:, start : start + size], expected[start : start + size].t()
        wrong[0] += ((out[0, 0, :, : keys.shape[1]] != 0) != keys).sum()
        wrong[1] += ((grad[0, 0, :, : queries.shape[1]] != 0) != queries).sum()
    return int(wrong[0]), int(wrong[1])


def _columns(rows: int, start: int, size: int, device: torch.device) -> Tensor:
    """[1, 1, rows, size]: column `i` is 1 at row `start + i`."""
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(size, device=device)
    return (row == start + column).to(torch.bfloat16)[None, None]


def _backwards(each: dict[str, Any], attention: Attention, size: int, scale: str, device: torch.device, _: str) -> None:
    """Backwards of one graph; a number that changes by more than the error of the kernel is a race."""
    shape = (4, 1100, 250) if scale == "full" else (2, 20, 9)
    case = Case(_PLAIN, shape, head_sizes=(size, size), num_heads=(8, 2), dtype=torch.bfloat16)
    mask = case.mask()
    inputs = case.inputs(mask, device)
    allowed = [most for _, most in list(kernel_errors(attention, case, device).values())[1:]]
    out = attention(*inputs[:3], mask, case.rule)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, out.dtype)
    first = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
    changed = beyond = torch.zeros((), dtype=torch.int64, device=device)
    for _repetition in range(BACKWARDS[scale]):
        grads = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
        gaps = [(new.float() - old.float()).abs().max() for new, old in zip(grads, first, strict=True)]
        changed = changed + torch.stack([gap != 0 for gap in gaps]).any()
        beyond = beyond + torch.stack([~(gap <= most) for gap, most in zip(gaps, allowed, strict=True)]).any()
    each["backwards"] = {"times": BACKWARDS[scale], "changed": int(changed), "beyond": int(beyond)}


def _lengths(each: dict[str, Any], attention: Attention, size: int, scale: str, device: torch.device, _: str) -> None:
    seconds, graphs = [], 0
    for shape in ((3, 300, 77), (5, 811, 130)):
        case = Case(_PLAIN, shape, head_sizes=(size, size), num_heads=HEADS[scale], dtype=torch.bfloat16)
        before = counters["stats"]["unique_graphs"]
        for _call in range(2):
            mask = case.mask()  # another micro-batch of the same length
            inputs = case.inputs(mask, device)
            begun = synchronized_clock(device)
            out = attention(*inputs[:3], mask, case.rule)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            seconds.append(round(synchronized_clock(device) - begun, 4))
        graphs = counters["stats"]["unique_graphs"] - before
    each["lengths"] = {"seconds": seconds, "graphs": graphs}


def _seconds(each: dict[str, Any], attention: Attention, size: int, scale: str, device: torch.device, _: str) -> None:
    each["seconds"] = {}
    heads, key_heads = HEADS[scale]
    for workload in WORKLOADS[scale]:
        forest = Forest.from_trajectories(make(workload, scale, 1000).trajectories)
        mask = TreeMask.from_layout(lay_out(plan(forest), 0))
        drawn = [
            torch.randn(1, mask.num_queries, count, size, device=device) for count in (heads, key_heads, key_heads)
        ]
        inputs = [rows.to(torch.bfloat16).transpose(1, 2).requires_grad_() for rows in drawn]
        rule = LayerRule(size**-0.5)
        cotangent = torch.ones(1, heads, mask.num_queries, size, device=device, dtype=torch.bfloat16)
        calls = {
            "forward": lambda: attention(*inputs, mask, rule),  # noqa: B023
            "both": lambda: with_gradients(attention, inputs, mask, rule, cotangent),  # noqa: B023
        }
        found = {name: _median(call, REPETITIONS[scale], device) for name, call in calls.items()}
        pairs = int(forest.depth.astype("int64").sum()) + forest.num_tokens  # of queries and keys that they see
        found["teraflops"] = 3.5 * 4 * pairs * heads * size / found["both"] / 1e12
        each["seconds"][workload] = found


def _median(call: Callable[[], Any], repetitions: int, device: torch.device) -> float:
    call()
    seconds = []
    for _ in range(repetitions):
        begun = synchronized_clock(device)
        call()
        seconds.append(synchronized_clock(device) - begun)
    return statistics.median(seconds)


# -- what is adopted --------------------------------------------------------------------------------------------------


def adopt(file: Path) -> int:
    """Adds to `measured.json` each kernel that was right on the card of a committed result, by size of heads."""
    found = json.loads(file.read_text())
    path = Path(str(resources.files("treewise.nn.attention").joinpath("measured.json")))
    rows = json.loads(path.read_text())["rows"]
    for name, kernel in found["kernels"].items():
        if name == TRITON or not kernel.get("passed"):
            why = kernel.get("skipped") or kernel.get("why") or "it was wrong"
            print(f"{name}: {'what others are compared with' if name == TRITON else f'not adopted, {why}'}")
            continue
        for size, each in kernel["sizes"].items():
            if not {"right", "backwards", "lengths", "seconds"} <= each.keys() or each["speed"] is None:
                print(f"{name}, heads of {size}: not adopted, it was not tried whole")
                continue
            rows.append(_row(name, kernel, int(size), each, file.name))
            says = "auto takes it" if each["speed"] >= FASTER else "auto does not take it"
            print(f"{name}, heads of {size}: {each['speed']:.2f} times Triton's speed, {says}")
    path.write_text('{"rows": [' + ",".join(f"\n{json.dumps(row)}" for row in rows) + "]}\n")
    return 0


def _row(name: str, kernel: dict[str, Any], size: int, each: dict[str, Any], result: str) -> dict[str, Any]:
    features = sorted(case for case in each["right"] if case in (WINDOWS, CHUNKS, CAPS, SINKS))
    return {
        "kernel": name,
        "capability": kernel["capability"],
        "dtype": kernel["dtype"],
        "head_sizes": [size, size],
        "packages": kernel["packages"],
        "features": features,
        "speed": round(each["speed"], 3),
        "result": result,
    }


def _release(version: str | None) -> str | None:
    return None if version is None else version.partition("+")[0]


def _save(out: Path, results: dict[str, Any]) -> None:
    """Whole or not at all: who ends this process may read the file."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(out)


if __name__ == "__main__":
    sys.exit(main())
