"""One HTML file that needs nothing else, and its JSON twin beside it.

Records are untrusted. The template escapes all text; what scripts read is JSON in a block that cannot be closed from
inside, and they write text as text. A content security policy allows our own scripts and styles by their hashes, and
no connection at all.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from treewise.errors import ConfigError, bytes_as_text
from treewise.report.analysis.bill import EPISODES, cells, flops_as_text, headline
from treewise.report.analysis.lost_sharing import AVOIDABLE
from treewise.report.analysis.run_log import RunReport
from treewise.report.html.build import DRAWN_RULE, SCHEMA, DataReport, memory_chart, run_charts, timeline_chart, twin
from treewise.report.html.charts import BAR_ROW, BAR_WIDTH, Chart, bars_of, drawing

SCRIPTS = (
    "arrays.js",
    "tree.js",
    "colours.js",
    "draw.js",
    "detail.js",
    "charts.js",
    "picture.js",
    "input.js",
    "page.js",
)
STYLES = ("sections.css", "picture.css", "report.css")  # the last has the rules of narrow screens


class Section(NamedTuple):
    """Curves and a table under a heading: what a benchmark or the demo measured. table: its head first."""

    title: str
    text: str
    charts: tuple[Chart, ...]
    table: tuple[tuple[str, ...], ...]


def write_charts(path: Path, title: str, sections: Sequence[Section], version: str) -> None:
    """Writes a page of sections alone."""
    charts = _charts_of(sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_rendered(title, charts, {"charts": _drawn(charts), "trees": []}, version, sections=sections))


def _charts_of(sections: Sequence[Section]) -> dict[str, Chart]:
    return {f"{part}-{index}": chart for part, each in enumerate(sections) for index, chart in enumerate(each.charts)}


def checked_paths(path: str | Path) -> tuple[Path, Path]:
    """The page and its twin.

    Raises:
        ConfigError: a name that does not end in `.html`, or a file in the twin's place that is of no page.
    """
    html = Path(path)
    if html.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{html}: the report is an HTML file; name it {html.stem or 'report'}.html.")
    twin_path = html.with_suffix(".json")
    if twin_path.is_file():
        with suppress(PermissionError), twin_path.open("rb") as there:  # which writing names
            if f'"{SCHEMA}"'.encode() not in there.read(64):
                raise ConfigError(
                    f"{twin_path} is there and is no report; the facts of {html.name} are written under this name. "
                    "Give the page another name, or move that file."
                )
    return html, twin_path


def write_page(
    path: str | Path, data: DataReport | None, run: RunReport | None, version: str, sections: Sequence[Section] = ()
) -> tuple[Path, Path]:
    """Writes the page and its twin (`.json` beside it); returns both paths. sections: what the page begins with.

    Raises:
        ConfigError: neither data nor a run, a folder that cannot be written, or as `checked_paths`.
    """
    html, twin_path = checked_paths(path)
    if data is None and run is None:
        raise ConfigError("nothing to report: name data, a run, or both.")
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(render_page(data, run, version, sections), encoding="utf-8")
        own = [{"title": section.title, "text": section.text, "table": section.table} for section in sections]
        twin_path.write_text(json.dumps(twin(data, run, version, own), indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or html}: cannot be written ({error.strerror}).") from None
    return html, twin_path


def render_page(data: DataReport | None, run: RunReport | None, version: str, sections: Sequence[Section] = ()) -> str:
    """The HTML of the page, with all that it draws."""
    charts = _charts_of(sections)
    if data is not None:
        charts |= {f"ratio-{index}": chart for index, chart in enumerate(data.charts)}
        for index, each in enumerate(data.plans):
            charts[f"plan-{index}"] = timeline_chart(each)
            memory = memory_chart(each)
            if memory is not None:
                charts[f"memory-{index}"] = memory
    if run is not None:
        charts |= {f"run-{index}": chart for index, chart in enumerate(run_charts(run))}
    parts: dict[str, object] = {"data": data, "run": run, "sections": sections}
    return _rendered(_title(data, run), charts, _page_data(data, charts), version, **parts)


def _rendered(title: str, charts: dict[str, Chart], page_data: object, version: str, **parts: object) -> str:
    static = resources.files("treewise.report.html") / "static"
    script = "\n".join((static / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = "\n".join((static / name).read_text(encoding="utf-8") for name in STYLES)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            {"data": None, "run": None, "sections": ()} | parts,
            drawing=drawing,
            bars_of=bars_of,
            bar_width=BAR_WIDTH,
            bar_row=BAR_ROW,
            episodes=EPISODES,
            bill_cells=cells,
            bill_headline=headline,
            charts=charts,
            version=version,
            title=title,
            script=Markup(script),
            style=Markup(style),
            script_hash=_policy_hash(script),
            style_hash=_policy_hash(style),
            drawn_rule=DRAWN_RULE,
            page_data=embedded_json(page_data),
        )
    )


def embedded_json(value: object) -> Markup:
    """JSON for a `<script type="application/json">` block: nothing in it can end the block or the line."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _page_data(data: DataReport | None, charts: dict[str, Chart]) -> dict[str, Any]:
    """The JSON that the scripts read."""
    if data is None:
        return {"charts": _drawn(charts), "trees": []}
    plans = [
        {
            "max_tokens": plan.facts.max_tokens,
            "kinds": [("held" if b["is_held"] else "open") if b["is_open"] else "closed" for b in plan.micro_batches],
        }
        for plan in data.plans
    ]
    return {
        "charts": _drawn(charts),
        "trees": data.pictures,
        "vocabulary": data.vocabulary,
        "thumbnails": data.thumbnails,
        "plans": plans,
        "first_plan": data.first_plan,
    }


def _drawn(charts: Mapping[str, Chart]) -> dict[str, Any]:
    return {name: chart.to_dict() for name, chart in charts.items()}


def _title(data: DataReport | None, run: RunReport | None) -> str:
    parts = [Path(source).name for source in (data.sources[:3] if data else ())]
    if data and len(data.sources) > 3:
        parts.append(f"{len(data.sources) - 3} more")
    if run:
        parts.append(f"run {Path(run.folder).name}")
    return ", ".join(parts) or "data"


def _policy_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("treewise.report.html", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.tests["avoidable"] = AVOIDABLE.__contains__
    environment.filters |= {
        "many": many,
        "count": count,
        "ratio": ratio,
        "flops": flops_as_text,
        "size": bytes_as_text,
        "percent": percent,
        "reward": lambda value: "–" if value is None else f"{value:.3g}",
    }
    return environment


def count(value: float | None) -> str:
    """1234567 as 1,234,567."""
    return "–" if value is None else f"{value:,.0f}"


def many(value: float, noun: str) -> str:
    """A count with its noun: 1 tree, 2 trees."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def ratio(value: float | None) -> str:
    """1.234 as 1.23 ×."""
    return "–" if value is None else f"{value:,.2f} ×"


def percent(value: float) -> str:
    """0.123 as 12.3 %; small ones keep two figures."""
    return f"{100 * value:.{1 if value >= 0.001 or value == 0 else 3}f} %"
