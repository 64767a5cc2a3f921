"""Measures a card for a minute: products at a model's sizes, attention, element-wise kernels, launches and copies.

Each figure is the least of several. On a CPU with one thread it is CPU time, which other processes change little; else
wall time, of so many calls in a row that waiting for the device does not count. What is read is changed from call to
call, as in a step, where no cache holds it. Each part has its share of the time, and smaller sizes come first; what
was not reached is not in the domain, and is noted.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

import treewise
from treewise.bench.calibration.rates import Calibration, Curve, best_of, product_key
from treewise.bench.varlen import RowHeads, fastest, varlen_attention
from treewise.bench.workloads import SHAPES, Tokens, nested, random_model
from treewise.engine.engine import TreeEngine
from treewise.nn.attention import AUTO, choose
from treewise.nn.attention.flex import BLOCK_SIZE, num_key_rows
from treewise.nn.attention.interface import TreeContext
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.device import synchronized_clock
from treewise.nn.model_flops import auto_class, head_sizes
from treewise.nn.platform.card import card_name
from treewise.nn.platform.versions import installed_version
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.tree.forest import Forest

LEAST_SECONDS = 2e-3  # of one measurement
NUM_MEASUREMENTS = 3
CACHE_BYTES = 2**26  # what is read is larger, all calls in a row together
# Operations that make or name a tensor without computing, which a step counts as none.
FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "detach",
}


class Grid(NamedTuple):
    """Sizes that are measured. rows: of products; runs: tokens of a segment; tokens: of a tree or a packed row; moved:
    bytes of element-wise kernels; copied: bytes from the host."""

    rows: tuple[int, ...]
    runs: tuple[int, ...]
    tokens: tuple[int, ...]
    moved: tuple[int, ...]
    copied: tuple[int, ...]


_BYTES = tuple(2**power for power in range(10, 31, 2))
GRIDS = {
    "full": Grid((64, 512, 2048, 4096, 8192, 20_480), (32, 128, 512, 2048), (2048, 8192, 20_480), _BYTES, _BYTES[:9]),
    "cpu": Grid((16, 64, 256, 1024, 4096), (8, 32, 128, 512), (64, 256, 1024, 3072), _BYTES[:9], _BYTES[:8]),
    "tiny": Grid((4, 16), (4, 8), (16, 48), _BYTES[:4], _BYTES[:3]),
}
# What is measured where nothing else is asked for, by type of device: dtype, shape and grid.
USUAL = {"cuda": (torch.bfloat16, "qwen3-1.7b", "full"), "cpu": (torch.float32, "qwen3-17m", "cpu")}
# Of the time: each part ends when what came before it and it have taken so much.
PARTS = {"launches": 0.1, "moved": 0.2, "copies": 0.25, "products": 0.6, "attention": 1.0}

Say = Callable[[str], object]
Case = TypeVar("Case")


def attention_size(attention: str, mask: TreeMask) -> tuple[float, float]:
    """Of a micro-batch: pairs that one head computes (FlexAttention whole blocks, others those that are visible), and
    tokens of a mean segment, from a fork or a root to where a path ends."""
    own = mask.hi[mask.num_gateway_keys :]
    leaves = int((own == np.arange(1, len(own) + 1)).sum())
    if attention == "flex":
        pairs = num_key_rows(mask, torch.device("cpu")) * float(BLOCK_SIZE)
    else:
        pairs = float((mask.hi.astype(np.int64) - np.maximum(mask.lo, 0)).sum())
    return pairs, len(own) / max(leaves, 1)


def calibrate(
    device: torch.device,
    dtype: torch.dtype,
    shape: str,
    *,
    size: str = "full",
    seconds: float = 60.0,
    say: Say = lambda _: None,
) -> Calibration:
    """Measures a device for about so many seconds. shape: of `treewise bench`, whose products and heads are measured;
    size: of the grid. say: gets a line for each part."""
    begin, parts = time.perf_counter(), _Parts(device, dtype, shape, GRIDS[size])
    found: dict[str, Any] = {}
    for name, part in PARTS.items():
        parts.deadline = begin + part * seconds
        started = time.perf_counter()
        found[name] = getattr(parts, name)()
        say(f"{name}: {time.perf_counter() - started:.1f} s")
    launch, host = found["launches"]
    heads = parts.heads
    measured = found["products"], found["moved"], found["attention"], found["copies"]
    return Calibration(
        best_of(*measured, heads.size),
        dtype.itemsize,
        *measured,
        launch_seconds=launch,
        host_seconds=host,
        head_size=heads.size,
        is_queued=device.type == "cuda",
        about=_about(device, dtype, shape, GRIDS[size], parts, time.perf_counter() - begin),
    )


def _about(
    device: torch.device, dtype: torch.dtype, shape: str, grid: Grid, parts: "_Parts", seconds: float
) -> dict[str, Any]:
    versions = {name: installed_version(name) for name in ("torch", "triton", "transformers")}
    heads = parts.heads
    return {
        "card": card_name(device),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "versions": {"treewise": treewise.__version__, "python": platform.python_version(), **versions},
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if _is_cpu_time(device) else "wall time",
        "dtype": str(dtype).removeprefix("torch."),
        "attention": parts.attention_name,
        "flat attention": parts.flat_kernel,
        "domain": {
            "shape": shape,
            "products": f"of its layers and head, {grid.rows[0]:,} to {grid.rows[-1]:,} rows",
            "attention": f"{heads.queries} heads of {heads.size} over {heads.keys}, no window, mean segments of "
            f"{grid.runs[0]:,} to {grid.runs[-1]:,} tokens, up to {grid.tokens[-1]:,} tokens",
            "element-wise": f"{grid.moved[0]:,} to {grid.moved[-1]:,} bytes",
            "copies": f"{grid.copied[0]:,} to {grid.copied[-1]:,} bytes from the host",
            "outside": "the roofline of the best rate of each kind, with a launch",
        },
        "left out for lack of time": parts.left_out,
    }


class _Parts:
    """One method for each of `PARTS`, which ends at `deadline` (of `time.perf_counter`)."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shape: str, grid: Grid) -> None:
        self.device, self.dtype, self.grid = device, dtype, grid
        kind, fields = SHAPES[shape]
        config = AutoConfig.for_model(kind, **{**fields, "pad_token_id": None})
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        linear = [each.weight.shape for each in model.modules() if isinstance(each, nn.Linear)]
        self.linear = list(dict.fromkeys((int(n), int(k)) for n, k in linear))
        self.heads = RowHeads(*head_sizes(config))
        self.attention_name = choose(AUTO, device.type, dtype)
        self.flat_kernel = ""
        self.deadline = 0.0
        self.left_out: list[str] = []

    def launches(self) -> tuple[float, float]:
        """Seconds of the host for a bare operation, and for one of a step."""
        one, other = (torch.ones(16, dtype=self.dtype, device=self.device) for _ in range(2))
        bare = self._least([lambda: torch.add(one, one, out=other)] * 100) / 100
        model = random_model("qwen3-tiny", torch.float32, self.device)
        engine = TreeEngine(model, attention="reference", check=False)
        forest = Forest.from_trajectories(nested(Tokens(64, 0), (12, 4), (2,)))
        engine.step(forest)
        with _Counted() as counted:
            engine.step(forest)
        return bare, self._least([lambda: engine.step(forest)]) / counted.number

    def products(self) -> dict[str, Curve]:
        """Forward, gradient of the input, gradient of the weight: of each layer, by rows."""
        found: dict[str, list[tuple[float, float]]] = {}
        ordered = [(rows, *sides) for rows in self.grid.rows for sides in self.linear]
        for m, n, k in self._in_time("products", ordered):
            if n * k * self.dtype.itemsize > 2**28 and m > 4096:
                continue  # a head, whose logits come in chunks
            sets = self._sets(m * k + n * k + m * n)
            x, weight, grad = ([self._filled(*shape) for _ in range(sets)] for shape in ((m, k), (n, k), (m, n)))
            forms = (
                (product_key((m, n, k), 0), m, lambda x, weight, _: torch.mm(x, weight.t())),
                (product_key((m, k, n), 0), m, lambda _, weight, grad: torch.mm(grad, weight)),
                (product_key((n, k, m), 2), m, lambda x, _, grad: torch.mm(grad.t(), x)),
            )
            for key, size, run in forms:
                each = [partial(run, *given) for given in zip(x, weight, grad, strict=True)]
                found.setdefault(key, []).append((size, self._least(each) / len(each)))
        return {key: _curve(points) for key, points in found.items()}

    def attention(self) -> dict[str, dict[int, Curve]]:
        """Of trees whose branches have so many tokens, and of packed rows of sequences of so many."""
        found: dict[str, dict[int, list[tuple[float, float]]]] = {}
        cases = [(tokens, run) for tokens in self.grid.tokens for run in self.grid.runs if 4 * run <= tokens]
        for tokens, run in self._in_time("attention", cases):
            for kind, mean, pairs, call in (self._tree(tokens, run), self._flat(tokens, run)):
                q, k, v = (self._filled(1, heads, tokens, self.heads.size).requires_grad_() for heads in self._counts())
                with torch.no_grad():
                    forward = self._least([partial(call, q, k, v)])
                grad = torch.ones_like(call(q, k, v))
                both = self._least([partial(_both, call, (q, k, v), grad)])
                point = pairs * self.heads.queries
                found.setdefault(kind, {}).setdefault(mean, []).append((point, forward))
                backward = max(both - forward, forward / 2)
                found.setdefault(f"{kind}_backward", {}).setdefault(mean, []).append((point, backward))
        return {kind: {run: _curve(points) for run, points in each.items()} for kind, each in found.items()}

    def moved(self) -> dict[str, Curve]:
        """Kernels that add, that read what lies in another order, and that reduce rows, by bytes read and written."""
        found: dict[str, list[tuple[float, float]]] = {}
        item, width = self.dtype.itemsize, 128
        for size in self._in_time("moved", self.grid.moved):
            rows = max(2, size // (3 * item * width))
            one, two = ([self._filled(rows, width) for _ in range(self._sets(3 * rows * width))] for _ in range(2))
            across = [each.view(width, rows).t() for each in one]
            kernels: dict[str, tuple[int, list[Callable[[], Tensor]]]] = {
                "pointwise": (3, [partial(torch.mul, a, b) for a, b in zip(one, two, strict=True)]),
                "strided": (2, [each.contiguous for each in across]),
                "reduced": (1, [partial(torch.sum, each, -1) for each in one]),
            }
            for kind, (times, calls) in kernels.items():
                seconds = self._least(calls) / len(calls)
                found.setdefault(kind, []).append((times * rows * width * item, seconds))
        return {kind: _curve(points) for kind, points in found.items()}

    def copies(self) -> Curve:
        """From memory of the host that a device may read by itself, where there is one."""
        points = []
        for size in self._in_time("copies", self.grid.copied):
            sources = [torch.zeros(size, dtype=torch.uint8) for _ in range(max(1, min(16, CACHE_BYTES // size)))]
            if self.device.type == "cuda":
                sources = [each.pin_memory() for each in sources]
            there = torch.empty(size, dtype=torch.uint8, device=self.device)
            calls = [partial(there.copy_, each, non_blocking=True) for each in sources]
            points.append((size, self._least(calls) / len(calls)))
        return _curve(points)

    def _counts(self) -> tuple[int, int, int]:
        return self.heads.queries, self.heads.keys, self.heads.keys

    def _tree(self, tokens: int, run: int) -> tuple[str, int, float, Callable[..., Tensor]]:
        """A trunk of a quarter of the tokens and branches of the rest, so a mean segment has four thirds of a run."""
        branches = max(2, round(0.75 * tokens / run))
        branch = int(0.75 * tokens) // branches
        items = nested(Tokens(32_000, 0), (tokens - branches * branch, branch), (branches,))
        mask = TreeMask.from_layout(lay_out(plan(Forest.from_trajectories(items)), 0))
        attend, rule = TreeContext(mask, self.attention_name).run, LayerRule(self.heads.size**-0.5)
        pairs, _ = attention_size(self.attention_name, mask)
        return "attention", round(4 / 3 * run), pairs, lambda q, k, v: attend(q, k, v, mask, rule, None, (), (None, 0))

    def _flat(self, tokens: int, run: int) -> tuple[str, int, float, Callable[..., Tensor]]:
        """A packed row of sequences of four runs, by the fastest kernel at hand."""
        longest = min(4 * run, tokens)
        lengths = (*([longest] * (tokens // longest)), *([tokens % longest] if tokens % longest else []))
        self.flat_kernel = fastest(self.device, self.dtype, self.heads, lengths, lengths).name
        bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=self.device)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (each[0].transpose(0, 1) for each in (q, k, v))
            return varlen_attention(*rows, bounds, bounds, longest, longest, kernel=self.flat_kernel)

        return "flat_attention", 4 * run, flat_size(np.array(lengths))[0], call

    def _filled(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.01, dtype=self.dtype, device=self.device)

    def _sets(self, num_values: int) -> int:
        return max(1, min(16, CACHE_BYTES // (num_values * self.dtype.itemsize)))

    def _in_time(self, part: str, cases: Sequence[Case]) -> Iterator[Case]:
        """Cases until the deadline, one at least; the rest is noted."""
        for number, case in enumerate(cases):
            if number and time.perf_counter() > self.deadline:
                self.left_out.append(f"{part}: {len(cases) - number} of {len(cases)} cases")
                return
            yield case

    def _least(self, calls: Sequence[Callable[[], object]]) -> float:
        """Seconds of all calls, one after the other, in the fastest of a few measurements."""
        for call in calls:
            call()
        begin = self._clock()
        for call in calls:
            call()
        once = max(self._clock() - begin, 1e-7)
        times, least = max(1, int(LEAST_SECONDS / once)), once
        for _ in range(NUM_MEASUREMENTS):
            begin = self._clock()
            for call in islice(cycle(calls), times * len(calls)):
                call()
            least = min(least, (self._clock() - begin) / times)
        return least

    def _clock(self) -> float:
        return time.process_time() if _is_cpu_time(self.device) else synchronized_clock(self.device)


def _both(call: Callable[..., Tensor], given: tuple[Tensor, ...], grad: Tensor) -> object:
    """Forward and backward."""
    return torch.autograd.grad(call(*given), given, grad)


def flat_size(lengths: np.ndarray) -> tuple[float, float]:
    """Pairs and tokens of a mean sequence of a packed row: what `attention_size` says of a tree."""
    each = lengths.astype(np.float64)
    return float((each * (each + 1) / 2).sum()), float(each.mean())


def _is_cpu_time(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() == 1


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Of points in any order; of equal sizes the least counts, and no larger size takes less time than a smaller."""
    least: dict[float, float] = {}
    for size, seconds in points:
        least[float(size)] = min(seconds, least.get(float(size), seconds))
    sizes = sorted(least)
    return Curve(tuple(sizes), tuple(np.maximum.accumulate([least[each] for each in sizes]).tolist()))


class _Counted(TorchDispatchMode):
    """Inside, operations are counted that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view and func.overloadpacket.__name__ not in FREE
        return func(*args, **(kwargs or {}))
