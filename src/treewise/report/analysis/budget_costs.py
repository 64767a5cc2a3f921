"""What training some data costs: flat, flat without contained trajectories, on trees, and on trees under budgets."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treewise.nn.flops import FlopModel
from treewise.planning.planner import plan
from treewise.report.analysis.facts import TreeFacts
from treewise.tree.forest import Forest

LADDER = tuple(2**power for power in range(8, 21))  # tokens
MAX_SHOWN_BUDGETS = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """One way to train all of the data once.

    num_tokens: forward and backward. num_recomputed_tokens: one more forward. work: tokens of forward and backward that
    both amount to, a forward being a third. flops: None where no model was named. Ratios are flat / this.
    """

    name: str
    max_tokens: int | None
    num_tokens: int
    num_open_tokens: int
    num_held_tokens: int
    num_recomputed_tokens: int
    flops: float | None
    token_ratio: float
    flop_ratio: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class BudgetCosts:
    """Sums over trees, each planned alone, for a ladder of budgets; one forest is alive at a time."""

    def __init__(self, flops: FlopModel | None = None, budgets: Sequence[int] = ()) -> None:
        self._flops = flops
        self._given = tuple(budgets)
        self._sums = {budget: [0, 0, 0.0] for budget in sorted({*LADDER, *budgets})}  # open, held, recomputed FLOPs
        self._largest = 0

    def add(self, forest: Forest) -> None:
        """Takes one more tree. A plan costs time per segment, so a ladder of them costs little."""
        self._largest = max(self._largest, forest.num_tokens)
        for budget, sums in self._sums.items():
            if budget < forest.num_tokens:
                made = plan(forest, budget)
                sums[0] += made.num_open_tokens
                sums[1] += made.num_held_tokens
                sums[2] += self._flops.recomputed(made) if self._flops else 0.0

    @property
    def budgets(self) -> list[int]:
        """Those worth showing: the given ones, and the largest that still cut a tree; ascending."""
        cutting = [budget for budget in LADDER if budget < self._largest and budget not in self._given]
        room = max(0, MAX_SHOWN_BUDGETS - len(self._given))
        return sorted({*self._given, *(cutting[-room:] if room else [])})

    def rows(self, total: TreeFacts) -> list[Cost]:
        """Flat, leaves, tree, and the budgets from large to small."""
        made = [
            self._cost(total, "flat, every trajectory", None, total.num_flat_tokens, total.flat_flops),
            self._cost(total, "flat, contained ones left out", None, total.num_leaf_tokens, total.leaf_flops),
            self._cost(total, "tree, one micro-batch", None, total.num_tree_tokens, total.tree_flops),
        ]
        for budget in reversed(self.budgets):
            num_open, held, again = self._sums[budget]
            flops = None if total.tree_flops is None else total.tree_flops + again
            counts = (int(num_open), int(held))
            made.append(self._cost(total, f"tree, budget {budget:,}", budget, total.num_tree_tokens, flops, counts))
        return made

    def _cost(
        self,
        total: TreeFacts,
        name: str,
        budget: int | None,
        num_tokens: int,
        flops: float | None,
        open_and_held: tuple[int, int] = (0, 0),
    ) -> Cost:
        num_open, held = open_and_held
        work = num_tokens + (num_open - held) / 3
        ratio = None if flops is None or total.flat_flops is None else total.flat_flops / flops
        return Cost(
            name, budget, num_tokens, num_open, held, num_open - held, flops, total.num_flat_tokens / work, ratio
        )
