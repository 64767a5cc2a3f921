"""Rollout trees grown by branching policies from a toy sampler, whose tokens are a function of the request alone."""

from dataclasses import dataclass

import numpy as np

from treewise.rl.branching import Branch, Branching, RolloutNode, RolloutTree, Signals

VOCABULARY = 6


@dataclass(frozen=True)
class ToySampler:
    """Completions of `num_turns` turns of 1 to 4 tokens, each but the last answered by one observation token (99); the
    reward is 1 where the sum of the tokens is even, but with `constant` that number.
    """

    seed: int = 0
    num_turns: int = 3
    with_top: bool = False
    constant: float | None = None

    def complete(self, tree: RolloutTree, branch: Branch, number: int) -> RolloutNode:
        rng = np.random.default_rng([self.seed, len(tree), number])
        before = sum(
            int((tree[node].turn_ends <= end).sum()) for node, end in tree.path_parts(branch.node, branch.position)
        )
        ids: list[int] = [] if branch.first_token is None else [branch.first_token]
        sampled, ends = [True] * len(ids), []
        for turn in range(before, self.num_turns):
            tokens = rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist()
            ids += tokens
            sampled += [True] * len(tokens)
            if turn + 1 < self.num_turns:
                ids.append(99)
                sampled.append(False)
            ends.append(len(ids))
        finish: str | None = "stop"
        if branch.max_tokens is not None and len(ids) > branch.max_tokens:
            ids, sampled, finish = ids[: branch.max_tokens], sampled[: branch.max_tokens], None
            ends = [end for end in ends if end <= len(ids)]
        logprobs = np.where(sampled, -rng.exponential(size=len(ids)), 0)
        options = {}
        if self.with_top:
            top = np.tile(np.arange(VOCABULARY), (len(ids), 1))
            options = {"top_ids": top, "top_logprobs": np.full(top.shape, -np.log(VOCABULARY))}
        node = RolloutNode(
            ids,
            logprobs,
            parent=branch.node,
            cut=branch.position,
            is_sampled=sampled,
            entropies=np.where(sampled, rng.random(len(ids)), 0),
            turn_ends=ends,
            finish=finish,
            **options,
        )
        return node

    def reward(self, tree: RolloutTree, index: int) -> float:
        return float(tree.path(index, "token_ids").sum() % 2 == 0) if self.constant is None else self.constant


def facts(tree: RolloutTree) -> list[object]:
    """Every bit of a tree."""
    values = [getattr(node, name) for node in tree.nodes for name in RolloutNode.__slots__]
    return [(each.dtype, each.tobytes()) if isinstance(each, np.ndarray) else each for each in values]


def grow(
    branching: Branching,
    budget: int,
    sampler: ToySampler,
    rng: np.random.Generator,
    signals: Signals | None = None,
    max_rounds: int = 200,
) -> tuple[RolloutTree, list[list[Branch]]]:
    """The loop that an online trainer has around a policy: rounds until the budget of generated tokens is spent."""
    tree, rounds = RolloutTree([1, 2, 3], group="task"), []
    for _ in range(max_rounds):
        left = budget - tree.num_sampled_tokens
        requests = branching.next_requests(tree, signals or Signals(), left, rng)
        if not requests:
            return tree, rounds
        rounds.append(requests)
        made = [sampler.complete(tree, branch, number) for branch in requests for number in range(branch.count)]
        for node in made:
            index = tree.add(node)
            if node.has_ended:
                tree.judge(index, sampler.reward(tree, index))
    raise AssertionError("the budget is not spent")
