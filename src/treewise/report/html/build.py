"""From loaded data and a run's folder to one document: the JSON twin, and what the HTML page draws.

Data is read twice, one tree at a time: first for facts, costs and lost sharing of all trees; then the trees to be drawn
are loaded again, planned side by side, and turned into pictures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from treewise.base.progress import busy_with, tell_progress
from treewise.data import LoadReport, Trees
from treewise.engine.step_memory import step_memory
from treewise.nn.flops import FlopModel
from treewise.nn.model_flops import flop_model
from treewise.planning.planner import plan
from treewise.planning.plans import Plan
from treewise.report.analysis.bill import NO_RATES, Bill, Rates
from treewise.report.analysis.facts import InspectReport, TreeFacts, inspect_forests
from treewise.report.analysis.lost_sharing import LostCollector, LostReport
from treewise.report.analysis.online_log import OnlineReport
from treewise.report.analysis.plan_facts import BudgetCosts, Cost, PlanReport, report_plan
from treewise.report.analysis.run_log import RunReport
from treewise.report.analysis.token_text import TokenText
from treewise.report.analysis.verdict import Verdict, ratios_without, verdict_on
from treewise.report.html.charts import Chart, histogram, histogram_chart, line_chart
from treewise.report.html.picture import (
    Thumbnails,
    Vocabulary,
    micro_batch_runs,
    picture,
    picture_size,
    segment_table,
)
from treewise.tree.forest import Forest

SCHEMA, SCHEMA_VERSION = "treewise.report", 2
MAX_PAGE_CHARS = 20_000_000  # of pictures
MAX_TIMELINE_POINTS = 5000
DRAWN_RULE = "in turn the tree with the most tokens, the highest leaf ratio, and the most lost sharing"


@dataclass(frozen=True, slots=True)
class DrawnPlan:
    """A plan of the drawn trees as one step, with its schedule over time.

    timeline: for each step of the schedule the gateway tokens alive and the tokens that hold activations; thinned to
    its peaks where it is long (is_thinned).
    """

    facts: PlanReport
    timeline: tuple[tuple[int, int], ...]
    is_thinned: bool
    micro_batches: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **self.facts.to_dict(),
            "timeline": [list(point) for point in self.timeline],
            "is_timeline_thinned": self.is_thinned,
            "micro_batches": list(self.micro_batches),
        }


@dataclass(frozen=True, slots=True)
class DataReport:
    """Everything about some data. `pictures`, `vocabulary` and `thumbnails` are for the page, `segments` for the twin.

    max_tokens: the budget that was asked for.
    """

    sources: tuple[str, ...]
    tokenizer: str | None
    facts: InspectReport
    costs: tuple[Cost, ...]
    lost: LostReport
    plans: tuple[DrawnPlan, ...]
    pictures: tuple[dict[str, Any], ...]
    vocabulary: dict[str, Any]
    thumbnails: tuple[str, ...]
    segments: tuple[dict[str, Any], ...]
    num_without_room: int
    max_tokens: int | None = None
    rates: Rates = NO_RATES

    @property
    def bill(self) -> Bill:
        """Tokens, FLOPs, hours and dollars of training the data once."""
        return self.rates.bill_of(self.facts.total, self.facts.model)

    @property
    def first_plan(self) -> int:
        """Index of the plan that is shown first: the one of the budget that was asked for."""
        budgets = [each.facts.max_tokens for each in self.plans]
        return budgets.index(self.max_tokens) if self.max_tokens in budgets else 0

    def to_dict(self) -> dict[str, Any]:
        """The part of the JSON twin about data."""
        return {
            "sources": list(self.sources),
            "tokenizer": self.tokenizer,
            **self.verdict.to_dict(),
            "bill": self.bill.to_dict(),
            **self.facts.to_dict(),
            "costs": [asdict(cost) for cost in self.costs],
            "distributions": {name: asdict(histogram(values)) for name, values in _ratios(self.facts).items()},
            "lost_sharing": self.lost.to_dict() | {"ratios_if_mended": self.ratios_if_mended},
            "drawn_trees": {"rule": DRAWN_RULE, "num_without_room": self.num_without_room, "trees": self.segments},
            "plans": [each.to_dict() for each in self.plans],
        }

    @property
    def verdict(self) -> Verdict:
        """Three lines: whether it is worth it, the largest avoidable loss, what to change; and the numbers behind."""
        return verdict_on(self.facts, self.lost)

    @property
    def ratios_if_mended(self) -> dict[str, dict[str, float]]:
        """By avoidable cause, the ratios of all trees without its loss alone."""
        losses = {each.cause: each.num_lost_tokens for each in self.lost.causes if each.is_avoidable}
        ratios = {cause: ratios_without(self.facts.total, lost) for cause, lost in losses.items()}
        return {cause: {"share_ratio": share, "leaf_ratio": leaf} for cause, (share, leaf) in ratios.items()}

    @property
    def charts(self) -> list[Chart]:
        """Histograms of ratios and sizes over the trees."""
        titles = {
            "share_ratio": ("Share ratio", "flat tokens / tree tokens"),
            "leaf_ratio": ("Leaf ratio", "leaf tokens / tree tokens"),
            "pair_ratio": ("Pair ratio", "attention pairs, flat / tree"),
            "num_tree_tokens": ("Size", "tokens of a tree"),
        }
        return [histogram_chart(values, *titles[name]) for name, values in _ratios(self.facts).items()]


@busy_with("drawing the page")
def build_data_report(
    trees: Trees,
    load: LoadReport,
    *,
    sources: Sequence[str] = (),
    tokenizer: object = None,
    tokenizer_name: str | None = None,
    model: nn.Module | None = None,
    model_name: str | None = None,
    max_tokens: int | None = None,
    num_drawn: int = 12,
    rates: Rates = NO_RATES,
) -> DataReport:
    """Everything that a page shows about data.

    Parameters:
        trees: by index, as `tw.load_trees` returns them.
        load: warnings and dropped records of the load.
        sources: where they came from, for the heading.
        tokenizer: turns tokens into text; without it they are shown as numbers.
        model: for FLOPs and bytes, with or without data; `model_name` is what it is called.
        max_tokens: a budget to be shown beside those that fit the data.
        num_drawn: trees to draw.
    """
    text, flops = TokenText(tokenizer), None if model is None else flop_model(model)
    costs = BudgetCosts(flops, () if max_tokens is None else (max_tokens,))
    lost, could_save = LostCollector(text, flops), []

    def forests() -> Any:
        for index in range(len(trees)):
            tell_progress("looking at trees", index, len(trees), "tree")
            tree = trees[index]
            forest = tree.forest()
            costs.add(forest)
            could_save.append(lost.add(tree.name, forest))
            yield tree.name, forest

    with busy_with("looking at trees"):
        facts = inspect_forests(forests(), load, flops, model_name, max_tokens, text)
    chosen = drawn_first(facts.trees, could_save, num_drawn)
    drawn = [(trees[index].name, trees[index].forest()) for index in chosen]
    size = sum(forest.num_tokens for _, forest in drawn)
    # From large to small; one micro-batch where none cuts them.
    budgets: list[int | None] = [each for each in reversed(costs.budgets) if each < size] or [None]
    plans = [plan([forest for _, forest in drawn], budget) for budget in budgets] if drawn else []
    vocabulary, thumbnails = Vocabulary(text), Thumbnails()
    pictures, without_room = _pictures(drawn, plans, vocabulary, thumbnails)
    return DataReport(
        sources=tuple(sources),
        tokenizer=tokenizer_name,
        facts=facts,
        costs=tuple(costs.rows(facts.total)),
        lost=lost.result(),
        plans=tuple(_drawn_plan(each, model, flops, model_name) for each in plans),
        pictures=tuple(pictures),
        vocabulary=vocabulary.to_dict(),
        thumbnails=tuple(thumbnails.addresses),
        segments=tuple(segment_table(name, forest) for name, forest in drawn[: len(pictures)]),
        num_without_room=without_room,
        max_tokens=max_tokens,
        rates=rates,
    )


def drawn_first(facts: Sequence[TreeFacts], could_save: Sequence[int], count: int) -> list[int]:
    """Indices of the trees to draw, the first by each of three orders in turn (`DRAWN_RULE`)."""
    indices = range(len(facts))
    orders = [
        sorted(indices, key=lambda index: -facts[index].num_tree_tokens),
        sorted(indices, key=lambda index: -facts[index].leaf_ratio),
        sorted(indices, key=lambda index: -could_save[index]),
    ]
    chosen = dict.fromkeys(index for row in zip(*orders, strict=True) for index in row)
    return list(chosen)[: max(0, count)]


def twin(
    data: DataReport | None, run: RunReport | None, version: str, sections: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The JSON twin of a page. Its fields are described in docs/report-fields.md."""
    return {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "treewise": version,
        "sections": list(sections),
        "data": None if data is None else data.to_dict(),
        "run": None if run is None else run.to_dict(),
    }


