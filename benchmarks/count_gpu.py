"""What a step asks of a GPU on the workloads of `make bench-gpu`, counted without one.

    python benchmarks/count_gpu.py [--model qwen3-8b] [--workload tau2 ...] [--parts 4] [--json FILE]
    python benchmarks/count_gpu.py --layers plain compiled

The step runs on tensors without data, which stand for those of the GPU: no kernel runs. Counted are operations that
launch a kernel, one each; copies of arrays to the device and back; times at which the host waits for a copy or a value;
storages that are allocated. FlexAttention, compiled, is one kernel in the forward and two in the backward. Under a
budget both with gateways and held graphs on the device and with `offload`, sums of gradients on the device.

With `--layers compiled` layers are compiled, as they are on a GPU where nothing else is asked for: what is in their
graphs counts as the kernels that Inductor makes of it (`layer_kernels.py`), for Triton and sm_90 where the package
`triton` is installed, else for a CPU, whose loops are some six fewer in a layer. Storages within graphs are not
counted.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from treewise.bench import SHAPES, make
from treewise.engine.step import StepLoss, Walk
from treewise.engine.step_memory import Results, without_data
from treewise.nn import host_memory
from treewise.nn.attention import flex, gateway, side_copies
from treewise.nn.compilation import compile_layers, decoder_layers
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.host_memory import HostMemory
from treewise.nn.lm_head import sized_as
from treewise.nn.model import split_model
from treewise.nn.model_flops import auto_class
from treewise.objectives import SFT
from treewise.planning.planner import plan
from treewise.tree.forest import Forest

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b")
WORKLOADS = ("tau2", "ratio-6.5", "164k-83k", "grpo", "no-sharing")
RESULTS = Path(__file__).parent / "results"
FREE_BYTES = 2**36  # of the device, beside what a step holds
FLEX_KERNELS = {"forward": 1, "backward": 2}
# Operations that make or name a tensor without writing it.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}


@dataclass(slots=True)
class Counts:
    """Of a step. passes: forwards of micro-batches. copies, copied_bytes: from the host to the device; copies_back,
    copied_back_bytes: to the host. allocations, allocated_bytes: of storages, most from the allocator's cache. waits:
    of the host for the device."""

    micro_batches: int
    passes: int
    kernels: int = 0
    copies: int = 0
    copied_bytes: int = 0
    copies_back: int = 0
    copied_back_bytes: int = 0
    allocations: int = 0
    allocated_bytes: int = 0
    waits: int = 0


class Counting(TorchDispatchMode):
    """Inside, operations on tensors without data are counted."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts
        self._results = Results()
        self._is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles inside of it."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is counted."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counts, name = kwargs or {}, self.counts, func.overloadpacket.__name__
        if self._is_paused:
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name == "_local_scalar_dense" and given[0].is_meta:
            counts.waits += 1
            return 0
        if name == "_to_copy" and given[0].is_meta and torch.device(kwargs.get("device", "meta")).type == "cpu":
            counts.waits += not kwargs.get("non_blocking")
            return self.copied_back(given[0])
        result = self._results.of(func, args, kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_meta]
        if not made and not any(each.is_meta for each in given):
            return result
        before = {id(each.untyped_storage()) for each in given}
        new = {id(each.untyped_storage()): each.untyped_storage() for each in made}
        for storage in (each for key, each in new.items() if key not in before):
            counts.allocations += 1
            counts.allocated_bytes += storage.nbytes()
        from_host = sum(each.nbytes for each in given if not each.is_meta and each.dim() > 0)
        if from_host:
            is_queued = name != "_to_copy" or kwargs.get("non_blocking")
            self.copied(from_host)
            counts.waits += not is_queued
        elif not func.is_view and name not in NO_KERNEL:
            self.launched(name, given, made)
        return result

    def launched(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """An operation that launches a kernel. given, made: tensors that it reads and returns."""
        self.counts.kernels += 1

    def copied(self, num_bytes: int) -> None:
        """A copy from the host."""
        self.counts.copies += 1
        self.counts.copied_bytes += num_bytes

    def copied_back(self, tensor: Tensor) -> Tensor:
        """What stands on the host for a tensor of the device: zeros, of one value in memory."""
        self.counts.copies_back += 1
        self.counts.copied_back_bytes += tensor.nbytes
        return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


class NoKernels(torch.autograd.Function):
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
def counted(counts: Counts, mode: Counting | None = None) -> Iterator[Counting]:
    """Inside, tensors without data stand for those of a GPU. mode: that counts; None: a new one."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return NoKernels.apply(counts, query, key, value)

    mode = Counting(counts) if mode is None else mode
    with ExitStack() as around:
        around.enter_context(sized_as("cuda", "meta"))
        for module in (gateway, host_memory):
            around.enter_context(mock.patch.object(module, "on_host", mode.copied_back))
        around.enter_context(mock.patch.object(side_copies, "free_bytes", return_value=FREE_BYTES))
        around.enter_context(mock.patch.object(flex, "_uncompiled", attend))
        around.enter_context(mode)
        yield mode


class CountedGraphs:
    """Compiles layers so that their graphs count as their kernels. One for all steps of a model: torch shares what it
    compiled among layers, and keeps it, by the backend.

    counting_backend: that of `layer_kernels.py`.
    """

    def __init__(self, counting_backend: Callable[..., Any]) -> None:
        self._mode: Any = None
        self._backend = counting_backend(self._add, lambda: self._mode.paused())

    def compile(self, lm: DecoderAndHead, mode: Counting) -> None:
        """Compiles the layers, to be counted by `mode` from now on."""
        self._mode = mode
        compile_layers(lm, "eager")  # its settings of torch
        for layer in decoder_layers(lm):
            layer.compile(dynamic=True, backend=self._backend)

    def _add(self, names: list[str]) -> None:
        self._mode.counts.kernels += len(names)


def count_step(
    model: nn.Module,
    forest: Forest,
    max_tokens: int | None = None,
    *,
    hold: str = "auto",
    offload: bool = False,
    graphs: CountedGraphs | None = None,
) -> Counts:
    """Counts of a step of SFT with its loss. model: with or without data; forest: of text. graphs: of its compiled
    layers."""
    parts = plan(forest, max_tokens, hold=hold)
    counts = Counts(parts.num_micro_batches, sum(step.action != "backward" for step in parts.schedule))
    lm = split_model(without_data(model))
    walk = Walk(lm, parts, "flex", [HostMemory()] if offload else ())
    loss = StepLoss(forest, SFT(), None)
    with counted(counts) as mode:
        if graphs is not None:
            graphs.compile(lm, mode)
        walk.train(loss.of_micro_batch)
        loss.output(walk)
    return counts


def model_without_data(name: str, num_layers: int | None = None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A shape of `treewise bench`, with the layers it has or fewer."""
    kind, sizes = SHAPES[name]
    more = {} if num_layers is None else {"num_hidden_layers": num_layers}
    config = AutoConfig.for_model(kind, **{**sizes, "max_position_embeddings": 262_144, "pad_token_id": None, **more})
    with torch.device("meta"):
        return auto_class(config).from_config(config, dtype=dtype)


def forest_of(workload: str, model: str) -> Forest:
    """The tree of a workload, of the tokens of a model."""
    return Forest.from_trajectories(make(workload, "full", SHAPES[model][1]["vocab_size"]).trajectories)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 4], help="budget: tree tokens over this (1 4)")
    parser.add_argument("--layers", nargs="+", choices=("plain", "compiled"), default=["plain"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = model_without_data(args.model)
    results = {"benchmark": "kernels, copies, waits and allocations of a step", "model": args.model, "rows": []}
    print(
        "| workload | tree tokens | budget | layers | micro-batches | passes | kernels a pass | copies a pass | "
        "KiB a pass | KiB back | allocations a pass | waits |"
    )
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for layers in args.layers:
        around, graphs = nullcontext, None
        if layers == "compiled":
            from layer_kernels import as_on_gpu, counting_backend  # a neighbour of this script

            around, graphs = as_on_gpu if find_spec("triton") else nullcontext, CountedGraphs(counting_backend)
        for name, part, offload in product(args.workload, args.parts, (False, True)):
            if part == 1 and offload:
                continue
            forest = forest_of(name, args.model)
            budget = None if part == 1 else -(-forest.num_tokens // part)
            with around():
                each = count_step(model, forest, budget, offload=offload, graphs=graphs)
            facts = {"workload": name, "tree_tokens": forest.num_tokens, "max_tokens": budget, "offload": offload}
            results["rows"].append({"layers": layers} | facts | asdict(each))
            per_pass = (each.kernels, each.copies, each.copied_bytes / 1024, each.copied_back_bytes / 1024)
            figures = [f"{figure / each.passes:,.0f}" for figure in (*per_pass, each.allocations)]
            of = "whole" if budget is None else f"{budget:,}{', offload' * offload}"
            plain = (name, f"{forest.num_tokens:,}", of, layers, each.micro_batches, each.passes, *figures, each.waits)
            print(f"| {' | '.join(map(str, plain))} |", flush=True)
            if args.json is not None:  # as they come
                args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
