"""One common sequence of passes for all ranks, so that their collective operations match.

Under FSDP2 each forward gathers the parameters of every layer, and each backward gathers them again and scatters the
gradients. These operations pair up across ranks in the order in which they are called, so all ranks must run the same
sequence of forwards and backwards. The tokens may differ, and whether a graph is kept. Ranks have different plans, so
they exchange their sequences, merge them into a common one (`common_sequence`), and fill the turns that are not theirs
with empty passes (`align`): two tokens with a gradient of zero. `turns` adds passes whose order is free.

A rank's passes that keep their order, one letter each:

    F   forward of an open micro-batch, without a graph
    H   the same with a graph that is kept; counts as F
    T   forward and backward
    B   backward of the graph of an H

The common sequence has the letters F, T and B and contains every rank's passes in order: a common supersequence.
Finding the shortest one is NP-hard; a beam search keeps the prefixes with the smallest lower bound. Additionally, an
empty backward needs the graph of an earlier empty forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treewise.errors import PlanError
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, TRAIN

LETTERS = {FORWARD: "F", HOLD: "H", TRAIN: "T", BACKWARD: "B"}
ACTIONS = {letter: action for action, letter in LETTERS.items()}
_F, _T, _B, _END = range(4)  # letters of the common sequence
_CODES = {"F": _F, "H": _F, "T": _T, "B": _B}
BEAM_WIDTH = 12  # prefixes of the common sequence that are kept


@dataclass(frozen=True, slots=True)
class RankTurn:
    """What one rank runs at one turn of the common sequence.

    action: `forward`, `hold`, `train` or `backward`. own_step: index into the rank's `plan.schedule`, or None for an
    empty pass. An empty `backward` runs the graph of any earlier empty `hold`; there always is one.
    """

    action: str
    own_step: int | None


def common_sequence(sequences: Sequence[str], weights: Sequence[Sequence[int]]) -> str:
    """The common sequence. Independent of the order of its arguments, so all ranks compute the same one.

    sequences: one letter a pass, one sequence a rank; each backward comes after its hold. weights: the duration of each
    pass, at least 1; the sum over turns of the heaviest pass is to be small.
    """
    pairs = sorted({(own, tuple(weight)) for own, weight in zip(sequences, weights, strict=True)})
    ranks = _Ranks([own for own, _ in pairs], [weight for _, weight in pairs])
    beam, best = [ranks.start()], None
    if beam[0].is_complete:
        return ""
    while beam:
        extensions: dict[bytes, _Prefix] = {}
        for prefix in beam:
            for extended in ranks.extend(prefix):
                if extended.key not in extensions or extended.order < extensions[extended.key].order:
                    extensions[extended.key] = extended
        beam = sorted(extensions.values(), key=lambda prefix: prefix.order)[:BEAM_WIDTH]
        for prefix in beam:
            if prefix.is_complete and (best is None or prefix.order < best.order):
                best = prefix
        beam = [each for each in beam if best is None or (not each.is_complete and each.order[0] < best.order[0])]
    assert best is not None
    return best.common


def align(own: str, common: str) -> list[RankTurn]:
    """What a rank runs at each turn of the common sequence: its own passes as early as they match, else empty ones.

    own: one letter a pass; empty for a rank with nothing to do.

    Raises:
        PlanError: the common sequence does not contain the rank's own passes.
    """
    turns: list[RankTurn] = []
    empty_forwards: list[int] = []
    position = 0
    for letter in common:
        if position < len(own) and _CODES[own[position]] == _CODES[letter]:
            turns.append(RankTurn(ACTIONS[own[position]], position))
            position += 1
            continue
        if letter == "F":
            empty_forwards.append(len(turns))
        elif letter == "B":
            if not empty_forwards:
                raise PlanError("the common sequence does not contain this rank's; did all ranks exchange theirs?")
            turns[empty_forwards.pop()] = RankTurn(HOLD, None)
        turns.append(RankTurn(ACTIONS[letter], None))
    if position < len(own):
        raise PlanError(
            f"{len(own) - position} passes of this rank are not in the common sequence; did all ranks exchange theirs?"
        )
    return turns


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    """A prefix of the common sequence, and the state of each rank after it.

    spent: weight of its turns. position: [R] int64 passes done. remaining: [R, 3] int64 weight of each letter still to
    come. num_empty: [R] int64 empty forwards whose graph no empty backward has used.
    """

    common: str
    spent: int
    position: np.ndarray
    remaining: np.ndarray
    num_empty: np.ndarray

    @property
    def is_complete(self) -> bool:
        return not self.remaining.any()

    @property
    def key(self) -> bytes:
        return self.position.tobytes() + self.num_empty.tobytes()

    @property
    def order(self) -> tuple[int, int, str]:
        """A lower bound: each letter takes at least the weight of the rank with the most of it. Then progress."""
        bound = self.spent + int(self.remaining.max(axis=0, initial=0).sum())
        return bound, int(self.remaining.sum()), self.common


class _Ranks:
    """The passes of ranks. letters: [R, passes + 1] codes, `_END` after the last. weights: [R, passes + 1] int64."""

    def __init__(self, distinct: list[str], weights: list[tuple[int, ...]]) -> None:
        self.letters = np.full((len(distinct), max(map(len, distinct), default=0) + 1), _END)
        self.weights = np.zeros(self.letters.shape, dtype=np.int64)
        for row, (own, weight) in enumerate(zip(distinct, weights, strict=True)):
            self.letters[row, : len(own)] = [_CODES[letter] for letter in own]
            self.weights[row, : len(own)] = weight
        self.rows = np.arange(len(distinct))

    def start(self) -> _Prefix:
        nothing = np.zeros(len(self.rows), dtype=np.int64)
        of_letter = [np.where(self.letters == code, self.weights, 0).sum(axis=1) for code in (_F, _T, _B)]
        return _Prefix("", 0, nothing, np.stack(of_letter, axis=1), nothing)

    def extend(self, prefix: _Prefix) -> list[_Prefix]:
        """The prefix with each letter that some rank needs next and that every rank can run."""
        heads = self.letters[self.rows, prefix.position]
        extensions = []
        for code in (_F, _T, _B):
            is_own = heads == code
            is_blocked = code == _B and not (is_own | (prefix.num_empty > 0)).all()
            if is_own.any() and not is_blocked:
                extensions.append(self._append(prefix, code, is_own))
        # If only blocked backwards are left, a forward that is empty on all ranks gives each of them a graph.
        return extensions or [self._append(prefix, _F, np.zeros(len(self.rows), dtype=bool))]

    def _append(self, prefix: _Prefix, code: int, is_own: np.ndarray) -> _Prefix:
        remaining = prefix.remaining.copy()
        weights = np.where(is_own, self.weights[self.rows, prefix.position], 0)
        remaining[:, code] -= weights
        num_empty = prefix.num_empty + {_F: 1, _T: 0, _B: -1}[code] * ~is_own
        spent = prefix.spent + max(int(weights.max(initial=0)), 1)
        return _Prefix(prefix.common + "FTB"[code], spent, prefix.position + is_own, remaining, num_empty)
