"""The step before an update of RL: log-probs of the policy and a reference, and advantages, on all rollouts of a batch.

What a rollout engine recorded comes in; what the objective needs goes out. Each stream takes one pass through the trees
without gradients, cut as the training steps will be.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from treewise import advantages
from treewise.advantages import AdvantageReport, Credited, with_rollout_weights
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, DataError, check_choice
from treewise.objectives import PolicyGradient
from treewise.trainer.inputs import scored
from treewise.tree.trajectory import Trajectory

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
# Arguments of these functions that hold data.
NOT_SETTINGS = ("trajectories", "turn_rewards", "tree_of")
GIVEN = "given"
OLD_LOGPROBS = ("auto", "recompute", "sampler", GIVEN)


@dataclass(frozen=True, slots=True)
class Streams:
    """Where the log-probs of an update come from: `given`, `policy`, `sampler`, `reference`, or None (not needed)."""

    old: str | None
    ref: str | None


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


def choose_streams(objective: Any, trees: Trees, old: str, num_updates: int) -> Streams:
    """Which log-probs an objective needs, and where they come from.

    Parameters:
        old: `auto` takes the rows' own `old_logprobs`; where they have none, computes them with the policy before the
            update, unless there is but one update, in which that policy is the one that is trained (the ratio is 1).
            `recompute` always computes them, `sampler` takes the sampler's instead, `given` asks for the rows' own.
        num_updates: optimizer steps of the run.

    Raises:
        ConfigError: an unknown choice.
        DataError: `given` or `sampler` without the stream on every row.
    """
    check_choice("old_logprobs", old, OLD_LOGPROBS)
    if not isinstance(objective, PolicyGradient):
        return Streams(None, None)
    source: str | None
    if old in (GIVEN, "sampler"):
        name = "sampler_logprobs" if old == "sampler" else "old_logprobs"
        if not has_all(trees, name):
            raise DataError(f"old_logprobs={old!r}, but the rows have no {name}; use old_logprobs='recompute'.")
        source = old
    elif old == "auto" and has_all(trees, "old_logprobs"):
        source = GIVEN
    elif old == "auto" and (num_updates <= 1 or objective.surrogate == "reinforce"):
        source = None
    else:
        source = "policy"
    ref = None
    if objective.beta:
        ref = GIVEN if has_all(trees, "ref_logprobs") else "reference"
    return Streams(source, ref)


def without_partial_sampler(objective: Any, trees: Trees) -> tuple[Trees, int]:
    """The trees without `sampler_logprobs` where some rows lack them, and how many do.

    Raises:
        DataError: the objective corrects for the sampler, so it needs them on every row.
    """
    num_without = sum(item.sampler_logprobs is None for tree in trees for item in tree)
    if getattr(objective, "sampler_correction", None) is not None:
        if num_without and not has_all(trees, "sampler_logprobs"):
            raise DataError("sampler_correction needs sampler_logprobs, and the rows have none.")
        return trees, 0
    if 0 < num_without < sum(map(len, trees)):
        trees = [[replace(item, sampler_logprobs=None) for item in tree] for tree in trees]
    return trees, num_without


def fill_streams(
    trees: Trees, streams: Streams, engine: TreeEngine, reference: TreeEngine | None, batch_size: int
) -> Trees:
    """The trajectories with `old_logprobs` and `ref_logprobs` as chosen.

    Parameters:
        engine: the policy before the update.
        reference: None for the same policy; with adapters, without them.
        batch_size: trees that are scored side by side.
    """
    if streams.old == "sampler":
        trees = [[replace(item, old_logprobs=item.sampler_logprobs) for item in tree] for tree in trees]
    elif streams.old is None:
        trees = [[replace(item, old_logprobs=None) for item in tree] for tree in trees]
    elif streams.old == "policy":
        trees = scored(engine, trees, "old_logprobs", batch_size)
    if streams.ref != "reference":
        return trees
    adapters_off = getattr(engine.model, "disable_adapter", None)
    if reference is not None:
        return scored(reference, trees, "ref_logprobs", batch_size)
    if streams.old == "policy" and adapters_off is None:  # the same model on the same tokens
        return [[replace(item, ref_logprobs=item.old_logprobs) for item in tree] for tree in trees]
    with nullcontext() if adapters_off is None else adapters_off():
        return scored(engine, trees, "ref_logprobs", batch_size)


def method_of(objective: Any, method: str | None, trees: Sequence[list[Trajectory]] = ()) -> str | None:
    """How rewards become advantages: the method that was chosen, else `given` where the rows have some, else the one
    that the objective carries (`usual_advantages`). None: the objective takes none.

    Raises:
        ConfigError: a method for an objective that takes none; none is chosen, the rows hold none, and the objective
            has no usual one.
    """
    if not hasattr(objective, "usual_advantages"):
        if method is not None:
            raise ConfigError(f"advantages={method!r}, but {type(objective).__name__} takes none; leave them out.")
        return None
    if method is None and trees and has_all(trees, "advantages"):
        return GIVEN
    method = objective.usual_advantages if method is None else method
    if method is None:
        raise ConfigError(
            f"{type(objective).__name__} has no usual advantages, and the rows hold none; choose how they follow from "
            f"rewards: advantages={', '.join(ADVANTAGES)}."
        )
    check_choice("advantages", method, [*ADVANTAGES, GIVEN])
    return method


def credit(trees: Trees, method: str, settings: Mapping[str, Any]) -> tuple[Trees, AdvantageReport | None]:
    """The trajectories with advantages, over all groups at once. `given` leaves the rows' own.

    Raises:
        ConfigError: an unknown method or setting.
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
    check_choice("advantages", method, [*ADVANTAGES, GIVEN])
    function = ADVANTAGES[method]
    known = [name for name in inspect.signature(function).parameters if name not in NOT_SETTINGS]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"unknown setting {name!r} of advantages={method!r}. Known: {', '.join(known) or 'none'}."
            )
    result = function(items, **settings)
    return _as_trees(result.trajectories, trees), result.report


def without_groups(trees: Trees, groups: Sequence[Any]) -> Trees:
    """The trees without the trajectories of these groups; a tree that loses all of them goes."""
    left = [[item for item in tree if item.group not in groups] for tree in trees]
    return [tree for tree in left if tree]


def trees_per_batch(num_trees: int, num_mini_batches: int, num_ranks: int) -> int:
    """The most trees of one rank in each of `num_mini_batches` optimizer steps that together see every tree once.

    Raises:
        ConfigError: more mini-batches than trees.
    """
    if num_mini_batches < 1 or num_mini_batches > num_trees:
        raise ConfigError(f"mini_batches={num_mini_batches}: give 1 to {num_trees}, the number of trees (groups).")
    return ceil(num_trees / (num_mini_batches * num_ranks))


def _as_trees(items: Sequence[Trajectory], like: Trees) -> Trees:
    source = iter(items)
    return [[next(source) for _ in tree] for tree in like]
