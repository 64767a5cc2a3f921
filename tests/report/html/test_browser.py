"""The page in headless Chromium: it opens without an error or a request, and the picture does what it says.

Skipped where Chromium (Debian: `apt-get install chromium`) or the playwright package is missing.
"""

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.report.analysis.test_online_log import write_online_run
from tests.report.analysis.test_run_log import HISTORY, write_run
from tests.report.rows import HOSTILE
from treewise.data import LoadReport
from treewise.report import read_run
from treewise.report.html.build import DataReport, build_data_report
from treewise.report.html.page import write_page
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.xdist_group("report/html/test_browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]

DESKTOP, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
# Two samples of a question, and one that goes on: segments 0 (root), 1 (heavier), 2.
TRUNK, LEFT, RIGHT = list(range(1, 41)), list(range(50, 90)), list(range(100, 120))
SCALE_OF_AXIS = 20  # pixels below the rows


def solid(folder: Path, colour: str) -> Path:
    """The file of a picture in one colour."""
    Image.new("RGB", (90, 60), colour).save(folder / f"{colour}.png")
    return folder / f"{colour}.png"


class One:
    """A single tree by index, as a data set."""

    def __init__(self, name: str, forest: Forest) -> None:
        self.name, self._forest = name, forest

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> "One":
        return self

    def forest(self) -> Forest:
        return self._forest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu"]
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=args, timeout=300_000)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def files(data_report: DataReport, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run = read_run(write_run(folder / "run", HISTORY))
    simple = Forest.from_trajectories(
        [
            Trajectory(TRUNK + LEFT, loss_weights=[0.0] * 40 + [1.0] * 40, source="rows:1"),
            Trajectory(TRUNK + RIGHT, loss_weights=[0.0] * 40 + [1.0] * 20, source="rows:2"),
        ]
    )
    long = [Trajectory([*range(1, 301), number, *range(900 - number, 1100)]) for number in (400, 500)]
    load = LoadReport(num_files=1, num_records=2)
    red, blue, gone = (
        ImageSpan(solid(folder, name), at, at + 30) for name, at in (("red", 2), ("blue", 32), ("lime", 62))
    )
    Path(str(gone.source)).unlink()
    seen = [Trajectory([1, 2, *[9] * 90, 3, leaf], images=[red, blue, gone]) for leaf in (4, 5)]
    reports = {
        "images": (build_data_report(One("images", Forest.from_trajectories(seen)), load), None),
        "all": (data_report, run),
        "online": (None, read_run(write_online_run(folder / "online", HOSTILE))),
        "simple": (build_data_report(One("simple", simple), load), None),
        "budgets": (build_data_report(One("budgets", Forest.from_trajectories(long)), load, max_tokens=100), None),
    }
    return {name: write_page(folder / f"{name}.html", *parts, "0")[0] for name, parts in reports.items()}


@pytest.fixture
def open_page(browser: Any, files: dict[str, Path]) -> Iterator[Any]:
    """Opens a page; at the end there must have been no error and no request but for the file itself."""
    contexts, troubles = [], []

    def opened(name: str, **options: Any) -> Any:
        context = browser.new_context(viewport=DESKTOP, **options) if "viewport" not in options else None
        context = context or browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(300_000)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append("a dialog"))
        url = files[name].as_uri()
        page.on("request", lambda request: troubles.append(request.url) if request.url.split("#")[0] != url else None)
        page.goto(url)
        page.wait_for_selector("html[data-ready=yes]")
        settled(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def settled(page: Any) -> None:
    """Waits until what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def state(page: Any) -> dict[str, str]:
    settled(page)
    return page.evaluate("() => ({...document.getElementById('canvas').dataset})")


def pixels(page: Any) -> np.ndarray:
    """[height, width, 3] of the canvas, as its context holds them."""
    settled(page)
    width, height, data = page.evaluate(
        """() => { const c = document.getElementById('canvas'), copy = document.createElement('canvas');
        copy.width = c.width; copy.height = c.height;
        const pen = copy.getContext('2d', { willReadFrequently: true });
        pen.drawImage(c, 0, 0);
        const data = pen.getImageData(0, 0, c.width, c.height).data;
        let text = ''; for (let i = 0; i < data.length; i++) text += String.fromCharCode(data[i]);
        return [c.width, c.height, btoa(text)]; }"""
    )
    return np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 4)[:, :, :3].astype(int)


def choose_tree(page: Any, name: str) -> None:
    options = page.locator("#tree-choice option").all_inner_texts()
    page.select_option("#tree-choice", index=[option.startswith(name) for option in options].index(True))


def colour(page: Any, name: str) -> np.ndarray:
    """[3] a colour of the style sheet."""
    text = page.evaluate(
        """(name) => { const c = document.createElement('canvas').getContext('2d');
        c.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
        return c.fillStyle; }""",
        name,
    )
    return np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)])


def test_a_report_opens_without_errors_or_requests(open_page: Any) -> None:
    page = open_page("all")
    assert "treewise" in page.title()
    assert page.locator("h2").all_inner_texts() == [
        "What it costs",
        "Overview",
        "What training will cost",
        "Where sharing is lost",
        "Worth a look",
        "Trees",
        "Plan",
        "Run",
    ]
    assert page.locator("img").count() == 0


def test_hostile_records_are_shown_as_text(open_page: Any) -> None:
    page = open_page("all")
    choose_tree(page, "hostile")
    page.locator("#canvas").focus()
    page.keyboard.press("Home")
    settled(page)
    assert page.locator("#detail .text-of").inner_text().startswith(HOSTILE[:60])
    for fork in page.locator("details.fork").all():
        fork.locator("summary").click()
    assert "owned" not in page.title()
    assert page.locator("img, main script").count() == 0


def test_the_picture_shows_the_tree_to_scale(open_page: Any) -> None:
    """The structure of the screenshot: trained and context stretches, and paper, where the forest has them."""
    page = open_page("simple")
    image = pixels(page)
    height, width = image.shape[0] - SCALE_OF_AXIS, image.shape[1]
    context, paper = colour(page, "--context"), colour(page, "--picture")
    deepest, rows = 80 * 1.02, 2

    def at(depth: float, row: float) -> np.ndarray:
        # Near the top of a row, as texts stand in its middle.
        return image[int(row * height / rows) + 6, int(depth / deepest * width)]

    for depth in (1, 20, 39):
        for row in (0, 1.8):
            np.testing.assert_array_equal(at(depth, row), context)
    trained = at(60, 0)
    assert abs(trained - context).sum() > 100
    for depth in (41.5, 60, 79):
        np.testing.assert_array_equal(at(depth, 0), trained)
    for depth in (41.5, 59):
        np.testing.assert_array_equal(at(depth, 1), trained)
    for depth in (60.5, 79):
        np.testing.assert_array_equal(at(depth, 1), paper)
    np.testing.assert_array_equal(at(81, 0), paper)


def test_folding_a_segment_hides_what_is_below_it(open_page: Any) -> None:
    page = open_page("simple")
    assert state(page)["shown"] == "3"
    page.locator("#canvas").focus()
    page.keyboard.press("Home")
    assert state(page)["focused"] == "0"
    page.keyboard.press("Space")
    assert state(page)["shown"] == "1"
    assert "folded" in page.locator("#detail").inner_text()
    page.get_by_role("button", name="unfold segment").click()
    assert state(page)["shown"] == "3"
    page.get_by_role("button", name="fold every branch").click()
    assert state(page)["shown"] == "3"  # both children are leaves


@pytest.mark.exhaustive
def test_a_trajectory_lights_up_and_the_rest_fades(open_page: Any) -> None:
    page = open_page("simple")
    plain = pixels(page)
    page.locator("#path-choice").fill("2")
    page.keyboard.press("Enter")
    assert state(page)["path"] == "0 2"
    assert "rows:2" in page.locator("#path-note").inner_text()
    lit = pixels(page)
    height, width = lit.shape[0] - SCALE_OF_AXIS, lit.shape[1]
    on_path = (int(height * 0.5) + 6, int(50 / 81.6 * width))
    off_path = (6, int(60 / 81.6 * width))
    np.testing.assert_array_equal(lit[on_path], plain[on_path])
    assert abs(lit[off_path] - plain[off_path]).sum() > 100
    highlight = colour(page, "--warm")
    assert (lit == highlight).all(axis=2).sum() > width / 2
    assert not (plain == highlight).all(axis=2).any()
    page.locator("#canvas").focus()
    page.keyboard.press("Escape")
    assert state(page)["path"] == ""


@pytest.mark.exhaustive
def test_keys_move_between_segments_in_the_order_of_the_tree(open_page: Any) -> None:
    page = open_page("simple")
    page.locator("#canvas").focus()
    visited = []
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
        visited.append(state(page)["focused"])
    assert visited == ["0", "1", "2", "1", "2", "0", "0"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("p")
    assert state(page)["path"] == "0 1"


def test_pointing_shows_the_token(open_page: Any) -> None:
    page = open_page("all")
    choose_tree(page, "clock")
    page.locator("#canvas").scroll_into_view_if_needed()
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + 30, box["y"] + 20)
    settled(page)
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert tip.inner_text().startswith("depth ")
    page.mouse.move(5, 5)
    settled(page)
    assert not tip.is_visible()


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_can_be_switched(open_page: Any, scheme: str) -> None:
    page = open_page("simple", color_scheme=scheme)

    def brightness() -> tuple[float, float]:
        image = pixels(page)
        text = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return float(image[5, -5].mean()), float(np.mean([int(part) for part in re.findall(r"\d+", text)[:3]]))

    def is_dark() -> bool:
        canvas, body = brightness()
        assert (canvas < 128) == (body < 128)
        return canvas < 128

    assert is_dark() == (scheme == "dark")
    button = page.locator("#theme")
    button.click()
    assert not is_dark()
    assert button.get_attribute("aria-label") == "Colour theme: light"
    button.click()
    assert is_dark()
    button.click()
    assert is_dark() == (scheme == "dark")


def test_a_phone_shows_all_without_scrolling_sideways(open_page: Any) -> None:
    page = open_page("all", viewport=PHONE, has_touch=True, is_mobile=True)
    assert page.evaluate("() => document.documentElement.scrollWidth") == PHONE["width"]
    too_wide = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, .top nav')
        && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert too_wide == []


def test_images_are_drawn_in_their_place_and_shown_beside_the_text(open_page: Any) -> None:
    page = open_page("images")
    page.wait_for_function("() => Number(document.getElementById('canvas').dataset.drawn) > 0")
    settled(page)
    width, (x0, x1) = pixels(page).shape[1], map(float, state(page)["x"].split())
    row = pixels(page)[20]
    for depth, wanted in ((17, [255, 0, 0]), (47, [0, 0, 255])):
        assert np.abs(row[int((depth - x0) / (x1 - x0) * width)] - wanted).max() < 12
    page.locator("#canvas").focus()
    page.keyboard.press("Home")
    shown = page.locator("#detail .thumbnails figure")
    assert [" ".join(text.split()) for text in shown.all_inner_texts()] == [
        "image 1: 30 tokens at depth 2",
        "image 2: 30 tokens at depth 32",
        "not in this file image 3: 30 tokens at depth 62",
    ]
    assert page.evaluate("() => [...document.querySelectorAll('#detail img')].map((each) => each.naturalWidth)") == [
        90,
        90,
    ]
    assert "[image of 30 tokens]" in page.locator("#detail .text-of").inner_text()


def test_a_budget_changes_the_plan_and_the_picture(open_page: Any) -> None:
    page = open_page("budgets")
    page.select_option("#colour-choice", "micro-batch")
    shown = page.locator(".plan:visible")
    before, facts = pixels(page), shown.inner_text()
    assert page.locator("#plan-choice label:has(:checked)").inner_text() == "100 tokens"  # the one asked for
    assert page.locator("#budget-choice option:checked").inner_text() == "100 tokens"
    page.locator("#plan-choice label", has_text="512 tokens").click()
    assert shown.count() == 1
    assert shown.inner_text() != facts
    assert abs(pixels(page) - before).max() > 30
    assert page.locator("#budget-choice option:checked").inner_text() == "512 tokens"
    page.select_option("#budget-choice", label="100 tokens")
    assert shown.inner_text() == facts
    np.testing.assert_array_equal(pixels(page), before)


def test_charts_are_read_by_keys(open_page: Any) -> None:
    page = open_page("all")
    chart = page.locator("figure[data-chart^=run] svg").first
    chart.focus()
    page.keyboard.press("End")
    output = page.locator("figure[data-chart^=run] output").first
    assert output.inner_text() == "step 2: training 2, evaluation 2.2"
    page.keyboard.press("ArrowLeft")
    assert output.inner_text().startswith("step 1: training 3")


CUT = """() => [...document.querySelectorAll('.scroll')]
    .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.ariaLabel)"""
COVERED = "() => [...document.querySelectorAll('[id^=plan-] .covered')].map((each) => each.className.baseVal)"


def test_no_table_is_cut_and_no_line_is_hidden(browser: Any, files: dict[str, Path]) -> None:
    """On a screen of 1,300 pixels; at times the plan holds as many tokens for a backward as there are in gateways."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    for name in ("all", "budgets"):
        page.goto(files[name].as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        assert page.evaluate(CUT) == []
    covered = page.evaluate(COVERED)
    assert covered
    assert all("s1" in each.split() for each in covered)
    page.close()


DRAWN = """() => [...document.querySelectorAll('[data-chart]')].map((figure) => {
    const hidden = figure.closest('[hidden]');
    if (hidden) hidden.hidden = false;
    const chart = JSON.parse(document.getElementById('page-data').textContent).charts[figure.dataset.chart];
    const texts = [...figure.querySelectorAll('.grid text')].map((text) => {
      const box = text.getBBox();
      return [text.textContent, box.x, box.x + box.width, text.getAttribute('text-anchor')];
    });
    const bars = [...figure.querySelectorAll('.bar')].map((bar) => Number(bar.getAttribute('height')));
    const paths = [...figure.querySelectorAll('path.line')].map((path) => path.getAttribute('d'));
    return { chart, texts, bars, paths };
  })"""


@pytest.mark.parametrize(("name", "viewport"), [("all", DESKTOP), ("all", PHONE), ("online", PHONE)])
def test_charts_stand_where_their_values_say(open_page: Any, name: str, viewport: dict[str, int]) -> None:
    drawn = open_page(name, viewport=viewport).evaluate(DRAWN)
    assert len(drawn) > 5
    for each in drawn:
        chart, numbers = each["chart"], [text for text, _, _, anchor in each["texts"] if anchor == "end"]
        assert len(set(numbers)) == len(numbers) >= 2, chart["title"]
        assert all(low >= 0 and high <= 460 for _, low, high, _ in each["texts"]), chart["title"]
        heights = [count for count in chart["counts"] if count]
        np.testing.assert_allclose(
            np.array(each["bars"]) / max(each["bars"], default=1), np.array(heights) / max(heights, default=1)
        )
        for line, path in zip(chart["lines"], each["paths"], strict=True):
            points = np.array(
                [[float(value) for value in point] for point in re.findall(r"[ML](\S+?) (-?[\d.]+)", path)]
            )
            if chart["is_stepped"] or len(points) < 2:
                assert path.endswith("Z" if chart["is_stepped"] else "a3 3 0 1 0 6 0a3 3 0 1 0-6 0")
                continue
            for values, at in ((line["xs"], points[:, 0]), (line["ys"], -points[:, 1])):
                span = max(np.ptp(values), 1e-12)
                shares = (np.array(values) - min(values)) / span
                np.testing.assert_allclose((at - at.min()) / max(np.ptp(at), 1e-12), shares, atol=1e-6)
            assert points[:, 0].min() >= 0
            assert points[:, 0].max() <= 460
            assert (points[:, 1] >= 12 - 1e-6).all()
            assert (points[:, 1] <= 190 + 1e-6).all()


def test_a_large_tree_is_drawn_by_what_can_be_seen(browser: Any, tmp_path: Path) -> None:
    """100,000 tokens in thousands of segments: no more is drawn than there are rows of pixels to draw on."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 500, 200).tolist()
    leaves = [[*trunk[: 1 + leaf % 199], 1000 + leaf, *rng.integers(0, 500, 24)] for leaf in range(4000)]
    forest = Forest.from_trajectories([Trajectory(each) for each in leaves])
    assert forest.num_tokens > 100_000
    report = build_data_report(One("large", forest), LoadReport(num_files=1, num_records=4000))
    html, _ = write_page(tmp_path / "large.html", report, None, "0")
    assert html.stat().st_size < 3_000_000
    page = browser.new_page(viewport=DESKTOP)
    page.goto(html.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    whole = state(page)
    height = page.locator("#canvas").bounding_box()["height"]
    assert int(whole["shown"]) > 4000
    assert int(whole["drawn"]) < 2.5 * height
    page.locator("#canvas").focus()
    page.keyboard.press("Home")
    for _ in range(12):
        page.keyboard.press("+")
    assert int(state(page)["drawn"]) < 2.5 * height
    page.close()


def test_an_online_run_shows_its_best_and_worst_trees(open_page: Any) -> None:
    page = open_page("online")
    figures = page.query_selector_all("#run figure.rewards")
    assert [each.get_attribute("data-tree") for each in figures] == ["best-1", "worst-1", "best-2", "worst-2"]
    worst = figures[1]
    assert HOSTILE.partition("\u2028")[0] in worst.query_selector("figcaption").text_content()
    assert sorted(each.text_content() for each in worst.query_selector_all(".leaf text")) == ["0", "0", "1"]
    assert sorted(each.text_content() for each in worst.query_selector_all(".fork text")) == [
        "0.333",
        "0.5",
    ]  # by draws
    box = worst.query_selector("svg").bounding_box()
    for path in worst.query_selector_all("path"):
        own = path.bounding_box()
        assert own["x"] >= box["x"]
        assert own["x"] + own["width"] <= box["x"] + box["width"]
    titles = [each.text_content() for each in page.query_selector_all("#run .charts figcaption")]
    assert titles[:4] == ["Reward over tokens", "Reward", "Success", "Calibration of the book"]
    assert page.title() != "owned"
