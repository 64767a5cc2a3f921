"""FlexAttention with a block mask counted from the intervals: the implementation for CUDA.

FlexAttention (Dong et al. 2024, arXiv:2412.05496) skips blocks of pairs that are hidden and does not mask blocks that
are wholly visible. torch classifies blocks by evaluating the mask for every pair; here they are counted, O(K + blocks),
which is exact for the tree.

On CUDA the kernels are compiled once for all lengths: queries and keys are filled up to whole blocks, two at least, and
always lie in memory in one way. So no length, no table of a single block and no stride is compiled in, and the kernels
are those for whole blocks (they mask no loads, and read no undefined log-sum-exp of rows beyond the last one; pytorch
#153799). A block without a visible pair is skipped, so padding computes nothing. On the CPU the operator
runs uncompiled and holds all P x L scores: for tests, not for training.

The FLASH backend of torch (`flash`) takes other kernels under the same block mask, in blocks of its own.

Letters: T queries, K keys (gateway keys first), P and L queries and keys filled up to whole blocks, H query heads, D
head size, Q and J blocks of queries and keys.
"""

import functools
import math
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast, no_type_check

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from treewise.base.shapes import Float
from treewise.errors import PlanError, UnsupportedModelError
from treewise.nn.attention.gateway import GatewayRead, LayerCall, extend
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.platform.card import Card, card
from treewise.nn.platform.compiler_errors import compiler_failure
from treewise.nn.platform.versions import untested_torch_named

BLOCK_SIZE = 128
BLOCKS = BLOCK_SIZE, BLOCK_SIZE  # of queries and of keys
# torch compiles a size of 1 in, and would make another kernel for tables of one block.
MIN_BLOCKS = 2
# Every combination of window or chunk, softcap, sinks, scaling and grad mode is a kernel of its own. Beyond the limit
# the compiled function raises (fullgraph): the uncompiled one would hold all scores.
RECOMPILE_LIMIT = 64
MAX_OFFSET = 2**31 - 1  # of a number in what a kernel addresses from one base, in 32 bits
# The smallest size that the matrix products inside the kernels take.
MIN_HEAD_SIZE = 16
TRITON, FLASH = "TRITON", "FLASH"  # torch's names of backends

Modifier = Callable[..., torch.Tensor]
MaybeTensor = torch.Tensor | None
# What layers of one kind called in a micro-batch, and the options of its kernel. Only the first call may compile, so
# only it sets torch's configuration and marks lengths, which takes the host 60 microseconds.
Calls = dict[Hashable, FlexKernelOptions]
Captured = tuple[torch.Tensor, torch.Tensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor]


def attend(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hkv T D"],
    value: Float[Tensor, "1 Hkv T Dv"],
    mask: TreeMask,
    rule: LayerRule,
    sinks: Float[Tensor, " H"] | None = None,
    reads: tuple[GatewayRead, ...] = (),
    call: LayerCall = 0,
) -> Float[Tensor, "1 H T Dv"]:
    """`flex_attention_tree` of a micro-batch's own tokens behind the rows that it reads from gateways."""
    with untested_torch_named():
        return flex_attention_tree(query, *extend(key, value, reads, call), mask, rule, sinks)


def flex_attention_tree(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hkv K D"],
    value: Float[Tensor, "1 Hkv K Dv"],
    mask: TreeMask,
    rule: LayerRule,
    sinks: Float[Tensor, " H"] | None = None,
    *,
    blocks: tuple[int, int] = BLOCKS,
    backend: str = TRITON,
) -> Float[Tensor, "1 H T Dv"]:
    """Attention of [1, H, T, D] queries over [1, Hkv, K, D] keys and values; returns [1, H, T, D of the values].

    The contract of `reference_attention`. blocks: rows of a block of queries and of keys. backend: torch's name of the
    kernels, on CUDA.

    Raises:
        PlanError: more rows than the kernels can address.
    """
    num_queries, width = query.shape[2], value.shape[3]
    sizes = query.shape, key.shape, value.shape
    shared = mask.derived(_shared, rule, *sizes, query.dtype, query.device, blocks, backend)
    # The heads of a token stay side by side, as the model has them, so neither outputs nor their gradients are copied.
    query = _filled_up(query.transpose(1, 2), 1, shared.after_queries).transpose(1, 2)
    key, value = _filled_up(key, 2, shared.after_keys), _filled_up(value, 2, shared.after_values)
    attend = _compiled if query.is_cuda else _uncompiled
    options: Any = {"needs_lse": sinks is not None, "calls": shared.calls, "backend": backend}
    out, lse = attend(query, key, value, shared.table, shared.softcap, rule.scaling, **options)
    if out.shape[2:] != (num_queries, width):  # a part's backward writes zeros and a copy
        out = out.transpose(1, 2)[:, :num_queries, :, :width].transpose(1, 2)
    if sinks is None:
        return out
    assert lse is not None
    without_sink = torch.sigmoid(lse[:, :, :num_queries] - sinks.to(lse.dtype)[None, :, None])
    return (out * without_sink[..., None]).to(value.dtype)


