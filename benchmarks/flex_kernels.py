"""The Triton kernels that torch generates for treewise's FlexAttention calls, without a GPU.

    python benchmarks/flex_kernels.py interpret [CASE ...]       # runs them on the CPU, beside the reference
    python benchmarks/flex_kernels.py resources [--json FILE]    # compiles them for sm_90 and sm_100

Both need the package `triton` (pip install triton), which CPU builds of torch do not bring. Inductor lowers the call
for CPU tensors with its Triton backend, the tiles that it takes on the GPU of a compute capability, and the lowering of
CUDA; what stands in its way on a CPU build is replaced in `without_gpu`, where each line says why.

`interpret` executes forward and backward in Triton's interpreter (NumPy) on the cases of
`treewise.nn.attention.kernel_cases`, and prints the largest error of each result beside what is allowed. Cases named
`broken` compute with a wrong mask and must exceed it. `resources` prints registers,
spills and shared memory of each kernel, and the blocks that fit on a multiprocessor at once.
"""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__" and sys.argv[1:2] == ["interpret"]:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch does

import numpy as np
import torch
from torch import Tensor

from treewise.nn.attention import flex
from treewise.nn.attention.kernel_cases import CASES, CPU, Case, Errors, is_within, kernel_errors, with_gradients
from treewise.nn.attention.mask import LayerRule