def timeline_chart(drawn: DrawnPlan) -> Chart:
    """Tokens alive over the schedule of a plan."""
    # A step lasts until the next one, the last one too.
    steps = list(range(len(drawn.timeline) + 1))
    gateways, live = zip(*drawn.timeline, drawn.timeline[-1], strict=True)
    series = [("kept for a backward", steps, live), ("in gateways", steps, gateways)]
    return line_chart(series, "Tokens in memory", "step of the schedule", "tokens", is_stepped=True, from_zero=True)


def memory_chart(drawn: DrawnPlan) -> Chart | None:
    """Bytes alive over the schedule, as predicted from the shapes of a model, whose highest point is the peak of the
    plan; None without one.
    """
    facts = drawn.facts
    if facts.bytes_weights is None or facts.bytes_activations is None or facts.bytes_per_gateway_token is None:
        return None
    gateways: np.ndarray
    live: np.ndarray
    gateways, live = np.array([*drawn.timeline, drawn.timeline[-1]], dtype=float).T
    per_live = facts.bytes_activations / max(1, facts.peak_live_tokens)
    always = facts.bytes_weights + (facts.bytes_images or 0)
    above = always + facts.bytes_per_gateway_token * gateways
    kept = above + per_live * live
    peak = kept.max() if facts.bytes_peak is None else float(facts.bytes_peak)
    fullest = int(kept.argmax())
    others = max(0.0, peak - kept[fullest]) / max(1.0, live[fullest])  # of a live token: its logits, for one
    total = np.minimum(peak, kept + others * live)
    series = [
        ("all, with logits and gradients between layers", total),
        ("weights, gradients, AdamW, gateways and what backwards need", kept),
        ("without what backwards need", above),
        ("gateways", above - always),
    ]
    steps = list(range(len(live)))
    lines = [(label, steps, (each / 2**30).tolist()) for label, each in series]
    title = f"Predicted memory, {facts.dtype}"
    return line_chart(lines, title, "step of the schedule", "GiB", is_stepped=True, from_zero=True)


