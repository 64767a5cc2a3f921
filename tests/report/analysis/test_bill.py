"""The bill: every figure is what one computes by hand from tokens, FLOPs, a speed and a rate."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import treewise as tw
from tests.cli.helpers import call, save_tiny_model, write_rows
from treewise.bench import Settings, make, measure_workload, random_model, record, save
from treewise.bench.contestants import twin
from treewise.data import LoadReport
from treewise.errors import ConfigError
from treewise.nn.flops import FlopModel, LayerReach
from treewise.nn.model_flops import flop_model
from treewise.report import bill_view
from treewise.report.analysis.bill import (
    EXPECTED_ERROR,
    OF_PEAK,
    Rates,
    dollars_as_text,
    flops_as_text,
    headline,
    time_as_text,
)
from treewise.report.analysis.facts import TreeFacts, inspect_forests
from treewise.report.html.charts import BAR_WIDTH, bars_of

# 100 and 200 FLOPs a token, 10 and 20 a projected row, 4 a pair: attention's backward is 2.5 times its forward.
FLOPS = FlopModel(100.0, 200.0, 10.0, 20.0, ((LayerReach(), 4.0),), 10, 10, 1, 1)
# Rows of 4, 5 and 3 tokens, of which the last is the beginning of the others; the tree has 3 + 1 + 2 tokens.
ROWS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3]]


def facts() -> TreeFacts:
    """Three rows of two rollouts; the last token of each is trained."""
    items = [
        tw.Trajectory(ids, loss_weights=[0] * (len(ids) - 1) + [1], group="g", rollout=index % 2)
        for index, ids in enumerate(ROWS)
    ]
    forest = tw.Forest.from_trajectories(items)
    return inspect_forests([("g", forest)], LoadReport(num_files=1, num_records=3), FLOPS).total


def test_tokens_and_flops_are_those_of_a_hand_count() -> None:
    rows, merged, trees = Rates().bill_of(facts()).ways
    assert [way.num_tokens for way in (rows, merged, trees)] == [12, 9, 6]
    # Tokens x 300, trained rows x 30, pairs x 4 x 3.5. Pairs: 10 + 15 + 6; 10 + 15; 6 + 4 + (4 + 5).
    assert rows.flops == 12 * 300 + 3 * 30 + 31 * 14
    assert merged.flops == 9 * 300 + 4 * 30 + 25 * 14  # token 3 is trained in both rows
    # Tokens 4 and 6 are predicted by two rows, and token 3 by the one before it.
    assert trees.flops == 6 * 300 + 3 * 30 + 19 * 14


def test_hours_and_dollars_of_a_card_and_of_an_api() -> None:
    bill = Rates("1e3", 7.2, 50.0).bill_of(facts(), "m")
    rows, _, trees = bill.ways
    assert rows.hours == pytest.approx((12 * 300 + 3 * 30 + 31 * 14) / 1000 / 3600)
    assert rows.dollars == pytest.approx(7.2 * 4124 / 3.6e6)
    assert trees.dollars == pytest.approx(7.2 * 2156 / 3.6e6)
    assert rows.api_dollars == pytest.approx(50 * 12 / 1e6)
    assert trees.api_dollars == pytest.approx(50 * 6 / 1e6)
    assert bill.basis == "given"


def test_a_thousand_episodes_are_so_many_times_the_rollouts_of_the_log() -> None:
    bill = Rates("1e3", 7.2).bill_of(facts(), "m")
    assert bill.num_episodes == 2
    for one, many in zip(bill.ways, bill.per_episodes, strict=True):
        assert many.num_tokens == 500 * one.num_tokens
        assert many.dollars == pytest.approx(500 * one.dollars)
    assert headline(bill) == "$4.12 as rows, $2.16 as trees for 1,000 episodes: 1.9 times less"
    assert [bar.width for bar in bars_of(bill)] == pytest.approx(
        [BAR_WIDTH, BAR_WIDTH * 3170 / 4124, BAR_WIDTH * 2156 / 4124], abs=0.05
    )


@pytest.mark.parametrize("name", ["h100", "H100", "h100-pcie", "l40s"])
def test_a_card_by_name_is_a_prediction(name: str) -> None:
    peaks = {"h100": 989e12, "h100-pcie": 756e12, "l40s": 362e12}  # the data sheets'
    bill = Rates(name).bill_of(facts(), "m")
    assert bill.ways[0].hours == pytest.approx(4124 / (OF_PEAK * peaks[name.lower()]) / 3600)
    assert bill.basis == f"predicted ±{100 * EXPECTED_ERROR:.0f} %"


def test_the_part_of_the_peak_is_what_was_measured_on_an_h100() -> None:
    file = Path(__file__).parents[3] / "benchmarks" / "results" / "bench-nvidia-h100-80gb-hbm3.json"
    rates = []
    for row in json.loads(file.read_text())["rows"]:
        for name, bound in (("flat", row["flop_bound"]), ("tree", 1.0)):
            rates.append(bound * row["tree_flops"] / row["contestants"][name]["seconds"]["median"])
    assert len(rates) == 4
    assert all(abs(OF_PEAK * 989e12 / rate - 1) < 0.08 for rate in rates)


def test_a_measured_file_gives_back_its_own_seconds(tmp_path: Path) -> None:
    """Seconds that `treewise bench` measured on these tokens are those of the bill, whose FLOPs are counted anew."""
    model, workload = random_model("qwen3-tiny", torch.float32, torch.device("cpu")), make("search", "tiny", 64)
    row = {"model": "qwen3-tiny", **measure_workload(twin(model), workload, Settings(repetitions=1))}
    save(tmp_path / "bench.json", record([row], ["treewise", "bench"]))
    forest = tw.Forest.from_trajectories(list(workload.trajectories))
    total = inspect_forests([("s", forest)], LoadReport(), flop_model(model)).total
    bill = Rates(str(tmp_path / "bench.json")).bill_of(total, "qwen3-tiny")
    seconds = {name: row["contestants"][name]["seconds"]["median"] for name in ("flat", "merged", "tree")}
    assert bill.basis == "measured"
    assert f"{8 * seconds['tree'] / seconds['flat']:.1f} of 8 trainer cards" in bill.assumptions[-1]
    assert [3600 * way.hours for way in bill.ways] == pytest.approx(list(seconds.values()))
    other = Rates(str(tmp_path / "bench.json")).bill_of(facts(), "qwen3-tiny")
    assert other.basis == "predicted ±10 %"  # one workload has no spread


def test_the_command_ends_with_the_bill_and_its_page_begins_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"token_ids": ids, "group": "g"} for ids in ROWS])
    model = save_tiny_model(tmp_path / "model")
    rates = ("--card", "1e6", "--dollars_per_hour", "2.5", "--dollars_per_million", "1.2")
    assert call("inspect", rows, "--model", model, *rates, "--json") == 0
    twin_of = json.loads(capsys.readouterr().out)
    bill = twin_of["bill"]
    total = twin_of["total"]
    assert bill["ways"][0]["dollars"] == pytest.approx(2.5 * total["flat_flops"] / 1e6 / 3600)
    assert bill["ways"][2]["api_dollars"] == pytest.approx(1.2 * total["num_tree_tokens"] / 1e6)
    assert bill["num_episodes"] == 3
    assert call("inspect", rows, "--model", model, *rates) == 0
    out = capsys.readouterr().out
    assert out.rindex("the bill: $") > out.rindex("best trees")
    html = tmp_path / "r.html"
    assert call("inspect", rows, "--model", model, *rates, "--html", html) == 0
    page = html.read_text()
    assert page.index('id="bill"') < page.index('id="overview"')
    assert page.count('class="way') == 3
    assert json.loads((tmp_path / "r.json").read_text())["data"]["bill"] == bill


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_a_narrow_terminal_cuts_no_name(columns: int) -> None:
    console = Console(width=columns, file=io.StringIO())
    console.print(bill_view(Rates("1e3", 7.2, 50.0).bill_of(facts(), "m")))
    out = console.file.getvalue()
    assert max(map(len, out.splitlines())) <= columns
    assert all(
        sum(name in line for line in out.splitlines()) >= 2 for name in ("as rows", "as merged turns", "as trees")
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dollars_per_hour": 2.0}, "give --card"),
        ({"card": "h100"}, "give --model"),
        ({"card": "rtx"}, "give one of b200"),
        ({"card": "-3"}, "must be"),
        ({"card": "nan"}, "must be"),
        ({"card": "inf"}, "must be positive and finite"),
        ({"card": "h100", "dollars_per_hour": float("inf")}, "must be 0 or positive and finite"),
        ({"dollars_per_million": -1.0}, "--dollars_per_million is -1.0"),
        ({"card": "absent.json"}, "absent.json"),
    ],
)
def test_what_cannot_be_made_out_is_an_error(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rates(**given).bill_of(facts(), None if given == {"card": "h100"} else "m")


def test_small_and_large_amounts_are_readable() -> None:
    assert [dollars_as_text(each) for each in (0.0, 0.000054, 0.3, 1234.5)] == [
        "$0.00",
        "$0.000054",
        "$0.30",
        "$1,234.50",
    ]
    assert [time_as_text(each) for each in (0.0001, 0.02, 2.0, 1234.0)] == ["0.36 s", "1.2 min", "2 h", "1,234 h"]
    assert [flops_as_text(each) for each in (1.25e15, 2e6, None)] == ["1.25 PFLOP", "2.00 MFLOP", "–"]
