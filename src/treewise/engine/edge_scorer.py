"""Log-probs of the tokens that a micro-batch predicts: on edges, from a parent's hidden row to a token.

Where several entries ask for one edge (candidates of a teacher, tokens that are scored more than once), it is projected
once.

Letters: T tokens of a micro-batch, E its edges or entries, P entries of a forest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treewise.base.shapes import Float, Int
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.lm_head import edge_loss, edge_values
from treewise.nn.platform.tensors import to_device
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import concatenated_ranges

Values = dict[str, Tensor]
Entries = tuple[np.ndarray, Values]  # [E] indices of terms, and by name the [E] values of these
LossOfEntries = Callable[[Values, np.ndarray, slice], Tensor]  # of some terms of a micro-batch, see `EdgeScorer.loss`


class EdgeScorer:
    """Scores the tokens that each micro-batch predicts. Called on its output; None where it predicts none of them.

    positions: [P] int64 tree positions of the scored tokens, ascending, none of them a first token; each is predicted
    from the path to its parent. tokens: [P] token ids that are scored there; None: the tree's own, and then each
    position is projected once however often it is listed. outputs: names out of `lm_head.OUTPUTS`.
    """

    def __init__(
        self,
        forest: Forest,
        positions: Int[np.ndarray, " P"],
        tokens: Int[np.ndarray, " P"] | None = None,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        self.forest, self.positions, self.tokens, self.outputs = forest, positions, tokens, outputs
        self._is_needed = np.zeros(forest.num_tokens, dtype=bool)
        self._is_needed[positions] = True

    def __call__(self, output: MicroBatchOutput) -> Entries | None:
        """[E] indices of scored tokens, and their [E] values by name."""
        asked = self._asked(output)
        if asked is None:
            return None
        values = self._values(output, asked)
        return asked.entry, asked.of_entries(values, slice(0, len(asked.source)))[0]

    def loss(self, output: MicroBatchOutput, loss_of: LossOfEntries) -> tuple[Float[Tensor, ""], Entries] | None:
        """A loss that is a sum over tokens, a scalar whose gradients are taken on the way, for a backward that starts
        from it (`lm_head.edge_loss`), and what was scored, detached.

        loss_of: of some of the scored tokens, from their values, all indices and which of them these are.
        """
        asked = self._asked(output)
        if asked is None:
            return None

        def of_edges(values: Values, edges: slice) -> Tensor:
            of_entries, entries = asked.of_entries(values, edges)
            return loss_of(of_entries, asked.entry, entries)

        if output.scores is not None:
            values = self._values(output, asked)
            loss = of_edges(values, slice(0, len(asked.source)))
            values = {name: value.detach() for name, value in values.items()}
            return loss, (asked.entry, asked.of_entries(values, slice(0, len(asked.source)))[0])
        device = output.hidden.device
        loss, values = edge_loss(output.hidden, output.head(), asked.source, asked.on(device), of_edges, self.outputs)
        return loss, (asked.entry, asked.of_entries(values, slice(0, len(asked.source)))[0])

    def _values(self, output: MicroBatchOutput, asked: "_Asked") -> Values:
        if output.scores is not None:
            return output.scores(asked.source, asked.tokens, self.outputs)
        hidden = output.hidden
        return edge_values(hidden, output.head(), asked.source, asked.on(hidden.device), self.outputs)

    def _asked(self, output: MicroBatchOutput) -> "_Asked | None":
        source, target = edges_of(self.forest, output.positions, self._is_needed)
        if len(target) == 0:
            return None
        first = np.searchsorted(self.positions, target, side="left")
        count = np.searchsorted(self.positions, target, side="right") - first
        edge, entry = np.repeat(np.arange(len(target)), count), concatenated_ranges(first, count)
        device = output.hidden.device
        if self.tokens is not None:
            return _Asked(entry, source[edge], self.tokens[entry])
        tokens = self.forest.token_ids[target]
        if len(entry) == len(target):
            return _Asked(entry, source, tokens)
        return _Asked(entry, source, tokens, np.concatenate([[0], np.cumsum(count)]), to_device(edge, device))


def edges_of(forest: Forest, positions: np.ndarray, is_needed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The edges from a micro-batch's tokens to the targets marked in `is_needed`, ordered by source.

    positions: [T] int64 tree positions of the micro-batch, ascending. is_needed: [tree tokens] bool.

    A token's first child is the token after it; every further child of a fork begins a segment elsewhere.

    Returns [E] int64, own rows whose hidden states predict, and [E] int64, the tree positions that they predict, which
    at a cut belong to another micro-batch.
    """
    following = positions + 1
    has_next = following < forest.num_tokens
    has_next[has_next] = forest.parent[following[has_next]] == positions[has_next]
    above, branches = forest.branches
    first = np.searchsorted(above, positions)
    count = np.searchsorted(above, positions, side="right") - first
    source = np.concatenate([np.flatnonzero(has_next), np.repeat(np.arange(len(positions)), count)])
    target = np.concatenate([following[has_next], branches[concatenated_ranges(first, count)]])
    keep = is_needed[target]
    source, target = source[keep], target[keep]
    order = np.argsort(source, kind="stable")
    return source[order], target[order]


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What a micro-batch is asked for: its edges ([E] hidden rows and tokens) and the indices of what each scores.

    first, edge: where an edge scores several, the [E + 1] bounds of its entries, and the edge of each entry.
    """

    entry: np.ndarray
    source: np.ndarray
    tokens: np.ndarray
    first: np.ndarray | None = None
    edge: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """[E] int64, the tokens on a device."""
        return to_device(self.tokens, device, torch.long)

    def of_entries(self, values: Values, edges: slice) -> tuple[Values, slice]:
        """The values of the entries of some edges, from those of the edges, and which entries these are."""
        if self.first is None or self.edge is None:
            return values, edges
        entries = slice(int(self.first[edges.start]), int(self.first[edges.stop]))
        index = self.edge[entries] - edges.start
        return {name: value[index] for name, value in values.items()}, entries
