"""Kernels of compiled layers, as Inductor schedules them, without a GPU: a backend of torch.compile that runs none.

    layer.compile(dynamic=True, backend=counting_backend(add))

Each graph, of a forward or of a backward, is lowered and scheduled by Inductor; its kernels are read from the code that
would call them, which is not compiled further. The graph itself runs as it was traced, so it may run on tensors without
data. With `as_on_gpu` Inductor schedules for Triton and a Hopper card (which needs the package `triton`); without, for
a CPU, whose fused loops are fewer: it splits no reduction.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering

NAME = "counted graph"  # of what runs for a graph, in a profile
CALLS = re.compile(r"(triton_\w+)\.run\(|(cpp_fused_\w+)\(|(extern_kernels\.\w+)\(|= torch\.ops\.(\w+\.\w+\.\w+)\(")


class _Scheduled(Exception):
    """No error: Inductor has written its code, and is left. code: that would call the kernels."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code


def counting_backend(add: Callable[[list[str]], object]) -> Callable[..., Any]:
    """A backend whose graphs give the names of their kernels to `add` whenever they run."""

    def of_graph(graph: Any, inputs: Any, **settings: Any) -> Callable[[list[Any]], Any]:
        names = kernels_of(graph, inputs, **settings)

        def run(given: list[Any]) -> Any:
            add(names)
            values = list(given)
            given.clear()
            with torch.profiler.record_function(NAME):
                return graph(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return lambda graph, inputs: compile_fx(graph, inputs, inner_compile=of_graph)


def kernels_of(graph: Any, inputs: Any, **settings: Any) -> list[str]:
    """Names of the kernels that a graph of Inductor launches, in their order."""
    codegen = GraphLowering.codegen

    def stop(self: Any) -> None:
        wrapper, _ = codegen(self)
        raise _Scheduled(wrapper.value)

    code = ""
    with mock.patch.object(GraphLowering, "codegen", stop), config.patch(force_disable_caches=True):
        try:
            compile_fx_inner(graph, inputs, **settings)
        except Exception as error:  # Inductor's own, around ours
            code = _code_of(error)
    if not code:
        return []  # a graph without operations
    body = code[code.index("def call(") :]
    return ["".join(each) for each in CALLS.findall(body)]


def _code_of(error: BaseException | None) -> str:
    last = error
    while error is not None and not isinstance(error, _Scheduled):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    if error is None:
        assert last is not None
        raise last
    return error.code


@contextmanager
def as_on_gpu(capability: int = 90, multiprocessors: int = 132) -> Iterator[None]:
    """Inside, Inductor schedules tensors of a CPU as it does those of a GPU: kernels of Triton, split reductions."""
    import triton
    from triton.backends.compiler import GPUTarget

    target, cpu = GPUTarget("cuda", capability, 32), torch.device("cpu")
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _=0: 0,
        get_active_torch_device=lambda: cpu,
        utils=SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232_448, "multiprocessor_count": multiprocessors}
        ),
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(config.patch(cpu_backend="triton", force_disable_caches=True, compile_threads=1))
        yield
