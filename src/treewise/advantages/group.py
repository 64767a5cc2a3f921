"""Advantages of whole rollouts, from the rewards of their group. Letters: R rollouts, G groups."""

from collections.abc import Sequence

import numpy as np

from treewise.advantages.rollout_table import (
    Credited,
    Rollouts,
    check_epsilon,
    compared,
    read_rollouts,
    with_advantages,
)
from treewise.errors import ConfigError, DataError, check_choice, num
from treewise.tree.trajectory import Trajectory


def group_normalized(trajectories: Sequence[Trajectory], *, scale: str = "group", epsilon: float = 1e-4) -> Credited:
    """`(r - mean of the group) / (standard deviation + epsilon)`.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300, section 4.1.2). As in TRL's `scale_rewards`, the deviation is the
    unbiased one (n - 1), and `epsilon` is added to it.

    scale: `group` uses the deviation of the group, `batch` of all rollouts given (REINFORCE++, arXiv 2501.03262),
    `none` divides by nothing (`mean_centered`).

    Raises:
        ConfigError: an unknown scale, or a negative epsilon.
        DataError: see `read_rollouts`.
    """
    check_choice("scale", scale, ("group", "batch", "none"))
    check_epsilon(epsilon)
    rollouts = read_rollouts(trajectories)
    advantages_R = compared(rollouts.rewards, rollouts.group, epsilon if scale == "group" else None)
    if scale == "batch" and len(rollouts.rewards) > 1:
        divisor = float(np.std(rollouts.rewards, ddof=1)) + epsilon
        advantages_R = advantages_R / divisor if divisor else np.zeros_like(advantages_R)
    return with_advantages(rollouts, advantages_R[rollouts.of_trajectory], f"group_normalized(scale={scale!r})")


def mean_centered(trajectories: Sequence[Trajectory]) -> Credited:
    """`r - mean of the group`.

    Source: Dr. GRPO (arXiv 2503.20783, section 3.1): dividing by the deviation favours questions that are too easy or
    too hard.
    """
    rollouts = read_rollouts(trajectories)
    advantages_R = compared(rollouts.rewards, rollouts.group)
    return with_advantages(rollouts, advantages_R[rollouts.of_trajectory], "mean_centered")


def leave_one_out(trajectories: Sequence[Trajectory]) -> Credited:
    """`r - mean of the others of the group`, an unbiased baseline.

    Source: RLOO (arXiv 2402.14740, section 2.2; Kool et al. 2019). It is `mean_centered` times `n / (n - 1)`.
    """
    rollouts = read_rollouts(trajectories)
    sizes = rollouts.group_sizes[rollouts.group]
    factor = np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1), 0.0)
    advantages_R = compared(rollouts.rewards, rollouts.group) * factor
    return with_advantages(rollouts, advantages_R[rollouts.of_trajectory], "leave_one_out")


# -- Advantages of turns: each turn of a rollout is credited with the rewards from it on ------------------------------


def turns_of(trajectory: Trajectory) -> list[tuple[int, int]]:
    """`[start, end)` of each maximal run of trained tokens."""
    is_trained = np.concatenate([[False], trajectory.loss_weights > 0, [False]])
    edges = np.flatnonzero(is_trained[1:] != is_trained[:-1])
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def spread_over_turns(trajectory: Trajectory, values: Sequence[float]) -> np.ndarray:
    """[length] float64, each turn's number on its tokens and 0 elsewhere: advantages per turn, as a stream.

    Raises:
        DataError: another number of values than turns.
    """
    turns = turns_of(trajectory)
    if len(values) != len(turns):
        location = trajectory.source or "trajectory"
        raise DataError(f"{location}: {len(values)} values for {len(turns)} turns (runs of trained tokens).")
    stream = np.zeros(len(trajectory))
    for (start, end), value in zip(turns, values, strict=True):
        stream[start:end] = value
    return stream


