"""Attention of sequences without padding, for the baselines: the fastest of the kernels that are at hand.

FlashAttention's packages share one function, `flash_attn_varlen_func`, and its keywords; torch's `varlen_attn` has
others in every release. So functions are looked for, not packages (flash-attn-4 brings a folder `flash_attn` without
the function of FlashAttention 2), and arguments are given by name as signatures have them.

cuDNN's kernel is reached through SDPA, one call a sequence. torch's ways to it for packed rows are no baseline:
`varlen_attn` takes FlashAttention for causal rows (in 2.14; in 2.11 to 2.13 for all), jagged tensors prefer that, too,
and what either would call (`_cudnn_attention_forward` with bounds) builds its graph again in every call, but for the
newest sources. It aligns sequences at their beginning, so it takes rows whose sequences have as many queries as keys.

Where several are at hand, each is held against SDPA in float32 and then timed on heads and lengths of a row, forward
and backward: which is faster depends on the card, its software and the lengths. Who ran stands beside every figure.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakIdKeyDictionary

from treewise.errors import ConfigError
from treewise.nn.device import synchronized_clock
from treewise.nn.platform.card import capability_of

logger = logging.getLogger("treewise")

HALF = (torch.bfloat16, torch.float16)
# The module with the function, and the compute capabilities (major) that it has kernels for.
FLASH = {
    "flash_attn 3": ("flash_attn_interface", (9,)),
    "flash_attn 4": ("flash_attn.cute", (9, 10, 11)),
    "flash_attn 2": ("flash_attn", (8, 9, 10, 11, 12)),
}
OLDEST = 8  # for torch's own copy of 2, and for cuDNN's kernel
CUDNN, TORCH, LOOP = "cudnn sdpa", "torch varlen", "sdpa"
# Kernels for Hopper and newer cards, on which FlashAttention 2 is no baseline that a careful user has.
NEWER, HOPPER = ("flash_attn 3", "flash_attn 4", CUDNN), 9
# Lengths of the queries and keys on which kernels are held against SDPA, and the relative error that half precision
# may have: roundings are below 1e-2, a row that sees one key too many is far above.
TRIED, TRIED_KEYS, TOLERANCE = (150, 1, 261), (150, 40, 300), 2e-2
NUM_TIMED = 3


class RowHeads(NamedTuple):
    """Of queries, of keys; sizes of keys, of values (`nn.model_flops.head_sizes`)."""

    queries: int
    keys: int
    size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class ChosenKernel:
    """The kernel of a row, and the seconds of a layer's forward and backward by each that was timed on it."""

    name: str
    seconds: dict[str, float] = field(default_factory=dict)


@lru_cache(maxsize=64)
def fastest(
    device: torch.device, dtype: torch.dtype, heads: RowHeads, lengths: tuple[int, ...], key_lengths: tuple[int, ...]
) -> ChosenKernel:
    """The fastest kernel at hand for a row of sequences. lengths: of their queries; key_lengths: of their keys."""
    names = kernels(device.type, dtype)
    if lengths != key_lengths:
        names = tuple(name for name in names if name != CUDNN)
    if len(names) == 1:
        return ChosenKernel(names[0])
    seconds = {}
    for name in names:
        try:
            error = _error(name, device, dtype, heads, key_lengths != lengths)
            if not error <= TOLERANCE:
                raise RuntimeError(f"its relative error is {error:.1g}")
            seconds[name] = _seconds(name, device, dtype, heads, lengths, key_lengths)
        except Exception as error:  # whatever a kernel raises that does not run here; there are others
            first, *_ = str(error).splitlines() or [""]
            logger.warning("flat rows: %s is left out: %s: %s", name, type(error).__name__, first)
    return ChosenKernel(min(seconds, key=seconds.__getitem__), seconds) if seconds else ChosenKernel(LOOP)


