"""Draws of settings together, until every two values of two settings have met; what a draw found; the shrunk draw.

Pairs are covered greedily, row by row (AETG: Cohen, Dalal, Fredman and Patton, 1997), instead of by a library's array,
because rows come at once (covertable 3.2 takes 8 s for the first) and expensive values stay rare.
"""

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, count
from typing import Any

from treewise.errors import TreewiseError

Draw = dict[str, Any]  # the value of each setting by name, and `seed`, of weights and data
Pair = tuple[str, Any, str, Any]
KINDS = ("equal", "refused", "impossible", "wrong")


class ImpossibleError(Exception):
    """What was drawn does not exist without treewise: transformers, PEFT or torch refuse it."""


class WrongError(AssertionError):
    """A number that differs from flat training by more than its tolerance."""


@dataclass(frozen=True)
class Rule:
    """What may stand together. names: of the settings that it reads. holds: is called with their values."""

    names: tuple[str, ...]
    holds: Callable[..., bool]

    def allows(self, draw: Mapping[str, Any]) -> bool:
        """Whether it holds, as far as the settings are there."""
        return any(name not in draw for name in self.names) or self.holds(*(draw[name] for name in self.names))


@dataclass(frozen=True)
class Outcome:
    """kind: of `KINDS`. reason: the error's class, or the first line of what is wrong. text: all of it."""

    kind: str
    reason: str = ""
    text: str = ""


@dataclass(frozen=True)
class Crossings:
    """A space of settings and what must hold in it.

    settings: the values of each setting; the first is the default, to which a wrong draw is shrunk. check: computes a
    draw; returns where all is equal, raises `TreewiseError` where it is refused and `WrongError` where it is not equal.
    rarity: a value is left out of all but one in so many draws where its own pairs do not need it.
    """

    settings: Mapping[str, Sequence[Any]]
    rules: Sequence[Rule]
    check: Callable[[Draw], None]
    rarity: Mapping[tuple[str, Any], float] = field(default_factory=dict)

    @property
    def defaults(self) -> Draw:
        return {name: values[0] for name, values in self.settings.items()}

    def among(self, name: str, values: str) -> "Crossings":
        """With some values of a setting alone, as they are printed, parted by commas."""
        kept = tuple(value for value in self.settings[name] if str(value) in values.split(","))
        if len(kept) < len(values.split(",")):
            raise SystemExit(f"{name} is one of {', '.join(map(str, self.settings[name]))}, not of {values}.")
        return replace(self, settings={**self.settings, name: kept})

    def allows(self, draw: Mapping[str, Any]) -> bool:
        return all(rule.allows(draw) for rule in self.rules)

    def draws(self, seed: int) -> Iterator[Draw]:
        """Draws without end: first those that cover all pairs, then others by chance."""
        dice, uncovered = random.Random(seed), self._pairs()
        for number in count():
            begun: Draw = {}
            if uncovered:
                sample = dice.sample(list(uncovered), min(len(uncovered), 8))
                a, x, b, y = dice.choices(sample, [self._weight(a, x) * self._weight(b, y) for a, x, b, y in sample])[0]
                begun = {a: x, b: y}
            row = self._completed(begun, uncovered, dice)
            if row is None:  # rules forbid it by way of a third setting
                del uncovered[a, x, b, y]
                continue
            for pair in _pairs_of(row):
                uncovered.pop(pair, None)
            yield {**row, "seed": seed * 1_000_000 + number}

    def num_uncovered(self, draws: Sequence[Draw]) -> int:
        """Allowed pairs that none of some draws holds."""
        met = {pair for draw in draws for pair in _pairs_of({name: draw[name] for name in self.settings})}
        left = [pair for pair in self._pairs() if pair not in met]
        return sum(self._completed({a: x, b: y}, {}, random.Random(0)) is not None for a, x, b, y in left)

    def judge(self, draw: Draw) -> Outcome:
        return judged(self.check, draw)

    def shrunk(self, draw: Draw) -> Draw:
        """A wrong draw with as many settings at their defaults as leave it wrong, one after the other."""
        changed = True
        while changed:
            changed = False
            for name, default in self.defaults.items():
                simpler = {**draw, name: default}
                if draw[name] != default and self.allows(simpler) and self.judge(simpler).kind == "wrong":
                    draw, changed = simpler, True
        return draw

    def _pairs(self) -> dict[Pair, None]:
        values = (
            (a, x, b, y) for a, b in combinations(self.settings, 2) for x in self.settings[a] for y in self.settings[b]
        )
        return dict.fromkeys((a, x, b, y) for a, x, b, y in values if self.allows({a: x, b: y}))

    def _weight(self, name: str, value: object) -> float:
        return 1.0 / self.rarity.get((name, value), 1.0)

    def _completed(self, begun: Draw, uncovered: Mapping[Pair, None], dice: random.Random) -> Draw | None:
        """A whole row from some values; None where ten attempts met a rule."""
        for _ in range(10):
            row = dict(begun)
            values = [(name, value) for name, values in self.settings.items() for value in values]
            admitted = {each for each in values if dice.random() < self._weight(*each)}
            names = [name for name in self.settings if name not in row]
            dice.shuffle(names)
            for name in names:
                allowed = [value for value in self.settings[name] if self.allows({**row, name: value})]
                if not allowed:
                    break
                common = [value for value in allowed if (name, value) in admitted] or allowed
                gains = [self._gain(row, name, value, uncovered) for value in common]
                row[name] = dice.choice(
                    [value for value, gain in zip(common, gains, strict=True) if gain == max(gains)]
                )
            else:
                return {name: row[name] for name in self.settings}
        return None

    def _gain(self, row: Draw, name: str, value: object, uncovered: Mapping[Pair, None]) -> int:
        """How many uncovered pairs a value makes with those of a row."""
        order = list(self.settings)
        index = order.index(name)
        return sum(
            ((name, value, other, chosen) if index < order.index(other) else (other, chosen, name, value)) in uncovered
            for other, chosen in row.items()
        )


