"""The trees that the benchmark measures: shapes of real training, filled with random tokens from fixed seeds.

Tokens do not change what a step costs, so random ones of a recorded shape are as good as text and need no file. Each
workload exists in three sizes: `tiny` for tests, `cpu` for a small model on two cores, `full` for a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treewise.errors import ConfigError
from treewise.tree.trajectory import Trajectory

SIZES = ("tiny", "cpu", "full")
FIRST_TOKEN = 3  # below are padding and the like in most vocabularies

Build = Callable[..., list[Trajectory]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Trajectories to train on, and the budgets at which treewise cuts them unless others are given."""

    name: str
    trajectories: Sequence[Trajectory]
    max_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A generator with its arguments in each size. budgets: those of each size, where they are part of the kind."""

    summary: str
    build: Build
    sizes: dict[str, dict[str, Any]]
    budgets: dict[str, tuple[int, ...]] = field(default_factory=dict)


def make(name: str, size: str, vocabulary: int, seed: int = 0) -> Workload:
    """One workload; the same at every call.

    Raises:
        ConfigError: an unknown name or size.
    """
    if name not in KINDS:
        raise ConfigError(f"workload {name!r} is unknown; choose one of {', '.join(KINDS)}.")
    if size not in SIZES:
        raise ConfigError(f"size {size!r} is unknown; choose one of {', '.join(SIZES)}.")
    kind = KINDS[name]
    items = kind.build(Tokens(vocabulary, seed), **kind.sizes[size])
    return Workload(name, items, kind.budgets.get(size, ()))


class Tokens:
    """Random tokens and choices."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary, self.rng = vocabulary, np.random.default_rng(seed)

    def __call__(self, count: int) -> np.ndarray:
        """[count] int64."""
        return self.rng.integers(FIRST_TOKEN, self.vocabulary, count)


def group(tokens: Tokens, num_samples: int, prompt: int, shortest: int, longest: int) -> list[Trajectory]:
    """Samples of one prompt, as GRPO trains on them."""
    shared = tokens(prompt)
    lengths = tokens.rng.integers(shortest, longest + 1, num_samples).tolist()
    return [_trained_end(shared, tokens(length)) for length in lengths]


def caterpillar(
    tokens: Tokens,
    num_turns: int,
    system: int,
    think: int,
    answer: int,
    feedback: int,
    num_samples: int = 1,
    thinks: float = 1.0,
) -> list[Trajectory]:
    """Agents whose thinking is dropped from later context: one trajectory a turn, which trains thinking and answer.

    A long spine of answers and feedback, and at each turn a branch with the thinking of that turn. thinks: the
    probability that a turn has thinking; a turn without is contained in the next one.
    """
    prompt, items = tokens(system), []
    for _ in range(num_samples):
        context = prompt
        for _ in range(num_turns):
            text = tokens(answer)
            thought = tokens(think if tokens.rng.random() < thinks else 0)
            items.append(_trained_end(context, np.concatenate([thought, text])))
            context = np.concatenate([context, text, tokens(feedback)])
    return items


def search(tokens: Tokens, prompt: int, num_states: int, state: int, max_depth: int) -> list[Trajectory]:
    """A depth-first search: every state that it visits is a trajectory, so most are contained in another."""
    paths = [tokens(prompt)]
    depth = [0]
    items: list[Trajectory] = []
    at = 0
    above = [-1]
    for _ in range(num_states):
        while depth[at] >= max_depth or (at > 0 and tokens.rng.random() < 0.35):
            at = above[at]  # a dead end: back up
        paths.append(np.concatenate([paths[at], tokens(state)]))
        depth.append(depth[at] + 1)
        above.append(at)
        at = len(paths) - 1
        items.append(_trained_end(paths[0], paths[at][len(paths[0]) :]))
    return items


def nested(tokens: Tokens, lengths: Sequence[int], forks: Sequence[int]) -> list[Trajectory]:
    """Prefixes within prefixes: `forks[i]` branches of `lengths[i + 1]` tokens leave each one of `lengths[i]`."""
    level = [tokens(lengths[0])]
    for length, count in zip(lengths[1:], forks, strict=True):
        level = [np.concatenate([above, tokens(length)]) for above in level for _ in range(count)]
    return [_trained_end(each[: lengths[0]], each[lengths[0] :]) for each in level]


