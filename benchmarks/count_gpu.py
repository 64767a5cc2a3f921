"""What a step asks of a GPU on the workloads of `make bench-gpu`, counted without one.

    python benchmarks/count_gpu.py [--model qwen3-8b] [--workload tau2 ...] [--parts 4] [--json FILE]

The walk itself runs on tensors without data, which stand for those of the GPU: no kernel runs, and reading a result,
for which the host would wait, is an error. Counted are operations that launch a kernel, one each; copies of arrays to
the device (`to_device`: pinned and queued); storages that are allocated. FlexAttention, compiled, is one kernel in the
forward and two in the backward. The loss is read once, after the walk.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from treewise.bench import SHAPES, make
from treewise.engine.scoring import StepLoss
from treewise.engine.step_memory import without_data
from treewise.engine.walk import Walk
from treewise.nn.attention import flex
from treewise.nn.lm_head import MAX_LOGITS, MAX_PRODUCT
from treewise.nn.model import split_model
from treewise.nn.model_flops import auto_class
from treewise.objectives import SFT
from treewise.planning.planner import plan
from treewise.tree.forest import Forest

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
WORKLOADS = ("tau2", "ratio-6.5", "164k-83k", "grpo", "no-sharing")
FLEX_KERNELS = {"forward": 1, "backward": 2}
# Operations that make or name a tensor without writing it.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}


@dataclass(slots=True)
class Counts:
    """Of a step. passes: forwards of micro-batches. copies, copied_bytes: from the host to the device. allocations,
    allocated_bytes: of storages, most from the allocator's cache. waits: of the host for the device."""

    micro_batches: int
    passes: int
    kernels: int = 0
    copies: int = 0
    copied_bytes: int = 0
    allocations: int = 0
    allocated_bytes: int = 0
    waits: int = 1


class Counting(TorchDispatchMode):
    """Inside, operations on tensors without data are counted."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_meta]
        if not made and not any(each.is_meta for each in given):
            return result
        counts, before = self.counts, {id(each.untyped_storage()) for each in given}
        new = {id(each.untyped_storage()): each.untyped_storage() for each in made}
        for storage in (each for key, each in new.items() if key not in before):
            counts.allocations += 1
            counts.allocated_bytes += storage.nbytes()
        from_host = sum(each.nbytes for each in given if not each.is_meta and each.dim() > 0)
        if from_host:
            counts.copies += 1
            counts.copied_bytes += from_host
        elif not func.is_view and func.overloadpacket.__name__ not in NO_KERNEL:
            counts.kernels += 1
        return result


class _Flex(torch.autograd.Function):
    """Shapes of the compiled FlexAttention and of its gradients."""

    @staticmethod
    def forward(ctx: Any, counts: Counts, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.counts = counts
        ctx.save_for_backward(query, key, value)
        counts.kernels += FLEX_KERNELS["forward"]
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        return torch.empty_like(query)[..., : value.shape[3]], lse

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        ctx.counts.kernels += FLEX_KERNELS["backward"]
        return None, *(torch.empty_like(each) for each in ctx.saved_tensors)


@contextmanager
def counted(counts: Counts) -> Iterator[None]:
    """Inside, tensors without data stand for those of a GPU."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return _Flex.apply(counts, query, key, value)

    sizes = [mock.patch.dict(each, meta=each["cuda"]) for each in (MAX_LOGITS, MAX_PRODUCT)]
    with sizes[0], sizes[1], mock.patch.object(flex, "_uncompiled", attend), Counting(counts):
        yield


def count_step(model: nn.Module, forest: Forest, max_tokens: int | None = None) -> Counts:
    """Counts of a step of SFT. model: with or without data; forest: of text."""
    parts = plan(forest, max_tokens)
    counts = Counts(parts.num_micro_batches, sum(step.action != "backward" for step in parts.schedule))
    walk = Walk(split_model(without_data(model)), parts, "flex")
    loss = StepLoss(forest, SFT(), None)
    with counted(counts):
        walk.train(loss.of_micro_batch)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 4], help="budget: tree tokens over this (1 4)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kind, sizes = SHAPES[args.model]
    config = AutoConfig.for_model(kind, **{**sizes, "max_position_embeddings": 262_144, "pad_token_id": None})
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    rows = []
    print(
        "| workload | tree tokens | budget | micro-batches | passes | kernels a pass | copies a pass | KiB a pass | "
        "allocations a pass |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in args.workload:
        forest = Forest.from_trajectories(make(name, "full", config.vocab_size).trajectories)
        for part in args.parts:
            budget = None if part == 1 else -(-forest.num_tokens // part)
            each = count_step(model, forest, budget)
            rows.append({"workload": name, "tree_tokens": forest.num_tokens, "max_tokens": budget, **asdict(each)})
            per_pass = (each.kernels, each.copies, each.copied_bytes / 1024, each.allocations)
            figures = [f"{figure / each.passes:,.0f}" for figure in per_pass]
            of = "whole" if budget is None else f"{budget:,}"
            plain = (name, f"{forest.num_tokens:,}", of, each.micro_batches, each.passes, *figures)
            print(f"| {' | '.join(map(str, plain))} |", flush=True)
    if args.json is not None:
        results = {"benchmark": "kernels, copies and allocations of a step", "model": args.model, "rows": rows}
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
