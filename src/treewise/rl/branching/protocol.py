"""What a branching policy is given and what it asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treewise.errors import ConfigError
from treewise.rl.branching.rollout_node import PROMPT
from treewise.rl.branching.rollout_tree import RolloutTree

# A policy: tree so far, signals, its settings, a random generator -> requests of the next round.
Rule = Callable[[RolloutTree, "Signals", Any, np.random.Generator], list["Branch"]]


@dataclass(frozen=True, slots=True)
class Branch:
    """A request: continue after the first `position` own tokens of `node` (`PROMPT`, 0: from the prompt).

    count: independent continuations.
    first_token, first_logprob: their first token where the policy drew it already, from the candidates that the sampler
        recorded at this position, and the log-prob of that draw. It is generated, but not by the sampler. None: the
        sampler draws it.
    max_tokens: the most tokens to generate before the node is left unfinished; None for no limit but the loop's own.
    """

    node: int = PROMPT
    position: int = 0
    count: int = 1
    first_token: int | None = None
    first_logprob: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known besides the tree.

    success: predicted probability of success of the task, in 0..1 (`SuccessBook`).
    node_success: the same for branch points that are known better, by (node, position).
    expected_tokens: tokens that a rollout of the task generates; used until the tree has rollouts of its own.
    longest_tokens: the most that one may generate. budget_left: generated tokens that the tree may still take.
    """

    success: float = 0.5
    node_success: Mapping[tuple[int, int], float] = field(default_factory=dict)
    expected_tokens: float | None = None
    longest_tokens: int | None = None
    budget_left: int | None = None

    def __post_init__(self) -> None:
        for value in (self.success, *self.node_success.values()):
            if not 0 <= value <= 1:
                raise ConfigError(f"a probability of success is {value}; it must lie in 0..1.")

    def success_at(self, node: int, position: int) -> float:
        """The prediction at a branch point; the task's where the point is not known."""
        return self.node_success.get((node, position), self.success)


def require(condition: bool, message: str) -> None:
    """Raises `ConfigError` where a setting is out of range."""
    if not condition:
        raise ConfigError(message)


def within_budget(branches: Sequence[Branch], tree: RolloutTree, signals: Signals, budget_left: int) -> list[Branch]:
    """The first branches whose expected tokens fit what is left, at least one continuation; a path that was begun and
    has not ended goes on in any case, where its longest end is known.

    A continuation is expected to generate the mean length of the rollouts that ended so far, less what is generated
    before its position. So all policies spend a budget alike: rounds go on while any of it is left, and the last one
    passes it by about one rollout at most.
    """
    lengths = [tree.num_sampled_before(leaf, len(tree[leaf])) for leaf in tree.leaves]
    typical = float(np.mean(lengths)) if lengths else signals.expected_tokens
    affordable: list[Branch] = []
    left, is_full = float(budget_left), budget_left <= 0
    for branch in branches:
        goes_on = signals.longest_tokens is not None and branch.node in open_ends(tree)
        least = int(goes_on or not (affordable or is_full))
        if typical is None or is_full:
            count = least if is_full else branch.count
            affordable += [replace(branch, count=count)] if count else []
            continue
        cost = max(1.0, typical - tree.num_sampled_before(branch.node, branch.position))
        if branch.max_tokens is not None:
            cost = min(cost, branch.max_tokens)
        count = min(branch.count, max(int(left // cost), least))
        if count:
            affordable.append(replace(branch, count=count))
        left -= cost * count
        is_full = count < branch.count
    return affordable


def open_ends(tree: RolloutTree) -> list[int]:
    """Nodes that were left unfinished and that nothing continues yet."""
    return [index for index, node in enumerate(tree.nodes) if not node.has_ended and not tree.children(index)]
