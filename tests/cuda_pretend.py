"""A GPU that is not there: tensors marked `cuda` and are computed on the CPU, and a list of what would wait.

Inside `PretendCuda` whatever is asked for on `cuda` is made on the CPU and marked; marks follow the storage of a tensor
and the operations on it. So code for a GPU runs whole, with real values, and three mistakes show: operations on tensors
of both devices (`RuntimeError`, as CUDA raises it); places where the host waits for the device, which are noted in
`waits` with the location in the code; and operations of the host on pinned memory that a queued copy of the device may
not have written yet (`RuntimeError`, where a GPU would give wrong numbers). `streams` holds in which order its queues
run (`cuda_streams`). What kernels do inside, and how they are timed, is not seen.

torch's own fake tensors cannot do this: without a CUDA build, autograd ends the process at the first of them.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.cuda_streams import PretendStream, PretendStreams

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
UNWRITTEN = "the host works with memory that a queued copy from the device may not have written yet"
MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"

# Operations for which the host reads a result of the device. Names of aten, without overload.
READS = {
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
# Operations that may get tensors of both devices.
CROSSING = {"copy_", "_to_copy"}
# Operations that look at shapes alone.
NAMING = {"empty_like", "new_empty", "new_zeros", "zeros_like", "new_empty_strided", "ones_like", "detach", "alias"}
# Operations that take indices from anywhere: those on the host are copied, boolean ones counted first.
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}


class PretendCuda(TorchFunctionMode):
    """Makes and follows tensors marked as on `cuda:0`.

    waits: how often the host waited, by (what, location): `read` of a result, a blocking copy `to the device`. queued:
    copies between the devices that it did not wait for, by where they went.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self._marks: dict[int, tuple[StorageWeakRef, str]] = {}
        self.queued: Counter[str] = Counter()
        self._pinned: dict[int, StorageWeakRef] = {}
        self._unwritten: dict[int, StorageWeakRef] = {}  # pinned memory, until the host waits
        self._is_moving = False
        self.streams = PretendStreams()
        self._making: str | None = None  # the device of what the function that runs now makes from nothing
        self._below = _Operations(self)

    def __enter__(self) -> "PretendCuda":
        super().__enter__()
        self._below.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._below.__exit__(*error)
        super().__exit__(*error)

    def device_of(self, tensor: torch.Tensor) -> str:
        """`cuda`, `cpu`, or `any`: made by autograd on the device of what it goes with."""
        found = self._marks.get(_storage(tensor)._cdata)
        return "cpu" if found is None else found[1]

    def mark(self, tensor: torch.Tensor, device: str) -> None:
        """Records the device of a tensor: `cuda`, `cpu` or `any`."""
        storage = _storage(tensor)
        self._marks[storage._cdata] = StorageWeakRef(storage), device

    def wait(self, what: str) -> None:
        """Notes that the host waits, and where."""
        self.waits[what, _location()] += 1
        self._unwritten.clear()

    def may_look_into(self, tensor: torch.Tensor) -> bool:
        """Whether the host knows what is in its memory."""
        return self._is_moving or _of(self._unwritten, tensor) is None

    def note_copy(self, to: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        """Of one device to the other. A copy waits that is asked to, or whose part on the host is not pinned. One that
        is no piece of memory, or of another dtype, goes through a copy of the host, before or after."""
        to_device = self.device_of(to) == "cuda"
        there = source if to_device else to
        is_plain = there.is_contiguous() and to.dtype == source.dtype
        self.queue([source], [to])
        is_queued = non_blocking and _of(self._pinned, there) is not None and (to_device or is_plain)
        if to_device and not is_plain and not self.may_look_into(there):
            raise RuntimeError(f"{UNWRITTEN} (copied on the host first, at {_location()})")
        if not is_queued:
            self.wait("to the device" if to_device else "read")
        elif not to_device:
            self._unwritten[_storage(to)._cdata] = StorageWeakRef(_storage(to))
        self.queued["cuda" if to_device else "cpu"] += is_queued

    def queue(self, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Notes an operation of the current stream, with what it touches of the device and of pinned memory."""
        known: list[list[torch.UntypedStorage]] = [[], []]
        for part, tensors in zip(known, (reads, writes), strict=True):
            for each in tensors:
                if _of(self._pinned, each) is not None:
                    self.streams.pinned(_storage(each))
                    part.append(_storage(each))
                elif self.device_of(each) == "cuda":
                    part.append(_storage(each))
        self.streams.queue(*known)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of it on the host, for code beneath the functions, where `.device` is the real one."""
        if self.device_of(tensor) != "cuda":
            return tensor
        self.wait("read")
        found = tensor.clone()
        self.mark(found, "cpu")
        return found

    def again(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which functions that it is called from do not hide."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self in _get_current_function_mode_stack():
                return call(*args, **kwargs)
            TorchFunctionMode.__enter__(self)
            try:
                return call(*args, **kwargs)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)

        return run

    # -- functions, as Python calls them ------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func is torch.device:
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args, kwargs)
        if func is torch.Tensor.backward:
            return self.again(torch.autograd.backward)(args, kwargs.pop("gradient", None), **kwargs)
        special = _SPECIAL.get(name)
        if special is not None and tensors:
            return special(self, func, *args, **kwargs)
        return self._call(func, args, kwargs, tensors)

    def _attribute(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        owner = getattr(func, "__self__", None)
        if owner is torch.Tensor.device:
            return CUDA if self.device_of(args[0]) == "cuda" else found
        if owner is torch.Tensor.is_cuda:
            return self.device_of(args[0]) == "cuda"
        if owner is torch.Tensor.is_cpu:
            return self.device_of(args[0]) == "cpu"
        return found

    def _call(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Runs a function on the CPU; what it makes from nothing is where it says, or where its tensors are."""
        asked = _device_in(args, kwargs)
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        is_pinned = kwargs.pop("pin_memory", False)
        is_new = any(self.device_of(each) == "cuda" for each in tensors)
        before, self._making = self._making, asked or ("cuda" if is_new else "cpu")
        try:
            found = func(*args, **kwargs)
        finally:
            self._making = before
        name = getattr(func, "__name__", "")
        if name == "new_tensor":
            asked = asked or self.device_of(tensors[0])
        is_of_host = name in ("tensor", "as_tensor", "asarray") and not (
            is_new and self.device_of(tensors[0]) == "cuda"
        )
        if asked == "cuda" and (is_of_host or name == "new_tensor"):
            self.wait("to the device")
            found = found.clone() if tensors else found
        if asked is not None:
            for each in tree_leaves(found):
                if isinstance(each, torch.Tensor):
                    self.mark(each, asked)
        return self._pin(func, found) if is_pinned else found

    # -- moving between devices ---------------------------------------------------------------------------------------

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked = _device_in(args, kwargs)
        others = [each for each in args if isinstance(each, torch.Tensor)]
        if others:  # .to(other)
            asked = self.device_of(others[0])
        here = self.device_of(tensor)
        if asked is None or asked == here:
            args, kwargs = tree_map(_on_cpu, (args, kwargs))
            return func(tensor, *args, **kwargs)
        is_non_blocking = bool(kwargs.get("non_blocking"))
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        self._is_moving = True
        try:
            found = func(tensor, *args, **kwargs)
            if _storage(found)._cdata == _storage(tensor)._cdata:
                found = found.clone()
        finally:
            self._is_moving = False
        self.mark(found, asked)
        if asked == "cpu" and is_non_blocking:  # torch pins what it makes then
            self._pinned[_storage(found)._cdata] = StorageWeakRef(_storage(found))
        self.note_copy(found, tensor, non_blocking=is_non_blocking)
        return found

    def _cuda(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._to(torch.Tensor.to, tensor, CUDA, **kwargs)

    def _cpu(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._to(torch.Tensor.to, tensor, CPU, **kwargs)

    def _pin(self, func: Any, tensor: torch.Tensor, *args: Any) -> Any:
        if self.device_of(tensor) == "cuda":
            raise RuntimeError("cannot pin a tensor of the device; only dense CPU tensors can be pinned")
        found = tensor.clone()
        self._pinned[_storage(found)._cdata] = StorageWeakRef(_storage(found))
        return found

    def _is_pinned(self, func: Any, tensor: torch.Tensor, *args: Any) -> bool:
        return _of(self._pinned, tensor) is not None

    def _numpy(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device_of(tensor) == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return func(tensor, *args, **kwargs)

    def _tolist(self, func: Any, tensor: torch.Tensor) -> Any:
        if self.device_of(tensor) == "cuda":
            self.wait("read")
        return func(tensor)

    def _histc(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """CUDA counts integers; the CPU does not."""
        return self._call(func, (tensor.double(), *args), kwargs, [tensor]).to(tensor.dtype)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "to": PretendCuda._to,
    "cuda": PretendCuda._cuda,
    "cpu": PretendCuda._cpu,
    "pin_memory": PretendCuda._pin,
    "is_pinned": PretendCuda._is_pinned,
    "numpy": PretendCuda._numpy,
    "__array__": PretendCuda._numpy,
    "tolist": PretendCuda._tolist,
    "histc": PretendCuda._histc,
}


class _Operations(TorchDispatchMode):
    """The operations below those functions, and those of autograd: follows marks, and refuses to mix devices."""

    def __init__(self, outer: PretendCuda) -> None:
        super().__init__()
        self.outer = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outer, name = self.outer, func.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        where = {outer.device_of(each) for each in given if each.dim() > 0}
        is_cuda = "cuda" in where or any(outer.device_of(each) == "cuda" for each in given)
        if is_cuda:
            self._look(name, args, given, where)
        elif not func.is_view and name not in NAMING and not all(map(outer.may_look_into, given)):
            raise RuntimeError(f"{UNWRITTEN} ({name}, at {_location()})")
        found = func(*args, **kwargs)
        self._mark(name, args, found, given, is_cuda)
        if is_cuda and not outer._is_moving and not func.is_view and name not in NAMING | {"copy_"}:
            outer.queue(given, [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)])
        return found

    def _look(self, name: str, args: Any, given: list[torch.Tensor], where: set[str]) -> None:
        outer = self.outer
        if name in READS:
            outer.wait("read")
        elif name in INDEXING:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    outer.wait("read")
                elif index is not None and outer.device_of(index) == "cpu":
                    outer.wait("to the device")
        elif name == "copy_":
            to, source = outer.device_of(args[0]), outer.device_of(args[1])
            if {to, source} == {"cuda", "cpu"}:
                outer.note_copy(args[0], args[1], non_blocking=len(args) > 2 and args[2])
        elif "cpu" in where and name not in CROSSING:
            raise RuntimeError(f"{MIXED} ({name}, at {_location()})")

    def _mark(self, name: str, args: Any, found: Any, given: list[torch.Tensor], is_cuda: bool) -> None:
        outer = self.outer
        if name == "copy_":
            return
        if given:
            device = "cuda" if is_cuda else "any" if all(outer.device_of(each) == "any" for each in given) else "cpu"
        else:
            device = outer._making or "any"
        known = {_storage(each)._cdata for each in given}
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and _storage(each)._cdata not in known:
                outer.mark(each, device)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside vmap
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def _of(known: dict[int, StorageWeakRef], tensor: torch.Tensor) -> StorageWeakRef | None:
    """The entry of a tensor's storage, unless it is of one that is gone."""
    found = known.get(_storage(tensor)._cdata)
    return None if found is None or found.expired() else found


def _device_in(args: Any, kwargs: Any) -> str | None:
    """The device that a call asks for; None where it names none."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.device):
            return each.type
        if isinstance(each, str) and each.partition(":")[0] in ("cuda", "cpu"):
            return each.partition(":")[0]
    return None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return CPU if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _location() -> str:
    """The innermost function of a library that runs now, as `treewise.engine: output`; torch and tests aside."""
    frame = sys._getframe(1)
    while frame is not None:
        for library, folder in _libraries().items():
            if frame.f_code.co_filename.startswith(folder):
                package = ".".join([library, *Path(frame.f_code.co_filename[len(folder) :]).parts[:-1]])
                return f"{package}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _libraries() -> dict[str, str]:
    """Folders of installed libraries, with a slash at the end; a clone of ours may have any name."""
    specs = {name: find_spec(name) for name in ("treewise", "transformers", "trl", "peft", "accelerate")}
    return {name: f"{Path(spec.origin).parent}/" for name, spec in specs.items() if spec and spec.origin}


@contextmanager
def pretend_cuda(monkeypatch: Any) -> Iterator[PretendCuda]:
    """A GPU as `PretendCuda` has it, with the answers of torch.cuda for one; FlexAttention runs uncompiled."""
    from treewise.nn.attention import flex, mask_audit, side_copies

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**36, 2**37))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {})
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: 1.0)
    monkeypatch.setattr(flex, "_compiled", _dense_flex)
    # What a backward runs shall be seen, and a function that is seen hides those that it calls.
    monkeypatch.setattr(torch.autograd, "has_torch_function", lambda _: False)
    make = saved_tensors_hooks.__init__
    with PretendCuda() as pretend:
        monkeypatch.setattr(torch.cuda, "Stream", PretendStream)
        monkeypatch.setattr(torch.cuda, "stream", pretend.streams.inside)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pretend.streams.current)
        told = pretend.streams.told
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told(_storage(tensor), stream))
        monkeypatch.setattr(side_copies, "side_copies", cache(side_copies.SideCopies))
        hooks = lambda self, pack, unpack: make(self, pretend.again(pack), pretend.again(unpack))  # noqa: E731
        monkeypatch.setattr(saved_tensors_hooks, "__init__", hooks)
        monkeypatch.setattr(mask_audit, "_on_host", pretend.on_host)
        yield pretend


def _dense_flex(query, key, value, blocks, softcap, scaling, **_):
    """What the kernels compute, from the block mask that they get, over all pairs of blocks."""
    num_groups, given = query.shape[1] // key.shape[1], (query, key, value)
    key, value = (each.repeat_interleave(num_groups, dim=1) for each in (key, value))
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    columns = torch.arange(key.shape[2], device=query.device)[None]
    wanted = _dense_blocks(blocks.kv_num_blocks, blocks.kv_indices)
    whole = _dense_blocks(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    size = blocks.BLOCK_SIZE[0]
    seen = wanted[rows // size, columns // size] & blocks.mask_mod(0, 0, rows, columns)
    seen = seen | whole[rows // size, columns // size]
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return _StridesAsSaved.apply(torch.matmul(weights.to(value.dtype), value), *given), lse


class _StridesAsSaved(torch.autograd.Function):
    """Compiled backwards have the strides of what the forward saved written into their code."""

    @staticmethod
    def forward(ctx, out, *given):
        ctx.strides = [each.stride() for each in given]
        ctx.save_for_backward(*given)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        strides = [each.stride() for each in ctx.saved_tensors]
        if strides != ctx.strides:
            raise RuntimeError(f"compiled for tensors of strides {ctx.strides}, and was given {strides}")
        return grad, *(None for _ in strides)


def _dense_blocks(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[Q, J] bool from FlexAttention's counts and columns."""
    is_used = torch.arange(indices.shape[3], device=indices.device) < counts[0, 0, :, None]
    found = torch.zeros(indices.shape[2:], dtype=torch.int32, device=indices.device)
    return found.scatter_add(1, indices[0, 0].long(), is_used.to(torch.int32)) > 0
