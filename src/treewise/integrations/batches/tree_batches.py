"""A batch of another trainer as a tree: what the integrations of all trainers have in common.

A trainer's head turns hidden rows and labels into the fields that the trainer reads (log-probs, entropies, ...). Rows
of a batch become a forest with edges, each edge gets its fields once, and an integration puts them back into the rows.

Letters: E edges, M model width.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from treewise.distributed import ranks
from treewise.distributed.others_shards import OthersShards
from treewise.distributed.parts import mesh_of
from treewise.engine.edge_scorer import Entries, Values
from treewise.engine.engine import TreeEngine
from treewise.engine.values import Reader
from treewise.errors import ConfigError, UnsupportedModelError, num
from treewise.integrations.batches.accumulation import AccumulationWindow
from treewise.integrations.batches.batch_forest import (
    BatchImages,
    NotShareable,
    OwnCall,
    RowRules,
    Rows,
    WholeRows,
)
from treewise.integrations.batches.late_sum import refuse_early_sum
from treewise.integrations.batches.positions import cuts_packed_rows, has_relative_positions
from treewise.integrations.batches.router_reader import router_loss_of, router_loss_reader
from treewise.integrations.batches.together import Offer, Together
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.model_checks import length_limit, refuse_dropout
from treewise.nn.platform.tensors import to_device
from treewise.nn.router_loss import RouterLoss, RouterLossRule
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.engine.window import Window

logger = logging.getLogger("treewise")

Fields = dict[str, torch.Tensor]
AnyRows = TypeVar("AnyRows", Rows, WholeRows)


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

    num_calls: batches computed as trees. left: batches computed by the model's own forward, by reason. num_cached:
    calls with a cache, as in generation, which are the model's own, too. Of batches computed as trees:
    num_rows; num_flat_tokens, without padding; num_tree_tokens, without repeated prefixes and tokens that no label
    depends on; num_computed_tokens, forwards of tokens with recomputed ones; num_recorded, tree tokens with recorded
    experts; num_otherwise, of these, that some router would have sent to others.
    """

    num_calls: int = 0
    left: dict[str, int] = field(default_factory=dict)
    num_cached: int = 0
    num_rows: int = 0
    num_flat_tokens: int = 0
    num_tree_tokens: int = 0
    num_computed_tokens: int = 0
    num_recorded: int = 0
    num_otherwise: int = 0

    @property
    def num_left(self) -> int:
        """Batches computed by the model's own forward."""
        return sum(self.left.values())

    def leave(self, reason: str) -> None:
        """Counts a batch that is computed by the model's own forward."""
        self.left[reason] = self.left.get(reason, 0) + 1

    @property
    def share_ratio(self) -> float:
        """Flat tokens / tree tokens; 1 before the first batch."""
        return self.num_flat_tokens / self.num_tree_tokens if self.num_tree_tokens else 1.0

    def __str__(self) -> str:
        cached = f"; {num(self.num_cached, 'call')} with a cache, as in generation"
        replay = f"; {self.num_otherwise:,} of {self.num_recorded:,} replayed tokens would have gone to other experts"
        return (
            f"{num(self.num_calls, 'batch', 'batches')}, {num(self.num_rows, 'row')}, "
            f"{self.num_flat_tokens:,} flat tokens, {self.num_tree_tokens:,} tree tokens, "
            f"{self.num_computed_tokens:,} computed, share ratio "
            f"{self.share_ratio:.2f}; {num(self.num_left, 'batch', 'batches')} left as they were"
            f"{''.join(f' ({count:,}: {reason})' for reason, count in self.left.items())}"
            f"{cached if self.num_cached else ''}"
            f"{replay if self.num_recorded else ''}"
        )


@dataclass(frozen=True, slots=True)
class Computed:
    """What a batch's tree gave: each reader's values, and how many tokens were new to a window (all, without one) and
    computed forward."""

    values: list[Values]
    num_tree_tokens: int
    num_computed_tokens: int


