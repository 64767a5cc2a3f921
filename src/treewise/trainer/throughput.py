"""Tokens per second and memory of a run, as its logs show them."""

import time
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from treewise.outputs import StepOutput


class Throughput(TrainerCallback):
    """Tokens and seconds since the last log; evaluation and saving are not counted."""

    def __init__(self) -> None:
        self._tree_tokens = self._flat_tokens = 0
        self._seconds = self._started = 0.0

    @property
    def tokens(self) -> tuple[float, float]:
        return float(self._tree_tokens), float(self._flat_tokens)

    def start(self) -> None:
        self._started = time.perf_counter()

    def add(self, out: StepOutput) -> None:
        self._tree_tokens += out.num_tree_tokens
        self._flat_tokens += out.num_flat_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self, tree_tokens: float, flat_tokens: float) -> dict[str, float]:
        """The log entries for these tokens of all ranks; starts anew."""
        seconds = max(self._seconds, 1e-9)
        self._tree_tokens = self._flat_tokens = 0
        self._seconds = 0.0
        return {
            "tokens_per_second_flat": round(flat_tokens / seconds, 1),
            "tokens_per_second_tree": round(tree_tokens / seconds, 1),
            "share_ratio": round(flat_tokens / max(1.0, tree_tokens), 4),
            "tree_tokens": tree_tokens,
            "memory_bytes": float(memory_in_use()),
        }


def memory_in_use() -> int:
    """Bytes of this rank: the peak of its GPU since the run began, or what the process holds now on a CPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return int(psutil.Process().memory_info().rss)
