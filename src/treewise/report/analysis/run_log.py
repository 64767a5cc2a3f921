"""The log of a run: loss, speed, sharing and memory by optimizer step, read from its output folder."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treewise.base.own_files import read_own
from treewise.errors import ConfigError
from treewise.report.analysis.online_log import OnlineReport, read_online

STATE = "trainer_state.json"
RESOLVED = "resolved_config.yaml"
MAX_CONFIG_CHARS = 100_000
MAX_DRAWN = 1e150  # nothing that a run logs is larger, but for infinity; axes need room to compute

# Keys of the log: chart, label, unit. Further numeric keys are drawn one chart each.
KNOWN = {
    "loss": ("loss", "training", "nats per trained token"),
    "eval_loss": ("loss", "evaluation", "nats per trained token"),
    "tokens_per_second_flat": ("speed", "flat tokens", "tokens per second"),
    "tokens_per_second_tree": ("speed", "tree tokens", "tokens per second"),
    "tokens_per_second_computed": ("speed", "computed tokens, recomputed ones included", "tokens per second"),
    "share_ratio": ("share ratio", "share ratio", "flat / tree"),
    "leaf_ratio": ("share ratio", "leaf ratio", "flat / tree"),
    "flop_bound": ("share ratio", "FLOP bound", "flat / tree"),
    "efficiency": ("efficiency", "efficiency", "speed-up / FLOP bound"),
    "efficiency_at_least": ("efficiency", "at least, against matrix products alone", "speed-up / FLOP bound"),
    "mfu": ("use of the device (MFU)", "FLOPs that the trees need", "share of what the device reaches at most"),
    "batch_wait_share": ("waiting for batches", "waiting for batches", "share of the time"),
    "arithmetic": ("arithmetic", "FLOPs that the trees need", "TFLOP per second"),
    "memory_bytes": ("memory", "in use", "GiB"),
    "tree_tokens": ("tree tokens", "tree tokens", "tokens"),
    "grad_norm": ("gradient norm", "gradient norm", "norm"),
    "learning_rate": ("learning rate", "learning rate", "per step"),
    # of an online run, by iteration
    "reward": ("reward", "training", "mean of the rollouts"),
    "eval_reward": ("reward", "held out", "mean of the rollouts"),
    "success": ("success", "training", "share of the rollouts"),
    "eval_pass@1": ("success", "held out, pass@1", "share of the rollouts"),
    "rollout_length": ("length of a rollout", "training", "generated tokens"),
    "eval_length": ("length of a rollout", "held out", "generated tokens"),
    "branch_depth": ("branch depth", "branch depth", "generated tokens before a branch"),
    "seconds_sampling": ("seconds", "sampling", "seconds of an iteration"),
    "seconds_reward": ("seconds", "rewards", "seconds of an iteration"),
    "seconds_update": ("seconds", "update", "seconds of an iteration"),
    "logprob_gap": ("logprob gap", "sampler against engine", "mean of exp(|difference|), 1: none"),
}
_UNITS = {"bytes": "bytes", "gib": "GiB", "seconds": "seconds", "tokens": "tokens", "runtime": "seconds"}
_NOT_DRAWN = re.compile("step|epoch|iteration|total_flos|.*_runtime|.*_(samples|steps)_per_second")
_FIRST_ONLINE = ("reward", "success", "share ratio", "branch depth", "entropy")
_FIRST = ("loss", "speed", "share ratio", "efficiency", "memory", "arithmetic")


@dataclass(frozen=True, slots=True)
class Series:
    """One logged value by optimizer step; `unit` is that of its chart."""

    key: str
    chart: str
    label: str
    unit: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run, read from its folder. summary: totals that the trainer writes at the end.

    absent: charts without values in this log. num_not_finite: logged values that are not finite; not drawn. online: of
    a run that sampled its rollouts itself.
    """

    folder: str
    log: str
    num_steps: int
    max_steps: int
    num_epochs: float | None
    is_finished: bool
    series: tuple[Series, ...]
    summary: Mapping[str, float]
    absent: tuple[str, ...]
    num_not_finite: int
    config: str | None
    online: OnlineReport | None = None

    @property
    def charts(self) -> list[list[Series]]:
        """Series that share a chart, in the order to be shown."""
        groups: dict[str, list[Series]] = {}
        for each in self.series:
            groups.setdefault(each.chart, []).append(each)
        order = _FIRST if self.online is None else (*_FIRST_ONLINE, *_FIRST)
        rank = {name: index for index, name in reversed(list(enumerate(order)))}
        return [groups[name] for name in sorted(groups, key=lambda name: rank.get(name, len(rank)))]

    @property
    def learned(self) -> str:
        """A sentence of the reward before and after, held out where the run was tried so; empty without one."""
        by_key = {each.key: each for each in self.series}
        best = next((by_key[key] for key in ("eval_pass@1", "eval_reward", "reward") if key in by_key), None)
        if best is None:
            return ""
        found = [
            f"{value:.3g} " + (f"after iteration {step}" if step else "before the first update")
            for step, value in zip(best.steps, best.values, strict=True)
        ]
        return f"{best.chart.capitalize()}, {best.label}: {', '.join(dict.fromkeys([found[0], found[-1]]))}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"series": [asdict(each) for each in self.series], "summary": dict(self.summary)}


