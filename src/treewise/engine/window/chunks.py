"""What a window holds of one function of the model: chunks of tokens with their keys and values, and what came back.

A chunk is what one call computed anew, in the order of its tree. A token's ancestors are in its own chunk or in earlier
ones, so a chunk reads earlier chunks as gateways, and in the order of chunks every path runs from top to bottom. Going
back through the chunks, last first, each has the gradients of all that read it.

Letters: T tokens of a call's tree, C tokens of a chunk, M model width, L layers with a router, E experts.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor, nn

from treewise.engine.budget import saved_bytes
from treewise.engine.carried import carried_by
from treewise.engine.step import LossOf, Walk
from treewise.engine.window.known_rows import GrowingRows, KnownRows, lengthened
from treewise.engine.window.scores import Scores, ScoresMark
from treewise.nn.attention import NOTHING, Gateway, GatewayRead, TreeContext, TreeMask
from treewise.nn.decoder import DecoderAndHead, run_decoder
from treewise.nn.gradients import embedding_rows_alone, sparse_embedding_gradients
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.lm_head import AnyHead
from treewise.nn.platform.tensors import Autocast, is_out_of_memory, to_device
from treewise.tree.forest import Forest


@dataclass(eq=False)
class Chunk:
    """Tokens that one call computed.

    first: the number of the first of them in the window. roots: hidden rows ([C, M]) and router logits ([C, L, E]) with
    their graph, while that is held. has_gradient: whether some came back for them.
    """

    first: int
    num_tokens: int
    gateway: Gateway
    roots: tuple[Tensor, ...] = ()
    has_gradient: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FunctionMark:
    """What a function had computed at a time."""

    known: KnownRows
    num_chunks: int
    num_tokens: int
    num_results: int
    scores: dict[tuple[str, ...], ScoresMark]


class Function:
    """One function of the model (its adapters, mode and autocast, which `key` stands for) within a window.

    holds: whether all its chunks have their graphs. token_bytes: of activations, measured on its first graph.
    """

    def __init__(self, key: Hashable, lm: DecoderAndHead, impl: str, *, on_host: bool) -> None:
        self.key, self._lm, self._impl, self._on_host = key, lm, impl, on_host
        self._autocast = Autocast.now(lm.device.type)
        self.known = KnownRows()
        self._chunks: list[Chunk] = []
        self._results: list[GrowingRows] = []  # hidden rows, router logits
        self._gradients: list[Tensor | None] = []  # of both, in float32 or wider
        self._scores: dict[tuple[str, ...], Scores] = {}  # by outputs
        self._head: AnyHead | None = None  # without a graph; where it is adapted, a sum over all of its weight
        self.num_tokens = 0
        self.holds = True
        self.token_bytes: int | None = None
        self._carried = carried_by(lm, with_images=False)

    @property
    def has_gradients(self) -> bool:
        return any(chunk.has_gradient for chunk in self._chunks) or any(
            each.has_gradients for each in self._scores.values()
        )

    @property
    def num_held(self) -> int:
        """Tokens whose graphs are held."""
        return sum(chunk.num_tokens for chunk in self._chunks if chunk.roots)

    @property
    def held_bytes(self) -> int:
        """Of graphs and of logits that are held."""
        return self.num_held * (self.token_bytes or 0) + sum(each.num_bytes for each in self._scores.values())

    @property
    def most_held_bytes(self) -> int | None:
        """What a token may take that is held: activations, and the logits of one row. None: none was yet."""
        wide = torch.promote_types(self._lm.decoder.dtype, torch.float32)
        return None if self.token_bytes is None else self.token_bytes + self._lm.num_logits * wide.itemsize

    # -- forward ------------------------------------------------------------------------------------------------------

    def compute(self, forest: Forest, numbers: np.ndarray, most: int | None, *, with_routers: bool) -> None:
        """Computes the tokens without a number, in chunks of at most `most` tokens, and numbers them in place."""
        if torch.is_grad_enabled() and self.holds and any(not chunk.roots for chunk in self._chunks_of(numbers)):
            self.let_go()  # some were computed in a call without gradients
        new = np.flatnonzero(numbers < 0)
        size = len(new) if most is None else most
        for start in range(0, len(new), max(1, size)):
            positions = new[start : start + size]
            chunk = self._run(forest, numbers, positions, with_routers=with_routers)
            numbers[positions] = chunk.first + np.arange(chunk.num_tokens)

    def _run(self, forest: Forest, numbers: np.ndarray, positions: np.ndarray, *, with_routers: bool) -> Chunk:
        mask, reads = self._layout(forest, numbers, positions)
        chunk = Chunk(self.num_tokens, len(positions), Gateway(self._on_host))
        has_graph = self.holds and torch.is_grad_enabled()
        context = TreeContext(
            mask,
            self._impl,
            reads,
            writes=chunk.gateway,
            injects=chunk.gateway if has_graph else None,
            carried=self._carried if reads else NOTHING,
        )
        with ExitStack() as around:
            around.enter_context(torch.set_grad_enabled(has_graph))
            around.enter_context(embedding_rows_alone(self._embedding))
            saved = around.enter_context(saved_bytes()) if has_graph and self.token_bytes is None else None
            hidden, routers = run_decoder(
                self._lm, forest.token_ids[positions], forest.depth[positions], context, with_router_logits=with_routers
            )
        if saved is not None:
            self.token_bytes = sum(saved.values()) // len(positions) + 1
        results = (hidden, torch.stack(routers, 1)) if with_routers else (hidden,)
        for index, result in enumerate(results):
            if index == len(self._results):
                self._results.append(GrowingRows())
            self._results[index].append(result)
        chunk.roots = results if has_graph else ()
        self._chunks.append(chunk)
        self.num_tokens += chunk.num_tokens
        return chunk

    def mark(self) -> FunctionMark:
        """What it has computed."""
        scores = {outputs: each.mark() for outputs, each in self._scores.items()}
        return FunctionMark(self.known.copy(), len(self._chunks), self.num_tokens, len(self._results), scores)

    def go_back(self, mark: FunctionMark) -> None:
        """Forgets what was computed since."""
        self.known, self.num_tokens = mark.known, mark.num_tokens
        del self._chunks[mark.num_chunks :], self._results[mark.num_results :]
        for result in self._results:
            result.num_rows = mark.num_tokens
        self._scores = {outputs: self._scores[outputs] for outputs in mark.scores}
        for outputs, own in mark.scores.items():
            self._scores[outputs].go_back(own)

    def _layout(
        self, forest: Forest, numbers: np.ndarray, positions: np.ndarray
    ) -> tuple[TreeMask, tuple[GatewayRead, ...]]:
        """The mask of a chunk's tokens ([C] int64, ascending), and the rows of earlier chunks that they read."""
        above = np.flatnonzero(numbers >= 0)
        low, high = (np.searchsorted(positions, each) for each in (above, forest.subtree_end[above]))
        is_read = low < high
        above, low, high = above[is_read], low[is_read], high[is_read]
        order = np.argsort(numbers[above])
        above, low, high = above[order], low[order], high[order]
        read = numbers[above]
        own = np.arange(len(positions))
        own_high = np.searchsorted(positions, forest.subtree_end[positions])
        mask = TreeMask(
            lo=np.concatenate([low, own]).astype(np.int32),
            hi=np.concatenate([high, own_high]).astype(np.int32),
            key_depth=forest.depth[np.concatenate([above, positions])].astype(np.int32),
            num_queries=len(positions),
        )
        firsts = [chunk.first for chunk in self._chunks]
        bounds = np.searchsorted(read, [*firsts, self.num_tokens])
        reads = []
        for chunk, (start, end) in zip(self._chunks, pairwise(bounds.tolist()), strict=True):
            if start == end:
                continue
            rows = read[start:end] - chunk.first
            is_slice = int(rows[-1]) - int(rows[0]) + 1 == len(rows)
            where = slice(int(rows[0]), int(rows[-1]) + 1) if is_slice else to_device(rows, self._lm.device)
            reads.append(GatewayRead(chunk.gateway, where, len(rows)))
        return mask, tuple(reads)

    def _chunks_of(self, numbers: np.ndarray) -> list[Chunk]:
        """Those that hold tokens with these numbers; -1 stands for none."""
        firsts = [chunk.first for chunk in self._chunks]
        indices = np.unique(np.searchsorted(firsts, numbers[numbers >= 0], side="right") - 1)
        return [self._chunks[index] for index in indices.tolist()]

    def results(self, numbers_T: Tensor, *, with_routers: bool) -> list[Tensor]:
        """[T, M] hidden rows, and [T, L, E] router logits if they are asked for, of numbered tokens."""
        return [each.rows.index_select(0, numbers_T) for each in self._results[: 1 + with_routers]]

    def scored(
        self, numbers: np.ndarray, tokens: np.ndarray, outputs: tuple[str, ...], temperature: float
    ) -> tuple[Scores, np.ndarray, Tensor]:
        """Edges from numbered tokens ([E] int64) to token ids ([E] int64): what has their values, and where these stand
        there."""
        if self._head is None:
            with torch.no_grad():
                self._head = self._lm.head(temperature)
        scores, hidden = self._scores.setdefault(outputs, Scores(outputs)), self._results[0].rows
        if self.holds and torch.is_grad_enabled():
            try:
                return scores, *scores.places(numbers, tokens, hidden, self._head, holds=True)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.let_go()
        return scores, *scores.places(numbers, tokens, hidden, self._head, holds=False)

    # -- backward -----------------------------------------------------------------------------------------------------

    def record(self, numbers: np.ndarray, numbers_T: Tensor, grads: tuple[Tensor | None, ...]) -> None:
        """Adds gradients of what `results` gave. Nothing of `grads` is kept: it may be a buffer of someone else's."""
        for chunk in self._chunks_of(numbers):
            chunk.has_gradient = True
        self._gradients += [None] * (len(self._results) - len(self._gradients))
        parts = []  # what may run out of memory comes before any sum
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = self._gradients[index]
            if total is None or len(total) < self.num_tokens:
                larger = grad.new_zeros(self._results[index].capacity, *grad.shape[1:], dtype=wide)
                if total is not None:
                    larger[: len(total)] = total
                total = self._gradients[index] = larger
            parts.append((total, grad.to(wide)))
        for total, part in parts:
            total.index_add_(0, numbers_T, part)

    def forget_gradients(self) -> None:
        """As `zero_grad` asks for: keys and values stay right."""
        self._gradients = []
        for chunk in self._chunks:
            chunk.has_gradient = False
        for scores in self._scores.values():
            scores.forget_gradients()

    def let_go(self) -> None:
        """Frees the graphs; the backward computes the rows again."""
        self.holds = False
        for chunk in self._chunks:
            chunk.roots = ()
        for scores in self._scores.values():
            scores.let_go()

    def backward(self, make_walk: Callable[..., Walk], temperature: float) -> None:
        """Adds the gradients of the parameters. make_walk: of the union of all rows, where graphs are not held, and
        whether it `reads_routers`."""
        with torch.enable_grad(), self._autocast.again():
            head = self._lm.head(temperature).collecting()
            totals = self._with_scores(head)
            if head.gradients is not None:
                head.gradients.join()
            with sparse_embedding_gradients(self._embedding):
                if self.holds:
                    self._backward_of_graphs(totals)
                elif any(each.requires_grad for each in self._lm.decoder.parameters()):
                    forest = Forest.from_trajectories(self.known.trajectories())
                    walk = make_walk(forest, reads_routers=len(totals) > 1)
                    walk.train(self._recorded_loss(self.known.numbers_on(forest), totals))

    def _with_scores(self, head: AnyHead) -> list[Tensor | None]:
        """The recorded gradients of hidden rows and router logits, with those that come through the head."""
        hidden, is_own = self._results[0].rows, False
        totals = [None if each is None else lengthened(each, len(hidden)) for each in self._gradients]
        totals += [None] * (len(self._results) - len(totals))
        for numbers, grad in chain.from_iterable(each.backward(hidden, head) for each in self._scores.values()):
            wide, before = torch.promote_types(grad.dtype, torch.float32), totals[0]
            if before is None:
                total = grad.new_zeros(len(hidden), *grad.shape[1:], dtype=wide)
            else:
                total = before if is_own else before.clone()
            totals[0], is_own = total.index_add_(0, to_device(numbers, hidden.device), grad.to(wide)), True
            for chunk in self._chunks_of(numbers):
                chunk.has_gradient = True
        return totals

    @property
    def _embedding(self) -> nn.Module:
        found: nn.Module = self._lm.decoder.get_input_embeddings()
        return found

    def _backward_of_graphs(self, totals: Sequence[Tensor | None]) -> None:
        while self._chunks:
            chunk = self._chunks.pop()
            part = slice(chunk.first, chunk.first + chunk.num_tokens)
            roots, grads = [], []
            if chunk.has_gradient or chunk.gateway.key_grads:
                for root, total in zip(chunk.roots, totals, strict=True):
                    if root.requires_grad:
                        roots.append(root)
                        grads.append(torch.zeros_like(root) if total is None else total[part].to(root.dtype))
            if roots:
                torch.autograd.backward(roots, grads)

    def _recorded_loss(self, numbers: np.ndarray, totals: Sequence[Tensor | None]) -> LossOf:
        """The loss of each micro-batch whose gradients are the recorded ones. numbers: [T] int64, of its tree."""

        def loss_of(output: MicroBatchOutput) -> Tensor | None:
            index = to_device(numbers[output.positions], output.hidden.device)
            values = (output.hidden, torch.stack(output.router_logits, 1)) if output.router_logits else (output.hidden,)
            dots = [
                (value * total.index_select(0, index).to(value.dtype)).sum()
                for value, total in zip(values, totals, strict=True)
                if total is not None
            ]
            return torch.stack(dots).sum() if dots else None

        return loss_of