class SharedByLayers(NamedTuple):
    """What layers of one kind share in a micro-batch. after_queries, after_keys, after_values: rows of zeros up to
    whole blocks; None where none are missing. calls: what was called, with the options of its kernel."""

    table: BlockMask
    softcap: MaybeTensor
    after_queries: MaybeTensor
    after_keys: MaybeTensor
    after_values: MaybeTensor
    calls: Calls


def _shared(
    mask: TreeMask,
    rule: LayerRule,
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    blocks: tuple[int, int],
    backend: str,
) -> SharedByLayers:
    """query, key, value: shapes of what such layers attend with."""
    check_offsets(query, key, value, blocks)

    def zeros(*shape: int, width: int) -> MaybeTensor:
        if 0 in shape:
            return None
        return torch.zeros(1, *shape, max(width, MIN_HEAD_SIZE), dtype=dtype, device=device)

    missing_queries = _num_blocks(query[2], blocks[0]) * blocks[0] - query[2]
    missing_keys = _num_blocks(key[2], blocks[1]) * blocks[1] - key[2]
    after_keys = zeros(key[1], missing_keys, width=key[3])
    softcap = None
    if rule.softcap is not None:  # [] tensor, [H] for FLASH, which reads tensors by an index: numbers are compiled in
        shape = (query[1],) if backend == FLASH else ()
        softcap = torch.full(shape, rule.softcap, dtype=torch.promote_types(dtype, torch.float32), device=device)
    return SharedByLayers(
        block_mask(mask, rule, device, blocks),
        softcap,
        zeros(missing_queries, query[1], width=query[3]),
        after_keys,
        after_keys if key == value else zeros(value[1], missing_keys, width=value[3]),
        {},
    )


def check_offsets(query: torch.Size, key: torch.Size, value: torch.Size, blocks: tuple[int, int]) -> None:
    """Raises `PlanError` where a kernel would address rows beyond 32 bits, silently others than it should (pytorch
    #190857, #160955). Whole tensors may be larger: for these torch takes 64 bits, but for rows within a head."""
    widest = max(query[3], value[3], MIN_HEAD_SIZE)
    most = MAX_OFFSET // (query[1] * widest) - blocks[0]
    if query[2] > most:
        raise PlanError(
            f"a micro-batch of {query[2]:,} tokens has more numbers in the {query[1]} heads of a layer "
            f"than FlexAttention's kernels can address (2^31); set max_tokens to at most {most:,}."
        )
    most = MAX_OFFSET // widest - blocks[1]
    if key[2] > most:
        raise PlanError(
            f"a path of {key[2]:,} keys has more numbers in one head of {widest} than FlexAttention's kernels "
            f"can address (2^31); at most {most:,} keys can be attended to."
        )


def _filled_up(tensor: torch.Tensor, axis: int, zeros: MaybeTensor) -> torch.Tensor:
    """Contiguous, with rows of zeros up to whole blocks, and zeros behind heads too small for the kernels: they
    add nothing to scores or results."""
    if tensor.shape[3] < MIN_HEAD_SIZE:
        tensor = functional.pad(tensor, (0, MIN_HEAD_SIZE - tensor.shape[3]))
    return tensor.contiguous() if zeros is None else torch.cat((tensor, zeros), axis)


