"""The tree that an online loop grows: every node is what one request of a sampler gave, and rows of it train.

A node continues its parent after the first `cut` tokens that the parent has of its own; `PROMPT` (-1) as parent starts
a rollout at the prompt. So a node that ended is a rollout, its own tokens are exactly the tokens that were sampled for
it (and the observations between them), and nothing that was sampled stands in two places.

Letters: n own tokens of a node, k candidates, P nodes.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from treewise.errors import DataError
from treewise.rl.branching.rollout_node import PROMPT, STREAM_TYPES, RolloutNode
from treewise.tree.trajectory import Trajectory

FORMAT = 1


class Piece(NamedTuple):
    """Own tokens `[start, end)` of a node, as a part of a path."""

    node: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Where the generated tokens of a tree went; every token counts once, however many rollouts share it.

    generated: all. recorded: of these, in a row. trained: of these, with a loss weight in a row. failed: only below
    rollouts without a reward; unfinished: only below nodes that were never continued.
    `generated = recorded + failed + unfinished`, and `trained = recorded` where nothing was masked.
    """

    generated: int
    recorded: int
    trained: int
    failed: int
    unfinished: int


class RolloutTree:
    """All rollouts of one task, as they grow. Nodes are added after what they continue and never change, but for the
    reward or error that a rollout gets when it is judged.

    Parameters:
        prompt_ids: token ids of the prompt, at least one.
        group: what the rows of this tree share (`Trajectory.group`).

    Raises:
        DataError: an empty prompt.
    """

    def __init__(self, prompt_ids: ArrayLike, group: Hashable = None) -> None:
        self.prompt_ids = np.array(prompt_ids, dtype=np.int32).reshape(-1)
        self.prompt_ids.setflags(write=False)
        if not len(self.prompt_ids):
            raise DataError("a rollout tree needs a prompt of at least one token.")
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
        """Gives the rollout that ends at a node its reward, or the reason why it has none.

        Raises:
            DataError: a node that has not ended, both or neither of the two, or a reward that is not finite.
        """
        if (reward is None) == (error is None):
            raise DataError(f"node {index}: give a reward or an error.")
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

    def root_of(self, index: int) -> int:
        """The root above a node, or the node itself."""
        while self._nodes[index].parent != PROMPT:
            index = self._nodes[index].parent
        return index

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

    def pieces(self, index: int, position: int | None = None) -> list[Piece]:
        """The path from the prompt through the first `position` own tokens of a node (all where not given)."""
        reversed_pieces: list[Piece] = []
        while index != PROMPT:
            node = self._nodes[index]
            reversed_pieces.append(Piece(index, 0, len(node) if position is None else position))
            index, position = node.parent, node.cut
        return [piece for piece in reversed(reversed_pieces) if piece.end]

    def path(self, index: int, name: str, position: int | None = None) -> np.ndarray:
        """A stream of the nodes ("token_ids", "is_sampled", "logprobs", "entropies") along a path, without the prompt.

        Raises:
            DataError: a node on the path without it.
        """
        parts: list[np.ndarray] = [np.zeros(0, dtype=STREAM_TYPES[name])]
        for piece in self.pieces(index, position):
            stream = getattr(self._nodes[piece.node], name)
            if stream is None:
                raise DataError(f"node {piece.node} has no {name}; ask the sampler for them.")
            parts.append(stream[piece.start : piece.end])
        return np.concatenate(parts)

    def prefix_ids(self, index: int, position: int | None = None) -> np.ndarray:
        """[.] int32, prompt and path: what a sampler is asked to continue."""
        return np.concatenate([self.prompt_ids, self.path(index, "token_ids", position)])

    def trajectories(self, *, with_old_logprobs: bool = False, source: str = "") -> list[Trajectory]:
        """One row per rewarded rollout, in the order of `rewarded_leaves`; generated tokens have loss weight 1, and the
        draw that made a token is the number of its node.

        Parameters:
            with_old_logprobs: take the sampler's log-probs for `old_logprobs`, too.
            source: what errors call the tree; the node is added.

        Raises:
            DataError: a rollout without any generated token.
        """
        rows = []
        context = np.zeros(len(self.prompt_ids))
        for leaf in self.rewarded_leaves:
            logprobs = np.concatenate([context, self.path(leaf, "logprobs")])
            draws = [np.full(piece.end - piece.start, piece.node) for piece in self.pieces(leaf)]
            rows.append(
                Trajectory(
                    self.prefix_ids(leaf),
                    np.concatenate([context, self.path(leaf, "is_sampled")]),
                    old_logprobs=logprobs if with_old_logprobs else None,
                    sampler_logprobs=logprobs,
                    draws=np.concatenate([context - 1, *draws]),
                    group=self.group,
                    reward=self._nodes[leaf].reward,
                    rollout=leaf,
                    source=f"{source}:{leaf}" if source else f"rollout {leaf} of task {self.group}",
                )
            )
        return rows

    def account(self, rows: Sequence[Trajectory]) -> TokenAccount:
        """Counts where generated tokens went, from the rows themselves (aligned with `rewarded_leaves`).

        Raises:
            DataError: rows of another tree.
        """
        leaves = self.rewarded_leaves
        if len(rows) != len(leaves):
            raise DataError(f"{len(rows)} rows for {len(leaves)} rewarded rollouts.")
        recorded = [np.zeros(len(node), dtype=bool) for node in self._nodes]
        trained = [np.zeros(len(node), dtype=bool) for node in self._nodes]
        for leaf, row in zip(leaves, rows, strict=True):
            if not np.array_equal(row.token_ids, self.prefix_ids(leaf)):
                raise DataError(f"{row.source}: its tokens are not those of node {leaf}.")
            at = len(self.prompt_ids)
            for node, start, end in self.pieces(leaf):
                weights = np.asarray(row.loss_weights)[at : at + end - start]
                recorded[node][start:end] = True
                trained[node][start:end] |= weights > 0
                at += end - start
        on_failed = self._marked_to([leaf for leaf in self.leaves if self._nodes[leaf].reward is None])
        counts = np.zeros(4, dtype=np.int64)
        for each, is_recorded, is_trained, has_failed in zip(self._nodes, recorded, trained, on_failed, strict=True):
            own = each.is_sampled
            counts += [
                (own & is_recorded).sum(),
                (own & is_trained).sum(),
                (own & ~is_recorded & has_failed).sum(),
                (own & ~is_recorded & ~has_failed).sum(),
            ]
        return TokenAccount(self.num_sampled_tokens, *(int(count) for count in counts))

    def _marked_to(self, leaves: Sequence[int]) -> list[np.ndarray]:
        marks = [np.zeros(len(node), dtype=bool) for node in self._nodes]
        for leaf in leaves:
            for node, start, end in self.pieces(leaf):
                marks[node][start:end] = True
        return marks

    # -- JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` gives an equal tree, bit for bit. `group` must be a JSON value itself."""
        return {
            "format": FORMAT,
            "prompt_ids": self.prompt_ids.tolist(),
            "group": self.group,
            "nodes": [dict(_node_items(node)) for node in self._nodes],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RolloutTree":
        """A tree as `to_json` wrote it.

        Raises:
            DataError: another format, or values that are not a tree.
        """
        if values.get("format") != FORMAT:
            raise DataError(f"a rollout tree of format {values.get('format')!r}; this version reads {FORMAT}.")
        tree = cls(values["prompt_ids"], values["group"])
        for item in values["nodes"]:
            tops = item.get("top_logprobs")
            if tops is not None:
                item = {**item, "top_logprobs": [[-np.inf if x is None else x for x in row] for row in tops]}
            tree.add(RolloutNode(**item))
        return tree


def _node_items(node: RolloutNode) -> Iterator[tuple[str, Any]]:
    for name in RolloutNode.__slots__:
        value = getattr(node, name)
        if value is None:
            continue
        if name == "top_logprobs":  # JSON has no infinity
            value = [[None if np.isneginf(x) else float(x) for x in row] for row in value]
        yield name, value.tolist() if isinstance(value, np.ndarray) else value
