"""From the recorded rollouts of a batch to what an update trains on: advantages, streams, log-probs, in that order.

    update = credited(trees, objective)
    update = with_streams(update, objective, num_updates=4)
    update = scored(update, engine, batch_size=8)

or, of rollouts that the policy itself has sampled, `own_update`.

Computed log-probs are saved beside the run (`save_scores`), so that a resumed run trains against the same, bit for bit.
"""

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from treewise import advantages
from treewise.advantages import AdvantageReport, Credited, with_rollout_weights
from treewise.base.durable import moved_into_place
from treewise.base.own_files import damage
from treewise.engine.engine import TreeEngine
from treewise.errors import CheckpointError, ConfigError, DataError, check_choice, num
from treewise.objectives import Objective, PolicyGradient, logprob_gap
from treewise.rl.tasks.rewards import MAX_FAILED, RewardTally, too_many_failed
from treewise.trainer.references import with_logprobs
from treewise.tree.trajectory import Trajectory, number_rollouts

logger = logging.getLogger("treewise")

Trees = list[list[Trajectory]]

# Every advantage by its name in `--advantages`, after the method that introduced it.
ADVANTAGES: Mapping[str, Callable[..., Credited]] = {
    "grpo": advantages.group_normalized,
    "batch": partial(advantages.group_normalized, scale="batch"),
    "dr_grpo": advantages.mean_centered,
    "rloo": advantages.leave_one_out,
    "siblings": advantages.sibling_relative,
    "turns": advantages.per_turn,
    "tree_path_mean": advantages.tree_path_mean,
    "inter_intra": advantages.inter_intra,
    "treerl": advantages.treerl,
    "value_steps": advantages.value_steps,
    "node_value": advantages.node_value,
}
_NOT_SETTINGS = ("trajectories", "turn_rewards", "tree_of")  # arguments of these functions that hold data
GIVEN = "given"
OLD_LOGPROBS = ("auto", "recompute", "sampler", GIVEN)
SCORES = "scored.safetensors"
_DIGEST = "sha256"  # of the log-probs
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
        rewards: how many rollouts there were, and how many were set aside because they have no reward.
        report: of the advantages; None where they were given.
        num_dropped: groups that were left out because they teach nothing.
        old, ref: where old and reference log-probs come from: `given`, `policy`, `sampler`, `reference`, or None (not
            needed).
        num_without_sampler: rows without `sampler_logprobs`.
        gaps: where experts were recorded, the `logprob_gap` of the first such tree with them and without.
    """

    trees: Trees
    method: str | None = None
    rewards: RewardTally = field(default_factory=RewardTally)
    report: AdvantageReport | None = None
    num_dropped: int = 0
    old: str | None = None
    ref: str | None = None
    num_without_sampler: int = 0
    gaps: tuple[float, float] | None = None

    @property
    def computed_streams(self) -> list[str]:
        """Names of the log-probs that the policy or a reference computes."""
        names = ["old_logprobs"] if self.old == "policy" else []
        return [*names, "ref_logprobs"] if self.ref == "reference" else names


# -- advantages -------------------------------------------------------------------------------------------------------


def credited(
    trees: Trees,
    objective: Objective,
    *,
    method: str | None = None,
    settings: Mapping[str, Any] | None = None,
    drop_flat_groups: bool = False,
    max_failed: float = MAX_FAILED,
    may_be_empty: bool = False,
) -> Update:
    """All rollouts with their advantages, where the objective takes any. Where these follow from rewards, rollouts
    without one are set aside (`judged`).

    Parameters:
        method: of `ADVANTAGES`, or `given`; None for the rows' own advantages where they have
            some, else the method that the objective carries.
        settings: of the method.
        drop_flat_groups: leave out groups that teach nothing: no trained token has an advantage other than 0, as
            where all rewards are equal.
        max_failed: the share of rollouts that may have no reward.
        may_be_empty: whether no group may be left, or every advantage may be zero.

    Raises:
        ConfigError: an unknown method or setting; every advantage is zero.
        DataError: rows without a group, or given advantages; too many rollouts without a reward.
    """
    method = method_of(objective, method, trees, settings)
    if method is None:
        return Update(trees)
    rewards = RewardTally()
    if method != GIVEN:
        trees, rewards = judged(trees)
        found = too_many_failed(rewards, max_failed)
        if found is not None:
            raise DataError(f"{found} Give each rollout `reward`, a number, or raise max_failed if that is meant.")
    trees, report = credit(trees, method, settings or {})
    dropped: tuple[Any, ...] = ()
    if drop_flat_groups and report is not None:
        acting = {item.group for tree in trees for item in tree if _acts(item)}
        dropped = (*report.zero_variance_groups, *(set(report.groups_of_one) - acting - {*report.zero_variance_groups}))
    if dropped:
        left = [[item for item in tree if item.group not in dropped] for tree in trees]
        trees = [tree for tree in left if tree]
    if not may_be_empty and not any(_acts(item) for tree in trees for item in tree):
        raise ConfigError(_nothing_to_learn(method, report))
    return Update(trees, method, rewards, report, num_dropped=len(dropped))


def judged(trees: Trees) -> tuple[Trees, RewardTally]:
    """The rollouts that have a reward, and how many were set aside: one without takes no part in baselines, advantages
    or the update, whether its reward failed now or is missing in a record.

    Raises:
        DataError: no rollout has a reward.
    """
    items = [item for tree in trees for item in tree]
    if not items:
        return trees, RewardTally()
    rollout_of = number_rollouts(items)
    has_reward = np.zeros(int(rollout_of.max()) + 1, dtype=bool)
    np.logical_or.at(has_reward, rollout_of, [item.reward is not None for item in items])
    tally = RewardTally(len(has_reward), int((~has_reward).sum()))
    if not tally.num_failed:
        return trees, tally
    is_kept = has_reward[rollout_of]
    first = items[int(np.argmin(is_kept))]
    tally.first = first.source or f"rollout {first.rollout} of group {first.group}"
    if not is_kept.any():
        raise DataError(f"{tally.first}: no reward in any row. Give each rollout `reward`, a number.")
    left = [[item for item, keeps in tree if keeps] for tree in _as_trees([*zip(items, is_kept, strict=True)], trees)]
    return [tree for tree in left if tree], tally


def method_of(
    objective: Objective,
    method: str | None,
    trees: Sequence[list[Trajectory]] = (),
    settings: Mapping[str, Any] | None = None,
) -> str | None:
    """How rewards become advantages: the method that was chosen, else `given` where the rows have some, else the one
    that the objective carries (`usual_advantages`). None: the objective takes none.

    settings: of the method, checked by their names.

    Raises:
        ConfigError: a method, or settings of one, for an objective that takes none; none is chosen, the rows hold none,
            and the objective has no usual one; an unknown method or setting.
    """
    if not hasattr(objective, "usual_advantages"):
        if method is not None or settings:
            given = f"advantages={method!r}" if method is not None else f"advantages_settings={dict(settings or {})}"
            raise ConfigError(f"{given}, but {type(objective).__name__} takes none; leave them out.")
        return None
    if method is None:
        method = GIVEN if trees and has_all(trees, "advantages") else objective.usual_advantages
    if method is None:
        raise ConfigError(
            f"the objective has no usual advantages, and the rows hold none; choose how they follow from "
            f"rewards: advantages={', '.join(ADVANTAGES)}."
        )
    check_choice("advantages", method, [*ADVANTAGES, GIVEN])
    parameters = () if method == GIVEN else inspect.signature(ADVANTAGES[method]).parameters
    known = [name for name in parameters if name not in _NOT_SETTINGS]
    for name in settings or ():
        if name not in known:
            raise ConfigError(
                f"unknown setting {name!r} of advantages={method!r}. Known: {', '.join(known) or 'none'}."
            )
    return method


def credit(trees: Trees, method: str, settings: Mapping[str, Any]) -> tuple[Trees, AdvantageReport | None]:
    """The trajectories with advantages, over all groups at once. `given` leaves the rows' own. method, settings: as
    `method_of` found them.

    Raises:
        DataError: rows without a reward or a group, or with `given`, without advantages.
    """
    items = [item for tree in trees for item in tree]
    if method == GIVEN:
        if not has_all(trees, "advantages"):
            raise DataError(
                "the rows have no advantages; give them, or choose how they follow from rewards: "
                f"advantages={', '.join(ADVANTAGES)}."
            )
        return _as_trees(with_rollout_weights(items), trees), None
    result = ADVANTAGES[method](items, **settings)
    return _as_trees(result.trajectories, trees), result.report


def _acts(item: Trajectory) -> bool:
    """Whether any trained token has an advantage."""
    return item.advantages is not None and bool(np.any(item.advantages[item.loss_weights > 0]))


def _nothing_to_learn(method: str, report: AdvantageReport | None) -> str:
    if report is None:
        return "every advantage is zero: nothing would be trained. The rows' own advantages are all 0."
    counts = f"{num(report.num_groups, 'group')}, of which {len(report.zero_variance_groups):,} without variance"
    return (
        f"every advantage is zero: nothing would be trained ({method}: {counts}, {len(report.groups_of_one):,} of one "
        "rollout). Rewards must differ within a group; check `group` and `reward`, or sample more rollouts of a prompt."
    )


def _as_trees(items: Sequence[Any], like: Trees) -> list[list[Any]]:
    source = iter(items)
    return [[next(source) for _ in tree] for tree in like]


# -- where log-probs come from ----------------------------------------------------------------------------------------


def with_streams(
    update: Update, objective: Objective, *, num_updates: int, old_logprobs: str = "auto", has_reference: bool = False
) -> Update:
    """The update with its choice of log-probs; nothing is computed yet. `sampler_logprobs` that some rows lack are
    dropped from all.

    Parameters:
        num_updates: optimizer steps on these rollouts.
        old_logprobs: `auto` takes the rows' own `old_logprobs`; where they have none, computes them with the policy
            before the update, unless there is but one update, in which that policy is the one that is trained (the
            ratio is 1). `recompute` always computes them, `sampler` takes the sampler's instead, `given` asks for the
            rows' own.
        has_reference: a reference model is given.

    Raises:
        ConfigError: an unknown choice, or a reference that nothing uses.
        DataError: rows that lack a stream.
    """
    check_choice("old_logprobs", old_logprobs, OLD_LOGPROBS)
    trees, old, ref = update.trees, None, None
    if isinstance(objective, PolicyGradient):
        if old_logprobs in (GIVEN, "sampler"):
            name = "sampler_logprobs" if old_logprobs == "sampler" else "old_logprobs"
            if not has_all(trees, name):
                raise DataError(
                    f"old_logprobs={old_logprobs!r}, but the rows have no {name}; use old_logprobs='recompute'."
                )
            old = old_logprobs
        elif old_logprobs == "auto" and has_all(trees, "old_logprobs"):
            old = GIVEN
        elif old_logprobs == "recompute" or (num_updates > 1 and objective.surrogate != "reinforce"):
            old = "policy"
        if objective.beta:
            ref = GIVEN if has_all(trees, "ref_logprobs") else "reference"
    if has_reference and ref != "reference":
        why = "the rows hold ref_logprobs already" if ref else "the objective has no KL to it (--beta)"
        raise ConfigError(f"reference is given, but {why}; leave one of them out.")
    num_without = sum(item.sampler_logprobs is None for tree in trees for item in tree)
    if getattr(objective, "sampler_correction", None) is not None:
        if num_without and not has_all(trees, "sampler_logprobs"):
            raise DataError("sampler_correction needs sampler_logprobs, and the rows have none.")
        num_without = 0
    elif 0 < num_without < sum(map(len, trees)):
        trees = [[replace(item, sampler_logprobs=None) for item in tree] for tree in trees]
    return replace(update, trees=trees, old=old, ref=ref, num_without_sampler=num_without)


def has_all(trees: Sequence[Sequence[Trajectory]], name: str) -> bool:
    """Whether every trajectory has a stream.

    Raises:
        DataError: some have it and some have not; the first without is named.
    """
    items = [item for tree in trees for item in tree]
    without = [item for item in items if getattr(item, name) is None]
    if without and len(without) < len(items):
        raise DataError(
            f"{without[0].source or 'a trajectory'}: no {name}, but {len(items) - len(without):,} of {len(items):,} "
            "rows have them; give them on all rows or on none."
        )
    return not without


def scored(update: Update, engine: TreeEngine, *, batch_size: int, reference: TreeEngine | None = None) -> Update:
    """The update with its log-probs in place.

    Parameters:
        engine: the policy before the update.
        batch_size: trees that are scored side by side.
        reference: the engine of the reference model; None for the policy itself, with adapters without them.
    """
    trees, old = update.trees, update.old
    if old == "sampler":
        trees = [[replace(item, old_logprobs=item.sampler_logprobs) for item in tree] for tree in trees]
    elif old is None and any(item.old_logprobs is not None for tree in trees for item in tree):
        trees = [[replace(item, old_logprobs=None) for item in tree] for tree in trees]
    elif old == "policy":
        trees = with_logprobs(engine, trees, "old_logprobs", batch_size)
    if update.ref == "reference":
        adapters_off = getattr(engine.model, "disable_adapter", None)
        if reference is not None:
            trees = with_logprobs(reference, trees, "ref_logprobs", batch_size)
        elif old == "policy" and adapters_off is None:  # the same model on the same tokens
            trees = [[replace(item, ref_logprobs=item.old_logprobs) for item in tree] for tree in trees]
        else:
            with nullcontext() if adapters_off is None else adapters_off():
                trees = with_logprobs(engine, trees, "ref_logprobs", batch_size)
    recorded = [tree for tree in trees if any(item.routed_experts is not None for item in tree)]
    compared = next((tree for tree in recorded if all(item.sampler_logprobs is not None for item in tree)), None)
    return replace(update, trees=trees, gaps=None if compared is None else _gaps(engine, compared))


def _gaps(engine: TreeEngine, tree: list[Trajectory]) -> tuple[float, float]:
    """The gap to the sampler of a tree, with the experts that it recorded and with those that routers choose now."""
    live = [replace(item, routed_experts=None) for item in tree]
    scores = [with_logprobs(engine, [rows], "old_logprobs", batch_size=1)[0] for rows in (tree, live)]
    return logprob_gap(scores[0]), logprob_gap(scores[1])


def own_update(
    trees: Trees,
    objective: Objective,
    engine: TreeEngine,
    *,
    num_updates: int = 1,
    old_logprobs: str = "auto",
    reference: TreeEngine | None = None,
    method: str | None = None,
    settings: Mapping[str, Any] | None = None,
    drop_flat_groups: bool = False,
    max_failed: float = MAX_FAILED,
) -> Update:
    """Rollouts with all that an update of the policy that sampled them needs; there may be none, or nothing to learn.

    Parameters:
        engine, reference: as of `scored`. num_updates, old_logprobs: as of `with_streams`.
        method, settings, drop_flat_groups, max_failed: as of `credited`, which raises of these.
    """
    if not trees:
        return Update([])
    update = credited(
        trees,
        objective,
        method=method,
        settings=settings,
        drop_flat_groups=drop_flat_groups,
        max_failed=max_failed,
        may_be_empty=True,
    )
    if not update.trees:
        return update
    update = with_streams(update, objective, num_updates=num_updates, old_logprobs=old_logprobs)
    return scored(update, engine, batch_size=len(update.trees), reference=reference)


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
    try:
        metadata = _metadata(update, facts)
        with moved_into_place(folder / SCORES) as part:
            save_file(arrays, part, metadata={**metadata, _DIGEST: _digest(arrays, metadata)})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / SCORES}: the log-probs cannot be written ({error}).") from error


def load_scores(folder: Path, update: Update, facts: Sequence[object]) -> Update | None:
    """The update with the log-probs that the run began with; None where none of this data and models are saved, or a
    file that is damaged, which is a warning.
    """
    if not update.computed_streams or not (folder / SCORES).exists():
        return None
    try:
        with safe_open(folder / SCORES, "numpy") as file:
            metadata = dict(file.metadata() or {})
            digest = metadata.pop(_DIGEST, None)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if digest != _digest(arrays, metadata):
            raise SafetensorError("its checksum differs")
    except Exception as error:  # of whatever a damaged file makes safetensors raise
        logger.warning("%s: damaged (%s): the log-probs are computed again", folder / SCORES, damage(error))
        return None
    if metadata != _metadata(update, facts):
        return None
    ends = np.cumsum([len(item) for tree in update.trees for item in tree])[:-1]
    parts: dict[str, Any] = {name: iter(np.split(array, ends)) for name, array in arrays.items()}

    def filled(item: Trajectory) -> Trajectory:
        return replace(item, **{name: next(part) for name, part in parts.items()})

    return replace(update, trees=[[filled(item) for item in tree] for tree in update.trees])


def _digest(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _metadata(update: Update, facts: Sequence[object]) -> dict[str, str]:
    num_items = sum(map(len, update.trees))
    return {"treewise": json.dumps([*facts, update.num_dropped, update.old, update.ref, num_items])}


# -- what is printed --------------------------------------------------------------------------------------------------


def describe(update: Update, objective: str, reference: str) -> str:
    """The update in lines of a name and a value. objective, reference: their names."""
    lines = [("objective", objective)]
    items = [item for tree in update.trees for item in tree]
    report = update.report
    if update.method is not None:
        groups = len({repr(item.group) for item in items})
        num_rollouts = int(number_rollouts(items).max()) + 1
        counts = f"{num_rollouts:,} in {num(groups, 'group')}, {num(len(items), 'row')}"
        lines.append(("rollouts", counts))
        rewards = update.rewards
        if rewards.num_failed:
            lines.append(("without a reward", f"{rewards.num_failed:,} set aside (first: {rewards.first})"))
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
        lines.append(("old log-probs", _OLD[update.old]))
        lines.append(("reference log-probs", _REF.get(update.ref, f"computed with {reference}")))
        lines.append(("logprob gap", _gap(items, update.num_without_sampler)))
    if update.gaps is not None:
        replayed, live = update.gaps
        lines.append(("gap of the first tree", f"{replayed:.4f} with the recorded experts, {live:.4f} without"))
    return "\n".join(f"{name:<24} {value}" for name, value in lines)


def _gap(items: Sequence[Any], num_without: int) -> str:
    """How far the policy's log-probs are from those that the sampler reported, where both are known."""
    if num_without:
        return f"unknown ({num_without:,} of {len(items):,} rows have no sampler_logprobs)"
    if any(item.old_logprobs is None for item in items):
        return "measured in the first step"
    return f"{logprob_gap(items):.4f} (1: none)"


# -- mini-batches -----------------------------------------------------------------------------------------------------


def trees_per_batch(num_trees: int, num_mini_batches: int, num_ranks: int) -> int:
    """The most trees of one rank in each of `num_mini_batches` optimizer steps that together see every tree once.

    Raises:
        ConfigError: more mini-batches than trees.
    """
    if num_mini_batches < 1 or num_mini_batches > num_trees:
        raise ConfigError(f"mini_batches={num_mini_batches}: give 1 to {num_trees}, the number of trees (groups).")
    return ceil(num_trees / (num_mini_batches * num_ranks))
