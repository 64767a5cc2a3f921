"""Facts about a plan, what it should cost on a model, and what all of the data should cost under budgets."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from treewise.models.load_model import DTYPES
from treewise.nn.flops import FlopModel, gateway_bytes, state_bytes, window_bytes
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.planner import plan
from treewise.planning.plans import Plan
from treewise.report.analysis.facts import TreeFacts
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.engine.step_memory import StepMemory

# The part of a GPU that a step can use; the rest is the context, fragmentation and buffers of collectives.
USABLE = 0.9
BUDGETS, MAX_BUDGETS = [2**power for power in range(15, 6, -1)], 4  # of `report_budgets`
LADDER = tuple(2**power for power in range(8, 21))  # tokens, of `BudgetCosts`
MAX_SHOWN_BUDGETS = 5


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan, and what it should cost on a model. Bytes and times are predictions from shapes, not measurements.

    relative_time: FLOPs of the plan / FLOPs of flat training; relative_tree_time: / those of the tree in one
    micro-batch. bytes_*: of the model's dtype. bytes_weights: with gradients and the optimizer's state; bytes_peak adds
    what a step holds beside at its fullest moment (`engine.step_memory`): activations of one micro-batch with what is
    held, the graph of the images where it is kept (bytes_images), the gateways, logits, gradients between layers
    (bytes_others), and on a CPU what the resident set has beyond tensors (bytes_allocator). Where the rows of a step
    come in several calls, a window (`TreeEngine.window`) keeps bytes_window of keys, values and hidden rows with their
    gradients, and bytes_window_graphs of graphs and logits, if it holds all of them.
    """

    max_tokens: int | None
    num_trees: int
    num_flat_tokens: int
    num_tree_tokens: int
    num_micro_batches: int
    num_open_tokens: int
    num_held_tokens: int
    num_recomputed_tokens: int
    num_computed_tokens: int
    peak_live_tokens: int
    peak_gateway_tokens: int
    model: str | None = None
    dtype: str | None = None
    bytes_per_gateway_token: int | None = None
    bytes_weights: int | None = None
    bytes_activations: int | None = None
    bytes_images: int | None = None
    bytes_gateways: int | None = None
    bytes_others: int | None = None
    bytes_allocator: int | None = None
    bytes_peak: int | None = None
    bytes_window: int | None = None
    bytes_window_graphs: int | None = None
    relative_time: float | None = None
    relative_leaf_time: float | None = None
    relative_tree_time: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        return asdict(self)


def report_plan(
    plan: Plan,
    flops: FlopModel | None = None,
    name: str | None = None,
    dtype: str = "float32",
    *,
    memory: "Callable[[Plan], StepMemory] | None" = None,
    optim: str | None = None,
    float32_gradients: bool = False,
) -> PlanReport:
    """Facts of a plan, with predictions where the costs of a model are known; `name` is what it is called.

    memory: of a step of a plan (`engine.step_memory`), where its peak is asked for, which takes seconds. optim: the
    name of the run's optimizer; None: AdamW. float32_gradients: whether these are added up in float32.
    """
    predictions: dict[str, Any] = {}
    if flops is not None:
        width = DTYPES[dtype]
        of_trained = (max(width, 4) if float32_gradients else width) + state_bytes(optim, width)
        weights = width * flops.num_parameters + round(of_trained * flops.num_trained_parameters)
        predictions = {
            "model": name,
            "dtype": dtype,
            "bytes_per_gateway_token": gateway_bytes(flops.gateway_values, DTYPES[dtype]),
            "bytes_weights": weights,
            "bytes_window": plan.forest.num_tokens * window_bytes(flops.gateway_values, flops.hidden_values, width),
            "bytes_window_graphs": plan.forest.num_tokens
            * (width * flops.activation_values + max(width, 4) * flops.vocabulary),
            "relative_time": flops.planned(plan) / flops.flat(plan.forest),
            "relative_leaf_time": flops.planned(plan) / flops.leaf(plan.forest),
            "relative_tree_time": flops.planned(plan) / flops.tree(plan.forest),
        }
        if memory is not None:
            step = memory(plan)
            parts = ("activations", "images", "gateways", "others", "allocator")
            predictions |= {f"bytes_{part}": getattr(step, part) for part in parts}
            predictions["bytes_peak"] = weights + step.total
    counts = ("num_micro_batches", "num_open_tokens", "num_held_tokens", "num_recomputed_tokens", "num_computed_tokens")
    return PlanReport(
        num_trees=plan.forest.num_trees,
        num_flat_tokens=plan.forest.num_flat_tokens,
        num_tree_tokens=plan.forest.num_tokens,
        peak_live_tokens=max(tokens for _, tokens in plan.timeline),
        **{name: getattr(plan, name) for name in ("max_tokens", "peak_gateway_tokens", *counts)},
        **predictions,
    )


