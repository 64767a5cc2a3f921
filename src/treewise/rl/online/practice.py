"""The trees of an iteration, wave by wave, as the curriculum asks for them: refills, and what is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treewise.rl.branching import Branch, RolloutTree
from treewise.rl.branching.protocol import Signals
from treewise.rl.curriculum import Outcome, TaskSampler
from treewise.rl.node_values import node_values
from treewise.rl.online.sampling import GrowingTree, Rounds, grow_trees
from treewise.rl.success_book import SuccessBook

# New trees of items, from their indices, the number of the first tree, and the generated tokens that each may spend.
NewTrees = Callable[[Sequence[int], int, Sequence[int]], list[GrowingTree]]


@dataclass(slots=True)
class Practised:
    """What an iteration has grown.

    trees: all, in the order of their draw. indices: their items. waves: in which each was drawn. kept: positions in
    `trees` of those that are trained. extra_budget: generated tokens that refills may spend beyond the iteration's.
    angles: concentration of each tree's prompt, where the curriculum measures it.
    """

    trees: list[GrowingTree] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    waves: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    extra_budget: int = 0
    angles: list[float] = field(default_factory=list)

    def add(self, trees: Sequence[GrowingTree], indices: Sequence[int], wave: int) -> list[int]:
        """Appends the trees of a wave; their positions."""
        first = len(self.trees)
        self.trees += trees
        self.indices += indices
        self.waves += [wave] * len(trees)
        return list(range(first, len(self.trees)))

    def figures(self) -> dict[str, float]:
        """What is logged: trees that were drawn, trained, and refilled, where there were any."""
        num_refilled = float(sum(wave > 0 for wave in self.waves))
        shown = {"refilled_trees": num_refilled} if num_refilled else {}
        if len(self.kept) < len(self.trees):
            shown |= {"drawn_trees": float(len(self.trees)), "kept_trees": float(len(self.kept))}
        return shown

    def outcomes(self, book: SuccessBook, success_at: float) -> list[Outcome]:
        """What came of all trees so far. book: before it observes them."""
        pairs = zip(self.trees, self.indices, strict=True)
        found = [outcome_of(tree, index, book, success_at) for tree, index in pairs]
        if not self.angles:
            return found
        return [replace(each, angle=angle) for each, angle in zip(found, self.angles, strict=True)]


@dataclass(frozen=True, slots=True)
class FixedRollouts:
    """A branching policy of one round: so many rollouts from the prompt, whatever they cost."""

    rollouts: int
    settings: Any = None

    def next_requests(self, tree: RolloutTree, *_: Signals | int | np.random.Generator) -> list[Branch]:
        return [] if len(tree) else [Branch(count=self.rollouts)]


def practise(
    sampler: TaskSampler, count: int, budget: int, new_trees: NewTrees, rounds: Rounds, at: float
) -> Practised:
    """Draws and grows the trees of an iteration.

    Parameters:
        count: trees to train. budget: generated tokens of all first trees together; a refilled tree may spend the share
            of one more tree each.
        at: rewards from here on are successes.
    """
    done = Practised()
    indices = sampler.draw(count, rounds.book)
    shares = _shares(budget, len(indices))
    wave = 0
    while indices:
        trees = new_trees(indices, len(done.trees), shares)
        grow_trees(trees, rounds)
        positions = done.add(trees, indices, wave)
        done.extra_budget += sum(shares) if wave else 0
        outcomes = done.outcomes(rounds.book, at)
        done.kept += [position for position in positions if sampler.is_kept(outcomes[position])]
        missing, wave = count - len(done.kept), wave + 1
        indices = sampler.refill(missing, rounds.book) if missing > 0 else []
        shares = [max(1, budget // count)] * len(indices)
    return done


def outcome_of(tree: GrowingTree, index: int, book: SuccessBook, success_at: float) -> Outcome:
    """What came of a tree. book: before it observes it."""
    found = [tree.tree[leaf].reward for leaf in tree.tree.rewarded_leaves]
    rewards = tuple(float(reward) for reward in found if reward is not None)
    prompt = node_values(tree.tree, success_at)[0]
    return Outcome(
        index=index,
        predicted=book.success(tree.key),
        rewards=rewards,
        success=prompt.value,
        trials=prompt.num_draws,
        num_successes=sum(reward >= success_at for reward in rewards),
    )


def _shares(budget: int, count: int) -> list[int]:
    """A budget divided evenly."""
    share, more = divmod(budget, max(count, 1))
    return [share + (number < more) for number in range(count)]
