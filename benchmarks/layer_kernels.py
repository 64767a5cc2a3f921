"""Kernels of compiled layers, as Inductor schedules them, without a GPU: a backend of torch.compile that runs none.

    layer.compile(dynamic=True, backend=counting_backend(add))

Each graph, of a forward or of a backward, is lowered and scheduled by Inductor; its kernels are read from the code that
would call them, which is not compiled further. The graph itself runs as it was traced, so it may run on tensors without
data: it is lowered as if they were a CPU's. With `as_on_gpu` Inductor schedules for Triton and a Hopper card (which
needs the package `triton`); without, for a CPU, whose fused loops are fewer: it splits no reduction.
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from treewise.nn.compilation import INDUCTOR_OPTIONS

NAME = "counted graph"  # of what runs for a graph, in a profile
CALLS = re.compile(r"(triton_\w+)\.run\(|(cpp_fused_\w+)\(|(extern_kernels\.\w+)\(|= torch\.ops\.(\w+\.\w+\.\w+)\(")


class _Scheduled(Exception):
    """No error: Inductor has written its code, and is left. code: that would call the kernels."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code


def counting_backend(
    add: Callable[[list[str]], object],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    keep: Callable[[str], object] = bool,
) -> Callable[..., Any]:
    """A backend whose graphs give the names of their kernels to `add` whenever they run. They are made and run inside
    of `around()`. keep: is given the code of each graph, once."""

    def of_graph(graph: Any, inputs: Any, **settings: Any) -> Callable[[list[Any]], Any]:
        with around():
            code = code_of(graph, inputs, **settings)
        names = calls_of(code)
        keep(code)

        def run(given: list[Any]) -> Any:
            add(names)
            values = list(given)
            given.clear()
            with torch.profiler.record_function(NAME), around():
                return graph(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compiled(graph: Any, inputs: Any) -> Any:
        with around(), _lowered_for_cpu():
            return compile_fx.compile_fx(graph, inputs, inner_compile=of_graph)

    return compiled


def calls_of(code: str) -> list[str]:
    """Names of the kernels that the code of a graph launches, in their order."""
    return ["".join(each) for each in CALLS.findall(code[code.index("def call(") :])] if code else []


def code_of(graph: Any, inputs: Any, **settings: Any) -> str:
    """The code that would call the kernels of a graph of Inductor; empty for one without operations."""
    codegen = GraphLowering.codegen

    def stop(self: Any) -> None:
        wrapper, _ = codegen(self)
        raise _Scheduled(wrapper.value)

    code = ""
    settings_of_run = config.patch({**INDUCTOR_OPTIONS, "fx_graph_cache": False, "fx_graph_remote_cache": False})
    with mock.patch.object(GraphLowering, "codegen", stop), settings_of_run:
        try:
            compile_fx.compile_fx_inner(_made_on_cpu(graph), _on_cpu(inputs), **settings)
        except Exception as error:  # Inductor's own, around ours
            code = _code_of(error)
    return code


@contextmanager
def _lowered_for_cpu() -> Iterator[None]:
    """Inside, Inductor sees a graph of tensors without data, of which it makes no code, as one of a CPU."""
    passes = compile_fx._recursive_joint_graph_passes

    def of_cpu(graph: torch.fx.GraphModule, *given: Any, **more: Any) -> Any:
        for node in graph.graph.nodes:
            node.meta |= {key: _on_cpu(node.meta[key]) for key in ("val", "tensor_meta") if key in node.meta}
        return passes(graph, *given, **more)

    with mock.patch.object(compile_fx, "_recursive_joint_graph_passes", of_cpu):
        yield


def _made_on_cpu(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy whose operations make what they make on the CPU."""
    there = copy.deepcopy(graph)
    for node in there.graph.nodes:
        if node.kwargs.get("device") == torch.device("meta"):
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    return there


def _on_cpu(values: Any) -> Any:
    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor) or value.device.type != "meta":
            return value
        with value.fake_mode:
            return value.to("cpu")

    return tree_map(moved, values)


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
        stack.enter_context(config.patch(cpu_backend="triton", compile_threads=1))
        yield