def read_run(folder: str | Path) -> RunReport:
    """The log of a run: of its folder, or of its newest checkpoint while it still trains.

    Raises:
        ConfigError: no folder, no log in it, or one that is damaged.
    """
    run = Path(folder)
    state_file = _state_file(run)
    state, history, num_steps, max_steps = read_own(state_file, _read_state, "it is not the log of a run")
    # The last entry holds totals of the whole run, under keys of their own.
    totals = [entry for entry in history if "train_runtime" in entry]
    steps = [entry for entry in history if "train_runtime" not in entry]
    series = _series(steps, _flops_per_token(state, steps))
    have = {each.chart for each in series}
    online = read_online(run, steps)
    summary = {key: value for key, value in (totals[-1] if totals else {}).items() if _is_number(value)}
    return RunReport(
        folder=str(run),
        log=str(state_file),
        num_steps=num_steps,
        max_steps=max_steps,
        num_epochs=float(state["epoch"]) if _is_number(state.get("epoch")) else None,
        is_finished=bool(totals) or (0 < max_steps <= num_steps),
        series=tuple(series),
        summary=summary,
        absent=tuple(name for name in (_FIRST[:5] if online is None else _FIRST_ONLINE) if name not in have),
        num_not_finite=sum(
            isinstance(value, int | float) and not isinstance(value, bool) and not _is_number(value)
            for entry in history
            for value in entry.values()
        ),
        config=_config(run),
        online=online,
    )


def _read_state(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]], int, int]:
    """transformers' state of a run, what it logged, its steps, and the steps that it shall have."""
    state = json.loads(data)
    history = [entry for entry in state["log_history"] if isinstance(entry, dict)]
    return state, history, int(state.get("global_step", 0)), int(state.get("max_steps") or 0)


def _state_file(run: Path) -> Path:
    if not run.is_dir():
        what = "a file, not a folder" if run.exists() else "no such folder"
        raise ConfigError(f"{run}: {what}; give the output_dir of a run.")
    if (run / STATE).is_file():
        return run / STATE
    candidates = [path for path in run.glob(f"checkpoint-*/{STATE}") if path.parent.name.rpartition("-")[2].isdigit()]
    if not candidates:
        raise ConfigError(f"{run}: no {STATE}, neither there nor in a checkpoint; is it the output_dir of a run?")
    return max(candidates, key=lambda path: int(path.parent.name.rpartition("-")[2]))


def _flops_per_token(state: dict[str, Any], history: list[dict[str, Any]]) -> float | None:
    """FLOPs per tree token, from the sums of the trainer; None without them."""
    tokens = sum(entry["tree_tokens"] for entry in history if _is_number(entry.get("tree_tokens")))
    flops = state.get("total_flos")
    return float(flops) / tokens if _is_number(flops) and flops and tokens else None


def _series(history: list[dict[str, Any]], flops_per_token: float | None) -> list[Series]:
    points: dict[str, dict[int, float]] = {}
    for entry in history:
        step = entry.get("step")
        if not isinstance(step, int) or not _is_number(step):
            continue
        for key, value in entry.items():
            if _is_number(value) and not _NOT_DRAWN.fullmatch(str(key)):
                points.setdefault(str(key), {})[step] = float(value)  # a step logged again replaces itself
    speed = points.get("tokens_per_second_tree", {})
    if flops_per_token is not None:
        points["arithmetic"] = {step: value * flops_per_token / 1e12 for step, value in speed.items()}
    if "memory_bytes" in points:
        points["memory_bytes"] = {step: value / 2**30 for step, value in points["memory_bytes"].items()}
    series = []
    order = {key: index for index, key in enumerate(KNOWN)}
    for key in sorted(points, key=lambda key: order.get(key, len(order))):  # stable: others as they were logged
        values = points[key]
        chart, label, unit = KNOWN.get(key) or _described(key)
        steps = sorted(values)
        series.append(Series(key, chart, label, unit, tuple(steps), tuple(values[step] for step in steps)))
    return series


def _described(key: str) -> tuple[str, str, str]:
    """Chart, label and unit of a key that is not known: its words, and the unit that one of them names."""
    words = key.lower().split("_")
    label = key.replace("_", " ")
    unit = next((_UNITS[word] for word in words if word in _UNITS), "")
    if "memory" in words or unit in ("bytes", "GiB"):
        return f"memory{', GiB' if unit == 'GiB' else ''}", label, unit or "bytes"
    return label, label, unit


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_DRAWN


def _config(run: Path) -> str | None:
    """The settings of a run as text, or why they cannot be shown."""
    if not (run / RESOLVED).exists():
        return None
    try:
        return read_own(run / RESOLVED, bytes.decode, "the settings cannot be shown")[:MAX_CONFIG_CHARS]
    except ConfigError as error:
        return f"# {error}"