def alone(tokens: Tokens, num_samples: int, shortest: int, longest: int) -> list[Trajectory]:
    """Samples that share nothing."""
    lengths = tokens.rng.integers(shortest, longest + 1, num_samples).tolist()
    return [Trajectory(tokens(length)) for length in lengths]


def _trained_end(context: np.ndarray, trained: np.ndarray) -> Trajectory:
    weights = np.repeat([0.0, 1.0], [len(context), len(trained)])
    return Trajectory(np.concatenate([context, trained]), weights)


def _sizes(tiny: dict[str, Any], cpu: dict[str, Any], full: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    return {"tiny": tiny, "cpu": cpu, "full": cpu if full is None else full}


_STRIPPED = {"think": 3, "answer": 2, "feedback": 2}

KINDS: dict[str, Kind] = {
    "grpo": Kind(
        "8 samples of a prompt of 512 tokens",
        group,
        _sizes(
            {"num_samples": 8, "prompt": 24, "shortest": 4, "longest": 8},
            {"num_samples": 8, "prompt": 512, "shortest": 64, "longest": 128},
            {"num_samples": 8, "prompt": 512, "shortest": 512, "longest": 1024},
        ),
    ),
    "turns-40": Kind(
        "an agent of 40 turns whose thinking is dropped from later context",
        caterpillar,
        _sizes(
            {"num_turns": 6, "system": 8, **_STRIPPED},
            {"num_turns": 40, "system": 80, "think": 18, "answer": 6, "feedback": 3},
            {"num_turns": 40, "system": 1000, "think": 200, "answer": 80, "feedback": 120},
        ),
    ),
    "turns-100": Kind(
        "the same over 100 turns",
        caterpillar,
        _sizes(
            {"num_turns": 9, "system": 8, **_STRIPPED},
            {"num_turns": 100, "system": 48, "think": 6, "answer": 1, "feedback": 1},
            {"num_turns": 100, "system": 1000, "think": 100, "answer": 40, "feedback": 40},
        ),
    ),
    "search": Kind(
        "a deep depth-first search, of which every state is a trajectory",
        search,
        _sizes(
            {"prompt": 10, "num_states": 12, "state": 3, "max_depth": 5},
            {"prompt": 120, "num_states": 48, "state": 8, "max_depth": 24},
            {"prompt": 1000, "num_states": 160, "state": 60, "max_depth": 40},
        ),
    ),
    "no-sharing": Kind(
        "samples that share nothing, which must cost no more than flat",
        alone,
        _sizes(
            {"num_samples": 3, "shortest": 8, "longest": 16},
            {"num_samples": 8, "shortest": 128, "longest": 512},
            {"num_samples": 16, "shortest": 512, "longest": 4096},
        ),
    ),
    "ratio-6.5": Kind(
        "prefixes within prefixes at a share ratio of 6.5, as Tree Training (arXiv 2511.00413) reports it",
        nested,
        _sizes(
            {"lengths": (40, 12, 3), "forks": (4, 4)},
            {"lengths": (324, 97, 24), "forks": (4, 4)},
            {"lengths": (5000, 1500, 370), "forks": (4, 4)},
        ),
    ),
    "164k-83k": Kind(
        "164k flat and 83k tree tokens at a budget (arXiv 2511.00413); smaller in the same proportions on a CPU",
        nested,
        _sizes(
            {"lengths": (29, 22), "forks": (8,)},
            {"lengths": (289, 223), "forks": (8,)},
            {"lengths": (11_571, 8_929), "forks": (8,)},
        ),
        {"tiny": (40,), "cpu": (410,), "full": (16_384,)},
    ),
    "tau2": Kind(
        "an agent behind a system prompt of 4.8k tokens, thinking dropped, 16k of context (as in arXiv 2602.00482)",
        caterpillar,
        _sizes(
            {"num_turns": 4, "system": 20, "think": 3, "answer": 2, "feedback": 2, "thinks": 0.7},
            {"num_turns": 20, "system": 240, "think": 15, "answer": 8, "feedback": 17, "thinks": 0.7},
            {"num_turns": 20, "system": 4_800, "think": 300, "answer": 160, "feedback": 340, "thinks": 0.7},
        ),
        {"tiny": (24,), "cpu": (256,), "full": (4_096, 16_384)},
    ),
}