def _error(name: str, device: torch.device, dtype: torch.dtype, heads: RowHeads, has_more_keys: bool) -> float:
    """The largest relative error of output and gradients, against one call of SDPA a sequence in float32."""
    row = _row(device, dtype, heads, TRIED, TRIED_KEYS if has_more_keys else TRIED)
    found = row.run(partial(varlen_attention, kernel=name))
    expected = row.in_float32().run(partial(varlen_attention, kernel=LOOP))
    errors = [(ours.float() - exact).norm() / exact.norm() for ours, exact in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())  # NaN where one is


def _seconds(name: str, device: torch.device, dtype: torch.dtype, heads: RowHeads, *lengths: tuple[int, ...]) -> float:
    row, seconds = _row(device, dtype, heads, *lengths), []
    for _ in range(1 + NUM_TIMED):
        started = synchronized_clock(device)
        row.run(partial(varlen_attention, kernel=name))
        seconds.append(synchronized_clock(device) - started)
    return min(seconds[1:])


@dataclass(frozen=True, slots=True)
class _Row:
    """Random queries, keys, values and the gradient of the output, and where sequences begin and end."""

    inputs: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    bounds: tuple[Tensor, Tensor]
    longest: tuple[int, int]

    def run(self, attend: Callable[..., Tensor]) -> list[Tensor]:
        """The output and the gradients of the inputs."""
        inputs = [each.detach().requires_grad_() for each in self.inputs]
        out = attend(*inputs, *self.bounds, *self.longest)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad)]

    def in_float32(self) -> "_Row":
        query, key, value = (each.float() for each in self.inputs)
        return _Row((query, key, value), self.grad.float(), self.bounds, self.longest)


def _row(device: torch.device, dtype: torch.dtype, heads: RowHeads, *lengths: tuple[int, ...]) -> _Row:
    made = torch.Generator(device).manual_seed(0)  # the global one is the run's
    rows, keys = map(sum, lengths)
    sizes = (rows, heads.queries, heads.size), (keys, heads.keys, heads.size), (keys, heads.keys, heads.value_size)
    shapes = *sizes, (rows, heads.queries, heads.value_size)
    query, key, value, grad = (torch.randn(shape, generator=made, device=device, dtype=dtype) for shape in shapes)
    first, second = (torch.tensor([0, *accumulate(length)], dtype=torch.int32).to(device) for length in lengths)
    return _Row((query, key, value), grad, (first, second), (max(lengths[0]), max(lengths[1])))


@torch.compiler.disable  # its loop over sequences would be a graph of its own for every row
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *max_seqlens: int,
    softmax_scale: float | None = None,
    kernel: str = LOOP,
    **_: object,
) -> Tensor:
    """[T, H, D] from [T, H, D] queries and [K, Hkv, D] keys and values. cu_seqlens: [sequences + 1] int32.
    max_seqlens: of queries and of keys. kernel: out of `kernels`.

    Sequence `i` has queries `cu_q[i]:cu_q[i + 1]` and keys `cu_k[i]:cu_k[i + 1]`, causal and aligned at their ends (the
    last query sees the last key), which is the contract of FlashAttention's `flash_attn_varlen_func`. cuDNN's takes
    sequences with as many queries as keys.
    """
    tensors = (query, key, value)
    if kernel in (LOOP, CUDNN):
        return _loop(*tensors, _on_host(cu_seqlens_q), _on_host(cu_seqlens_k), softmax_scale, kernel)
    if kernel == TORCH:
        return _by_torch(*tensors, cu_seqlens_q, cu_seqlens_k, *max_seqlens, scale=softmax_scale)
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), max_seqlens, strict=True))
    found = flash_function(kernel)(*tensors, **bounds, **longest, softmax_scale=softmax_scale, causal=True)  # type: ignore[misc]
    return found[0] if isinstance(found, tuple) else found


_HOST_BOUNDS = WeakIdKeyDictionary()  # of rows under way: a layer that reads them would wait for the device


