"""What the report says of a curriculum, from files that a run writes."""

import json

import pytest

from tests.rl.curriculum.test_self_check import report
from treewise.errors import ConfigError
from treewise.report import read_run
from treewise.report.analysis.curriculum_log import read_curriculum
from treewise.report.html.page import render_page
from treewise.rl.online.records import draws_file, write_check


def write_draws(folder, draws):
    for iteration, own in enumerate(draws, start=1):
        path = draws_file(folder, iteration)
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ("item", "predicted", "observed", "trials")
        rows = [{**dict(zip(names, draw, strict=True)), "is_kept": draw[2] != 0} for draw in own]
        path.write_text(json.dumps({"iteration": iteration, "curriculum": "learnability", "draws": rows}))


DRAWS = [
    [("a", 0.5, 0.25, 4), ("b", 0.5, 0.0, 4), ("c", 0.52, None, 0)],
    [("a", 0.4, 0.5, 4), ("b", 0.2, 0.0, 4), ("c", 0.1, 0.0, 2)],
]


def test_draws_predictions_and_correlation_over_time(tmp_path):
    write_draws(tmp_path, DRAWS)
    found = read_curriculum(tmp_path)
    assert (found.name, found.num_iterations, found.num_draws, found.check) == ("learnability", 2, 6, None)
    assert [(each.item, each.iterations, each.num_kept) for each in found.items] == [
        *(("a", (1, 2), 2), ("b", (1, 2), 0), ("c", (1, 2), 1))
    ]
    first, second = found.windows
    assert (first.first, first.last, first.num_draws, first.correlation) == (1, 1, 2, None)
    assert (second.predicted, second.observed) == pytest.approx(((0.4 * 4 + 0.2 * 4 + 0.1 * 2) / 10, 0.2))
    assert second.correlation == pytest.approx(3**0.5 / 2)  # ranks 2, 1, 0 against 2, 0.5, 0.5
    assert found.bins[-1] == pytest.approx((0.5, 0.125, 8))


def test_the_page_shows_it(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [], "global_step": 2}))
    write_draws(tmp_path, [*DRAWS, *DRAWS])
    write_check(tmp_path, "gain", report(-1.0))
    run = read_run(tmp_path)
    page = render_page(None, run, "0")
    assert "Useless here: angle, learnability." in page
    assert page.count("<tr>") == 1 + 4 + 1 + 4 + 1 + 3
    assert run.to_dict()["curriculum"]["num_draws"] == 12


def test_the_self_check_and_its_verdict(tmp_path):
    assert read_curriculum(tmp_path) is None
    write_check(tmp_path, "gain", report(-1.0))
    found = read_curriculum(tmp_path)
    assert found.check["useless"] == ["angle", "learnability"]
    assert "useless here" in found.check_text
    draws_file(tmp_path, 1).write_text("{")
    with pytest.raises(ConfigError, match="not what a run drew"):
        read_curriculum(tmp_path)