def _num_blocks(length: int, block_size: int) -> int:
    return max(MIN_BLOCKS, -(-length // block_size))


def block_mask(mask: TreeMask, rule: LayerRule, device: torch.device, blocks: tuple[int, int] = BLOCKS) -> BlockMask:
    """The block mask of (P, L) pairs, built once per micro-batch and shared by all layers of one window and chunk.

    Without window and chunk, partial blocks are exactly those with both visible and hidden pairs. With them a partial
    block may have no visible or no hidden pair; a full one never has a hidden pair.
    """
    return mask.derived(_block_mask, LayerRule(1.0, rule.window, rule.chunk), device, blocks)


def num_key_rows(mask: TreeMask, device: torch.device, blocks: tuple[int, int] = BLOCKS) -> int:
    """Key rows that one layer without a window reads in a forward of a micro-batch: those of all blocks not hidden."""
    table = block_mask(mask, LayerRule(1.0), device, blocks)
    counts = [each for each in (table.kv_num_blocks, table.full_kv_num_blocks) if each is not None]
    return sum(int(count.sum()) for count in counts) * blocks[1]


# -- which blocks ---------------------------------------------------------------------------------------------------


def _block_mask(mask: TreeMask, rule: LayerRule, device: torch.device, blocks: tuple[int, int]) -> BlockMask:
    any_QJ, full_QJ = _classify(mask, rule, device, blocks)
    partial_QJ = any_QJ & ~full_QJ
    # torch's `from_kv_blocks` derives the tables of the backward, by keys, from those by queries: 0.9 ms of the host.
    by_queries, by_keys = (partial_QJ, full_QJ), (partial_QJ.t().contiguous(), full_QJ.t().contiguous())
    made = [tensor for each in (*by_queries, *by_keys) for tensor in _ordered(each)]
    tables: dict[str, Any] = dict(zip(BLOCK_TENSORS, made, strict=True))
    return BlockMask(
        seq_lengths=(any_QJ.shape[0] * blocks[0], any_QJ.shape[1] * blocks[1]),
        BLOCK_SIZE=blocks,
        mask_mod=_mask_mod(*_captured(mask, rule, device, blocks)),
        **tables,
    )


def _classify(
    mask: TreeMask, rule: LayerRule, device: torch.device, blocks: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [Q, J] bools: blocks with a visible pair, and blocks without a hidden one. A block cut short by the end of
    the queries or keys is never full."""
    lo_K, hi_K, depth_K = mask.on(device)
    rows, columns = blocks
    num_rows = _num_blocks(mask.num_queries, rows)
    any_QJ = _keys_over_rows(lo_K // rows, (hi_K - 1) // rows + 1, num_rows, columns) > 0
    full_QJ = _keys_over_rows((lo_K - 1) // rows + 1, hi_K // rows, num_rows, columns) == columns
    depth_T = depth_K[mask.num_gateway_keys :]
    if rule.window is not None:
        (least_Q, most_Q), (least_J, most_J) = _extremes(depth_T, rows), _extremes(depth_K, columns)
        any_QJ &= least_Q[:, None] - most_J < rule.window
        full_QJ &= most_Q[:, None] - least_J < rule.window
    if rule.chunk is not None:
        least_Q, most_Q = _extremes(depth_T // rule.chunk, rows)
        least_J, most_J = _extremes(depth_K // rule.chunk, columns)
        any_QJ &= (least_Q[:, None] <= most_J) & (least_J <= most_Q[:, None])
        full_QJ &= (least_Q == most_Q)[:, None] & (least_J == most_J) & (least_Q[:, None] == least_J)
    return any_QJ, full_QJ


def _keys_over_rows(first_K: torch.Tensor, last_K: torch.Tensor, num_rows: int, block_size: int) -> torch.Tensor:
    """[Q, J]: how many keys of block j have query block i in their range of blocks, `first <= i < last`."""
    num_columns = _num_blocks(len(first_K), block_size)
    column_K = torch.arange(len(first_K), device=first_K.device) // block_size
    steps = torch.zeros(num_rows + 1, num_columns, dtype=torch.int32, device=first_K.device)
    one = torch.where(first_K < last_K, 1, 0).to(torch.int32)
    steps.index_put_((first_K.clamp(max=num_rows).long(), column_K), one, accumulate=True)
    steps.index_put_((last_K.long(), column_K), -one, accumulate=True)
    return torch.cumsum(steps[:num_rows], dim=0, dtype=torch.int32)


def _extremes(values: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest value of each block."""
    num_missing = _num_blocks(len(values), block_size) * block_size - len(values)
    least, most = torch.cat([values, values[-1:].expand(num_missing)]).view(-1, block_size).aminmax(dim=1)
    return least, most


def _ordered(is_in_QJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's form of a block matrix: [1, 1, Q] counts, and [1, 1, Q, J] columns, those that are in first."""
    count = is_in_QJ.sum(dim=1, dtype=torch.int32)
    index = torch.argsort(is_in_QJ.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], index[None, None]


# -- what the kernels read ------------------------------------------------------------------------------------------


def _captured(mask: TreeMask, rule: LayerRule, device: torch.device, blocks: tuple[int, int]) -> Captured:
    """What the mask function reads: lo and hi, then two [P] and [L] vectors each for the window and the chunks.

    Tensors only: a Python number would be compiled in, and another one compiled again. Keys that fill up the last block
    are seen by no query: they end before the first one.
    """

    def filled_up(values: torch.Tensor, block_size: int) -> torch.Tensor:
        missing = _num_blocks(len(values), block_size) * block_size - len(values)
        return functional.pad(values, (0, missing))

    lo_L, hi_L, depth_L = (filled_up(each, blocks[1]) for each in mask.on(device))
    depth_P = filled_up(mask.on(device)[2][mask.num_gateway_keys :], blocks[0])
    window: tuple[MaybeTensor, MaybeTensor] = (None, None)
    chunk: tuple[MaybeTensor, MaybeTensor] = (None, None)
    if rule.window is not None:
        window = (depth_P - rule.window, depth_L)
    if rule.chunk is not None:
        chunk = (depth_P // rule.chunk, depth_L // rule.chunk)
    captured = (lo_L, hi_L, *window, *chunk)
    for tensor in captured:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # noqa: SLF001
    return captured


@no_type_check  # torch counts the parameters of the function that it returns, which a wrapper of the tests hides
def _mask_mod(
    lo_L: torch.Tensor,
    hi_L: torch.Tensor,
    beyond_P: MaybeTensor,
    depth_L: MaybeTensor,
    chunk_P: MaybeTensor,
    chunk_L: MaybeTensor,
) -> Modifier:
    def tree_mask(_batch: torch.Tensor, _head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = (lo_L[k] <= q) & (q < hi_L[k])
        if beyond_P is not None:
            seen = seen & (depth_L[k] > beyond_P[q])
        if chunk_P is not None:
            seen = seen & (chunk_L[k] == chunk_P[q])
        return seen

    return tree_mask


@no_type_check
def _score_mod(softcap: MaybeTensor) -> Modifier | None:
    if softcap is None:
        return None

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    def capped_by_head(score: torch.Tensor, _batch: torch.Tensor, head: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap[head] * torch.tanh(score / softcap[head])

    return capped_by_head if softcap.dim() else capped


# -- compiled or not ------------------------------------------------------------------------------------------------


def _uncompiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: BlockMask,
    softcap: MaybeTensor,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, MaybeTensor]:
    """The operator itself, which can be differentiated on the CPU; torch's function around it cannot."""
    score_mod = _score_mod(softcap) or (lambda score, *_: score)
    out, lse, *_ = torch.ops.higher_order.flex_attention(query, key, value, score_mod, blocks.as_tuple(), scaling, {})
    return out, lse * math.log(2)  # the operator's logarithms have base 2


def _compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: BlockMask,
    softcap: MaybeTensor,
    scaling: float,
    *,
    needs_lse: bool,
    calls: Calls,
    backend: str,
) -> tuple[torch.Tensor, MaybeTensor]:
    call = needs_lse, torch.is_grad_enabled(), query.requires_grad, key.requires_grad, value.requires_grad
    options, inputs = calls.get(call), (query, key, value, blocks, softcap, scaling, needs_lse)
    if options is not None:
        return _called(*inputs, options)
    # Lengths and block counts are symbols of their own from the first call; all else is constant. `dynamic=True` would
    # also make symbols of heads, head sizes and the scale, and one symbol of two lengths that happen to be equal.
    for tensor in (query, key, value):
        torch._dynamo.maybe_mark_dynamic(tensor, 2)  # noqa: SLF001
    for name in BLOCK_TENSORS:
        tensor = getattr(blocks, name)
        torch._dynamo.maybe_mark_dynamic(tensor, list(range(2, tensor.dim())))  # noqa: SLF001
    # BACKEND: only the kernels that were asked for.
    chosen: dict[str, Any] = {"BACKEND": backend}
    if backend == TRITON:
        chosen |= {"IS_DIVISIBLE": True, **tiles(query.dtype, (query.shape[3], value.shape[3]), card(query.device))}
    calls[call] = options = cast(FlexKernelOptions, chosen)
    settings = {"recompile_limit": RECOMPILE_LIMIT, "specialize_float": True, "automatic_dynamic_shapes": False}
    with torch._dynamo.config.patch(settings), warnings.catch_warnings():  # noqa: SLF001
        # torch's compiler looks whether an input has a gradient, and hides its own warning only where none is an error.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return _called(*inputs, options)


def _called(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, MaybeTensor]:
    try:
        return _compiled_kernel()(query, *others)
    except Exception as error:  # errors of compilers share no class
        name, sizes = str(query.dtype).removeprefix("torch."), f"{query.shape[3]} and values of {others[1].shape[3]}"
        failure = compiler_failure(error, f"FlexAttention's kernels for heads of {sizes} in {name}", query.device)
        if failure is None:
            raise
        raise failure from error


# Compute capabilities on which the kernels ran and were right (benchmarks/results), and those for which
# benchmarks/flex_kernels.py compiled them: every head size fits.
RUN_ON = ((9, 0),)
COMPILED_FOR = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def tiles(dtype: torch.dtype, sizes: tuple[int, int], card: Card) -> dict[str, int]:
    """Tiles other than torch's. sizes: of heads of queries and keys, and of values.

    First those that can be launched: a block of the kernels must fit the shared memory of the card, and torch's tiles
    do not on cards with 99 KiB (sm_86, 89, 120: in float32 from heads of 96 on, in the backward of half precision from
    192 on where values are as wide; pytorch #198224, #133254), nor on sm_80 in float32 where its table has no entry. A
    forward in float32 with tiles of M x N in s stages takes, but for 2 KiB, `4 * D * (M + 2 * (s - 1) * N)
    + 4 * M * (N + 3)` bytes for heads of D, a power of two. Then, in half precision, those that spill least: for heads
    of 64, 128 x 64 in the forward; 64 x 64 in the backward of sm_100. `benchmarks/flex_kernels.py resources` compiles
    them all (benchmarks/reports/method.md).

    Raises:
        UnsupportedModelError: the card has less shared memory than all of these need.
    """
    if card.capability is None:
        return {}
    rounded, rounded_values = (2 ** (size - 1).bit_length() for size in sizes)
    is_small, is_wide = card.shared_bytes < 2**17, dtype.itemsize == 4
    least = 99 * 1024 if rounded <= 256 else 200 * 1024 if is_wide else 2**17
    if card.shared_bytes < least:
        name, number = str(dtype).removeprefix("torch."), ".".join(map(str, card.capability))
        raise UnsupportedModelError(
            f"FlexAttention's kernels for heads of {sizes[0]} in {name} need {least // 1024} KiB of shared memory, and "
            f"a GPU of compute capability {number} has {card.shared_bytes // 1024} for a block; use "
            "attention='reference'."
        )
    if is_wide:
        return _SMALL_FORWARD.get(rounded, {}) if is_small or sizes[0] != rounded else {}
    found: dict[str, int] = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64} if sizes[0] == 64 else {}
    if is_small and rounded == rounded_values == 256:
        found |= {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_stages": 1}
    if card.capability[0] == 10 and sizes[0] in (64, 128):
        found |= dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 64)
    return found


# In float32, by the head size that is rounded up to a power of two.
_SMALL_FORWARD = {
    128: {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2},
    256: {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16, "fwd_num_stages": 2},
}


@functools.cache
def _compiled_kernel() -> Callable[..., tuple[torch.Tensor, MaybeTensor]]:
    return torch.compile(_kernel, fullgraph=True)


BLOCK_TENSORS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


@no_type_check  # compiled
def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: BlockMask,
    softcap: MaybeTensor,
    scaling: float,
    needs_lse: bool,
    kernel_options: FlexKernelOptions,
) -> tuple[torch.Tensor, MaybeTensor]:
    # The mask's own lengths are Python integers; taken from the shapes they are symbols, and no length recompiles.
    lengths = (query.shape[2], key.shape[2])
    tensors = {name: getattr(blocks, name) for name in BLOCK_TENSORS}
    blocks = BlockMask(seq_lengths=lengths, BLOCK_SIZE=blocks.BLOCK_SIZE, mask_mod=blocks.mask_mod, **tensors)
    out, more = flex_attention(
        query,
        key,
        value,
        score_mod=_score_mod(softcap),
        block_mask=blocks,
        scale=scaling,
        enable_gqa=True,
        kernel_options=kernel_options,
        return_aux=AuxRequest(lse=needs_lse),
    )
    return out, more.lse
