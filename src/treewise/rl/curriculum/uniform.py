"""`uniform`: every item once per pass, each pass in an order of its own. The default, and the baseline.

`dynamic` draws so, too; groups without variance are left out and replaced by new ones, at most so many times (DAPO,
2503.14476, section 3.2). What the replaced ones cost is counted.
"""

from dataclasses import dataclass

from treewise.rl.branching.protocol import require
from treewise.rl.curriculum.protocol import Chosen, Outcome, View


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformSettings:
    """Has none."""


def in_passes(view: View, count: int, _settings: object = None) -> Chosen:
    """The next items of the present pass. Where a pass ends within an iteration, an item that comes again at once is
    passed over. Items without end come in their order.
    """
    if view.size is None:
        return Chosen(list(range(view.position, view.position + count)), view.position + count)
    chosen: list[int] = []
    position, taken = view.position, set(view.taken)
    while len(chosen) < count and len(taken) < view.size:
        order = view.order_of_pass(position // view.size)
        index = int(order[position % view.size])
        if index not in taken:
            chosen.append(index)
            taken.add(index)
        position += 1
    return Chosen(chosen, position)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSettings:
    """refills: times that missing groups are sampled anew in one iteration. What is still missing then is left out, so
    that an iteration of a task that is all too hard or too easy ends.
    """

    refills: int = 3

    def __post_init__(self) -> None:
        require(self.refills >= 0, f"refills={self.refills} must not be negative.")


def has_variance(outcome: Outcome, _settings: object) -> bool:
    """Whether the rewards of a group differ."""
    return not outcome.is_flat
