"""The geometry of a forest: its sizes, and the position of each token in it; no token ids, no streams."""

from functools import cached_property

import numpy as np

from treewise.tree.prefix_merge import Segments


class TreeShape:
    """Sizes and per-token arrays of segments. `Forest` documents the arrays.

    Letters: T tree tokens, N trajectories, S segments.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments, self.num_tokens = segments, segments.num_tokens  # tree tokens
        self._lengths = segments.lengths

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
        end = self.segments.end_segment
        return self.segments.depth[end] + self._lengths[end]

    @cached_property
    def num_flat_tokens(self) -> int:
        """Tokens of all trajectories, shared ones counted each time."""
        return int(self.path_lengths.sum())

    @cached_property
    def leaf_trajectories(self) -> np.ndarray:
        """[n] int64, the trajectories that are not a prefix of another one, ascending; of equal ones the first."""
        end, first = np.unique(self.segments.end_segment, return_index=True)
        is_leaf = self.segments.subtree_end[end] == self.segments.start[end] + self._lengths[end]
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
        first, count = self.segments.depth, self._lengths
        return int((count * first + count * (count + 1) // 2).sum())

    @property
    def pair_ratio(self) -> float:
        """Flat attention pairs / tree attention pairs: the ceiling for attention."""
        return self.num_flat_pairs / self.num_tree_pairs

    # -- per-token arrays -------------------------------------------------------------------------------------------

    @cached_property
    def segment_of_token(self) -> np.ndarray:
        """[T] int64, the segment of each tree token."""
        return np.repeat(np.arange(len(self._lengths)), self._lengths)

    @cached_property
    def depth(self) -> np.ndarray:
        offsets = np.repeat(self.segments.depth - self.segments.start, self._lengths)
        return (offsets + np.arange(self.num_tokens)).astype(np.int32)

    @cached_property
    def parent(self) -> np.ndarray:
        parent = np.arange(-1, self.num_tokens - 1)
        above = self.segments.parent
        last = self.segments.start + self._lengths - 1
        parent[self.segments.start] = np.where(above >= 0, last[above], -1)
        return parent

    @cached_property
    def subtree_end(self) -> np.ndarray:
        return np.repeat(self.segments.subtree_end, self._lengths)

    @cached_property
    def segment_multiplicity(self) -> np.ndarray:
        """[S] int64, number of trajectories through each segment."""
        ends = np.bincount(self.segments.end_segment, minlength=len(self._lengths))
        total = np.concatenate([[0], np.cumsum(ends)])
        after = np.searchsorted(self.segments.start, self.segments.subtree_end)
        return total[after] - total[:-1]

    @cached_property
    def multiplicity(self) -> np.ndarray:
        return np.repeat(self.segment_multiplicity, self._lengths)

    @cached_property
    def ends(self) -> np.ndarray:
        end = self.segments.end_segment
        return self.segments.start[end] + self._lengths[end] - 1

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
