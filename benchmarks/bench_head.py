"""The head: gradients of a loss taken with the logits at hand against logits that are computed again, by size of chunk.

    python benchmarks/bench_head.py
    python benchmarks/bench_head.py --device cuda --dtype bfloat16 --width 4096 --vocabulary 151936 --rows 16384

The first contestant is what a loss over whole trajectories takes (`edge_values` and its backward, at the usual size of
a chunk), the others are `edge_loss`. They take turns; seconds are of the process's CPU time on a CPU. The last row is a
whole step of SmolLM2 on a recorded tree, with either head (CPU alone).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import bundled_trees, save, smollm2

from treewise import Forest, TreeEngine
from treewise.engine import step
from treewise.nn import lm_head
from treewise.nn.lm_head import Head, edge_loss, edge_values

SIZES = {"cpu": range(22, 26), "cuda": range(24, 30)}  # powers of two


def in_turns(contestants: dict[str, Callable[[], Any]], device: str, repetitions: int) -> dict[str, float]:
    """Median seconds of each, after one warm-up."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, run in contestants.items():
            started = clock()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            if repetition:
                seconds[name].append(clock() - started)
    return {name: statistics.median(each) for name, each in seconds.items()}


def head_alone(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of the head's forward and backward."""
    like: dict[str, Any] = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    torch.manual_seed(0)
    weight = (torch.randn(arguments.vocabulary, arguments.width, **like) / 50).requires_grad_()
    hidden = torch.randn(arguments.rows, arguments.width, **like).requires_grad_()
    source = np.arange(arguments.rows)
    target = torch.randint(arguments.vocabulary, (arguments.rows,), device=arguments.device)

    def of_values() -> None:
        weight.grad = hidden.grad = None
        (-edge_values(hidden, Head(weight), source, target)["log_probs"].mean()).backward()

    def of_loss(max_logits: int) -> None:
        weight.grad = hidden.grad = None
        with mock.patch.dict(lm_head.MAX_LOGITS, {arguments.device: max_logits}):
            loss, _ = edge_loss(
                hidden, Head(weight), source, target, lambda values, _: -values["log_probs"].sum() / arguments.rows
            )
            loss.backward()

    contestants: dict[str, Callable[[], Any]] = {"values": of_values}
    for power in SIZES[arguments.device]:
        contestants[f"loss, 2^{power} logits"] = lambda power=power: of_loss(2**power)
    return in_turns(contestants, arguments.device, arguments.repetitions)


def whole_step(name: str, repetitions: int) -> dict[str, Any]:
    """Seconds of a step of SmolLM2 on a recorded tree, as it is and with logits that are computed again."""
    model, tokenizer = smollm2(torch.float32)
    forest = Forest.from_trajectories(bundled_trees(tokenizer)[name])
    engine = TreeEngine(model)

    def run() -> None:
        model.zero_grad()
        engine.step(forest)

    def again() -> None:
        with mock.patch.object(step, "edge_loss", _by_values):
            run()

    trained = int((forest.token_weights() > 0).sum())
    seconds = in_turns({"values": again, "loss": run}, "cpu", repetitions)
    return {"tree": name, "tree_tokens": forest.num_tokens, "trained_tokens": trained, "seconds": seconds}


def _by_values(hidden: Any, head: Any, source: Any, target: Any, loss_of: Any, outputs: Any) -> Any:
    values = edge_values(hidden, head, source, target, outputs)
    return loss_of(values, slice(0, len(target))), {name: value.detach() for name, value in values.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tree", default="game24-913", help="of examples/data; none: no whole step")
    chosen = parser.parse_args()
    rows = [{**vars(chosen), "seconds": head_alone(chosen)}]
    print(rows[0], flush=True)
    if chosen.device == "cpu" and chosen.tree != "none":
        rows.append(whole_step(chosen.tree, max(1, chosen.repetitions // 3)))
        print(rows[1])
    print(save("head", rows))