class TreeBatches:
    """Computes batches of one model as trees, and counts them.

    model: of the engine, without wrappers. min_ratio: batches with fewer tokens than this for each tree token are not
    worth it, unless they exceed the budget. windows: whether calls between two optimizer steps share, where a loop says
    which these are. shards: of a model that another program has sharded.

    Raises:
        ConfigError: a negative `min_ratio`, or `max_tokens="auto"` of a sharded model.
    """

    def __init__(
        self,
        engine: TreeEngine,
        model: nn.Module,
        min_ratio: float,
        *,
        windows: bool = False,
        shards: OthersShards | None = None,
    ) -> None:
        if not min_ratio >= 0:
            raise ConfigError(f"min_ratio={min_ratio} must not be negative.")
        self.engine, self.model, self.min_ratio = engine, model, min_ratio
        self.counts = Counts()
        self.rules = _rules_of(engine)
        self.together = None if shards is None else Together(engine, shards)
        self.windows = AccumulationWindow(engine, model, min_ratio) if windows else None
        self._logged: set[str] = set()

    @property
    def open_window(self) -> "Window | None":
        """In which calls share at present, if they do; the caller's own, or that of the loop."""
        return self.engine.in_window or (None if self.windows is None else self.windows.window)

    def rows(self, make: Callable[[], tuple[AnyRows | None, int]], *, whatever_size: bool = False) -> AnyRows | None:
        """The rows of a batch; None for one that is left to the model's own forward, which is counted, and told once:
        every row would have noise of its own, `make` raises `NotShareable`, or there is little to share.

        make: the rows, and tokens of the batch, padding included. The tree should be smaller than these by enough,
        unless they do not fit the budget, or meet those of other calls in a window. whatever_size: also where little is
        shared.
        """
        made: list[AnyRows] = []

        def offer() -> Offer:
            return self._offer(make, made)

        if self.together is None:
            own = offer()
            offers = [own]
        else:
            offers = ranks.on_every_rank(offer)
            own = offers[ranks.own()]
        if own.is_own_call:
            self.counts.num_cached += 1
            return None
        if own.left:
            self._left(own.left, own.level)
            return None
        if other := next((each for each in offers if each.left), None):
            self._left(f"another process leaves its rows of the call: {other.left}", logging.INFO)
            return None
        (rows,) = made
        num_padded, num_tree = (sum(getattr(each, name) for each in offers) for name in ("num_padded", "num_tree"))
        if all(each.fits for each in offers) and not whatever_size and num_padded < self.min_ratio * num_tree:
            if self.windows is not None and self.windows.is_worth_it:
                return rows
            if self.windows is not None:
                self.windows.observe(rows.forest)
            little = f"little to share: fewer than {self.min_ratio:g} tokens, padding included, for each tree token"
            self._left(little, logging.INFO)
            return None
        if self.together is not None:
            self.together.agree(offers)
        return rows

    def _offer(self, make: Callable[[], tuple[AnyRows | None, int]], made: list[AnyRows]) -> Offer:
        """What this rank can do with a batch; its rows are added to `made`."""
        try:
            refuse_dropout(self.model)
            rows, num_padded = make()
            if rows is not None and rows.images is not None and self.together is not None:
                raise NotShareable("it has images, and the model is sharded (FSDP2)")
        except UnsupportedModelError as error:
            noise = f"every row would have a dropout mask or noise of its own. {str(error).rstrip('.')}"
            return Offer(noise, level=logging.WARNING)
        except OwnCall as reason:
            return Offer(str(reason), is_own_call=True)
        except NotShareable as reason:
            return Offer(str(reason), level=logging.WARNING)
        if rows is None:
            return Offer("no label is scored", level=logging.DEBUG)
        made.append(rows)
        fits = self.engine.max_tokens is None or num_padded <= self.engine.max_tokens
        own = Offer(num_padded=num_padded, num_tree=rows.forest.num_tokens, fits=fits)
        return own if self.together is None else self.together.completed(own, rows.forest)

    def _left(self, reason: str, level: int) -> None:
        self.counts.leave(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.log(level, f"a batch is left to the model's own forward: {reason}.")

    def values(self, forest: Forest, readers: Sequence[Reader], images: BatchImages | None = None) -> Computed:
        """Each reader's values of a forest, within the window if there is one.

        Raises:
            ConfigError: several ranks, and a batch that exceeds `max_tokens`.
        """
        pixels_of = None if images is None else images.pixels_of
        if self.together is not None:
            in_lockstep = self.together.begin(forest)
            plan = self.engine.plan(forest)
            with self.engine.inside_lockstep(ranks.gather_texts) if in_lockstep else nullcontext():
                values = self.engine.values(plan, readers, pixels_of)
            return Computed(values, forest.num_tokens, plan.num_computed_tokens)
        with nullcontext() if self.windows is None else self.windows.around(forest):
            window = self.engine.in_window
            before = (0, 0) if window is None else (window.num_calls, window.num_tokens)
            plan = self.engine.plan(forest)
            if window is None:
                refuse_pieces_on_several_ranks(plan, self.engine.model)
            else:
                refuse_early_sum()
            values = self.engine.values(plan, readers, pixels_of)
            if window is None or window.num_calls == before[0]:  # by itself
                return Computed(values, forest.num_tokens, plan.num_computed_tokens)
            new = window.num_tokens - before[1]
            return Computed(values, new, new)

    def fields(
        self, rows: Rows, head: RowHead, rule: RouterLossRule | None = None
    ) -> tuple[Fields, torch.Tensor | None, Computed]:
        """[E] values of the edges by name, the router loss if there is a rule, and what gave them.

        Raises:
            ConfigError: see `values`.
        """
        reader = _field_reader(rows, head)
        if rule is None:
            computed = self.values(rows.forest, [reader], rows.images)
            return computed.values[0], None, computed
        router_loss = RouterLoss(rule, rows.forest.multiplicity)
        plan = self.engine.plan(rows.forest)
        computed = self.values(rows.forest, [reader, router_loss_reader(router_loss, plan)], rows.images)
        return computed.values[0], router_loss_of(router_loss, computed.values[1]), computed

    def count(self, rows: Rows | WholeRows, num_rows: int, computed: Computed) -> None:
        """Adds a batch that was computed as a tree."""
        counts = self.counts
        counts.num_calls += 1
        counts.num_rows += num_rows
        counts.num_flat_tokens += rows.num_real
        counts.num_tree_tokens += computed.num_tree_tokens
        counts.num_computed_tokens += computed.num_computed_tokens
        if (replay := self.engine.replay) is not None:
            counts.num_recorded += replay.num_recorded
            counts.num_otherwise += replay.num_otherwise


@overload
def as_numpy(tensor: torch.Tensor) -> np.ndarray: ...
@overload
def as_numpy(tensor: torch.Tensor | None) -> np.ndarray | None: ...
def as_numpy(tensor: torch.Tensor | None) -> np.ndarray | None:
    """A tensor's values on the host; None for None."""
    return None if tensor is None else np.asarray(tensor.detach().cpu())


def tensor_of(arguments: Mapping[str, object], name: str) -> torch.Tensor | None:
    """An argument of a call; None where it is missing. Raises `NotShareable` for one that is no tensor."""
    value = arguments.get(name)
    if value is not None and not isinstance(value, torch.Tensor):
        raise NotShareable(f"{name} is a {type(value).__name__}")
    return value


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


def refuse_pieces_on_several_ranks(plan: Plan, model: nn.Module) -> None:
    """Raises for several micro-batches on ranks with rows of their own: each runs a backward and, sharded, gathers of
    its own, which no other rank would join."""
    mesh = mesh_of(model)
    if not plan.is_whole and ranks.count() > (1 if mesh is None else mesh.tensor.size()):
        raise ConfigError(
            f"a batch of {plan.forest.num_tokens:,} tree tokens exceeds max_tokens={plan.max_tokens:,}, and on several "
            "ranks share_prefixes computes a batch whole. Leave max_tokens=None and lower per_device_train_batch_size."
        )


def _rules_of(engine: TreeEngine) -> RowRules:
    """What the model itself has to show is computed once, when a row needs it."""
    lm, limit = engine.lm, length_limit(engine.lm.decoder)
    is_relative, cuts_rows = (
        functools.cache(functools.partial(asked, lm)) for asked in (has_relative_positions, cuts_packed_rows)
    )
    return RowRules(is_relative, limit and limit[0], cuts_rows)
