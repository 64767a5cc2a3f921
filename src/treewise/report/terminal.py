"""The same facts as terminal tables, drawn with rich. Nothing is printed here."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from treewise.errors import bytes_as_text, num
from treewise.planning.plans import Plan
from treewise.report.analysis.bill import EPISODES, Bill, cells, headline
from treewise.report.analysis.facts import Finding, InspectReport, TreeFacts
from treewise.report.analysis.plan_facts import USABLE, BudgetMemory, GpuFit, PlanReport
from treewise.report.analysis.run_log import RunReport

if TYPE_CHECKING:  # with torch, which takes seconds to import
    from treewise.report.analysis.mesh_facts import MeshReport
    from treewise.verification.report import VerificationReport

MAX_NAME = 32  # characters of a tree's name
NUM_COUNTS = 3  # columns of the best trees that are counts; ratios follow
MIN_NAME = 12  # fewer of them beside numbers are not shown
BEST_TREES = "best trees, by leaf ratio (ratios are flat / tree)"
MIN_LOGGED = 20  # fewer for the name of a logged value beside five numbers are not shown
MAX_PLACE = 300  # characters of an example of a finding: a group, or where a record stands and what is wrong with it


def inspect_view(
    report: InspectReport, lines: Sequence[str] = (), note: str = "", bill: Bill | None = None
) -> RenderableType:
    """The verdict, the ratios behind it, what the data holds, the best trees, what looks wrong, and the bill.

    lines: of the verdict. note: beside the counts.
    """
    parts: list[RenderableType] = [verdict_view(lines), _ratios_table(report), _counts_table(report)]
    if note:
        parts.append(Text(f"{note}\n"))
    parts.append(_BestTrees(report))
    if report.findings:
        parts.append(_findings_table(report.findings))
    if bill is not None:
        parts.append(bill_view(bill))
    return Group(*parts)


def bill_view(bill: Bill) -> RenderableType:
    """Three ways, for the data and for as many episodes as the bill is made out for; what was assumed."""
    return Group(_Ways(bill), Text(" ".join(bill.assumptions)))


class _Ways:
    """The ways of a bill as a table; a list where the terminal has no room for their names beside the numbers."""

    def __init__(self, bill: Bill) -> None:
        self.title = f"the bill: {headline(bill)}"
        self.parts = ((num(bill.num_episodes, "episode"), bill.ways), (f"{EPISODES:,} episodes", bill.per_episodes))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = list(cells(self.parts[0][1][0]))
        table = _table(self.title, "training once", *names)
        for heading, ways in self.parts:
            table.add_row(heading, *("" for _ in names), style="dim")
            for way in ways:
                table.add_row(f" {way.name}", *cells(way).values())
        unlimited = options.update(max_width=sys.maxsize)
        if Measurement.get(console, unlimited, table).maximum <= options.max_width:
            yield table
            return
        yield Text(self.title, style="italic")
        for heading, ways in self.parts:
            yield Text(f"\n{heading}", style="bold")
            for way in ways:
                numbers = ", ".join(f"{name} {cell}" for name, cell in cells(way).items())
                yield Padding(Text(f"{way.name}: {numbers}"), (0, 0, 0, 2), expand=False)
        yield Text()


def _ratios_table(report: InspectReport) -> Table:
    total, ratios = report.total, _facts_table("how much less the trees are")
    rows = flat_rows(total)
    if total.holds_merged_turns:
        ratios.add_row("of calls", f"{total.call_ratio:.2f}  tokens, one row per call / tree")
    ratios.add_row("share ratio", f"{total.share_ratio:.2f}  tokens, {rows} / tree")
    ratios.add_row("leaf ratio", f"{total.leaf_ratio:.2f}  tokens, turns merged / tree")
    if total.flop_bound is None or total.leaf_flop_bound is None:
        ratios.add_row("FLOP bound", "name a --model")
    else:
        if total.call_flop_bound is not None and total.holds_merged_turns:
            ratios.add_row("FLOP bound of calls", f"{total.call_flop_bound:.2f}  FLOPs, one row per call / tree")
        ratios.add_row("FLOP bound", escape(f"{total.flop_bound:.2f}  FLOPs of {report.model}, {rows} / tree"))
        ratios.add_row("leaf FLOP bound", f"{total.leaf_flop_bound:.2f}  FLOPs, turns merged / tree")
    ratios.add_row("pair ratio", f"{total.pair_ratio:.2f}  attention pairs, {rows} / tree")
    return ratios


def flat_rows(total: TreeFacts) -> str:
    """What trajectories are without trees."""
    return "rows as they are" if total.holds_merged_turns else "one row per call"


def _counts_table(report: InspectReport) -> Table:
    total, facts = report.total, _facts_table("what the data holds")
    facts.add_row("files, records", f"{report.num_files:,}, {report.num_records:,}")
    facts.add_row("trees", f"{len(report.trees):,}")
    facts.add_row("trajectories", f"{total.num_trajectories:,} ({total.num_leaves:,} not contained in another)")
    if total.holds_merged_turns:
        facts.add_row("calls in them", f"{total.num_calls:,}, whose turns are merged")
    facts.add_row("flat tokens", f"{total.num_flat_tokens:,} ({total.num_leaf_tokens:,} of those not contained)")
    facts.add_row("tree tokens", f"{total.num_tree_tokens:,} ({total.num_trained_tokens:,} trained)")
    if total.num_images:
        flat = f"{total.num_flat_image_tokens:,} flat, {total.num_images:,} distinct images in their trees"
        facts.add_row("of these, of images", f"{total.num_image_tokens:,} ({flat})")
    facts.add_row("longest path, forks", f"{total.max_depth:,} tokens, {total.num_forks:,} forks")
    return facts


def verdict_view(lines: Sequence[str]) -> RenderableType:
    """The lines of a verdict, the first of which says yes or no."""
    if not lines:
        return Group()
    first, *others = lines
    return Group(Text(first, style="bold"), *map(Text, others), "")


def short_name(name: str, limit: int = MAX_NAME) -> str:
    """A name shortened in its middle to `limit` columns, so that names with equal beginnings stay apart."""
    if cell_len(name) <= limit:
        return name
    head, tail = (limit - 1) // 3, limit - 1 - (limit - 1) // 3
    return f"{_beginning(name, head)}\u2026{_beginning(name[::-1], tail)[::-1]}"


def _beginning(text: str, limit: int) -> str:
    """As many characters as `limit` columns of a terminal hold; some take two, some none."""
    text = text[: 2 * limit]
    while cell_len(text) > limit:
        text = text[:-1]
    return text


class _BestTrees:
    """The best trees as a table; a list where the terminal has no room for names beside the numbers."""

    def __init__(self, report: InspectReport) -> None:
        self.names = [short_name(tree.name) for tree in report.best_trees]
        self.headings = ["trajectories", "flat tokens", "tree", "share", "leaf", "pair"]
        if report.total.flop_bound is not None:
            self.headings.append("FLOP bound")
        self.rows = [_numbers(tree) for tree in report.best_trees]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        longest = max(map(cell_len, self.names), default=0)
        unlimited = options.update(max_width=sys.maxsize)
        missing = Measurement.get(console, unlimited, self._table(self.names)).maximum - options.max_width
        room = longest - max(0, missing)
        if room >= min(longest, MIN_NAME):
            yield self._table([short_name(name, room) for name in self.names])
            return
        yield Text(BEST_TREES, style="italic")
        for name, row in zip(self.names, self.rows, strict=True):
            yield Text(f"\n{short_name(name, options.max_width)}", style="bold")
            cells = [f"{heading} {cell}" for heading, cell in zip(self.headings, row, strict=True)]
            for line in (cells[:NUM_COUNTS], cells[NUM_COUNTS:]):
                yield Padding(Text(", ".join(line)), (0, 0, 0, 2), expand=False)
        yield Text()

    def _table(self, names: Sequence[str]) -> Table:
        table = _table(BEST_TREES, "tree", *self.headings)
        for name, row in zip(names, self.rows, strict=True):
            table.add_row(escape(name), *row)
        return table


def _numbers(tree: TreeFacts) -> list[str]:
    ratios = [tree.share_ratio, tree.leaf_ratio, tree.pair_ratio]
    if tree.flop_bound is not None:
        ratios.append(tree.flop_bound)
    counts = (tree.num_trajectories, tree.num_flat_tokens, tree.num_tree_tokens)
    return [*(f"{count:,}" for count in counts), *(f"{ratio:.2f}" for ratio in ratios)]


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = _table("worth a look", "finding", "count")
    table.add_column("what it means, and where", overflow="fold")
    for finding in findings:
        places = "; ".join(short_name(example, MAX_PLACE) for example in finding.examples)
        places += "; ..." if finding.count > len(finding.examples) else ""
        table.add_row(finding.kind, f"{finding.count:,}", escape(f"{finding.meaning}: {places}"))
    return table


def plan_view(plan: Plan, report: PlanReport) -> RenderableType:
    """`plan.describe()`, and the predictions."""
    description = Text(plan.describe(report.bytes_per_gateway_token))
    if report.relative_time is None or report.relative_leaf_time is None:
        return Group(description, Text("name a --model for bytes and time", style="dim"))
    table = _facts_table(f"predicted for {report.model} in {report.dtype} (from shapes; not measured)")
    table.add_row("weights, gradients, optimizer", bytes_as_text(report.bytes_weights))
    live, read = f"{report.peak_live_tokens:,}", f"{report.peak_gateway_tokens:,}"
    if report.bytes_peak is None:
        table.add_row("peak memory", "--memory predicts it, in seconds")
    else:
        _add_memory(table, report, live, read)
    window, graphs = bytes_as_text(report.bytes_window), bytes_as_text(report.bytes_window_graphs)
    table.add_row("window, if rows come in calls", f"{window} kept, {graphs} of graphs and logits where these are held")
    table.add_row(
        "time / flat", f"{report.relative_time:.3f}  flat training needs {1 / report.relative_time:.2f} times the FLOPs"
    )
    leaf = f"{report.relative_leaf_time:.3f}  its leaves alone need {1 / report.relative_leaf_time:.2f} times"
    table.add_row("time / flat leaves", leaf)
    if report.relative_tree_time is not None and report.num_micro_batches > 1:
        more = f"the budget adds {report.relative_tree_time - 1:.1%} of FLOPs"
        table.add_row("time / one micro-batch", f"{report.relative_tree_time:.3f}  {more}")
    return Group(description, table)


def _add_memory(table: Table, report: PlanReport, live: str, read: str) -> None:
    table.add_row("activations", f"{bytes_as_text(report.bytes_activations)}, at most {live} live tokens")
    if report.bytes_images:
        table.add_row("images", f"{bytes_as_text(report.bytes_images)} of the tower's graph, kept beside them")
    table.add_row("gateways", f"{bytes_as_text(report.bytes_gateways)}, at most {read} tokens")
    table.add_row("logits, gradients between layers", bytes_as_text(report.bytes_others))
    if report.bytes_allocator:
        table.add_row("allocator of the CPU", bytes_as_text(report.bytes_allocator))
    table.add_row("peak memory", bytes_as_text(report.bytes_peak))


def budgets_view(budgets: Sequence[BudgetMemory]) -> RenderableType:
    """What each budget would cost."""
    has_memory = budgets[0].bytes_step is not None
    title = "peak of a step beside weights, gradients, optimizer" if has_memory else "budgets"
    table = _table(title, "budget", "micro-batches", "recomputed", *(["peak"] if has_memory else []))
    for each in budgets:
        budget = "none" if each.max_tokens is None else f"{each.max_tokens:,}"
        peak = [bytes_as_text(each.bytes_step)] if has_memory else []
        table.add_row(budget, f"{each.num_micro_batches:,}", f"{each.recomputed_share:.0%}", *peak)
    return table


def fit_view(fit: GpuFit) -> RenderableType:
    """Whether a step fits into one GPU, and what to do where it does not."""
    part, size = f"{USABLE:.0%} of {bytes_as_text(fit.gpu_bytes)}", bytes_as_text(fit.bytes_peak)
    if fit.fits:
        return Text(f"one GPU: {size} fit into {part}")
    if fit.bytes_weights > USABLE * fit.gpu_bytes:
        advice = (
            f"{bytes_as_text(fit.bytes_weights)} of it without any token: lora, an optim of 8 bits, or --mesh fsdp=N"
        )
    elif fit.max_tokens is not None:
        advice = f"it would at a budget of {fit.max_tokens:,}"
    else:
        advice = "lower --max_tokens, or activation_checkpointing"
    return Text(f"one GPU: {size} do not fit into {part}; {advice}", style="red")


def mesh_view(report: "MeshReport", live_tokens: int, gateway_tokens: int) -> RenderableType:
    """Memory of one process of a mesh, and whether a plan fits. live_tokens, gateway_tokens: the plan's peaks."""
    axes = ", ".join(f"{axis}={size}" for axis, size in report.mesh.items()) or "one process"
    table = _facts_table(f"each of {report.processes:,} processes, {axes} (from shapes; not measured)")
    table.add_row("weights", bytes_as_text(report.bytes_weights))
    table.add_row("gradients, optimizer", bytes_as_text(report.bytes_gradients + report.bytes_optimizer))
    table.add_row("gathered in a step", bytes_as_text(report.bytes_whole))
    activations = report.bytes_per_activation_token * live_tokens
    gateways = report.bytes_per_gateway_token * gateway_tokens
    table.add_row("activations", f"{bytes_as_text(activations)} for {live_tokens:,} live tokens")
    table.add_row("gateways", f"{bytes_as_text(gateways)} for {gateway_tokens:,} tokens")
    needed = report.bytes_static + activations + gateways
    table.add_row("peak memory", bytes_as_text(needed))
    if report.gpu_bytes is not None:
        usable = USABLE * report.gpu_bytes
        verdict = f"fits into {USABLE:.0%} of {bytes_as_text(report.gpu_bytes)}"
        if report.bytes_static > usable:
            verdict = f"does not fit: {bytes_as_text(report.bytes_static)} without any token; raise fsdp, tp or ep"
        elif needed > usable:
            verdict = f"does not fit: lower --max_tokens to {report.max_tokens:,} or less, or raise fsdp, tp or ep"
        table.add_row("verdict", verdict)
    return table


