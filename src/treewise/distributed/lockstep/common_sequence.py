"""Equal participation: one sequence of passes that every rank runs, so that no collective operation ever waits.

Under FSDP2 each forward gathers the parameters of every layer, and each backward gathers them again and scatters the
gradients. These operations pair up across ranks in the order in which they are called, so all ranks must run the same
sequence of forwards and backwards. What is computed in them may differ, and whether a graph is kept. Ranks have
different plans, so they exchange what they have to run, merge it into a common sequence (`merged`), and fill what is
not theirs with empty passes (`slots_of`): one token with a loss of zero. `turns` adds passes whose order is free.

A rank's own steps that keep their order, one letter each:

    F   forward of an open micro-batch, without a graph
    H   the same with a graph that is kept; counts as F
    T   forward and backward
    B   backward of the graph of an H

The common sequence has the letters F, T and B, and holds every rank's own steps in order: a common supersequence. To
find the shortest one is NP-hard; here a beam search keeps the few beginnings after which the least lower bound remains.
One constraint comes on top: an empty backward needs the graph of an earlier empty forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treewise.errors import PlanError
from treewise.planning.planner import BACKWARD, FORWARD, HOLD, TRAIN

LETTERS = {FORWARD: "F", HOLD: "H", TRAIN: "T", BACKWARD: "B"}
ACTIONS = {letter: action for action, letter in LETTERS.items()}
_F, _T, _B, _END = range(4)  # letters of the common sequence
_CODES = {"F": _F, "H": _F, "T": _T, "B": _B}
BEAM_WIDTH = 12  # beginnings of the common sequence that are kept at a time


@dataclass(frozen=True, slots=True)
class Slot:
    """What one rank runs at one step of the common sequence.

    action: `forward`, `hold`, `train` or `backward`. own_step: index into the rank's `plan.schedule`, or None for an
    empty pass. An empty `backward` runs the graph of an earlier empty `hold`, of which there always is one; which one
    does not matter.
    """

    action: str
    own_step: int | None


def merged(sequences: Sequence[str], weights: Sequence[Sequence[int]] | None = None) -> str:
    """The common sequence. Depends on nothing but the set of its arguments: all ranks compute the same one.

    weights: what each pass takes, at least 1; the sum over turns of the heaviest pass is made small. Without them the
    number of turns is.

    Raises:
        PlanError: a letter that is none, or holds and backwards that do not pair up.
    """
    for number, own in enumerate(sequences):
        _check(own, f"sequence {number}")
    if weights is None:
        weights = [[1] * len(own) for own in sequences]
    pairs = sorted({(own, tuple(weight)) for own, weight in zip(sequences, weights, strict=True)})
    ranks = _Ranks([own for own, _ in pairs], [weight for _, weight in pairs])
    beam, best = [ranks.start()], None
    if beam[0].is_complete:
        return ""
    while beam:
        longer: dict[bytes, _Beginning] = {}
        for old in beam:
            for each in ranks.continued(old):
                if each.key not in longer or each.order < longer[each.key].order:
                    longer[each.key] = each
        beam = sorted(longer.values(), key=lambda each: each.order)[:BEAM_WIDTH]
        for each in beam:
            if each.is_complete and (best is None or each.order < best.order):
                best = each
        beam = [each for each in beam if best is None or (not each.is_complete and each.order[0] < best.order[0])]
    assert best is not None
    return best.common


def slots_of(own: str, common: str) -> list[Slot]:
    """What a rank runs at each step of the common sequence: its own steps as early as they match, empty passes else.

    own: one letter a step; empty for a rank with nothing to do.

    Raises:
        PlanError: the common sequence does not hold the rank's own steps.
    """
    slots: list[Slot] = []
    empty_forwards: list[int] = []
    place = 0
    for letter in common:
        if place < len(own) and _CODES[own[place]] == _CODES[letter]:
            slots.append(Slot(ACTIONS[own[place]], place))
            place += 1
            continue
        if letter == "F":
            empty_forwards.append(len(slots))
        elif letter == "B":
            if not empty_forwards:
                raise PlanError("the common sequence was not made from this rank's; did all ranks exchange theirs?")
            slots[empty_forwards.pop()] = Slot(HOLD, None)
        slots.append(Slot(ACTIONS[letter], None))
    if place < len(own):
        raise PlanError(
            f"{len(own) - place} steps of this rank have no place in the common sequence; did all ranks exchange "
            "theirs?"
        )
    return slots


@dataclass(frozen=True, slots=True, eq=False)
class _Beginning:
    """A beginning of the common sequence, and where each of the ranks ([R]) has got to.

    spent: weights of its turns. place: [R] steps done. remaining: [R, 3] weight of each letter still to come.
    num_empty: [R] empty forwards whose graph no empty backward has used.
    """

    common: str
    spent: int
    place: np.ndarray
    remaining: np.ndarray
    num_empty: np.ndarray

    @property
    def is_complete(self) -> bool:
        return not self.remaining.any()

    @property
    def key(self) -> bytes:
        return self.place.tobytes() + self.num_empty.tobytes()

    @property
    def order(self) -> tuple[int, int, str]:
        """Each letter takes at least what the rank with the most of it has; of equals, where ranks have got further."""
        bound = self.spent + int(self.remaining.max(axis=0, initial=0).sum())
        return bound, int(self.remaining.sum()), self.common


class _Ranks:
    """What ranks have to run: letters, [R, steps + 1] codes, `_END` after a rank's last; weights, [R, steps + 1]."""

    def __init__(self, distinct: list[str], weights: list[tuple[int, ...]]) -> None:
        self.letters = np.full((len(distinct), max(map(len, distinct), default=0) + 1), _END)
        self.weights = np.zeros(self.letters.shape, dtype=np.int64)
        for row, (own, weight) in enumerate(zip(distinct, weights, strict=True)):
            self.letters[row, : len(own)] = [_CODES[letter] for letter in own]
            self.weights[row, : len(own)] = weight
        self.rows = np.arange(len(distinct))

    def start(self) -> _Beginning:
        nothing = np.zeros(len(self.rows), dtype=np.int64)
        of_letter = [np.where(self.letters == code, self.weights, 0).sum(axis=1) for code in (_F, _T, _B)]
        return _Beginning("", 0, nothing, np.stack(of_letter, axis=1), nothing)

    def continued(self, old: _Beginning) -> list[_Beginning]:
        """With each letter that some rank waits for and that every rank can run."""
        heads = self.letters[self.rows, old.place]
        found = []
        for code in (_F, _T, _B):
            is_own = heads == code
            is_barred = code == _B and not (is_own | (old.num_empty > 0)).all()
            if is_own.any() and not is_barred:
                found.append(self._with(old, code, is_own))
        # Where only barred backwards are left, a forward that is empty everywhere gives every rank a graph to run.
        return found or [self._with(old, _F, np.zeros(len(self.rows), dtype=bool))]

    def _with(self, old: _Beginning, code: int, is_own: np.ndarray) -> _Beginning:
        remaining = old.remaining.copy()
        weights = np.where(is_own, self.weights[self.rows, old.place], 0)
        remaining[:, code] -= weights
        num_empty = old.num_empty + {_F: 1, _T: 0, _B: -1}[code] * ~is_own
        spent = old.spent + max(int(weights.max(initial=0)), 1)
        return _Beginning(old.common + "FTB"[code], spent, old.place + is_own, remaining, num_empty)


def _check(own: str, name: str) -> None:
    num_held = 0
    for letter in own:
        if letter not in _CODES:
            raise PlanError(f"{name} holds {letter!r}; its letters are {', '.join(_CODES)}.")
        num_held += (letter == "H") - (letter == "B")
        if num_held < 0:
            raise PlanError(f"{name} runs a backward of nothing held.")
    if num_held:
        raise PlanError(f"{name} holds {num_held} graphs that it never runs backward.")
