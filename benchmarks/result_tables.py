"""Tables and plots of what `treewise bench` measured; `tables.py` puts them into reports/steps.md."""

from collections.abc import Iterator
from html import escape
from typing import Any

from treewise.bench.results import baselines_of, efficiency, is_ours, speed_of_tree

WIDTH, ROW, GAP = 720, 14, 10
# Paper and ink follow the reader's theme.
SVG_STYLE = (
    "<style>.paper{fill:#fff}.halo{stroke:#fff}svg{fill:#1c2430}"
    "@media(prefers-color-scheme:dark){.paper{fill:#1e2129}.halo{stroke:#1e2129}svg{fill:#e6e9ee}}</style>"
)
COLOURS = {"merged": "darkgray", "trl": "darkorange", "tree-recurrence": "darkorange", "tree": "steelblue"}
WINDOWS = ("no window", "window")  # contestants beside a trainer as it is
COLOURS_OF_OTHERS = {"no window": "darkgray"}
CASES = {
    **{f"grpo-{size}": f"TRL GRPO, batch size {size}" for size in (1, 2, 8)},
    "dpo-1": "TRL DPO, batch size 1",
    "calls-1": "Trainer, calls of an agent, batch size 1",
    "serve-group": "serve, one datum a call: a group of 8",
    "serve": "serve, one datum a call: 16 samples",
    "serve-episode": "serve, one datum a call: 8 turns",
    "serve-alone": "serve, nothing shared",
}
NAMES = {"merged": "merged flat", "trl": "TRL's tree rows", "tree": "treewise"}

Row = dict[str, Any]


