"""Signals of recorded trees, and the self-check on them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treewise.engine.engine import TreeEngine
from treewise.errors import DataError
from treewise.rl.curriculum.angles import angles_of
from treewise.rl.curriculum.gradient_norms import gradient_norms
from treewise.rl.curriculum.self_check import CheckReport, check_signals
from treewise.rl.success_book import BookSettings, SuccessBook
from treewise.tree.trajectory import Trajectory, number_rollouts

Tree = Sequence[Trajectory]
# The rows of one tree with everything that the objective needs.
Prepared = Callable[[list[Trajectory]], list[Trajectory]]


def prompt_of(tree: Tree) -> np.ndarray:
    """[n] int32, the tokens that come before anything is trained, or the first token where that is trained."""
    starts = [int(np.argmax(row.loss_weights > 0)) if row.num_trained_tokens else len(row) for row in tree]
    first = int(np.argmin(starts))
    ids: np.ndarray = tree[first].token_ids[: max(starts[first], 1)]
    return ids


def outcomes_of(tree: Tree, success_at: float) -> list[bool]:
    """Whether each rollout with a reward is a success."""
    numbers = number_rollouts(list(tree)).tolist()
    known = {number: row.reward for number, row in zip(numbers, tree, strict=True) if row.reward is not None}
    return [reward >= success_at for reward in known.values()]


def learnability_of(outcomes: Sequence[bool]) -> float:
    """p (1 - p) at the posterior mean of outcomes, from the book's prior."""
    book = SuccessBook(BookSettings())
    book.observe("tree", sum(outcomes), len(outcomes))
    return book.learnability("tree")


def learnabilities(trees: Sequence[Tree], success_at: float) -> np.ndarray:
    """[trees] float64.

    Raises:
        DataError: a tree without a reward; named.
    """
    found = []
    for number, tree in enumerate(trees):
        outcomes = outcomes_of(tree, success_at)
        if not outcomes:
            raise DataError(f"{tree[0].source or f'tree {number}'}: no reward, so its learnability is not known.")
        found.append(learnability_of(outcomes))
    return np.array(found)


def check_on_trees(
    trees: Sequence[Tree], engine: TreeEngine, objective: Any, prepared: Prepared, success_at: float = 0.5
) -> CheckReport:
    """Compares signals of recorded trees with what they claim to predict.

    Where all trees have several rollouts with rewards, those of even number are what is known, and those of odd number
    what comes; otherwise the only target is the gradient's norm over the whole tree, and the only signals are those of
    the prompt.

    Parameters:
        prepared: credits the rows of a tree, and fills in the log-probs that the objective needs.

    Raises:
        DataError: fewer than 3 trees.
    """
    has_outcomes = all(len(outcomes_of(tree, success_at)) >= 2 for tree in trees)
    halves = [_halves(tree) if has_outcomes else (list(tree), list(tree)) for tree in trees]
    angles = angles_of(engine, [prompt_of(tree) for tree in trees])
    signals = {"angle": angles.total, "intra": angles.intra, "inter": angles.inter}
    signals["length"] = np.array([float(len(prompt_of(tree))) for tree in trees])
    targets = {"gradient_norm": np.array(gradient_norms(engine, [prepared(own) for _, own in halves], objective))}
    if has_outcomes:
        known = [(outcomes_of(first, success_at), outcomes_of(second, success_at)) for first, second in halves]
        signals["learnability"] = np.array([learnability_of(first) for first, _ in known])
        targets["variance"] = np.array([np.var(second, ddof=1) if len(second) > 1 else 0.0 for _, second in known])
    return check_signals(
        signals,
        targets,
        num_rollouts=sum(len(set(number_rollouts(list(tree)).tolist())) for tree in trees),
        num_tokens=0,
        num_varied=sum(len({row.reward for row in tree}) > 1 for tree in trees),
    )


def _halves(tree: Tree) -> tuple[list[Trajectory], list[Trajectory]]:
    """The rows of rollouts of even and of odd number, among those with a reward."""
    numbers = number_rollouts(list(tree)).tolist()
    rewarded = list(dict.fromkeys(n for n, row in zip(numbers, tree, strict=True) if row.reward is not None))
    order = {number: index for index, number in enumerate(rewarded)}
    rows = [(order[number], row) for number, row in zip(numbers, tree, strict=True) if number in order]
    return [row for index, row in rows if index % 2 == 0], [row for index, row in rows if index % 2]
