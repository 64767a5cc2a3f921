"""Flat training in its strongest form: no padding, contained prefixes merged, only trained rows projected.

Trajectories are packed into rows; token-wise layers run over a whole row, attention over each trajectory by itself, by
the best kernel that a device has for sequences without padding. Models whose layers carry a state, look through windows
or cap their scores take one trajectory at a time, through the model's own attention. The head is treewise's chunked
one, so that no contestant holds all logits; what flat training computes is specified by `engine.flat`, which keeps to
the model's own forward and is the tests' oracle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from treewise.bench.pace import OnPart
from treewise.bench.varlen import LOOP, ChosenKernel, RowHeads, fastest, varlen_attention
from treewise.nn import recurrent
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.flops import LayerReach
from treewise.nn.lm_head import edge_loss
from treewise.nn.model_flops import flop_model, head_sizes
from treewise.nn.platform.tensors import to_device
from treewise.nn.vision import flat_images
from treewise.nn.wrapped import base_model
from treewise.planning.bin_packing import best_fit
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

NAME = "treewise_bench_varlen"


@dataclass(frozen=True, slots=True)
class _PackedRow:
    """Trajectories one after the other: tokens and depths ([T]), where each begins and ends, and of each trained token
    the hidden row that predicts it, the token and its weight. seen: what the model's own forward takes for images."""

    token_ids: np.ndarray
    depth: np.ndarray
    bounds: np.ndarray
    edges: tuple[np.ndarray, np.ndarray, np.ndarray]
    seen: dict[str, torch.Tensor]


class FlatRows:
    """All trajectories in packed rows of at most `max_row_tokens` (a longer one is alone); `step` trains them.

    packs: several trajectories in a row; without it each is alone, through the attention the model has, and so are
    trajectories with images, by the model's own forward. processor: of these, whose tensors are made beforehand.
    is_checkpointed: layers are computed again in the backward instead of kept.
    """

    def __init__(
        self,
        lm: DecoderAndHead,
        items: Sequence[Trajectory],
        *,
        max_row_tokens: int,
        packs: bool,
        is_checkpointed: bool = False,
        processor: object = None,
    ) -> None:
        self.lm, self.is_checkpointed = lm, is_checkpointed
        self.packs = packs and not any(item.images for item in items)
        self.denominator = sum(float(item.loss_weights.sum()) for item in items)
        rows = best_fit([len(item) for item in items], max_row_tokens if self.packs else 1)
        self.rows = [self._packed([items[index] for index in row], processor) for row in rows]
        self.kernel: ChosenKernel | None = None  # where rows are packed
        if self.packs:
            longest = max(self.rows, key=lambda row: len(row.token_ids))
            self.kernel = fastest_for(lm, longest.bounds, longest.bounds)

    @property
    def num_computed_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    def step(self, on_part: OnPart | None = None) -> float:
        """Forward and backward of every row; the loss is the weighted mean over all trained tokens."""
        device, done = self.lm.device, 0
        losses = []
        own_attention = attention(self.lm, NAME) if self.packs else nullcontext()
        with own_attention, checkpointing(self.lm.model) if self.is_checkpointed else nullcontext():
            for number, row in enumerate(self.rows, 1):
                source, *streams = row.edges
                target, weight = (to_device(stream, device) for stream in streams)
                loss, _ = edge_loss(self._hidden(row), self.lm.head(), source, target, partial(self._loss, weight))
                if loss.requires_grad:  # the row reaches something that is trained
                    loss.backward()
                losses.append(loss.detach())
                done += len(row.token_ids)
                if on_part is not None:
                    on_part(number, len(self.rows), done / self.num_computed_tokens)
        return float(torch.stack(losses).double().sum())

    def _loss(self, weight: torch.Tensor, values: dict[str, torch.Tensor], edges: slice) -> torch.Tensor:
        return -(values["log_probs"] * weight[edges].to(values["log_probs"].dtype)).sum() / self.denominator

    def _packed(self, items: Sequence[Trajectory], processor: object) -> _PackedRow:
        lengths = [len(item) for item in items]
        ids = np.concatenate([item.token_ids for item in items])
        weights = np.concatenate([item.loss_weights for item in items])
        trained = np.flatnonzero(weights)
        first_ids = to_device(items[0].token_ids, self.lm.device, torch.long)
        return _PackedRow(
            token_ids=ids,
            depth=np.concatenate([np.arange(length) for length in lengths]),
            bounds=np.cumsum([0, *lengths]),
            edges=(trained - 1, ids[trained].astype(np.int64), weights[trained]),
            seen=flat_images(self.lm.model, processor, items[0], first_ids),
        )

    def _hidden(self, row: _PackedRow) -> torch.Tensor:
        device = self.lm.device
        ids = to_device(row.token_ids, device, torch.long)[None]
        module: nn.Module = self.lm.decoder
        more: dict[str, object] = dict(row.seen)
        if row.seen:
            module = base_model(self.lm.model).base_model
        elif self.packs:
            bounds, longest = to_device(row.bounds, device, torch.int32), int(np.diff(row.bounds).max())
            more = {
                "position_ids": to_device(row.depth, device, torch.long)[None],
                **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
                **dict.fromkeys(("max_length_q", "max_length_k"), longest),
                "varlen_kernel": self.kernel.name if self.kernel is not None else None,
            }
        hidden: torch.Tensor = module(input_ids=ids, use_cache=False, **more).last_hidden_state[0]
        return hidden


