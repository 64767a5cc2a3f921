"""What the benchmarks share: the model, the trees, paired timing, and results named by hardware."""

import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from treewise.bench.measure import spread
from treewise.bench.results import hardware, processor
from treewise.data import RenderOptions, load_trees
from treewise.models.load_model import DEMO_MODEL, load_model
from treewise.nn.model_flops import flop_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

__all__ = ["bundled_trees", "commit", "hardware", "paired_seconds", "save", "smollm2", "speed_up_of", "spread"]

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data"
RESULTS = Path(__file__).parent / "results"

Contestants = dict[str, Callable[[], Any]]


def smollm2(dtype: torch.dtype) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in training mode, and its tokenizer."""
    model, tokenizer = load_model(DEMO_MODEL, None, str(dtype).removeprefix("torch."))
    return model.train(), tokenizer


def bundled_trees(tokenizer: Any) -> dict[str, list[Trajectory]]:
    """The trees in examples/data, whole conversations, by name."""
    options = {
        "searches.jsonl.gz": RenderOptions(thinking="keep"),
        "toolbench.jsonl.gz": RenderOptions(thinking="keep", chat_template="chatml"),
        "tau_airline.jsonl.gz": RenderOptions(thinking="keep", chat_template="chatml"),
    }
    trees = {}
    for file, chosen in options.items():
        for tree in load_trees(DATA / file, tokenizer, options=chosen, num_workers=0):
            trees[tree.name] = tree.trajectories or []
    return trees


def paired_seconds(
    contestants: Contestants, repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each contestant, taking turns after one warm-up each, so that a drifting machine hurts all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, run in contestants.items():
            gc.collect()
            started = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repetition:
                seconds[name].append(clock() - started)
    return seconds


def speed_up_of(model: Any, forest: Forest, plain: float, shared: float) -> dict[str, Any]:
    """What a step on a tree saves beside its rows, and how much of what its FLOPs would. plain, shared: seconds."""
    flops = flop_model(model)
    bound = flops.flat(forest) / flops.tree(forest)
    return {
        "flat_tokens": forest.num_flat_tokens,
        "tree_tokens": forest.num_tokens,
        "share_ratio": forest.share_ratio,
        "flop_bound": bound,
        "speed_up": plain / shared,
        "efficiency": plain / shared / bound,
    }


def commit() -> str:
    """Of the code that is measured."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Writes results/<name>-<hardware>.json with what is needed to read it later."""
    record = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "hardware": hardware(),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{hardware()}.json"
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)  # one each, lest lists fill thousands
    path.write_text(f'{json.dumps(record, indent=2)[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n')
    return path
