"""What an online run leaves in its folder: reward over tokens, predictions and what came, trees of rollouts, draws."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treewise.advantages import segment_values
from treewise.base.arrays import Floats
from treewise.base.own_files import damage, read_own, unsealed
from treewise.errors import DataError
from treewise.report.analysis.agent_calls import AgentReport, EpisodeLine, agent_report, parsed_line
from treewise.report.analysis.facts import sum_facts, tree_facts
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

FOLDER, EVALUATIONS, DRAWS, CALLS = "rollouts", "evaluations", "curriculum", "calls"
_NUM_PARTS = 10  # of predictions from 0 to 1, in the calibration
_OVER_TOKENS = {"reward": "reward, training", "eval_reward": "reward, held out", "eval_pass@1": "pass@1, held out"}
_MAX_ROWS = 20_000  # of one iteration that is read for its trees
_MAX_HELD_OUT = 12  # held-out items that are shown
_ADVICE = "move it away, and the page is made without it"
_MAX_CHARS = 4_000  # of a text; the end of a longer prompt is shown


@dataclass(frozen=True, slots=True)
class TokenSeries:
    """A value by the generated tokens of the iterations up to it."""

    label: str
    tokens: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TreePiece:
    """A piece of a tree without forks: tokens [start, end), its row in the picture (leaves are whole numbers, forks lie
    in the middle of their children), the piece before it (-1: none), and its value, the mean over draws
    (`treewise.advantages.segment_values`): where a rollout ends, its reward.
    """

    start: int
    end: int
    row: float
    parent: int
    value: float
    is_leaf: bool


@dataclass(frozen=True, slots=True)
class RewardTree:
    """A tree of rollouts. which: `best` or `worst` of its iteration by mean reward. prompt_tokens: before the first
    trained one. prompt, rollouts: texts, the latter with rewards, best first; empty where rows hold no text.
    """

    iteration: int
    which: str
    group: str
    num_rollouts: int
    mean_reward: float
    prompt_tokens: int
    pieces: tuple[TreePiece, ...]
    prompt: str = ""
    rollouts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class HeldOutChange:
    """A held-out item at the first and at the last evaluation: what was sampled, and its reward (None: it failed)."""

    key: str
    prompt: str
    iterations: tuple[int, int]
    completions: tuple[str, str]
    rewards: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class OnlineReport:
    """predicted, observed: success by the book and in fact, of each tenth that had trials; trials: their numbers.
    agent: the calls of the last iteration, where an agent made them.
    """

    over_tokens: tuple[TokenSeries, ...]
    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    trials: tuple[float, ...]
    trees: tuple[RewardTree, ...]
    held_out: tuple[HeldOutChange, ...] = ()
    agent: AgentReport | None = None


def read_online(run: Path, history: Sequence[Mapping[str, Any]]) -> OnlineReport | None:
    """What an online run left in its folder; None for another kind of run.

    Raises:
        DataError: rollouts that are not rows, draws that are not as they are written.
    """
    if not any("sampled_tokens" in entry for entry in history):
        return None
    predicted, observed, trials = _calibration(run)
    found = (_over_tokens(history), predicted, observed, trials, _trees(run), _held_out(run), _agent(run))
    return OnlineReport(*found)


def _over_tokens(history: Sequence[Mapping[str, Any]]) -> tuple[TokenSeries, ...]:
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in _OVER_TOKENS}
    total = 0
    for entry in history:
        total += int(entry.get("sampled_tokens", 0))
        for name, own in points.items():
            if _is_finite(entry.get(name)):
                own.append((total, float(entry[name])))
    return tuple(
        TokenSeries(label, tuple(at for at, _ in points[name]), tuple(value for _, value in points[name]))
        for name, label in _OVER_TOKENS.items()
        if points[name]
    )


def _calibration(run: Path) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Predicted and observed success and trials, of each tenth of the predictions: from the draws of items that an
    earlier iteration had tried.
    """
    sums, tried = np.zeros((3, _NUM_PARTS)), set[int]()
    for path in _files(run / DRAWS):
        known = read_own(path, _read_draws, f"draws of an iteration: {_ADVICE}", DataError)
        for index, (predicted, observed, trials) in known:
            if index in tried:
                part = max(0, min(int(predicted * _NUM_PARTS), _NUM_PARTS - 1))
                sums[:, part] += trials * np.array([predicted, observed, 1.0])
        tried |= {index for index, _ in known}
    found: Floats = sums[:, sums[2] > 0]
    means: list[list[float]] = (found[:2] / found[2]).tolist()
    trials_of: list[float] = found[2].tolist()
    return tuple(means[0]), tuple(means[1]), tuple(trials_of)