def run_view(report: RunReport) -> RenderableType:
    """What a run logged: first, best and last of each value."""
    state = "finished" if report.is_finished else "not finished"
    of = f"{report.num_steps:,} of " if report.max_steps else ""
    steps = f"{of}{num(report.max_steps or report.num_steps, 'optimizer step')}"
    note = Text(f"{steps}, {state}; from {report.log}")
    if report.num_not_finite:
        note.append(f"\n{report.num_not_finite:,} logged values are not finite numbers", style="red")
    return Group(_Logged(report), note)


class _Logged:
    """What a run logged as a table; of each value the first and the last where there is no room for names beside
    all."""

    def __init__(self, report: RunReport) -> None:
        self.title, self.rows = escape(f"run {report.folder}"), list[tuple[str, dict[str, str]]]()
        for each in report.series:
            values = {"first": each.values[0], "lowest": min(each.values), "highest": max(each.values)}
            numbers = {name: f"{value:,.5g}" for name, value in (values | {"last": each.values[-1]}).items()}
            label = f"{each.label}, {each.unit}" if each.unit else each.label
            name = label if each.chart == each.label else f"{each.chart}: {label}"
            self.rows.append((escape(name), {"times": f"{len(each.values):,}"} | numbers))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=sys.maxsize)
        all_columns = ("times", "first", "lowest", "highest", "last")
        needed = Measurement.get(console, unlimited, self._table(all_columns, with_names=False)).maximum
        has_room = options.max_width - needed >= MIN_LOGGED
        yield self._table(all_columns if has_room else ("first", "last"), with_names=True)

    def _table(self, columns: Sequence[str], *, with_names: bool) -> Table:
        table = _table(self.title if with_names else "", "logged" if with_names else "", *columns)
        for name, numbers in self.rows:
            table.add_row(name if with_names else "", *(numbers[column] for column in columns))
        return table


def verification_view(report: "VerificationReport") -> RenderableType:
    """`report.describe()`, with the verdict and errors beyond their limits in colour."""
    text = Text(report.describe())
    text.highlight_words(["flat and tree: equal"], style="green")
    text.highlight_words(["flat and tree: DIFFERENT", *report.failures], style="bold red")
    return text


def _table(title: str, first: str, *numbers: str) -> Table:
    """A table whose columns but the first hold numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _facts_table(title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table
