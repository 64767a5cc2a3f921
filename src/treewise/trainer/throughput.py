"""Tokens per second, memory and efficiency of a run, as its logs show them.

Efficiency is speed-up over flat training / FLOP bound, which is (FLOPs that the trees need / seconds) over (flat FLOPs
/ seconds of a flat run). A run trains nothing flat. So it is held against the fastest flat training that there could be
on this machine: one that does nothing but multiply matrices, as fast as the device multiplies two large ones when the
run begins. Real flat training is slower, so what is logged is a lower bound: `efficiency_at_least`.
"""

import time
from functools import lru_cache
from typing import Any

import psutil
import torch
from torch import nn
from transformers import TrainerCallback

from treewise.engine.scoring import StepOutput
from treewise.nn.flops import FlopModel, flop_model
from treewise.tree.forest import Forest

MATRIX_SIZE = {"cpu": 768, "cuda": 4096}
NUM_PRODUCTS = 6


class Throughput(TrainerCallback):
    """Tokens, FLOPs and seconds since the last log; evaluation and saving are not counted."""

    def __init__(self) -> None:
        self._tree_tokens = self._flat_tokens = 0
        self._tree_flops = self._flat_flops = 0.0
        self._seconds = self._started = 0.0
        self._model: nn.Module | None = None
        self._costs: FlopModel | None = None
        self._fastest: float | None = None

    @property
    def tokens(self) -> tuple[float, float]:
        return float(self._tree_tokens), float(self._flat_tokens)

    def start(self) -> None:
        self._started = time.perf_counter()

    def add(self, out: StepOutput) -> None:
        self._tree_tokens += out.num_tree_tokens
        self._flat_tokens += out.num_flat_tokens

    def add_flops(self, model: nn.Module, forests: list[Forest]) -> float:
        """Counts what these trees need, forward and backward, and what flat training would; returns the former.

        FLOPs are those of `treewise.nn.flops`; recomputation is not needed and does not count. 6 per parameter and tree
        token where the model's shapes do not tell.
        """
        if self._model is not model:
            self._model, self._costs = model, _costs_of(model)
        if self._costs is None:
            return 6.0 * sum(each.num_tokens for each in forests) * sum(each.numel() for each in model.parameters())
        needed = float(sum(self._costs.tree(forest) for forest in forests))
        self._tree_flops += needed
        self._flat_flops += sum(self._costs.flat(forest) for forest in forests)
        return needed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        dtype = torch.bfloat16 if args.bf16 else next(kwargs["model"].parameters()).dtype
        self._fastest = fastest_flops(args.device.type, dtype)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self, tree_tokens: float, flat_tokens: float) -> dict[str, float]:
        """The log entries for these tokens of all ranks; starts anew. FLOPs are those of this rank alone."""
        seconds = max(self._seconds, 1e-9)
        entries = {
            "tokens_per_second_flat": round(flat_tokens / seconds, 1),
            "tokens_per_second_tree": round(tree_tokens / seconds, 1),
            "share_ratio": round(flat_tokens / max(1.0, tree_tokens), 4),
            "tree_tokens": tree_tokens,
            "memory_bytes": float(memory_in_use()),
        }
        if self._tree_flops:
            entries["flop_bound"] = round(self._flat_flops / self._tree_flops, 4)
        if self._tree_flops and self._fastest:
            entries["efficiency_at_least"] = float(f"{self._tree_flops / seconds / self._fastest:.4g}")
        self._tree_tokens = self._flat_tokens = 0
        self._tree_flops = self._flat_flops = 0.0
        self._seconds = 0.0
        return entries


def memory_in_use() -> int:
    """Bytes of this rank: the peak of its GPU since the run began, or what the process holds now on a CPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return int(psutil.Process().memory_info().rss)


@lru_cache
def fastest_flops(kind: str, dtype: torch.dtype) -> float | None:
    """FLOPs per second of the fastest of a few products of two large matrices; None where there is no room or kernel.

    kind: `cpu` or `cuda`. Draws no random number, and takes some milliseconds.
    """
    size = MATRIX_SIZE.get(kind)
    if size is None:
        return None
    seconds = []
    try:
        with torch.no_grad():
            one = torch.ones(size, size, dtype=dtype, device=kind)
            for _ in range(NUM_PRODUCTS):
                begin = time.perf_counter()
                torch.mm(one, one)
                if kind == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begin)
    except (RuntimeError, MemoryError):
        return None
    return 2.0 * size**3 / max(min(seconds), 1e-9)


def _costs_of(model: nn.Module) -> FlopModel | None:
    try:
        return flop_model(model)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, KeyError):  # a configuration of another kind
        return None
