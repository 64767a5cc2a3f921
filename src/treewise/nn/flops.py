"""FLOPs of one training step, flat and on the tree: the ceiling of a measured speed-up.

Conventions. A multiply-add is two FLOPs. A linear layer costs one pass forward and one for each gradient (of its input,
and of its weight where that is trained). An expert counts by the fraction of experts that a token visits. Attention
costs `2 H (D + D of the values)` per pair of query and key it may see, which is `4 H D`; its backward 2.5 times that,
as in FlashAttention (arXiv 2307.08691), whose backward computes the scores again. The head counts per projected row,
which is a row with a trained target; where a loss reads whole trajectories, rows beyond the chunk of logits that is
kept for the backward are projected once more there, which is not counted. The tower runs once for each distinct image
of a forest, and flat once for each image of each trajectory. Embeddings, norms, activations, the scans of recurrent
layers and the optimizer are left out, on both sides.

Letters: T tree tokens, N trajectories, S segments.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.planning.planner import plan as make_plan
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.nn.tower_flops import VisionCosts


@dataclass(frozen=True, slots=True)
class LayerReach:
    """How far attention looks back in some layers: a window, a chunk, or everything."""

    window: int | None = None
    chunk: int | None = None

    def pairs_below(self, depth: np.ndarray) -> np.ndarray:
        """Pairs of all queries at depths 0..depth-1 of one path ([..] int64 in and out)."""
        if self.window is not None:
            near = np.minimum(depth, self.window)
            return near * (near + 1) // 2 + (depth - near) * self.window
        if self.chunk is not None:
            full, rest = np.divmod(depth, self.chunk)
            return full * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2
        return depth * (depth + 1) // 2


@dataclass(frozen=True, slots=True)
class FlopModel:
    """What a model's step costs. All FLOPs are of one forward, but for `*_backward`.

    linear, linear_backward: per token. head, head_backward: per projected row. pair_forward: per pair, for all layers
    of a reach together. gateway_values: keys and values per token, all layers. activation_values: an estimate of
    the values kept per token for the backward (`engine.step_memory` counts them). vocabulary: tokens that the model
    has embeddings for. vision: of the tower and its projector; None without. hidden_values: of a hidden row.
    """

    linear: float
    linear_backward: float
    head: float
    head_backward: float
    pair_forward: tuple[tuple[LayerReach, float], ...]
    num_parameters: int
    num_trained_parameters: int
    gateway_values: int
    activation_values: int
    vision: "VisionCosts | None" = None
    vocabulary: int = 0
    hidden_values: int = 0

    def flat(self, forest: Forest) -> float:
        """One forward and backward of every trajectory alone."""
        step = self._step(forest.num_flat_tokens, flat_head_rows(forest), forest.path_lengths)
        if not forest.has_images:
            return step
        return step + self._images(forest, forest.multiplicity[forest.images.start])

    def leaf(self, forest: Forest) -> float:
        """The same without the trajectories contained in another, whose trained tokens count in the longer one."""
        return self.rows(forest, forest.ends[forest.leaf_trajectories], leaf_head_rows(forest))

    def rows(self, forest: Forest, ends: np.ndarray, num_trained: int) -> float:
        """One forward and backward of rows that lead from a root to these tree positions ([R] int64), each alone.

        num_trained: tokens that they train.
        """
        lengths, ordered, start = forest.depth[ends].astype(np.int64) + 1, np.sort(ends), forest.images.start
        through = np.searchsorted(ordered, forest.subtree_end[start]) - np.searchsorted(ordered, start)
        return self._step(int(lengths.sum()), num_trained, lengths) + self._images(forest, through)

    def native_flat(self, forest: Forest) -> float:
        """Every trajectory through the model's own forward: logits of all rows, kept for the backward."""
        head = self.head + self.head_backward
        trained_rows = self._step(forest.num_flat_tokens, 0, forest.path_lengths)
        images = self._images(forest, forest.multiplicity[forest.images.start])
        return trained_rows + images + head * forest.num_flat_tokens

    def tree(self, forest: Forest) -> float:
        """One forward and backward of every tree token and of every distinct image."""
        first = forest.segments.depth
        last = first + forest.segments.lengths
        step = self._step(forest.num_tokens, tree_head_rows(forest), last, first)
        if not forest.has_images:
            return step
        return step + self._images(forest, forest.images.is_first_place)

    def of_tokens(self, depth: np.ndarray) -> np.ndarray:
        """[T] float64: one forward and backward of each token, without the head. depth: [T] integers."""
        low = depth.astype(np.int64)
        pairs = sum(cost * (reach.pairs_below(low + 1) - reach.pairs_below(low)) for reach, cost in self.pair_forward)
        costs: np.ndarray = self.linear + self.linear_backward + (1.0 + ATTENTION_BACKWARD) * pairs + np.zeros(len(low))
        return costs

    def recomputed(self, plan: Plan) -> float:
        """What a plan adds: one more forward of the open tokens that are not held, without the head, and of the images
        if their graph is not kept."""
        again = [batch.positions() for batch in plan.micro_batches if batch.is_open and not batch.is_held]
        positions = np.concatenate([np.zeros(0, dtype=np.int64), *again])
        depth = plan.forest.depth[positions].astype(np.int64)
        total = self.linear * len(depth) + self._pairs(depth + 1, depth)
        if self.vision is not None and self.vision.is_trained and not self.keeps_images(plan):
            total += float(self.vision.forward(self._distinct_rows(plan.forest)).sum())
        return total

    def planned(self, plan: Plan) -> float:
        """Everything that a plan computes."""
        return self.tree(plan.forest) + self.recomputed(plan)

    def plan(self, forest: Forest, max_tokens: int | None, *, hold: str = "auto") -> Plan:
        """The plan of a budget (`treewise.plan`).

        With images, the cheaper of two: micro-batches that use all of the budget, and smaller ones that leave room for
        the graph of the tower, which then runs once instead of twice.

        Raises:
            PlanError: see `treewise.plan`.
        """
        full = make_plan(forest, max_tokens, hold=hold)
        if max_tokens is None or self.vision is None or self.keeps_images(full):
            return full
        room = math.floor(max_tokens - self.tokens_per_row * self._distinct_rows(forest).sum())
        if room < max(1, forest.images.largest):
            return full
        smaller = replace(make_plan(forest, room, hold=hold), max_tokens=max_tokens)
        return min((full, smaller), key=self.recomputed)

    def keeps_images(self, plan: Plan) -> bool:
        """Whether the graph of all images of a plan fits beside its micro-batches, so that the tower runs once.

        A feature row takes the budget of as many tokens as have its activations.
        """
        if self.vision is None or plan.max_tokens is None:
            return True
        largest = max(tokens for _, tokens in plan.timeline)
        return bool(largest + self.tokens_per_row * self._distinct_rows(plan.forest).sum() <= plan.max_tokens)

    def kept_image_values(self, plan: Plan) -> int:
        """Values of the tower that are kept beside the micro-batches of a plan; 0 where it runs twice."""
        if self.vision is None or not self.keeps_images(plan):
            return 0
        return round(self.vision.activation_values * self._distinct_rows(plan.forest).sum())

    @property
    def tokens_per_row(self) -> float:
        """Tokens that keep as many values for the backward as a feature row does in tower and projector."""
        return 0.0 if self.vision is None else self.vision.activation_values / max(self.activation_values, 1)

    def _distinct_rows(self, forest: Forest) -> np.ndarray:
        """[n] int64, the feature rows of each distinct image of a forest."""
        if self.vision is None:
            return np.zeros(0, dtype=np.int64)
        return self.vision.rows_of(forest)[forest.images.is_first_place]

    def _images(self, forest: Forest, times: np.ndarray) -> float:
        """Forward and backward of the images of a forest, each so often ([I] integers)."""
        if self.vision is None or not forest.has_images:
            return 0.0
        return float((self.vision.step(self.vision.rows_of(forest)) * times).sum())

    def _step(self, num_tokens: int, num_rows: int, last: np.ndarray, first: np.ndarray | int = 0) -> float:
        linear = (self.linear + self.linear_backward) * num_tokens
        head = (self.head + self.head_backward) * num_rows
        return linear + head + (1 + ATTENTION_BACKWARD) * self._pairs(last, first)

    def _pairs(self, last: np.ndarray, first: np.ndarray | int) -> float:
        low, high = np.asarray(first, dtype=np.int64), np.asarray(last, dtype=np.int64)
        return float(
            sum(cost * (reach.pairs_below(high) - reach.pairs_below(low)).sum() for reach, cost in self.pair_forward)
        )


