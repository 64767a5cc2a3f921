"""Strategies for hypothesis that all equivalence tests share: random trajectories, forests, declared trees, budgets.

Trees have forks, trajectories contained in others, duplicates and several roots; every stream is random, so that two
branches through one token disagree about it.
"""

import numpy as np

from treewise.errors import ConfigError, pip_install
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ConfigError(f"random trees need the hypothesis package: {pip_install('hypothesis')}") from error

MAX_SEED = 2**32 - 1


@st.composite
def token_lists(
    draw: st.DrawFn, max_sequences: int = 8, max_new_tokens: int = 12, vocab_size: int = 3
) -> list[list[int]]:
    """Token sequences of at least two tokens, most of which continue, contain or repeat an earlier one.

    Raise `vocab_size` to a model's for equivalence tests; the small default makes tokens meet by chance too.
    """
    token = st.integers(0, vocab_size - 1)
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_sequences))):
        shared: list[int] = []
        if sequences and draw(st.integers(0, 3)) > 0:
            before = sequences[draw(st.integers(0, len(sequences) - 1))]
            shared = before[: draw(st.integers(0, len(before)))]
        new = draw(st.lists(token, min_size=max(0, 2 - len(shared)), max_size=max_new_tokens))
        sequences.append(shared + new)
    return sequences


@st.composite
def trajectories(
    draw: st.DrawFn, max_sequences: int = 8, max_new_tokens: int = 12, vocab_size: int = 3
) -> list[Trajectory]:
    """Trajectories with random weights (some zero), advantages, old and reference log-probs, groups and rewards.

    Parameters as of `token_lists`.
    """
    sequences = draw(token_lists(max_sequences, max_new_tokens, vocab_size))
    rng = np.random.default_rng(draw(st.integers(0, MAX_SEED)))
    return [_with_streams(sequence, rng, index) for index, sequence in enumerate(sequences)]


@st.composite
def forests(
    draw: st.DrawFn, max_forests: int = 2, max_sequences: int = 8, max_new_tokens: int = 12, vocab_size: int = 3
) -> Forest:
    """A forest from trajectories, or several such forests side by side. Other parameters as of `token_lists`."""
    items = trajectories(max_sequences, max_new_tokens, vocab_size)
    num_forests = draw(st.integers(1, max_forests))
    return Forest.concatenate([Forest.from_trajectories(draw(items)) for _ in range(num_forests)])


@st.composite
def forests_and_budgets(
    draw: st.DrawFn, max_forests: int = 2, max_sequences: int = 8, max_new_tokens: int = 12, vocab_size: int = 3
) -> tuple[Forest, int]:
    """A forest, and a budget between one token and a little more than all of it. Parameters as of `forests`."""
    forest = draw(forests(max_forests, max_sequences, max_new_tokens, vocab_size))
    return forest, draw(budgets(forest))


def budgets(forest: Forest) -> "st.SearchStrategy[int]":
    """A budget between one token and one more than all of the forest."""
    return st.integers(1, forest.num_tokens + 1)


@st.composite
def declared_nodes(draw: st.DrawFn, max_nodes: int = 20, max_tokens: int = 4) -> tuple[list[int], list[list[int]]]:
    """Parents (some -1) and tokens of declared nodes; every root has at least two tokens."""
    num_nodes = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(-1 if draw(st.booleans()) else 0, node - 1)) for node in range(1, num_nodes)]
    rng = np.random.default_rng(draw(st.integers(0, MAX_SEED)))
    sizes = rng.integers(1, max_tokens + 1, num_nodes) + np.array([above < 0 for above in parents])
    return parents, [rng.integers(0, 3, size).tolist() for size in sizes]


def random_tree(rng: np.random.Generator, num_nodes: int, max_tokens: int) -> Forest:
    """A declared tree that is bushy, deep, a comb or a star, for loops that want many trees quickly."""
    shape = rng.choice(["bushy", "deep", "comb", "star"])
    parents = [-1]
    for node in range(1, num_nodes):
        reach = {"bushy": node, "deep": int(rng.integers(1, 5)), "comb": 1 if rng.random() < 0.6 else node}
        parents.append(0 if shape == "star" else int(rng.integers(max(node - reach[shape], 0), node)))
    token_ids = [[node] * int(rng.integers(1, max_tokens + 1)) for node in range(num_nodes)]
    token_ids[0] = [0] * max(2, len(token_ids[0]))
    return Forest.from_nodes(parents, token_ids, merge_siblings=False)


def _with_streams(token_ids: list[int], rng: np.random.Generator, index: int) -> Trajectory:
    length = len(token_ids)
    weights = rng.choice([0.0, 0.5, 1.0, 2.0], length)
    weights[0], weights[-1] = 0.0, 1.0
    return Trajectory(
        token_ids,
        loss_weights=weights,
        advantages=rng.normal(size=length),
        old_logprobs=-rng.exponential(size=length),
        ref_logprobs=-rng.exponential(size=length),
        group=f"group {index % 2}",
        reward=float(rng.normal()),
        source=f"random:{index + 1}",
    )
