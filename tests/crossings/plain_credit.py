"""Credit of rollouts by comparing prefixes, token by token: what `treewise.advantages` is held against.

Every row is a rollout, but for credit of whole rollouts (`OF_ROLLOUTS`), whose rows share it. Slow and plain; nothing
is shared with the library but trajectories.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from treewise.tree.trajectory import Trajectory

Rows = Sequence[Trajectory]


class Group:
    """The rollouts of one group. A state is a prefix; `draws` says which rollouts had a token drawn together."""

    def __init__(self, rows: Rows) -> None:
        self.rows = list(rows)
        self.ids = [tuple(row.token_ids.tolist()) for row in rows]
        self.draws = [(np.full(len(row), n) if row.draws is None else row.draws).tolist() for n, row in enumerate(rows)]
        self.rewards = np.array([float(row.reward or 0.0) for row in rows])
        self._values: dict[tuple[int, ...], float] = {}

    def through(self, prefix: tuple[int, ...]) -> list[int]:
        """The rollouts that begin with a prefix."""
        return [n for n, ids in enumerate(self.ids) if ids[: len(prefix)] == prefix]

    def value(self, prefix: tuple[int, ...], rewards: np.ndarray | None = None) -> float:
        """Rewards of what ended at a prefix, and for each draw that reached it and went on the mean over the draws
        after it.
        """
        if rewards is None and prefix in self._values:
            return self._values[prefix]
        of = self.rewards if rewards is None else rewards
        size, ending, arrived, drawn = len(prefix), [], set(), {}
        for n in self.through(prefix):
            if len(self.ids[n]) == size:
                ending.append(of[n])
            else:
                arrived.add(self.draws[n][size - 1] if size else None)
                drawn[self.draws[n][size]] = self.ids[n][: size + 1]
        after = float(np.mean([self.value(each, rewards) for each in drawn.values()])) if drawn else 0.0
        result = float(np.mean([*ending, *[after] * len(arrived)]))
        if rewards is None:
            self._values[prefix] = result
        return result

    def fork_above(self, n: int, at: int) -> tuple[int, ...]:
        """The longest prefix before a token that more rollouts share than the token; all that they share, without."""
        ids, same = self.ids[n], len(self.through(self.ids[n][: at + 1]))
        return next((ids[:size] for size in range(at, -1, -1) if len(self.through(ids[:size])) > same), ())

    def is_below_a_fork(self, n: int, at: int) -> bool:
        """Whether some rollout of the group does not hold a token."""
        return len(self.through(self.ids[n][: at + 1])) < len(self.rows)

    def by_token(self, value_of: Callable[[int, int], float]) -> list[np.ndarray]:
        """A value for each token of each rollout."""
        return [np.array([value_of(n, at) for at in range(len(ids))]) for n, ids in enumerate(self.ids)]


def z_scores(rewards: np.ndarray) -> np.ndarray:
    """As GRPO has them; 0 where all are equal."""
    if len(rewards) < 2 or np.ptp(rewards) == 0:
        return np.zeros(len(rewards))
    result: np.ndarray = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    return result


def _changes(group: Group) -> list[np.ndarray]:
    def change(n: int, at: int) -> float:
        if not group.is_below_a_fork(n, at):
            return 0.0
        return group.value(group.ids[n][: at + 1]) - group.value(group.fork_above(n, at))

    return group.by_token(change)


def _without_sure_tokens(group: Group) -> list[np.ndarray]:
    changes = _changes(group)
    for row, values in zip(group.rows, changes, strict=True):
        logprobs = row.sampler_logprobs if row.old_logprobs is None else row.old_logprobs
        assert logprobs is not None
        values[logprobs >= np.log(0.9)] = 0.0
    return changes


def _treerl(group: Group) -> list[np.ndarray]:
    def value(n: int, at: int) -> float:
        prefix = group.ids[n][: at + 1]
        fork = group.fork_above(n, at) if group.is_below_a_fork(n, at) else ()
        own = group.value(prefix)
        return (2 * own - group.value(()) - group.value(fork)) / len(group.through(prefix)) ** 0.5

    return group.by_token(value)


def _node_value(group: Group) -> list[np.ndarray]:
    rewards = group.rewards
    normal = np.zeros(len(rewards)) if np.ptp(rewards) == 0 else (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return group.by_token(lambda n, at: group.value(group.ids[n][: at + 1], normal))


def _path_means(group: Group) -> list[np.ndarray]:
    result = []
    for n, ids in enumerate(group.ids):
        groups = {tuple(group.through(ids[:size])) for size in range(len(ids) + 1)}
        gaps = [group.rewards[n] - group.rewards[list(each)].mean() for each in groups if len(each) > 1]
        result.append(np.full(len(ids), np.mean(gaps) if gaps else 0.0))
    return result


def _inter_intra(group: Group) -> list[np.ndarray]:
    first = [next((draw for draw in draws if draw >= 0), -1) for draws in group.draws]
    totals = z_scores(group.rewards)
    for tree in set(first):
        own = [n for n, each in enumerate(first) if each == tree]
        totals[own] += z_scores(group.rewards[own])
    return _on_rows(group, totals)


def _turns(group: Group) -> list[np.ndarray]:
    """The reward of each turn is what the whole rollout got; it is compared with turns of the same number."""
    number_of = []
    for row in group.rows:
        trained = row.loss_weights > 0
        begins = trained & ~np.concatenate([[False], trained[:-1]])
        number_of.append(np.where(trained, np.cumsum(begins), 0))
    result = [np.zeros(len(row)) for row in group.rows]
    for number in range(1, max(int(each.max()) for each in number_of) + 1):
        own = [n for n, each in enumerate(number_of) if (each == number).any()]
        for n in own if len(own) > 1 else ():
            result[n][number_of[n] == number] = group.rewards[n] - group.rewards[own].mean()
    return result


def _leave_one_out(group: Group) -> list[np.ndarray]:
    size = len(group.rows)
    others = [(group.rewards.sum() - reward) / (size - 1) if size > 1 else reward for reward in group.rewards]
    return _on_rows(group, group.rewards - np.array(others))


def _on_rows(group: Group, values: np.ndarray) -> list[np.ndarray]:
    return [np.full(len(ids), value) for ids, value in zip(group.ids, values, strict=True)]


CREDIT: dict[str, Callable[[Group], list[np.ndarray]]] = {
    "grpo": lambda group: _on_rows(group, z_scores(group.rewards)),
    "dr_grpo": lambda group: _on_rows(group, group.rewards - group.rewards.mean()),
    "rloo": _leave_one_out,
    "siblings": _changes,
    "turns": _turns,
    "tree_path_mean": _path_means,
    "inter_intra": _inter_intra,
    "treerl": _treerl,
    "value_steps": _without_sure_tokens,
    "node_value": _node_value,
}


OF_ROLLOUTS = ("grpo", "dr_grpo", "rloo", "batch")


def advantages_of(rows: Rows, method: str) -> list[np.ndarray]:
    """The advantages of each row's tokens; all groups of an iteration together."""
    if method in OF_ROLLOUTS and len(first := {(row.group, row.rollout): row for row in reversed(rows)}) < len(rows):
        values = {
            key: float(own[0]) for key, own in zip(first, advantages_of(list(first.values()), method), strict=True)
        }
        return [np.full(len(row), values[row.group, row.rollout]) for row in rows]
    groups: dict[object, list[int]] = defaultdict(list)
    for n, row in enumerate(rows):
        groups[row.group].append(n)
    result: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for members in groups.values():
        credit = CREDIT["dr_grpo" if method == "batch" else method]
        for n, values in zip(members, credit(Group([rows[n] for n in members])), strict=True):
            result[n] = values
    if method == "batch":
        rewards = np.array([float(row.reward or 0.0) for row in rows])
        deviation = rewards.std(ddof=1) if len(rows) > 1 else 0.0
        result = [values / (deviation + 1e-4) for values in result]
    return [np.where(np.abs(values) < 1e-9, 0.0, values) for values in result]
