"""`uniform`: every item once per pass, each pass in an order of its own. The default, and the baseline."""

from dataclasses import dataclass

from treewise.rl.curriculum.protocol import Chosen, View


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
