"""What recipes have in common: settings of a short run, and where it leaves what is compared."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STEPS, RATE = 4, 1e-3


def settings(output: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of every trainer that takes those of transformers: two batches a step."""
    return {
        "output_dir": str(output),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 5,
        **changes,
    }


@contextmanager
def write_logs(output: Path, logs: list[dict[str, float]]) -> Iterator[None]:
    """Leaves the logs of a loop of one's own as transformers' Trainer leaves its own."""
    started = time.perf_counter()
    yield
    print({"train_runtime": time.perf_counter() - started})
    folder = output / f"checkpoint-{STEPS}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": logs}))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_records(output: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of a host's own form of rows."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