@dataclass(frozen=True, slots=True)
class BudgetMemory:
    """What a budget would cost. bytes_step: at the peak of a step, beside weights, gradients and AdamW's moments; None
    where memory was not asked for.

    recomputed_share: of the tree's tokens, those whose forward runs twice. max_tokens: None for one micro-batch.
    """

    max_tokens: int | None
    num_micro_batches: int
    recomputed_share: float
    bytes_step: int | None


def report_budgets(
    forest: Forest,
    flops: FlopModel,
    whole: PlanReport,
    hold: str = "auto",
    memory: "Callable[[Plan], StepMemory] | None" = None,
) -> tuple[BudgetMemory, ...]:
    """No budget, and the largest powers of two below the tree, for a user to choose from.

    whole: `report_plan` of the forest without a budget, with the same `flops` and `memory`.
    """
    step = None if whole.bytes_peak is None else whole.bytes_peak - (whole.bytes_weights or 0)
    rows = [BudgetMemory(None, whole.num_micro_batches, 0.0, step)]
    for budget in [budget for budget in BUDGETS if budget < forest.num_tokens][:MAX_BUDGETS]:
        plan = flops.plan(forest, budget, hold=hold)
        share = plan.num_recomputed_tokens / forest.num_tokens
        step = None if memory is None else memory(plan).total
        rows.append(BudgetMemory(budget, plan.num_micro_batches, share, step))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class GpuFit:
    """Whether a step fits into the memory of one GPU, a tenth of it left free, by the prediction of its peak.

    max_tokens: the largest of the budgets that were predicted that does where it does not; None: none of them.
    """

    gpu_bytes: int
    bytes_peak: int
    bytes_weights: int
    fits: bool
    max_tokens: int | None = None


def fit_of(report: PlanReport, budgets: Sequence[BudgetMemory], gpu_bytes: int) -> GpuFit:
    """The verdict on a plan whose peak is predicted. budgets: `report_budgets`, or none where one was given."""
    assert report.bytes_peak is not None
    assert report.bytes_weights is not None
    usable, weights = USABLE * gpu_bytes, report.bytes_weights
    fitting = [budget for budget in budgets if budget.bytes_step is not None and weights + budget.bytes_step <= usable]
    is_fitting = report.bytes_peak <= usable
    smaller = next((each.max_tokens for each in fitting), None)
    return GpuFit(gpu_bytes, report.bytes_peak, weights, is_fitting, None if is_fitting else smaller)


# -- costs of all data: flat, without contained trajectories, on trees, on trees under budgets ------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """One way to train all of the data once.

    num_tokens: forward and backward. num_recomputed_tokens: a second forward. flops: None without a model. Ratios are
    one row per call / this, in tokens of forward and backward (a forward counts `FORWARD_FRACTION`) and in FLOPs.
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
            self._cost(total, "flat, one row per call", None, total.num_call_tokens, total.call_flops),
            self._cost(total, "flat, turns merged", None, total.num_leaf_tokens, total.leaf_flops),
            self._cost(total, "tree, no budget", None, total.num_tree_tokens, total.tree_flops),
        ]
        if total.holds_merged_turns and total.num_flat_tokens != total.num_leaf_tokens:
            rows[1:1] = [self._cost(total, "flat, rows as they are", None, total.num_flat_tokens, total.flat_flops)]
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
        ratio = None if flops is None or total.call_flops is None else total.call_flops / flops
        return Cost(
            name, budget, num_tokens, num_open, held, num_open - held, flops, total.num_call_tokens / work, ratio
        )