def _read_draws(data: bytes) -> list[tuple[int, list[float]]]:
    """Index, and prediction, observed success and trials of the items whose outcome is known."""
    known = [each for each in unsealed(data, may_lack=True)["draws"] if each["observed"] is not None]
    names = ("predicted", "observed", "trials")
    return [(int(each["index"]), [_finite(each[name]) for name in names]) for each in known]


def _each_line(take: Callable[[dict[str, Any]], None], data: bytes) -> None:
    """Gives the objects of the first lines of a file away. Raises `ValueError` with the line where that raises."""
    for number, line in enumerate(data.decode().splitlines()[:_MAX_ROWS], start=1):
        try:
            take(json.loads(line))
        except Exception as error:  # of JSON, or of what takes it
            raise ValueError(f"line {number}: {damage(error)}") from None


def _finite(value: object) -> float:
    if not _is_finite(value):
        raise ValueError(f"found {value!r:.20} for a number")
    return float(value)  # type: ignore[arg-type]


def _trees(run: Path) -> tuple[RewardTree, ...]:
    """The best and the worst tree of the first and the last iteration."""
    files = _files(run / FOLDER)
    found: list[RewardTree] = []
    for path in dict.fromkeys(files[:1] + files[-1:]):
        groups, texts = _groups(path)
        ranked = sorted(groups, key=lambda name: (np.mean([row.reward or 0.0 for row in groups[name]]), name))
        chosen = {"best": ranked[-1], "worst": ranked[0]} if ranked else {}
        for which, name in chosen.items() if len(ranked) > 1 else list(chosen.items())[:1]:
            found.append(reward_tree(groups[name], _iteration(path) or 0, which, name, texts.get(name, ())))
    return tuple(found)


def _agent(run: Path) -> AgentReport | None:
    """The last iteration of an agent, with the sharing of its rows; None of another run."""
    files = _files(run / CALLS)
    if not files:
        return None
    lines = list[EpisodeLine]()

    def take(line: dict[str, Any]) -> None:
        lines.append(parsed_line(line))

    read_own(files[-1], partial(_each_line, take), f"calls of an agent: {_ADVICE}", DataError)
    rows = run / FOLDER / files[-1].name
    groups = _groups(rows)[0].values() if rows.is_file() else ()
    forests = [Forest.from_trajectories(own) for own in groups]
    total = sum_facts("all", [tree_facts("", forest) for forest in forests]) if forests else None
    ratios = (1.0, 1.0, 1.0) if total is None else (total.call_ratio, total.share_ratio, total.leaf_ratio)
    return agent_report(_iteration(files[-1]) or 0, lines, *ratios)


def _held_out(run: Path) -> tuple[HeldOutChange, ...]:
    """The first held-out items at the first and the last evaluation."""
    files = _files(run / EVALUATIONS)
    if len(files) < 2:
        return ()
    first, last = (_samples(path) for path in (files[0], files[-1]))
    iterations = (_iteration(files[0]) or 0, _iteration(files[-1]) or 0)
    return tuple(
        HeldOutChange(
            key,
            str(one["prompt"])[-_MAX_CHARS:],
            iterations,
            (str(one["completion"])[:_MAX_CHARS], str(last[key]["completion"])[:_MAX_CHARS]),
            (one["reward"], last[key]["reward"]),
        )
        for key, one in first.items()
        if key in last
    )[:_MAX_HELD_OUT]