# Large ones, since the interpreter takes as long for a small one; they divide the blocks of the mask.
INTERPRETED_TILES = {
    **{"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64},
    **{"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64},
}
CAPABILITIES = {"sm_90": (9, 0), "sm_100": (10, 0)}


# -- the lowering of CUDA on a CPU build ------------------------------------------------------------------------------


@contextmanager
def without_gpu(capability: tuple[int, int], tiles: dict[str, int] | None = None) -> Iterator[None]:
    """Inside, `flex._compiled` on CPU tensors generates the Triton kernels of a GPU of this compute capability.

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

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver = SimpleNamespace(  # asked for the target and for the memory of a multiprocessor
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _=0: 0,
        get_active_torch_device=lambda: CPU,
        utils=SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132}
        ),
    )
    fwd, bwd = "get_flex_attention_fwd_configs", "get_flex_attention_bwd_configs"
    with ExitStack() as stack:
        use = stack.enter_context
        use(mock.patch.object(triton.runtime.driver, "_active", driver))
        use(config.patch(cpu_backend="triton", force_disable_caches=True, compile_threads=1))
        use(mock.patch.object(public, "_validate_device", accepted))  # refuses a backward on a CPU
        use(mock.patch.object(public, "_apply_kernel_options", with_lse))
        use(mock.patch.object(torch.cuda, "get_device_capability", return_value=capability))
        use(mock.patch.object(choices.InductorChoices, fwd, lambda _, *a: heuristics.get_flex_attn_fwd_configs(*a[:2])))
        use(mock.patch.object(choices.InductorChoices, bwd, lambda _, *a: heuristics.get_flex_attn_bwd_configs(*a[:2])))
        # On CUDA a score cap is a tensor of the device; zero-dimensional ones of a CPU would be passed as numbers.
        use(mock.patch.object(graph.GraphLowering, "is_unspec_arg", return_value=False))
        use(_lowered_as_on_cuda(lowering))
        use(mock.patch.object(flex, "_uncompiled", flex._compiled))
        if tiles is not None:
            use(mock.patch.object(flex, "_tiles", return_value=dict(tiles)))
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
    if source.count(condition) != 1:
        raise SystemExit(f"torch {torch.__version__} lowers FlexAttention for CPUs in another way than 2.13")
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
    """Largest error and what is allowed, of the output and of each gradient."""
    with without_gpu(CAPABILITIES["sm_90"], INTERPRETED_TILES), quick_interpreter():
        return kernel_errors(flex.flex_attention_tree, case)


# -- compiled for a GPU -----------------------------------------------------------------------------------------------

# Of a multiprocessor of sm_90 and sm_100 (CUDA C++ Programming Guide, table of technical specifications).
REGISTERS, SHARED_BYTES, SHARED_BYTES_OF_ALL, WARPS = 65_536, 232_448, 233_472, 64
RESERVED_BYTES = 1_024  # of shared memory, by each block
KEYS = ("gpu", "head_sizes", "tiles", "kernel")  # of a row
BF16_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))
TILES: dict[str, dict[str, int]] = {
    "default": {},  # torch's
    "128x64": {
        **{"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64},
        **{"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64},
    },
}


def sources(case: Case, capability: tuple[int, int], tiles: dict[str, int] | None) -> dict[str, str]:
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
    with without_gpu(capability, tiles), mock.patch.object(AsyncCompile, "triton", keep):
        with_gradients(flex.flex_attention_tree, inputs, mask, case.rule, cotangent)
    return found


def resources(source: str, target_name: str) -> dict[str, Any]:
    """What one block of a kernel takes on a GPU, and how many blocks a multiprocessor holds."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name = re.search(r"def (triton_tem_\w+)", source)
    assert name is not None
    kernel = getattr(PyCodeCache.load(source), name[1])
    (chosen,) = kernel.configs
    major, minor = CAPABILITIES[target_name]
    constants = kernel.triton_meta["constants"] | chosen.kwargs
    described = ASTSource(kernel.fn, kernel.triton_meta["signature"], constants, kernel.triton_meta["configs"][0])
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    compiled = triton.compile(described, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    facts = {
        **{key: int(value) for key, value in re.findall(r"(BLOCK_[MN][12]?) : tl\.constexpr = (\d+)", source)},
        **{"warps": chosen.num_warps, "stages": chosen.num_stages, "shared_bytes": compiled.metadata.shared},
        **_assembled(compiled.asm["ptx"], target_name),
    }
    registers = -(-facts["registers"] // 8) * 8 * 32 * chosen.num_warps
    by_memory = SHARED_BYTES_OF_ALL // (facts["shared_bytes"] + RESERVED_BYTES)
    fits = facts["shared_bytes"] <= SHARED_BYTES
    facts["blocks"] = min(REGISTERS // registers, by_memory, WARPS // chosen.num_warps) if fits else 0
    return facts


def _assembled(ptx: str, target_name: str) -> dict[str, int]:
    """Registers of a thread and bytes that it spills, as NVIDIA's assembler reports them."""
    from triton.backends.nvidia.compiler import get_ptxas

    capability = 10 * CAPABILITIES[target_name][0] + CAPABILITIES[target_name][1]
    assembler = get_ptxas(capability)
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"  # with what this architecture alone has
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [assembler.path, "-v", f"--gpu-name={name}", str(file), "-o", str(file.with_suffix(".cubin"))]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    used = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert used is not None, report
    assert spilled is not None, report
    return {"registers": int(used[1]), "spilled_bytes": int(spilled[1])}


def all_resources(targets: list[str], head_sizes: list[int]) -> Iterator[dict[str, Any]]:
    """One row for each kernel, GPU, head size and choice of tiles, in bfloat16."""
    for target_name in targets:
        capability = CAPABILITIES[target_name]
        for sizes in (each for each in BF16_SIZES if each[0] in head_sizes):
            for tiles_name, tiles in TILES.items():
                case = Case(LayerRule(scaling=0.2), head_sizes=sizes, dtype=torch.bfloat16)
                for kernel, source in sources(case, capability, tiles).items():
                    try:
                        facts = resources(source, target_name)
                    except subprocess.CalledProcessError as error:
                        facts = {"failed": error.stderr.strip().splitlines()[-1]}
                    what = {"gpu": target_name, "head_sizes": list(sizes), "tiles": tiles_name, "kernel": kernel}
                    yield {**what, **facts}


# -- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("interpret", "resources"))
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--gpu", nargs="+", choices=CAPABILITIES, default=list(CAPABILITIES))
    parser.add_argument("--head_sizes", nargs="+", type=int, default=[key for key, _ in BF16_SIZES])
    parser.add_argument("--json", type=Path, help="results; rows of `resources` are added to the file's")
    args = parser.parse_args()
    if args.action == "resources":
        _tabulate(args.gpu, args.head_sizes, args.json)
        return 0
    results = {}
    for name in args.cases or CASES:
        results[name] = interpret(CASES[name])
        errors = [f"{key} {error:.1e} of {most:.1e}" for key, (error, most) in results[name].items()]
        print(f"{name}: {', '.join(errors)}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(is_within(each) is not CASES[name].is_broken for name, each in results.items()) else 1


def _tabulate(targets: list[str], head_sizes: list[int], file: Path | None) -> None:
    kept = json.loads(file.read_text())["kernels"] if file is not None and file.exists() else []
    for row in all_resources(targets, head_sizes):
        print(json.dumps(row), flush=True)
        kept = [each for each in kept if any(each[key] != row[key] for key in KEYS)] + [row]
        if file is not None:  # after every row: a run that is cut short leaves what it computed
            results = {
                "benchmark": "flex kernels",
                "torch": torch.__version__,
                "triton": _triton_version(),
                "kernels": kept,
            }
            file.write_text(json.dumps(results, indent=1) + "\n")


def _triton_version() -> str:
    import triton

    return triton.__version__


if __name__ == "__main__":
    sys.exit(main())
