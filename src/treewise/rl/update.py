"""From the recorded rollouts of a batch to what an update trains on: advantages, streams, log-probs, in that order.

    update = credited(trees, objective)
    update = with_streams(update, objective, num_updates=4)
    update = scored(update, engine, batch_size=8)

Computed log-probs are saved beside the run (`save_scores`), so that a resumed run trains against the same, bit for bit.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from treewise.advantages import AdvantageReport
from treewise.engine.engine import TreeEngine
from treewise.errors import CheckpointError, ConfigError, num
from treewise.objectives import logprob_gap
from treewise.rl.rollout_batch import (
    GIVEN,
    Streams,
    Trees,
    choose_streams,
    credit,
    fill_streams,
    method_of,
    without_groups,
    without_partial_sampler,
)
from treewise.tree.trajectory import Trajectory, number_rollouts

logger = logging.getLogger("treewise")

SCORES = "scored.safetensors"
_DIGEST = "sha256"  # of the log-probs
_NO_STREAMS = Streams(None, None)
_OLD = {
    GIVEN: "the rows' own",
    "sampler": "the sampler's",
    "policy": "computed with the policy before the update",
    None: "not needed (one update of the policy that sampled: the ratio is 1)",
}
_REF = {GIVEN: "the rows' own", None: "not needed (no KL)"}


@dataclass(frozen=True, slots=True)
class Update:
    """What an update trains on, and how it came about.

    Attributes:
        trees: the trajectories of each tree.
        method: how rewards became advantages; None for objectives without advantages.
        report: of the advantages; None where they were given.
        num_dropped: groups without variance that were left out.
        streams: where old and reference log-probs come from.
        num_without_sampler: rows without `sampler_logprobs`.
    """

    trees: Trees
    method: str | None = None
    report: AdvantageReport | None = None
    num_dropped: int = 0
    streams: Streams = _NO_STREAMS
    num_without_sampler: int = 0

    @property
    def computed_streams(self) -> list[str]:
        """Names of the log-probs that the policy or a reference computes."""
        names = ["old_logprobs"] if self.streams.old == "policy" else []
        return [*names, "ref_logprobs"] if self.streams.ref == "reference" else names


def credited(
    trees: Trees,
    objective: Any,
    *,
    method: str | None = None,
    settings: Mapping[str, Any] | None = None,
    drop_flat_groups: bool = False,
    may_be_empty: bool = False,
) -> Update:
    """All rollouts with their advantages, where the objective takes any.

    Parameters:
        method: of `treewise.rl.rollout_batch.ADVANTAGES`, or `given`; None for the rows' own advantages where they have
            some, else the method that the objective carries.
        settings: of the method.
        drop_flat_groups: leave out groups whose rewards are all equal, and groups of one rollout without advantage.
        may_be_empty: whether no group may be left, or every advantage may be zero.

    Raises:
        ConfigError: an unknown method or setting; every advantage is zero.
        DataError: rows without a reward, a group, or given advantages.
    """
    method = method_of(objective, method, trees)
    if method is None:
        return Update(trees)
    trees, report = credit(trees, method, settings or {})
    dropped: tuple[Any, ...] = ()
    if drop_flat_groups and report is not None:
        silent = _silent_groups(trees)
        dropped = tuple(dict.fromkeys([*report.zero_variance_groups, *(silent & set(report.groups_of_one))]))
    if dropped:
        trees = without_groups(trees, dropped)
    if not may_be_empty and not any(_acts(item) for tree in trees for item in tree):
        raise ConfigError(_nothing_to_learn(method, report))
    return Update(trees, method, report, num_dropped=len(dropped))


def _acts(item: Trajectory) -> bool:
    """Whether any trained token has an advantage."""
    return item.advantages is not None and bool(np.any(item.advantages[item.loss_weights > 0]))


def _silent_groups(trees: Trees) -> set[Any]:
    """Groups no trained token of which has an advantage."""
    items = [item for tree in trees for item in tree]
    return {item.group for item in items} - {item.group for item in items if _acts(item)}


def _nothing_to_learn(method: str, report: AdvantageReport | None) -> str:
    if report is None:
        return "every advantage is zero: nothing would be trained. The rows' own advantages are all 0."
    counts = f"{num(report.num_groups, 'group')}, of which {len(report.zero_variance_groups):,} without variance"
    return (
        f"every advantage is zero: nothing would be trained ({method}: {counts}, {len(report.groups_of_one):,} of one "
        "rollout). Rewards must differ within a group; check `group` and `reward`, or sample more rollouts of a prompt."
    )


def with_streams(
    update: Update, objective: Any, *, num_updates: int, old_logprobs: str = "auto", has_reference: bool = False
) -> Update:
    """The update with its choice of log-probs; nothing is computed yet.

    Parameters:
        num_updates: optimizer steps on these rollouts.
        old_logprobs: see `choose_streams`.
        has_reference: a reference model is given.

    Raises:
        ConfigError: an unknown choice, or a reference that nothing uses.
        DataError: rows that lack a stream.
    """
    streams = choose_streams(objective, update.trees, old_logprobs, num_updates)
    if has_reference and streams.ref != "reference":
        why = "the rows hold ref_logprobs already" if streams.ref else "the objective has no KL to it (--beta)"
        raise ConfigError(f"reference is given, but {why}; leave one of them out.")
    trees, num_without = without_partial_sampler(objective, update.trees)
    return replace(update, trees=trees, streams=streams, num_without_sampler=num_without)


def scored(update: Update, engine: TreeEngine, *, batch_size: int, reference: TreeEngine | None = None) -> Update:
    """The update with its log-probs in place.

    Parameters:
        engine: the policy before the update.
        batch_size: trees that are scored side by side.
        reference: the engine of the reference model; None for the policy itself, with adapters without them.
    """
    return replace(update, trees=fill_streams(update.trees, update.streams, engine, reference, batch_size))


# -- log-probs of a run that is resumed -------------------------------------------------------------------------------


def save_scores(folder: Path, update: Update, facts: Sequence[object]) -> None:
    """Saves the computed log-probs. facts: plain values that identify the data and the models.

    Raises:
        CheckpointError: they cannot be written.
    """
    if not update.computed_streams:
        return
    items = [item for tree in update.trees for item in tree]
    arrays = {name: np.concatenate([getattr(item, name) for item in items]) for name in update.computed_streams}
    part = folder / f".{SCORES}.part"
    try:
        save_file(arrays, part, metadata={**_metadata(update, facts), _DIGEST: _digest(arrays)})
        os.replace(part, folder / SCORES)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / SCORES}: the log-probs cannot be written ({error}).") from error


def load_scores(folder: Path, update: Update, facts: Sequence[object]) -> Update | None:
    """The update with the log-probs that the run began with; None where none of this data and models are saved, or a
    file that is damaged, which is a warning.
    """
    if not update.computed_streams or not (folder / SCORES).is_file():
        return None
    try:
        with safe_open(folder / SCORES, "numpy") as file:
            metadata = dict(file.metadata() or {})
            digest = metadata.pop(_DIGEST, None)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if digest != _digest(arrays):
            raise SafetensorError("its checksum differs")
    except (SafetensorError, OSError) as error:
        logger.warning("%s is damaged (%s): the log-probs are computed again", folder / SCORES, error)
        return None
    if metadata != _metadata(update, facts):
        return None
    ends = np.cumsum([len(item) for tree in update.trees for item in tree])[:-1]
    parts: dict[str, Any] = {name: iter(np.split(array, ends)) for name, array in arrays.items()}

    def filled(item: Trajectory) -> Trajectory:
        return replace(item, **{name: next(part) for name, part in parts.items()})

    return replace(update, trees=[[filled(item) for item in tree] for tree in update.trees])


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _metadata(update: Update, facts: Sequence[object]) -> dict[str, str]:
    num_items = sum(map(len, update.trees))
    return {"treewise": json.dumps([*facts, update.num_dropped, update.streams.old, update.streams.ref, num_items])}


# -- what is printed --------------------------------------------------------------------------------------------------


def describe(update: Update, objective: str, reference: str) -> str:
    """The update in lines of a name and a value. objective, reference: their names."""
    lines = [("objective", objective)]
    items = [item for tree in update.trees for item in tree]
    report = update.report
    if update.method is not None:
        groups = len({repr(item.group) for item in items})
        num_rollouts = int(number_rollouts(items).max()) + 1
        counts = f"{num(num_rollouts, 'rollout')} in {num(groups, 'group')}, {num(len(items), 'row')}"
        lines.append(("rollouts", counts))
        lines.append(("advantages", update.method if report is None else report.method))
        lines.append(("rows with an advantage", f"{sum(map(_acts, items)):,} of {len(items):,}"))
    if report is not None:
        lines.append(("mean reward", f"{report.mean_reward:.4g}"))
        flat = len(report.zero_variance_groups)
        what = "left out" if update.num_dropped else "nothing is learned from them"
        lines.append(("groups without variance", f"{flat:,} of {report.num_groups:,}" + (f" ({what})" if flat else "")))
        if report.groups_of_one:
            one = "left out" if update.num_dropped else "compared with nothing"
            lines.append(("groups of one rollout", f"{len(report.groups_of_one):,} ({one})"))
        lines += [("", note) for note in report.notes]
    if update.method is not None:
        lines.append(("old log-probs", _OLD[update.streams.old]))
        lines.append(("reference log-probs", _REF.get(update.streams.ref, f"computed with {reference}")))
        lines.append(("logprob gap", _gap(items, update.num_without_sampler)))
    return "\n".join(f"{name:<24} {value}" for name, value in lines)


def _gap(items: Sequence[Any], num_without: int) -> str:
    """How far the policy's log-probs are from those that the sampler reported, where both are known."""
    if num_without:
        return f"unknown ({num_without:,} of {len(items):,} rows have no sampler_logprobs)"
    if any(item.old_logprobs is None for item in items):
        return "measured in the first step"
    return f"{logprob_gap(items):.4f} (1: none)"
