"""Which trajectories are one rollout, what its reward is, and what is reported about all of them.

Letters: N trajectories, R rollouts, G groups.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import NamedTuple

import numpy as np

from treewise.errors import ConfigError, DataError, num
from treewise.tree.trajectory import Trajectory, number_rollouts

MAX_NAMES = 8  # groups that a report spells out


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The rollouts of some trajectories.

    of_trajectory: [N] int64, the rollout of each trajectory. rewards: [R] float64. group: [R] int64, index into
    `group_names`. group_sizes: [G] int64, rollouts of each group.
    """

    trajectories: tuple[Trajectory, ...]
    of_trajectory: np.ndarray
    rewards: np.ndarray
    group: np.ndarray
    group_names: tuple[Hashable, ...]
    group_sizes: np.ndarray


@dataclass(frozen=True, slots=True)
class AdvantageReport:
    """What the advantages were made from.

    zero_variance_groups: groups of two or more rollouts that teach nothing: all their trained tokens have advantage 0,
        mostly because the rewards are equal.
    groups_of_one: groups of one rollout, which is compared with nothing.
    num_silent_rollouts: rollouts whose trained tokens all have advantage 0.
    mean_reward: over rollouts with a reward; NaN where none has one.
    notes: what a method has to add, one sentence each.
    """

    method: str
    num_trajectories: int
    num_rollouts: int
    num_groups: int
    zero_variance_groups: tuple[Hashable, ...]
    groups_of_one: tuple[Hashable, ...]
    num_silent_rollouts: int
    mean_reward: float
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        trajectories = num(self.num_trajectories, "trajectory", "trajectories")
        lines = [
            f"{self.method}: {num(self.num_rollouts, 'rollout')} in {trajectories}, {num(self.num_groups, 'group')}"
            + ("." if isnan(self.mean_reward) else f", mean reward {self.mean_reward:.4g}."),
            f"of advantage 0 throughout: {num(self.num_silent_rollouts, 'rollout')}.",
        ]
        for names, what in (
            (self.zero_variance_groups, "of equal rewards, from which nothing is learned"),
            (self.groups_of_one, "of one rollout, which is compared with nothing"),
        ):
            if names:
                more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
                lines.append(f"{num(len(names), 'group')} {what}: {', '.join(map(str, names[:MAX_NAMES]))}{more}.")
        return "\n".join([*lines, *self.notes])


class Credited(NamedTuple):
    """Trajectories with advantages, in the order in which they came, and the report."""

    trajectories: list[Trajectory]
    report: AdvantageReport


def read_rollouts(trajectories: Sequence[Trajectory], with_rewards: bool = True) -> Rollouts:
    """Finds rollouts, their groups and rewards. A row without a reward takes the one of its rollout.

    Raises:
        DataError: no trajectory, one without a group, a rollout without a reward or with two different ones.
    """
    items = tuple(trajectories)
    if not items:
        raise DataError("advantages need at least one trajectory, got none.")
    for index, item in enumerate(items):
        if not isinstance(item, Trajectory):
            raise DataError(f"trajectory {index} is a {type(item).__name__}; wrap its tokens in tw.Trajectory.")
    rollout_of = number_rollouts(items)
    rewards = np.full(int(rollout_of.max()) + 1, np.nan)
    group = np.zeros(len(rewards), dtype=np.int64)
    names: dict[Hashable, int] = {}
    for index, item in enumerate(items):
        if item.group is None:
            raise DataError(f"{_location(item, index)}: no group; set it to what the rollouts of one prompt share.")
        rollout = rollout_of[index]
        group[rollout] = names.setdefault(item.group, len(names))
        if item.reward is None:
            continue
        if not np.isnan(rewards[rollout]) and rewards[rollout] != item.reward:
            raise DataError(
                f"{_location(item, index)}: rollout {item.rollout!r} of group {item.group!r} has reward "
                f"{item.reward:g} here and {rewards[rollout]:g} in another row; one rollout has one reward."
            )
        rewards[rollout] = item.reward
    if with_rewards and np.isnan(rewards).any():
        index = int(np.argmax(np.isnan(rewards[rollout_of])))
        raise DataError(f"{_location(items[index], index)}: no reward in any row of its rollout.")
    return Rollouts(items, rollout_of, rewards, group, tuple(names), np.bincount(group, minlength=len(names)))


def compared(values: np.ndarray, key: np.ndarray, epsilon: float | None = None) -> np.ndarray:
    """Values minus the mean over those of equal key; with `epsilon` divided by their unbiased deviation plus that.
    Exactly 0 where nothing differs.
    """
    count = np.bincount(key)
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, key, values)
    np.maximum.at(high, key, values)
    centred = values - (np.bincount(key, weights=values) / np.maximum(count, 1))[key]
    centred[(low == high)[key]] = 0.0
    if epsilon is None:
        return centred
    deviation = np.sqrt(np.bincount(key, weights=centred**2) / np.maximum(count - 1, 1))
    divisor = deviation[key] + epsilon
    return np.divide(centred, divisor, out=np.zeros_like(centred), where=divisor > 0)


def check_epsilon(epsilon: float) -> None:
    """Raises `ConfigError` for a negative one."""
    if not epsilon >= 0:
        raise ConfigError(f"epsilon={epsilon} must not be negative.")


def with_advantages(
    rollouts: Rollouts, advantages: Sequence[float | np.ndarray] | np.ndarray, method: str, notes: Sequence[str] = ()
) -> Credited:
    """Puts one number, or one value per token, on each trajectory."""
    weights = _rollout_weights(rollouts.trajectories, rollouts.of_trajectory)
    items = [
        replace(item, advantages=np.asarray(value), rollout_weight=weight)
        for item, value, weight in zip(rollouts.trajectories, advantages, weights, strict=True)
    ]
    acts = np.zeros(len(rollouts.rewards), dtype=bool)
    for item, rollout in zip(items, rollouts.of_trajectory, strict=True):
        assert item.advantages is not None
        acts[rollout] |= bool(item.advantages[item.loss_weights > 0].any())
    acting_G = np.bincount(rollouts.group, weights=acts)
    known = rollouts.rewards[~np.isnan(rollouts.rewards)]
    report = AdvantageReport(
        method=method,
        num_trajectories=len(items),
        num_rollouts=len(rollouts.rewards),
        num_groups=len(rollouts.group_names),
        zero_variance_groups=_named(rollouts, (acting_G == 0) & (rollouts.group_sizes > 1)),
        groups_of_one=_named(rollouts, rollouts.group_sizes == 1),
        num_silent_rollouts=int((~acts).sum()),
        mean_reward=float(known.mean()) if len(known) else float("nan"),
        notes=tuple(notes),
    )
    return Credited(items, report)


def with_rollout_weights(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories with the loss weight of their whole rollout (`rollout_weight`), so that it may be spread over
    several forests, calls or ranks and still be normalised as one.
    """
    items = tuple(trajectories)
    weights = _rollout_weights(items, number_rollouts(items))
    return [replace(item, rollout_weight=weight) for item, weight in zip(items, weights, strict=True)]


def _rollout_weights(items: Sequence[Trajectory], rollout_of: np.ndarray) -> list[float]:
    own = [item.weight for item in items]
    total = np.bincount(rollout_of, weights=own)
    return [float(value) for value in total[rollout_of]]


def _named(rollouts: Rollouts, is_chosen: np.ndarray) -> tuple[Hashable, ...]:
    return tuple(rollouts.group_names[index] for index in np.flatnonzero(is_chosen))


def _location(item: Trajectory, index: int) -> str:
    return item.source or f"trajectory {index}"