def _on_host(bounds: Tensor) -> list[int]:
    found: list[int] | None = _HOST_BOUNDS.get(bounds)
    if found is None:
        found = _HOST_BOUNDS[bounds] = bounds.tolist()
    return found


@cache
def kernels(device_type: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Those at hand: FlashAttention 3, 4 and 2, cuDNN's, torch's own copy of 2; else one call of SDPA a sequence."""
    if device_type != "cuda" or dtype not in HALF:
        return (LOOP,)
    capability = capability_of(torch.device(device_type))
    major = None if capability is None else capability[0]  # on ROCm what is installed counts
    cards = {name: majors for name, (_, majors) in FLASH.items() if major is None or major in majors}
    names = [name for name in cards if flash_function(name) is not None]
    if major is not None and major >= OLDEST and torch.backends.cudnn.is_available():
        names.append(CUDNN)
    if (major is None or major >= OLDEST) and _varlen_attn() is not None:
        names.append(TORCH)
    return tuple(names) or (LOOP,)


@cache
def flash_function(name: str) -> Callable[..., Any] | None:
    """`flash_attn_varlen_func` of a name of `FLASH`; None where it is not installed, or broken, which is a warning."""
    module, _ = FLASH[name]
    try:
        return getattr(import_module(module), "flash_attn_varlen_func", None)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        why: Exception = error
    except Exception as error:  # whatever a broken installation raises is what the user is to see
        why = error
    first, *_ = str(why).splitlines() or [""]
    logger.warning("%s is installed and cannot be used: %s: %s", name, type(why).__name__, first)
    return None


def _varlen_attn() -> Callable[..., Any] | None:
    try:
        return getattr(import_module("torch.nn.attention.varlen"), "varlen_attn", None)
    except ModuleNotFoundError:
        return None


def _by_torch(query: Tensor, key: Tensor, value: Tensor, *bounds: Tensor | int, scale: float | None) -> Tensor:
    """torch's `varlen_attn`: 2.10 knows `is_causal` and neither scales nor windows, 2.11 windows, 2.12 grouped heads by
    name (before, its kernel takes them as they are).

    Raises:
        ConfigError: it has neither `window_size` nor `is_causal`.
    """
    function = _varlen_attn()
    assert function is not None
    known, given = inspect.signature(function).parameters, dict[str, object]()
    if "window_size" in known:
        given["window_size"] = (-1, 0)
    elif "is_causal" in known:
        given["is_causal"] = True
    else:
        raise ConfigError(f"varlen_attn of torch {torch.__version__} has no causal attention that is known here.")
    if "scale" in known:
        given["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[2] ** 0.5)
    if "enable_gqa" in known:
        given["enable_gqa"] = query.shape[1] != key.shape[1]
    # cuDNN, which later versions of torch prefer, takes no grouped heads and aligns sequences at their beginning.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = function(query, key, value, *bounds, **given)
    assert isinstance(out, Tensor)
    return out


def _loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_bounds: Sequence[int],
    k_bounds: Sequence[int],
    scale: float | None,
    kernel: str = LOOP,
) -> Tensor:
    """Attention of each sequence of a packed row by a call of its own; of cuDNN's kernel those of several keys."""
    outputs, is_grouped = [], query.shape[1] != key.shape[1]
    for (q, q_end), (k, k_end) in zip(pairwise(q_bounds), pairwise(k_bounds), strict=True):
        own, keys, values = (x.transpose(0, 1)[None] for x in (query[q:q_end], key[k:k_end], value[k:k_end]))
        rows, columns = q_end - q, k_end - k
        mask = None if rows == columns else _aligned_at_end(rows, columns, query.device)
        attend = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=mask is None, scale=scale)
        if kernel == CUDNN and columns > 1:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = attend(own, keys, values, enable_gqa=is_grouped)
        else:
            out = attend(own, keys, values, enable_gqa=is_grouped)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


@lru_cache(maxsize=256)
def _aligned_at_end(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)