def gateway_bytes(num_values: int, itemsize: int) -> int:
    """Bytes of so many keys and values of `itemsize` bytes each, and of their gradients in float32 or wider."""
    return num_values * (itemsize + max(itemsize, 4))


def window_bytes(num_gateway_values: int, num_hidden_values: int, itemsize: int) -> int:
    """Bytes that a window keeps of a token beside its graph: keys and values, a hidden row, gradients of all. Rows are
    in memory that doubles."""
    return gateway_bytes(num_gateway_values + 2 * num_hidden_values, itemsize)


ADAMW_VALUES = 2  # moments kept per trained parameter
# Bytes of an optimizer's state per trained parameter, by a part of its name (transformers' `optim`); others keep none
# that counts (`sgd`), or two values of the parameter's dtype, as AdamW does.
_STATE_BYTES = {"8bit": 2.0, "4bit": 1.0, "sgd": 0.0}


def state_bytes(optim: str | None, itemsize: int) -> float:
    """Of the optimizer of a name, per trained parameter of `itemsize` bytes; None: AdamW."""
    return next((size for part, size in _STATE_BYTES.items() if part in (optim or "")), float(ADAMW_VALUES * itemsize))


# -- tokens and rows of a forest --------------------------------------------------------------------------------------


def flat_head_rows(forest: Forest) -> int:
    """Trained tokens of all trajectories: each is predicted by a row of its own."""
    if forest.tree_streams:
        return int(forest.multiplicity[forest.is_trained].sum())
    return int(np.count_nonzero(forest.flat_stream("loss_weights")))


def tree_head_rows(forest: Forest) -> int:
    """Tree tokens that predict at least one trained token."""
    return len(np.unique(forest.parent[forest.is_trained]))


def leaf_head_rows(forest: Forest) -> int:
    """Trained tokens on the paths of the `leaf_trajectories`."""
    # A segment adds its count to every path below it: +count where its subtree begins, -count where it ends.
    segments = forest.segments
    count = np.add.reduceat(forest.is_trained.astype(np.int64), segments.start)
    change = np.zeros(forest.num_tokens + 1, dtype=np.int64)
    change[segments.start] += count
    np.subtract.at(change, segments.subtree_end, count)
    on_path = np.cumsum(change)[segments.start]
    return int(on_path[segments.end_segment[forest.leaf_trajectories]].sum())
