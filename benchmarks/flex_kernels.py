"""The Triton kernels that torch generates for treewise's FlexAttention calls, without a GPU.

    python benchmarks/flex_kernels.py interpret [CASE ...]       # runs them on the CPU, beside the reference
    python benchmarks/flex_kernels.py resources [--json FILE]    # compiles them for six GPUs
    python benchmarks/flex_kernels.py table FILE                 # the results as rows of benchmarks/reports/method.md

Both need the package `triton` (pip install triton), which CPU builds of torch do not bring. Inductor lowers the call
for CPU tensors with its Triton backend, the tiles that it takes on the GPU of a compute capability, and the lowering of
CUDA; what stands in its way on a CPU build is replaced in `without_gpu`, where each line says why.

`interpret` executes forward and backward in Triton's interpreter (NumPy) on the cases of
`treewise.nn.attention.kernel_cases`, and prints the largest error of each result beside what is allowed. Cases named
`broken` compute with a wrong mask and must exceed it. `resources` prints registers, spills and shared memory of each
kernel with the tiles that treewise takes on each GPU, and with torch's where they are others, and the blocks that fit
on a multiprocessor at once; none: it cannot be launched there.
"""

import argparse
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__" and sys.argv[1:2] == ["interpret"]:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch does

import numpy as np
import torch
from torch import Tensor

from treewise.nn.attention import flex
from treewise.nn.attention.kernel_cases import (
    CASES,
    CPU,
    DTYPES,
    HEAD_SIZES,
    Case,
    Errors,
    is_within,
    kernel_errors,
    with_gradients,
)
from treewise.nn.attention.mask import LayerRule
from treewise.nn.host_memory import SavedOnHost

