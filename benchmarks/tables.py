"""Writes the tables of docs and reports, and two pictures, from the committed results.

python benchmarks/tables.py
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import claims_table
import result_tables

ROOT = Path(__file__).parent.parent
RESULTS, REPORTS = Path(__file__).parent / "results", Path(__file__).parent / "reports"
CLAIMS = ("claims-", "grow-wide")  # results that reports/claims.md shows
AGAIN = "bench-avx2-"  # results of trees that another file has, too: their speed-ups alone are shown
PALETTE = ("steelblue", "darkorange", "seagreen", "firebrick", "slategray")

PROOFS = {"sft": "fine-tuning", "rl": "online RL", "turns": "online RL, several turns"}  # parts of `make proof`

Records = list[tuple[Path, dict[str, Any]]]


def main() -> None:
    page = REPORTS / "steps.md"
    memory = _records("memory")
    of_memory, of_rounding = REPORTS / "memory.md", REPORTS / "precision.md"
    _fill(of_memory, "memory", "\n\n".join(_memory(path, record) for path, record in memory))
    of_branching = REPORTS / "branching.md"
    real = [each for each in _records("treewise bench") if each[0].name.startswith("real-")]
    _fill(ROOT / "docs" / "results.md", "steps", "\n\n".join(_short(*each) for each in real))
    balance = [_balance(path, record) for path, record in _records("balance")]
    _fill(REPORTS / "balance.md", "balance", "\n\n".join(balance))
    _benches()
    others = {
        "memory-large": (of_memory, _large_memory),
        "first-steps": (of_memory, _first_steps),
        "trl-float32": (page, _trl),
        "serve": (page, _serve),
        "precision": (of_rounding, _precision),
        "proof": (ROOT / "docs" / "proof.md", _proof),
        "gradients": (of_branching, _gradients),
        "learning": (of_branching, _learning),
        "learning-model": (of_branching, _learning),
    }
    for name, (where, table) in others.items():
        found = _records(name)
        if found:
            _fill(where, name, "\n\n".join(f"{_source(*each)}:\n\n{table(each[1])}" for each in found))
    _fill(ROOT / "docs" / "gpu.md", "fits", _fits(json.loads((RESULTS / "fits.json").read_text())))
    of_claims = {record["benchmark"]: record for path, record in _all() if path.stem.startswith(CLAIMS)}
    if of_claims:
        _fill(REPORTS / "claims.md", "claims", claims_table.claims(of_claims))
    windows = [each for each in _records("windows") if each[1]["rows"]]
    if windows:
        tables = [f"{_source(*each)}:\n\n{result_tables.of_windows(each[1])}" for each in windows]
        _fill(page, "windows", "\n\n".join(tables))
    for name, marker, table in (
        ("claims-values", "labels", claims_table.labels),
        ("claims-angles", "angles", claims_table.angles),
    ):
        if name in of_claims:
            _fill(REPORTS / "claims.md", marker, table(of_claims[name]))
    pictures = [("memory.svg", memory, _plot), ("proof.svg", _records("proof"), _curves)]
    pictures.append(("windows.svg", windows, result_tables.plot_windows))
    for file, found, plot in pictures:
        if found:
            (ROOT / "docs" / file).write_text(plot(found[0][1]))


def _records(benchmark: str) -> Records:
    """Files and contents of one benchmark."""
    return [each for each in _all() if each[1].get("benchmark") == benchmark]  # what tests write names none


def _all() -> Records:
    return [(path, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]


def _source(path: Path, record: dict[str, Any]) -> str:
    return f"{_title(record)} ([{path.name}](../benchmarks/results/{path.name}))"


def _benches() -> None:
    """What `treewise bench` wrote, whatever the name of the file: of GPUs on a page of their own."""
    parts: dict[str, list[str]] = {"steps": [], "gpu": []}
    for path, record in sorted(_records("treewise bench"), key=lambda each: each[0].name.startswith(AGAIN)):
        is_again = path.name.startswith(AGAIN)
        picture = "" if is_again else result_tables.plot(record)
        if picture:
            (ROOT / "docs" / f"{path.stem}.svg").write_text(picture)
        image = f"![speed-ups over flat training](../../docs/{path.stem}.svg)\n\n" if picture else ""
        patched = f" Patched: {record['patched']}." if "patched" in record else ""
        source = f"{_source(path, record)}:{patched}"
        page = "gpu" if any(row.get("device") == "cuda" for row in record["rows"]) else "steps"
        parts[page].append(f"{source}\n\n{image}{result_tables.tables(record, with_costs=not is_again)}")
    for page, found in parts.items():
        if found:
            _fill(REPORTS / f"{page}.md", "bench", "\n\n".join(found))


def _short(path: Path, record: dict[str, Any]) -> str:
    heading = f"{_title(record)} ([{path.name}](../benchmarks/results/{path.name})):"
    return f"{heading}\n\n{result_tables.short(record)}"


def _fits(record: dict[str, Any]) -> str:
    """The largest budget that fits, without gradient checkpointing and with it, by model, what is trained, and GPU."""
    places = list(dict.fromkeys(row["gib"] for row in record["rows"]))
    places.sort(key=lambda place: isinstance(place, str))
    lines = [
        f"| model | trained | {' | '.join(f'{place} GiB' for place in places)} |",
        f"|---|---|{'---|' * len(places)}",
    ]
    by = {(row["model"], row["trained"], row["gib"], row["checkpointing"]): row["max_tokens"] for row in record["rows"]}
    for model, trained in dict.fromkeys((row["model"], row["trained"]) for row in record["rows"]):
        cells = []
        for place in places:
            found = [by.get((model, trained, place, each), "") for each in (False, True)]
            shown = ["-" if each is None else each and f"{each:,}" for each in found]
            cells.append(", ".join(filter(None, shown)))
        lines.append(f"| {model} | {trained} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _large_memory(record: dict[str, Any]) -> str:
    """A long path with branches under a budget, beside a flat step of as many tokens as the budget."""
    lines = ["| step | tokens | budget | micro-batches | computed tokens | gateways, MiB | peak, MiB |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for row in record["rows"]:
        counts = [row.get(name) for name in ("max_tokens", "num_micro_batches", "computed_tokens", "gateway_mib")]
        cells = " | ".join("" if each is None else f"{each:,}" for each in counts)
        lines.append(f"| {row['tree']} | {row['tree_tokens']:,} | {cells} | {row['peak_mib']:,} |")
    return "\n".join(lines)


WHOLE = ("chain", "decisive")  # settings with a table of their own
CELLS = (("none", "leave one out"), ("random", "leave one out"), ("random", "TreePO"), ("turns", "TreePO"))
CELLS += (("entropy", "TreePO"), ("lcr", "TreePO"), ("lcr, candidates", "TreePO"), ("random", "siblings"))


def _gradients(record: dict[str, Any]) -> str:
    """Errors of an update by branching and credit; a star where the mean points elsewhere."""
    cells = [row for row in record["rows"] if "credit" in row]
    parts = []
    for setting in WHOLE:
        own = [row for row in cells if row["setting"] == setting]
        credits = list(dict.fromkeys(row["credit"] for row in own))
        lines = [f"| {setting} | rollouts | {' | '.join(credits)} |", f"|---|---:|{'---:|' * len(credits)}"]
        for branching in dict.fromkeys(row["branching"] for row in own):
            by_credit = {row["credit"]: row for row in own if row["branching"] == branching}
            texts = [_starred(by_credit.get(credit)) for credit in credits]
            rollouts = next(iter(by_credit.values())).get("rollouts", "")
            lines.append(f"| {branching} | {rollouts} | {' | '.join(texts)} |")
        parts.append("\n".join([f"{own[0]['repetitions']:,} trees of each cell:", "", *lines]))
    found = {(row["setting"], row["branching"], row["credit"]): row for row in cells}
    lines = [f"| | {' | '.join(', '.join(cell) for cell in CELLS)} |", f"|---|{'---:|' * len(CELLS)}"]
    for setting in dict.fromkeys(row["setting"] for row in cells if row["setting"] not in WHOLE):
        lines.append(f"| {setting} | {' | '.join(_starred(found.get((setting, *cell))) for cell in CELLS)} |")
    return "\n\n".join([*parts, "\n".join(["Other settings, 300 trees of each cell:", "", *lines])])


def _starred(row: dict[str, Any] | None) -> str:
    return f"{row['error'][0]:.2f}{'*' * row['is_biased']}" if row else ""


def _proof(record: dict[str, Any]) -> str:
    """Each trainer over its seeds; a table for SFT, and one for each task of RL with where its seconds go."""
    parts = []
    for part, title in PROOFS.items():
        rows = [row for row in record["rows"] if row["part"] == part]
        best = {row["seed"]: row["seconds"] for row in rows if row["trainer"] == "treewise"}
        timed = [
            name for name in ("sampling", "scoring", "update") if rows and name in rows[0].get("seconds_of_a_step", {})
        ]
        of_step = "".join(f" {name}, s |" for name in timed) or " farthest from treewise, nats |"
        lines = [
            f"| {title} | seeds | minutes | over those of treewise | held out, first and last |{of_step} peak, MiB |"
        ]
        lines.append(f"|---{'|---:' * 3}|---{'|---:' * (len(timed or [1]) + 1)}|")
        curves = {row["seed"]: row["curve"] for row in rows if row["trainer"] == "treewise"}
        for label in dict.fromkeys(row["label"] for row in rows):
            own = [row for row in rows if row["label"] == label]
            ratios = [row["seconds"] / best[row["seed"]] for row in own if row["seed"] in best]
            spread = f" ({min(ratios):.1f} to {max(ratios):.1f})" if len(set(ratios)) > 1 else ""
            ratio = f"{median(ratios):.2f} x{spread}" if ratios else ""
            ends = " to ".join(f"{sum(row['curve'][at][2] for row in own) / len(own):.3f}" for at in (0, -1))
            of_steps = [row["seconds_of_a_step"] for row in own] if timed else []
            seconds = [[each[name]["median"] for each in of_steps if name in each] for name in timed]
            cells = "".join(f" {median(each):.2f} |" if each else " |" for each in seconds)
            if not timed:
                pairs = [zip(row["curve"], curves[row["seed"]], strict=True) for row in own if row["seed"] in curves]
                cells = f" {max(abs(a[2] - b[2]) for each in pairs for a, b in each):.1e} |"
            minutes = median(row["seconds"] for row in own) / 60
            peak = max(row["peak_mib"] for row in own)
            lines.append(f"| {label} | {len(own)} | {minutes:.1f} | {ratio} | {ends} |{cells} {peak:,} |")
        if rows:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _learning(record: dict[str, Any]) -> str:
    """Tokens to the goal, of each arm under each optimizer; of language models seconds, too."""
    parts = []
    rows = [row for row in record["rows"] if "seeds" in row]  # and none of the runs
    for model in dict.fromkeys(row.get("model") for row in rows):
        own = [row for row in rows if row.get("model") == model]
        timed = "" if model is None else " seconds, over them | reached |"
        lines = [f"| steps | branching | credit | updates | tokens | over independent samples | detectable |{timed}"]
        lines.append(f"|---|---|---|{'---:|' * (4 + timed.count('|'))}")
        for row in own:
            is_base = (row["branching"], row["credit"]) == ("none", "group z-score")
            least = min(row.get("tokens_detectable", 1), 1 - 1 / row["updates"])  # runs end after whole updates
            seen = f"{least:.2f}" if "tokens_detectable" in row else ""
            compared = "| | |" if is_base else f"| {_ratio(row, 'tokens')} | {seen} |"
            more = (
                f"{'' if is_base else _ratio(row, 'seconds')} | {row['reached']} of {row['seeds']} |" if timed else ""
            )
            facts = (row["optimizer"], row["branching"], row["credit"], f"{row['updates']:g}", f"{row['tokens']:,.0f}")
            lines.append(f"| {' | '.join(facts)} {compared} {more}".rstrip())
        head = f"{own[0]['seeds']} seeds" if model is None else f"`--model {model}`, {own[0]['seeds']} seeds"
        parts.append("\n".join([f"{head}:", "", *lines]))
    return "\n\n".join(parts)


def _ratio(row: dict[str, Any], name: str) -> str:
    """A paired ratio and its interval; nothing where a run did not reach the goal."""
    if f"{name}_ratio" not in row:
        return ""
    mean, low, high = row[f"{name}_ratio"]
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def _first_steps(record: dict[str, Any]) -> str:
    """Medians over the runs with memory kept, and over those with memory returned to the system."""
    lines = [
        "| freed memory | steps 1, 2, 3 over the later ones | later step, s | page faults of a later step | peak, MiB |"
    ]
    lines.append("|---|---|---:|---:|---:|")
    for memory in dict.fromkeys(row["memory"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["memory"] == memory]
        ratios = [median(each) for each in zip(*(row["first_over_later"] for row in rows), strict=True)]
        faults = median(median(row["page_faults"][len(ratios) :]) for row in rows)
        later, peak = (median(row[name] for row in rows) for name in ("later_seconds", "peak_mib"))
        lines.append(
            f"| {memory} | {', '.join(f'{each:.2f}' for each in ratios)} | {later:.2f} | {faults:,.0f} | {peak:,.0f} |"
        )
    return "\n".join(lines)


def _trl(record: dict[str, Any]) -> str:
    """An update of TRL's trainers as they are, and with `share_prefixes`."""
    lines = ["| update | tokens padded, flat, tree | TRL, s | shared, s | half, s | speed-up | bound | efficiency |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in record["rows"]:
        tokens = f"{row['padded_tokens']:,}, {row['flat_tokens']:,}, {row['tree_tokens']:,}"
        seconds = " | ".join(f"{row['seconds'][name]['median']:.2f}" for name in ("trl", "shared", "half"))
        ratios = f"{row['speed_up']:.2f} | {row['flop_bound']:.2f} | **{row['efficiency']:.2f}**"
        lines.append(f"| {row['case']} | {tokens} | {seconds} | {ratios} |")
    return "\n".join(lines)


def _serve(record: dict[str, Any]) -> str:
    """Forward and backward of a served call beside the rows one by one."""
    *workloads, http = record["rows"]
    lines = ["| workload | flat tokens | tree tokens | FLOP bound | shared | `--share none` | plain PEFT loop |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for row in workloads:
        ratios = " | ".join(f"{row['ratios'][name]:.2f}x as long" for name in ("not shared", "plain"))
        cells = f"{row['flat_tokens']:,} | {row['tree_tokens']:,} | {row['flop_bound']:.2f}"
        lines.append(f"| {row['workload']} | {cells} | {median(row['seconds']['shared']):.2f} s | {ratios} |")
    share = (
        f"{http['overhead_cpu']:.1%} of the CPU time of a step, {http['overhead']:.1%} of its {http['seconds']:.2f} s"
    )
    return "\n".join([*lines, "", f"HTTP, serialisation and the SDK itself: {share}."])


def _precision(record: dict[str, Any]) -> str:
    """Deviations of bfloat16 gradients from float32 flat training."""
    names = [name for name in record["rows"][-1] if name not in ("model", "tree")]
    lines = [f"| model | tree | {' | '.join(name.replace('_', ' ') for name in names)} |"]
    lines.append("|---|---|" + "---:|" * len(names))
    for row in record["rows"]:
        cells = (row.get("model", "SmolLM2-135M"), row["tree"], *(f"{row[name]:.4f}" for name in names))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _memory(path: Path, record: dict[str, Any]) -> str:
    lines = [
        f"{_title(record)} ([{path.name}](../benchmarks/results/{path.name})):",
        "",
        "| case | tree tokens | budget | micro-batches | gateways | tensors, predicted | peak | estimate | / peak |",
        "|---|" + "---:|" * 8,
    ]
    for row in record["rows"]:
        budget = "none" if row["max_tokens"] is None else f"{row['max_tokens']:,}"
        sizes = " | ".join(f"{row[f'{name}_mib']:,}" for name in ("gateway", "live", "peak", "estimate"))
        counts = f"{row['tree_tokens']:,} | {budget} | {row['num_micro_batches']}"
        lines.append(f"| {row['tree'].replace('-', ', ')} | {counts} | {sizes} | {row['estimate_over_peak']:.2f} |")
    return "\n".join(lines)


def _balance(path: Path, record: dict[str, Any]) -> str:
    """Placements where at least one draw is not bound by a single path, and steps of mixed lengths."""
    names = ("round robin", "flat, longest first", "tree, longest first", "contiguous cut", "treewise")
    lines = [
        "Slowest rank over the lower bound, median of five draws, for treewise also the worst; treewise's slowest rank "
        "over the mean of all, the worst of the draws that no single path bounds; and a step of ranks in step, placed "
        "for that, over the slowest rank of the placement before, median "
        f"([{path.name}](../benchmarks/results/{path.name})):",
        "",
        f"| trees | batch | ranks | {' | '.join(names)} | worst | draws bound by a path | slowest / mean | in step |",
        "|---|---:|---:|" + "---:|" * (len(names) + 4),
    ]
    for row in record["rows"]:
        if row["part"] == "placement":
            ratios = [f"{row['slowest_over_bound'][name]['median']:.3f}" for name in names]
            free = row["slowest_over_mean_where_no_path_bounds"]
            over_mean = f"{max(free):.3f}" if free else ""
            in_step = f"{row['in_step_over_slowest']['median']:.2f}" if row["in_step_over_slowest"] else ""
            ratios.append(f"{row['slowest_over_bound']['treewise']['max']:.3f}")
            lines.append(
                f"| {row['trees']} | {row['num_trees']} | {row['num_ranks']} | {' | '.join(ratios)} | "
                f"{row['draws_bound_by_one_path']} of 5 | {over_mean} | {in_step} |"
            )
    large = next(row for row in record["rows"] if row["part"] == "large step")
    lines += [
        "",
        f"{large['num_trees']:,} trees over {large['num_ranks']:,} ranks: placed in "
        f"{large['cpu_seconds_of_placing']:.1f} CPU seconds ({record['processor']}), "
        f"slowest / mean {large['slowest_over_mean']:.4f}.",
        "",
        "Mixed lengths, 256 samples on 8 ranks, predicted seconds of a step where ranks wait for one another at every "
        "pass / of the slowest rank alone, and micro-batches over the limit. Where sorted or packed batches exceed the "
        "limit, they compute what no rank has the memory for:",
        "",
        "| longest | limit | sorted | packed | treewise | treewise in step | over the limit |",
        "|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in record["rows"]:
        if row["part"] == "mixed lengths":
            found = [row[name] for name in ("sorted", "packed", "treewise", "treewise in step")]
            cells = [f"{each['seconds_in_lockstep']:.2f} / {each['seconds_of_slowest']:.2f}" for each in found]
            over = " / ".join(str(each["steps_over_limit"]) for each in found)
            lines.append(f"| {row['longest']:,} | {row['limit']:,} | {' | '.join(cells)} | {over} |")
    return "\n".join(lines)


def _plot(record: dict[str, Any]) -> str:
    """Peak memory over the budget: SmolLM2 in float32."""
    rows = [row for row in record["rows"] if row["tree"] in ("smollm2", "smollm2-kept")]
    points = sorted((row["max_tokens"] or row["tree_tokens"], row["peak_mib"]) for row in rows)
    return _picture([("peak", points)], "budget (max_tokens)", ticks=[at for at, _ in points], dots=True, unit="MiB")


def _curves(record: dict[str, Any]) -> str:
    """Held-out figures over minutes, of the first seed; fine-tuning beside online RL."""
    drawn, width = [], 560
    for part, figure in (("sft", "held-out loss"), ("rl", "held-out reward")):
        rows = [row for row in record["rows"] if row["part"] == part and row["seed"] == 0]
        rows.sort(key=lambda row: not row["label"].startswith("treewise"))  # in the same colour in both
        lines = [(row["label"], [(seconds / 60, value) for _, seconds, value in row["curve"]]) for row in rows]
        last = max((points[-1][0] for _, points in lines), default=1.0)
        at = f'x="{width * len(drawn)}" width="{width}"'
        label = f"{PROOFS[part]}: {figure} over minutes"
        drawn.append(_picture(lines, label, range(int(last) + 1), dots=False, unit="").replace("<svg", f"<svg {at}", 1))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(drawn)} 280">{"".join(drawn)}</svg>\n'


def _picture(
    lines: list[tuple[str, list[tuple[float, float]]]], x_label: str, ticks: Iterable[float], dots: bool, unit: str
) -> str:
    """Lines over one axis from 0, as a small SVG. dots: with the value of each point, in place of a legend."""
    width, height, left, bottom = 560, 280, 70, 40
    most_x, most_y = (max(point[axis] for _, points in lines for point in points) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / most_x * (width - left - 20), height - bottom - y / most_y * (height - 60)

    drawn = []
    for number, (label, points) in enumerate(lines):
        placed = [place(*point) for point in points]
        colour = PALETTE[number % len(PALETTE)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if dots:
            drawn += [
                f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{colour}"/>'
                f'<text x="{x:.0f}" y="{y - 8:.0f}" fill="{colour}">{value:,} {unit}</text>'
                for (x, y), (_, value) in zip(placed, points, strict=True)
            ]
        else:
            end, line = f"{label}: {points[-1][0]:.1f} minutes", 17 * number
            y = 30 + line if points[-1][1] < points[0][1] else height - bottom - 17 * len(lines) + line  # off the lines
            drawn += [f'<circle cx="{x:.1f}" cy="{at:.1f}" r="2" fill="{colour}"/>' for x, at in placed]
            drawn.append(f'<text x="{width - 12}" y="{y}" text-anchor="end" fill="{colour}">{end}</text>')
    drawn += [f'<text x="{place(x, 0)[0]:.0f}" y="{height - bottom + 16}">{x:,}</text>' for x in ticks]
    x0, y0 = place(0, 0)
    if not dots:
        heights = [(at, place(0, at)[1]) for at in (0.0, most_y)]
        drawn += [f'<text x="{left - 8}" y="{y + 3:.0f}" text-anchor="end">{at:.2g}</text>' for at, y in heights]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13" text-anchor="middle">{result_tables.SVG_STYLE}'
        f'<rect width="{width}" height="{height}" class="paper"/>'
        f'<path d="M{x0} 20V{y0}H{width - 10}" fill="none" stroke="gray"/>{"".join(drawn)}'
        f'<text x="{width // 2}" y="{height - 6}">{x_label}</text></svg>\n'
    )


def _title(record: dict[str, Any]) -> str:
    return f"{record['processor']}, {record['hardware']}, torch {record['torch']}"


def _fill(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the two markers of a table."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if page.parent == REPORTS:
        text = text.replace("](../benchmarks/results/", "](../results/")
    old = page.read_text()
    new = re.sub(f"{start}.*?{end}", lambda _: f"{start}\n{text}\n{end}", old, flags=re.DOTALL)
    if start not in old:
        raise SystemExit(f"{page} has no marker {start}")
    page.write_text(new)


if __name__ == "__main__":
    main()