def fastest_for(lm: DecoderAndHead, bounds: np.ndarray, key_bounds: np.ndarray) -> ChosenKernel:
    """The kernel for a row of a model whose sequences have these queries and keys, `[sequences + 1]` each."""
    config = lm.decoder.config.get_text_config()
    if getattr(config, "num_attention_heads", None) is None:
        return ChosenKernel(LOOP)  # recurrent layers alone
    heads = RowHeads(*head_sizes(config))
    lengths, key_lengths = (tuple(np.diff(each).tolist()) for each in (bounds, key_bounds))
    return fastest(lm.device, lm.decoder.dtype, heads, lengths, key_lengths)


def can_pack(model: nn.Module) -> bool:
    """Whether tokens of a model influence one another by plain causal attention only, so that rows may be packed."""
    reaches = {reach for reach, _ in flop_model(model).pair_forward}
    softcap = getattr(base_model(model).config.get_text_config(), "attn_logit_softcapping", None)
    return not recurrent.kinds_of(model) and reaches == {LayerReach()} and softcap is None


def merged_trajectories(forest: Forest) -> list[Trajectory]:
    """Only the trajectories that are not contained in another, with the loss weights of those that they contain.

    The loss of these is the loss of all: what flat trainers do that merge the calls of an agent ("leafization" in
    AReaL-DTA, arXiv 2602.00482).
    """
    leaves = forest.leaf_trajectories
    end = forest.segments.end_segment
    order = leaves[np.argsort(end[leaves])]
    # Pre-order: the first leaf at or after the end of a trajectory is below it.
    owner = order[np.searchsorted(end[order], end)]
    weights = {leaf: np.zeros(len(forest.trajectories[leaf]), dtype=np.float32) for leaf in leaves.tolist()}
    for item, leaf in zip(forest.trajectories, owner.tolist(), strict=True):
        weights[leaf][: len(item)] += item.loss_weights
    return [replace(forest.trajectories[leaf], loss_weights=weight) for leaf, weight in weights.items()]


@contextmanager
def attention(lm: DecoderAndHead, name: str) -> Iterator[None]:
    """Inside, the decoder uses the attention function `name`, in the forward and in recomputations of the backward."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda **_: None)
    config = lm.decoder.config
    before = config._attn_implementation_internal  # noqa: SLF001
    config._attn_implementation_internal = name  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation_internal = before  # noqa: SLF001


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """transformers' checkpointing of every layer inside."""
    # Earlier versions have the older name only; later ones warn about it.
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(model, f"{word}_checkpointing_disable")()


@torch.compiler.disable  # as treewise's: every row would be a graph of its own
def packed_attention(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    varlen_kernel: str,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention contract: [1, H, T, D] in, [1, T, H, D] out, with the bounds of its flash attention."""
    query, key, value = (x.transpose(1, 2)[0] for x in (query, key, value))
    bounds = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    return varlen_attention(query, key, value, *bounds, softmax_scale=scaling, kernel=varlen_kernel)[None], None
