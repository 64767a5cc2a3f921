"""What a run's curriculum drew and when, its predictions against what came, and the verdict of its self-check."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treewise.errors import ConfigError
from treewise.rl.curriculum.correlation import spearman
from treewise.rl.curriculum.self_check import CheckReport

NUM_WINDOWS, NUM_BINS = 10, 10


@dataclass(frozen=True, slots=True)
class DrawnItem:
    """One item. iterations: in which it was drawn, the first is 1. predicted, observed: probabilities of success at its
    last draw; observed is None where no rollout has a reward. num_kept: draws after which its tree could be trained.
    """

    item: str
    iterations: tuple[int, ...]
    predicted: float
    observed: float | None
    num_kept: int


@dataclass(frozen=True, slots=True)
class Window:
    """Some iterations in a row: mean predicted and observed success over their trials, and the rank correlation of
    predicted with observed p (1 - p) over their draws; None with fewer than 3.
    """

    first: int
    last: int
    num_draws: int
    predicted: float
    observed: float
    correlation: float | None


@dataclass(frozen=True, slots=True)
class CurriculumReport:
    """name: of the curriculum. items: most drawn first. windows: over time. bins: of predictions in tenths, (mean
    predicted, observed rate, trials). check: of the self-check, as it was saved; check_text: for people.
    """

    name: str
    num_iterations: int
    num_draws: int
    items: tuple[DrawnItem, ...]
    windows: tuple[Window, ...]
    bins: tuple[tuple[float, float, float], ...]
    check: dict[str, Any] | None
    check_text: str | None


def read_curriculum(run: Path) -> CurriculumReport | None:
    """What lies in a run's folder; None where there is nothing.

    Raises:
        ConfigError: a damaged file.
    """
    from treewise.rl.online.records import CHECK, DRAWS  # with the trainer, which reports on data do without

    try:
        files = sorted((run / DRAWS).glob("iteration-*.json"))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        draws = [{**draw, "iteration": each["iteration"]} for each in found for draw in each["draws"]]
        saved = run / DRAWS / CHECK
        check: dict[str, Any] | None = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else None
        if not draws and check is None:
            return None
        name = (check or found[0])["curriculum"]
        text = None if check is None else CheckReport.from_dict(check).text()
        return CurriculumReport(name, len(found), len(draws), _items(draws), _windows(draws), _bins(draws), check, text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / DRAWS}: not what a run drew ({type(error).__name__}: {error}).") from None


def _items(draws: Sequence[dict[str, Any]]) -> tuple[DrawnItem, ...]:
    by_item: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for draw in draws:
        by_item[draw["item"]].append(draw)
    items = [
        DrawnItem(
            item=item,
            iterations=tuple(each["iteration"] for each in own),
            predicted=own[-1]["predicted"],
            observed=own[-1]["observed"],
            num_kept=sum(each["is_kept"] for each in own),
        )
        for item, own in by_item.items()
    ]
    return tuple(sorted(items, key=lambda each: (-len(each.iterations), each.item)))


def _known(draws: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predicted and observed success, and trials, of the draws with rewards; [n] float64 each."""
    rows = [(each["predicted"], each["observed"], each["trials"]) for each in draws if each["observed"] is not None]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _windows(draws: Sequence[dict[str, Any]]) -> tuple[Window, ...]:
    iterations = sorted({each["iteration"] for each in draws})
    windows = []
    for part in np.array_split(iterations, min(NUM_WINDOWS, len(iterations))) if iterations else ():
        predicted, observed, trials = _known([each for each in draws if each["iteration"] in set(part.tolist())])
        if not trials.sum():
            continue
        has_correlation = len(predicted) >= 3
        found = float(spearman(predicted * (1 - predicted), observed * (1 - observed))) if has_correlation else None
        means = [float(np.average(values, weights=trials)) for values in (predicted, observed)]
        windows.append(Window(int(part[0]), int(part[-1]), len(predicted), means[0], means[1], found))
    return tuple(windows)


def _bins(draws: Sequence[dict[str, Any]]) -> tuple[tuple[float, float, float], ...]:
    predicted, observed, trials = _known(draws)
    index = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
    found = []
    for number in range(NUM_BINS):
        inside = (index == number) & (trials > 0)
        if inside.any():
            weights = trials[inside]
            means = [float(np.average(values[inside], weights=weights)) for values in (predicted, observed)]
            found.append((means[0], means[1], float(weights.sum())))
    return tuple(found)
