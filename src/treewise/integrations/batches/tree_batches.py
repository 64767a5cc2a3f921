"""A batch of another trainer as a tree: what the integrations of all trainers have in common.

A trainer's head turns hidden rows and labels into the fields that the trainer reads (log-probs, entropies, ...). Rows
of a batch become a forest with edges, each edge gets its fields once, and an integration puts them back into the rows.

Letters: E edges, M model width.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from treewise.distributed import ranks
from treewise.distributed.parts import mesh_of
from treewise.engine.edge_scorer import Entries
from treewise.engine.engine import TreeEngine
from treewise.engine.values import Reader
from treewise.errors import ConfigError, UnsupportedModelError, num
from treewise.integrations.batches.batch_forest import NotShareable, Rows
from treewise.integrations.batches.router_reader import router_loss_of, router_loss_reader
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.model_checks import refuse_dropout
from treewise.nn.platform.tensors import to_device
from treewise.nn.router_loss import RouterLoss, RouterLossRule
from treewise.planning.plans import Plan

logger = logging.getLogger("treewise")

Fields = dict[str, torch.Tensor]


class RowHead(Protocol):
    """A trainer's own head. names: of its fields. without_gradient: those of them that carry none."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def without_gradient(self) -> tuple[str, ...]: ...

    def __call__(self, hidden_EM: torch.Tensor, labels_E: torch.Tensor) -> Fields:
        """[E] of each field."""
        ...


class StandIn:
    """Takes a model's place in a trainer's head: every attribute is the model's, but its decoder returns given rows.

    seen: called when it does.
    """

    def __init__(
        self, model: nn.Module, decoder: nn.Module, hidden: torch.Tensor, seen: Callable[[], None] | None = None
    ) -> None:
        self._model, self._decoder, self._hidden, self._seen = model, decoder, hidden, seen

    def __getattr__(self, name: str) -> object:
        value = getattr(self._model, name)
        return self._rows if value is self._decoder else value

    def _rows(self, *_: object, **__: object) -> BaseModelOutputWithPast:
        if self._seen is not None:
            self._seen()
        return BaseModelOutputWithPast(last_hidden_state=self._hidden)


@dataclass
class Counts:
    """Batches and tokens that a model computed so far.

    num_calls: batches computed as trees. num_left: batches computed by the model's own forward. Of the former:
    num_rows; num_flat_tokens, without padding; num_tree_tokens, without repeated prefixes and tokens that no label
    depends on; num_computed_tokens, forwards of tokens with recomputed ones; num_recorded, tree tokens with recorded
    experts; num_otherwise, of these, that some router would have sent to others.
    """

    num_calls: int = 0
    num_left: int = 0
    num_rows: int = 0
    num_flat_tokens: int = 0
    num_tree_tokens: int = 0
    num_computed_tokens: int = 0
    num_recorded: int = 0
    num_otherwise: int = 0

    @property
    def share_ratio(self) -> float:
        """Flat tokens / tree tokens; 1 before the first batch."""
        return self.num_flat_tokens / self.num_tree_tokens if self.num_tree_tokens else 1.0

    def __str__(self) -> str:
        replay = f"; {self.num_otherwise:,} of {self.num_recorded:,} replayed tokens would have gone to other experts"
        return (
            f"{num(self.num_calls, 'batch', 'batches')}, {num(self.num_rows, 'row')}, "
            f"{self.num_flat_tokens:,} flat tokens, {self.num_tree_tokens:,} tree tokens, "
            f"{self.num_computed_tokens:,} computed, share ratio "
            f"{self.share_ratio:.2f}; {num(self.num_left, 'batch', 'batches')} left as they were"
            f"{replay if self.num_recorded else ''}"
        )


