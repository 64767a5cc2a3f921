"""The demo on machines of all kinds: what it decides, and what it shows where something was not measured."""

import importlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from treewise.report.html.page import write_charts

EXAMPLES = Path(__file__).parents[2] / "examples"
MEASURED = {"computed_tokens": 100, "seconds": {"median": 2.0}, "loss": 1.5, "gradient_error": 3e-6}
LEFT_OUT = "left out: a step would take some 70 s by what flat took, and 1.1 s of its 20 s are left (--max_seconds)"
LOSSES = {"held_out_before": 3.0, "held_out_after": 1.0}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


def row(**contestants: Any) -> dict[str, Any]:
    """What `measure_workload` gives; contestants: what differs."""
    found = {name: {**MEASURED} for name in ("flat", "merged", "trl", "tree")} | contestants
    ran = [name for name, each in found.items() if "skipped" not in each]
    speed_up = {base: {name: 4.0 for name in ran if name != base} for base in ran if base != "tree"}
    shape = {"share_ratio": 9.0, "leaf_ratio": 5.0, "flop_bound": 8.0, "num_trajectories": 14, "dtype": "float32"}
    return {"workload": "crosswords-8", **shape, "contestants": found, "speed_up": speed_up, "varlen_kernel": "sdpa"}


def shown(demo: Any, found: dict[str, Any], width: int = 118) -> str:
    console = Console(width=width, file=io.StringIO())
    demo.show_times(found, console)
    return console.file.getvalue()


def test_all_that_was_measured_is_shown(demo: Any) -> None:
    text = shown(demo, row())
    assert text.count("4.0 x as fast") == 3
    assert "efficiency, which is speed-up / FLOP bound, 0.50." in " ".join(text.split())
    assert "treewise's gradient differs from the packed one by 3e-06 of its norm." in " ".join(text.split())
    assert "no figure" not in text


@pytest.mark.parametrize("missing", ["flat", "merged", "trl", "tree"])
def test_what_has_no_figure_is_named_with_its_reason(demo: Any, missing: str) -> None:
    """The first demo on a slow machine ended with a traceback here."""
    found = row(**{missing: {"skipped": LEFT_OUT}})
    text = " ".join(shown(demo, found).split())
    assert f"{demo.CONTESTANTS[missing]} has no figure: {LEFT_OUT}" in text
    compared = "differs from the packed one by 3e-06" if missing not in ("flat", "tree") else "was not compared"
    assert compared in text
    section = demo.result_section(found, LOSSES)
    assert LEFT_OUT in section.text
    assert [line[1] for line in section.table[1:]].count("no figure") == 1


def test_a_cut_tree_without_contained_trajectories_has_no_merged_one(demo: Any) -> None:
    found = row()
    del found["contestants"]["merged"], found["speed_up"]["merged"]
    lines, missing = demo.times_of(found)
    assert [line[1] for line in lines] == ["100", "no figure", "100", "100"]
    assert missing == ["merged flat training has no figure: no trajectory begins with another one"]


def test_sixty_columns_cut_nothing(demo: Any) -> None:
    text = shown(demo, row(), width=60)
    assert "…" not in text
    whole = ("tokens", "seconds", "1.500000", "2.00", "4.0 x", "packed", "merged", "TRL's", "treewise")
    assert all(word in text for word in whole)


def test_a_page_is_made_of_what_there_is(demo: Any, tmp_path: Path) -> None:
    section = demo.result_section(row(tree={"skipped": "out of memory: no room"}), LOSSES)
    write_charts(tmp_path / "page.html", "demo", [section], "0")
    assert "treewise has no figure: out of memory: no room" in (tmp_path / "page.html").read_text()


def test_a_slow_machine_has_a_minute_to_measure_and_a_pretended_one_its_part_of_it(
    demo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.time, "perf_counter", lambda: 100.0)
    assert demo.Clock(1.0, 0.0).seconds_to_measure == demo.LAST_SECOND - 100
    assert demo.Clock(1.0, -1000.0).seconds_to_measure == demo.LEAST_SECONDS
    slow = demo.Clock(3.0, 0.0)
    assert slow.elapsed == 300
    assert slow.seconds_to_measure == demo.LEAST_SECONDS / 3


def test_fewer_tokens_are_computed_at_a_time_where_memory_is_short(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SimpleNamespace(numel=lambda: 134_515_008, element_size=lambda: 4)
    model = SimpleNamespace(parameters=lambda: [weight], device="cpu")
    for free, tokens in ((16e9, 1536), (2.9e9, 632), (1e9, 256)):
        monkeypatch.setattr(demo, "free_bytes", lambda _, free=free: int(free))
        assert demo.max_tokens(model) == tokens
