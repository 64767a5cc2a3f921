"""The forest: trajectories with their shared prefixes merged, laid out in depth-first pre-order.

In this order the descendants of a token are the contiguous range after it, so `subtree_end` alone decides which tokens
may see which: query `q` sees key `k` exactly when `k <= q < subtree_end[k]`.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from treewise.base import features
from treewise.base.lazy_sequence import LazySequence
from treewise.errors import DataError, check_choice, num
from treewise.tree import prefix_merge
from treewise.tree.images import NO_IMAGES, ForestImages, ImageSpan, images_on_paths, merge_keys
from treewise.tree.trajectory import STREAMS, Trajectory, number_rollouts

# Declared trees beyond this many flat tokens keep their streams per tree token, never per trajectory.
MAX_FLAT_TOKENS = 200_000_000
# How often a token that several trajectories share counts in a loss: as flat training counts it; like any other token
# (the mean over the trajectories that train it); once for each rollout, however the rollout's rows overlap.
WEIGHTINGS = ("per_trajectory", "once", "per_rollout")
LOGPROB_STREAMS = tuple(name for name, stream in STREAMS.items() if stream.is_logprob)


class Forest:
    """Several trajectories as prefix trees. Make one with `from_trajectories`, `from_nodes` or `concatenate`.

    Letters: T tree tokens, N trajectories, S segments, F flat tokens. All arrays are NumPy, in depth-first order.

    Attributes:
        segments, num_tokens: the segments, and their tree tokens.
        token_ids: [T] int32.
        depth: [T] int32, position of the token in its trajectories; the position id given to the model.
        parent: [T] int64, tree position of the token before it, -1 for a first token.
        subtree_end: [T] int64, one past the last token below it.
        multiplicity: [T] int64, number of trajectories through it.
        ends: [N] int64, tree position of each trajectory's last token, in input order.
        trajectories: the N trajectories in input order, with the experts that they take from one another
            (`treewise.tree.routes`). Those of a declared tree too large to hold flat are made when they are read.
        is_flat: whether they are held, each with its own streams.
        tree_streams: [T] values of each stream of such a tree, by name; empty for all others.
        tree_starts: [number of trees] int64, tree position of each first token.
    """

    def __init__(
        self,
        segments: prefix_merge.Segments,
        token_ids: np.ndarray,
        trajectories: Sequence[Trajectory] | None,
        tree_streams: dict[str, np.ndarray] | None = None,
    ) -> None:
        self.segments, self.num_tokens = segments, segments.num_tokens
        self.token_ids = token_ids
        self.tree_streams = tree_streams or {}
        if trajectories is None:
            trajectories = features.nodes.DeclaredTrajectories(segments, {"token_ids": token_ids, **self.tree_streams})
        self.trajectories: Sequence[Trajectory] = trajectories
        self.is_flat = isinstance(trajectories, tuple)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], *, tree_of: Sequence[int] | None = None) -> "Forest":
        """Merges shared prefixes exactly, token by token; any order, duplicates and contained prefixes included.

        Tokens that stand for an image are equal only where the image is, and tokens whose experts were recorded only
        where these are; one without a record takes those of its group's (`treewise.tree.routes`).

        Time is linear in the flat tokens, but for a logarithmic factor in the number of trajectories that is spent
        in memory comparison.

        tree_of: the tree that each is of: prefixes of several trees are merged, but no experts are taken from another.

        Raises:
            DataError: no trajectory at all, or something that is not a `Trajectory`.
        """
        if isinstance(trajectories, Trajectory | Forest):
            raise DataError(f"expected a list of trajectories, found one {type(trajectories).__name__}.")
        items = tuple(trajectories)
        if not items:
            raise DataError("a forest needs at least one trajectory, got none.")
        for index, item in enumerate(items):
            if not isinstance(item, Trajectory):
                raise DataError(f"trajectory {index} is a {type(item).__name__}; wrap its tokens in tw.Trajectory.")
        flat_ids = np.concatenate([item.token_ids for item in items])
        offsets = np.concatenate([[0], np.cumsum([len(item.token_ids) for item in items])])
        keys = flat_ids
        if any(item.images for item in items):
            keys = merge_keys([item.images for item in items], flat_ids, offsets)
        if any(item.routed_experts is not None for item in items):
            filled, keys = features.routes.merged(items, keys, offsets, tree_of)
            items = tuple(filled)
        segments = prefix_merge.merge_sequences(keys, offsets)
        return cls(segments, flat_ids[segments.token_source], items)

    @classmethod
    def from_nodes(
        cls,
        parents: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        *,
        ends: Sequence[bool] | None = None,
        merge_siblings: bool = True,
        group: object = None,
        source: str = "",
        images: Sequence[Sequence[ImageSpan]] | None = None,
        **streams: Sequence[Sequence[float] | float] | Sequence[Sequence[float]] | None,
    ) -> "Forest":
        """A declared tree: nodes, parents first, each with its own tokens. See `treewise.tree.declared`.

        Each end becomes a trajectory, unless they have more than `MAX_FLAT_TOKENS` tokens together: then there is one
        copy of every stream value, in `tree_streams`, and each trajectory is made when it is read.

        Parameters:
            images: of each node, with spans that count from its first token.
            streams: per-token streams of `Trajectory` by name (`loss_weights=`, `advantages=`, ...): one list per node,
                one value per token. A node's advantages may be one number for all its tokens.

        Raises:
            ConfigError: an unknown stream, or one with several values per token.
            DataError: see `lay_out_nodes`; images in a tree of more than `MAX_FLAT_TOKENS`.
        """
        laid_out: Forest = features.nodes.forest_of_nodes(
            parents, token_ids, streams, ends, images, merge_siblings=merge_siblings, group=group, source=source
        )
        return laid_out

    @classmethod
    def concatenate(cls, forests: Sequence["Forest"]) -> "Forest":
        """Puts forests side by side; nothing is merged across them. Trajectories follow one another in order.

        Raises:
            DataError: no forest at all, or something that is not a `Forest`.
        """
        if not forests:
            raise DataError("nothing to concatenate: no forest given.")
        for forest in forests:
            if not isinstance(forest, Forest):
                raise DataError(
                    f"expected forests, found a {type(forest).__name__}; merge trajectories first: "
                    "tw.Forest.from_trajectories(trajectories)."
                )
        if len(forests) == 1:
            return forests[0]
        segments = prefix_merge.Segments.concatenate([forest.segments for forest in forests])
        token_ids = np.concatenate([forest.token_ids for forest in forests])
        if not any(forest.tree_streams for forest in forests):
            return cls(segments, token_ids, tuple(item for forest in forests for item in forest.trajectories))
        return cls(segments, token_ids, None, features.nodes.streams_side_by_side(forests))

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def num_trajectories(self) -> int:
        return len(self.segments.end_segment)

    @property
    def num_trees(self) -> int:
        return len(self.tree_starts)

    @cached_property
    def path_lengths(self) -> np.ndarray:
        """[N] int64, tokens of each trajectory."""
        return self.segments.path_lengths

    @cached_property
    def num_flat_tokens(self) -> int:
        """Tokens of all trajectories, shared ones counted each time."""
        return int(self.path_lengths.sum())

    @cached_property
    def leaf_trajectories(self) -> np.ndarray:
        """[n] int64, the trajectories that are not a prefix of another one, ascending; of equal ones the first."""
        end, first = np.unique(self.segments.end_segment, return_index=True)
        is_leaf = self.segments.subtree_end[end] == self.segments.start[end] + self.segments.lengths[end]
        return np.sort(first[is_leaf])

    @cached_property
    def num_leaf_tokens(self) -> int:
        """Tokens of the `leaf_trajectories`."""
        return int(self.path_lengths[self.leaf_trajectories].sum())

    @property
    def share_ratio(self) -> float:
        """Flat tokens / tree tokens: the ceiling of the speed-up of all token-wise layers."""
        return self.num_flat_tokens / self.num_tokens

    @property
    def leaf_ratio(self) -> float:
        """The share ratio against a trainer that already merges a trajectory contained in another one."""
        return self.num_leaf_tokens / self.num_tokens

    @cached_property
    def num_flat_pairs(self) -> int:
        """Causal attention pairs of all trajectories computed alone."""
        lengths = self.path_lengths.astype(object) if self.path_lengths.max() > 2**31 else self.path_lengths
        return int((lengths * (lengths + 1) // 2).sum())

    @cached_property
    def num_tree_pairs(self) -> int:
        """Attention pairs of the tree: every token sees its path and itself."""
        first, count = self.segments.depth, self.segments.lengths
        return int((count * first + count * (count + 1) // 2).sum())

    @property
    def pair_ratio(self) -> float:
        """Flat attention pairs / tree attention pairs: the ceiling for attention."""
        return self.num_flat_pairs / self.num_tree_pairs

    # -- per-token arrays -------------------------------------------------------------------------------------------

    @cached_property
    def segment_of_token(self) -> np.ndarray:
        """[T] int64, the segment of each tree token."""
        return np.repeat(np.arange(len(self.segments.lengths)), self.segments.lengths)

    @cached_property
    def depth(self) -> np.ndarray:
        offsets = np.repeat(self.segments.depth - self.segments.start, self.segments.lengths)
        return (offsets + np.arange(self.num_tokens)).astype(np.int32)

    @cached_property
    def parent(self) -> np.ndarray:
        parent = np.arange(-1, self.num_tokens - 1)
        above = self.segments.parent
        last = self.segments.start + self.segments.lengths - 1
        parent[self.segments.start] = np.where(above >= 0, last[above], -1)
        return parent

    @cached_property
    def subtree_end(self) -> np.ndarray:
        return np.repeat(self.segments.subtree_end, self.segments.lengths)

    @cached_property
    def segment_multiplicity(self) -> np.ndarray:
        """[S] int64, number of trajectories through each segment."""
        ends = np.bincount(self.segments.end_segment, minlength=len(self.segments.lengths))
        total = np.concatenate([[0], np.cumsum(ends)])
        after = np.searchsorted(self.segments.start, self.segments.subtree_end)
        return total[after] - total[:-1]

    @cached_property
    def multiplicity(self) -> np.ndarray:
        return np.repeat(self.segment_multiplicity, self.segments.lengths)

    @cached_property
    def ends(self) -> np.ndarray:
        end = self.segments.end_segment
        return self.segments.start[end] + self.segments.lengths[end] - 1

    @cached_property
    def tree_starts(self) -> np.ndarray:
        return self.segments.start[self.segments.parent < 0]

    @cached_property
    def branches(self) -> tuple[np.ndarray, np.ndarray]:
        """Edges to the further children of forks, all but the first: parents ([b] int64, ascending), and children."""
        starts = self.segments.start
        above = self.parent[starts]
        children = np.flatnonzero((above >= 0) & (above != starts - 1))
        order = children[np.argsort(above[children], kind="stable")]
        return above[order], starts[order]

    # -- trajectories on the tree -----------------------------------------------------------------------------------

    @property
    def paths(self) -> "Paths":
        """`paths[i]` is the tree positions of trajectory i, in order ([its length] int64)."""
        return Paths(self)

    @cached_property
    def path_index(self) -> np.ndarray:
        """[F] int64, tree position of every flat token, trajectory after trajectory: the gather that restores."""
        if self.num_flat_tokens > MAX_FLAT_TOKENS:
            raise DataError(
                f"{self.num_flat_tokens:,} flat tokens are too many to restore at once (limit {MAX_FLAT_TOKENS:,}); "
                "use forest.paths[i], one trajectory at a time."
            )
        return prefix_merge.path_index(self.segments)

    @cached_property
    def path_offsets(self) -> np.ndarray:
        """[N + 1] int64, where each trajectory begins in `path_index`."""
        return np.concatenate([[0], np.cumsum(self.path_lengths)])

    @cached_property
    def has_images(self) -> bool:
        """Whether one of its trajectories shows an image. A tree too large to hold flat has none."""
        return self.is_flat and any(item.images for item in self.trajectories)

    @cached_property
    def images(self) -> ForestImages:
        """Where the images of its trajectories are."""
        if not self.has_images:
            return NO_IMAGES
        return images_on_paths([item.images for item in self.trajectories], self.paths)

    @cached_property
    def has_routes(self) -> bool:
        """Whether the experts of any token are recorded."""
        if not self.is_flat:
            return "routed_experts" in self.tree_streams
        return any(item.routed_experts is not None for item in self.trajectories)

    @cached_property
    def routed_experts(self) -> np.ndarray:
        """[T, L, k] int16, the experts of each tree token; -1 where they were not recorded."""
        if "routed_experts" in self.tree_streams:
            return self.tree_streams["routed_experts"]
        known = [(item.routed_experts, path) for item, path in zip(self.trajectories, self.paths, strict=True)]
        experts = np.full((self.num_tokens, *features.routes.one_shape(self.trajectories)), -1, dtype=np.int16)
        for routes, path in known:
            if routes is not None:
                experts[path] = routes  # of what is shared, all are equal or have none: see `routes.merged`
        return experts

    def has_stream(self, name: str) -> bool:
        """Whether every trajectory carries this stream."""
        if self.tree_streams:
            return name in self.tree_streams
        return all(getattr(item, name) is not None for item in self.trajectories)

    def flat_stream(self, name: str) -> np.ndarray:
        """[F] float32, a stream of every trajectory, one after the other; [F, k] where it has candidates.

        Raises:
            DataError: a trajectory lacks the stream; it is named.
        """
        if name in self.tree_streams:
            return self.tree_streams[name][self.path_index]
        values = [getattr(item, name) for item in self.trajectories]
        for index, value in enumerate(values):
            if value is None:
                raise DataError(f"{self.source_of(index)}: no {name}, which this objective needs.")
        return _padded(values, STREAMS[name].fill) if STREAMS[name].has_candidates else np.concatenate(values)

    @cached_property
    def rollout_of_trajectory(self) -> np.ndarray:
        """[N] int64, the index of each trajectory's rollout, in order of first appearance.

        Trajectories that share `rollout` within one `group` are one rollout; one without a rollout id is its own.
        """
        return np.arange(self.num_trajectories) if self.tree_streams else number_rollouts(self.trajectories)

    def source_of(self, index: int) -> str:
        """Where a trajectory came from, for error messages."""
        return self.trajectories[index].source or f"trajectory {index}"

    def flat_weights(self, weighting: str = "per_trajectory") -> np.ndarray:
        """[F] float64, the loss weight of every flat token, trajectory after trajectory.

        Raises:
            ConfigError: a weighting that `WEIGHTINGS` does not list.
            DataError: more flat tokens than can be restored at once (`path_index`).
        """
        if weighting not in WEIGHTINGS:
            check_choice("weighting", weighting, WEIGHTINGS)
        weights = self.flat_stream("loss_weights").astype(np.float64)
        if weighting == "per_trajectory":
            return weights
        key = self.path_index
        if weighting == "per_rollout":
            rollout_F = np.repeat(self.rollout_of_trajectory, self.path_lengths)
            _, key = np.unique(rollout_F * self.num_tokens + key, return_inverse=True)
        return weights / np.maximum(np.bincount(key, weights=weights > 0), 1)[key]  # trajectories that train the token

    def token_weights(self, weighting: str = "per_trajectory") -> np.ndarray:
        """[T] float64, the sum of `flat_weights` over all trajectories through each tree token. Same errors."""
        if weighting not in WEIGHTINGS:
            check_choice("weighting", weighting, WEIGHTINGS)
        if self.tree_streams and weighting != "per_rollout":  # all trajectories through a token agree
            weights = self.tree_streams["loss_weights"].astype(np.float64)
            return weights if weighting == "once" else weights * self.multiplicity
        return np.bincount(self.path_index, weights=self.flat_weights(weighting), minlength=self.num_tokens)

    @cached_property
    def is_trained(self) -> np.ndarray:
        """[T] bool, tokens that have a loss weight in any trajectory."""
        return self.token_weights() > 0

    def __repr__(self) -> str:
        counts = f"{num(self.num_trees, 'tree')}, {num(self.num_trajectories, 'trajectory', 'trajectories')}"
        return (
            f"Forest({counts}, {self.num_tokens:,} tree tokens, "
            f"{self.num_flat_tokens:,} flat tokens, share ratio {self.share_ratio:.2f})"
        )


class Paths(LazySequence[np.ndarray]):
    """The paths of a forest's trajectories, each computed when it is read."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest

    def __len__(self) -> int:
        return self._forest.num_trajectories

    def item(self, index: int) -> np.ndarray:
        """[length of the trajectory] int64, the tree position of each of its tokens."""
        forest = self._forest
        if "path_index" in forest.__dict__:
            return forest.path_index[forest.path_offsets[index] : forest.path_offsets[index + 1]]
        return prefix_merge.path_to(forest.segments, int(forest.segments.end_segment[index]))