def per_turn(
    trajectories: Sequence[Trajectory],
    turn_rewards: Sequence[Sequence[float]] | None = None,
    *,
    discount: float = 1.0,
    baseline: str = "turn",
    scale: bool = False,
    epsilon: float = 1e-4,
) -> Credited:
    """The discounted return of a turn minus a baseline: `G_k = r_k + discount * G_(k+1)`.

    The rollout's `reward`, where it has one, is added to its last turn; rows' `token_rewards` to the turns that they
    stand in. Source: reward-to-go of the policy gradient
    (Sutton and Barto, section 13.3), with a turn as the action, as in MT-GRPO (arXiv 2505.11821).

    turn_rewards: for each trajectory, one number per turn of that trajectory (`turns_of`), in place of `token_rewards`.
    baseline: `turn`, the mean return of the group's rollouts at the same turn number; `group`, the mean return over
        all turns of the group; `none`.
    scale: divide by the unbiased deviation of what the baseline is the mean of, plus `epsilon`; a turn that is
        compared with nothing gets 0.

    Raises:
        ConfigError: an unknown baseline, a discount outside 0..1, or scaling without a baseline.
        DataError: see `read_rollouts`; turn rewards that do not fit the turns or are not finite.
    """
    check_choice("baseline", baseline, ("turn", "group", "none"))
    if not 0 <= discount <= 1:
        raise ConfigError(f"discount={discount} must lie in 0..1.")
    if scale and baseline == "none":
        raise ConfigError("scale=True divides by the deviation around a baseline; choose baseline='turn' or 'group'.")
    rollouts = read_rollouts(trajectories, with_rewards=turn_rewards is None)
    returns, turn_offsets = _returns(rollouts, turn_rewards, discount)
    sizes = np.diff(turn_offsets)
    key = np.repeat(rollouts.group, sizes)
    if baseline == "turn":
        turn_number = np.arange(len(returns)) - np.repeat(turn_offsets[:-1], sizes)
        _, key = np.unique(np.stack([key, turn_number]), axis=1, return_inverse=True)
        key = key.reshape(-1)
    is_compared = baseline != "none"
    advantages = compared(returns, key, epsilon if scale else None) if is_compared else returns
    num_alone = int(is_compared and (np.bincount(key)[key] == 1).sum())
    method = f"per_turn(discount={discount:g}, baseline={baseline!r}, scale={scale})"
    notes = [f"{num(len(returns), 'turn')}; of them compared with no other and 0: {num_alone:,}."]
    return with_advantages(rollouts, _on_rows(rollouts, advantages, turn_offsets), method, notes)


def _returns(
    rollouts: Rollouts, turn_rewards: Sequence[Sequence[float]] | None, discount: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns of all turns, rollout after rollout, and where each rollout begins ([R + 1])."""
    items = rollouts.trajectories
    if turn_rewards is not None and len(turn_rewards) != len(items):
        raise DataError(f"{len(turn_rewards)} lists of turn rewards for {len(items)} trajectories.")
    per_rollout: list[list[float]] = [[] for _ in rollouts.rewards]
    for index, (item, rollout) in enumerate(zip(items, rollouts.of_trajectory, strict=True)):
        turns = turns_of(item)
        num_turns = len(turns)
        if turn_rewards is not None:
            own = [float(value) for value in turn_rewards[index]]
        elif item.token_rewards is None:
            own = [0.0] * num_turns
        else:
            own = [float(item.token_rewards[start:end].sum()) for start, end in turns]
            if item.token_rewards[item.loss_weights == 0].any():
                raise DataError(
                    f"{item.source or f'trajectory {index}'}: token_rewards at tokens that are not trained."
                )
        if len(own) != num_turns or not np.isfinite(own).all():
            location = item.source or f"trajectory {index}"
            raise DataError(f"{location}: turn rewards {own} for {num_turns} turns; give one finite number per turn.")
        per_rollout[rollout].extend(own)
    for rewards, outcome in zip(per_rollout, rollouts.rewards, strict=True):
        if not np.isnan(outcome):
            rewards[-1] += outcome
        for turn in range(len(rewards) - 2, -1, -1):
            rewards[turn] += discount * rewards[turn + 1]
    sizes = [len(rewards) for rewards in per_rollout]
    return np.concatenate([np.array(rewards) for rewards in per_rollout]), np.concatenate([[0], np.cumsum(sizes)])


def _on_rows(rollouts: Rollouts, advantages: np.ndarray, turn_offsets: np.ndarray) -> list[np.ndarray]:
    following = turn_offsets[:-1].copy()
    streams = []
    for item, rollout in zip(rollouts.trajectories, rollouts.of_trajectory, strict=True):
        first, num_turns = following[rollout], len(turns_of(item))
        following[rollout] += num_turns
        streams.append(spread_over_turns(item, advantages[first : first + num_turns].tolist()))
    return streams