def judged(check: Callable[[Draw], None], draw: Draw) -> Outcome:
    """What a check finds in a draw."""
    try:
        check(draw)
    except ImpossibleError as error:
        return Outcome("impossible", str(error).partition("\n")[0][:200], str(error))
    except TreewiseError as error:
        return Outcome("refused", type(error).__name__, str(error))
    except WrongError as error:
        return Outcome("wrong", str(error).partition("\n")[0], str(error))
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {error}"[:200], traceback.format_exc())
    return Outcome("equal")


@dataclass
class Report:
    """What some draws found: outcomes by kind, and those of each kind by reason."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS)
        lines = [f"seed {self.seed}: {self.counts.total()} draws in {self.seconds:.0f} s: {kinds}"]
        return "\n".join(
            [*lines, *(f"  {kind} {n} times: {why}" for (kind, why), n in self.reasons.most_common() if why)]
        )


def run(
    crossings: Crossings,
    seed: int,
    *,
    num_draws: int | None = None,
    minutes: float | None = None,
    skip: int = 0,
    log: Callable[[str], None] = print,
) -> Report:
    """Judges draws of a seed until so many, or so many minutes, are over; logs wrong ones at once, the first five of
    them shrunk. skip: draws at the beginning that are left out.
    """
    report, begun = Report(seed), time.monotonic()
    for number, draw in enumerate(crossings.draws(seed)):
        report.seconds = time.monotonic() - begun
        if number - skip == num_draws or (minutes is not None and report.seconds > 60 * minutes):
            break
        if number < skip:
            continue
        outcome = crossings.judge(draw)
        report.counts[outcome.kind] += 1
        report.reasons[outcome.kind, outcome.reason] += 1
        if outcome.kind == "wrong":
            changed = {name: value for name, value in draw.items() if value != crossings.defaults.get(name)}
            log(f"wrong, draw {number}: {changed}\n{outcome.text}")
            if report.counts["wrong"] <= 5:
                log(f"shrunk, for {crossings.check.__module__}.check:\n{crossings.shrunk(draw)}")
    return report


def _pairs_of(row: Draw) -> Iterator[Pair]:
    for (a, x), (b, y) in combinations(row.items(), 2):
        yield a, x, b, y