# Large ones, since the interpreter takes as long for a small one; they divide the blocks of the mask.
INTERPRETED_TILES = {
    **{"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64},
    **{"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64},
}


class Gpu(NamedTuple):
    """Limits of a block and of a multiprocessor (CUDA C++ Programming Guide, table of technical specifications)."""

    capability: tuple[int, int]
    shared_bytes: int
    shared_bytes_of_all: int
    warps: int

    @property
    def number(self) -> int:
        """90 of (9, 0)."""
        return 10 * self.capability[0] + self.capability[1]


GPUS = {
    "sm_80": Gpu((8, 0), 166_912, 167_936, 64),
    "sm_86": Gpu((8, 6), 101_376, 102_400, 48),
    "sm_89": Gpu((8, 9), 101_376, 102_400, 48),
    "sm_90": Gpu((9, 0), 232_448, 233_472, 64),
    "sm_100": Gpu((10, 0), 232_448, 233_472, 64),
    "sm_120": Gpu((12, 0), 101_376, 102_400, 48),
}
KNOWN_TORCH = "2.13."
REGISTERS = 65_536  # of a multiprocessor
RESERVED_BYTES = 1_024  # of shared memory, by each block


# -- the lowering of CUDA on a CPU build ------------------------------------------------------------------------------


@contextmanager
def without_gpu(gpu: Gpu, tiles: dict[str, int] | None = None) -> Iterator[None]:
    """Inside, `flex._compiled` on CPU tensors generates the Triton kernels of this GPU.

    tiles: kernel options that replace treewise's own.
    """
    import triton
    from torch._inductor import choices, config, graph
    from torch._inductor.kernel.flex import flex_attention as lowering
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
    from torch.nn.attention import flex_attention as public
    from triton.backends.compiler import GPUTarget

    options_of, heuristics = public._apply_kernel_options, CUDAConfigHeuristic()

    def with_lse(*args: Any, **kwargs: Any) -> dict[str, Any]:
        options = options_of(*args, **kwargs)
        if torch.is_grad_enabled():  # as on CUDA; left out on a CPU, where there is no backward
            options["OUTPUT_LOGSUMEXP"] = True
        return options

    def accepted(*_: Tensor) -> None:  # traced, which a Mock cannot be
        return None

    target = GPUTarget("cuda", gpu.number, 32)
    driver = SimpleNamespace(  # asked for the target and for the memory of a multiprocessor
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _=0: 0,
        get_active_torch_device=lambda: CPU,
        utils=SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": gpu.shared_bytes, "multiprocessor_count": 132}
        ),
    )
    fwd, bwd = "get_flex_attention_fwd_configs", "get_flex_attention_bwd_configs"
    with ExitStack() as stack:
        use = stack.enter_context
        use(mock.patch.object(triton.runtime.driver, "_active", driver))
        use(config.patch(cpu_backend="triton", force_disable_caches=True, compile_threads=1))
        use(mock.patch.object(public, "_validate_device", accepted))  # refuses a backward on a CPU
        use(mock.patch.object(public, "_apply_kernel_options", with_lse))
        use(mock.patch.object(torch.cuda, "get_device_capability", return_value=gpu.capability))
        use(mock.patch.object(flex, "card", return_value=flex.Card(gpu.capability, gpu.shared_bytes)))
        use(mock.patch.object(choices.InductorChoices, fwd, lambda _, *a: heuristics.get_flex_attn_fwd_configs(*a[:2])))
        use(mock.patch.object(choices.InductorChoices, bwd, lambda _, *a: heuristics.get_flex_attn_bwd_configs(*a[:2])))
        # On CUDA a score cap is a tensor of the device; zero-dimensional ones of a CPU would be passed as numbers.
        use(mock.patch.object(graph.GraphLowering, "is_unspec_arg", return_value=False))
        use(_lowered_as_on_cuda(lowering))
        use(mock.patch.object(flex, "_uncompiled", flex._compiled))
        if tiles is not None:
            use(mock.patch.object(flex, "tiles", return_value=dict(tiles)))
        torch._dynamo.reset()
        flex._compiled_kernel.cache_clear()
        yield
    torch._dynamo.reset()
    flex._compiled_kernel.cache_clear()


@contextmanager
def _lowered_as_on_cuda(lowering: Any) -> Iterator[None]:
    """torch's lowering without its first lines, which send tensors of a CPU to kernels in C++."""
    condition = 'if query.get_device().type == "cpu":'
    source = _source_of_lowering(lowering)
    if not torch.__version__.startswith(KNOWN_TORCH) or source.count(condition) != 1:
        raise SystemExit(
            f"torch {torch.__version__}: the lowering of FlexAttention was read for {KNOWN_TORCH} alone. Compare "
            "torch/_inductor/kernel/flex/flex_attention.py with that release, then change KNOWN_TORCH."
        )
    exec(compile(source.replace(condition, "if False:"), lowering.__file__, "exec"), vars(lowering))
    try:
        yield
    finally:
        exec(compile(source, lowering.__file__, "exec"), vars(lowering))


@cache
def _source_of_lowering(lowering: Any) -> str:
    return inspect.getsource(lowering.flex_attention)  # before it is replaced, which ends with another one


# -- executed by the interpreter --------------------------------------------------------------------------------------


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter, with the hyperbolic tangent that it lacks (a function of NVIDIA's library), and products of
    bfloat16, whose bits it multiplies as integers (triton 3.9).

    It replaces the functions of its language at each call of a device function, which takes nine tenths of the time;
    here once for each module.
    """
    from torch._inductor.runtime import triton_helpers
    from triton import language
    from triton.runtime import interpreter

    def tanh(x: Any) -> Any:
        return language.tensor(interpreter.TensorHandle(np.tanh(x.handle.data), x.handle.dtype), x.type)

    is_replaced = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__globals__["__name__"]
        if module not in is_replaced:
            is_replaced.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    multiply = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == language.bfloat16:
            a, b = self.cast_impl(a, language.float32), self.cast_impl(b, language.float32)
        return multiply(self, a, b, *others)

    library = mock.patch.object(triton_helpers.libdevice, "tanh", tanh)
    products = mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot)
    with library, products, mock.patch.object(interpreter.InterpretedFunction, "__call__", call):
        yield


def interpret(case: Case) -> Errors:
    """Largest error and what is allowed, of the output and of each gradient. What the forward saves waits on the host,
    as with `offload`: the compiled backward refuses what comes back in another order of memory."""

    def attend(*inputs: Any) -> Tensor:
        with SavedOnHost(torch.nn.Module()):
            return flex.flex_attention_tree(*inputs)

    with without_gpu(GPUS["sm_90"], INTERPRETED_TILES), quick_interpreter():
        return kernel_errors(attend, case)


# -- compiled for a GPU -----------------------------------------------------------------------------------------------

KEYS = ("gpu", "dtype", "head_sizes", "tiles", "kernel")  # of a row
# With a window, chunks, a score cap and sinks, which take up to 1 KiB of shared memory more than none of them.
RULE = LayerRule(0.3, window=150, chunk=300, softcap=0.9)


def sources(case: Case, gpu: Gpu, tiles: dict[str, int] | None) -> dict[str, str]:
    """The generated source of the forward and the backward kernel."""
    from torch._inductor.async_compile import AsyncCompile

    found: dict[str, str] = {}

    def keep(_: Any, name: str, source: str, *__: Any, **___: Any) -> Any:
        if "_tem_" in name:
            found["backward" if "backward" in name else "forward"] = source
        return SimpleNamespace(run=lambda *_, **__: None)

    mask = case.mask()
    inputs = case.inputs(mask)
    cotangent = torch.zeros(inputs[0].shape[:3] + inputs[2].shape[3:])
    with without_gpu(gpu, tiles), mock.patch.object(AsyncCompile, "triton", keep):
        with_gradients(flex.flex_attention_tree, inputs, mask, case.rule, cotangent)
    return found


_generated: dict[str, dict[str, str]] = {}


def _sources_once(case: Case, gpu: Gpu, tiles: Mapping[str, Any]) -> dict[str, str]:
    """`sources`, generated once for all GPUs for which torch takes the same configuration."""
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

    with mock.patch.object(torch.cuda, "get_device_capability", return_value=gpu.capability):
        heuristics, asked = CUDAConfigHeuristic(), (case.head_sizes[0], case.dtype)
        chosen = heuristics.get_flex_attn_fwd_configs(*asked), heuristics.get_flex_attn_bwd_configs(*asked)
    key = repr((case, chosen, sorted(tiles.items())))
    if key not in _generated:
        _generated[key] = sources(case, gpu, dict(tiles))
    return _generated[key]


def resources(source: str, gpu: Gpu) -> dict[str, Any]:
    """What one block of a kernel takes on a GPU, and how many blocks a multiprocessor holds."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource

    name = re.search(r"^def (triton_\w+)\(", source, re.MULTILINE)
    assert name is not None
    kernel = getattr(PyCodeCache.load(source), name[1])
    chosen = kernel.configs[0]  # a template has one; loops, where torch measures no others, take the first
    constants = kernel.triton_meta["constants"] | chosen.kwargs
    described = ASTSource(kernel.fn, kernel.triton_meta["signature"], constants, kernel.triton_meta["configs"][0])
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    with mock.patch.object(CUDABackend, "make_cubin", return_value=b""):  # assembled below, once, for the report
        compiled = triton.compile(described, target=GPUTarget("cuda", gpu.number, 32), options=options)
    facts = {
        **{key: int(value) for key, value in re.findall(r"(BLOCK_[MN][12]?) : tl\.constexpr = (\d+)", source)},
        **{"warps": chosen.num_warps, "stages": chosen.num_stages, "shared_bytes": compiled.metadata.shared},
        **_assembled(compiled.asm["ptx"], gpu.number),
    }
    registers = -(-facts["registers"] // 8) * 8 * 32 * chosen.num_warps
    by_memory = gpu.shared_bytes_of_all // (facts["shared_bytes"] + RESERVED_BYTES)
    fits = facts["shared_bytes"] <= gpu.shared_bytes
    facts["blocks"] = min(REGISTERS // registers, by_memory, gpu.warps // chosen.num_warps) if fits else 0
    return facts


def _assembled(ptx: str, number: int) -> dict[str, int]:
    """Registers of a thread and bytes that it spills, as NVIDIA's assembler reports them."""
    from triton.backends.nvidia.compiler import get_ptxas

    name = f"sm_{number}{'a' if number >= 90 else ''}"  # with what this architecture alone has
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [get_ptxas(number).path, "-v", f"--gpu-name={name}", str(file), "-o", str(file.with_suffix(".cubin"))]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    used = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert used is not None, report
    assert spilled is not None, report
    return {"registers": int(used[1]), "spilled_bytes": int(spilled[1])}


def all_resources(
    gpus: list[str], head_sizes: list[int], dtypes: list[str], tiles_of: str | None
) -> Iterator[dict[str, Any]]:
    """One row for each kernel, GPU, head size, dtype and choice of tiles."""
    for sizes, dtype, name in itertools.product(HEAD_SIZES, dtypes, gpus):
        if sizes[0] not in head_sizes:
            continue
        case, gpu = Case(RULE, head_sizes=sizes, dtype=getattr(torch, dtype), has_sinks=True), GPUS[name]
        own = _sources_once(case, gpu, flex.tiles(case.dtype, sizes, flex.Card(gpu.capability, gpu.shared_bytes)))
        torchs = {} if tiles_of == "treewise" else _sources_once(case, gpu, {})
        made = [("treewise", kernel, source) for kernel, source in own.items()] if tiles_of != "torch" else []
        made += [("torch", kernel, source) for kernel, source in torchs.items() if source != own[kernel]]
        for tiles, kernel, source in made:
            try:
                facts = resources(source, gpu)
            except subprocess.CalledProcessError as error:
                facts = {"failed": error.stderr.strip().splitlines()[-1]}
            yield {"gpu": name, "dtype": dtype, "head_sizes": list(sizes), "tiles": tiles, "kernel": kernel, **facts}


# -- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("interpret", "resources", "table"))
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--gpu", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--head_sizes", nargs="+", type=int, default=[size for size, _ in HEAD_SIZES])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tiles", choices=("treewise", "torch"), help="of one alone (both)")
    parser.add_argument("--json", type=Path, help="results; rows of `resources` are added to the file's")
    args = parser.parse_args()
    if args.action == "resources":
        rows = all_resources(args.gpu, args.head_sizes, args.dtype, args.tiles)
        _tabulate(rows, args.json)
        return 0
    if args.action == "table":
        print("\n".join(table_lines(json.loads(Path(args.cases[0]).read_text())["kernels"])))
        return 0
    results = {}
    for name in args.cases or CASES:
        results[name] = interpret(CASES[name])
        errors = [f"{key} {error:.1e} of {most:.1e}" for key, (error, most) in results[name].items()]
        print(f"{name}: {', '.join(errors)}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(is_within(each) is not CASES[name].is_broken for name, each in results.items()) else 1


def _tabulate(rows: Iterator[dict[str, Any]], file: Path | None) -> None:
    kept = json.loads(file.read_text())["kernels"] if file is not None and file.exists() else []
    for row in rows:
        print(json.dumps(row), flush=True)
        kept = [each for each in kept if any(each[key] != row[key] for key in KEYS)] + [row]
        if file is not None:  # after every row: a run that is cut short leaves what it computed
            versions = {"torch": torch.__version__, "triton": _triton_version()}
            lines = ",\n".join("  " + json.dumps(each) for each in kept)
            head = json.dumps({"benchmark": "flex kernels", **versions}, indent=1)
            file.write_text(f'{head[:-2]},\n "kernels": [\n{lines}\n ]\n}}\n')


def table_lines(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each dtype, head size and kernel, one column for each GPU: tiles, warps x stages, registers, bytes
    spilled and KiB of shared memory; behind `torch:`, KiB that torch's tiles take where they cannot be launched."""
    lines = [f"| kernel | {' | '.join(GPUS)} |", f"|---|{'---|' * len(GPUS)}"]
    by = {tuple(str(row[key]) for key in KEYS): row for row in rows}
    for dtype, sizes, kernel in itertools.product(DTYPES, HEAD_SIZES, ("forward", "backward")):
        cells = []
        for gpu in GPUS:
            own, torchs = (by.get((gpu, dtype, str(list(sizes)), each, kernel)) for each in ("treewise", "torch"))
            cells.append("" if own is None else _cell(own))
            if torchs is not None and torchs["blocks"] == 0:
                cells[-1] += f"; torch: {torchs['shared_bytes'] / 1024:.0f}"
        name = f"{sizes[0]}" if sizes[0] == sizes[1] else f"{sizes[0]}/{sizes[1]}"
        lines.append(f"| {dtype} {name} {kernel} | {' | '.join(cells)} |")
    return lines


def _cell(row: dict[str, Any]) -> str:
    tiles = "x".join(str(row[key]) for key in row if key in ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1"))
    how = f"{tiles} {row['warps']}w {row['stages']}s, {row['registers']} r"
    return f"{how}, {row['spilled_bytes']:,} sp, {row['shared_bytes'] / 1024:.0f} KiB"


def _triton_version() -> str:
    import triton

    return triton.__version__


if __name__ == "__main__":
    sys.exit(main())