def _samples(path: Path) -> dict[str, dict[str, Any]]:
    """Held-out samples by the key of their item."""

    found = {}

    def take(sample: dict[str, Any]) -> None:
        reward = None if sample["reward"] is None else _finite(sample["reward"])
        texts = {name: sample[name] for name in ("prompt", "completion")}
        found[str(sample["key"])] = {**texts, "reward": reward}

    read_own(path, partial(_each_line, take), f"held-out samples: {_ADVICE}", DataError)
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("iteration-*.json*") if _iteration(path) is not None)


def _iteration(path: Path) -> int | None:
    match = re.fullmatch(r"iteration-(\d+)", path.stem)
    return int(match.group(1)) if match else None


def _groups(path: Path) -> tuple[dict[str, list[Trajectory]], dict[str, list[tuple[str, str]]]]:
    """Rows by group; and their prompts and completions, where they hold these."""
    groups: dict[str, list[Trajectory]] = {}
    texts: dict[str, list[tuple[str, str]]] = {}

    def take(row: dict[str, Any]) -> None:
        item = Trajectory(row["token_ids"], row["loss_weights"], reward=row["reward"], draws=row.get("draws"))
        group = str(row.get("group"))
        groups.setdefault(group, []).append(item)
        if "prompt_text" in row and "completion_text" in row:
            texts.setdefault(group, []).append((str(row["prompt_text"]), str(row["completion_text"])))

    read_own(path, partial(_each_line, take), f"rows of rollouts: {_ADVICE}", DataError)
    return groups, texts


def reward_tree(
    rows: Sequence[Trajectory], iteration: int, which: str, group: str, texts: Sequence[tuple[str, str]] = ()
) -> RewardTree:
    """The picture of one tree. Rollouts with equal tokens are one leaf, whose value is their mean. texts: prompt and
    completion of each row, or none.
    """
    forest = Forest.from_trajectories(list(rows))
    segments = forest.segments
    starts, parents = segments.start.tolist(), segments.parent.tolist()
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(parents):
        children.setdefault(parent, []).append(index)
    row_of = [0.0] * len(starts)
    judged = [replace(row, group=group, reward=row.reward or 0.0) for row in rows]
    value_of = np.zeros(forest.num_tokens)
    for path, values in zip(forest.paths, segment_values(judged), strict=True):
        value_of[path] = values
    leaves = iter(range(len(starts)))
    for index in range(len(starts)):  # depth-first: leaves get their rows from top to bottom
        if index not in children:
            row_of[index] = float(next(leaves))
    for index in reversed(range(len(starts))):
        below = children.get(index, [])
        if below:
            row_of[index] = sum(row_of[child] for child in below) / len(below)
    sizes = zip(segments.depth.tolist(), segments.lengths.tolist(), starts, strict=True)
    pieces = [
        TreePiece(
            depth,
            depth + length,
            row_of[index],
            parents[index],
            float(value_of[start + length - 1]),
            index not in children,
        )
        for index, (depth, length, start) in enumerate(sizes)
    ]
    first = min(int(np.argmax(row.loss_weights > 0)) for row in rows)
    mean = float(np.mean([row.reward or 0.0 for row in rows]))
    pairs = zip([completion[:_MAX_CHARS] for _, completion in texts], rows, strict=False)
    rollouts = sorted(((text, float(row.reward or 0.0)) for text, row in pairs), key=lambda pair: -pair[1])
    prompt = texts[0][0][-_MAX_CHARS:] if texts else ""
    return RewardTree(iteration, which, group, len(rows), mean, first, tuple(pieces), prompt, tuple(rollouts))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