class TreeBatches:
    """Computes batches of one model as trees, and counts them.

    min_ratio: batches with fewer tokens than this for each tree token are not worth it, unless they exceed the budget.

    Raises:
        ConfigError: a negative `min_ratio`.
    """

    def __init__(self, engine: TreeEngine, min_ratio: float) -> None:
        if not min_ratio >= 0:
            raise ConfigError(f"min_ratio={min_ratio} must not be negative.")
        self.engine, self.min_ratio = engine, min_ratio
        self.counts = Counts()
        self.is_relative = not _has_absolute_positions(engine)
        self._logged: set[str] = set()

    def rows(
        self, model: nn.Module, make: Callable[[], tuple[Rows | None, int]], *, whatever_size: bool = False
    ) -> Rows | None:
        """The rows of a batch; None for one that is left to the model's own forward, which is counted, and told once:
        every row would have a dropout mask of its own, `make` raises `NotShareable`, or there is little to share.

        make: the rows, and tokens of the batch, padding included. The tree should be smaller than these by enough,
        unless they do not fit the budget. whatever_size: also where little is shared.
        """
        rows, num_padded, why = None, 0, ""
        try:
            refuse_dropout(model)
            rows, num_padded = make()
        except UnsupportedModelError as error:
            why = f"every row would have a dropout mask of its own. {str(error).rstrip('.')}"
        except NotShareable as reason:
            why = str(reason)
        if why:
            self._log_once(logging.WARNING, f"a batch is left to the model's own forward: {why}.")
        fits = self.engine.max_tokens is None or num_padded <= self.engine.max_tokens
        if rows is not None and fits and not whatever_size and num_padded < self.min_ratio * rows.forest.num_tokens:
            rows = None
            self._log_once(
                logging.INFO,
                f"batches with little to share (fewer than {self.min_ratio:g} tokens of the rows, padding included, "
                "for each tree token) are left to the model's own forward.",
            )
        self.counts.num_left += rows is None
        return rows

    def fields(
        self, rows: Rows, head: RowHead, rule: RouterLossRule | None = None
    ) -> tuple[Fields, torch.Tensor | None, Plan]:
        """[E] values of the edges by name, the router loss if there is a rule, and the plan that gave them.

        Raises:
            ConfigError: several ranks, and a batch that exceeds `max_tokens`.
        """
        plan = self.engine.plan(rows.forest)
        _refuse_pieces_on_several_ranks(plan, self.engine.model)
        reader, pixels_of = _field_reader(rows, head), None if rows.images is None else rows.images.pixels_of
        if rule is None:
            return self.engine.values(plan, [reader], pixels_of)[0], None, plan
        router_loss = RouterLoss(rule, plan.forest.multiplicity)
        fields, parts = self.engine.values(plan, [reader, router_loss_reader(router_loss, plan)], pixels_of)
        return fields, router_loss_of(router_loss, parts), plan

    def count(self, rows: Rows, num_rows: int, plan: Plan) -> None:
        """Adds a batch that was computed as a tree."""
        counts = self.counts
        counts.num_calls += 1
        counts.num_rows += num_rows
        counts.num_flat_tokens += rows.num_real
        counts.num_tree_tokens += rows.forest.num_tokens
        counts.num_computed_tokens += plan.num_computed_tokens
        if (replay := self.engine.replay) is not None:
            counts.num_recorded += replay.num_recorded
            counts.num_otherwise += replay.num_otherwise

    def _log_once(self, level: int, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.log(level, message)


def as_numpy(tensor: torch.Tensor | None) -> Any:
    """A tensor's values on the host; None for None."""
    return None if tensor is None else np.asarray(tensor.detach().cpu())


def fields_in_rows(fields: Fields, rows: Rows, shape: torch.Size) -> Fields:
    """The fields in the shape of the labels, zero where there is no label."""
    device = next(iter(fields.values())).device
    cell, edge = to_device(rows.cell, device), to_device(rows.edge, device)
    return {
        name: value.new_zeros(shape.numel()).index_copy(0, cell, value[edge]).view(shape)
        for name, value in fields.items()
    }


def _field_reader(rows: Rows, head: RowHead) -> Reader:
    """Reads the [E] fields of the edges, as the trainer's head computes them."""

    def read(output: MicroBatchOutput) -> Entries | None:
        # The edges that leave the tokens of this micro-batch, and the row of the token that each leaves.
        positions, device = output.positions, output.hidden.device  # ascending
        row = np.searchsorted(positions, rows.source)
        is_inside = row < len(positions)
        is_inside[is_inside] = positions[row[is_inside]] == rows.source[is_inside]
        edges = np.flatnonzero(is_inside)
        if len(edges) == 0:
            return None
        return edges, head(output.hidden[to_device(row[edges], device)], to_device(rows.label[edges], device))

    return Reader(read, head.names, len(rows.source), without_gradient=head.without_gradient)


def _refuse_pieces_on_several_ranks(plan: Plan, model: nn.Module) -> None:
    """Raises for several micro-batches on ranks with rows of their own: each runs a backward and, sharded, gathers of
    its own, which no other rank would join."""
    mesh = mesh_of(model)
    if not plan.is_whole and ranks.count() > (1 if mesh is None else mesh.tensor.size()):
        raise ConfigError(
            f"a batch of {plan.forest.num_tokens:,} tree tokens exceeds max_tokens={plan.max_tokens:,}, and on several "
            "ranks share_prefixes computes a batch whole. Leave max_tokens=None and lower per_device_train_batch_size."
        )


def _has_absolute_positions(engine: TreeEngine) -> bool:
    """Whether the decoder has a table of position embeddings, so that left padding changes its rows."""
    return any(
        isinstance(module, nn.Embedding) and ("pos" in name or "wpe" in name)
        for name, module in engine.lm.decoder.named_modules()
    )
