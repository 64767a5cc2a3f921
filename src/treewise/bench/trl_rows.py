"""TRL's tree rows without its trainer: the `packing.py` of the installed package, with the best varlen attention.

TRL gathers the keys of each segment's whole path and makes one call over all segments, aligned at the end. For models
with recurrent layers, `tree-recurrence` gives the row's tree to these layers; where it finds no kernel that takes
initial states it runs every path again from its beginning.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from treewise.bench.flat import attention, checkpointing, fastest_for
from treewise.bench.pace import OnPart
from treewise.bench.varlen import LOOP, ChosenKernel, varlen_attention
from treewise.errors import ConfigError, UnsupportedModelError, bytes_as_text, pip_install
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.lm_head import edge_values
from treewise.nn.model_flops import gateway_values
from treewise.nn.wrapped import weight_of
from treewise.tree.trajectory import Trajectory

Sample = dict[str, Any]


class TreeRow(Protocol):
    """What is read of TRL's."""

    def add(self, sample: Sample) -> None: ...
    def fits(self, sample: Sample, max_tokens: int) -> bool: ...
    def pack(self) -> dict[str, torch.Tensor]: ...


_STREAMS = ("input_ids", "completion_mask", "old_log_probs")


class TrlRows:
    """Trajectories packed into tree rows; `step` trains them by the weighted token mean.

    max_tokens: the most tokens of a row; None packs all into one. A sample goes into the first row that has room for
    what it does not share, as TRL's planner does.

    Raises:
        ConfigError: TRL or `tree-recurrence` is not installed, or a trajectory is longer than a row.
        UnsupportedModelError: recurrent layers that `tree-recurrence` does not support, or a model on which TRL's
            attention fails.
    """

    def __init__(
        self,
        lm: DecoderAndHead,
        items: Sequence[Trajectory],
        max_tokens: int | None = None,
        *,
        follows_states: bool = False,
        is_checkpointed: bool = False,
    ) -> None:
        self.lm, self.is_checkpointed, self.follows_states = lm, is_checkpointed, follows_states
        self.packing = packing_module()
        self.packing.register_tree_attention()
        samples = [_sample(item) for item in items]
        self.denominator = sum(float(sample["old_log_probs"].sum()) for sample in samples)
        self.rows = [row.pack() for row in self._rows(samples, max_tokens)]
        self.kernel = ChosenKernel(LOOP)
        self._require_support(samples[0])
        longest = max(self.rows, key=lambda row: len(row["tree_kv_index"]))
        bounds, key_bounds = (longest[f"tree_cu_seqlens_{each}"].numpy() for each in "qk")
        self.kernel = fastest_for(lm, bounds, key_bounds)

    @property
    def num_computed_tokens(self) -> int:
        return sum(len(row["input_ids"]) for row in self.rows)

    @property
    def num_key_rows(self) -> int:
        """Key rows that the attention of a layer gathers."""
        return sum(len(row["tree_kv_index"]) for row in self.rows)

    @property
    def copies(self) -> str:
        """What gathering costs, in words."""
        weight = weight_of(self.lm.decoder.get_input_embeddings())
        size = self.num_key_rows * gateway_values(self.lm.decoder.config.get_text_config()) * weight.element_size()
        num_segments = sum(len(row["tree_cu_seqlens_q"]) - 1 for row in self.rows)
        kept = "" if self.is_checkpointed else ", kept for the backward"
        return (
            f"copies the path of each of {num_segments:,} segments in every layer, {self.num_key_rows:,} rows of keys "
            f"and values: {bytes_as_text(size)} in a forward{kept}, where they are added up again"
        )

    def step(self, on_part: OnPart | None = None) -> float:
        """Forward and backward of every row; returns the loss."""
        losses, done = [], 0
        with self._running(), checkpointing(self.lm.model) if self.is_checkpointed else nullcontext():
            for number, each in enumerate(self.rows, 1):
                row = {name: value.to(self.lm.device) for name, value in each.items()}
                hidden = self._hidden(row)
                trained = torch.nonzero(row["shift_labels"] != -100)[:, 0]
                logprobs = edge_values(hidden, self.lm.head(), trained, row["shift_labels"][trained])["log_probs"]
                edge = torch.full((len(hidden),), -1, device=hidden.device)
                edge = edge.index_put_((trained,), torch.arange(len(trained), device=hidden.device))
                weights = row["old_log_probs"].to(logprobs.dtype)
                loss = -(logprobs[edge[row["token_index"]]] * weights).sum() / self.denominator
                if loss.requires_grad:  # the row reaches something that is trained
                    loss.backward()
                losses.append(loss.detach())
                done += len(each["input_ids"])
                if on_part is not None:
                    on_part(number, len(self.rows), done / self.num_computed_tokens)
        return float(torch.stack(losses).double().sum())

    def _require_support(self, sample: Sample) -> None:
        """Two tokens through the decoder, so that errors of others are raised now and not in the first step."""
        row: TreeRow = self.packing.TreeRow()
        row.add({name: value[:2] if name in _STREAMS else value for name, value in sample.items()})
        try:
            with torch.no_grad(), self._running():
                self._hidden({name: value.to(self.lm.device) for name, value in row.pack().items()})
        except (StopIteration, AttributeError, KeyError, TypeError) as error:
            raise UnsupportedModelError(
                f"TRL's tree rows do not run this model: {type(error).__name__} {error}"
            ) from error

    def _hidden(self, row: dict[str, torch.Tensor]) -> torch.Tensor:
        longest_q, longest_k = row["tree_max_seqlens"].tolist()
        hidden: torch.Tensor = self.lm.decoder(
            input_ids=row["input_ids"][None],
            position_ids=row["position_ids"][None],
            use_cache=False,
            **{name: row[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")},
            tree_max_seqlen_q=longest_q,
            tree_max_seqlen_k=longest_k,
        ).last_hidden_state[0]
        return hidden

    def _rows(self, samples: Sequence[Sample], max_tokens: int | None) -> list[TreeRow]:
        rows: list[TreeRow] = []
        for sample in samples:
            length = len(sample["input_ids"])
            if max_tokens is not None and length > max_tokens:
                raise ConfigError(f"a trajectory of {length:,} tokens is longer than a row of {max_tokens:,}.")
            chosen = next((row for row in rows if max_tokens is None or row.fits(sample, max_tokens)), None)
            if chosen is None:
                chosen = self.packing.TreeRow()
                rows.append(chosen)
            chosen.add(sample)
        return rows

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Inside, attention and recurrent layers follow the row; hooks on transformers' modules are removed after."""
        by = partial(varlen_attention, kernel=self.kernel.name)
        self.packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=by)  # noqa: SLF001
        if not self.follows_states:
            with attention(self.lm, self.packing.TREE_ATTENTION):
                yield
            return
        if find_spec("tree_recurrence") is None:
            raise ConfigError(f"tree-recurrence is not installed: {pip_install('tree-recurrence')}")
        import tree_recurrence

        logger = logging.getLogger("tree_recurrence")
        level = logger.level
        logger.setLevel(logging.ERROR)  # it logs at every step that it has no kernel
        support = tree_recurrence.install(self.lm.model)
        try:
            if not support.shares_prefixes:
                raise UnsupportedModelError(f"tree-recurrence does not support this model: {support.reason}")
            with attention(self.lm, self.packing.TREE_ATTENTION):
                yield
        finally:
            tree_recurrence.uninstall(self.lm.model)
            logger.setLevel(level)


def packing_module() -> Any:
    """TRL's `packing.py`.

    Raises:
        ConfigError: TRL is not installed, or it is a version without tree rows.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it is experimental
            from trl.experimental.async_grpo import packing
    except ImportError as error:
        raise ConfigError(f"TRL's tree rows are not installed ({pip_install('trl')}): {error}") from error
    if not hasattr(packing, "TreeRow"):
        raise ConfigError(f"TRL {version('trl')} has no tree rows: {pip_install('trl')}.")
    return packing


def _sample(item: Trajectory) -> Sample:
    """A sample as TRL has it. Its old log-probs are not used here, so that stream carries the loss weights."""
    mask = (item.loss_weights > 0).astype(np.int64)
    streams = {"input_ids": item.token_ids, "completion_mask": mask, "old_log_probs": item.loss_weights}
    return {**streams, "advantage": 1.0, "group_id": 0}