def _padded(parts: list[np.ndarray], fill: float) -> np.ndarray:
    """The rows of all parts ([n, k]), one after the other, each filled up to the largest k."""
    width = max(part.shape[1] for part in parts)
    missing = [((0, 0), (0, width - part.shape[1])) for part in parts]
    return np.concatenate([np.pad(part, pad, constant_values=fill) for part, pad in zip(parts, missing, strict=True)])


def forest_of(item: object) -> Forest:
    """The tree of one item of a data set: a forest, a tree of `load_trees`, one trajectory, or a list of trajectories.

    Raises:
        DataError: the item holds no trajectories.
    """
    if isinstance(item, Forest):
        return item
    if isinstance(item, Trajectory):
        return Forest.from_trajectories([item])
    if isinstance(item, list | tuple):
        return Forest.from_trajectories(item)
    if hasattr(item, "forest"):
        forest: Forest = item.forest()
        return forest
    raise DataError(
        f"expected a forest, a trajectory, a list of trajectories or a tree of load_trees, found a "
        f"{type(item).__name__}; merge trajectories by tw.Forest.from_trajectories(trajectories)."
    )


def one_forest(forests: object) -> Forest:
    """What every function that takes forests makes of its argument: one forest, whose trajectories are in order.

    forests: an item of a data set (see `forest_of`), or an iterable of several, which are put side by side; a list of
    trajectories alone is merged.

    Raises:
        DataError: something else, with the way to make a forest of it.
    """
    if isinstance(forests, Forest | Trajectory) or hasattr(forests, "forest") or not isinstance(forests, Iterable):
        return forest_of(forests)
    items = list(forests)
    if items and all(isinstance(item, Trajectory) for item in items):
        return Forest.from_trajectories(items)
    return Forest.concatenate([forest_of(item) for item in items])