FROM_ZERO = ("speed", "share ratio", "efficiency", "memory", "arithmetic")


def run_charts(run: RunReport) -> list[Chart]:
    """One chart per kind of logged value."""
    charts = []
    for group in run.charts:
        lines = [(each.label, each.steps, each.values) for each in group]
        from_zero = group[0].chart in FROM_ZERO  # else a change of one in a thousand looks like a cliff
        axis = "step" if run.online is None else "iteration"
        charts.append(line_chart(lines, _title(group[0].chart), axis, group[0].unit, from_zero=from_zero))
    return charts if run.online is None else [*online_charts(run.online), *charts]


def online_charts(online: OnlineReport) -> list[Chart]:
    """Reward over generated tokens, and the book's predictions against what came."""
    charts = []
    if online.over_tokens:
        lines = [(each.label, each.tokens, each.values) for each in online.over_tokens]
        charts.append(line_chart(lines, "Reward over tokens", "generated tokens", "mean of the rollouts"))
    if online.trials:
        even: tuple[str, tuple[float, ...], tuple[float, ...]] = ("observed = predicted", (0.0, 1.0), (0.0, 1.0))
        points = [even, ("success, by tenths of the prediction", online.predicted, online.observed)]
        charts.append(line_chart(points, "Calibration of the book", "predicted success", "observed success"))
    return charts


def _title(name: str) -> str:
    return name[:1].upper() + name[1:]


def _ratios(facts: InspectReport) -> dict[str, list[float]]:
    names = ("share_ratio", "leaf_ratio", "pair_ratio", "num_tree_tokens")
    return {name: [float(getattr(tree, name)) for tree in facts.trees] for name in names}


def _pictures(
    drawn: Sequence[tuple[str, Forest]], plans: Sequence[Plan], vocabulary: Vocabulary, thumbnails: Thumbnails
) -> tuple[list[dict[str, Any]], int]:
    """Pictures within `MAX_PAGE_CHARS`, large ones without tokens, and the number of trees left out."""
    bounds = np.concatenate([[0], np.cumsum([forest.num_tokens for _, forest in drawn])]).tolist()
    runs = [micro_batch_runs(each, bounds) for each in plans]
    pictures: list[dict[str, Any]] = []
    room = MAX_PAGE_CHARS
    for index, (name, forest) in enumerate(drawn):
        size = picture_size(forest, len(plans))
        with_tokens = size <= room
        if not with_tokens:
            size -= 4 * forest.num_tokens * 4 // 3
            if size > room:
                return pictures, len(drawn) - index
        room -= size
        runs_of_tree = [run[index] for run in runs]
        pictures.append(picture(name, forest, vocabulary, thumbnails, runs_of_tree, with_tokens=with_tokens))
    return pictures, 0


def _drawn_plan(plan: Plan, model: nn.Module | None, flops: FlopModel | None, model_name: str | None) -> DrawnPlan:
    timeline = np.array(plan.timeline, dtype=np.int64)
    is_thinned = len(timeline) > MAX_TIMELINE_POINTS
    if is_thinned:
        timeline = np.array([part.max(axis=0) for part in np.array_split(timeline, MAX_TIMELINE_POINTS)])
    batches = tuple(
        {"num_tokens": batch.num_tokens, "is_open": batch.is_open, "is_held": batch.is_held}
        for batch in plan.micro_batches
    )
    points = tuple((int(gateway), int(live)) for gateway, live in timeline.tolist())
    if model is None:
        return DrawnPlan(report_plan(plan), points, is_thinned, batches)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    report = report_plan(plan, flops, model_name, dtype, memory=partial(step_memory, model))
    return DrawnPlan(report, points, is_thinned, batches)
