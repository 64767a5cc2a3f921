"""Costs of training some data: flat, flat without contained trajectories, on trees, and on trees under budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

from treewise.nn.flops import FlopModel
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.planner import plan
from treewise.report.analysis.facts import TreeFacts
from treewise.tree.forest import Forest

LADDER = tuple(2**power for power in range(8, 21))  # tokens
MAX_SHOWN_BUDGETS = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """One way to train all of the data once.

    num_tokens: forward and backward. num_recomputed_tokens: a second forward. flops: None without a model. Ratios are
    flat / this, in tokens of forward and backward (a forward counts `FORWARD_FRACTION`) and in FLOPs.
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


class BudgetCosts:
    """Sums over trees, each planned alone, for a ladder of budgets; one forest is alive at a time."""

    def __init__(self, flops: FlopModel | None = None, budgets: Sequence[int] = ()) -> None:
        self._flops = flops
        self._given = tuple(budgets)
        self._sums = {budget: [0, 0, 0.0] for budget in sorted({*LADDER, *budgets})}  # open, held, recomputed FLOPs
        self._largest = self._largest_image = 0

    def add(self, forest: Forest) -> None:
        """Adds one tree. Planning is linear in segments, so a ladder of budgets is cheap."""
        self._largest = max(self._largest, forest.num_tokens)
        self._largest_image = max(self._largest_image, forest.images.largest)
        for budget, sums in self._sums.items():
            if budget < forest.num_tokens and (budget >= self._largest_image or budget in self._given):
                tree_plan = plan(forest, budget)
                sums[0] += tree_plan.num_open_tokens
                sums[1] += tree_plan.num_held_tokens
                sums[2] += self._flops.recomputed(tree_plan) if self._flops else 0.0

    @property
    def budgets(self) -> list[int]:
        """The budgets to show, ascending: the given ones, and the largest that still cut a tree."""
        cutting = [
            budget for budget in LADDER if self._largest_image <= budget < self._largest and budget not in self._given
        ]
        room = max(0, MAX_SHOWN_BUDGETS - len(self._given))
        return sorted({*self._given, *(cutting[-room:] if room else [])})

    def rows(self, total: TreeFacts) -> list[Cost]:
        """Flat, leaves, tree, and the budgets from large to small."""
        rows = [
            self._cost(total, "flat, every trajectory", None, total.num_flat_tokens, total.flat_flops),
            self._cost(total, "flat, contained ones left out", None, total.num_leaf_tokens, total.leaf_flops),
            self._cost(total, "one row per conversation", None, total.num_row_tokens, None),
            self._cost(total, "tree, one micro-batch", None, total.num_tree_tokens, total.tree_flops),
        ]
        for budget in reversed(self.budgets):
            num_open, held, recomputed = self._sums[budget]
            flops = None if total.tree_flops is None else total.tree_flops + recomputed
            counts = (int(num_open), int(held))
            rows.append(self._cost(total, f"tree, budget {budget:,}", budget, total.num_tree_tokens, flops, counts))
        return rows

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
        work = num_tokens + FORWARD_FRACTION * (num_open - held)
        ratio = None if flops is None or total.flat_flops is None else total.flat_flops / flops
        return Cost(
            name, budget, num_tokens, num_open, held, num_open - held, flops, total.num_flat_tokens / work, ratio
        )
