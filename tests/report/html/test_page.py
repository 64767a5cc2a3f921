"""The page and its twin: complete, self-contained, and safe to open whatever the records hold."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.helpers import call, save_tiny_model
from tests.report.analysis.test_online_log import write_online_run
from tests.report.analysis.test_run_log import HISTORY, write_run
from tests.report.rows import HOSTILE
from treewise.data import LoadReport
from treewise.errors import ConfigError, bytes_as_text
from treewise.report import read_run
from treewise.report.html.build import SCHEMA, SCHEMA_VERSION, DataReport, build_data_report, memory_chart, twin
from treewise.report.html.charts import line_chart
from treewise.report.html.page import (
    Section,
    count,
    embedded_json,
    percent,
    ratio,
    render_page,
    write_charts,
    write_page,
)
from treewise.testing import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

VOID = {"meta", "input", "link", "br", "img", "rect", "line", "path"}


class Tags(HTMLParser):
    """Collects tags, attributes, and the text of script blocks."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)


@pytest.fixture(scope="module")
def page(data_report: DataReport, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = read_run(write_run(tmp_path_factory.mktemp("run"), HISTORY))
    return render_page(data_report, run, "0")


def test_the_page_is_well_formed_and_names_nothing_outside(page: str) -> None:
    parsed = Tags(page)
    assert parsed.unbalanced == []
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        assert not {"src", "srcset", "action", "background"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    assert "@import" not in page
    assert "url(" not in page


def test_records_cannot_add_markup(page: str, data_report: DataReport) -> None:
    shown = [fork.light.after for fork in data_report.lost.forks if fork.tree == "hostile<b>&"]
    assert [text for text in shown if HOSTILE[:30] in text]
    parsed = Tags(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in parsed.tags}
    # Nor does their text stand in the page as it is.
    assert "<img" not in page
    assert "hostile<b>" not in page
    assert page.count("&lt;/script&gt;") >= 2
    assert "\u2028" not in page.split("<script")[1]


def test_embedded_json_is_read_back_and_cannot_end_its_block() -> None:
    value = {"text": HOSTILE + "<!-- ]]> \u2029", "number": 1.5}
    text = str(embedded_json(value))
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)
    with pytest.raises(ValueError, match="JSON compliant"):
        embedded_json(float("nan"))


def test_the_policy_allows_our_own_scripts_alone(page: str) -> None:
    policy = next(a["content"] for tag, a in Tags(page).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_every_heading_control_and_picture_has_a_name(page: str) -> None:
    parsed = Tags(page)
    ids = {attributes.get("id") for _, attributes in parsed.tags}
    for tag, attributes in parsed.tags:
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") or "width" in attributes
        if tag == "section":
            assert attributes["aria-labelledby"] in ids
        if tag == "canvas":
            assert attributes["aria-label"]
        for name in ("aria-describedby", "aria-labelledby"):
            assert attributes.get(name) is None or attributes[name] in ids
    links = {attributes["href"][1:] for tag, attributes in parsed.tags if tag == "a"}
    assert links <= ids


def test_a_page_of_charts_alone_has_their_curves_and_their_table(tmp_path: Path) -> None:
    chart = line_chart([("a <b>", [0, 1], [2.0, 1.0])], "Loss", "minutes", "nats")
    section = Section("Loss & time", "Two steps.", (chart,), (("trainer", "minutes"), ("a <b>", "1.0")))
    write_charts(tmp_path / "new" / "proof.html", "The proof", [section], "0.1")
    html = (tmp_path / "new" / "proof.html").read_text()
    assert "Loss &amp; time" in html
    assert '<th scope="row">a &lt;b&gt;</th>' in html
    drawn = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', html)
    assert json.loads(drawn[1])["charts"]["0-0"]["lines"][0]["ys"] == [2.0, 1.0]


def test_sections_come_first_and_stand_in_the_twin(data_report: DataReport, tmp_path: Path) -> None:
    section = Section("The result", "One step.", (), (("way", "seconds"), ("flat", "2.0")))
    html, json_file = write_page(tmp_path / "report.html", data_report, None, "0.1", [section])
    headings = re.findall(r"<h2[^>]*>([^<]*)<", html.read_text())
    assert headings[:2] == ["The result", "What it costs"]
    found = json.loads(json_file.read_text())["sections"]
    assert found == [{"title": "The result", "text": "One step.", "table": [["way", "seconds"], ["flat", "2.0"]]}]


def test_lost_sharing_is_one_number_with_its_avoidable_part(page: str, data_report: DataReport) -> None:
    """The tile said 0.0 % where the table below said 12.1 %: it showed the avoidable part alone."""
    lost, total = data_report.lost, data_report.facts.total.num_tree_tokens
    assert lost.num_lost_tokens == sum(each.num_lost_tokens for each in lost.causes) > lost.num_avoidable_tokens > 0
    whole, avoidable = (percent(tokens / total) for tokens in (lost.num_lost_tokens, lost.num_avoidable_tokens))
    tile = re.search(r"<dt>lost sharing</dt><dd>([^<]*)</dd><dd class=\"note\">([^<]*)<", page)
    assert tile is not None
    assert tile[1] == whole
    assert tile[2].endswith(f"avoidable: {avoidable}")
    assert f"That is {whole} of the tree tokens" in " ".join(page.split())


def test_words_of_plans_are_explained_where_they_stand(page: str) -> None:
    plan = page[page.index('id="plan-title"') : page.index('id="run-title"')]
    intro = plan[: plan.index("</p>")]
    for word in ("micro-batches", "open", "gateway", "recomputed", "held", "closed"):
        assert f"<i>{word}</i>" in intro


def test_the_twin_holds_the_numbers_of_the_page(data_report: DataReport, tmp_path: Path) -> None:
    html, json_file = write_page(tmp_path / "new" / "report.html", data_report, None, "0.1")
    assert json_file.name == "report.json"
    found = json.loads(json_file.read_text())
    assert (found["schema"], found["version"], found["run"]) == (SCHEMA, SCHEMA_VERSION, None)
    data = found["data"]
    assert data["num_trees"] == 4
    assert {each["cause"] for each in data["lost_sharing"]["causes"]} >= {"time, number or id", "history rewritten"}
    assert data["verdict"][0].startswith("Worth it against one row per call (")
    assert [line.partition(":")[0] for line in data["verdict"][1:]] == ["lost sharing", "change"]
    shown = unescape(re.sub(r"<[^>]*>", "", html.read_text()))
    for line in (data["verdict"][0], *(each.partition(": ")[2] for each in data["verdict"][1:])):
        assert line in shown
    assert [each["against"] for each in data["worth"]] == ["one row per call", "trainers that merge turns"]
    total = data["total"]
    for each in data["lost_sharing"]["causes"]:
        left = total["num_tree_tokens"] - each["num_lost_tokens"]
        mended = data["lost_sharing"]["ratios_if_mended"].get(each["cause"])
        assert (mended is not None) == each["is_avoidable"]
        if mended:
            assert mended["share_ratio"] == total["num_flat_tokens"] / left
            assert mended["leaf_ratio"] == total["num_leaf_tokens"] / left
            assert f"{mended['share_ratio']:.2f}" in html.read_text()
    assert len(data["drawn_trees"]["trees"]) == 4
    assert sum(data["distributions"]["share_ratio"]["counts"]) == 4
    assert data["costs"][0]["num_tokens"] == data["total"]["num_flat_tokens"]
    assert all(len(plan["timeline"]) >= plan["num_micro_batches"] for plan in data["plans"])
    assert f"{data['total']['num_tree_tokens']:,}" in html.read_text()


def test_the_fields_of_the_twin_are_documented(data_report: DataReport) -> None:
    """Each field of the first two levels stands in the documentation."""
    text = (Path(__file__).parents[3] / "docs" / "report-fields.md").read_text()
    found = twin(data_report, None, "0")
    names = {*found, *found["data"], *found["data"]["lost_sharing"], *found["data"]["drawn_trees"]}
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.parametrize(
    ("name", "has_data", "message"),
    [
        ("report", True, r"\.html"),
        ("report.txt", True, r"\.html"),
        ("report.html", False, "nothing to report"),
        ("file/report.html", True, "file"),
    ],
)
def test_what_cannot_be_written_is_named(
    name: str, has_data: bool, message: str, tmp_path: Path, data_report: DataReport
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        write_page(tmp_path / name, data_report if has_data else None, None, "0")


def test_a_log_is_not_written_over_by_the_twin(rows: Path, tmp_path: Path, data_report: DataReport) -> None:
    """A page beside a log of one list, by its name; a page of before is replaced."""
    log, html = tmp_path / "log.json", tmp_path / "log.html"
    log.write_text(json.dumps([json.loads(line) for line in rows.read_text().splitlines()]))
    before = log.read_bytes()
    with pytest.raises(ConfigError, match=r"log.json is there and is no report"):
        call("inspect", log, "--html", html)
    with pytest.raises(ConfigError, match="Give the page another name"):
        write_page(html, data_report, None, "0")
    assert log.read_bytes() == before
    assert not html.exists()
    for _ in range(2):
        write_page(tmp_path / "new.html", data_report, None, "0")


def test_numbers_are_printed_with_units() -> None:
    assert (count(1234567), count(None)) == ("1,234,567", "–")
    assert ratio(1.234) == "1.23 ×"
    assert (percent(0.1234), percent(0), percent(0.00012)) == ("12.3 %", "0.0 %", "0.012 %")
    assert (bytes_as_text(3 * 2**30), bytes_as_text(1536), bytes_as_text(7)) == ("3.00 GiB", "1.50 KiB", "7 bytes")


def test_the_command_writes_both_files(
    rows: Path, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model", vocab_size=50_000)
    run = write_run(tmp_path / "run", HISTORY)
    html = tmp_path / "report.html"
    arguments = ["--tokenizer", tokenizer_folder, "--model", model, "--max_tokens", 64, "--trees", 2]
    assert call("inspect", rows, "--html", html, "--run", run, *arguments) == 0
    assert str(html) in capsys.readouterr().out
    text = html.read_text()
    for part in ("FLOP bound", "peak memory", "<figcaption>Loss", "budget 64", "64 tokens"):
        assert part in text
    found = json.loads(html.with_suffix(".json").read_text())
    assert found["run"]["num_steps"] == 2
    assert len(found["data"]["drawn_trees"]["trees"]) == 2
    assert found["data"]["plans"][-1]["bytes_peak"] > 0


def test_a_run_alone_needs_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", HISTORY)
    assert call("inspect", "--run", run, "--html", tmp_path / "run.html") == 0
    assert "data" not in re.findall(r'id="([a-z-]+)"', (tmp_path / "run.html").read_text())
    capsys.readouterr()
    assert call("inspect", "--run", run) == 0
    assert "flat tokens" in capsys.readouterr().out
    assert call("inspect", "--run", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"]["num_steps"] == 2


def test_an_online_run_begins_with_what_was_learned(data_report: DataReport, tmp_path: Path) -> None:
    """Before all else: the held-out reward before and after, and its curves."""
    online = read_run(write_online_run(tmp_path / "online"))
    assert online.learned == "Success, held out, pass@1: 0.1 before the first update, 0.5 after iteration 2."
    page = render_page(data_report, online, "0")
    places = [page.index(each) for each in ('id="run"', "What was learned", 'id="run-0"', 'id="overview"')]
    assert places == sorted(places)
    assert page.index(online.learned) < page.index('class="tiles"')
    plain = render_page(data_report, read_run(write_run(tmp_path / "plain", HISTORY)), "0")
    assert plain.index('id="overview"') < plain.index('id="run"')
    assert "What was learned" not in plain


def test_the_chart_of_memory_ends_where_the_tile_of_its_peak_does() -> None:
    items = [Trajectory([*range(1, 60), number, *range(100, 120)]) for number in (70, 71, 72)]
    tree = SimpleNamespace(name="t", forest=lambda: Forest.from_trajectories(items))
    load = LoadReport(num_files=1, num_records=3)
    report = build_data_report([tree], load, model=tiny_model(vocab_size=128), model_name="tiny", max_tokens=40)
    assert len(report.plans) > 0
    for plan in report.plans:
        chart = memory_chart(plan)
        assert chart is not None
        peak, kept, above, gateways = (max(line.ys) * 2**30 for line in chart.lines)
        assert peak == pytest.approx(plan.facts.bytes_peak, rel=1e-9)
        assert peak > kept > above > gateways


def test_nothing_to_inspect_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing to inspect"):
        call("inspect")
