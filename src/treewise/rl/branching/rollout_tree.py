"""The tree that an online loop grows: every node is what one request of a sampler gave, and rows of it train.

A node continues its parent after the first `cut` tokens that the parent has of its own; `PROMPT` (-1) as parent starts
a rollout at the prompt. So a node that ended is a rollout, its own tokens are exactly the tokens that were sampled for
it (and the observations between them), and nothing that was sampled stands in two places.

Letters: n own tokens of a node, k candidates, P nodes.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from treewise.errors import DataError
from treewise.rl.recorder.row_parts import RowPart, held_tokens, row_streams, written_part
from treewise.tree.trajectory import Trajectory

PROMPT = -1  # the parent of a rollout's first node
STREAM_TYPES = {
    "token_ids": np.int32,
    "is_sampled": np.bool_,
    "logprobs": np.float32,
    "entropies": np.float32,
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    "turn_ends": np.int64,
    "versions": np.int32,
}


@dataclass(frozen=True, slots=True, eq=False)
class RolloutNode:
    """One sampled continuation, validated when it is made. Arrays are copied and cannot be written to.

    Parameters:
        token_ids: [n] int32, tokens of its own, at least one.
        logprobs: [n] float32, natural logarithms, as of `Completion.logprobs`: after the temperature, before top-k and
            top-p, which is what the engine computes; 0 where not sampled. A first token that a policy drew from the
            sampler's candidates (`Branch.first_token`) has the log-prob of that draw.
        parent: index of the node that it continues, or `PROMPT`.
        cut: how many of the parent's own tokens come before it; 0 for `PROMPT`.
        is_sampled: [n] bool, False for observations (tool results), which are context; True throughout by default.
        entropies: [n] float32, entropy in nats of the distribution of `logprobs` at each token, 0 where not sampled;
            None where the sampler gave none.
        top_ids, top_logprobs: [n, k] int32 and float32, the most probable candidates at each position that top-k and
            top-p leave, under the same distribution; `-inf` marks an unused place. They go together.
        turn_ends: ascending offsets in 1..n at which a turn (what the policy wrote, and the observation that answered
            it) ends. The last turn of a node that ended ends at n.
        versions: [n] int32, of the policy that sampled each token, -1 where not sampled; None where nobody counts them.
        finish: why it ended (`stop`, `length`, ...); None while it is to be continued (a segment that reached its
            limit).
        reward: of the rollout that ends here; finite.
        error: why the rollout that ends here has no reward. It is in no row.
        routed_experts: [tokens of the prompt and of the path to the node's end, L, k] int16, the experts of a mixture
            that the sampler recorded while it computed the node; -1 where it recorded none. None: none at all.

    Raises:
        DataError: shapes that do not fit one another, values that are not finite, a reward of a node that has not
            ended.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    parent: int = PROMPT
    cut: int = 0
    is_sampled: np.ndarray = field(default_factory=lambda: np.zeros(0))
    entropies: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    turn_ends: np.ndarray = field(default_factory=lambda: np.zeros(0))
    finish: str | None = None
    reward: float | None = None
    error: str | None = None
    versions: np.ndarray | None = None
    routed_experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        num_tokens = np.size(self.token_ids)
        if not np.size(self.is_sampled):
            object.__setattr__(self, "is_sampled", np.ones(num_tokens, dtype=bool))
        if not np.size(self.turn_ends) and self.finish is not None:
            object.__setattr__(self, "turn_ends", [num_tokens])
        if np.ndim(self.token_ids) != 1 or not num_tokens:
            raise DataError(f"a node has token_ids of shape {np.shape(self.token_ids)}; give at least one, flat.")
        for name, dtype in STREAM_TYPES.items():
            value = getattr(self, name)
            if value is None:
                continue
            array: np.ndarray = np.array(value, dtype=dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
            if name != "turn_ends" and array.shape[:1] != (num_tokens,):
                raise DataError(f"a node has {name} of shape {array.shape} for {num_tokens} tokens.")
            if name != "top_logprobs" and not np.isfinite(array).all():
                raise DataError(f"a node's {name}[{int(np.argmin(np.isfinite(array)))}] is not finite.")
        if (np.diff([0, *self.turn_ends, num_tokens + 1]) <= 0).any():
            raise DataError(f"turn_ends {self.turn_ends.tolist()} must ascend within 1..{num_tokens}.")
        if self.finish is None and (self.reward is not None or self.error is not None):
            raise DataError("a node that has not ended has a reward or an error; set finish to why it ended.")
        if self.reward is not None and not np.isfinite(self.reward):
            raise DataError(f"a reward is {self.reward}; judge the rollout with error=<the reason> instead.")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy generated."""
        return int(self.is_sampled.sum())

    @property
    def has_ended(self) -> bool:
        """Whether a rollout ends here."""
        return self.finish is not None


class PathPart(NamedTuple):
    """The first `end` own tokens of a node, as a part of a path."""

    node: int
    end: int


class RolloutTree:
    """All rollouts of one task, as they grow. Nodes are added after what they continue and never change, but for the
    reward or error that a rollout gets when it is judged.

    Parameters:
        prompt_ids: token ids of the prompt, at least one.
        group: what the rows of this tree share (`Trajectory.group`).
    """

    def __init__(self, prompt_ids: ArrayLike, group: Hashable = None) -> None:
        self.prompt_ids = np.array(prompt_ids, dtype=np.int32).reshape(-1)
        self.prompt_ids.setflags(write=False)
        self.group = group
        self._nodes: list[RolloutNode] = []
        self._children: dict[int, list[int]] = {PROMPT: []}
        self._depths: list[int] = []

    # -- growing ------------------------------------------------------------------------------------------------------

    def add(self, node: RolloutNode) -> int:
        """Appends a node and returns its index.

        Raises:
            DataError: a parent that is not there, a cut outside of its tokens, or a continuation after its end.
        """
        index = len(self._nodes)
        if not PROMPT <= node.parent < index:
            raise DataError(f"node {index}: parent {node.parent} is not in the tree of {index} nodes.")
        if node.parent == PROMPT:
            if node.cut:
                raise DataError(f"node {index}: cut is {node.cut}, but it starts at the prompt; set it to 0.")
        else:
            parent = self._nodes[node.parent]
            last = len(parent) - parent.has_ended
            if not 1 <= node.cut <= last:
                raise DataError(
                    f"node {index}: cut {node.cut} of node {node.parent} is outside 1..{last}; "
                    f"{'it has ended' if parent.has_ended else 'it has no more tokens'}."
                )
        self._depths.append(self.num_sampled_before(node.parent, node.cut))
        self._nodes.append(node)
        self._children[index] = []
        self._children[node.parent].append(index)
        return index

    def judge(self, index: int, reward: float | None = None, error: str | None = None) -> None:
        """Gives the rollout that ends at a node its reward, or the reason why it has none. Raises as `RolloutNode`."""
        self._nodes[index] = replace(self._nodes[index], reward=reward, error=error)

    # -- shape --------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Sequence[RolloutNode]:
        """All nodes; parents come first."""
        return tuple(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, index: int) -> RolloutNode:
        return self._nodes[index]

    def children(self, index: int) -> Sequence[int]:
        """Indices of the nodes that continue a node (or `PROMPT`), in the order in which they were added."""
        return tuple(self._children[index])

    @property
    def roots(self) -> Sequence[int]:
        """Nodes that start at the prompt: each is the first rollout of a tree of its own."""
        return self.children(PROMPT)

    def below(self, index: int) -> list[int]:
        """A node and all that continue it, ascending."""
        nodes, stack = [], [index]
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(self._children[node])
        return sorted(nodes)

    @property
    def leaves(self) -> list[int]:
        """Nodes at which a rollout ended, ascending: the rollouts."""
        return [index for index, node in enumerate(self._nodes) if node.has_ended]

    @property
    def rewarded_leaves(self) -> list[int]:
        """Those that have a reward: one row each."""
        return [index for index in self.leaves if self._nodes[index].reward is not None]

    @property
    def num_sampled_tokens(self) -> int:
        """Generated tokens: what budgets count."""
        return sum(node.num_sampled for node in self._nodes)

    def num_sampled_before(self, index: int, position: int) -> int:
        """Generated tokens on the path to the first `position` own tokens of a node: the depth of a branch point."""
        if index == PROMPT:
            return 0
        return self._depths[index] + int(self._nodes[index].is_sampled[:position].sum())

    # -- paths and rows -----------------------------------------------------------------------------------------------

    def path_parts(self, index: int, position: int | None = None) -> list[PathPart]:
        """The path from the prompt through the first `position` own tokens of a node (all where not given)."""
        reversed_parts: list[PathPart] = []
        while index != PROMPT:
            node = self._nodes[index]
            reversed_parts.append(PathPart(index, len(node) if position is None else position))
            index, position = node.parent, node.cut
        return [part for part in reversed(reversed_parts) if part.end]

    def path(self, index: int, name: str, position: int | None = None) -> np.ndarray:
        """A stream of the nodes ("token_ids", "is_sampled", "logprobs", "entropies") along a path, without the prompt.

        Raises:
            DataError: a node on the path without it.
        """
        parts: list[np.ndarray] = [np.zeros(0, dtype=STREAM_TYPES[name])]
        for node, end in self.path_parts(index, position):
            stream = getattr(self._nodes[node], name)
            if stream is None:
                raise DataError(f"node {node} has no {name}; ask the sampler for them.")
            parts.append(stream[:end])
        return np.concatenate(parts)

    def prefix_ids(self, index: int, position: int | None = None) -> np.ndarray:
        """[.] int32, prompt and path: what a sampler is asked to continue."""
        return np.concatenate([self.prompt_ids, self.path(index, "token_ids", position)])

    def trajectories(self, *, source: str = "") -> list[Trajectory]:
        """One row per rewarded rollout, in the order of `rewarded_leaves`; generated tokens have loss weight 1, and the
        draw that made a token is the number of its node.

        Parameters:
            source: what errors call the tree; the node is added.

        Raises:
            DataError: a rollout without any generated token.
        """
        return [
            Trajectory(
                **row_streams([written_part(self.prompt_ids), *self._row_parts(leaf)]),
                group=self.group,
                reward=self._nodes[leaf].reward,
                rollout=leaf,
                source=f"{source}:{leaf}" if source else f"rollout {leaf} of task {self.group}",
            )
            for leaf in self.rewarded_leaves
        ]

    def _row_parts(self, leaf: int) -> Iterator[RowPart]:
        for index, end in self.path_parts(leaf):
            node = self._nodes[index]
            yield RowPart(
                node.token_ids[:end],
                node.is_sampled[:end],
                node.logprobs[:end],
                np.full(end, index),
                None if node.versions is None else node.versions[:end],
                node.routed_experts,
            )

    def account(self, rows: Sequence[Trajectory]) -> dict[str, int]:
        """Where generated tokens went, from the rows themselves (aligned with `rewarded_leaves`); every token counts
        once, however many rollouts share it.

        generated: all. recorded: of these, in a row. trained: of these, with a loss weight in a row. failed: only below
        rollouts without a reward; unfinished: only below nodes that were never continued.
        `generated = recorded + failed + unfinished`, and `trained = recorded` where nothing was masked.

        Raises:
            DataError: rows of another tree.
        """
        if len(rows) != len(self.rewarded_leaves):
            raise DataError(f"{len(rows)} rows for {len(self.rewarded_leaves)} rewarded rollouts.")
        for leaf, row in zip(self.rewarded_leaves, rows, strict=True):
            if not np.array_equal(row.token_ids, self.prefix_ids(leaf)):
                raise DataError(f"{row.source}: its tokens are not those of node {leaf}.")
        sizes = {index: len(node) for index, node in enumerate(self._nodes)}
        of_nodes = held_tokens(sizes, ((np.asarray(row.draws), row.loss_weights) for row in rows))
        failed = [np.zeros(size, dtype=bool) for size in sizes.values()]
        for leaf in set(self.leaves) - set(self.rewarded_leaves):
            for node, end in self.path_parts(leaf):
                failed[node][:end] = True
        own, in_row, in_loss, has_failed = (
            np.concatenate([np.zeros(0, dtype=bool), *masks])
            for masks in (
                [node.is_sampled for node in self._nodes],
                [each.held for each in of_nodes.values()],
                [each.trained for each in of_nodes.values()],
                failed,
            )
        )
        masks = {"generated": own, "recorded": own & in_row, "trained": own & in_loss}
        masks |= {"failed": own & ~in_row & has_failed, "unfinished": own & ~in_row & ~has_failed}
        return {name: int(mask.sum()) for name, mask in masks.items()}
