"""What a run logs besides the loss: means of the objective's metrics, tokens per second, memory, efficiency, MFU.

`mfu` (model FLOPs utilisation) is the FLOPs that the trees need, forward and backward, per second, over the peak of
the device: the vendor's dense bfloat16 figure where `PEAK_FLOPS` (`nn.device`) has the GPU and the run computes in
bfloat16, else the rate at which the device multiplied two large matrices when the run began. Recomputation does not
count (Chowdhery et al. 2022, PaLM, appendix B; torchtitan and nanochat do the same).

Efficiency is speed-up over flat training / FLOP bound, which is (FLOPs that the trees need / seconds) over (flat FLOPs
/ seconds of a flat run). A run trains nothing flat. So it is compared with the fastest flat training that is possible
on this machine: one that only multiplies matrices, at the measured rate. Real flat training is slower, so what is
logged is a lower bound: `efficiency_at_least`. The products are of the model's own width, so the same figure is the use
of what this device reaches for this model.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil
import torch
from torch import nn

from treewise.distributed import ranks
from treewise.engine.prepared import StepOutput
from treewise.nn.device import matmul_flops, peak_flops
from treewise.nn.flops import FlopModel
from treewise.nn.model_flops import flop_model
from treewise.trainer.batches import PreparedBatch
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")


class MetricMeans:
    """Sums of an objective's metrics and of the loss weights that they are divided by, since the last log; and where
    experts were replayed, the share of tokens (`routed_otherwise`), and of tokens in one layer each
    (`choices_otherwise`), that the routers would have sent to others."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, out: StepOutput) -> None:
        for name, value in out.metrics.items():
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += value * out.weight
            sums[1] += out.weight
        if out.replay is not None:
            for name, part, whole in (
                ("routed_otherwise", out.replay.num_otherwise, out.replay.num_recorded),
                ("choices_otherwise", out.replay.num_otherwise_choices, out.replay.num_choices),
            ):
                sums = self._sums.setdefault(name, [0.0, 0.0])
                sums[0] += part
                sums[1] += whole

    def take(self, sum_over_ranks: Callable[..., list[float]], *, is_alone: bool) -> dict[str, float]:
        """The means over all ranks; resets the sums. Every rank calls this, also one without trees."""
        own, self._sums = self._sums, {}
        of_ranks = [sorted(own)] if is_alone else ranks.on_every_rank(lambda: sorted(own))
        names = sorted({name for names in of_ranks for name in names})
        if not names:
            return {}
        values = sum_over_ranks(*(value for name in names for value in own.get(name, (0.0, 0.0))))
        pairs = zip(names, values[::2], values[1::2], strict=True)
        return {name: total / weight for name, total, weight in pairs if weight > 0}


class Throughput:
    """Tokens, FLOPs and seconds since the last log; evaluation and saving are not counted."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)  # tokens, FLOPs and seconds, since the last log
        self._started = 0.0
        self._model: nn.Module | None = None
        self._flop_model: FlopModel | None = None
        self._measured_rate: float | None = None
        self._peak: float | None = None

    @property
    def tokens(self) -> tuple[float, float, float]:
        """Tree tokens, flat tokens and computed tokens of this rank since the last log."""
        return self._sums["tree_tokens"], self._sums["flat_tokens"], self._sums["computed_tokens"]

    def begin_run(self, device: torch.device, dtype: torch.dtype, width: int | None = None) -> None:
        """Measures the device's rate. dtype, width: of the matrix products of the run."""
        self._measured_rate = matmul_flops(device.type, dtype, width)
        self._peak = peak_flops(device, dtype) or self._measured_rate

    @contextmanager
    def waiting_for_batches(self) -> Iterator[None]:
        """Around what a step begins with: until its trees are loaded, merged, placed and planned."""
        self._started = time.perf_counter()
        yield
        self._sums["waited"] += time.perf_counter() - self._started

    def end_step(self) -> None:
        self._sums["seconds"] += time.perf_counter() - self._started

    def add(self, out: StepOutput) -> None:
        self._sums["tree_tokens"] += out.num_tree_tokens
        self._sums["flat_tokens"] += out.num_flat_tokens
        self._sums["computed_tokens"] += out.num_computed_tokens

    def flops_of(self, model: nn.Module, forests: Sequence[Forest]) -> tuple[float, float] | None:
        """FLOPs of a batch on the tree and of flat training, forward and backward, without recomputation (`nn.flops`);
        None where the shapes of the model are not known."""
        if self._model is not model:
            self._model, self._flop_model = model, None
            with suppress(AttributeError, TypeError, ValueError, ZeroDivisionError, KeyError):  # another kind of config
                self._flop_model = flop_model(model)
        flops = self._flop_model
        if flops is None:
            return None
        return float(sum(map(flops.tree, forests))), float(sum(map(flops.flat, forests)))

    def add_flops(self, model: nn.Module, batch: PreparedBatch) -> float:
        """Adds the FLOPs of a batch; returns those on the tree, 6 per parameter and token where they are not known."""
        if batch.flops is None:
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            return 6.0 * sum(forest.num_tokens for forest in batch.forests) * num_parameters
        self._sums["tree_flops"] += batch.flops[0]
        self._sums["flat_flops"] += batch.flops[1]
        return batch.flops[0]

    def take(self, tree_tokens: float, flat_tokens: float, computed_tokens: float) -> dict[str, float]:
        """The log entries; resets the sums. Tokens are those of all ranks, FLOPs those of this rank."""
        sums, self._sums = self._sums, defaultdict(float)
        seconds = max(sums["seconds"], 1e-9)
        # The most that torch reserved of this rank's GPU since the run began; on a CPU the present size of the process.
        has_gpu = torch.cuda.is_available()
        memory = torch.cuda.max_memory_reserved() if has_gpu else psutil.Process().memory_info().rss
        entries = {
            "tokens_per_second_flat": round(flat_tokens / seconds, 1),
            "tokens_per_second_tree": round(tree_tokens / seconds, 1),
            "tokens_per_second_computed": round(computed_tokens / seconds, 1),
            "share_ratio": round(flat_tokens / max(1.0, tree_tokens), 4),
            "tree_tokens": tree_tokens,
            "memory_bytes": float(memory),
            "batch_wait_share": float(f"{sums['waited'] / seconds:.4g}"),
        }
        if sums["tree_flops"]:
            entries["flop_bound"] = round(sums["flat_flops"] / sums["tree_flops"], 4)
            for name, rate in (("mfu", self._peak), ("efficiency_at_least", self._measured_rate)):
                if rate:
                    entries[name] = float(f"{sums['tree_flops'] / seconds / rate:.4g}")
        return entries
