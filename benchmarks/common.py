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
from treewise.tree.trajectory import Trajectory

__all__ = ["bundled_trees", "hardware", "paired_seconds", "save", "smollm2", "spread"]

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


def paired_seconds(contestants: Contestants, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each contestant, taking turns after one warm-up each, so that a drifting machine hurts all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, run in contestants.items():
            gc.collect()
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repetition:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Writes results/<name>-<hardware>.json with what is needed to read it later."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    record = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.strip(),
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
