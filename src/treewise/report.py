"""What people look at: facts about data, plans and verifications, each as a terminal table and as a JSON twin.

Every report is a frozen dataclass of plain numbers; `to_dict()` is its twin under stable names, and a `*_view` function
draws the same numbers with rich. Nothing is printed here.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from treewise.data import LoadReport
from treewise.flops import FlopModel, leaf_trajectories
from treewise.forest import Forest
from treewise.planner import Plan
from treewise.verified import VerificationReport

VERY_SHORT = 16  # tokens
LITTLE_SHARING = 1.05  # share ratio
NUM_BEST_TREES = 5
NUM_EXAMPLES = 3
ADAMW_VALUES = 2  # moments kept per trained parameter


# -- inspect ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """Sizes of one training tree, or sums over several. FLOPs are None where no model was named."""

    name: str
    num_trajectories: int
    num_leaves: int
    num_flat_tokens: int
    num_leaf_tokens: int
    num_tree_tokens: int
    num_trained_tokens: int
    num_flat_pairs: int
    num_tree_pairs: int
    max_depth: int
    num_forks: int
    flat_flops: float | None = None
    leaf_flops: float | None = None
    tree_flops: float | None = None

    @property
    def share_ratio(self) -> float:
        return self.num_flat_tokens / self.num_tree_tokens

    @property
    def leaf_ratio(self) -> float:
        return self.num_leaf_tokens / self.num_tree_tokens

    @property
    def pair_ratio(self) -> float:
        return self.num_flat_pairs / self.num_tree_pairs

    @property
    def flop_bound(self) -> float | None:
        return _quotient(self.flat_flops, self.tree_flops)

    @property
    def leaf_flop_bound(self) -> float | None:
        return _quotient(self.leaf_flops, self.tree_flops)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, ratios included."""
        ratios = ("share_ratio", "leaf_ratio", "pair_ratio", "flop_bound", "leaf_flop_bound")
        return asdict(self) | {name: getattr(self, name) for name in ratios}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in the data that is likely a mistake or a waste: how often, and where first."""

    kind: str
    count: int
    meaning: str
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InspectReport:
    """What a load of data holds. `total` sums the trees, each merged on its own; `trees` are in file order."""

    model: str | None
    num_files: int
    num_records: int
    total: TreeFacts
    trees: tuple[TreeFacts, ...]
    findings: tuple[Finding, ...]

    @property
    def best_trees(self) -> list[TreeFacts]:
        """The trees of the highest leaf ratio."""
        return sorted(self.trees, key=lambda tree: -tree.leaf_ratio)[:NUM_BEST_TREES]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        return {
            "model": self.model,
            "num_files": self.num_files,
            "num_records": self.num_records,
            "num_trees": len(self.trees),
            "total": self.total.to_dict(),
            "best_trees": [tree.name for tree in self.best_trees],
            "trees": [tree.to_dict() for tree in self.trees],
            "findings": [asdict(finding) | {"examples": list(finding.examples)} for finding in self.findings],
        }


def inspect_forests(
    forests: Iterable[tuple[str, Forest]],
    load: LoadReport,
    flops: FlopModel | None = None,
    model: str | None = None,
    max_tokens: int | None = None,
) -> InspectReport:
    """Facts about named trees; one forest is alive at a time."""
    facts: list[TreeFacts] = []
    noted: dict[str, list[str]] = defaultdict(list)
    for name, forest in forests:
        tree = tree_facts(name, forest, flops)
        facts.append(tree)
        for kind, places in _suspicions(tree, forest, max_tokens).items():
            noted[kind] += places
    noted["retokenised or unusual"] = list(load.warnings)
    noted["dropped record"] = [f"{place}: {reason}" for place, reason in load.dropped]
    findings = tuple(
        Finding(kind, len(noted[kind]), meaning, tuple(noted[kind][:NUM_EXAMPLES]))
        for kind, meaning in MEANINGS.items()
        if noted[kind]
    )
    return InspectReport(model, load.num_files, load.num_records, sum_facts("all", facts), tuple(facts), findings)


def tree_facts(name: str, forest: Forest, flops: FlopModel | None = None) -> TreeFacts:
    """Sizes of one tree, and its FLOPs for a model."""
    above = forest.segments.parent
    return TreeFacts(
        name=name,
        num_trajectories=forest.num_trajectories,
        num_leaves=len(leaf_trajectories(forest)),
        num_flat_tokens=forest.num_flat_tokens,
        num_leaf_tokens=forest.num_leaf_tokens,
        num_tree_tokens=forest.num_tokens,
        num_trained_tokens=int(np.count_nonzero(forest.token_weights())),
        num_flat_pairs=forest.num_flat_pairs,
        num_tree_pairs=forest.num_tree_pairs,
        max_depth=int(forest.path_lengths.max()),
        num_forks=int((np.bincount(above[above >= 0]) > 1).sum()),
        flat_flops=flops.flat(forest) if flops else None,
        leaf_flops=flops.leaf(forest) if flops else None,
        tree_flops=flops.tree(forest) if flops else None,
    )


def sum_facts(name: str, facts: Sequence[TreeFacts]) -> TreeFacts:
    """The sum over trees; the depth is the largest."""
    values = [asdict(tree) for tree in facts]
    sums: dict[str, Any] = {"name": name, "max_depth": max(tree.max_depth for tree in facts)}
    for key in values[0]:
        if key not in sums:
            column = [value[key] for value in values]
            sums[key] = None if None in column else sum(column)
    return TreeFacts(**sums)


MEANINGS = {
    "dropped record": "left out of training",
    "retokenised or unusual": "read with a warning",
    "rewards all equal": "group-relative advantages are zero, so reinforcement learning learns nothing from it",
    "duplicated trajectory": "the same tokens as an earlier one; counts again in the loss, costs nothing",
    "very short trajectory": f"fewer than {VERY_SHORT} tokens",
    "no sharing": f"several trajectories, share ratio below {LITTLE_SHARING}; check that they share their prompt",
    "single trajectory": "a tree of one, which trains as fast as flat",
    "beyond max_tokens": "larger than one micro-batch: cut, with gateways",
}


def _suspicions(tree: TreeFacts, forest: Forest, max_tokens: int | None) -> dict[str, list[str]]:
    """Places by kind of finding."""
    places = _places(tree.name, forest)
    _, first = np.unique(forest.segments.end_segment, return_index=True)
    repeated = np.setdiff1d(np.arange(forest.num_trajectories), first)
    single = tree.num_trajectories == 1
    return {
        "rewards all equal": _equal_rewards(tree.name, forest),
        "duplicated trajectory": [places[index] for index in repeated],
        "very short trajectory": [places[index] for index in np.flatnonzero(forest.path_lengths < VERY_SHORT)],
        "no sharing": [tree.name] if not single and tree.share_ratio < LITTLE_SHARING else [],
        "single trajectory": [tree.name] if single else [],
        "beyond max_tokens": [tree.name] if max_tokens is not None and tree.num_tree_tokens > max_tokens else [],
    }


def _places(name: str, forest: Forest) -> list[str]:
    if forest.trajectories is None:
        return [f"{name}: trajectory {index}" for index in range(forest.num_trajectories)]
    return [item.source or f"{name}: trajectory {index}" for index, item in enumerate(forest.trajectories)]


def _equal_rewards(name: str, forest: Forest) -> list[str]:
    """Groups of at least two rollouts whose rewards are all the same."""
    rewards: dict[Any, dict[Any, float]] = defaultdict(dict)
    for index, item in enumerate(forest.trajectories or ()):
        if item.reward is not None:
            rollout = index if item.rollout is None else item.rollout
            rewards[name if item.group is None else item.group][rollout] = item.reward
    return [str(group) for group, each in rewards.items() if len(each) > 1 and len(set(each.values())) == 1]


def inspect_view(report: InspectReport) -> RenderableType:
    """Totals, the best trees, and what looks wrong."""
    total = report.total
    facts = _facts_table("what the data holds")
    facts.add_row("files, records", f"{report.num_files:,}, {report.num_records:,}")
    facts.add_row("trees", f"{len(report.trees):,}")
    facts.add_row("trajectories", f"{total.num_trajectories:,} ({total.num_leaves:,} not contained in another)")
    facts.add_row("flat tokens", f"{total.num_flat_tokens:,} ({total.num_leaf_tokens:,} of those not contained)")
    facts.add_row("tree tokens", f"{total.num_tree_tokens:,} ({total.num_trained_tokens:,} trained)")
    facts.add_row("share ratio", f"{total.share_ratio:.2f}  every trajectory alone / tree")
    facts.add_row("leaf ratio", f"{total.leaf_ratio:.2f}  those not contained in another / tree")
    facts.add_row("pair ratio", f"{total.pair_ratio:.2f}  attention pairs, flat / tree")
    if total.flop_bound is not None and total.leaf_flop_bound is not None:
        bound = f"{total.flop_bound:.2f}, against leaves {total.leaf_flop_bound:.2f}  for {report.model}"
        facts.add_row("FLOP bound", escape(bound))
    facts.add_row("longest path, forks", f"{total.max_depth:,} tokens, {total.num_forks:,} forks")
    parts: list[RenderableType] = [facts, _best_trees_table(report)]
    if report.findings:
        parts.append(_findings_table(report.findings))
    return Group(*parts)


def _best_trees_table(report: InspectReport) -> Table:
    table = Table(title="best trees, by leaf ratio (ratios are flat / tree)", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("tree", overflow="ellipsis", max_width=32)
    names = ["trajectories", "flat tokens", "tree", "share", "leaf", "pair"]
    with_bound = report.total.flop_bound is not None
    for name in names + (["FLOPs"] if with_bound else []):
        table.add_column(name, justify="right", no_wrap=True)
    for tree in report.best_trees:
        counts = (tree.num_trajectories, tree.num_flat_tokens, tree.num_tree_tokens)
        ratios = [tree.share_ratio, tree.leaf_ratio, tree.pair_ratio]
        if tree.flop_bound is not None:
            ratios.append(tree.flop_bound)
        table.add_row(escape(tree.name), *(f"{count:,}" for count in counts), *(f"{ratio:.2f}" for ratio in ratios))
    return table


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table(title="worth a look", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("finding")
    table.add_column("count", justify="right")
    table.add_column("what it means, and where", overflow="fold")
    for finding in findings:
        places = "; ".join(finding.examples) + ("; ..." if finding.count > len(finding.examples) else "")
        table.add_row(finding.kind, f"{finding.count:,}", escape(f"{finding.meaning}: {places}"))
    return table


# -- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan, and what it should cost on a model. Bytes and times are predictions from shapes, not measurements.

    relative_time: FLOPs of the plan / FLOPs of flat training. bytes_*: of the model's dtype, gradients of gateways in
    float32; bytes_peak adds weights, gradients, AdamW's moments, one micro-batch with what is held, and the
    gateways.
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
    bytes_gateways: int | None = None
    bytes_peak: int | None = None
    relative_time: float | None = None
    relative_leaf_time: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        return asdict(self)


def report_plan(
    plan: Plan, flops: FlopModel | None = None, model: str | None = None, dtype: str = "float32"
) -> PlanReport:
    """Facts of a plan, with predictions where a model is known."""
    live = max(tokens for _, tokens in plan.timeline)
    predictions: dict[str, Any] = {}
    if flops is not None:
        width = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[dtype]
        per_token = flops.gateway_values * (width + max(4, width))
        trained = flops.num_trained_parameters * (1 + ADAMW_VALUES)
        weights = width * (flops.num_parameters + trained)
        activations, gateways = width * flops.activation_values * live, per_token * plan.peak_gateway_tokens
        predictions = {
            "model": model,
            "dtype": dtype,
            "bytes_per_gateway_token": per_token,
            "bytes_weights": weights,
            "bytes_activations": activations,
            "bytes_gateways": gateways,
            "bytes_peak": weights + activations + gateways,
            "relative_time": flops.planned(plan) / flops.flat(plan.forest),
            "relative_leaf_time": flops.planned(plan) / flops.leaf(plan.forest),
        }
    return PlanReport(
        max_tokens=plan.max_tokens,
        num_trees=plan.forest.num_trees,
        num_flat_tokens=plan.forest.num_flat_tokens,
        num_tree_tokens=plan.forest.num_tokens,
        num_micro_batches=plan.num_micro_batches,
        num_open_tokens=plan.num_open_tokens,
        num_held_tokens=plan.num_held_tokens,
        num_recomputed_tokens=plan.num_recomputed_tokens,
        num_computed_tokens=plan.num_computed_tokens,
        peak_live_tokens=live,
        peak_gateway_tokens=plan.peak_gateway_tokens,
        **predictions,
    )


def plan_view(plan: Plan, report: PlanReport) -> RenderableType:
    """`plan.describe()`, and the predictions."""
    description = Text(plan.describe(report.bytes_per_gateway_token))
    if report.relative_time is None or report.relative_leaf_time is None:
        return Group(description, Text("name a --model for bytes and time", style="dim"))
    table = _facts_table(f"predicted for {report.model} in {report.dtype} (from shapes; not measured)")
    table.add_row("weights, gradients, AdamW", _size(report.bytes_weights))
    table.add_row("activations", f"{_size(report.bytes_activations)} for {report.peak_live_tokens:,} live tokens")
    table.add_row("gateways", f"{_size(report.bytes_gateways)} for {report.peak_gateway_tokens:,} tokens")
    table.add_row("peak memory", _size(report.bytes_peak))
    table.add_row("time / flat", f"{report.relative_time:.3f}  {1 / report.relative_time:.2f} times faster by FLOPs")
    leaf = f"{report.relative_leaf_time:.3f}  {1 / report.relative_leaf_time:.2f} times faster by FLOPs"
    table.add_row("time / flat leaves", leaf)
    return Group(description, table)


# -- verify -----------------------------------------------------------------------------------------------------------


def verification_view(report: VerificationReport, num_parameters: int = 5) -> RenderableType:
    """The proof of equality: each error beside its limit, and the worst parameters."""
    verdict = "[green]equal[/]" if report.passed else "[bold red]DIFFERENT[/]"
    budget = "whole trees" if report.max_tokens is None else f"max_tokens {report.max_tokens:,}"
    setting = f"{report.model}, {report.dtype}, attention {report.attention}, {budget}"
    table = Table(title=f"flat and tree: {verdict}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "flat", "tree", "error", "limit"):
        table.add_column(name, justify="left" if not name else "right")
    limits = report.limits

    def row(label: str, name: str, flat: str = "", tree: str = "") -> None:
        error = report.errors[name]
        limit = f"{limits[name]:.1e}" if name in limits else ""
        style = "red" if name in limits and not error <= limits[name] else ""
        table.add_row(escape(label), flat, tree, Text(f"{error:.1e}", style=style), limit)

    row("loss", "loss", f"{report.loss_flat:.7f}", f"{report.loss_tree:.7f}")
    row("log-probs, largest difference", "max_logprob")
    row("log-probs, root mean square", "rms_logprob")
    row("whole gradient, relative", "gradient", f"norm {report.gradient_norm:.4g}")
    row("worst parameter, relative", "worst_parameter")
    flat_seconds, tree_seconds = f"{report.seconds_flat:.2f} s", f"{report.seconds_tree:.2f} s"
    table.add_row("tokens computed", f"{report.num_flat_tokens:,}", f"{report.num_computed_tokens:,}")
    table.add_row("one run each", flat_seconds, tree_seconds, f"{report.speed_up:.2f} x")
    note = Text(
        f"{setting}\n"
        f"{report.num_trajectories:,} trajectories, {report.num_trees:,} trees; reference: {report.reference}\n"
        f"worst parameter: {report.worst_parameter.name}\n"
        f"one run each, of {report.flop_bound:.2f} x by FLOPs: the flat side computes the logits of all its rows"
    )
    parts: list[RenderableType] = [table, note]
    if not report.passed:
        parts.append(_parameters_table(report, num_parameters))
    return Group(*parts)


def _parameters_table(report: VerificationReport, count: int) -> Table:
    table = Table(title="worst parameters", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("parameter")
    table.add_column("norm of its gradient", justify="right")
    table.add_column("relative error", justify="right")
    for parameter in report.parameters[:count]:
        table.add_row(escape(parameter.name), f"{parameter.norm:.3e}", f"{parameter.error:.3e}")
    return table


# -- shared -----------------------------------------------------------------------------------------------------------


def _facts_table(title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _size(num_bytes: int | None) -> str:
    value = float(num_bytes or 0)
    return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"