def tables(record: dict[str, Any], *, with_costs: bool = True) -> str:
    """A table for each model: speed-ups of the contestants over flat training, and another of what they cost."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["model"] == model]
        measured = [row for row in rows if "contestants" in row]
        parts.append("\n".join([*_heading(model, rows), *_speeds(measured)]))
        parts.append("\n".join(_costs(measured) if with_costs else ()))
    return "\n\n".join(part for part in parts if part)


def short(record: dict[str, Any]) -> str:
    """A table for the README: a row for each tree, treewise whole."""
    lines = [
        "| tree | share ratio | leaf ratio | speed-up | FLOP bound | efficiency | over merged | over TRL's rows |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        if "contestants" not in row:
            continue
        flat, merged = baselines_of(row)
        over = {base: ratios.get("tree") for base, ratios in row["speed_up"].items()}
        share = efficiency(row, "tree")
        lines.append(
            f"| {row['workload']} | {row['share_ratio']:.1f} | {row['leaf_ratio']:.1f} | {_times(over.get(flat))} | "
            f"{row['flop_bound']:.1f} x | {_number(share)} | {_times(over.get(merged or flat))} | "
            f"{_times(over.get('trl'))} |"
        )
    return "\n".join(lines)


def _heading(model: str, rows: list[Row]) -> Iterator[str]:
    skipped = next((row["skipped"] for row in rows if "skipped" in row), None)
    dtypes = ", ".join(dict.fromkeys(_where(row) for row in rows if "dtype" in row))
    commands = ", ".join(dict.fromkeys(f"`{row['command']}`" for row in rows))
    yield f"**{model}**" + (f", {dtypes}" if dtypes else "") + (f": {skipped}" if skipped else "") + f" ({commands})"
    yield ""


def _where(row: Row) -> str:
    """On a GPU with the kernel of flat rows, without which a ratio says little."""
    kernel = f" (flat rows by {row['varlen_kernel']})" if row["device"] == "cuda" else ""
    return f"{row['dtype']} on {row['device']}{kernel}"


def _speeds(rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    yield (
        "| workload | tokens flat : tree | share, leaf ratio | FLOP bound, leaves | merged | TRL | tree "
        "| under budgets | efficiency of the fastest | the same over merged |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|"
    for row in rows:
        flat, merged = baselines_of(row)
        over = row["speed_up"].get(flat, {})
        budgets = ", ".join(f"{name.replace('tree@', '')} {ratio:.2f}" for name, ratio in over.items() if "@" in name)
        others = next((over[name] for name in ("trl", "tree-recurrence") if name in over), None)
        ours = [name for name in over if is_ours(name)]
        best = max(ours, key=lambda name: over[name], default="tree")
        share = efficiency(row, best)
        bounds = f"{row['flop_bound']:.2f}, {row['leaf_flop_bound']:.2f}"
        yield (
            f"| {row['workload']} | {row['flat_tokens']:,} : {row['tree_tokens']:,} | "
            f"{row['share_ratio']:.2f}, {row['leaf_ratio']:.2f} | {bounds} | "
            f"{_number(over.get(merged))} | {_number(others)} | {_number(over.get('tree'))} | {budgets} | "
            f"{'' if share is None else f'**{share:.2f}**'} | {_number(row['speed_up'].get(merged, {}).get(best))} |"
        )


def _costs(rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    yield (
        "| workload | contestant | seconds | flat tokens/s | of tree, bound | peak, MiB | gradient error "
        "| computed tokens | key rows | host, s |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        for name, found in row["contestants"].items():
            if "skipped" in found:
                yield f"| {row['workload']} | {name} | {found['skipped']} | | | | | | | |"
                continue
            seconds, peak = found["seconds"], found["peak_bytes"]
            error = found["gradient_error"]
            of_tree = (speed_of_tree(row, name), found.get("bound_of_tree"))
            yield (
                f"| {row['workload']} | {name} | {seconds['median']:.2f} | {found['flat_tokens_per_second']:,.0f} | "
                f"{', '.join(_number(each) for each in of_tree if each is not None)} | "
                f"{'' if peak is None else f'{peak / 2**20:,.0f}'} | {'' if error is None else f'{error:.0e}'} | "
                f"{found['computed_tokens']:,} | {_number(found['key_rows_per_token'])} | {found['host_seconds']:.3f} |"
            )


def plot(record: dict[str, Any]) -> str:
    """Speed-ups over flat as bars, and the FLOP bound as a mark: one group for each model and workload."""
    rows = [row for row in record["rows"] if "contestants" in row and baselines_of(row)[0]]
    one_model = len({row["model"] for row in rows}) == 1
    groups = [
        (row["workload"] if one_model else f"{row['model']}, {row['workload']}", _bars(row), row["flop_bound"])
        for row in rows
    ]
    return _bar_chart(groups, "times as fast as flat training; red: the FLOP bound") if groups else ""


def plot_windows(record: dict[str, Any]) -> str:
    """Speed-ups of trainers that accumulate, with a window and without, over the trainer as it is."""
    groups = []
    for row in record["rows"]:
        plain = row["seconds"]["plain"]["median"]
        bars = {name: plain / row["seconds"][name]["median"] for name in WINDOWS if name in row["seconds"]}
        groups.append((CASES[row["case"]], bars, row["flop_bound"]))
    return _bar_chart(groups, "times as fast as without treewise, of serve as without a window; red: the FLOP bound")


def of_windows(record: dict[str, Any]) -> str:
    """A table of steps whose micro-batches come one after the other, and of what parts of a served one take."""
    lines = [
        "| step | micro-batches | tokens flat : tree | as it is | no window | window | speed-up | FLOP bound "
        "| efficiency | gradients |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        seconds = [row["seconds"].get(name) for name in ("plain", "no window", "window")]
        shown = " | ".join("" if each is None else f"{each['median']:.2f} s" for each in seconds)
        lines.append(
            f"| {CASES[row['case']]} | {row['micro_batches']} | {row['flat_tokens']:,} : {row['tree_tokens']:,} | "
            f"{shown} | {row['speed_up']:.2f} x | {row['flop_bound']:.2f} | **{row['efficiency']:.2f}** | "
            f"{row['gradient_difference']:.0e} |"
        )
    for row in record["rows"]:
        if "products" in row:
            reached = row["efficiency"] / row["products"]
            told = f"products of its calls run at {row['products']:.2f} of the rate of whole rows'"
            lines += ["", f"{CASES[row['case']]}: {told}; **{reached:.2f}** of what they allow."]
        for key, what in (("of_step", "A step"), ("of_client", "The time of a client over HTTP")):
            if key in row:
                parts = ", ".join(f"{part} {share:.1%}" for part, share in row[key].items())
                lines += ["", f"{what}, {CASES[row['case']]}: {parts}."]
    return "\n".join(lines)


def _bar_chart(groups: list[tuple[str, dict[str, float], float]], caption: str) -> str:
    """Bars of several ratios for each label, and a mark: (label, ratios by name, mark)."""
    most = max(max(bound, *bars.values(), 1.0) for _, bars, bound in groups)
    labels = 12 + 6 * max(len(label) for label, _, _ in groups)
    scale = (WIDTH - labels - 110) / most
    parts, top = [], GAP
    for label, bars, bound in groups:
        height = ROW * len(bars)
        parts.append(f'<text x="{labels - 6}" y="{top + height / 2 + 4:.0f}" text-anchor="end">{escape(label)}</text>')
        x = labels + bound * scale
        parts.append(f'<path d="M{x:.1f} {top - 2}v{height + 2}" stroke="firebrick" stroke-width="2"/>')
        for number, (name, ratio) in enumerate(bars.items()):
            y = top + ROW * number
            colour = (COLOURS | COLOURS_OF_OTHERS).get(name, COLOURS["tree"])
            parts.append(
                f'<rect x="{labels}" y="{y}" width="{ratio * scale:.1f}" height="{ROW - 2}" fill="{colour}"/>'
                f'<text x="{labels + ratio * scale + 4:.1f}" y="{y + 10}" class="halo" stroke-width="3" '
                f'paint-order="stroke">{NAMES.get(name, name)} {ratio:.2f}</text>'
            )
        top += height + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 20}" font-family="sans-serif" '
        f'font-size="10">{SVG_STYLE}<rect width="100%" height="100%" class="paper"/>{"".join(parts)}'
        f'<text x="{labels}" y="{top + 12}">{caption}</text></svg>\n'
    )


def _bars(row: Row) -> dict[str, float]:
    flat, _ = baselines_of(row)
    over = row["speed_up"].get(flat, {})
    bars = {name: over[name] for name in COLOURS if name in over}
    ours = {name: ratio for name, ratio in over.items() if is_ours(name)}
    if ours and "tree" not in bars:  # it did not fit: the fastest that did
        bars[max(ours, key=lambda name: ours[name])] = max(ours.values())
    return bars


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} x"
