"""The bill: tokens, FLOPs, hours and dollars of training some data once, as rows, as merged turns and on trees.

FLOPs are those of the facts (`nn.flops`), which the planner and the benchmark count alike. Hours are FLOPs / speed, and
a speed is what steps of training reach on a card: as `treewise bench` measured it, as given, or as expected.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from annotated_types import Ge, Gt, Lt

from treewise.errors import ConfigError, beyond_limits, num
from treewise.report.analysis.facts import TreeFacts

ROWS, MERGED_ROWS, TREES = "as rows", "as merged turns", "as trees"
EPISODES = 1000  # the bill is also made out for
# Of the peak, what steps of training are expected to reach: 289 of the 989 TFLOP/s of an H100 (nn.launching), which
# Qwen3-1.7B reached there on trees as on packed rows; others print 22 to 39 % (benchmarks/reports/gpu.md).
OF_PEAK, EXPECTED_ERROR = 0.29, 0.35
LEAST_ERROR = 0.1  # of other tokens than those that were measured
CONTESTANTS = {ROWS: "flat", MERGED_ROWS: "merged", TREES: "tree"}  # contestants of `treewise bench`


@dataclass(frozen=True, slots=True)
class Speed:
    """FLOPs per second that steps reach on a card, by way of training.

    error: relative; 0 where it was measured on these very tokens, None where the speed was given. source: a sentence.
    """

    card: str
    flops_per_second: dict[str, float]
    error: float | None
    source: str

    @property
    def is_measured(self) -> bool:
        """Whether hours are those of a measurement on the same tokens."""
        return self.error == 0


@dataclass(frozen=True, slots=True)
class Way:
    """One way of training on the data once. hours: of one card. dollars: of these hours. api_dollars: of the tokens."""

    name: str
    num_tokens: int
    flops: float | None
    hours: float | None
    dollars: float | None
    api_dollars: float | None

    def times(self, factor: float) -> "Way":
        """The same for `factor` times as many such data."""

        def scaled(value: float | None) -> float | None:
            return None if value is None else value * factor

        return Way(
            self.name,
            round(self.num_tokens * factor),
            scaled(self.flops),
            scaled(self.hours),
            scaled(self.dollars),
            scaled(self.api_dollars),
        )


@dataclass(frozen=True, slots=True)
class Bill:
    """Three ways, for the data and for `EPISODES` episodes like those in it, and what was assumed."""

    ways: tuple[Way, Way, Way]
    num_episodes: int
    model: str | None
    speed: Speed | None
    dollars_per_hour: float | None
    dollars_per_million: float | None

    @property
    def per_episodes(self) -> tuple[Way, ...]:
        """The ways for `EPISODES` episodes."""
        return tuple(way.times(EPISODES / self.num_episodes) for way in self.ways)

    @property
    def basis(self) -> str:
        """`counted`, `given`, `measured` or `predicted ±35 %`: what hours and dollars of a card rest on."""
        if self.speed is None:
            return "counted"
        if self.speed.error is None:
            return "given"
        return "measured" if self.speed.is_measured else f"predicted ±{100 * self.speed.error:.0f} %"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences for below the table."""
        found = [f"One pass over {num(self.num_episodes, 'episode')}; an episode is a rollout of the log."]
        if self.speed is not None:
            found.append(f"Hours of one card: {self.basis}. {self.speed.source}")
        elif self.model is None:
            found.append("FLOPs need a --model, hours a --card.")
        else:
            found.append("Hours need a --card, and dollars also --dollars_per_hour or --dollars_per_million.")
        if self.dollars_per_hour is not None:
            found.append(f"A card is {dollars_as_text(self.dollars_per_hour)} an hour.")
        if self.dollars_per_million is not None:
            each = dollars_as_text(self.dollars_per_million)
            found.append(
                f"The API takes {each} a million tokens and bills what it is sent, which is rows; the line of trees "
                "has each shared token once."
            )
        rows, _, trees = self.ways
        times = rows.num_tokens / trees.num_tokens
        if rows.hours and trees.hours:
            times = rows.hours / trees.hours
        elif rows.flops and trees.flops:
            times = rows.flops / trees.flops
        found.append(
            "In asynchronous RL, where the trainer waits for samples, no second is saved but cards: "
            f"{8 / times:.1f} of 8 trainer cards are enough. Sampling is not in this bill."
        )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "ways": [asdict(way) for way in self.ways],
            f"per_{EPISODES}_episodes": [asdict(way) for way in self.per_episodes],
            "num_episodes": self.num_episodes,
            "basis": self.basis,
            "error": None if self.speed is None else self.speed.error,
            "card": None if self.speed is None else self.speed.card,
            "flops_per_second": None if self.speed is None else self.speed.flops_per_second,
            "dollars_per_hour": self.dollars_per_hour,
            "dollars_per_million": self.dollars_per_million,
            "assumptions": list(self.assumptions),
        }


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card or an API takes. card: its name, its FLOPs per second, or a file of `treewise bench --json`."""

    card: str | None = None
    dollars_per_hour: float | None = None
    dollars_per_million: float | None = None

    def check(self, model: str | None) -> None:
        """What is wrong before any data is read.

        Raises:
            ConfigError: dollars for an hour of no card, a card without a model, or no such card.
        """
        for name in ("dollars_per_hour", "dollars_per_million"):
            value = getattr(self, name)
            if value is not None and (wanted := beyond_limits(value, (Ge(0), Lt(math.inf)))):
                raise ConfigError(f"--{name} is {value}; it must be {wanted}.")
        if self.card is None and self.dollars_per_hour is not None:
            raise ConfigError("--dollars_per_hour is of a card: give --card, as in --card h100.")
        if self.card is not None and model is None:
            raise ConfigError("--card needs the FLOPs of a model: give --model.")
        if self.card is not None:
            _load(self.card) if self.card.endswith(".json") else _unmeasured(self.card)

    def bill_of(self, total: TreeFacts, model: str | None = None) -> Bill:
        """The bill of inspected data. model: the name of what FLOPs were counted for.

        Raises:
            ConfigError: what `check` or `speed_of` refuses.
        """
        self.check(model)
        speed = None if self.card is None or model is None else speed_of(self.card, total, model)

        def way(name: str, num_tokens: int, flops: float | None) -> Way:
            hours = None if speed is None or flops is None else flops / speed.flops_per_second[name] / 3600
            dollars = None if hours is None or self.dollars_per_hour is None else hours * self.dollars_per_hour
            api = None if self.dollars_per_million is None else num_tokens / 1e6 * self.dollars_per_million
            return Way(name, num_tokens, flops, hours, dollars, api)

        ways = (
            way(ROWS, total.num_call_tokens, total.call_flops),
            way(MERGED_ROWS, total.num_leaf_tokens, total.leaf_flops),
            way(TREES, total.num_tree_tokens, total.tree_flops),
        )
        return Bill(ways, total.num_rollouts, model, speed, self.dollars_per_hour, self.dollars_per_million)


NO_RATES = Rates()


# -- speeds -----------------------------------------------------------------------------------------------------------


def speed_of(card: str, total: TreeFacts, model: str) -> Speed:
    """The speed of `--card`: a card by name, FLOPs per second, or a file that `treewise bench --json` wrote.

    Raises:
        ConfigError: no such card or file, a speed that is not positive, or a file without a step of the model.
    """
    return _measured(card, total, model) if card.endswith(".json") else _unmeasured(card)


def _unmeasured(card: str) -> Speed:
    try:
        given = float(card)
    except ValueError:
        return _expected(card)
    if wanted := beyond_limits(given, (Gt(0), Lt(math.inf))):
        raise ConfigError(f"--card is {card}; FLOPs per second must be {wanted}.")
    return Speed(card, _all(given), None, f"Steps reach {given / 1e12:.4g} TFLOP/s, as given.")


def _all(rate: float) -> dict[str, float]:
    return dict.fromkeys((ROWS, MERGED_ROWS, TREES), rate)


def _expected(card: str) -> Speed:
    from treewise.nn.device import PEAK_FLOPS  # with torch, which takes seconds to import

    known = {_plain(name): name for name in PEAK_FLOPS}
    name = known.get(_plain(card))
    if name is None:
        cards = ", ".join(known)
        raise ConfigError(
            f"--card is {card!r}; give one of {cards}, its FLOPs per second (289e12), or a file of "
            "treewise bench --json."
        )
    rate = OF_PEAK * PEAK_FLOPS[name]
    source = (
        f"Steps are taken to reach {OF_PEAK:.0%} of the {name}'s {PEAK_FLOPS[name] / 1e12:,.0f} TFLOP/s in bfloat16, "
        "as Qwen3-1.7B did on an H100. Models below 1B parameters are slower. To measure yours: treewise bench --json."
    )
    return Speed(name, _all(rate), EXPECTED_ERROR, source)


def _plain(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")


def _measured(file: str, total: TreeFacts, model: str) -> Speed:
    results = _load(file)
    rows = [row for row in results["rows"] if row.get("model") == model and "contestants" in row]
    sizes = (total.num_flat_tokens, total.num_tree_tokens)
    same = next((each for each in (rows, *([row] for row in rows)) if _sizes(each) == sizes), None)
    found = {name: _rates(same or rows, name) for name in CONTESTANTS}
    if not found[ROWS] or not found[TREES]:
        raise ConfigError(
            f"--card {file}: no step of {model} was measured there, flat and on trees; "
            f"run treewise bench DATA --model {model} --json {file}."
        )
    found[MERGED_ROWS] = found[MERGED_ROWS] or found[ROWS]
    card = str(results["hardware"])
    if same is not None:
        # All of the FLOPs over all of the seconds: each workload counts by its size.
        rates = {name: sum(flops for flops, _ in each) / sum(s for _, s in each) for name, each in found.items()}
        return Speed(card, rates, 0.0, f"Steps on these tokens took that long on {card} ({file}).")
    rates = {name: median(flops / seconds for flops, seconds in each) for name, each in found.items()}
    spread = max(abs(flops / s / rates[name] - 1) for name, each in found.items() for flops, s in each)
    source = (
        f"Steps of {model} on {num(len(rows), 'other workload')} reached {rates[TREES] / 1e12:.3g} TFLOP/s there "
        f"({card}, {file})."
    )
    return Speed(card, rates, max(spread, LEAST_ERROR), source)


def _load(file: str) -> dict[str, Any]:
    from treewise.bench.results import load  # with torch

    return load(Path(file))


def _sizes(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    return sum(row["flat_tokens"] for row in rows), sum(row["tree_tokens"] for row in rows)


def _rates(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """FLOPs that one way needs for each row that measured it, and its seconds."""
    bounds = {ROWS: "flop_bound", MERGED_ROWS: "leaf_flop_bound"}
    rates = []
    for row in rows:
        result = row["contestants"].get(CONTESTANTS[name], {})
        if "seconds" in result:
            flops = row["tree_flops"] * (row[bounds[name]] if name in bounds else 1.0)
            rates.append((flops, result["seconds"]["median"]))
    return rates


# -- as text ----------------------------------------------------------------------------------------------------------


def headline(bill: Bill) -> str:
    """The bill in a line, by what is known: dollars, else hours, else FLOPs, else tokens."""
    rows, _, trees = bill.per_episodes
    (_, before), (_, after), times = figure_of(rows), figure_of(trees), measure(rows) / measure(trees)
    return f"{before} as rows, {after} as trees for {EPISODES:,} episodes: {times:.1f} times less"


def measure(way: Way) -> float:
    """What a way is compared by."""
    known = (way.dollars, way.api_dollars, way.hours, way.flops)
    return next((each for each in known if each is not None), float(way.num_tokens))


def figure_of(way: Way) -> tuple[str, str]:
    """The same with its name, as text."""
    if way.dollars is not None:
        return "dollars", dollars_as_text(way.dollars)
    if way.api_dollars is not None:
        return "dollars of the API", dollars_as_text(way.api_dollars)
    if way.hours is not None:
        return "time of a card", time_as_text(way.hours)
    return ("tokens", f"{way.num_tokens:,} tokens") if way.flops is None else ("FLOPs", flops_as_text(way.flops))


def cells(way: Way) -> dict[str, str]:
    """What is known of a way, by column."""
    found = {"tokens": f"{way.num_tokens:,}"}
    if way.flops is not None:
        found["FLOPs"] = flops_as_text(way.flops)
    if way.hours is not None:
        found["card time"] = time_as_text(way.hours)
    if way.dollars is not None:
        found["dollars"] = dollars_as_text(way.dollars)
    if way.api_dollars is not None:
        found["by API"] = dollars_as_text(way.api_dollars)
    return found


def flops_as_text(value: float | None) -> str:
    """FLOPs with a prefix: 1.2e15 as 1.20 PFLOP."""
    if value is None:
        return "–"
    for limit, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= limit:
            return f"{value / limit:,.2f} {prefix}FLOP"
    return f"{value / 1e6:,.2f} MFLOP"


def time_as_text(hours: float) -> str:
    """Hours, minutes or seconds, with three figures."""
    seconds = 3600 * hours
    value, unit = (hours, "h") if hours >= 1 else (seconds / 60, "min") if seconds >= 60 else (seconds, "s")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def dollars_as_text(value: float) -> str:
    """Dollars with cents, or with two figures where they are less than ten cents."""
    return f"${value:,.{max(2, 1 - math.floor(math.log10(value)) if value > 0 else 2)}f}"
