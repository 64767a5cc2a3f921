"""The mean of a gradient over all rollouts that can be drawn, against the exact gradient of the expected reward."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treewise as tw
from treewise.advantages import leave_one_out, sibling_relative
from treewise.rl.branching import PROMPT, RolloutNode, RolloutTree

ROOT = Path(__file__).parents[2]
LENGTH, WIDTH = 3, 2
SEQUENCES = list(itertools.product(range(WIDTH), repeat=LENGTH))
STATES = {prefix: n for n, prefix in enumerate(p for d in range(LENGTH) for p in itertools.product(range(2), repeat=d))}
OBJECTIVE = tw.PolicyGradient(
    surrogate="reinforce", weighting="per_rollout", normalization="rollout_sum", constant=1.0, usual_advantages="rloo"
)
Cuts = list[tuple[int, int]]


class Policy:
    """A free distribution after every prefix, and a reward for every sequence."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.probability = rng.dirichlet(np.ones(WIDTH), len(STATES))
        self.reward = dict(zip(SEQUENCES, rng.integers(0, 2, len(SEQUENCES)) + rng.random(len(SEQUENCES)), strict=True))

    def probability_of(self, sequence: tuple[int, ...], start: int = 0) -> float:
        places = range(start, len(sequence))
        return float(np.prod([self.probability[STATES[sequence[:t]], sequence[t]] for t in places]))

    def slope(self, sequence: tuple[int, ...], credit: np.ndarray) -> np.ndarray:
        """[states, V] derivative of the sum of `credit log p` with respect to the logits of each state."""
        found = np.zeros_like(self.probability)
        for t, token in enumerate(sequence):
            state = STATES[sequence[:t]]
            found[state] -= credit[t] * self.probability[state]
            found[state, token] += credit[t]
        return found

    def gradient(self) -> np.ndarray:
        ones = np.ones(LENGTH)
        return sum(self.probability_of(s) * self.reward[s] * self.slope(s, ones) for s in SEQUENCES)

    def trees(self, cuts_of: Callable[[float], Cuts]) -> Iterator[tuple[float, RolloutTree]]:
        """All trees of two rollouts and the branches that `cuts_of` asks for, given the first one's reward, with their
        probabilities. A cut is (node, tokens of the path that are kept).
        """
        for first, second in itertools.product(SEQUENCES, repeat=2):
            cuts = cuts_of(self.reward[first])
            for ends in itertools.product(*(itertools.product(range(WIDTH), repeat=LENGTH - kept) for _, kept in cuts)):
                tree, paths, starts = RolloutTree([7], group="task"), [first, second], [0, 0]
                chance = self.probability_of(first) * self.probability_of(second)
                for (node, kept), end in zip(cuts, ends, strict=True):
                    paths.append((*paths[node][:kept], *end))
                    chance *= self.probability_of(paths[-1], kept)
                    starts.append(kept)
                parents = [(PROMPT, 0), (PROMPT, 0), *((node, kept - starts[node]) for node, kept in cuts)]
                for path, start, (parent, cut) in zip(paths, starts, parents, strict=True):
                    own = path[start:]
                    node = RolloutNode(own, np.zeros(len(own)), parent, cut, finish="stop", reward=self.reward[path])
                    tree.add(node)
                yield chance, tree

    def expected(self, cuts_of: Callable[[float], Cuts], method: Callable[..., Any], **settings: Any) -> np.ndarray:
        """The mean of the gradient that the objective gives, over all trees."""
        total, chances = np.zeros_like(self.probability), 0.0
        for chance, tree in self.trees(cuts_of):
            items = method(tree.trajectories(), **settings).trajectories
            for item, credit in zip(items, coefficients(items), strict=True):
                total += chance * self.slope(tuple(item.token_ids[1:].tolist()), credit)
            chances += chance
        assert chances == pytest.approx(1)
        return total


def coefficients(items: list[tw.Trajectory]) -> list[np.ndarray]:
    """What the objective multiplies the gradient of each row's log-probs with, per sampled token."""
    found = []
    for item in items:  # a separable loss: rows alone give what they give together
        forest = tw.Forest.from_trajectories([item])
        terms = OBJECTIVE.terms(forest)
        streams = {name: torch.as_tensor(stream) for name, stream in terms.streams.items()}
        logprobs = torch.zeros(len(terms.positions), dtype=torch.float64, requires_grad=True)
        (OBJECTIVE.token_losses({"log_probs": logprobs}, streams).sum() / len(items)).backward()
        assert logprobs.grad is not None
        found.append(-logprobs.grad.numpy())
    return found


def independent(_reward: float) -> Cuts:
    return []


def fixed(_reward: float) -> Cuts:
    return [(0, 1), (2, 2)]


def where_it_failed(reward: float) -> Cuts:
    return [(0, 1)] if reward < 1 else []


@pytest.mark.parametrize("baseline", ["others", "elsewhere"])
def test_the_mean_of_other_draws_is_an_unbiased_baseline(baseline: str) -> None:
    policy = Policy(1)
    assert policy.expected(fixed, sibling_relative, baseline=baseline) == pytest.approx(policy.gradient(), abs=1e-6)


def test_of_independent_rollouts_it_is_leave_one_out() -> None:
    policy = Policy(0)
    exact = policy.gradient()
    assert policy.expected(independent, leave_one_out) == pytest.approx(exact, abs=1e-6)
    for _, tree in policy.trees(independent):
        rows = tree.trajectories()
        wanted = leave_one_out(rows).trajectories
        for baseline in ("others", "elsewhere"):
            for mine, other in zip(sibling_relative(rows, baseline=baseline).trajectories, wanted, strict=True):
                assert mine.advantages[1:] == pytest.approx(other.advantages[1:], abs=1e-6)


@pytest.mark.parametrize(
    ("cuts_of", "baseline"), [(fixed, "fork"), (where_it_failed, "others")], ids=["its own value", "outcomes decide"]
)
def test_what_biases_it(cuts_of: Callable[[float], Cuts], baseline: str) -> None:
    policy = Policy(0)
    found, exact = policy.expected(cuts_of, sibling_relative, baseline=baseline), policy.gradient()
    scale = (found * exact).sum() / (exact**2).sum()
    assert np.linalg.norm(found - scale * exact) / np.linalg.norm(scale * exact) > 0.01  # its direction is off


def test_the_benchmarks_exact_gradient() -> None:
    """By enumeration, and the benchmark's trees and estimates against it."""
    tabular = benchmark("tabular_policy")
    for settings in ({}, {"hard": (1,)}, {"with_last_token": True}):
        game = tabular.new_game(2, 0.4, step_tokens=2, vocabulary=3, **settings)
        ids = np.array(list(itertools.product(range(3), repeat=4)))
        states, places = game.states(ids), np.arange(4)
        chances = np.exp(game.logprobs[places, states[:, :-1], ids].sum(1))
        rewards = game.rewards[states[:, -1]]
        assert chances @ rewards == pytest.approx(game.success) == pytest.approx(0.4)
        exact = np.zeros_like(game.logits)
        for sequence, state, weight in zip(ids, states, chances * rewards, strict=True):
            for t, token in enumerate(sequence):
                exact[t, state[t], token] += weight
                exact[t, state[t]] -= weight * np.exp(game.logprobs[t, state[t]])
        assert game.gradient() == pytest.approx(exact, abs=1e-12)


def benchmark(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
